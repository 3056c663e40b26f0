"""What ranks tell each other through the store of the process group."""

import time

import pytest
from torch.distributed import HashStore

from vlaforge.runtime import heartbeat
from vlaforge.runtime.heartbeat import Heartbeat


@pytest.fixture
def beat():
    store, begun = HashStore(), []

    def of(rank: int) -> Heartbeat:
        begun.append(Heartbeat(store, rank))
        return begun[-1]

    yield of
    for one in begun:
        one.stop()


def test_a_rank_is_known_from_its_first_moment(beat):
    first, second = beat(0), beat(1)
    first.start()
    assert first.report(2) == "Rank 1 had only begun."
    second.start()
    assert first.report(2) == "All ranks are in step 0."


def test_a_rank_that_went_silent(beat, monkeypatch):
    """Also when it was in its first second."""
    first, second = beat(0), beat(1)
    second.start()
    second.stop()
    later = time.time() + 6 * heartbeat.BEAT_S
    monkeypatch.setattr(heartbeat.time, "time", lambda: later)
    first.start()
    assert first.report(2) == "Rank 1 no longer answers (its process has ended or is stopped)."


def test_a_rank_that_is_behind(beat, monkeypatch):
    first, second = beat(0), beat(1)
    first.step, second.step = 7, 5
    begun = time.time()
    monkeypatch.setattr(heartbeat.time, "time", lambda: begun)
    second.start()
    monkeypatch.setattr(heartbeat.time, "time", lambda: round(begun) + 4 * heartbeat.BEAT_S)
    first.start()
    assert first.report(2).startswith("Rank 1 stalls: it has been in step 5 for 4 s")


def test_only_one_rank_is_the_first(beat):
    first, second = beat(0), beat(1)
    assert [first.first_of("failed"), second.first_of("failed"), first.first_of("failed")] == [True, False, False]
