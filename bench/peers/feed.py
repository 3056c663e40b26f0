"""One side of ``forge-bench data``: feeds batches as fast as it can, and prints what that took, as one JSON line.

Runs by itself (``python feed.py '{"side": ..., ...}'``) so that each side has its own interpreter, and both are timed
by this same code. Only the side that is asked for is imported.

Work of a sample, on either side: the frame of every camera decoded, the state, a chunk of future actions with its
padding flags, and the task's text; collated into batches by a torch DataLoader with the given workers, shuffled.
"""

import json
import os
import sys
import time


def ours(job):
    """This project's reader behind this project's loader, which is a torch DataLoader over whole batches."""
    import numpy as np
    import torch

    from vlaforge.data.loader import build_loader
    from vlaforge.data.readers import open_dataset
    from vlaforge.data.schema import ACTION, ACTION_IS_PAD, IMAGES, STATE, Contract, DataNeeds, Field

    dataset = open_dataset(job["path"], video_backend=job["backend"])
    info, chunk = dataset.info, job["chunk"]
    fields = {
        STATE: Field((info.state_dim,), torch.float32, "S"),
        ACTION: Field((chunk, info.action_dim), torch.float32, "HA"),
        ACTION_IS_PAD: Field((chunk,), torch.bool, "H"),
    }
    for name, camera in info.cameras.items():
        fields[IMAGES + name] = Field((camera.height, camera.width, 3), torch.uint8, "HWC")

    class AsRead:
        """A processing that passes a sample on; the task becomes a number, which is all a tensor batch can hold."""

        def needs(self):
            return DataNeeds(action_offsets=tuple(range(chunk)))

        def sample(self, sample, rng, training):
            assert sample["task"]
            return {name: np.ascontiguousarray(sample[name]) for name in fields}

    context = "fork" if job["workers"] else None  # what LeRobot's DataLoader uses on Linux
    loader = build_loader(
        dataset,
        AsRead(),
        Contract(fields, {}),
        batch_size=job["batch"],
        num_workers=job["workers"],
        prefetch=job["prefetch"],
        multiprocessing_context=context,
        pin_memory=False,
    )
    versions = {"torch": torch.__version__, "decoder": f"{dataset.video.backend}" if dataset.video else "none"}
    return (minibatch.batch[STATE].shape[0] for minibatch in loader), versions


def lerobot(job):
    """LeRobotDataset behind a torch DataLoader."""
    import importlib.metadata

    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    with open(os.path.join(job["path"], "meta/info.json")) as file:
        fps = json.load(file)["fps"]
    options = {"video_backend": job["backend"]} if job["backend"] else {}
    dataset = LeRobotDataset(
        "local/bench", root=job["path"], delta_timestamps={"action": [i / fps for i in range(job["chunk"])]}, **options
    )
    sampler = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=1 << 30)
    more = {"prefetch_factor": job["prefetch"], "persistent_workers": True} if job["workers"] else {}
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=job["batch"], sampler=sampler, num_workers=job["workers"], pin_memory=False, **more
    )
    backend = getattr(dataset, "video_backend", None) or getattr(dataset, "_video_backend", None) or job["backend"]
    versions = {
        "torch": torch.__version__,
        "lerobot": importlib.metadata.version("lerobot"),
        "decoder": str(backend or "default"),
    }
    return (batch["observation.state"].shape[0] for batch in loader), versions


def cpu_seconds():
    """User and system time of this process and its living descendants so far."""
    tick, parents, used = os.sysconf("SC_CLK_TCK"), {}, {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    rest = file.read().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents[int(name)], used[int(name)] = int(rest[1]), (int(rest[11]) + int(rest[12])) / tick

    def inside(pid):
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return sum(seconds for pid, seconds in used.items() if inside(pid))


def main():
    job = json.loads(sys.argv[1])
    batches, versions = {"ours": ours, "lerobot": lerobot}[job["side"]](job)
    for _ in range(job["warmup"]):
        next(batches)
    began, cpu, samples = time.perf_counter(), cpu_seconds(), 0
    while time.perf_counter() - began < job["seconds"]:
        samples += next(batches)
    wall, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    print("FEED " + json.dumps({"samples": samples, "wall_s": wall, "cpu_s": cpu, "versions": versions}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # workers hold prefetched batches; nobody waits for them


if __name__ == "__main__":
    main()
