"""Equality of answers at temperature 0: a server with speculation against one without, and that one against itself.

This file decides what is asked, where two answers part, and what a difference means. Two engines compute with other
rounding, so a difference where the plain server itself found two tokens nearly as likely is no proof of a fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.annotations import ProgressCallback
from forerun.bench.material import Passage
from forerun.prove.workload import ProofWorkload
from forerun.remote.answers import AT_ONCE, Questioner, RemoteAnswer, TokenChance
from forerun.remote.time_limit import NO_LIMIT, TimeLimit

Meaning = Literal["fault", "near tie", "unsteady", "undecided"]
NEAR_TIE = 0.25  # of a logit: two steps of bfloat16 where logits are between 16 and 32
CONTEXT = 30  # characters before a difference that are shown


@dataclass(frozen=True, slots=True)
class TextDifference:
    """The first place where an answer parts from the plain one; `position` counts tokens, or else characters, from 0.

    `gap` is by how much the plain server preferred its own token, in units of logits; where the other token was not
    among those that it told of, the gap is at least that. `meaning` says whether that proves a fault: a "near tie"
    does not, nor does an "unsteady" place, at which the plain server's second answer had parted from its first.
    """

    prompt: int
    at_once: int
    position: int
    before: str
    plain: str
    other: str
    gap: float | None
    at_least: bool
    meaning: Meaning


@dataclass(frozen=True, slots=True)
class TextEquality:
    """What was compared: `num_answers` in all, after `num_prompts` prompts, each alone and with others at once.

    `num_asked` is how many prompts were to be compared: more, where the time did not do.
    `num_unsteady` plain answers were not those that the same server gave alone. `noise` is the largest difference of
    log-probabilities between these two where their texts agree; None where none are told. Gaps up to `tolerance` are
    near ties. `num_drafted` guesses were judged meanwhile; None where the server does not count.
    """

    num_asked: int
    num_prompts: int
    num_answers: int
    num_unsteady: int
    noise: float | None
    tolerance: float
    num_drafted: float | None
    differences: tuple[TextDifference, ...]

    def count(self, meaning: Meaning) -> int:
        """How many differences mean that."""
        return sum(each.meaning == meaning for each in self.differences)


async def compare_texts(
    speculating: Questioner,
    plain: Questioner,
    prompts: Sequence[Passage],
    workload: ProofWorkload,
    report: ProgressCallback,
    limit: TimeLimit = NO_LIMIT,
) -> TextEquality:
    """Ask both servers for every prompt, one at a time and several at once, and compare.

    Every part may take as long as those behind it; prompts that one of them did not come to are left out.
    """
    seeds = [workload.seed + index for index in range(len(prompts))]
    likely = plain.most_likely or 0
    sizes = 1, AT_ONCE
    parts = [(plain, size, likely) for size in sizes] + [(speculating, size, 0) for size in sizes]
    answered: list[list[RemoteAnswer]] = []
    before = await speculating.server.counts()
    for step, (who, at_once, num_likely) in enumerate(parts):

        def tell(detail: str, done: float, step: int = step) -> None:
            report(detail, (step + done) / len(parts))

        within, number = limit.part(1 / (len(parts) - step)), len(answered[-1]) if answered else len(prompts)
        ask = prompts[:number], seeds[:number], 0.0, workload.max_tokens, at_once, num_likely, tell
        answered.append(await who.ask(*ask, limit=within))
    number = len(answered[-1])
    first, control = (answers[:number] for answers in answered[: len(sizes)])
    noise = largest_drift(first, control)
    tolerance = max(NEAR_TIE, 2 * (noise or 0.0))
    differences: list[TextDifference] = []
    for at_once, answers in zip(sizes, answered[len(sizes) :], strict=True):
        for index, answer in enumerate(answers[:number]):
            if answer.text == first[index].text:
                continue
            names = await names_of(speculating, prompts[index], seeds[index], workload.max_tokens, answer, limit)
            other = RemoteAnswer(answer.text, names, answer.stopped) if names else answer
            place = AnswerPlace(index, at_once, parting(first[index], control[index]))
            differences.append(difference_of(first[index], other, place, tolerance))
    counts = (await speculating.server.counts()).since(before)
    return TextEquality(
        len(prompts),
        number,
        number * len(sizes),
        sum(one.text != other.text for one, other in zip(first, control, strict=True)),
        noise,
        tolerance,
        counts.num_drafted,
        tuple(differences),
    )


async def names_of(
    who: Questioner, prompt: Passage, seed: int, max_tokens: int, answer: RemoteAnswer, limit: TimeLimit
) -> tuple[TokenChance, ...]:
    """The tokens of an answer, by asking for it again with log-probabilities; none where it is another one then, or the
    time is over.

    Answers are compared as they come without log-probabilities, since these keep some engines from guessing.
    """
    if not who.most_likely:
        return ()
    again = await who.ask([prompt], [seed], 0.0, max_tokens, 1, 1, lambda _what, _done: None, limit=limit)
    return again[0].tokens if again and again[0].text == answer.text else ()


def largest_drift(first: Sequence[RemoteAnswer], second: Sequence[RemoteAnswer]) -> float | None:
    """The largest difference of the same token's log-probability, as far as texts agree; None where none are told."""
    drifts = []
    for one, other in zip(first, second, strict=True):
        for here, there in zip(one.tokens, other.tokens, strict=False):
            values = [each.likely.get(here.token) for each in (here, there)]
            if values[0] is not None and values[1] is not None:
                drifts.append(abs(values[0] - values[1]))
            if here.token != there.token:
                break
    return max(drifts, default=None)


def parting(one: RemoteAnswer, other: RemoteAnswer) -> int | None:
    """The number of the first token at which two answers differ, or character where tokens are not named.

    None where they do not differ.
    """
    if one.text == other.text:
        return None
    pairs = (one.names, other.names) if one.tokens and other.tokens else (one.text, other.text)
    shared = next((i for i, (a, b) in enumerate(zip(*pairs, strict=False)) if a != b), None)
    return min(map(len, pairs)) if shared is None else shared


@dataclass(frozen=True, slots=True)
class AnswerPlace:
    """Which answer it is, and at which position the plain server's own second answer parted from its first, if so."""

    prompt: int
    at_once: int
    unsteady_from: int | None


def difference_of(plain: RemoteAnswer, other: RemoteAnswer, place: AnswerPlace, tolerance: float) -> TextDifference:
    """The first difference of two answers that differ, and what it means."""
    position = parting(plain, other)
    assert position is not None, "the texts differ"
    counts_tokens = bool(plain.tokens)
    if plain.tokens and not other.tokens:
        token = token_at(plain, shared_length(plain.text, other.text))
        named = None if token is None else alternative(plain, other.text, *token)
        counts_tokens = token is not None
        position = position if token is None else token[0]
    else:
        named = other.names[position] if position < len(other.tokens) else None
    chosen = plain.tokens[position] if counts_tokens and position < len(plain.tokens) else None
    gap, at_least = gap_of(dict(chosen.likely), chosen.token, named) if chosen else (None, False)
    texts = [each.text[max(0, shared_length(plain.text, other.text)) :] for each in (plain, other)]
    shared = plain.text[: shared_length(plain.text, other.text)]
    return TextDifference(
        place.prompt,
        place.at_once,
        position,
        shared[-CONTEXT:],
        chosen.token if chosen else texts[0][:CONTEXT],
        named if named is not None else texts[1][:CONTEXT],
        gap,
        at_least,
        meaning_of(gap, at_least, tolerance, place.unsteady_from is not None and place.unsteady_from <= position),
    )


def shared_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def token_at(answer: RemoteAnswer, character: int) -> tuple[int, int] | None:
    """The number of the token that holds a character, and where it begins; None where tokens up to it are not the
    text."""
    begin = 0
    for number, name in enumerate(answer.names):
        if not answer.text.startswith(name, begin):
            return None
        if begin + len(name) > character:
            return number, begin
        begin += len(name)
    return None


def alternative(plain: RemoteAnswer, text: str, number: int, begin: int) -> str | None:
    """Of the tokens with which another text may go on, the one that the plain server found likeliest; None of none.

    A longer one may fit too, but nothing says which of them it was, and a fault needs a proof.
    """
    rest, likely = text[begin:], plain.tokens[number].likely
    fitting = [name for name in likely if name and rest.startswith(name)]
    others = (name for name in fitting if name != plain.tokens[number].token)
    return max(others, key=likely.__getitem__, default=None)


def gap_of(likely: dict[str, float], chosen: str, other: str | None) -> tuple[float | None, bool]:
    """How much likelier the chosen token was than the other one, and whether that is only a lower bound.

    Of a token that is not known, any of the others may be it; of one that is not among the likely, none is likelier
    than the last of these.
    """
    if chosen not in likely:
        return None, False
    most = likely[chosen]
    if other is not None and other in likely:
        return most - likely[other], False
    others = [value for name, value in likely.items() if name != chosen]
    if not others:
        return most - math.log1p(-min(math.exp(most), 1 - 1e-12)), True
    return most - (max(others) if other is None else min(others)), True


def meaning_of(gap: float | None, at_least: bool, tolerance: float, unsteady: bool) -> Meaning:
    """What a difference with this gap means."""
    if unsteady:
        return "unsteady"
    if gap is None:
        return "undecided"
    if gap > tolerance:
        return "fault"
    return "undecided" if at_least else "near tie"
