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
    "fault": "a fault: rounding does not make up such a gap",
    "near tie": "no proof of a fault: the two were so near a tie that rounding may decide",
    "unsteady": "no proof of a fault: the plain server itself has given another answer from there, or before, on",
    "undecided": "undecided: how near a tie it was is not known",
}
KINDS: dict[Meaning, str] = {
    "fault": "by more than rounding",
    "near tie": "by a near tie",
    "unsteady": "where the plain server differs too",
    "undecided": "undecided",
}


def server_proof_card(proof: ServerProof) -> RenderableType:
    """The report as a two-column table with the verdict below."""
    return card([fact_table(facts(proof))], [verdict(proof)])


def facts(proof: ServerProof) -> Iterator[tuple[str, Cell]]:
    """(name, fact) of each test, of what is proven and of what is not decided."""
    e, itself = proof.equality, ", the same server without guesses" if proof.plain_url == proof.url else ""
    yield "model", proof.model
    yield "server", f"{proof.url} ({proof.engine})"
    yield "plain", f"{proof.plain_url}{itself}"
    sound = bool(e.num_prompts) and not (e.count("fault") or e.count("undecided"))
    yield "equality", marked(sound, equality_line(e))
    shown = sorted(e.differences, key=lambda each: list(MEANINGS).index(each.meaning))
    yield from first_of([difference_lines(each) for each in shown])
    yield "control", control_line(e)
    for law in proof.laws:
        yield "law", marked(law.holds, law_line(law))
    yield from listed("proven", proof.proven)
    yield from listed("not decided", proof.undecided)


def verdict(proof: ServerProof) -> Text:
    """The verdict in one line."""
    if proof.faulty:
        return Text("FAULT: speculation changed what the model says; the lines marked ✗ say where.", "bold red")
    if proof.parts_without_time:
        parts = ", ".join(proof.parts_without_time)
        return Text(f"UNDECIDED: {proof.limit_s:g} seconds left nothing to judge of {parts}.", "bold yellow")
    if not proof.holds:
        return Text("UNDECIDED: answers differ, and how near a tie the tokens were is not known.", "bold yellow")
    if proof.equality.differences:
        return Text(
            "It holds as far as can be seen: what differs is a near tie, or differs without guesses.", "bold green"
        )
    return Text("It holds: speculation changed nothing that was looked at.", "bold green")


def equality_line(e: TextEquality) -> str:
    """The result of the comparison at temperature 0."""
    guesses = "" if e.num_drafted is None else f"; {counted(round(e.num_drafted), 'guess')}"
    if not e.num_prompts:
        return "not compared: no prompt was answered in time by both servers, alone and beside others"
    asked = f"{e.num_answers} answers to {e.num_prompts} prompts, alone and beside others, temperature 0"
    if not e.differences:
        return f"{asked}: identical{guesses}"
    kinds = ", ".join(f"{e.count(kind)} {name}" for kind, name in KINDS.items() if e.count(kind))
    return f"{asked}: {len(e.differences)} differ, {kinds}{guesses}"


def control_line(e: TextEquality) -> str:
    """The comparison of the plain server with itself."""
    twice = (
        f"the plain server against itself, alone and beside others: {e.num_unsteady} of {e.num_prompts} answers differ"
    )
    if e.noise is None:
        return f"{twice}; it tells no log-probabilities"
    return f"{twice}, log-probabilities by up to {e.noise:.2g}; gaps up to {e.tolerance:.2g} count as near ties"


def difference_lines(d: TextDifference) -> Iterator[str]:
    """The lines of a difference: position, tokens, meaning."""
    others = "alone" if d.at_once == 1 else f"beside others, {d.at_once} at once"
    yield f"prompt {d.prompt + 1}, {others}, position {d.position} of the answer, after {d.before!r}:"
    gap = "" if d.gap is None else f", preferred by {'at least ' if d.at_least else ''}{d.gap:.3g}"
    yield f"  plain {d.plain!r}{gap}; with speculation {d.other!r}"
    yield f"  {MEANINGS[d.meaning]}"


def law_line(law: ServedLaw) -> str:
    """The result of a test of the law."""
    if law.problem:
        return f"after {law.opening!r}: not tested"
    how = "against the exact law" if law.exact else "against the plain server's counts"
    line = (
        f"after {law.opening!r}, {law.num_texts:,} texts at temperature 1, {law.counted} of each {how}: chi-square "
        f"{law.statistic:.1f} on {law.freedom} degrees of freedom, p = {law.p_value:.2g}"
    )
    if law.doubtful and law.law_p is not None:
        line += f"; by the exact law it was {law.law_p:.2g}, the plain server's own {law.control_p:.2g}"
    elif law.exact and law.control_p is not None:
        line += f" (the plain server's own: {law.control_p:.2g})"
    return f"{line}; but nothing was guessed" if law.num_drafted == 0 else line
