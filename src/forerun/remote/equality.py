"""Equality of answers at temperature 0: a server with speculation against a plain one, and the plain one with itself.

This file finds the first difference between two answers and classifies it. Two engines may round differently, so a
difference at a near tie of the plain server's log-probabilities does not prove a fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from forerun.annotations import ProgressCallback
from forerun.bench.material import Passage
from forerun.prove.workload import ProofWorkload
from forerun.remote.answers import AT_ONCE, AnswerClient, RemoteAnswer, TokenChance
from forerun.remote.time_limit import NO_LIMIT, TimeLimit

Meaning = Literal["fault", "near tie", "unsteady", "undecided"]
NEAR_TIE = 0.25  # logits: two steps of bfloat16 between 16 and 32
CONTEXT = 30  # characters shown before a difference


@dataclass(frozen=True, slots=True)
class TextDifference:
    """The first difference of an answer from the plain one, at `position`, in tokens or, if unknown, in characters.

    `gap`: the difference of logits between the plain server's token and the other one; with `at_least` it is a lower
    bound, since the other token was not among the top log-probabilities. `meaning`: whether the difference proves a
    fault. A "near tie" does not; "unsteady" means that the plain server's second answer differs from its first one at
    this position or before.
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
    """The comparison: `num_answers` answers to `num_prompts` prompts, each sent alone and concurrently with others.

    `num_asked`: requested prompts; more than `num_prompts` if the time limit was reached. `num_unsteady`: prompts whose
    two plain answers, alone and with others, differ. `noise`: the largest difference of log-probabilities between these
    two while their texts agree; None if unknown. Gaps up to `tolerance` are near ties. `num_drafted`: draft tokens
    during the comparison; None if not reported.
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
        """The number of differences with this meaning."""
        return sum(each.meaning == meaning for each in self.differences)


async def compare_texts(
    speculating: AnswerClient,
    plain: AnswerClient,
    prompts: Sequence[Passage],
    workload: ProofWorkload,
    report: ProgressCallback,
    limit: TimeLimit = NO_LIMIT,
) -> TextEquality:
    """Send every prompt to both servers, alone and concurrently with others, and compare the answers.

    The remaining time is divided evenly among the remaining parts; prompts that lack an answer are omitted.
    """
    seeds = [workload.seed + index for index in range(len(prompts))]
    likely = plain.most_likely or 0
    sizes = 1, AT_ONCE
    parts = [(plain, size, likely) for size in sizes] + [(speculating, size, 0) for size in sizes]
    answered: list[list[RemoteAnswer]] = []
    before = await speculating.server.counts()
    for step, (client, at_once, num_likely) in enumerate(parts):

        def report_step(detail: str, done: float, step: int = step) -> None:
            report(detail, (step + done) / len(parts))

        within, number = limit.part(1 / (len(parts) - step)), len(answered[-1]) if answered else len(prompts)
        ask = prompts[:number], seeds[:number], 0.0, workload.max_tokens, at_once, num_likely, report_step
        answered.append(await client.ask(*ask, limit=within))
    number = len(answered[-1])
    first, control = (answers[:number] for answers in answered[: len(sizes)])
    noise = largest_drift(first, control)
    tolerance = max(NEAR_TIE, 2 * (noise or 0.0))
    differences: list[TextDifference] = []
    for at_once, answers in zip(sizes, answered[len(sizes) :], strict=True):
        for index, answer in enumerate(answers[:number]):
            if answer.text == first[index].text:
                continue
            tokens = await tokens_of(speculating, prompts[index], seeds[index], workload.max_tokens, answer, limit)
            other = RemoteAnswer(answer.text, tokens, answer.stopped) if tokens else answer
            unsteady_from = first_difference(first[index], control[index])
            differences.append(difference_of(first[index], other, index, at_once, unsteady_from, tolerance))
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


async def tokens_of(
    client: AnswerClient, prompt: Passage, seed: int, max_tokens: int, answer: RemoteAnswer, limit: TimeLimit
) -> tuple[TokenChance, ...]:
    """The tokens of an answer, from a repeated request with log-probabilities; () if its answer is another or late.

    The compared answers are requested without log-probabilities, since some engines do not speculate with them.
    """
    if not client.most_likely:
        return ()
    again = await client.ask([prompt], [seed], 0.0, max_tokens, 1, 1, lambda _detail, _done: None, limit=limit)
    return again[0].tokens if again and again[0].text == answer.text else ()


def largest_drift(first: Sequence[RemoteAnswer], second: Sequence[RemoteAnswer]) -> float | None:
    """The largest difference of a token's log-probability while the texts agree; None if unknown."""
    drifts = []
    for one, other in zip(first, second, strict=True):
        for here, there in zip(one.tokens, other.tokens, strict=False):
            values = [each.likely.get(here.token) for each in (here, there)]
            if values[0] is not None and values[1] is not None:
                drifts.append(abs(values[0] - values[1]))
            if here.token != there.token:
                break
    return max(drifts, default=None)


def first_difference(one: RemoteAnswer, other: RemoteAnswer) -> int | None:
    """The index of the first token (or character, without tokens) at which two answers differ.

    None if they do not differ.
    """
    if one.text == other.text:
        return None
    return shared_length(one.names, other.names) if one.tokens and other.tokens else shared_length(one.text, other.text)


def difference_of(
    plain: RemoteAnswer, other: RemoteAnswer, prompt: int, at_once: int, unsteady_from: int | None, tolerance: float
) -> TextDifference:
    """The first difference of two differing answers, and its meaning; the plain server's answers to the prompt differ
    from token `unsteady_from` on."""
    position, length = first_difference(plain, other), shared_length(plain.text, other.text)
    assert position is not None, "the texts differ"
    counts_tokens = bool(plain.tokens)
    if plain.tokens and not other.tokens:
        token = token_at(plain, length)
        named = None if token is None else alternative(plain, other.text, *token)
        counts_tokens = token is not None
        position = position if token is None else token[0]
    else:
        named = other.names[position] if position < len(other.tokens) else None
    chosen = plain.tokens[position] if counts_tokens and position < len(plain.tokens) else None
    gap, at_least = gap_of(dict(chosen.likely), chosen.token, named) if chosen else (None, False)
    return TextDifference(
        prompt,
        at_once,
        position,
        plain.text[:length][-CONTEXT:],
        chosen.token if chosen else plain.text[length:][:CONTEXT],
        named if named is not None else other.text[length:][:CONTEXT],
        gap,
        at_least,
        meaning_of(gap, at_least, tolerance, unsteady_from is not None and unsteady_from <= position),
    )


def shared_length(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the common prefix of two texts, or of two lists of tokens."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def token_at(answer: RemoteAnswer, character: int) -> tuple[int, int] | None:
    """(index, start) of the token that contains a character; None if the joined tokens are not the text."""
    begin = 0
    for number, name in enumerate(answer.names):
        if not answer.text.startswith(name, begin):
            return None
        if begin + len(name) > character:
            return number, begin
        begin += len(name)
    return None


def alternative(plain: RemoteAnswer, text: str, number: int, begin: int) -> str | None:
    """The token that the plain server finds most likely among those that the other text may continue with, or None.

    If several tokens fit, the most likely one is used, which has the smallest gap, since a fault must be proven.
    """
    rest, likely = text[begin:], plain.tokens[number].likely
    fitting = [name for name in likely if name and rest.startswith(name)]
    others = (name for name in fitting if name != plain.tokens[number].token)
    return max(others, key=likely.__getitem__, default=None)


def gap_of(likely: dict[str, float], chosen: str, other: str | None) -> tuple[float | None, bool]:
    """(the difference of log-probabilities of the chosen token and the other one, whether it is a lower bound).

    If `other` is None, it may be any other token. A token that is not among the top is at most as likely as the last.
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
    """The meaning of a difference with this gap."""
    if unsteady:
        return "unsteady"
    if gap is None:
        return "undecided"
    if gap > tolerance:
        return "fault"
    return "undecided" if at_least else "near tie"
