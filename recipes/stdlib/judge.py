"""Evaluates the family's drafters: tokens per round on held-out files, and the cost of their rounds.

The target goes on from held-out files, drafted to a fixed depth by each drafter in turn, so all of them are judged on
the same answers. Costs of rounds are those of one sequence, as multiples of a plain round; they hold for a machine that
does nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from forerun import LLM, SamplingParams
from forerun.config import Speculation
from forerun.draft.auto import RECORD, DrafterRecord
from forerun.models.loading import Blueprint
from forerun.train.speed import round_costs
from recipes.stdlib.corpus import read_corpus, standard_library
from recipes.stdlib.recipe import tokenize

NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 24, 96, 128
DEPTH, TIMED_DEPTHS = 4, (1, 2, 3, 4)
TEMPERATURES = (0.0, 1.0)
STUDENTS = ("draft", "middle")
LEADS = {"early-exit": "2:"}  # the part of the argument before the folder


@dataclass(frozen=True, slots=True)
class Acceptance:
    """P(draft token j accepted | those before it were), and tokens per round by depth from 1.

    The last is counted; the others follow from acceptance, for a drafter that always drafts to the full depth.
    """

    acceptance_at_depth: tuple[float, ...]
    tokens_per_round: tuple[float, ...]

    @classmethod
    def of(cls, rates: Sequence[float], counted: float) -> Acceptance:
        """From acceptance by depth, and tokens per round as an engine counted them at the full depth."""
        reached, tokens = 1.0, [1.0]
        for rate in rates:
            reached *= rate
            tokens.append(tokens[-1] + reached)
        return cls(tuple(rates), (*tokens[1:-1], counted))


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """All figures of a drafter. `costs` are those of rounds at TIMED_DEPTHS, in plain rounds; empty if not timed."""

    draft: str
    depth: int
    by_temperature: Mapping[str, Acceptance]
    costs: tuple[float, ...] = ()

    @property
    def speed_up(self) -> float | None:
        """The prediction at the best timed depth, at temperature 1; None if rounds were not timed."""
        tokens = self.by_temperature["1.0"].tokens_per_round
        most = max(tokens[-1:], default=1.0)  # a drafter that often drafts nothing has fewer than its rates imply
        return max((min(t, most) / cost for t, cost in zip(tokens, self.costs, strict=False)), default=None)


def drafts_of(out: Path, heads: Sequence[str]) -> dict[str, str]:
    """The `--draft` specification of each drafter of the family, by the name of its folder, and of `suffix`."""
    models = {name: f"model:{out / name}" for name in STUDENTS}
    return {"suffix": "suffix", **models, **{name: f"{name}:{LEADS.get(name, '')}{out / name}" for name in heads}}


def judge_family(out: Path, heads: Sequence[str], kept: Path) -> dict[str, DrafterFigures]:
    """The figures of all drafters; those in the file `kept` are not measured again, unless a drafter changed."""
    known = read_figures(kept)
    tokens = held_out_tokens(out / "target")
    for name, draft in drafts_of(out, heads).items():
        shown = draft.replace(f"{out}/", "stdlib-")
        if name not in known:
            rates = {str(t): accepted(out / "target", draft, tokens, t) for t in TEMPERATURES}
            known[name] = DrafterFigures(shown, DEPTH, rates)
            kept.write_text(json.dumps({each: asdict(own) for each, own in known.items()}), "utf-8")
    return known


def time_family(out: Path, heads: Sequence[str], kept: Path) -> dict[str, DrafterFigures]:
    """These figures with newly measured costs of rounds. No other program should run meanwhile."""
    known = read_figures(kept)
    prompt = held_out_prompts(held_out_tokens(out / "target"))[0]
    for name, draft in drafts_of(out, heads).items():
        if name in known:
            known[name] = replace(known[name], costs=costs_of(out / "target", draft, prompt))
    kept.write_text(json.dumps({each: asdict(own) for each, own in known.items()}), "utf-8")
    return known


def read_figures(kept: Path) -> dict[str, DrafterFigures]:
    """The figures of earlier measurements."""
    if not kept.exists():
        return {}
    found = {}
    for name, own in json.loads(kept.read_text("utf-8")).items():
        rates = {t: Acceptance(*map(tuple, each.values())) for t, each in own["by_temperature"].items()}
        found[name] = DrafterFigures(own["draft"], own["depth"], rates, tuple(own["costs"]))
    return found


def held_out_tokens(target: Path) -> list[int]:
    """The held-out files as a stream of tokens."""
    files = [file for file in read_corpus(standard_library()) if file.held_out]
    found: list[int] = tokenize(files, Tokenizer.from_file(str(target / "tokenizer.json"))).held_out.tolist()
    return found


def held_out_prompts(tokens: Sequence[int]) -> list[list[int]]:
    """Prompts from places all over the stream, each after `<s>`."""
    stride = (len(tokens) - NUM_PROMPT_TOKENS) // NUM_PROMPTS
    return [[0, *tokens[i * stride : i * stride + NUM_PROMPT_TOKENS]] for i in range(NUM_PROMPTS)]


def accepted(target: Path, draft: str, tokens: Sequence[int], temperature: float) -> Acceptance:
    """The figures that an engine counts."""
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
        for i in range(NUM_PROMPTS)
    ]
    llm = LLM(str(target), draft, speculation=Speculation(DEPTH), max_num_seqs=8, max_model_len=512, threads=1)
    llm.generate(held_out_prompts(tokens), params)
    rates, counted = llm.stats.acceptance_at_depth, llm.stats.tokens_per_round
    llm.close()
    return Acceptance.of([float(rate) for rate in rates], 1.0 if counted is None else counted)


def costs_of(target: Path, draft: str, prompt: Sequence[int]) -> tuple[float, ...]:
    """The costs of rounds of one sequence at TIMED_DEPTHS, in plain rounds."""
    llm = LLM(str(target), draft, speculation=Speculation(DEPTH), max_num_seqs=1, max_model_len=512)
    costs = round_costs(llm, llm.drafter, [prompt], 1.0, TIMED_DEPTHS, lambda *_: None)
    assert costs is not None, "the context has room for rounds"
    llm.close()
    return tuple(costs.round_ratio(depth) for depth in TIMED_DEPTHS)


def write_records(found: Mapping[str, DrafterFigures], out: Path) -> None:
    """Write `drafter.json` to the folders of all drafters, unless no rounds were timed.

    Without times `auto` would choose by acceptance alone, in which the largest drafter is best.
    """
    if all(own.speed_up is None for own in found.values()):
        return
    digest = Blueprint.of(str(out / "target")).weights_digest()
    for name, own in found.items():
        if not (out / name / "config.json").exists():
            continue
        kind = "model" if name in STUDENTS else name
        at_one = own.by_temperature["1.0"]
        record = DrafterRecord(
            kind, LEADS.get(name, ""), digest, 1.0, at_one.acceptance_at_depth, at_one.tokens_per_round, own.speed_up
        )
        (out / name / RECORD).write_text(record.text(), "utf-8")


def figures_table(found: Mapping[str, DrafterFigures]) -> str:
    """The table of all figures, as Markdown."""
    costs = " / ".join(map(str, TIMED_DEPTHS))
    lines = [
        f"| drafter | accepted at depth 1-{DEPTH}, temperature 0 | tokens per round | accepted, temperature 1 "
        f"| tokens per round | cost of a round of depth {costs} | predicted at temperature 1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for own in found.values():
        cells = [f"`{own.draft}`"]
        for each in own.by_temperature.values():
            rates = " ".join(f"{rate:.2f}" for rate in each.acceptance_at_depth)
            cells += [rates, f"{each.tokens_per_round[-1]:.2f}" if each.tokens_per_round else "1.00"]
        cells.append(" / ".join(f"{cost:.2f}" for cost in own.costs) or "not timed")
        cells.append("" if own.speed_up is None else f"×{own.speed_up:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
