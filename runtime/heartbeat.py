"""What the ranks of a job tell each other beside their collectives: how far they are, and who failed first.

It goes through the process group's store, so that it still works when a collective does not come back.
"""

from __future__ import annotations

import threading
import time
from typing import Any

BEAT_S = 1.0


class Heartbeat:
    """Writes (step, time) of this rank to the store every second, from a thread that a stalled step cannot hold up."""

    def __init__(self, store: Any, rank: int):
        self.store, self.rank, self.step = store, rank, 0
        self._since = time.time()
        self._shown = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        # At once: a rank that stops within its first second has joined, and is not to be taken for one that has not.
        if self._tell():
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * BEAT_S)

    def _run(self) -> None:
        while not self._ended.wait(BEAT_S):
            if not self._tell():
                return

    def _tell(self) -> bool:
        """Writes one beat; False when the store has gone."""
        if self.step != self._shown:
            self._shown, self._since = self.step, time.time()
        try:
            self.store.set(f"forge/beat/{self.rank}", f"{self.step} {self._since:.0f} {time.time():.0f}")
        except Exception:
            return False
        return True

    def first_of(self, event: str) -> bool:
        """Whether this is the first call for `event` among all ranks; True when the store has gone."""
        try:
            return self.store.add(f"forge/{event}", 1) == 1
        except Exception:
            return True

    def report(self, world: int) -> str:
        """One sentence about the ranks that are behind, or silent."""
        try:
            # `get` would wait for a rank that has not told anything yet.
            early = [rank for rank in range(world) if not self.store.check([f"forge/beat/{rank}"])]
            if early:
                return f"Rank {', '.join(map(str, early))} had only begun."
            told = {rank: self.store.get(f"forge/beat/{rank}").decode().split() for rank in range(world)}
        except Exception:
            return "Which rank failed is not known: the launcher's store has gone."
        steps = {rank: int(words[0]) for rank, words in told.items()}
        silent = [rank for rank, words in told.items() if time.time() - int(words[2]) > 5 * BEAT_S]
        behind = [rank for rank, step in steps.items() if step < max(steps.values())]
        if silent:
            return f"Rank {', '.join(map(str, silent))} no longer answers (its process has ended or is stopped)."
        if behind:
            rank = behind[0]
            waited = time.time() - int(told[rank][1])
            return (
                f"Rank {', '.join(map(str, behind))} stalls: it has been in step {steps[rank]} for {waited:.0f} s, the "
                f"others wait in step {max(steps.values())}."
            )
        return f"All ranks are in step {max(steps.values())}."
