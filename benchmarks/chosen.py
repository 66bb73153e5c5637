"""The depth that the controller chooses against every fixed depth, while a queue keeps the batch full.

    python -m benchmarks.chosen [--workload code,prose,edits] [--batch 1,4,16] [--depth 1,2,4,8] [--draft DRAFT]
                                [--tokens 32] [--answer-tokens 96] [--prompt-tokens 64]
                                [--num-prompts 8] [--repeats 3] [--temperature 0] [--wrong]

The models are the widened pair; `edits` uses n-grams unless `--draft` names another drafter. Prompts, and the answers
that quote them, are cut to their last tokens. A sequence that ends is replaced by another one. Only rounds without
prefill and with a full batch count, until they have emitted `--tokens` tokens per row, so that all depths generate
about the same texts. Most of the time is prefill; stderr shows the current half.

On one half of the prompts the best fixed depth is chosen, including plain decoding; on the other half it is compared
with `auto`. In a repetition one round of each depth runs in turn, so that changes of the machine's speed affect all
depths alike. The controller keeps its state from the first half to the second. With `--wrong`, the draft model's last
norm is shuffled and half of its signs are flipped, so that nearly every draft token is rejected.

Printed are tokens per second over those of plain decoding on the second half, medians of the ratios within the
repetitions, and in the last columns `auto` over the depth that the first half chose: median, minimum and maximum. The
ratio may be above 1, since `auto` changes its depth.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from benchmarks.drafters import passages
from benchmarks.markdown import show, show_header
from benchmarks.options import option, options_of
from safetensors.torch import load_file, save_file

from forerun.bench.material import Item, Workload, workload_of
from forerun.bench.plan import CHOSEN, SHIPPED, Group, in_order, rotated
from forerun.bench.run import BenchSetup, RoundTotals
from forerun.config import Speculation
from forerun.demo.material import widened_pair
from forerun.llm import LLM
from forerun.models.bundled import BUNDLED, DRAFT, TARGET
from forerun.models.loading import Blueprint

HALVES = ("choosing", "judging")


@dataclass(slots=True)
class Queue:
    """A setup whose batch is kept full, with the texts of one workload in two halves."""

    setup: BenchSetup
    name: str
    num_tokens: int  # counted tokens of each row

    def speeds(self, group: Group, depths: Sequence[int], half: str, turn: int) -> Mapping[int, float]:
        """Tokens per second of full rounds, by depth; one round of each depth runs in turn."""
        print(f"{self.name}, batch {group.batch}: {half}, repetition {turn + 1}", file=sys.stderr, flush=True)
        texts, numbers = replace(group, workload=half), range(4 * group.batch)
        lanes = {d: self.setup.new_engine(texts, d, numbers, tenant=f"{group} {half} {turn} {d}") for d in depths}
        paces = {depth: RoundTotals() for depth in depths}
        try:
            while left := [d for d in rotated(depths, turn) if paces[d].num_decoded < group.batch * self.num_tokens]:
                for depth in left:
                    assert lanes[depth].engine.has_work, "the answers are too short: raise --answer-tokens"
                    timed = lanes[depth].step(self.setup.clock)
                    if len(timed.outcome.rows) == group.batch and not timed.outcome.num_prompt_tokens:
                        paces[depth].count(timed.outcome, timed.step_s)
        finally:
            for timed_engine in lanes.values():
                timed_engine.clear()
        return {depth: pace.tokens_per_s for depth, pace in paces.items()}

    def cell(self, group: Group, depths: Sequence[int], repeats: int) -> float:
        """Measure all depths at one batch size and print a line of the table; returns `auto` over the chosen depth."""
        first = [self.speeds(group, depths, "choosing", turn) for turn in range(max(1, repeats - 1))]
        second = [self.speeds(group, depths, "judging", turn) for turn in range(repeats)]
        usual = {depth: statistics.median(speeds[depth] for speeds in first) for depth in depths if depth != CHOSEN}
        best = max(usual, key=usual.__getitem__)
        plain = statistics.median(speeds[0] for speeds in second)
        over = {depth: statistics.median(speeds[depth] / speeds[0] for speeds in second) for depth in depths}
        shares = sorted(speeds[CHOSEN] / speeds[best] for speeds in second)
        share, span = statistics.median(shares), f"{shares[0]:.2f} to {shares[-1]:.2f}"
        gains = [f"{over[depth]:.2f}" for depth in depths[1:]]
        show(self.name, group.batch, f"{plain:.1f}", *gains, best, f"{share:.3f}", span)
        return share


def shuffled(folder: Path) -> str:
    """A copy of the bundled draft model whose draft tokens are nearly always rejected."""
    for path in BUNDLED[DRAFT].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    path = next(folder.glob("*.safetensors"))
    tensors, generator = load_file(path), torch.Generator().manual_seed(0)
    norm = tensors["model.norm.weight"]
    signs = torch.randint(0, 2, norm.shape, generator=generator) * 2 - 1
    tensors["model.norm.weight"] = norm[torch.randperm(len(norm), generator=generator)] * signs
    save_file(tensors, path, metadata={"format": "pt"})
    return f"model:{folder}"


@dataclass(slots=True)
class Options:
    """The options of the measurement."""

    workload: Sequence[str] = option(",".join(SHIPPED), "texts (default %(default)s)")
    batch: Sequence[int] = option("1,4,16", "batch sizes (default %(default)s)")
    depth: Sequence[int] = option("1,2,4,8", "fixed depths (default %(default)s)")
    draft: str | None = option(None, "a drafter (default: ngram for edits, the draft model for the others)")
    tokens: int = option(32, "counted tokens of each row (default %(default)s)")
    answer_tokens: int = option(96, "tokens of each answer (default %(default)s)")
    prompt_tokens: int = option(64, "tokens of each prompt (default %(default)s)")
    num_prompts: int = option(8, "prompts (default %(default)s)")
    repeats: int = option(3, "repetitions (default %(default)s)")
    temperature: float = option(0.0, "temperature of all texts but edits (default %(default)s)")
    wrong: bool = option(False, "use a draft model whose tokens are rejected")


def main() -> None:
    """Run the measurement and print the table."""
    options = options_of(Options)
    depths = in_order({0, CHOSEN, *options.depth})
    shares = []
    show_header("text", "batch", "plain tokens/s", *depths[1:-1], "auto", "chosen before", "auto over it", "from, to")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.workload:
            draft = options.draft or ("ngram" if name == "edits" else f"model:{DRAFT}")
            target, draft = widened_pair(TARGET, draft, None)
            drafter = shuffled(Path(folder)) if options.wrong else draft
            queue = queue_of(name, target, drafter, options, max(options.batch) * len(depths))
            for batch in options.batch:
                group = Group(name, batch, 0.0 if name == "edits" else options.temperature)
                shares.append(queue.cell(group, depths, options.repeats))
            queue.setup.llm.close()
    mean = statistics.geometric_mean(shares)
    print(f"\nauto over the depth chosen before: geometric mean {mean:.3f}, minimum {min(shares):.3f}")


def last_of(item: Item, num_tokens: int) -> Item:
    """The last tokens of a prompt, so that prefill is shorter, and of the answer that quotes it."""
    answer = None if item.answer is None else item.answer[-num_tokens:]
    return replace(item, prompt=item.prompt[-num_tokens:], answer=answer)


def queue_of(name: str, target: str, draft: str, options: Options, places: int) -> Queue:
    """The loaded models with the texts of one workload."""
    tokenizer = Blueprint.of(target).tokenizer()
    whole = workload_of(name, passages(name), options.num_prompts, tokenizer)
    workload = replace(whole, items=tuple(last_of(item, options.prompt_tokens) for item in whole.items))
    llm = LLM(
        target,
        draft,
        speculation=Speculation(),
        max_model_len=workload.longest(options.answer_tokens) + 32,
        max_num_seqs=places,
    )
    middle = len(workload.items) // 2
    halves = zip(HALVES, (workload.items[:middle], workload.items[middle:]), strict=True)
    setup = BenchSetup(
        llm,
        {half: Workload(half, items) for half, items in halves},
        options.answer_tokens,
        speculation=lambda depth: Speculation() if depth == CHOSEN else Speculation(depth),
    )
    return Queue(setup, name, options.tokens)


if __name__ == "__main__":
    main()
