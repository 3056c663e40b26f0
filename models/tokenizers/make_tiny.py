"""Makes `tiny.json`: the small byte-pair tokenizer that all tiny presets share. Run it again after a change here:

    python models/tokenizers/make_tiny.py

It is trained on sentences written below: prompts of π0.5's form with robot tasks in plain English, and all state bins,
so that each bin is one token. Any other text still encodes, byte by byte if need be. As in PaliGemma's tokenizer,
padding is 0 and <bos> is 2; neither is added by the file itself. The tokens with which Qwen's and Eagle's chat prompts
mark turns and images follow behind those.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 1024
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
CHAT = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
EAGLE = ["<img>", "</img>", "<IMG_CONTEXT>"]
VERBS = (
    "open", "close", "press", "push", "pull", "pick up", "put", "place", "turn", "move", "lift", "grasp", "stack",
    "pour", "wipe", "fold", "slide", "insert", "unplug", "reach", "take", "hold", "drop", "rotate", "hand over",
    "sweep",
)  # fmt: skip
THINGS = (
    "drawer", "door", "window", "button", "handle", "lever", "revolving joint", "knob", "faucet", "box", "lid", "cup",
    "bowl", "plate", "mug", "block", "cube", "ball", "peg", "bottle", "towel", "cloth", "spoon", "basket", "shelf",
    "cabinet", "stove", "microwave", "table", "tray", "book", "hammer", "nail", "hoop", "puck", "goal", "wall",
    "red block", "blue cube", "green bowl", "black cup", "white mug", "yellow ball",
)  # fmt: skip
WHERE = (
    "", " from the top", " from the side", " with the left arm", " with the right arm", " with the gripper",
    " with a revolving joint", " on the table", " in the drawer", " into the basket", " to the goal",
    " next to the plate", " behind the bowl", " to the left", " to the right", " in front of the box",
)  # fmt: skip


def corpus() -> Iterator[str]:
    """Every state bin several times, and every task sentence in the form of a prompt."""
    for start in range(-1, 256):
        numbers = " ".join(str((start + step + 1) % 257 - 1) for step in range(32))
        yield f"Task: move, State: {numbers};\nAction: "
    for verb, thing, where in product(VERBS, THINGS, WHERE):
        yield f"Task: {verb} the {thing}{where}, State: 0 128 255;\nAction: "


def make() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # A number keeps its blank, its sign and all its digits together, so that a state bin becomes one token.
    words = Regex(r" ?-?\d+| ?[A-Za-z']+|\s|[^\sA-Za-z\d]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*SPECIAL, *CHAT, *EAGLE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


if __name__ == "__main__":
    make().save(str(Path(__file__).with_name("tiny.json")))
