"""The estimated duration of a proof is proportional to its work, and estimating it changes no result."""

from dataclasses import replace
from pathlib import Path

import pytest

from forerun.config import Speculation
from forerun.progress import rounded_duration
from forerun.prove.workload import ProofPace, ProofWorkload
from kit.unchecked import unchecked
from prove.tiny import tiny_llm


def test_more_work_takes_longer_in_proportion() -> None:
    pace, workload = ProofPace(token_s=0.01, text_s=0.001), ProofWorkload()
    base = pace.total_s(workload)
    equality = pace.total_s(replace(workload, max_tokens=2 * workload.max_tokens)) - base
    law = pace.total_s(replace(workload, num_texts=2 * workload.num_texts)) - base
    assert equality + law == pytest.approx(base)
    assert pace.total_s(workload.thorough()) == pytest.approx(8 * equality + 12 * law)


def test_the_pace_is_measured_by_the_clock(tmp_path: Path) -> None:
    llm, ticks = tiny_llm(tmp_path), iter([0.0, 9.0, 10.0, 18.0, 20.0, 20.0 + 4.0 * 16])
    with unchecked():
        pace = ProofPace.of(llm, [2, 3, 4], Speculation(2), lambda: next(ticks))
    assert pace.token_s == 1.0
    assert pace.text_s == 4.0 * 16 / llm.engine.scheduler.max_num_seqs
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.1, "5 seconds"), (43.0, "45 seconds"), (100.0, "2 minutes"), (7200.0, "2.0 hours")]
)
def test_durations_are_rounded(seconds: float, text: str) -> None:
    assert rounded_duration(seconds) == text
