"""Acceptance on the reference pair: stories260k drafted by stories280k, 160 texts of 200 tokens at temperature 1.

    python -m benchmarks.acceptance [DEPTH ...]

For every depth and rule: accepted / drafted, acceptance at each depth, tokens per round. These depend only on the
overlap of the two models' distributions and not on the machine; no time is measured.
"""

import sys
from pathlib import Path

from benchmarks.markdown import show, show_header

from forerun import LLM, SamplingParams
from forerun.config import VERIFICATIONS

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
NUM_TEXTS, NUM_TOKENS = 160, 200


def main(depths: list[int]) -> None:
    params = [SamplingParams(seed=i, max_tokens=NUM_TOKENS, ignore_eos=True) for i in range(NUM_TEXTS)]
    show_header("verification", "depth", "accepted / drafted", "tokens per round", "acceptance at depth 1, 2, …")
    for verification in VERIFICATIONS:
        for depth in depths:
            llm = LLM(
                str(DATA / "stories260k"),
                f"model:{DATA / 'stories280k'}",
                verification=verification,
                max_num_seqs=32,
                threads=1,
            )
            llm.generate([[1]] * NUM_TEXTS, params, speculation=depth)
            stats = llm.stats
            at_depth = " ".join(f"{rate:.3f}" for rate in stats.acceptance_at_depth)
            show(verification, depth, f"{stats.acceptance_rate:.3f}", f"{stats.tokens_per_round:.3f}", at_depth)


if __name__ == "__main__":
    main([int(depth) for depth in sys.argv[1:]] or [1, 2, 3, 5, 8])
