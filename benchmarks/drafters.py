"""Drafters compared on one widened target: speed-up over plain decoding on the texts of `forerun bench`.

    python -m benchmarks.drafters [--workload code] [--temperature 0] [--tokens 96] [--num-prompts 3] [--repeats 3]
                                   [--batch 1] [--quantize int4] MODE ...

A mode is a draft specification and a depth: `ngram@7` for chains of 7, `model:stdlib-draft@4x3x12` for trees of depth
4 with at most 3 children per node and 12 nodes. Bundled models stand for their widened forms: the target with 0.51 B
parameters, `stdlib-middle` with 0.1 B, `stdlib-draft` with 21 M, and heads widened with the target. `SPEC/int8@3` and
`SPEC/int4@3` set the number format of a drafter's weights independently of the target's. The workload `demo` has the
prompts of `python -m benchmarks.peers`. All modes answer every prompt in turn, in one process; ratios are computed
within a repetition. Drafting time is that of `propose` and of `observe`, the median over rounds without prefill.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.markdown import show, show_header, spread_cells
from benchmarks.options import option, options_of

from forerun.bench.figures import Spread
from forerun.bench.material import Passage, Workload, shipped, workload_of
from forerun.bench.plan import SHIPPED, Group, rotated
from forerun.bench.run import BenchSetup, RoundTotals, waves
from forerun.config import QUANTIZATIONS, Quantization, Speculation
from forerun.control.controller import FixedDepth
from forerun.demo.material import DRAFT_PARAMETERS, TARGET_PARAMETERS, load_prompts, widen
from forerun.draft.base import Committed, Drafter
from forerun.draft.plan import DraftContext
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.drafters import plan
from forerun.heads.kinds import HEADS
from forerun.heads.widen import cached_widened_drafter
from forerun.llm import LLM
from forerun.machine import bandwidth_bytes_per_s
from forerun.models.bundled import DRAFT, TARGET
from forerun.models.loading import Blueprint
from forerun.models.widen import Wider

MODE = re.compile(r"(?P<spec>.+?)(?:/(?P<quantize>int8|int4))?@(?P<depth>\d+)(x(?P<width>\d+)x(?P<nodes>\d+))?")
SIZES = {TARGET: TARGET_PARAMETERS, "stdlib-middle": 100_000_000, DRAFT: DRAFT_PARAMETERS}


@dataclass(slots=True, kw_only=True)
class TextOptions:
    """Options for the texts and the repetitions."""

    workload: str = option("code", "texts (default %(default)s)", choices=(*SHIPPED, "demo"))
    temperature: float = option(0.0, "default %(default)s")
    tokens: int = option(96, "tokens of each answer (default %(default)s)")
    num_prompts: int = option(3, "prompts (default %(default)s)")
    repeats: int = option(3, "repetitions (default %(default)s)")
    quantize: Quantization | None = option(
        None, "number format of the target's weights", choices=QUANTIZATIONS, type=str
    )


@dataclass(slots=True, kw_only=True)
class Options(TextOptions):
    """The modes and the batch size."""

    modes: Sequence[str] = option(what="a drafter and its depth", nargs="+", metavar="MODE")
    batch: int = option(1, "prompts at once (default %(default)s)")


@dataclass(slots=True)
class Mode:
    """A mode of decoding: its setup with the drafter, its depth, and the totals of its runs by repetition and batch.

    All its engines share one controller, as in a server, so that its estimates persist.
    """

    name: str
    setup: BenchSetup
    depth: int
    paces: dict[tuple[int, int], RoundTotals] = field(default_factory=dict)
    total: RoundTotals = field(default_factory=RoundTotals)
    observe_s: float = 0.0  # total time of the drafter's `observe`
    drafting_s: list[float] = field(default_factory=list)  # of the counted rounds

    def __post_init__(self) -> None:
        if self.drafter is not None:
            observe = self.drafter.observe

            def observed(committed: Committed) -> None:
                started_s = time.perf_counter()
                observe(committed)
                self.observe_s += time.perf_counter() - started_s

            self.drafter.observe = observed  # type: ignore[method-assign]

    @property
    def drafter(self) -> Drafter | None:
        """The drafter; None for plain decoding."""
        return self.setup.drafter

    def answer(
        self, group: Group, numbers: Sequence[int], tenant: str, paces: Sequence[RoundTotals], uncounted: int = 0
    ) -> list[list[int]]:
        """The tokens of the answers to the prompts with these numbers, in one batch.

        With a new `tenant` the drafter cannot use earlier answers. Rounds are counted in `paces`, except for the first
        `uncounted` rounds without prefill.
        """
        timed_engine = self.setup.new_engine(group, self.depth, numbers, tenant=tenant)
        while timed_engine.engine.has_work:
            before_s = self.observe_s
            timed = timed_engine.step(self.setup.clock)
            decodes = not timed.outcome.num_prompt_tokens
            if decodes and uncounted:
                uncounted -= 1
                continue
            for pace in paces:
                pace.count(timed.outcome, timed.step_s)
            if decodes and paces:
                self.drafting_s.append(timed.outcome.draft_s + self.observe_s - before_s)
        return [sequence.tokens for sequence in timed_engine.sequences]

    def speed(self, repetition: int) -> float:
        """Decoded tokens per second over all prompts of a repetition."""
        paces = [pace for (r, _), pace in self.paces.items() if r == repetition]
        return sum(p.num_decoded for p in paces) / sum(p.decode_s for p in paces)

    def over(self, other: Mode) -> Spread | None:
        """The ratio to another mode's speed, computed within repetitions."""
        return Spread.of(self.speed(r) / other.speed(r) for r in {r for r, _ in self.paces})

    def speeds_by_batch(self) -> list[float]:
        """The speeds of each batch of prompts, medians over the repetitions."""
        batches = sorted({batch for _, batch in self.paces})
        return [statistics.median(p.tokens_per_s for (_, b), p in self.paces.items() if b == each) for each in batches]


@dataclass(frozen=True, slots=True)
class Setting:
    """The widened target and the texts of a workload."""

    llm: LLM
    target: Blueprint
    workload: Workload
    group: Group
    num_tokens: int

    @classmethod
    def of(cls, options: TextOptions, batch: int = 1) -> Setting:
        """The target and texts of these options, loaded."""
        target = Blueprint.of(widen(TARGET, TARGET_PARAMETERS, None), dtype="auto", quantize=options.quantize)
        name, most = options.workload, options.num_prompts
        workload = workload_of(name, passages(name), most, target.tokenizer())
        length = workload.longest(options.tokens)
        llm = LLM(str(target.folder), quantize=options.quantize, max_model_len=length, max_num_seqs=batch)
        return cls(llm, target, workload, Group(name, batch, options.temperature), options.tokens)

    def plain(self) -> Mode:
        """Plain decoding."""
        return self.mode("plain", None, Speculation(0))

    def mode(self, name: str, drafter: Drafter | None, speculation: Speculation) -> Mode:
        """A mode with this drafter and depth."""
        setup = BenchSetup(
            self.llm,
            {self.workload.name: self.workload},
            self.num_tokens,
            speculation=lambda depth: replace(speculation, depth=depth),
            drafter=drafter,
            controller=FixedDepth(),
        )
        return Mode(name, setup, speculation.depth or 0)

    def drafted(self, text: str) -> Mode:
        """The mode of this specification, with its drafter loaded."""
        match = MODE.fullmatch(text)
        if match is None:
            raise SystemExit(f"mode {text!r}: write SPEC@DEPTH or SPEC@DEPTHxWIDTHxNODES, as in ngram@7")
        depth, width, nodes = (int(match[name]) if match[name] else None for name in ("depth", "width", "nodes"))
        quantize: Quantization | None = match["quantize"] or self.target.spec.quantize  # type: ignore[assignment]
        context = DraftContext(
            replace(self.target, spec=replace(self.target.spec, quantize=quantize)), self.llm.tokenizer
        )
        planned = plan(widened(parse_spec(match["spec"]), self.target.folder), context)
        cache_tokens = 2 * self.group.batch * (self.workload.longest(self.num_tokens) + 64)
        drafter = planned.build(dict.fromkeys(planned.models, cache_tokens), None, self.llm.engine.runner)
        return self.mode(text, drafter, Speculation(depth or 0, width or 1, nodes))

    def run(self, modes: Sequence[Mode], repeats: int, uncounted: int = 0) -> set[str]:
        """Run all modes on every prompt in turn; returns the names of modes whose tokens differ from the first mode's.

        The first answers are a warm-up.
        """
        batches = list(waves(len(self.workload.items), self.group.batch))
        answers: dict[int, list[list[int]]] = {}
        differ = set()
        for repetition in range(-1, repeats):
            for number, numbers in enumerate(batches if repetition >= 0 else batches[:1]):
                for mode in rotated(modes, repetition + number):
                    pace, tenant = RoundTotals(), str(repetition)
                    counted = [pace, mode.total] if repetition >= 0 else []
                    tokens = mode.answer(self.group, numbers, tenant, counted, uncounted)
                    if answers.setdefault(number, tokens) != tokens:
                        differ.add(mode.name)
                    if counted:
                        mode.paces[repetition, number] = pace
        return differ


def widened(spec: DraftSpec, target: Path) -> DraftSpec:
    """The specification with bundled models at their large sizes, and heads at that of the widened target."""
    argument = spec.argument
    if spec.name in HEADS and argument is not None:
        wider = Wider.of(Blueprint.of(TARGET).config, TARGET_PARAMETERS)
        return cached_widened_drafter(str(spec), TARGET, target, wider)
    if spec.name == "model" and argument in SIZES:
        argument = widen(argument, SIZES[argument], None)
    return replace(spec, argument=argument, members=tuple(widened(member, target) for member in spec.members))


def passages(workload: str) -> list[Passage]:
    """The texts of a workload."""
    if workload != "demo":
        return shipped(workload)
    return [Passage(prompt.text, "demo") for prompt in load_prompts() if not prompt.repeats]


def verdict(differ: set[str]) -> str:
    """A line with the memory bandwidth, and whether all modes gave the same tokens."""
    speed = bandwidth_bytes_per_s() / 1e9
    return f"\na gigabyte was summed at {speed:.1f} GB/s; the same tokens: {', '.join(differ) or 'all'}"


def main() -> int:
    """Run all modes in turn and print a table; returns 1 if any mode changed the tokens, otherwise 0."""
    options = options_of(Options)
    setting = Setting.of(options, options.batch)
    modes = [setting.plain(), *map(setting.drafted, options.modes)]
    differ = setting.run(modes, options.repeats)
    show_header(
        *("mode", "tokens/s", "over plain", "quartiles", "tokens per round", "drafting, ms per round", "by prompt")
    )
    for mode in modes:
        speed = statistics.median(map(mode.speed, range(options.repeats)))
        name = re.sub(r"/\S*/([^/\]\s,@]+)", r"\1", mode.name)
        prompts = " ".join(f"{each:.0f}" for each in mode.speeds_by_batch())
        rounds, drafting = mode.total.stats.tokens_per_round or 0.0, 1e3 * statistics.median(mode.drafting_s)
        show(name, f"{speed:.1f}", *spread_cells(mode.over(modes[0])), f"{rounds:.2f}", f"{drafting:.1f}", prompts)
    print(verdict(differ))
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
