"""The terminal report of a proof: a line for each test, what it does not cover, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from forerun.prove.chi_square import LEVEL
from forerun.prove.equality import ChosenToken, Divergence, Equality
from forerun.prove.law import LawResult
from forerun.prove.proof import Environment, ProofReport
from forerun.prove.workload import shape_name
from forerun.report import Cell, card, counted, fact_table

MOST_SHOWN = 3


def proof_card(report: ProofReport) -> RenderableType:
    """The report as a two-column table with the verdict below."""
    return card([fact_table(facts(report))], [verdict(report)])


def facts(report: ProofReport) -> Iterator[tuple[str, Cell]]:
    """(name, fact) of each test, of what is proven and of what is not."""
    equality = report.equality
    yield "model", report.place.model
    yield "draft", report.place.draft
    yield "fingerprint", place_line(report.place)
    yield "equality", marked(equality.same_tokens, tokens_line(equality))
    yield from first_of([difference_lines(each) for each in equality.differences])
    yield "rounding", marked(equality.same_logits, rounding_line(equality))
    for law in report.laws:
        yield f"{law.verification} verification", marked(law.holds, law_line(law))
    for law in {law.opening: law for law in report.laws}.values():
        yield "", Text(opening_line(law), "dim")
    yield from listed("proven", report.proven)
    yield from listed("not proven", report.not_proven)


def first_of(differences: Sequence[Iterable[str]]) -> Iterator[tuple[str, str]]:
    """The lines of the first differences, and how many more there are."""
    yield from (("", "\n".join(lines)) for lines in differences[:MOST_SHOWN])
    if len(differences) > MOST_SHOWN:
        yield "", f"and {len(differences) - MOST_SHOWN} more; --json has all of them"


def listed(heading: str, sentences: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Sentences as facts under one heading."""
    yield from (("" if i else heading, sentence) for i, sentence in enumerate(sentences))


def verdict(report: ProofReport) -> Text:
    """The verdict in one line."""
    if report.holds:
        return Text("Passed: speculation changed nothing in these tests.", "bold green")
    if report.equality.same_tokens and all(law.holds for law in report.laws):
        return Text("FAULT: logits depend on chunking or batching, so tokens may differ in other runs.", "bold red")
    return Text("FAULT: speculation changed the output; the lines marked ✗ show where.", "bold red")


def marked(holds: bool, line: str) -> Text:
    """A line with a check mark or a cross."""
    return Text.assemble(("✓ ", "green") if holds else ("✗ ", "bold red"), line)


def place_line(place: Environment) -> str:
    """The fingerprint and versions."""
    versions = f"forerun {place.forerun}, torch {place.torch}, python {place.python}"
    return f"{place.fingerprint}: {place.dtype}, {place.device} ({place.kernels}), {versions}"


def tokens_line(e: Equality) -> str:
    """The result of the comparison with plain decoding."""
    runs = f"{e.num_runs} runs × {counted(e.num_requests, 'prompt')}, {e.num_tokens:,} tokens"
    if not e.differences:
        accepted = f"{e.num_accepted:,} of {e.num_drafted:,} draft tokens accepted"
        return f"{runs}: identical, log-probabilities too; {accepted}"
    explained = sum(difference.explained for difference in e.differences)
    return f"{runs}: {len(e.differences)} answers differ" + (f", {explained} of them by rounding" if explained else "")


def rounding_line(e: Equality) -> str:
    """The result of prefilling the same texts in other chunks and batches."""
    texts = "logits of two texts, in other chunks and batches"
    return f"{texts}: " + (f"they differ by up to {e.rounding_noise:.2g}" if e.rounding_noise else "identical")


def law_line(law: LawResult) -> str:
    """The result of a test of a law."""
    line = (
        f"{shape_name(law.shape)}: chi-square {law.statistic:.1f} with {law.freedom} degrees of freedom, "
        f"p = {law.p_value:.2g}"
    )
    if law.num_impossible:
        line += f"; {law.num_impossible} texts have probability 0"
    return line if law.num_drafted else f"{line}; but nothing was drafted"


def opening_line(law: LawResult) -> str:
    """The settings of a test of a law."""
    return (
        f"each from {law.num_texts:,} texts at temperature {law.temperature:g}, top-k {law.top_k}: the "
        f"{law.num_tokens} tokens after {law.opening!r}, in {law.freedom + 1} cells; "
        f"the significance level of all these tests together is {LEVEL:g}"
    )


def difference_lines(d: Divergence) -> Iterator[str]:
    """The lines of a difference: position, tokens, explanation."""
    yield (
        f"request {d.request} (seed {d.seed}, temperature {d.temperature:g}, batch {d.batch}, {shape_name(d.shape)}), "
        f"position {d.position} of the answer, counted from 0:"
    )
    if d.plain == d.drafted:
        yield f"  the same token, {choice_text(d.plain)}, but its log-probability differs by {d.drift:.2g}"
    else:
        gap = "" if d.gap is None else f", preferred by {d.gap:.3g}"
        yield f"  plain {choice_text(d.plain)}{gap}; drafted {choice_text(d.drafted)}"
    if d.explained:
        yield "  explained by rounding: the gap is within the rounding error of logits"
    elif d.drift_from is None:
        yield "  a fault: log-probabilities are bit-equal up to here, so the logits are right and the choice is wrong"
    else:
        yield f"  a fault: log-probabilities differ from position {d.drift_from} on (wrong cache or positions)"


def choice_text(choice: ChosenToken) -> str:
    """A token, its id and its logit."""
    if choice.token_id is None:
        return "has ended"
    return f"{choice.text!r} (id {choice.token_id}, logit {choice.logit:.3f})"
