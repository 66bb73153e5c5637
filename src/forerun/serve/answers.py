"""Answers: results of the library as OpenAI's objects, whole and in chunks.

This file decides the shape of completions and chat completions; `responses.py` that of responses. Beside OpenAI's
fields there are `seed`, which with the same body and `system_fingerprint` gives the same answer again,
`usage.speculation`, the counts of the request's guesses, and `reasoning_content`, what a chat's answer has between the
tags of its reasoning.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from forerun.accept.delta import Delta
from forerun.accept.outcome import Counts
from forerun.output import Answers, CompletionOutput, RequestOutput
from forerun.sampling.logprobs import TokenLogprobs
from forerun.serve.asking import Asked
from forerun.serve.drafts import draft_object
from forerun.serve.echo import PromptEcho
from forerun.serve.parts import AnswerPart, AnswerSplitter, TokenCounter
from forerun.serve.problems import ApiError
from forerun.serve.spelled import OffsetCounter, TokenTexts, chat_entries, completion_lists, prompt_entries

CALLS = "tool_calls"  # the finish_reason of an answer that calls


@runtime_checkable
class Writer(Protocol):
    """Writes one body's answer, whole or as the events of a stream."""

    id: str
    asked: Asked
    answers: Answers
    named: bool  # whether events have their type as a name, and the last one says that it is; otherwise [DONE] does

    def whole(self) -> dict[str, Any]:
        """The answer to a body that is no stream, once all samples are finished."""
        ...

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of a stream for one delta; none where it has nothing to show yet."""
        ...

    def last_chunks(self) -> list[dict[str, Any]]:
        """The events behind those of the last delta."""
        ...

    def failed(self, problem: ApiError) -> dict[str, Any]:
        """The last event of a stream in which an error was met."""
        ...


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
    splitters: dict[int, AnswerSplitter] = field(default_factory=dict)  # by choice
    named = False
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
        own = self.head() | {"choices": choices, "usage": self.usage()}
        if self.chat:
            own |= self.of_prompt(outputs[0])
        return own

    def choice(self, index: int, result: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """One sample's answer."""
        choice: dict[str, Any] = {"index": index, "finish_reason": sample.finish_reason}
        choice["stop_reason"] = sample.stop_reason
        if self.chat:
            splitter, samples = AnswerSplitter(self.asked.form), self.answers.requests[index // self.asked.n][1]
            deltas = self.answers.answers[samples[sample.index].id].deltas
            parts = [part for delta in deltas for part in splitter.take(delta)]
            content, calls = text_of(parts, "content"), [part.call.described() for part in parts if part.call]
            choice["message"] = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                choice["message"] |= {"content": content or None, "tool_calls": calls}
                choice["finish_reason"] = CALLS if sample.finish_reason == "stop" else sample.finish_reason
            if self.asked.form.reasons and self.asked.include_reasoning:
                choice["message"]["reasoning_content"] = text_of(parts, "reasoning") or None
        else:
            choice |= {"text": sample.text, **self.of_prompt(result)}
        if self.asked.only_prompt:
            choice |= {"text": "", "finish_reason": "length", "stop_reason": None}
            details = self.details(index, (), ())
        else:
            details = self.details(index, sample.logprobs, sample.token_ids)
        if self.asked.echo:
            choice["text"] = self.echo_of(index).text + choice["text"]
            if details["logprobs"] is not None:
                details["logprobs"] = self.with_prompt(index, result.prompt_logprobs, details["logprobs"])
        return choice | details

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
        own: dict[str, Any] = {"logprobs": None}
        params = self.asked.requests[0].sampling_params
        if params is not None and params.logprobs is not None:
            if self.chat:
                own["logprobs"] = {"content": chat_entries(logprobs, self.texts), "refusal": None}
            else:
                first = len(self.echo_of(index).text) if self.asked.echo else 0
                offsets = self.offsets.setdefault(index, OffsetCounter(first))
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
        shown = self.shown(index, delta)
        if self.chat and index not in self.begun:
            self.begun.add(index)
            first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            found.append(self.chunk([first | {"logprobs": None}]))
        nothing = self.asked.only_prompt
        details = self.details(index, () if nothing else delta.logprobs, () if nothing else delta.token_ids)
        if delta.draft is not None:
            self.num_rounds[index] += 1
            details["draft"] = draft_object(delta, self.num_rounds[index], self.asked.arms, self.texts)
        told = details["logprobs"] or details.get("token_ids") or details.get("draft")
        if not (any(shown.values()) or delta.finish_reason or told):
            return found
        called = self.chat and delta.finish_reason == "stop" and self.splitters[index].num_calls
        reason = "length" if nothing and delta.finish_reason else delta.finish_reason
        choice: dict[str, Any] = {"index": index, "finish_reason": CALLS if called else reason}
        choice |= {"delta": shown} if self.chat else shown
        if delta.finish_reason is not None:
            choice["stop_reason"] = None if nothing else delta.stop_reason
        return [*found, self.chunk([choice | details])]

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
        found: dict[str, Any] = {}
        if self.asked.include_reasoning and (thought := text_of(parts, "reasoning")):
            found["reasoning_content"] = thought
        if calls := [part.call for part in parts if part.call]:
            found["tool_calls"] = [call.described(number) for number, call in enumerate(calls, num_calls)]
        text = text_of(parts, "content")
        if text or not (found or delta.finish_reason):
            found["content"] = text
        return found

    def chunk(self, choices: Seq[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """One chunk; it has a usage, or null for it, where a usage was asked for."""
        own = self.head(chunk=True) | {"choices": list(choices)}
        if self.asked.continuous_usage and usage is None:
            usage = self.token_counts()
        return own | {"usage": usage} if self.asked.include_usage else own

    def last_chunks(self) -> list[dict[str, Any]]:
        """The chunk of the usage, where it was asked for."""
        return [self.chunk([], self.usage())] if self.asked.include_usage else []

    def failed(self, problem: ApiError) -> dict[str, Any]:
        """An error in the midst of a stream."""
        return problem.body

    def index_of(self, delta: Delta) -> int:
        """The number of the choice that a delta belongs to."""
        first = {samples[0].request_id: number for number, (_, samples) in enumerate(self.answers.requests)}
        return first[delta.request_id] * self.asked.n + delta.sample

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once, and of all answers; and what became of the guesses."""
        own = {
            **self.token_counts(),
            "prompt_tokens_details": {"cached_tokens": num_cached(self.answers)},
            "speculation": speculation_object(counts_of(self.answers)),
        }
        if self.asked.form.reasons:
            own["completion_tokens_details"] = {"reasoning_tokens": num_reasoning(self.asked, self.answers, self.texts)}
        return own

    def token_counts(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once, and of all answers so far."""
        num_prompt = sum(samples[0].num_prompt for _, samples in self.answers.requests)
        num_output = 0 if self.asked.only_prompt else sum(sequence.num_output for sequence in self.answers.sequences)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }


def text_of(parts: Seq[AnswerPart], kind: str) -> str:
    """The text of one kind."""
    return "".join(part.text for part in parts if part.kind == kind)


def num_cached(answers: Answers) -> int:
    """How many tokens of all prompts, each counted once, were known already and not read."""
    return sum(samples[0].num_cached or 0 for _, samples in answers.requests)


def num_reasoning(asked: Asked, answers: Answers, texts: TokenTexts) -> int:
    """How many tokens of all samples are reasoning, tags included."""
    found = 0
    for sequence in answers.sequences if asked.form.reasons else ():
        counter = TokenCounter(asked.form, texts)
        counter.feed(sequence.tokens[sequence.num_prompt :])
        found += counter.num_reasoning
    return found


def counts_of(answers: Answers) -> Counts:
    """What became of the guesses of all samples."""
    counts = Counts()
    for answer in answers.answers.values():
        counts.pace.join(answer.sequence.pace)
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
        "num_forced": counts.num_forced,
        "accepted_at_depth": counts.accepted_at_depth,
        "acceptance_rate": counts.acceptance_rate,
        "tokens_per_round": counts.tokens_per_round,
        "gain": counts.gain,
    }
