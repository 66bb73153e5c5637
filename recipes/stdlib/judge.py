"""Evaluates the family's drafters: tokens per round on held-out files, and the cost of their rounds.

The target continues excerpts of held-out files, with each drafter at a fixed depth. So all drafters are measured on the
same answers. Costs of rounds are those of one sequence, as multiples of a plain round, on a machine that runs no other
program.
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

    The last value of `tokens_per_round` is counted. The others follow from the acceptance rates, and hold for a drafter
    that always drafts to the full depth.
    """

    acceptance_at_depth: tuple[float, ...]
    tokens_per_round: tuple[float, ...]

    @classmethod
    def of(cls, rates: Sequence[float], counted: float) -> Acceptance:
        """Computed from acceptance rates by depth, and the counted tokens per round at the full depth."""
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
        most = max(tokens[-1:], default=1.0)  # a drafter that often drafts nothing gives fewer than its rates imply
        return max((min(t, most) / cost for t, cost in zip(tokens, self.costs, strict=False)), default=None)


def drafts_of(out: Path, heads: Sequence[str]) -> dict[str, str]:
    """The `--draft` specification of each drafter of the family, by the name of its folder, and of `suffix`."""
    models = {name: f"model:{out / name}" for name in STUDENTS}
    return {"suffix": "suffix", **models, **{name: f"{name}:{LEADS.get(name, '')}{out / name}" for name in heads}}


def judge_family(out: Path, heads: Sequence[str], saved: Path) -> dict[str, DrafterFigures]:
    """The figures of all drafters; those in the file `saved` are not measured again."""
    known = read_figures(saved)
    tokens = held_out_tokens(out / "target")
    for name, draft in drafts_of(out, heads).items():
        shown = draft.replace(f"{out}/", "stdlib-")
        if name not in known:
            rates = {str(t): accepted(out / "target", draft, tokens, t) for t in TEMPERATURES}
            known[name] = DrafterFigures(shown, DEPTH, rates)
            write_figures(saved, known)
    return known


def time_family(out: Path, heads: Sequence[str], saved: Path) -> dict[str, DrafterFigures]:
    """The figures in the file `saved` with newly measured costs of rounds. No other program should run meanwhile."""
    known = read_figures(saved)
    prompt = held_out_prompts(held_out_tokens(out / "target"))[0]
    for name, draft in drafts_of(out, heads).items():
        if name in known:
            known[name] = replace(known[name], costs=costs_of(out / "target", draft, prompt))
    write_figures(saved, known)
    return known


def write_figures(saved: Path, by_name: Mapping[str, DrafterFigures]) -> None:
    """Write the figures by drafter to a JSON file."""
    saved.write_text(json.dumps({name: asdict(figures) for name, figures in by_name.items()}), "utf-8")


def read_figures(saved: Path) -> dict[str, DrafterFigures]:
    """The figures of earlier measurements; empty if there is no file."""
    if not saved.exists():
        return {}
    by_name = {}
    for name, fields in json.loads(saved.read_text("utf-8")).items():
        rates = {t: Acceptance(*map(tuple, each.values())) for t, each in fields["by_temperature"].items()}
        by_name[name] = DrafterFigures(fields["draft"], fields["depth"], rates, tuple(fields["costs"]))
    return by_name


def held_out_tokens(target: Path) -> list[int]:
    """The held-out files as a stream of tokens."""
    files = [file for file in read_corpus(standard_library()) if file.held_out]
    tokens: list[int] = tokenize(files, Tokenizer.from_file(str(target / "tokenizer.json"))).held_out.tolist()
    return tokens


def held_out_prompts(tokens: Sequence[int]) -> list[list[int]]:
    """Prompts from evenly spaced places of the stream, each after `<s>`."""
    stride = (len(tokens) - NUM_PROMPT_TOKENS) // NUM_PROMPTS
    return [[0, *tokens[i * stride : i * stride + NUM_PROMPT_TOKENS]] for i in range(NUM_PROMPTS)]


def accepted(target: Path, draft: str, tokens: Sequence[int], temperature: float) -> Acceptance:
    """Acceptance by depth and tokens per round, counted by an engine at this temperature."""
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


def write_records(by_name: Mapping[str, DrafterFigures], out: Path) -> None:
    """Write `drafter.json` to the folders of all drafters, unless no rounds were timed.

    Without times `auto` would choose by acceptance alone, which favours the largest drafter.
    """
    if all(figures.speed_up is None for figures in by_name.values()):
        return
    digest = Blueprint.of(str(out / "target")).weights_digest()
    for name, figures in by_name.items():
        if not (out / name / "config.json").exists():
            continue
        kind, argument = "model" if name in STUDENTS else name, LEADS.get(name, "")
        at_one = figures.by_temperature["1.0"]
        record = DrafterRecord(
            kind, argument, digest, 1.0, at_one.acceptance_at_depth, at_one.tokens_per_round, figures.speed_up
        )
        (out / name / RECORD).write_text(record.text(), "utf-8")


def figures_table(by_name: Mapping[str, DrafterFigures]) -> str:
    """The table of all figures, as Markdown."""
    costs = " / ".join(map(str, TIMED_DEPTHS))
    lines = [
        f"| drafter | accepted at depth 1-{DEPTH}, temperature 0 | tokens per round | accepted, temperature 1 "
        f"| tokens per round | cost of a round of depth {costs} | predicted at temperature 1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for figures in by_name.values():
        cells = [f"`{figures.draft}`"]
        for each in figures.by_temperature.values():
            rates = " ".join(f"{rate:.2f}" for rate in each.acceptance_at_depth)
            cells += [rates, f"{each.tokens_per_round[-1]:.2f}" if each.tokens_per_round else "1.00"]
        cells.append(" / ".join(f"{cost:.2f}" for cost in figures.costs) or "not timed")
        cells.append("" if figures.speed_up is None else f"×{figures.speed_up:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
