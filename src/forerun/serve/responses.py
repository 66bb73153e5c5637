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
from forerun.serve.parts import AnswerPart, PartKind, TokenCounter
from forerun.serve.problems import ApiError

IDS: dict[PartKind, str] = {"reasoning": "rs", "content": "msg", "call": "fc"}
EVENTS: dict[PartKind, str] = {
    "reasoning": "response.reasoning_text",
    "content": "response.output_text",
    "call": "response.function_call_arguments",
}
OPENING = ("created", "in_progress")
STATUS = {"stop": "completed"}  # by finish reason; all others are incomplete
ECHOED = ("metadata", "user", "safety_identifier", "prompt_cache_key", "top_logprobs", "max_output_tokens")


@dataclass(slots=True)
class OutputItem:
    """One output item: its text so far, or its function call and the arguments so far."""

    kind: PartKind
    id: str
    index: int
    call: ToolCall | None = None
    status: str = "in_progress"
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """The fields of events that identify the item and its content part."""
        place = {"item_id": self.id, "output_index": self.index}
        return place if self.call is not None else {**place, "content_index": 0}

    def part(self) -> dict[str, Any]:
        """The content part of the item."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def item(self) -> dict[str, Any]:
        """The item object; without content while it is in progress."""
        fields: dict[str, Any] = {"id": self.id, "status": self.status}
        if self.call is not None:
            called = {"call_id": self.call.id, "name": self.call.name, "arguments": self.text}
            return {"type": "function_call", **fields, **called}
        fields["content"] = [] if self.status == "in_progress" else [self.part()]
        if self.kind == "reasoning":
            return {"type": "reasoning", "summary": [], **fields}
        return {"type": "message", "role": "assistant", **fields}


@dataclass(slots=True)
class ResponseWriter(Writer):
    """Writes answers as response objects."""

    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(24)}")
    items: list[OutputItem] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)  # log-probabilities of tokens of undecided kind
    num_events: int = 0
    counter: TokenCounter = field(init=False)

    def __post_init__(self) -> None:
        self.counter = TokenCounter(self.parsed.form, self.texts)

    def whole(self) -> dict[str, Any]:
        for delta in self.deltas:
            self.take(delta)
        return self.response()

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events for one delta; the first delta also opens the response."""
        kinds = () if self.num_events else OPENING
        return [self.event(f"response.{k}", response=self.response("in_progress")) for k in kinds] + self.take(delta)

    def last_chunks(self) -> list[dict[str, Any]]:
        """The last event, with the complete response."""
        response = self.response()
        return [self.event(f"response.{response['status']}", response=response)]

    def failed(self, problem: ApiError) -> dict[str, Any]:
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
        parts, logprobs = self.parts_of(delta), self.logprobs_of(delta)
        is_empty = delta.finish_reason and not parts and not self.items  # an answer has at least one item
        if is_empty or (logprobs and not any(part.kind == "content" for part in parts)):
            parts.append(AnswerPart("content"))
        events: list[dict[str, Any]] = []
        for part in parts:
            if part.call is not None or not self.items or self.items[-1].kind != part.kind:
                events += self.close("stop") + self.open(part)
            events += self.grow(part, logprobs if part.kind == "content" else [])
            logprobs = [] if part.kind == "content" else logprobs
        return events + (self.close(delta.finish_reason) if delta.finish_reason else [])

    def logprobs_of(self, delta: Delta) -> list[dict[str, Any]]:
        """The log-probabilities of the tokens that are now known to be message text."""
        kinds = self.counter.feed(delta.token_ids)
        if delta.finish_reason:
            kinds += ["content"] * self.counter.num_undecided  # what only began like a tag was text
        entries = self.entries + chat_entries(delta.logprobs, self.texts)
        self.entries = entries[len(kinds) :]
        return [entry for kind, entry in zip(kinds, entries, strict=False) if kind == "content"]

    def open(self, part: AnswerPart) -> list[dict[str, Any]]:
        """Add an empty item for this part; returns the events."""
        item = OutputItem(part.kind, f"{IDS[part.kind]}_{secrets.token_hex(24)}", len(self.items), part.call)
        self.items.append(item)
        events = [self.event("response.output_item.added", output_index=item.index, item=item.item())]
        if part.call is None:
            events.append(self.event("response.content_part.added", **item.place, part=item.part()))
        return events

    def grow(self, part: AnswerPart, logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add a part to the last item, which is complete after a call; returns the events."""
        item, text = self.items[-1], part.text if part.call is None else part.call.arguments
        item.text += text
        item.logprobs += logprobs
        if not (text or logprobs):
            return []
        more = {"logprobs": logprobs} if part.kind == "content" else {}
        grown = self.event(f"{EVENTS[part.kind]}.delta", **item.place, delta=text, **more)
        return [grown, *([] if part.call is None else self.close("stop"))]

    def close(self, finish_reason: str) -> list[dict[str, Any]]:
        """Finish the last item if it is in progress; returns the events."""
        if not self.items or self.items[-1].status != "in_progress":
            return []
        item = self.items[-1]
        item.status = STATUS.get(finish_reason, "incomplete")
        if item.call is not None:
            events = [self.event(f"{EVENTS['call']}.done", **item.place, name=item.call.name, arguments=item.text)]
        else:
            more = {"logprobs": list(item.logprobs)} if item.kind == "content" else {}
            events = [
                self.event(f"{EVENTS[item.kind]}.done", **item.place, text=item.text, **more),
                self.event("response.content_part.done", **item.place, part=item.part()),
            ]
        return [*events, self.event("response.output_item.done", output_index=item.index, item=item.item())]

    def response(self, status: str = "") -> dict[str, Any]:
        """The response object; the default status is that of the finished answer."""
        if not status:
            status = STATUS.get(self.deltas[-1].finish_reason or "", "incomplete")
        body = self.parsed.body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.get("instructions"),
            "output": [each.item() for each in self.items],
            "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
            "tools": [{"strict": None, "parameters": None, **tool} for tool in body.get("tools") or ()],
            "tool_choice": body.get("tool_choice") or "auto",
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "text": {"format": {"type": "text"}} | (body.get("text") or {}),
            "truncation": "disabled",
            "store": False,
            "background": False,
            **self.common_fields,
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
