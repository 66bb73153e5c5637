"""Drafters side by side over one widened target: which way of guessing brings most, on the texts of `forerun bench`.

    python benchmarks/drafters.py [--workload code] [--temperature 0] [--tokens 96] [--num-prompts 3] [--repeats 3]
                                  [--batch 1] [--quantize int4] MODE ...

A mode is a draft specification and how far to guess: `ngram@7` for chains of 7, `model:stdlib-draft@4x3x12` for trees
of depth 4, at most 3 children a node, 12 guesses. Bundled models stand for their widened forms: the target of 0.51 B
parameters, `stdlib-middle` of 0.1 B, `stdlib-draft` of 21 M, heads as they grow with the target. `SPEC/int8@3` and
`SPEC/int4@3` give a drafter weights of so many bits whatever the target has. The workload `demo` is what
`python -m benchmarks.peers` asks. Every mode answers every prompt, by turns, in one process; ratios are taken within a
repetition. Drafting is what proposing takes and what telling the drafter what became final takes, the median of the
rounds that read no prompt.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forerun.bench.figures import Spread
from forerun.bench.material import Item, Passage, shipped, workload_of
from forerun.bench.plan import SHIPPED
from forerun.bench.run import Lane, Pace
from forerun.config import QUANTIZATIONS, EngineOptions, Quantization, Speculation
from forerun.control.controller import FixedDepth
from forerun.demo.material import DRAFT_PARAMETERS, TARGET_PARAMETERS, load_prompts, widen
from forerun.draft.base import Committed, Drafter
from forerun.draft.plan import DraftContext
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.drafters import plan
from forerun.engine.engine import Engine
from forerun.heads.kinds import HEADS
from forerun.heads.widen import cached_widened_drafter
from forerun.llm import LLM
from forerun.machine import bandwidth_bytes_per_s
from forerun.models.bundled import DRAFT, TARGET
from forerun.models.loading import Blueprint
from forerun.models.widen import Wider
from forerun.request import Request
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from forerun.sampling.recorded import Recording

MODE = re.compile(r"(?P<spec>.+?)(?:/(?P<quantize>int8|int4))?@(?P<depth>\d+)(x(?P<width>\d+)x(?P<nodes>\d+))?")
SIZES = {TARGET: TARGET_PARAMETERS, "stdlib-middle": 100_000_000, DRAFT: DRAFT_PARAMETERS}
PLAIN = "plain"


@dataclass(slots=True)
class Mode:
    """A way to decode: its drafter, its wish, and what its runs gave by repetition and prompt.

    The controller is that of all its engines, as in a server: what it learned of costs and arms stays.
    """

    name: str
    drafter: Drafter | None
    wish: Speculation
    paces: dict[tuple[int, int], Pace] = field(default_factory=dict)
    controller: FixedDepth = field(default_factory=FixedDepth)
    told_s: float = 0.0  # in telling the drafter what became final
    drafting_s: list[float] = field(default_factory=list)  # of the rounds that counted

    def __post_init__(self) -> None:
        if self.drafter is not None:
            observe = self.drafter.observe

            def observed(news: Committed) -> None:
                started_s = time.perf_counter()
                observe(news)
                self.told_s += time.perf_counter() - started_s

            self.drafter.observe = observed  # type: ignore[method-assign]

    def speed(self, repetition: int) -> float:
        """Decoded tokens per second over all prompts of a repetition."""
        paces = [pace for (r, _), pace in self.paces.items() if r == repetition]
        return sum(p.num_decoded for p in paces) / sum(p.decode_s for p in paces)

    def speeds_by_prompt(self) -> list[float]:
        """Medians over the repetitions."""
        prompts = sorted({prompt for _, prompt in self.paces})
        return [statistics.median(p.tokens_per_s for (_, q), p in self.paces.items() if q == i) for i in prompts]

    def tokens_per_round(self) -> float:
        """Of all runs."""
        stats = [pace.stats for pace in self.paces.values()]
        return 1 + sum(s.num_accepted for s in stats) / sum(s.num_rounds for s in stats)


def widened(spec: DraftSpec, target: Path) -> DraftSpec:
    """The specification with bundled models at their large sizes, and heads at that of the widened target."""
    argument = spec.argument
    if spec.name in HEADS and argument is not None:
        wider = Wider.of(Blueprint.of(TARGET).config, TARGET_PARAMETERS)
        return cached_widened_drafter(str(spec), TARGET, target, wider)
    if spec.name == "model" and argument in SIZES:
        argument = widen(argument, SIZES[argument], None)
    return replace(spec, argument=argument, members=tuple(widened(member, target) for member in spec.members))


def mode_of(text: str, llm: LLM, target: Blueprint, cache_tokens: int) -> Mode:
    """A mode as it is spelled, its drafter loaded."""
    found = MODE.fullmatch(text)
    if found is None:
        raise SystemExit(f"mode {text!r}: write SPEC@DEPTH or SPEC@DEPTHxWIDTHxNODES, as in ngram@7")
    depth, width, nodes = (int(found[name]) if found[name] else None for name in ("depth", "width", "nodes"))
    quantize: Quantization | None = found["quantize"] or target.spec.quantize  # type: ignore[assignment]
    spec = replace(target.spec, quantize=quantize)
    context = DraftContext(replace(target, spec=spec), llm.tokenizer)
    planned = plan(widened(parse_spec(found["spec"]), target.folder), context)
    drafter = planned.build(dict.fromkeys(planned.models, cache_tokens), None, llm.engine.runner)
    return Mode(text, drafter, Speculation(depth or 0, width or 1, nodes))


def answer(
    llm: LLM, mode: Mode, items: Sequence[Item], options: argparse.Namespace, tenant: str, uncounted: int = 0
) -> tuple[Pace, list[list[int]]]:
    """These prompts at once, to their ends: how fast, and what was said. A `tenant` of its own remembers no answers.

    So many rounds of decoding are `uncounted`, from the first on.
    """
    recording, sequences = Recording(), []
    for number, item in enumerate(items):
        length = options.tokens if item.answer is None else len(item.answer)
        params = SamplingParams(temperature=options.temperature, seed=number, max_tokens=length, ignore_eos=True)
        (sequence,) = llm.requests.sequences(Request.of(item.prompt, params, mode.wish, tenant))
        if item.answer is not None:
            recording.texts[sequence.id] = [*item.prompt, *item.answer]
        sequences.append(sequence)
    engine = Engine(
        llm.engine.runner,
        mode.drafter,
        options=EngineOptions(len(items)),
        controller=mode.controller,
        num_ids=llm.requests.num_ids,
        draws=recording if recording.texts else Draws,
        kernels=llm.engine.kernels,
    )
    lane, pace = Lane(engine, sequences), Pace()
    while engine.has_work:
        before_s = mode.told_s
        timed = lane.step(time.perf_counter)
        if timed.outcome.num_prompt_tokens or uncounted == 0:
            pace.count(timed.outcome, timed.step_s)
            if not timed.outcome.num_prompt_tokens:
                mode.drafting_s.append(timed.outcome.draft_s + mode.told_s - before_s)
        else:
            uncounted -= 1
    return pace, [s.tokens for s in sequences]


def passages(workload: str) -> list[Passage]:
    """The texts of a workload."""
    if workload != "demo":
        return shipped(workload)
    return [Passage(prompt.text, "demo") for prompt in load_prompts() if not prompt.repeats]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="+", metavar="MODE")
    parser.add_argument("--workload", choices=(*SHIPPED, "demo"), default="code")
    parser.add_argument("--temperature", type=float, default=0.0)
    for name, default in (("tokens", 96), ("num-prompts", 3), ("repeats", 3), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quantize", choices=QUANTIZATIONS)
    return parser.parse_args()


def main() -> int:
    """Run all modes by turns and print a table; 1 if any changed the tokens."""
    options = arguments()
    quantize: Quantization | None = options.quantize
    folder = widen(TARGET, TARGET_PARAMETERS, None)
    target = Blueprint.of(folder, dtype="auto", quantize=quantize)
    texts = passages(options.workload)
    workload = workload_of(options.workload, texts, options.num_prompts, target.tokenizer())
    length = workload.longest(options.tokens)
    llm = LLM(folder, quantize=quantize, max_model_len=length, max_num_seqs=options.batch)
    room = 2 * options.batch * (length + 64)
    modes = [Mode(PLAIN, None, Speculation(0)), *(mode_of(text, llm, target, room) for text in options.modes)]
    batches = [workload.items[i : i + options.batch] for i in range(0, len(workload.items), options.batch)]
    said: dict[int, list[list[int]]] = {}
    differ = set()
    for repetition in range(-1, options.repeats):  # the first is a warm-up
        for number, items in enumerate(batches if repetition >= 0 else batches[:1]):
            first = (repetition + number) % len(modes)
            for mode in [*modes[first:], *modes[:first]]:
                pace, tokens = answer(llm, mode, items, options, tenant=str(repetition))
                if said.setdefault(number, tokens) != tokens:
                    differ.add(mode.name)
                if repetition >= 0:
                    mode.paces[repetition, number] = pace
    show(modes, options.repeats)
    print(f"\na gigabyte was summed at {bandwidth_bytes_per_s() / 1e9:.1f} GB/s; the same tokens: {differ or 'all'}")
    return 1 if differ else 0


def show(modes: Sequence[Mode], repeats: int) -> None:
    """The table."""
    print("| mode | tokens/s | over plain | quartiles | tokens per round | drafting, ms a round | by prompt |")
    print("|---|---|---|---|---|---|---|")
    for mode in modes:
        ratio = Spread.of(mode.speed(r) / modes[0].speed(r) for r in range(repeats))
        assert ratio is not None, "there is at least one repetition"
        speed = statistics.median(mode.speed(r) for r in range(repeats))
        prompts = " ".join(f"{each:.0f}" for each in mode.speeds_by_prompt())
        quartiles = f"{ratio.low:.2f} to {ratio.high:.2f}"
        rounds, drafting = f"{mode.tokens_per_round():.2f}", f"{1e3 * statistics.median(mode.drafting_s):.1f}"
        name = re.sub(r"/\S*/([^/\]\s,@]+)", r"\1", mode.name)
        print(f"| {name} | {speed:.1f} | {ratio.median:.2f} | {quartiles} | {rounds} | {drafting} | {prompts} |")


if __name__ == "__main__":
    sys.exit(main())
