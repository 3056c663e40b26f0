"""LeRobot's own training step on any of its policies: what the scripts ``lerobot_<family>.py`` here have in common.

Runs where LeRobot is installed (tried with 0.6.1), without vlaforge; see `bench/peer.py` for the protocol. The step is
`lerobot_train.update_policy` (forward, backward, clip, AdamW, zero_grad, `.item()` of loss and norm) under
`accelerate`, with the precision that `lerobot_train` derives from the policy's dtype. Where accelerate is not
installed, `Plain` does what it does on one CPU.
"""

import json
import sys
import time
from contextlib import nullcontext

import torch
from lerobot.scripts.lerobot_train import update_policy
from lerobot.utils.logging_utils import AverageMeter, MetricsTracker


class GivenNoise:
    """In place of the name `torch` in an official module: its generators hand out what was recorded."""

    def __init__(self):
        self.normal, self.uniform = [], []

    def __getattr__(self, name):
        return getattr(torch, name)

    def _normal(self, dtype):
        return self.normal.pop(0).to(dtype)

    def randn_like(self, like):
        return self._normal(like.dtype)

    def randn(self, *shape, dtype=torch.float32, **kwargs):
        return self._normal(dtype)

    def rand(self, *shape, dtype=torch.float32, **kwargs):
        return self.uniform.pop(0).to(dtype)


class Plain:
    """The part of `accelerate.Accelerator` that a step on one CPU comes down to."""

    def __init__(self, mixed_precision):
        self.low = mixed_precision == "bf16"

    def autocast(self):
        return torch.autocast("cpu", torch.bfloat16) if self.low else nullcontext()

    def prepare(self, *parts):
        return parts

    def unwrap_model(self, model, **kwargs):
        return model

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm_(self, parameters, norm):
        return torch.nn.utils.clip_grad_norm_(parameters, norm)


def accelerator(precision):
    try:
        from accelerate import Accelerator
    except ImportError:
        return Plain(precision)
    return Accelerator(step_scheduler_with_optimizer=False, mixed_precision=precision, cpu=True)


class Trainer:
    """One policy and its batches. Subclasses build both, and hand the recorded noise to the policy."""

    def __init__(self, job):
        torch.set_num_threads(job["threads"])
        torch.manual_seed(0)
        self.job = job
        policy = self.build_policy(job)
        self.accelerator = accelerator(self.precision(job))
        preset = policy.config.get_optimizer_preset()
        preset.lr, preset.weight_decay, preset.grad_clip_norm = job["lr"], job["weight_decay"], job["clip"]
        preset.betas = (0.9, 0.95)
        optimizer = preset.build(policy.get_optim_params())
        self.policy, self.optimizer = self.accelerator.prepare(policy, optimizer)
        self.model = self.inner(self.accelerator.unwrap_model(self.policy))
        self.batches = [self.read_batch(path, job) for path in job["batches"]]
        self.taken = 0
        meters = {name: AverageMeter(name, ":.3f") for name in ("loss", "grad_norm", "lr", "update_s")}
        self.metrics = MetricsTracker(1, 1, 1, meters, initial_step=0)

    def build_policy(self, job):
        """The policy with the job's weights."""
        raise NotImplementedError

    def precision(self, job):
        """Of accelerate's autocast: what `lerobot_train` takes from the policy's dtype."""
        return {"bfloat16": "bf16", "float32": "no"}[job["dtype"]]

    def inner(self, policy):
        """The module that draws the noise."""
        return policy.model

    def read_batch(self, path, job):
        """(what a LeRobot loader and its processor hand to the policy, what is drawn at random in the step)."""
        raise NotImplementedError

    def give(self, drawn):
        """Has the next forward draw these values."""
        raise NotImplementedError

    def step(self):
        batch, drawn = self.batches[self.taken % len(self.batches)]
        self.taken += 1
        self.give(drawn)
        self.metrics, _ = update_policy(
            self.metrics, self.policy, batch, self.optimizer, self.job["clip"], self.accelerator
        )
        return self.metrics.loss.val

    def run(self, steps):
        seconds, losses, spent = [], [], []
        for _ in range(steps):
            began, cpu = time.perf_counter(), time.process_time()
            losses.append(float(self.step()))
            seconds.append(time.perf_counter() - began)
            spent.append(time.process_time() - cpu)
        return {"seconds": seconds, "losses": losses, "cpu": spent}

    def options(self):
        """Settings of the policy that decide its speed, by name."""
        return {}

    def about(self):
        import lerobot
        import transformers

        dtypes = {}
        for parameter in self.policy.parameters():
            dtypes[str(parameter.dtype)] = dtypes.get(str(parameter.dtype), 0) + parameter.numel()
        return {
            "versions": {
                "torch": torch.__version__,
                "lerobot": lerobot.__version__,
                "transformers": transformers.__version__,
            },
            "parameters": dtypes,
            "optimizer": type(getattr(self.optimizer, "optimizer", self.optimizer)).__name__,
            **self.options(),
            "threads": torch.get_num_threads(),
        }

    def profile(self, path):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            self.step()
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60)
        with open(path, "w") as file:
            file.write(table)
        return {"path": path}


def main(trainer_class):
    """Reads the job named on the command line, then answers one line of standard input after another."""
    with open(sys.argv[1]) as file:
        job = json.load(file)
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever the libraries print must not look like an answer
    trainer = trainer_class(job)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "run":
            answer = trainer.run(int(rest))
        elif word == "profile":
            answer = trainer.profile(rest)
        else:
            answer = trainer.about()
        print(json.dumps(answer), file=answers, flush=True)
