"""Answers: results of the library as OpenAI's objects, whole and in chunks.

This file decides the shape of completions and chat completions; `responses.py` that of responses, and
`message_answers.py` that of Anthropic's messages. Beside the fields of those interfaces there are `seed`, which with
the same body and `system_fingerprint` gives the same answer again, `usage.speculation`, the counts of the request's
guesses, `reasoning_content`, what a chat's answer has between the tags of its reasoning, and `draft`, what a round
drafted.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from forerun.accept.delta import Delta
from forerun.output import Answers, CompletionOutput, RequestOutput
from forerun.sampling.logprobs import TokenLogprobs
from forerun.serve.logprob_text import (
    OffsetCounter,
    PromptEcho,
    TokenTexts,
    chat_entries,
    completion_lists,
    prompt_entries,
)
from forerun.serve.parse import Asked
from forerun.serve.parts import AnswerPart, AnswerSplitter, TokenCounter
from forerun.serve.problems import ApiError

CALLS = "tool_calls"  # the finish_reason of an answer that calls
OF_SPECULATION = (
    "num_rounds",
    "num_drafted",
    "num_accepted",
    "num_forced",
    "accepted_at_depth",
    "acceptance_rate",
    "tokens_per_round",
    "gain",
)


@dataclass(slots=True)
class Writer(ABC):
    """Writes one body's answer, whole or as the events of a stream.

    `named` says whether events have their type as a name, and the last one says that it is; otherwise [DONE] does.
    """

    asked: Asked
    answers: Answers
    texts: TokenTexts
    model: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    named: bool = True

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer to a body that is no stream, once all samples are finished."""

    @abstractmethod
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of a stream for one delta; none where it has nothing to show yet."""

    @abstractmethod
    def last_chunks(self) -> list[dict[str, Any]]:
        """The events behind those of the last delta."""

    def failed(self, problem: ApiError) -> dict[str, Any]:
        """The last event of a stream in which an error was met."""
        return problem.body

    @property
    def deltas(self) -> list[Delta]:
        """The deltas so far of an answer with one sample."""
        (sample,) = self.answers.answers.values()
        return sample.deltas

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(samples[0].num_prompt for _, samples in self.answers.requests)

    @property
    def num_cached(self) -> int:
        """How many of them were known already and not read."""
        return sum(samples[0].num_cached or 0 for _, samples in self.answers.requests)

    @property
    def num_output(self) -> int:
        """Tokens of all answers so far."""
        return sum(sequence.num_output for sequence in self.answers.sequences)

    @property
    def num_reasoning(self) -> int:
        """How many of these are reasoning, tags included."""
        total = 0
        for sequence in self.answers.sequences if self.asked.form.reasons else ():
            counter = TokenCounter(self.asked.form, self.texts)
            counter.feed(sequence.tokens[sequence.num_prompt :])
            total += counter.num_reasoning
        return total

    def speculation(self) -> dict[str, Any]:
        """What became of the guesses, by the names that the counts have everywhere."""
        counts = self.answers.counts()
        return {name: getattr(counts, name) for name in OF_SPECULATION}


@dataclass(slots=True)
class AnswerWriter(Writer):
    """Writes one body's answer as completions or chat completions, whole or in chunks."""

    named: bool = False
    offsets: dict[int, OffsetCounter] = field(default_factory=dict)  # by choice
    begun: set[int] = field(default_factory=set)
    splitters: dict[int, AnswerSplitter] = field(default_factory=dict)  # by choice
    num_rounds: Counter[int] = field(default_factory=Counter)  # told so far, by choice
    echoes: dict[int, PromptEcho] = field(default_factory=dict)  # by prompt

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
        answer = self.head() | {"choices": choices, "usage": self.usage()}
        return answer | self.of_prompt(outputs[0]) if self.chat else answer

    def choice(self, index: int, result: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """One sample's answer, put together of what a stream shows."""
        sequence = self.answers.requests[index // self.asked.n][1][sample.index]
        deltas = self.answers.answers[sequence.id].deltas
        shown = [self.shown(index, delta) for delta in deltas]
        joined = {
            name: "".join(each.get(name, "") for each in shown) for name in ("text", "content", "reasoning_content")
        }
        choice = {"index": index, **self.end(index, deltas[-1])}
        if self.chat:
            calls = [call for each in shown for call in each.get("tool_calls", ())]
            message: dict[str, Any] = {"role": "assistant", "content": joined["content"], "refusal": None}
            if calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = [{key: call[key] for key in call if key != "index"} for call in calls]
            if self.asked.form.reasons and self.asked.include_reasoning:
                message["reasoning_content"] = joined["reasoning_content"] or None
            choice["message"] = message
        else:
            choice |= {"text": joined["text"], **self.of_prompt(result)}
        details = self.details(index, sample.logprobs, sample.token_ids)
        if self.asked.echo and details["logprobs"] is not None:
            details["logprobs"] = self.with_prompt(index, result.prompt_logprobs, details["logprobs"])
        return choice | details

    def end(self, index: int, delta: Delta) -> dict[str, Any]:
        """Why a choice ends with a delta; null where it goes on."""
        reason, stop = delta.finish_reason, delta.stop_reason
        if self.asked.only_prompt and reason is not None:
            reason, stop = "length", None
        called = self.chat and reason == "stop" and self.splitters[index].num_calls
        return {"finish_reason": CALLS if called else reason} | ({} if reason is None else {"stop_reason": stop})

    def echo_of(self, index: int) -> PromptEcho:
        """The prompt of a choice, as the beginning of its text."""
        number = index // self.asked.n
        if number not in self.echoes:
            request, samples = self.answers.requests[number]
            ids, skip = samples[0].tokens[: samples[0].num_prompt], samples[0].params.skip_special_tokens
            self.echoes[number] = PromptEcho.of(request.prompt, ids, self.texts.tokenizer, skip)
        return self.echoes[number]

    def with_prompt(self, index: int, prompt: Seq[TokenLogprobs], lists: Mapping[str, Any]) -> dict[str, Any]:
        """The log-probabilities of a completion, behind those of its prompt, whose first token has none."""
        echo, (_, samples) = self.echo_of(index), self.answers.requests[index // self.asked.n]
        behind_first = completion_lists(prompt, self.texts, OffsetCounter())
        first = self.texts.text_of(samples[0].tokens[0])
        return {
            "tokens": [first, *behind_first["tokens"], *lists["tokens"]],
            "token_logprobs": [None, *behind_first["token_logprobs"], *lists["token_logprobs"]],
            "top_logprobs": [None, *behind_first["top_logprobs"], *lists["top_logprobs"]],
            "text_offset": [*echo.offsets, *lists["text_offset"]],
        }

    def details(self, index: int, logprobs: Seq[TokenLogprobs], tokens: Seq[int]) -> dict[str, Any]:
        """Log-probabilities, null where they were not asked for, and token ids where they were."""
        logprobs, tokens = ((), ()) if self.asked.only_prompt else (logprobs, tokens)
        details: dict[str, Any] = {"logprobs": None}
        params = self.asked.requests[0].sampling_params
        if params is not None and params.logprobs is not None:
            if self.chat:
                details["logprobs"] = {"content": chat_entries(logprobs, self.texts), "refusal": None}
            else:
                first = len(self.echo_of(index).text) if self.asked.echo else 0
                offsets = self.offsets.setdefault(index, OffsetCounter(first))
                details["logprobs"] = completion_lists(logprobs, self.texts, offsets)
        if self.asked.return_token_ids:
            details["token_ids"] = list(tokens)
        return details

    def of_prompt(self, result: RequestOutput) -> dict[str, Any]:
        """What was asked to be told of the prompt."""
        fields: dict[str, Any] = {}
        if self.asked.return_token_ids:
            fields["prompt_token_ids"] = list(result.prompt_token_ids)
        params = self.asked.requests[0].sampling_params
        if params is not None and params.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_entries(result.prompt_logprobs, self.texts)
        return fields

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a stream for one delta; none where it has nothing to show yet."""
        index = self.index_of(delta)
        events = []
        shown = self.shown(index, delta)
        if self.chat and index not in self.begun:
            self.begun.add(index)
            first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            events.append(self.chunk([first | {"logprobs": None}]))
        details = self.details(index, delta.logprobs, delta.token_ids)
        if delta.draft is not None:
            self.num_rounds[index] += 1
            details["draft"] = draft_object(delta, self.num_rounds[index], self.asked.drafters, self.texts)
        detail = details["logprobs"] or details.get("token_ids") or details.get("draft")
        if not (any(shown.values()) or delta.finish_reason or detail):
            return events
        choice = {"index": index, **self.end(index, delta), **({"delta": shown} if self.chat else shown)}
        return [*events, self.chunk([choice | details])]

    def shown(self, index: int, delta: Delta) -> dict[str, Any]:
        """The text and the calls that a delta adds to a choice, by the fields that they belong to."""
        if not self.chat:
            text = "" if self.asked.only_prompt else delta.text
            if self.asked.echo and index not in self.begun:
                self.begun.add(index)
                text = self.echo_of(index).text + text
            return {"text": text}
        splitter = self.splitters[index] = self.splitters.get(index) or AnswerSplitter(self.asked.form)
        num_calls = splitter.num_calls
        parts = splitter.take(delta)
        fields: dict[str, Any] = {}
        if self.asked.include_reasoning and (thought := text_of(parts, "reasoning")):
            fields["reasoning_content"] = thought
        if calls := [part.call for part in parts if part.call]:
            fields["tool_calls"] = [call.described(number) for number, call in enumerate(calls, num_calls)]
        text = text_of(parts, "content")
        if text or not (fields or delta.finish_reason):
            fields["content"] = text
        return fields

    def chunk(self, choices: Seq[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """One chunk; it has a usage, or null for it, where a usage was asked for."""
        chunk = self.head(chunk=True) | {"choices": list(choices)}
        if self.asked.continuous_usage and usage is None:
            usage = self.token_counts()
        return chunk | {"usage": usage} if self.asked.include_usage else chunk

    def last_chunks(self) -> list[dict[str, Any]]:
        """The chunk of the usage, where it was asked for."""
        return [self.chunk([], self.usage())] if self.asked.include_usage else []

    def index_of(self, delta: Delta) -> int:
        """The number of the choice that a delta belongs to."""
        first = {samples[0].request_id: number for number, (_, samples) in enumerate(self.answers.requests)}
        return first[delta.request_id] * self.asked.n + delta.sample

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once, and of all answers; and what became of the guesses."""
        usage = {
            **self.token_counts(),
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "speculation": self.speculation(),
        }
        if self.asked.form.reasons:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return usage

    def token_counts(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once, and of all answers so far."""
        num_prompt, num_output = self.num_prompt, 0 if self.asked.only_prompt else self.num_output
        return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


def text_of(parts: Seq[AnswerPart], kind: str) -> str:
    """The text of one kind."""
    return "".join(part.text for part in parts if part.kind == kind)


def draft_object(delta: Delta, round_: int, drafters: Seq[str], texts: TokenTexts) -> dict[str, Any]:
    """What a round drafted: its tokens and the text that it made certain, each with its origin, and its guesses.

    `first` is the ordinal of the first token, `token` of a segment that of the token behind it. A guess's `parent` is
    the number of the guess that it follows, -1 the text so far.
    """
    draft, drafter = delta.draft, -1 if delta.outcome is None else delta.outcome.drafter
    assert draft is not None, "only what was asked for is told"
    if draft.tokens and len(drafters) == 1:
        drafter = 0
    guesses = zip(draft.tokens, draft.parents, draft.accepted, strict=True)
    return {
        "round": round_,
        "drafter": drafters[drafter] if 0 <= drafter < len(drafters) else None,
        "first": draft.first,
        "tokens": [
            {"id": token, "text": texts.text_of(token), "origin": origin.value}
            for token, origin in zip(delta.token_ids, delta.origins, strict=True)
        ],
        "segments": [
            {"text": segment.text, "origin": segment.origin.value, "token": place}
            for segment, place in zip(delta.segments, draft.places, strict=True)
        ],
        "guesses": [
            {"id": token, "text": texts.text_of(token), "parent": parent, "accepted": accepted}
            for token, parent, accepted in guesses
        ],
    }
