"""A cascade of three model sizes and its two-level pairs: predicted and measured speed-ups.

    python -m benchmarks.cascades [--workload code] [--temperature 0] [--tokens 96] [--num-prompts 3] [--repeats 3]
                                   [--deepest 12] [--quantize int4]

The target has 0.51 B parameters, the judge 0.1 B (`stdlib-middle`), the first drafter 21 M (`stdlib-draft`); `--first`
names another first drafter, such as ngram. First every drafter drafts `--deepest` tokens on every prompt, which gives
acceptance by depth and the costs of passes and draft tokens. From these follow, for every depth k,

    pair:     S(k) = G(k) T(1) / (T(k + 1) + k c)
    cascade:  with the judge's G, and for c the cost of one of the judge's tokens: the minimum of (c1 + c0) / G01 over
              the inner lengths and of the judge without a first drafter

with G(k) = 1 + sum over j <= k of a_1 ... a_j, T(n) the target's pass over n tokens, c0 the time of the first drafter
for the inner draft, and c1 the judge's pass over that draft with its verification. Then each drafter runs at its best
depth by prediction, alternating with plain decoding, and both speed-ups are printed. The cascade chooses its inner
lengths as usual. The first round of an answer, in which drafters prefill the prompt, is not counted, since the formula
does not include prefill.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.drafters import Setting, TextOptions, verdict
from benchmarks.markdown import show, show_header, spread_cells
from benchmarks.options import option, options_of
from typing_extensions import override

from forerun.accept.outcome import Stats
from forerun.draft.many.cascade import CascadeDrafter, MeasuredLengths, RoundTiming
from forerun.economy import LinearCost, best_depth, cost_per_token, expected_tokens

MIDDLE = "model:stdlib-middle"


@dataclass(slots=True)
class Probe(MeasuredLengths):
    """Inner lengths of 1, 2, 3, 4 in turn, so that the counts do not depend on earlier measurements."""

    turn: int = 0
    offers: dict[int, int] = field(default_factory=dict)  # by depth
    hits: dict[int, int] = field(default_factory=dict)
    timings: list[RoundTiming] = field(default_factory=list)

    @override
    def best(self, seq_ids: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        """The next inner length, limited by `most`."""
        self.turn += 1
        return [min(1 + self.turn % 4, each) for each in most]

    @override
    def count(self, seq_ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> None:
        """Count acceptance by depth."""
        for num_drafted, num_accepted in runs:
            for depth in range(min(num_drafted, num_accepted + 1)):
                self.offers[depth] = self.offers.get(depth, 0) + 1
                self.hits[depth] = self.hits.get(depth, 0) + (depth < num_accepted)

    @override
    def time(self, timing: RoundTiming) -> None:
        """Store the timing of a round."""
        self.timings.append(timing)

    @override
    def record_alone(self, seq_ids: Sequence[int], depth: int, taken_s: float | None) -> None:
        """No effect: the two-level pair measures this time."""

    def inner(self, alone_s: float) -> tuple[int, float]:
        """(best inner length, cost of one of the judge's tokens with it); without a first drafter it is `alone_s`."""
        accepted = [self.hits[depth] / self.offers[depth] for depth in sorted(self.offers)]
        passes = straight([(t.num_tokens, t.pass_s) for t in self.timings])
        drafts = straight([(t.num_drafted, t.draft_s) for t in self.timings if t.num_drafted], flat=False)

        def round_s(length: int) -> float:
            return passes(length + 1) + drafts(length) if length else alone_s

        length = best_depth(accepted, round_s)
        return length, cost_per_token(length, accepted, round_s)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A drafter's predicted speed-up at its best depth, and at every depth."""

    depth: int
    speedup: float
    by_depth: Sequence[float]


def straight(samples: Sequence[tuple[int, float]], flat: bool = True) -> Callable[[int], float]:
    """Seconds by size: the straight line through the medians of the samples (size, seconds) at each size."""
    line = LinearCost(flat)
    for size in sorted({size for size, _ in samples}):
        for _ in range(2):  # every size has the same weight, independent of its number of samples
            line.record(size, statistics.median(s for other, s in samples if other == size))
    return line.expect


def predict(acceptance: Sequence[float], draft_token_s: float, pass_s: Callable[[int], float]) -> Prediction:
    """The speed-up over plain decoding by depth, from 1; a draft token costs `draft_token_s`."""
    by_depth = [
        expected_tokens(acceptance, k) * pass_s(1) / (pass_s(k + 1) + k * draft_token_s)
        for k in range(1, len(acceptance) + 1)
    ]
    depth = max(range(len(by_depth)), key=by_depth.__getitem__) + 1
    return Prediction(depth, by_depth[depth - 1], by_depth)


@dataclass(slots=True, kw_only=True)
class Options(TextOptions):
    """The first drafter, and the depth of the measurements for the prediction."""

    first: str = option("model:stdlib-draft", "the first drafter (default %(default)s)")
    deepest: int = option(12, "depth of the first measurements (default %(default)s)")


def main() -> int:
    """Predict, measure and print the speed-ups; returns 1 if any drafter changed the tokens, otherwise 0."""
    options = options_of(Options)
    setting = Setting.of(options)
    specs = [options.first, MIDDLE, f"cascade[{options.first},{MIDDLE}]"]
    modes = [setting.drafted(f"{spec}@{options.deepest}") for spec in specs]
    cascade = modes[-1].drafter
    assert isinstance(cascade, CascadeDrafter), "the last mode is the cascade"
    cascade.lengths = probe = Probe()
    probes = [setting.plain(), *modes]
    differ = setting.run(probes, 1, uncounted=1)
    sums = [mode.total.stats for mode in probes]
    pass_s = straight([(1, sums[0].pass_s / sums[0].num_passes)] + [passed(s) for s in sums[1:]])
    draft_token_s = [each.draft_s / each.num_drafted for each in sums[1:3]]
    inner_length, inner_s = probe.inner(draft_token_s[1])
    draft_token_s.append(inner_s)
    accepted = [sums[1], sums[2], sums[2]]  # the cascade's chains are accepted like the judge's
    predicted = [predict(s.acceptance_at_depth, c, pass_s) for s, c in zip(accepted, draft_token_s, strict=True)]
    for mode, prediction in zip(modes, predicted, strict=True):
        mode.paces.clear()
        mode.depth = prediction.depth
    cascade.lengths = MeasuredLengths()
    plain = setting.plain()
    differ |= setting.run([plain, *modes], options.repeats, uncounted=1)
    last = options.deepest + 1
    print(f"target's pass {1e3 * pass_s(1):.1f} ms, over {last} tokens {1e3 * pass_s(last):.1f} ms;")
    print(f"inside the cascade, drafts of {inner_length} tokens are predicted to be best\n")
    heads = ("predicted", "measured", "quartiles", "measured over predicted")
    show_header("drafter", "depth", "time per draft token, ms", *heads)
    for spec, mode, prediction, token_s in zip(specs, modes, predicted, draft_token_s, strict=True):
        ratio = mode.over(plain)
        over_predicted = "" if ratio is None else f"{ratio.median / prediction.speedup:.2f}"
        cells = f"{1e3 * token_s:.2f}", f"{prediction.speedup:.2f}", *spread_cells(ratio), over_predicted
        show(spec, prediction.depth, *cells)
    print(verdict(differ))
    return 1 if differ else 0


def passed(stats: Stats) -> tuple[int, float]:
    """(mean number of tokens of a target pass, its mean seconds)."""
    return round(1 + stats.num_drafted / stats.num_passes), stats.pass_s / stats.num_passes


if __name__ == "__main__":
    sys.exit(main())
