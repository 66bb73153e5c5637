"""Answers of a server with log-probabilities, in the format of completions or of chats.

This file decides how tokens are identified, how many top log-probabilities are requested, and how requests are sent
whose answers are compared: without top-p and similar filters, and each with a different seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.bench.material import Passage
from forerun.errors import InvalidRequest
from forerun.limits import shown
from forerun.remote.measure import RemoteServer
from forerun.remote.time_limit import NO_LIMIT, TimeLimit
from forerun.serve.logprob_text import highest_by_text
from forerun.traffic.client import text_of
from forerun.traffic.plan import SpeculationMode
from forerun.traffic.run import prompt_fields

AT_ONCE = 8  # concurrent requests
MOST_LIKELY = (20, 5, 1)  # numbers of top log-probabilities to try, since servers limit them
UNREADABLE = "\ufffd"  # in the text of a token with an incomplete character; several tokens have the same such text


@dataclass(frozen=True, slots=True)
class TokenChance:
    """A token of an answer, by its text or name, and the top log-probabilities at its position.

    `likely` is empty if the server returns none, as some servers do for accepted draft tokens.
    """

    token: str
    likely: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RemoteAnswer:
    """An answer as text, and as tokens if the server returns them; `stopped`: whether the model ended it."""

    text: str
    tokens: tuple[TokenChance, ...]
    stopped: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The texts or names of the tokens, in order."""
        return tuple(each.token for each in self.tokens)


def answer_of(body: Mapping[str, Any]) -> RemoteAnswer:
    """The first choice of a response, with log-probabilities in the format of chats or of completions."""
    choice = body["choices"][0]
    chances = choice.get("logprobs") or {}
    if isinstance(chances.get("content"), list):
        entries = [(each.get("token"), each.get("top_logprobs") or ()) for each in chances["content"]]
        places = [(token, [(top.get("token"), top.get("logprob")) for top in likely]) for token, likely in entries]
    else:
        tops = chances.get("top_logprobs") or [None] * len(chances.get("tokens") or ())
        places = [
            (token, list((likely or {}).items()))
            for token, likely in zip(chances.get("tokens") or (), tops, strict=False)
        ]
    numbers = [
        [(str(name), float(p)) for name, p in likely if isinstance(p, int | float) and p <= 1]  # NaN is left out
        for _, likely in places
    ]
    tokens = tuple(TokenChance(str(token), highest_by_text(n)) for (token, _), n in zip(places, numbers, strict=True))
    return RemoteAnswer(text_of(choice), tokens, choice.get("finish_reason") == "stop")


@dataclass(slots=True)
class AnswerClient:
    """Requests answers of one server in one mode of speculation.

    `most_likely`: how many top log-probabilities the server returns, 0 for none, None before `detect_logprobs`.
    """

    server: RemoteServer
    mode: SpeculationMode
    most_likely: int | None = None

    def body(self, prompt: Passage, temperature: float, max_tokens: int, seed: int, likely: int) -> dict[str, Any]:
        """A request body; `likely`: number of top log-probabilities, 0 for none."""
        chat, dialect = self.server.client.address.chat, self.server.dialect
        chances: dict[str, Any] = {}
        if likely:
            chances = {"logprobs": True, "top_logprobs": likely} if chat else {"logprobs": likely}
        return {
            "model": self.server.model.name,
            **prompt_fields(prompt, chat),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            **dialect.unfiltered,
            **chances,
            **self.mode.field,
        }

    async def answer(self, body: Mapping[str, Any]) -> RemoteAnswer:
        """The answer to a request. Raises InvalidRequest if the server refuses it, or for an answer in another form."""
        client = self.server.client
        answer = await client.complete(body)
        try:
            return answer_of(answer)
        except (AttributeError, LookupError, TypeError, OverflowError) as error:
            problem = f"does not answer in OpenAI's form: {shown(answer)}"
            raise InvalidRequest(client.address.url_option, f"{client.address.base} {problem}.") from error

    async def detect_logprobs(self, prompt: Passage, limit: TimeLimit = NO_LIMIT) -> None:
        """Set `most_likely`, by requesting fewer log-probabilities until the server accepts.

        Raises InvalidRequest if the server does not answer in time.
        """
        try:
            async with asyncio.timeout(limit.timeout_s):
                await self.server.client.complete(self.body(prompt, 0.0, 2, 0, 0))
                self.most_likely = 0
                for likely in MOST_LIKELY:
                    with suppress(InvalidRequest):
                        answer = await self.answer(self.body(prompt, 0.0, 2, 0, likely))
                        if answer.tokens and answer.tokens[0].likely:
                            self.most_likely = likely
                            return
        except TimeoutError as error:
            base = self.server.client.address.base
            raise InvalidRequest("time_limit", f"{base} did not answer in time: allow more seconds.") from error

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
        """The answers to all prompts, each with its seed, `at_once` concurrently, in the order of the prompts.

        At the time limit, open requests are cancelled, and the answers up to the first missing one are returned.
        """
        indices, answers = iter(range(len(prompts))), dict[int, RemoteAnswer]()

        async def work() -> None:
            for index in indices:
                body = self.body(prompts[index], temperature, max_tokens, seeds[index], likely)
                answers[index] = await self.answer({**body, **(extra or {})})
                report(f"{len(answers)} of {len(prompts)}", len(answers) / len(prompts))

        with suppress(TimeoutError):
            async with asyncio.timeout(limit.timeout_s):
                await asyncio.gather(*(work() for _ in range(min(at_once, len(prompts)))))
        return [answers[index] for index in takewhile(answers.__contains__, range(len(prompts)))]
