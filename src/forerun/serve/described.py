"""Described: bodies for the application's OpenAPI document, by the fields of schema.py and their types.

This file decides what a generator of clients or of test cases is told. It tells types and not bounds: those depend on
the model, and a mistake is answered by the field's name. Every field may be null, which is as if it were left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.serve.schema import KNOWN, Endpoint

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
INTEGERS = (
    "top_k",
    "n",
    "seed",
    "max_tokens",
    "min_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "top_logprobs",
    "prompt_logprobs",
)
SWITCHES = (
    "stream",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "return_token_ids",
    "return_token_strs",
    "draft_details",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "include_reasoning",
    "parallel_tool_calls",
)
OBJECTS = ("stream_options", "logit_bias", "response_format", "text", "structured_outputs", "chat_template_kwargs")
LISTS = ("messages", "tools", "include", "stop_sequences")
STRINGS = ("model", "chat_template", "instructions")
TYPES: Mapping[str, Any] = {
    **dict.fromkeys(NUMBERS, "number"),
    **dict.fromkeys(INTEGERS, "integer"),
    **dict.fromkeys(SWITCHES, "boolean"),
    **dict.fromkeys(OBJECTS, "object"),
    **dict.fromkeys(LISTS, "array"),
    **dict.fromkeys(STRINGS, "string"),
    "prompt": ["string", "array"],
    "input": ["string", "array"],
    "stop": ["string", "array"],
    "stop_token_ids": "array",
    "tokens": "array",
    "tool_choice": ["string", "object"],
    "speculation": ["boolean", "integer", "string", "object"],
}
NEEDED: Mapping[Endpoint, tuple[str, ...]] = {
    "completions": ("prompt",),
    "chat": ("messages",),
    "responses": ("input",),
    "messages": ("messages",),
    "detokenize": ("tokens",),
}


def described(endpoint: Endpoint) -> dict[str, Any]:
    """The body of an endpoint."""
    properties = {name: property_of(name, field.kind) for name, field in KNOWN[endpoint].items()}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if endpoint in NEEDED:
        schema["required"] = [*NEEDED[endpoint]]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def property_of(name: str, kind: str) -> dict[str, Any]:
    """One field: its class, and its type if it has one."""
    own = TYPES.get(name) if kind == "served" else None
    types = [own] if isinstance(own, str) else own
    return {"description": kind, **({} if types is None else {"type": [*types, "null"]})}
