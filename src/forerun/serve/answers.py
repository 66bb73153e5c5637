"""Answers: results of the library as OpenAI's completion and chat completion objects, complete or as stream chunks.

`responses.py` writes OpenAI's responses and `message_answers.py` Anthropic's messages. Fields beyond those interfaces:
`seed` (the same body, seed and `system_fingerprint` give the same answer), `usage.speculation` (counts of drafted and
accepted tokens), `reasoning_content` (the text between the reasoning tags of a chat answer) and `draft` (the draft of
one round).
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
from forerun.sampling.params import SamplingParams
from forerun.serve.logprob_text import (
    OffsetCounter,
    PromptEcho,
    TokenTexts,
    chat_entries,
    completion_lists,
    prompt_entries,
)
from forerun.serve.parse import ParsedBody
from forerun.serve.parts import AnswerPart, AnswerSplitter, TokenCounter
from forerun.serve.problems import ApiError

CALLS = "tool_calls"  # the finish_reason of an answer with tool calls
SPECULATION_COUNTS = (
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
    """Writes the answer to one request body, complete or as server-sent events.

    If `named`, every event carries its type as the SSE event name; otherwise the stream ends with [DONE].
    """

    parsed: ParsedBody
    answers: Answers
    texts: TokenTexts
    model: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    named: bool = True
    splitters: dict[int, AnswerSplitter] = field(default_factory=dict)  # by index of the choice

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The complete answer, once all samples are finished."""

    @abstractmethod
    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The stream events for one delta; empty if it has nothing to show yet."""

    @abstractmethod
    def last_chunks(self) -> list[dict[str, Any]]:
        """The stream events after those of the last delta."""

    def failed(self, problem: ApiError) -> dict[str, Any]:
        """The last event of a stream that failed."""
        return problem.body

    def parts_of(self, delta: Delta, index: int = 0) -> list[AnswerPart]:
        """The parts that a delta adds to a choice, without reasoning unless the body includes it."""
        if index not in self.splitters:
            self.splitters[index] = AnswerSplitter(self.parsed.form)
        parts = self.splitters[index].take(delta)
        return parts if self.parsed.include_reasoning else [part for part in parts if part.kind != "reasoning"]

    @property
    def deltas(self) -> list[Delta]:
        """The deltas so far of an answer with a single sample."""
        (sample,) = self.answers.answers.values()
        return sample.deltas

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of all samples, which differ in the seed only."""
        return self.answers.sequences[0].params

    @property
    def common_fields(self) -> dict[str, Any]:
        """The fields that objects of all interfaces have, with the seed that repeats the answer."""
        fingerprint, seed = self.answers.fingerprint, self.answers.sequences[0].seed
        return {"model": self.model, "system_fingerprint": fingerprint, "seed": seed}

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(samples[0].num_prompt for _, samples in self.answers.requests)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return sum(samples[0].num_cached or 0 for _, samples in self.answers.requests)

    @property
    def num_output(self) -> int:
        """Tokens of all answers so far."""
        return sum(sequence.num_output for sequence in self.answers.sequences)

    @property
    def num_reasoning(self) -> int:
        """Output tokens that are reasoning, including its tags."""
        total = 0
        for sequence in self.answers.sequences if self.parsed.form.reasons else ():
            counter = TokenCounter(self.parsed.form, self.texts)
            counter.feed(sequence.tokens[sequence.num_prompt :])
            total += counter.num_reasoning
        return total

    def speculation(self) -> dict[str, Any]:
        """Counts of speculation, under the names of `Counts`."""
        counts = self.answers.counts()
        return {name: getattr(counts, name) for name in SPECULATION_COUNTS}


@dataclass(slots=True)
class AnswerWriter(Writer):
    """Writes completions and chat completions."""

    named: bool = False
    offsets: dict[int, OffsetCounter] = field(default_factory=dict)  # by choice
    started: set[int] = field(default_factory=set)  # choices that have a chunk
    num_rounds: Counter[int] = field(default_factory=Counter)  # in the chunks so far, by choice
    echoes: dict[int, PromptEcho] = field(default_factory=dict)  # by index of the prompt
    choices: dict[int, int] = field(init=False)  # the index of the choice, by sequence id

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.choices = {sequence.id: index for index, sequence in enumerate(self.answers.sequences)}

    @property
    def chat(self) -> bool:
        """Whether it is a chat completion."""
        return self.parsed.endpoint == "chat"

    def head(self, chunk: bool = False) -> dict[str, Any]:
        """The fields that every object of this answer has."""
        kind = "chat.completion" if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": f"{kind}.chunk" if chunk and self.chat else kind,
            "created": self.created,
            **self.common_fields,
        }

    def whole(self) -> dict[str, Any]:
        outputs = self.answers.outputs()
        choices = [
            self.choice(number * self.params.n + sample.index, result, sample)
            for number, result in enumerate(outputs)
            for sample in result.outputs
        ]
        answer = self.head() | {"choices": choices, "usage": self.usage()}
        return answer | self.prompt_fields(outputs[0]) if self.chat else answer

    def choice(self, index: int, result: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """One finished choice, joined from the pieces that a stream would send."""
        deltas = self.answers.answers[self.answers.sequences[index].id].deltas
        shown = [self.new_fields(index, delta) for delta in deltas]
        joined = {
            name: "".join(each.get(name, "") for each in shown) for name in ("text", "content", "reasoning_content")
        }
        choice = {"index": index, **self.finish_fields(index, deltas[-1])}
        if self.chat:
            calls = [call for each in shown for call in each.get("tool_calls", ())]
            message: dict[str, Any] = {"role": "assistant", "content": joined["content"], "refusal": None}
            if calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = [{key: call[key] for key in call if key != "index"} for call in calls]
            if self.parsed.form.reasons and self.parsed.include_reasoning:
                message["reasoning_content"] = joined["reasoning_content"] or None
            choice["message"] = message
        else:
            choice |= {"text": joined["text"], **self.prompt_fields(result)}
        details = self.token_fields(index, sample.logprobs, sample.token_ids)
        if self.parsed.echo and details["logprobs"] is not None:
            details["logprobs"] = self.with_prompt(index, result.prompt_logprobs, details["logprobs"])
        return choice | details

    def finish_fields(self, index: int, delta: Delta) -> dict[str, Any]:
        """The finish and stop reason after a delta; null while the choice is unfinished."""
        reason, stop = delta.finish_reason, delta.stop_reason
        if self.parsed.only_prompt and reason is not None:
            reason, stop = "length", None
        called = self.chat and reason == "stop" and self.splitters[index].num_calls
        return {"finish_reason": CALLS if called else reason} | ({} if reason is None else {"stop_reason": stop})

    def echo_of(self, index: int) -> PromptEcho:
        """The prompt of a choice, in the form in which `echo` repeats it."""
        number = index // self.params.n
        if number not in self.echoes:
            request, samples = self.answers.requests[number]
            ids, skip = samples[0].tokens[: samples[0].num_prompt], samples[0].params.skip_special_tokens
            self.echoes[number] = PromptEcho.of(request.prompt, ids, self.texts.tokenizer, skip)
        return self.echoes[number]

    def with_prompt(self, index: int, prompt: Seq[TokenLogprobs], lists: Mapping[str, Any]) -> dict[str, Any]:
        """A completion's log-probabilities with those of its prompt in front; the first prompt token has null."""
        echo, (_, samples) = self.echo_of(index), self.answers.requests[index // self.params.n]
        others = completion_lists(prompt, self.texts, OffsetCounter())  # the prompt tokens after the first
        first = self.texts.text_of(samples[0].tokens[0])
        return {
            "tokens": [first, *others["tokens"], *lists["tokens"]],
            "token_logprobs": [None, *others["token_logprobs"], *lists["token_logprobs"]],
            "top_logprobs": [None, *others["top_logprobs"], *lists["top_logprobs"]],
            "text_offset": [*echo.offsets, *lists["text_offset"]],
        }

    def token_fields(self, index: int, logprobs: Seq[TokenLogprobs], tokens: Seq[int]) -> dict[str, Any]:
        """Log-probabilities (null unless requested), and token ids if requested."""
        logprobs, tokens = ((), ()) if self.parsed.only_prompt else (logprobs, tokens)
        details: dict[str, Any] = {"logprobs": None}
        if self.params.logprobs is not None:
            if self.chat:
                details["logprobs"] = {"content": chat_entries(logprobs, self.texts), "refusal": None}
            else:
                first = len(self.echo_of(index).text) if self.parsed.echo else 0
                offsets = self.offsets.setdefault(index, OffsetCounter(first))
                details["logprobs"] = completion_lists(logprobs, self.texts, offsets)
        if self.parsed.return_token_ids:
            details["token_ids"] = list(tokens)
        return details

    def prompt_fields(self, result: RequestOutput) -> dict[str, Any]:
        """The prompt's token ids and log-probabilities, if requested."""
        fields: dict[str, Any] = {}
        if self.parsed.return_token_ids:
            fields["prompt_token_ids"] = list(result.prompt_token_ids)
        if self.params.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_entries(result.prompt_logprobs, self.texts)
        return fields

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        index = self.choices[delta.seq_id]
        events = []
        shown = self.new_fields(index, delta)
        if self.chat and index not in self.started:
            self.started.add(index)
            first = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            events.append(self.chunk([first | {"logprobs": None}]))
        details = self.token_fields(index, delta.logprobs, delta.token_ids)
        if delta.draft is not None:
            self.num_rounds[index] += 1
            details["draft"] = draft_object(delta, self.num_rounds[index], self.parsed.drafters, self.texts)
        detail = details["logprobs"] or details.get("token_ids") or details.get("draft")
        if not (any(shown.values()) or delta.finish_reason or detail):
            return events
        choice = {"index": index, **self.finish_fields(index, delta), **({"delta": shown} if self.chat else shown)}
        return [*events, self.chunk([choice | details])]

    def new_fields(self, index: int, delta: Delta) -> dict[str, Any]:
        """The text and tool calls that a delta adds to a choice, by field name."""
        if not self.chat:
            text = "" if self.parsed.only_prompt else delta.text
            if self.parsed.echo and index not in self.started:
                self.started.add(index)
                text = self.echo_of(index).text + text
            return {"text": text}
        parts = self.parts_of(delta, index)
        fields: dict[str, Any] = {}
        if thought := text_of(parts, "reasoning"):
            fields["reasoning_content"] = thought
        if calls := [part.call for part in parts if part.call]:
            first = self.splitters[index].num_calls - len(calls)
            fields["tool_calls"] = [call.described(number) for number, call in enumerate(calls, first)]
        text = text_of(parts, "content")
        if text or not (fields or delta.finish_reason):
            fields["content"] = text
        return fields

    def chunk(self, choices: Seq[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """One chunk; with `include_usage` it has the field `usage`, possibly null."""
        chunk = self.head(chunk=True) | {"choices": list(choices)}
        if self.parsed.continuous_usage and usage is None:
            usage = self.token_counts()
        return chunk | {"usage": usage} if self.parsed.include_usage else chunk

    def last_chunks(self) -> list[dict[str, Any]]:
        """The chunk with the usage, if requested."""
        return [self.chunk([], self.usage())] if self.parsed.include_usage else []

    def usage(self) -> dict[str, Any]:
        """Token counts and counts of speculation."""
        usage = {
            **self.token_counts(),
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "speculation": self.speculation(),
        }
        if self.parsed.form.reasons:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return usage

    def token_counts(self) -> dict[str, Any]:
        """Tokens of all prompts, each prompt once, and of all answers so far."""
        num_prompt, num_output = self.num_prompt, 0 if self.parsed.only_prompt else self.num_output
        return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


def text_of(parts: Seq[AnswerPart], kind: str) -> str:
    """The joined text of the parts of one kind."""
    return "".join(part.text for part in parts if part.kind == kind)


def draft_object(delta: Delta, round_: int, drafters: Seq[str], texts: TokenTexts) -> dict[str, Any]:
    """The draft of one round: the tokens it emitted and their text, each with its origin, and all drafted tokens.

    `first` is the index of the first emitted token in the answer; a segment's `token` is the index of the token after
    it. The `parent` of a draft token is its predecessor's index in `guesses`, or -1 at the root.
    """
    draft, drafter = delta.draft, -1 if delta.outcome is None else delta.outcome.drafter
    assert draft is not None, "deltas have drafts if the request has draft_details"
    if draft.tokens and len(drafters) == 1:
        drafter = 0
    nodes = zip(draft.tokens, draft.parents, draft.accepted, strict=True)
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
            for token, parent, accepted in nodes
        ],
    }
