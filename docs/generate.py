"""Writes docs/flags.md from the code: python docs/generate.py"""

from pathlib import Path

from vlaforge.runtime.args import TrainingArgs
from vlaforge.runtime.flags import markdown

HEAD = """# Flags of `forge-run`

Made from `runtime/args.py` by `make docs`; a test holds it to the code. Names and defaults are those of the public
LoongForge-Embodied manual where it has the flag. Each flag is also a field of the YAML section `train:`, under its
name with underscores.
"""

if __name__ == "__main__":
    Path(__file__).with_name("flags.md").write_text(markdown(TrainingArgs, HEAD), encoding="utf-8")
