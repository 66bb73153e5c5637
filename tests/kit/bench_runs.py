"""Finished runs of a benchmark, for tests of what is made of their figures."""

from forerun.bench.run import BenchRun


def run_of(depth: int, decode_s: float, num_busy: float | None) -> BenchRun:
    """A run of one answer of 8 tokens. `num_busy` is the number of cores that other programs used."""
    return BenchRun(
        depth=depth, repetition=0, num_tokens=8, num_decoded=7, num_passes=7, num_rounds=7, num_drafted=7,
        num_accepted=3, first_s=0.1, total_s=2.0, decode_s=decode_s, pass_s=0.5, draft_pass_s=0.1,
        offered_at_depth=(7,), accepted_at_depth=(3,), full_pass_s=0.1, full_draft_s=0.1, num_ngrams=1, num_distinct=1,
        answers=("a",), peak_bytes=None, num_busy=num_busy,
    )  # fmt: skip
