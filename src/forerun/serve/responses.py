"""Responses: answers as the object and the events of OpenAI's /v1/responses.

The output is a list of items: reasoning, messages and function calls. A stream adds an item, appends text or a call's
arguments, and finishes it; the first events and the last one contain the whole response object. Responses are not
stored, so they cannot be retrieved by id.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from forerun.accept.delta import Delta
from forerun.serve.answers import Writer
from forerun.serve.calls import ToolCall
from forerun.serve.logprob_text import chat_entries
from forerun.serve.parts import AnswerPart, AnswerSplitter, PartKind, TokenCounter
from forerun.serve.problems import ApiError

IDS: dict[PartKind, str] = {"reasoning": "rs", "content": "msg", "call": "fc"}
EVENTS = {"reasoning": "response.reasoning_text", "content": "response.output_text"}
OPENING = ("created", "in_progress")
STATUS = {"stop": "completed"}  # by finish reason; all others are incomplete
ECHOED = ("metadata", "user", "safety_identifier", "prompt_cache_key", "top_logprobs", "max_output_tokens")


@dataclass(slots=True)
class OutputItem:
    """One output item: its text so far, or its function call."""

    kind: PartKind
    id: str
    index: int
    call: ToolCall | None = None
    status: str = "in_progress"
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        """The content part of the item."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def item(self, empty: bool = False) -> dict[str, Any]:
        """The item object; `empty` when it is added to a stream."""
        if self.call is not None:
            called = {"name": self.call.name, "arguments": "" if empty else self.call.arguments}
            return {"type": "function_call", "id": self.id, "status": self.status, "call_id": self.call.id, **called}
        fields: dict[str, Any] = {"id": self.id, "status": self.status, "content": [] if empty else [self.part()]}
        if self.kind == "reasoning":
            return {"type": "reasoning", "summary": [], **fields}
        return {"type": "message", "role": "assistant", **fields}


@dataclass(slots=True)
class ResponseWriter(Writer):
    """Writes answers as response objects."""

    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(24)}")
    items: list[OutputItem] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)  # log-probabilities of tokens whose kind is undecided
    num_events: int = 0
    splitter: AnswerSplitter = field(init=False)
    counter: TokenCounter = field(init=False)

    def __post_init__(self) -> None:
        self.splitter = AnswerSplitter(self.parsed.form)
        self.counter = TokenCounter(self.parsed.form, self.texts)

    def whole(self) -> dict[str, Any]:
        """The response object of a finished answer."""
        for delta in self.deltas:
            self.take(delta)
        return self.response()

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events for one delta; the first delta also opens the response."""
        events = []
        if not self.num_events:
            events += [self.event(f"response.{kind}", response=self.response("in_progress")) for kind in OPENING]
        return events + self.take(delta)

    def last_chunks(self) -> list[dict[str, Any]]:
        """The last event, with the whole response."""
        response = self.response()
        return [self.event(f"response.{response['status']}", response=response)]

    def failed(self, problem: ApiError) -> dict[str, Any]:
        """The error event of a stream."""
        for item in self.items[-1:]:
            item.status = item.status.replace("in_progress", "incomplete")
        response = self.response("failed")
        error = {"code": "server_error", "message": problem.message}
        return self.event("response.failed", response=response | {"error": error})

    def event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event with its sequence number."""
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **fields}

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """Add a delta to the items; returns the events."""
        logprobs = self.logprobs_of(delta)
        parts = [
            part for part in self.splitter.take(delta) if part.kind != "reasoning" or self.parsed.include_reasoning
        ]
        if logprobs and not any(part.kind == "content" for part in parts):
            parts.append(AnswerPart("content"))
        if delta.finish_reason and not parts and not self.items:
            parts.append(AnswerPart("content"))  # an answer has at least one item
        events: list[dict[str, Any]] = []
        for part in parts:
            if part.call is not None:
                events += self.called(part.call)
                continue
            events += self.grow(part.kind, part.text, logprobs if part.kind == "content" else [])
            logprobs = [] if part.kind == "content" else logprobs
        return events + (self.close(delta.finish_reason) if delta.finish_reason else [])

    def logprobs_of(self, delta: Delta) -> list[dict[str, Any]]:
        """The log-probabilities of the tokens that are now known to be message text."""
        kinds = self.counter.feed(delta.token_ids)
        entries = self.entries + chat_entries(delta.logprobs, self.texts)
        self.entries = entries[len(kinds) :]
        return [entry for kind, entry in zip(kinds, entries, strict=False) if kind == "content"]

    def opened(self, kind: PartKind, call: ToolCall | None = None) -> list[dict[str, Any]]:
        """Finish the last item and add a new one; returns the events."""
        closing = self.close("stop")
        item = OutputItem(kind, f"{IDS[kind]}_{secrets.token_hex(24)}", len(self.items), call)
        self.items.append(item)
        empty = item.item(empty=True)
        return [*closing, self.event("response.output_item.added", output_index=item.index, item=empty)]

    def called(self, call: ToolCall) -> list[dict[str, Any]]:
        """Add a complete function call; returns the events."""
        opening = self.opened("call", call)
        item = self.items[-1]
        item.status = "completed"
        place, kind = {"item_id": item.id, "output_index": item.index}, "response.function_call_arguments"
        return [
            *opening,
            self.event(f"{kind}.delta", **place, delta=call.arguments),
            self.event(f"{kind}.done", **place, name=call.name, arguments=call.arguments),
            self.event("response.output_item.done", output_index=item.index, item=item.item()),
        ]

    def grow(self, kind: PartKind, text: str, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Append text to the last item, or to a new one if that is of another kind; returns the events."""
        events = []
        if not self.items or self.items[-1].kind != kind:
            events += self.opened(kind)
            item = self.items[-1]
            events.append(self.event("response.content_part.added", **self.place(item), part=item.part()))
        item = self.items[-1]
        item.text += text
        item.logprobs += logprobs
        if text or logprobs:
            more = {"logprobs": logprobs} if kind == "content" else {}
            events.append(self.event(f"{EVENTS[kind]}.delta", **self.place(item), delta=text, **more))
        return events

    def close(self, finish_reason: str | None) -> list[dict[str, Any]]:
        """Finish the last item if it is in progress; returns the events."""
        if not self.items or self.items[-1].status != "in_progress":
            return []
        item = self.items[-1]
        item.status = STATUS.get(finish_reason or "", "incomplete")
        more = {"logprobs": list(item.logprobs)} if item.kind == "content" else {}
        return [
            self.event(f"{EVENTS[item.kind]}.done", **self.place(item), text=item.text, **more),
            self.event("response.content_part.done", **self.place(item), part=item.part()),
            self.event("response.output_item.done", output_index=item.index, item=item.item()),
        ]

    def place(self, item: OutputItem) -> dict[str, Any]:
        """The fields that locate a content part."""
        return {"item_id": item.id, "output_index": item.index, "content_index": 0}

    def response(self, status: str = "") -> dict[str, Any]:
        """The response object; the default status is that of the finished answer."""
        if not status:
            status = STATUS.get(self.deltas[-1].finish_reason or "", "incomplete")
        body, params = self.parsed.body, self.answers.sequences[0].params
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
            "output": [each.item() for each in self.items],
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "tools": [{"strict": None, "parameters": None, **tool} for tool in body.get("tools") or ()],
            "tool_choice": body.get("tool_choice") or "auto",
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": {"type": "text"}} | (body.get("text") or {}),
            "truncation": "disabled",
            "store": False,
            "background": False,
            "system_fingerprint": self.answers.fingerprint,
            "seed": self.parsed.seed,
            **({} if status in ("in_progress", "failed") else {"usage": self.usage()}),
            **{name: body.get(name) for name in ECHOED if body.get(name) is not None or name == "metadata"},
        }

    def usage(self) -> dict[str, Any]:
        """Counts of input and output tokens, and of speculation."""
        return {
            "input_tokens": self.num_prompt,
            "input_tokens_details": {"cached_tokens": self.num_cached, "cache_write_tokens": 0},
            "output_tokens": self.num_output,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "total_tokens": self.num_prompt + self.num_output,
            "speculation": self.speculation(),
        }
