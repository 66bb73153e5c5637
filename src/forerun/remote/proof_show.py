"""The terminal report of a server's proof; every fact comes from a ServerProof."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from forerun.prove.show import first_of, listed, marked
from forerun.remote.equality import Meaning, TextDifference, TextEquality
from forerun.remote.law import ServedLaw
from forerun.remote.proof import ServerProof
from forerun.report import Cell, card, counted, fact_table

MEANINGS: dict[Meaning, str] = {
    "fault": "a fault: the gap is too large for rounding",
    "near tie": "not proven to be a fault: at a near tie, rounding may decide",
    "unsteady": "not proven to be a fault: the plain server's two answers differ here or before",
    "undecided": "undecided: the gap is unknown",
}
KINDS: dict[Meaning, str] = {
    "fault": "by more than rounding",
    "near tie": "at a near tie",
    "unsteady": "where plain answers differ too",
    "undecided": "undecided",
}


def server_proof_card(proof: ServerProof) -> RenderableType:
    """The report as a two-column table with the verdict below."""
    return card([fact_table(facts(proof))], [verdict(proof)])


def facts(proof: ServerProof) -> Iterator[tuple[str, Cell]]:
    """(name, fact) of each test, of what is proven and of what remains undecided."""
    e, itself = proof.equality, ", the same server without speculation" if proof.plain_url == proof.url else ""
    yield "model", proof.model
    yield "server", f"{proof.url} ({proof.engine})"
    yield "plain", f"{proof.plain_url}{itself}"
    sound = bool(e.num_prompts) and not (e.count("fault") or e.count("undecided"))
    yield "equality", marked(sound, equality_line(e))
    shown = sorted(e.differences, key=lambda each: list(MEANINGS).index(each.meaning))
    yield from first_of([difference_lines(each) for each in shown])
    yield "control", control_line(e)
    for law in proof.laws:
        yield "distribution", marked(law.holds, law_line(law))
    yield from listed("proven", proof.proven)
    yield from listed("undecided", proof.undecided)


def verdict(proof: ServerProof) -> Text:
    """The verdict in one line."""
    if proof.faulty:
        return Text("FAULT: speculation changed the answers; the lines marked ✗ show where.", "bold red")
    if proof.parts_without_time:
        parts = ", ".join(proof.parts_without_time)
        return Text(f"UNDECIDED: {proof.limit_s:g} seconds did not suffice for {parts}.", "bold yellow")
    if not proof.holds:
        return Text("UNDECIDED: answers differ, and the gap between the tokens is unknown.", "bold yellow")
    if proof.equality.differences:
        return Text(
            "Passed: answers differ only at near ties, or where plain answers differ from each other.", "bold green"
        )
    return Text("Passed: speculation changed nothing in these tests.", "bold green")


def equality_line(e: TextEquality) -> str:
    """The result of the comparison at temperature 0."""
    drafted = "" if e.num_drafted is None else f"; {counted(round(e.num_drafted), 'draft token')}"
    if not e.num_prompts:
        return "not compared: no prompt was answered in time by both servers, alone and with other requests"
    compared = f"{e.num_answers} answers to {e.num_prompts} prompts, alone and with other requests, temperature 0"
    if not e.differences:
        return f"{compared}: identical{drafted}"
    kinds = ", ".join(f"{e.count(kind)} {name}" for kind, name in KINDS.items() if e.count(kind))
    return f"{compared}: {len(e.differences)} differ, {kinds}{drafted}"


def control_line(e: TextEquality) -> str:
    """The comparison of the plain server with itself."""
    answers = f"{e.num_unsteady} of {e.num_prompts} plain answers differ between alone and with other requests"
    if e.noise is None:
        return f"{answers}; no log-probabilities"
    return f"{answers}, log-probabilities by up to {e.noise:.2g}; gaps up to {e.tolerance:.2g} are near ties"


def difference_lines(d: TextDifference) -> Iterator[str]:
    """The lines of a difference: position, tokens, meaning."""
    others = "alone" if d.at_once == 1 else f"{d.at_once} requests at once"
    yield f"prompt {d.prompt + 1}, {others}, position {d.position} of the answer, after {d.before!r}:"
    gap = "" if d.gap is None else f", preferred by {'at least ' if d.at_least else ''}{d.gap:.3g}"
    yield f"  plain {d.plain!r}{gap}; with speculation {d.other!r}"
    yield f"  {MEANINGS[d.meaning]}"


def law_line(law: ServedLaw) -> str:
    """The result of a test of the law."""
    if law.problem:
        return f"after {law.opening!r}: not tested"
    reference = "against the exact law" if law.exact else "against the plain server's counts"
    line = (
        f"after {law.opening!r}, {law.num_texts:,} texts at temperature 1, {law.counted} of each {reference}: "
        f"chi-square {law.statistic:.1f} with {law.freedom} degrees of freedom, p = {law.p_value:.2g}"
    )
    if law.doubtful and law.law_p is not None:
        line += f"; against the exact law, p was {law.law_p:.2g}, and {law.control_p:.2g} for the plain server"
    elif law.exact and law.control_p is not None:
        line += f" (plain server: {law.control_p:.2g})"
    return f"{line}; but nothing was drafted" if law.num_drafted == 0 else line
