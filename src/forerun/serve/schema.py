"""The fields of request bodies: one table of the fields of OpenAI's, Anthropic's and vLLM's servers.

`body.py` checks bodies against this table. Each field has one of three classes. A "served" field has its effect. An
"idle" one is accepted and ignored, because it cannot change the text. An "unserved" one would change the text or
request a feature that does not exist here; it is refused unless its value is a harmless default. All other names are
unknown, and refused. The OpenAPI document is generated from the table; it has types but no bounds, since those depend
on the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from forerun.config import Speculation
from forerun.sampling.params import SamplingParams
from forerun.serve.parameters import TYPES

Endpoint = Literal["completions", "chat", "responses", "messages", "tokenize", "detokenize"]
FieldClass = Literal["served", "idle", "unserved"]
OBJECTS = "objects"  # an array of objects
NUMBERS = (("integer",), ("number",))


@dataclass(frozen=True, slots=True)
class BodyField:
    """A field of a body.

    `types`: JSON types that a served field may have besides null, which counts as absent; () allows all. `harmless`:
    values of an unserved field that change nothing; null is always one. `answer`: what to do instead. `members`: the
    fields of an object under this name, or of each object of a list; None if any names are allowed.
    """

    kind: FieldClass
    types: tuple[str, ...] = ()
    members: Mapping[str, BodyField] | None = None
    harmless: tuple[object, ...] = ()
    answer: str = "leave it out"

    def accepts(self, value: object) -> bool:
        """Whether this value of an unserved field is harmless."""
        return any(type(value) is type(each) and value == each for each in self.harmless)

    def takes(self, value: object) -> bool:
        """Whether a served field may have this value's type. Numbers are checked where their bounds are known."""
        if isinstance(value, list) and OBJECTS in self.types:
            return all(isinstance(each, dict) for each in value)
        return self.types in NUMBERS or TYPES.get(type(value)) in self.types

    def description(self) -> dict[str, Any]:
        """The field's schema in the OpenAPI document."""
        types = ["array" if each == OBJECTS else each for each in self.types]
        return {"description": self.kind, **({"type": [*types, "null"]} if types else {})}


FieldTable = Mapping[str, BodyField]


def _served(types: str, *names: str) -> dict[str, BodyField]:
    """Served fields with these types, separated by blanks."""
    return {name: BodyField("served", tuple(types.split())) for name in names}


def _idle(*names: str) -> dict[str, BodyField]:
    return {name: BodyField("idle") for name in names}


def _not(*harmless: object, answer: str = "leave it out") -> BodyField:
    return BodyField("unserved", harmless=harmless, answer=answer)


def _object(members: FieldTable, types: str = "") -> BodyField:
    """A served field whose objects have these members."""
    return BodyField("served", tuple(types.split()), members)


JSON_TYPES = {kind.__name__: name for kind, name in TYPES.items()} | {"Sequence": "array", "Mapping": "object"}


def _parameters(values: type, *left_out: str) -> dict[str, BodyField]:
    """Served fields for the fields of a dataclass of the library, with types from its annotations."""
    table: dict[str, BodyField] = {}
    for each in fields(values):
        types = [JSON_TYPES.get(kind.partition("[")[0], "") for kind in str(each.type).split(" | ")]
        table |= {} if each.name in left_out else _served(" ".join(types), each.name)
    return table


MARKUP = _idle("name", "description", "strict") | _served("", "schema")  # around a schema, which is always enforced
FORMAT = _object({**_served("", "type"), **MARKUP, "json_schema": _object(MARKUP, "object")}, "object")
FORMS = ("json", "regex", "choice", "grammar", "json_object")  # vLLM's names
STRUCTURED = {
    **_served("", *FORMS),
    **_served("boolean", "disable_any_whitespace"),
    "structural_tag": _not(answer="use one of " + ", ".join(FORMS)),
    "whitespace_pattern": _not(answer="use disable_any_whitespace"),
    **_idle("disable_fallback"),  # there is only one grammar engine
    "disable_additional_properties": _not(False, answer="use additionalProperties in the schema"),
}
STREAM_OPTIONS = {
    **_served("boolean", "include_usage", "continuous_usage_stats"),
    **_idle("include_obfuscation"),  # it pads chunks and does not change the text
}
VERBOSITY = _not("medium", answer="describe it in the prompt")
REASONING = {
    **_served("", "effort"),
    **dict.fromkeys(("summary", "generate_summary", "context"), _not("auto")),
    "mode": _not(),
}
NO_TEXT = _not(answer="forerun reads text only")
PART = {  # of the content of a message
    **_served("", "type", "text", "refusal"),
    **_idle("annotations", "logprobs", "cache_control", "prompt_cache_breakpoint"),
    **dict.fromkeys(("image_url", "input_audio", "file", "video_url", "audio_url"), NO_TEXT),
}
FUNCTION_CALL = _served("", "name", "arguments") | _idle("parsed_arguments")
CALL = {**_served("", "id", "type"), "function": _object(FUNCTION_CALL), **_idle("index")}
MESSAGE = {  # of a chat; templates may use other fields too
    **_served("", "role", "name", "tool_call_id", "reasoning_content", "reasoning"),
    "content": _object(PART),
    "tool_calls": _object(CALL),
    **_idle("refusal", "annotations", "parsed", "id", "phase"),
    "audio": NO_TEXT,
    "function_call": _not(answer="use tool_calls"),
}
ITEM = {  # of the input of a response
    **_served("", "type", "role", "name", "arguments", "call_id"),
    **dict.fromkeys(("content", "output"), _object(PART)),
    **_idle("id", "status", "phase", "summary", "encrypted_content"),
    **dict.fromkeys(("namespace", "caller"), _not()),
}
SAMPLING = _parameters(SamplingParams, "logit_bias", "logprobs", "logits_processors", "grammar")
SAMPLE_FIELDS = ("max_tokens", "n", "prompt_logprobs")  # /v1/responses has other names for them, or none
SHARED = {  # of completions, chats, responses and messages
    **{name: field for name, field in SAMPLING.items() if name not in SAMPLE_FIELDS},
    **_served("string", "model"),
    **_served("object", "logit_bias"),
    **_served("boolean", "stream"),
    "speculation": _object(_parameters(Speculation), "boolean integer string object"),
    "structured_outputs": _object(STRUCTURED, "object"),
}
TEXT = {  # of completions, chats and responses
    **SHARED,
    "stream_options": _object(STREAM_OPTIONS, "object"),
    **_served("", *(f"guided_{form}" for form in FORMS)),
    **_idle("user", "request_id", "cache_salt"),
    "allowed_token_ids": _not(answer="give all other tokens a logit_bias"),
    "kv_transfer_params": _not(),
    "length_penalty": _not(1.0, 1, answer="forerun has no beam search; use 1"),
    "logits_processors": _not([], answer="only the library supports them, not the server"),
    "mm_processor_kwargs": _not(answer="forerun reads text only; leave it out"),
    "priority": _not(0, answer="tenants take turns; use 0"),
    "spaces_between_special_tokens": _not(True, answer="use true"),
    "truncate_prompt_tokens": _not(answer="cut the token ids and give them as the prompt"),
    "use_beam_search": _not(False, answer="forerun has no beam search; use n"),
    "vllm_xargs": _not(),
}
SAMPLES = {  # of completions and chats
    **{name: SAMPLING[name] for name in SAMPLE_FIELDS},
    **_served("boolean", "return_token_ids", "draft_details"),
    "response_format": FORMAT,
    "return_tokens_as_token_ids": _not(False, answer="use return_token_ids"),
}
TEMPLATE = {  # of chats and responses
    **_served("string", "chat_template"),
    **_served("boolean", "add_generation_prompt", "continue_final_message"),
    **_served("object", "chat_template_kwargs"),
    **_served("", "documents"),
    **_served(OBJECTS, "tools"),
    **_served("string object", "tool_choice"),
}
TALK = {
    **TEMPLATE,
    **_served("integer", "top_logprobs"),
    **_served("boolean", "include_reasoning", "parallel_tool_calls"),
    **_idle("metadata", "store", "safety_identifier", "service_tier"),
    **_idle("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
    "moderation": _not(),
}
COMPLETIONS = {
    **TEXT,
    **SAMPLES,
    **_served("string array", "prompt"),
    **_served("integer", "logprobs"),
    **_served("boolean", "add_special_tokens", "echo"),
    **_served("", "best_of"),
    "suffix": _not(""),
    "messages": _not(answer="/v1/chat/completions takes it"),
}
CHAT = {
    **TEXT,
    **SAMPLES,
    **TALK,
    **_served(OBJECTS, "messages"),
    **_served("boolean", "logprobs"),
    **_served("integer", "max_completion_tokens"),
    **_served("", "reasoning_effort"),
    **_idle("prediction"),
    "functions": _not([], answer="use tools"),
    "function_call": _not("none", "auto", answer="use tool_choice"),
    "modalities": _not(["text"], answer='forerun writes text; use ["text"]'),
    "audio": _not(answer="forerun writes text; leave it out"),
    "web_search_options": _not(),
    "verbosity": VERBOSITY,
    "thinking_token_budget": _not(),
    "echo": _not(False, answer="only /v1/completions repeats the prompt"),
    "prompt": _not(answer="/v1/completions takes it"),
}
NOT_STORED = "the server does not store conversations: give the entire conversation as input"
RESPONSES = {
    **TEXT,
    **TALK,
    "input": _object(ITEM, "string array"),
    "text": _object({"format": FORMAT, "verbosity": VERBOSITY}, "object"),
    "reasoning": _object(REASONING, "object"),
    **_served("string", "instructions"),
    **_served("integer", "max_output_tokens"),
    **_served("array", "include"),
    **_idle("max_tool_calls"),  # for built-in tools, which do not exist here
    "background": _not(False, answer="wait for the answer, or read it as a stream"),
    "context_management": _not(answer="shorten the input"),
    "truncation": _not("disabled", answer="shorten the input"),
    **dict.fromkeys(("conversation", "previous_response_id"), _not(answer=NOT_STORED)),
    "prompt": _not(answer="the server does not store prompts: give the text as input"),
}
BLOCK = {  # of the content of one of Anthropic's messages
    **_served("", "type", "text", "thinking", "id", "name", "input", "tool_use_id"),
    "content": _object(PART),
    **_idle("cache_control", "citations", "signature", "caller", "toolset_name"),
    **_idle("is_error"),  # the content tells the model
    "source": NO_TEXT,
    "data": _not(answer="the server cannot read encrypted reasoning; leave the block out"),
}
TOOL = {  # of Anthropic's
    **_served("", "type", "name", "description", "input_schema", "strict"),
    **_idle("cache_control", "eager_input_streaming"),
    "defer_loading": _not(False, answer="every tool is loaded; leave it out"),
    "allowed_callers": _not(["direct"]),
    "input_examples": _not([], answer="write them into the description"),
}
THINKING = {
    **_served("", "type", "display"),
    "budget_tokens": _not(answer='there is no budget for thinking; use {"type": "adaptive"} and max_tokens'),
}
TOOL_CHOICE = _served("", "type", "name") | _served("boolean", "disable_parallel_tool_use")
MESSAGES = {
    **SHARED,
    **_served("integer", "max_tokens"),
    **_served("string", "chat_template"),
    **_served("object", "chat_template_kwargs"),
    **_served("array", "stop_sequences"),
    "messages": _object({**_served("", "role"), "content": _object(BLOCK)}, OBJECTS),
    "system": _object(PART, "string array"),
    "tools": _object(TOOL, OBJECTS),
    "tool_choice": _object(TOOL_CHOICE, "object"),
    "thinking": _object(THINKING, "object"),
    "output_config": _object({**_served("", "effort"), "format": FORMAT, "task_budget": _not()}, "object"),
    **_idle("metadata", "service_tier", "cache_control", "inference_geo", "speed"),
    **dict.fromkeys(("stop", "max_completion_tokens"), _not(answer="use stop_sequences and max_tokens")),
    **dict.fromkeys(("container", "context_management", "mcp_servers"), _not()),
}
TOKENIZE = {
    **TEMPLATE,
    **_served("string", "model", "prompt"),
    **_served(OBJECTS, "messages"),
    **_served("boolean", "add_special_tokens", "return_token_strs"),
    **_served("", "reasoning_effort"),
}
KNOWN: Mapping[Endpoint, FieldTable] = {
    "completions": COMPLETIONS,
    "chat": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "tokenize": TOKENIZE,
    "detokenize": {**_served("string", "model"), **_served("array", "tokens")},
}
PROMPTS: Mapping[Endpoint, str] = {  # the field with the prompt
    "completions": "prompt",
    "chat": "messages",
    "responses": "input",
    "messages": "messages",
}


def openapi_body(endpoint: Endpoint) -> dict[str, Any]:
    """The request body of an endpoint in the OpenAPI document."""
    properties = {name: field.description() for name, field in KNOWN[endpoint].items()}
    required = [name for name in ("tokens", PROMPTS.get(endpoint)) if name in properties]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
