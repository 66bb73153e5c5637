"""Answers of Anthropic's /v1/messages: messages of content blocks, complete or as events, and that API's errors.

A block is thinking, text, or a tool use. A stream starts a block, adds to it and stops it; a tool use is sent in one
delta.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from forerun.accept.delta import Delta
from forerun.serve.answers import Writer
from forerun.serve.parts import AnswerPart
from forerun.serve.problems import ApiError

BlockKind = Literal["thinking", "text", "tool_use"]
KINDS: Mapping[str, BlockKind] = {"reasoning": "thinking", "content": "text", "call": "tool_use"}
EMPTY: Mapping[BlockKind, dict[str, Any]] = {
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
    "tool_use": {"input": {}},
}
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def message_error(problem: ApiError) -> dict[str, Any]:
    """An error in the form of Anthropic's API."""
    kind = ERRORS.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": problem.message}}


@dataclass(slots=True)
class MessageWriter(Writer):
    """Writes answers as Anthropic's messages."""

    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")
    blocks: list[dict[str, Any]] = field(default_factory=list)
    started: bool = False
    open: bool = False  # whether the last block may grow

    def whole(self) -> dict[str, Any]:
        for delta in self.deltas:
            self.take(delta)
        return self.message() | self.ending()

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The events for one delta; the first delta also starts the message."""
        opening = [] if self.started else [{"type": "message_start", "message": self.message()}]
        self.started = True
        return opening + self.take(delta)

    def last_chunks(self) -> list[dict[str, Any]]:
        """The events with the stop reason and the end of the message."""
        ending = {"type": "message_delta", "delta": self.ending(), "usage": self.usage()}
        return [ending, {"type": "message_stop"}]

    def failed(self, problem: ApiError) -> dict[str, Any]:
        return message_error(problem)

    def message(self) -> dict[str, Any]:
        """The message object so far."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [dict(block) for block in self.blocks],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(),
            **self.common_fields,
        }

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """Add a delta to the blocks; returns the events."""
        events = [event for part in self.parts_of(delta) for event in self.add(part)]
        return events + (self.close() if delta.finish_reason else [])

    def add(self, part: AnswerPart) -> list[dict[str, Any]]:
        """Add a part to the last block, or to a new block if it is of another kind; returns the events."""
        kind, events = KINDS[part.kind], list[dict[str, Any]]()
        if not self.open or self.blocks[-1]["type"] != kind or part.call is not None:
            events += self.close()
            call = {} if part.call is None else {"id": part.call.id, "name": part.call.name}
            self.blocks.append({"type": kind, **call, **EMPTY[kind]})
            self.open = True
            events.append({"type": "content_block_start", "index": self.place, "content_block": dict(self.blocks[-1])})
        if part.call is not None:
            self.blocks[-1]["input"] = json.loads(part.call.arguments)
            delta = {"type": "input_json_delta", "partial_json": part.call.arguments}
        else:
            self.blocks[-1][kind] += part.text
            delta = {"type": f"{kind}_delta", kind: part.text}
        return [*events, {"type": "content_block_delta", "index": self.place, "delta": delta}]

    def close(self) -> list[dict[str, Any]]:
        """Stop the last block if it is open; returns the events."""
        closed = [{"type": "content_block_stop", "index": self.place}] if self.open else []
        self.open = False
        return closed

    @property
    def place(self) -> int:
        """The index of the last block."""
        return len(self.blocks) - 1

    def ending(self) -> dict[str, Any]:
        """The stop reason and stop sequence."""
        last = self.deltas[-1]
        stop_string = last.stop_reason if isinstance(last.stop_reason, str) else None
        if last.finish_reason == "length":
            reason = "max_tokens"
        elif any(block["type"] == "tool_use" for block in self.blocks):
            reason = "tool_use"
        else:
            reason = "end_turn" if stop_string is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop_string if reason == "stop_sequence" else None}

    def usage(self) -> dict[str, Any]:
        """Counts of input tokens (prefilled and cached), of output tokens, and of speculation."""
        return {
            "input_tokens": self.num_prompt - self.num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.num_cached,
            "output_tokens": self.num_output,
            "output_tokens_details": {"thinking_tokens": self.num_reasoning},
            "speculation": self.speculation(),
        }
