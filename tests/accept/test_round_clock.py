"""RoundClock on a GPU, by stand-ins for its events: times of a round that nothing else has waited for."""

import pytest
import torch

from forerun.accept.outcome import RoundClock


class WorkingEvent:
    """An event on a card that is still at work until somebody waits for it."""

    recorded = 0
    passed = 0

    def __init__(self, enable_timing: bool) -> None:
        self.number = 0

    def record(self, stream: object) -> None:
        WorkingEvent.recorded += 1
        self.number = WorkingEvent.recorded

    def synchronize(self) -> None:
        WorkingEvent.passed = max(WorkingEvent.passed, self.number)

    def elapsed_time(self, later: "WorkingEvent") -> float:
        if later.number > WorkingEvent.passed:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return 1000.0 * (later.number - self.number)


def test_times_of_a_round_without_a_verdict_wait_for_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that reads a piece of a prompt alone draws nothing, so nothing of it is fetched."""
    monkeypatch.setattr(torch.cuda, "Event", WorkingEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = RoundClock(torch.device("cuda", 0))
    clock.mark()
    clock.mark()
    draft_s, _, pass_s, verdict_s = clock.times(0.0)
    assert (draft_s, pass_s, verdict_s) == (1.0, 1.0, 0.0)
