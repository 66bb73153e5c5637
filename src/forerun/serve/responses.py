"""Responses: an answer as the object and the events of OpenAI's /v1/responses.

An answer is at most two items: the reasoning, where the template has some, and the message. A stream opens each item
and its one part, adds texts, and closes them; the whole object stands in the first events and in the last one. Nothing
is kept here, so a response cannot be asked for again by its id.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from forerun.engine.delta import Delta
from forerun.output import Answers
from forerun.serve.answers import counts_of, num_reasoning, speculation_object
from forerun.serve.asking import Asked
from forerun.serve.problems import ApiError
from forerun.serve.reasoning import PartKind, ReasoningSplitter, TokenCounter
from forerun.serve.spelled import TokenTexts, chat_entries

EVENTS = {"reasoning": "response.reasoning_text", "content": "response.output_text"}
ECHOED = ("metadata", "user", "safety_identifier", "prompt_cache_key", "top_logprobs", "max_output_tokens")


@dataclass(slots=True)
class OutputItem:
    """One item of the output: its kind, its id and what it says so far."""

    kind: PartKind
    id: str
    index: int
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        """The one part of its content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def item(self, status: str, empty: bool = False) -> dict[str, Any]:
        """The item; when it is opened it is still empty."""
        own: dict[str, Any] = {"id": self.id, "status": status, "content": [] if empty else [self.part()]}
        if self.kind == "reasoning":
            return {"type": "reasoning", "summary": [], **own}
        return {"type": "message", "role": "assistant", **own}


@dataclass(slots=True)
class ResponseWriter:
    """Writes one body's answer as a response."""

    asked: Asked
    answers: Answers
    texts: TokenTexts
    model: str
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(24)}")
    created: int = field(default_factory=lambda: int(time.time()))
    items: list[OutputItem] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)  # log-probabilities of tokens of which nothing is told
    num_events: int = 0
    named = True
    splitter: ReasoningSplitter = field(init=False)
    counter: TokenCounter = field(init=False)

    def __post_init__(self) -> None:
        self.splitter = ReasoningSplitter(self.asked.reasoning)
        self.counter = TokenCounter(self.asked.reasoning, self.texts)

    def whole(self) -> dict[str, Any]:
        """The response, once it is finished."""
        for sequence in self.answers.sequences:
            for delta in self.answers.answers[sequence.id].deltas:
                self.take(delta)
        return self.response()

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events of one delta; those that open the response come with the first."""
        found = []
        if not self.num_events:
            found += [self.event(f"response.{kind}", response=self.response("in_progress", [])) for kind in OPENING]
        return found + self.take(delta)

    def last_chunks(self) -> list[dict[str, Any]]:
        """The event that has the whole response."""
        response = self.response()
        return [self.event(f"response.{response['status']}", response=response)]

    def failed(self, problem: ApiError) -> dict[str, Any]:
        """An error in the midst of a stream."""
        response = self.response("failed", [each.item("incomplete") for each in self.items])
        error = {"code": "server_error", "message": problem.message}
        return self.event("response.failed", response=response | {"error": error})

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """One event, numbered."""
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **fields}

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """Add a delta to the items; the events that say so."""
        ends = delta.finish_reason is not None
        logprobs = self.logprobs_of(delta)
        parts = self.splitter.feed(delta.text) + (self.splitter.close() if ends else [])
        if not self.asked.include_reasoning:
            parts = [(kind, text) for kind, text in parts if kind == "content"]
        if logprobs and not any(kind == "content" for kind, _ in parts):
            parts.append(("content", ""))
        if ends and not any(kind == "content" for kind, _ in parts) and not self.items:
            parts.append(("content", ""))  # an answer has an item at least
        found: list[dict[str, Any]] = []
        for kind, text in parts:
            found += self.grow(kind, text, logprobs if kind == "content" else [])
            logprobs = [] if kind == "content" else logprobs
        return found + (self.close(delta.finish_reason) if ends else [])

    def logprobs_of(self, delta: Delta) -> list[dict[str, Any]]:
        """The log-probabilities of the tokens that are now known to be of the message."""
        counter = self.counter
        before = counter.num_reasoning, counter.num_content
        counter.feed(delta.token_ids)
        self.entries += chat_entries(delta.logprobs, self.texts)
        first = counter.num_reasoning - before[0]
        last = first + counter.num_content - before[1]
        found, self.entries = self.entries[first:last], self.entries[last:]
        return found

    def grow(self, kind: PartKind, text: str, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add text to the item of its kind, which is opened first, and the one before it closed."""
        found = []
        if not self.items or self.items[-1].kind != kind:
            found += self.close("stop")
            prefix = "rs" if kind == "reasoning" else "msg"
            item = OutputItem(kind, f"{prefix}_{secrets.token_hex(24)}", len(self.items))
            self.items.append(item)
            opened = item.item("in_progress", empty=True)
            found.append(self.event("response.output_item.added", output_index=item.index, item=opened))
            found.append(self.event("response.content_part.added", **self.place(item), part=item.part()))
        item = self.items[-1]
        item.text += text
        item.logprobs += logprobs
        if text or logprobs:
            more = {"logprobs": logprobs} if kind == "content" else {}
            found.append(self.event(f"{EVENTS[kind]}.delta", **self.place(item), delta=text, **more))
        return found

    def close(self, finish_reason: str | None) -> list[dict[str, Any]]:
        """Close the last item, if there is one."""
        if not self.items:
            return []
        item, status = self.items[-1], STATUS.get(finish_reason or "", "incomplete")
        more = {"logprobs": list(item.logprobs)} if item.kind == "content" else {}
        return [
            self.event(f"{EVENTS[item.kind]}.done", **self.place(item), text=item.text, **more),
            self.event("response.content_part.done", **self.place(item), part=item.part()),
            self.event("response.output_item.done", output_index=item.index, item=item.item(status)),
        ]

    def place(self, item: OutputItem) -> dict[str, Any]:
        """Where a part is."""
        return {"item_id": item.id, "output_index": item.index, "content_index": 0}

    def response(self, status: str = "", output: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The response object; of a finished one without arguments."""
        (sequence,) = self.answers.sequences
        if output is None:
            reason = self.answers.answers[sequence.id].deltas[-1].finish_reason
            status = STATUS.get(reason or "", "incomplete")
            output = [each.item("completed") for each in self.items[:-1]]
            output += [each.item(status) for each in self.items[-1:]]
        body, params = self.asked.body, sequence.params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.get("instructions"),
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "tools": [],
            "tool_choice": body.get("tool_choice") or "auto",
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": {"type": "text"}} | (body.get("text") or {}),
            "truncation": "disabled",
            "store": False,
            "background": False,
            "system_fingerprint": self.answers.fingerprint,
            "seed": self.asked.seed,
            **({} if status in ("in_progress", "failed") else {"usage": self.usage()}),
            **{name: body.get(name) for name in ECHOED if body.get(name) is not None or name == "metadata"},
        }

    def usage(self) -> dict[str, Any]:
        """Tokens of the input and of the output, and what became of the guesses."""
        (sequence,) = self.answers.sequences
        reasoned = num_reasoning(self.asked, self.answers, self.texts)
        return {
            "input_tokens": sequence.num_prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sequence.num_output,
            "output_tokens_details": {"reasoning_tokens": reasoned},
            "total_tokens": sequence.num_prompt + sequence.num_output,
            "speculation": speculation_object(counts_of(self.answers)),
        }


OPENING = ("created", "in_progress")
STATUS = {"stop": "completed"}  # by finish reason; of any other one it is incomplete
