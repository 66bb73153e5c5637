"""The parts of a round's time, on a GPU with fake events, and whether a graph was captured in the round."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from forerun.accept import outcome
from forerun.accept.outcome import RoundClock
from forerun.device import Captures


def test_the_parts_of_a_rounds_time_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([5.0, 5.25, 7.0, 7.5])
    monkeypatch.setattr(outcome, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    clock = RoundClock(torch.device("cpu"))
    clock.mark()
    clock.mark()
    assert clock.times(draft_pass_s=0.125) == (0.25, 0.125, 1.75, 0.5)


class Event:
    """A fake event of a GPU that works until the host waits for it."""

    places: Iterator[float] = iter(())  # ms
    passed = -1.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        self.place = next(Event.places)

    def synchronize(self) -> None:
        Event.passed = max(Event.passed, self.place)

    def elapsed_time(self, later: "Event") -> float:
        assert later.place <= Event.passed, "both events must be completed before their times are asked for"
        return later.place - self.place


def test_on_a_gpu_device_events_give_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls return at once. Device time after the drafter's calls counts as drafting, the rest until the verdict as the
    pass, also in a round that only reads a part of a prompt, of which nothing is fetched."""
    times = iter([1.0, 1.01, 1.02, 1.125])
    monkeypatch.setattr(outcome, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setattr(Event, "places", iter([0.0, 40.0, 100.0]))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = RoundClock(torch.device("cuda", 0))
    clock.mark()
    clock.mark()
    assert clock.times(draft_pass_s=0.005) == pytest.approx((0.04, 0.035, 0.06, 0.025))


def test_a_capture_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Captures, "num", 3)
    clock = RoundClock(torch.device("cpu"))
    assert not clock.captured
    monkeypatch.setattr(Captures, "num", 4)
    assert clock.captured
