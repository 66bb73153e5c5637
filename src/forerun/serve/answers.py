"""Answers: results of the library as OpenAI's objects, whole and in chunks.

This file decides the shape of completions and chat completions. Beside OpenAI's fields there are `seed`, which with the
same body and `system_fingerprint` gives the same answer again, and `usage.speculation`, the counts of the request's
guesses.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from forerun.accept.outcome import Counts
from forerun.engine.delta import Delta
from forerun.output import Answers, CompletionOutput, RequestOutput
from forerun.sampling.logprobs import TokenLogprobs
from forerun.serve.asking import Asked
from forerun.serve.spelled import OffsetCounter, TokenTexts, chat_entries, completion_lists, prompt_entries


@dataclass(slots=True)
class AnswerWriter:
    """Writes one body's answer, whole or in chunks; `model` and `fingerprint` are what it says of the engine."""

    asked: Asked
    answers: Answers
    texts: TokenTexts
    model: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    offsets: dict[int, OffsetCounter] = field(default_factory=dict)  # by choice
    begun: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"

    @property
    def chat(self) -> bool:
        """Whether it is a chat completion."""
        return self.asked.endpoint == "chat"

    def head(self, chunk: bool = False) -> dict[str, Any]:
        """What stands in every object of this answer."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if chunk and self.chat else kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.answers.fingerprint,
            "seed": self.asked.seed,
        }

    def whole(self) -> dict[str, Any]:
        """The answer to a body that is no stream, once all samples are finished."""
        outputs = self.answers.outputs()
        choices = [
            self.choice(number * self.asked.n + sample.index, result, sample)
            for number, result in enumerate(outputs)
            for sample in result.outputs
        ]
        own = self.head() | {"choices": choices, "usage": self.usage()}
        if self.chat:
            own |= self.of_prompt(outputs[0])
        return own

    def choice(self, index: int, result: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """One sample's answer."""
        choice: dict[str, Any] = {"index": index, "finish_reason": sample.finish_reason}
        choice["stop_reason"] = sample.stop_reason
        if self.chat:
            choice["message"] = {"role": "assistant", "content": sample.text, "refusal": None}
        else:
            choice |= {"text": sample.text, **self.of_prompt(result)}
        return choice | self.details(index, sample.logprobs, sample.token_ids)

    def details(self, index: int, logprobs: Seq[TokenLogprobs], tokens: Seq[int]) -> dict[str, Any]:
        """Log-probabilities, null where they were not asked for, and token ids where they were."""
        own: dict[str, Any] = {"logprobs": None}
        params = self.asked.requests[0].sampling_params
        if params is not None and params.logprobs is not None:
            if self.chat:
                own["logprobs"] = {"content": chat_entries(logprobs, self.texts), "refusal": None}
            else:
                offsets = self.offsets.setdefault(index, OffsetCounter())
                own["logprobs"] = completion_lists(logprobs, self.texts, offsets)
        if self.asked.return_token_ids:
            own["token_ids"] = list(tokens)
        return own

    def of_prompt(self, result: RequestOutput) -> dict[str, Any]:
        """What was asked to be told of the prompt."""
        own: dict[str, Any] = {}
        if self.asked.return_token_ids:
            own["prompt_token_ids"] = list(result.prompt_token_ids)
        params = self.asked.requests[0].sampling_params
        if params is not None and params.prompt_logprobs is not None:
            own["prompt_logprobs"] = prompt_entries(result.prompt_logprobs, self.texts)
        return own

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a stream for one delta; none where it has nothing to show yet."""
        index = self.index_of(delta)
        found = []
        if self.chat and index not in self.begun:
            self.begun.add(index)
            first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            found.append(self.chunk([first | {"logprobs": None}]))
        details = self.details(index, delta.logprobs, delta.token_ids)
        if not (delta.text or delta.finish_reason or details["logprobs"] or details.get("token_ids")):
            return found
        choice: dict[str, Any] = {"index": index, "finish_reason": delta.finish_reason}
        if self.chat:
            choice["delta"] = {"content": delta.text} if delta.text or not delta.finish_reason else {}
        else:
            choice["text"] = delta.text
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return [*found, self.chunk([choice | details])]

    def chunk(self, choices: Seq[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """One chunk; it has a usage, or null for it, where a usage was asked for."""
        own = self.head(chunk=True) | {"choices": list(choices)}
        return own | {"usage": usage} if self.asked.include_usage else own

    def last_chunk(self) -> dict[str, Any]:
        """The chunk of the usage."""
        return self.chunk([], self.usage())

    def index_of(self, delta: Delta) -> int:
        """The number of the choice that a delta belongs to."""
        first = {samples[0].request_id: number for number, (_, samples) in enumerate(self.answers.requests)}
        return first[delta.request_id] * self.asked.n + delta.sample

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once, and of all answers; and what became of the guesses."""
        num_prompt = sum(samples[0].num_prompt for _, samples in self.answers.requests)
        num_output = sum(sequence.num_output for sequence in self.answers.sequences)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "speculation": speculation_object(counts_of(self.answers)),
        }


def counts_of(answers: Answers) -> Counts:
    """What became of the guesses of all samples."""
    counts = Counts()
    for answer in answers.answers.values():
        counts.pace.add(answer.sequence.pace.round_s, answer.sequence.pace.plain_s)
        for delta in answer.deltas:
            if delta.outcome is not None:
                counts.count(delta.outcome)
    return counts


def speculation_object(counts: Counts) -> dict[str, Any]:
    """Counts and rates, by the names that they have everywhere."""
    return {
        "num_rounds": counts.num_rounds,
        "num_drafted": counts.num_drafted,
        "num_accepted": counts.num_accepted,
        "accepted_at_depth": counts.accepted_at_depth,
        "acceptance_rate": counts.acceptance_rate,
        "tokens_per_round": counts.tokens_per_round,
        "gain": counts.gain,
    }
