"""Answers of a server with the log-probabilities of their tokens, in either of the two forms that servers write.

This file decides how tokens are told apart, how many likely tokens a server is asked for, and how requests are sent
whose answers are compared: with every filter of the law switched off, and each with a seed of its own.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.bench.material import Passage
from forerun.errors import InvalidRequest
from forerun.remote.measure import RemoteServer
from forerun.remote.time_limit import NO_LIMIT, TimeLimit
from forerun.traffic.plan import SpeculationMode
from forerun.traffic.run import asked_of

AT_ONCE = 8  # requests under way
MOST_LIKELY = (20, 5, 1)  # of how many tokens servers tell the chance: what is asked for, by turns
UNREADABLE = "\ufffd"  # in the text of a token that is a part of a character: several tokens look like that


@dataclass(frozen=True, slots=True)
class TokenChance:
    """A token of an answer, by its text or name, and the log-probabilities of the likeliest at its place.

    `likely` is empty where the server tells none, as some do of tokens that were guessed.
    """

    token: str
    likely: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """An answer as text, and as tokens where the server names them; `stopped` where the model ended it."""

    text: str
    tokens: tuple[TokenChance, ...]
    stopped: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The texts or names of the tokens, in order."""
        return tuple(each.token for each in self.tokens)


def answer_of(body: Mapping[str, Any]) -> RemoteAnswer:
    """The first answer of a response; log-probabilities as chats have them, or in the lists of completions."""
    choice = body["choices"][0]
    message = choice.get("message")
    text = (message.get("content") if isinstance(message, dict) else choice.get("text")) or ""
    chances = choice.get("logprobs") or {}
    if isinstance(chances.get("content"), list):
        tokens = [TokenChance(str(each.get("token")), likely_of_entries(each)) for each in chances["content"]]
    else:
        likely = chances.get("top_logprobs") or [None] * len(chances.get("tokens") or ())
        tokens = [
            TokenChance(str(token), finite_chances(at_place or {}))
            for token, at_place in zip(chances.get("tokens") or (), likely, strict=False)
        ]
    return RemoteAnswer(text, tuple(tokens), choice.get("finish_reason") == "stop")


def likely_of_entries(entry: Mapping[str, Any]) -> Mapping[str, float]:
    """The likeliest tokens at a place of a chat's list; of those with the same text the likeliest counts."""
    chances: dict[str, float] = {}
    for each in entry.get("top_logprobs") or ():
        name, value = str(each.get("token")), each.get("logprob")
        if isinstance(value, int | float):
            chances[name] = max(value, chances.get(name, -math.inf))
    return finite_chances(chances)


def finite_chances(chances: Mapping[str, Any]) -> Mapping[str, float]:
    """Log-probabilities that are numbers."""
    return {name: float(value) for name, value in chances.items() if isinstance(value, int | float)}


@dataclass(slots=True)
class Questioner:
    """Asks one server one way: `most_likely` is of how many tokens it tells the chance, 0 where it tells none.

    None as long as it was not tried; `mode` is what requests say about speculation.
    """

    server: RemoteServer
    mode: SpeculationMode
    extra: Mapping[str, Any] = field(default_factory=dict)
    most_likely: int | None = None

    def body(self, prompt: Passage, temperature: float, max_tokens: int, seed: int, likely: int) -> dict[str, Any]:
        """A request; `likely` tokens are asked for at each place, none at 0."""
        chat, dialect = self.server.client.address.chat, self.server.dialect
        chances: dict[str, Any] = {}
        if likely:
            chances = {"logprobs": True, "top_logprobs": likely} if chat else {"logprobs": likely}
        return {
            "model": self.server.model.name,
            **asked_of(prompt, chat),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            **dialect.unfiltered,
            **chances,
            **self.mode.field,
            **self.extra,
        }

    async def learn(self, prompt: Passage, limit: TimeLimit = NO_LIMIT) -> None:
        """Find out of how many tokens the server tells the chance.

        Raises InvalidRequest where it does not answer, or not in time.
        """
        try:
            async with asyncio.timeout(limit.timeout_s):
                await self.learn_in_time(prompt)
        except TimeoutError as error:
            base = self.server.client.address.base
            raise InvalidRequest("time_limit", f"{base} gave no first answer in time: allow more seconds.") from error

    async def learn_in_time(self, prompt: Passage) -> None:
        """Ask for ever fewer of the likeliest tokens until the server gives them, however long it takes."""
        await self.server.client.complete(self.body(prompt, 0.0, 2, 0, 0))
        self.most_likely = 0
        for likely in MOST_LIKELY:
            try:
                answer = answer_of(await self.server.client.complete(self.body(prompt, 0.0, 2, 0, likely)))
            except InvalidRequest:
                continue
            if answer.tokens and answer.tokens[0].likely:
                self.most_likely = likely
                return

    async def ask(
        self,
        prompts: Sequence[Passage],
        seeds: Sequence[int],
        temperature: float,
        max_tokens: int,
        at_once: int,
        likely: int,
        report: ProgressCallback,
        extra: Mapping[str, Any] | None = None,
        limit: TimeLimit = NO_LIMIT,
    ) -> list[RemoteAnswer]:
        """The answers to all prompts, each with its seed, so many of them at once, in the order of the prompts.

        When the time is over, requests under way are broken off; what is returned are the answers to the first prompts,
        up to one that has none.
        """
        left, answers = iter(range(len(prompts))), dict[int, RemoteAnswer]()

        async def work() -> None:
            for index in left:
                body = self.body(prompts[index], temperature, max_tokens, seeds[index], likely)
                answers[index] = answer_of(await self.server.client.complete({**body, **(extra or {})}))
                report(f"{len(answers)} of {len(prompts)}", len(answers) / len(prompts))

        with suppress(TimeoutError):
            async with asyncio.timeout(limit.timeout_s):
                await asyncio.gather(*(work() for _ in range(min(at_once, len(prompts)))))
        return [answers[index] for index in takewhile(answers.__contains__, range(len(prompts)))]
