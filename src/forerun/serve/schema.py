"""The fields of request bodies: one table of the names that OpenAI, Anthropic and vLLM's server give them.

`body.py` reads bodies by this table. Each name is in one of three classes. SERVED has its effect. IDLE is accepted
without effect, because it cannot change the text. UNSERVED would change the text, or ask for something else that is
not built: it is refused, unless its value asks for what is done anyway. Any other name is unknown, and refused too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from forerun.config import Speculation

Endpoint = Literal["completions", "chat", "responses", "messages", "tokenize", "detokenize"]
FieldClass = Literal["served", "idle", "unserved"]
TEXT_ENDPOINTS: tuple[Endpoint, ...] = ("completions", "chat", "responses")


@dataclass(frozen=True, slots=True)
class BodyField:
    """A field of a body. `harmless` are the values of an UNSERVED one that ask for what is done anyway; null always is.

    `answer` says what to do instead. `members` are the fields that an object under this name may have, or each object
    of a list; None where the names are the caller's own.
    """

    kind: FieldClass
    harmless: tuple[object, ...] = ()
    answer: str = "leave it out"
    endpoints: tuple[Endpoint, ...] = TEXT_ENDPOINTS
    members: Mapping[str, BodyField] | None = None

    def accepts(self, value: object) -> bool:
        """Whether the value asks for nothing that is not done here."""
        return any(type(value) is type(own) and value == own for own in self.harmless)


COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
CHAT: tuple[Endpoint, ...] = ("chat",)
OLDER: tuple[Endpoint, ...] = ("completions", "chat")  # what /v1/responses says otherwise, or does not have
TALKS: tuple[Endpoint, ...] = ("chat", "responses")
RESPONSES: tuple[Endpoint, ...] = ("responses",)


def _each(kind: FieldClass, *names: str, endpoints: tuple[Endpoint, ...] = TEXT_ENDPOINTS) -> dict[str, BodyField]:
    """Fields with nothing to say about each."""
    return {name: BodyField(kind, endpoints=endpoints) for name in names}


def _not(*harmless: object, answer: str = "leave it out", only: tuple[Endpoint, ...] = TEXT_ENDPOINTS) -> BodyField:
    """An UNSERVED field."""
    return BodyField("unserved", harmless, answer, only)


def _object(members: Mapping[str, BodyField], endpoints: tuple[Endpoint, ...] = TEXT_ENDPOINTS) -> BodyField:
    """A served field whose objects have these members."""
    return BodyField("served", endpoints=endpoints, members=members)


SERVED, IDLE = BodyField("served"), BodyField("idle")
SCHEMA = {"name": IDLE, "description": IDLE, "schema": SERVED, "strict": IDLE}  # it always holds
FORMAT = _object({"type": SERVED, **SCHEMA, "json_schema": _object(SCHEMA)})
FORMS = ("json", "regex", "choice", "grammar", "json_object")  # vLLM's names
FORM = "use one of " + ", ".join(FORMS)
STRUCTURED = {
    **_each("served", *FORMS, "disable_any_whitespace"),
    "structural_tag": _not(answer=FORM),
    "whitespace_pattern": _not(answer="use disable_any_whitespace"),
    "disable_fallback": IDLE,  # there is one engine for grammars
    "disable_additional_properties": _not(False, answer="say it in the schema"),
}
STREAM_OPTIONS = {
    **_each("served", "include_usage", "continuous_usage_stats"),
    "include_obfuscation": IDLE,  # it hides sizes of chunks, not the text
}
VERBOSITY = _not("medium", answer="say it in the prompt")
REASONING = {
    "effort": SERVED,
    **dict.fromkeys(("summary", "generate_summary", "context"), _not("auto")),
    "mode": _not(),
}
NO_TEXT = _not(answer="forerun reads text only")
PART = {  # of the content of a message
    **_each("served", "type", "text", "refusal"),
    **_each("idle", "annotations", "logprobs", "cache_control", "prompt_cache_breakpoint"),
    **dict.fromkeys(("image_url", "input_audio", "file", "video_url", "audio_url"), NO_TEXT),
}
FUNCTION_CALL = {**_each("served", "name", "arguments"), "parsed_arguments": IDLE}
CALL = {**_each("served", "id", "type"), "function": _object(FUNCTION_CALL), "index": IDLE}
MESSAGE = {  # of a chat; the template may read others
    **_each("served", "role", "name", "tool_call_id", "reasoning_content", "reasoning"),
    "content": _object(PART),
    "tool_calls": _object(CALL),
    **_each("idle", "refusal", "annotations", "parsed", "id", "phase"),
    "audio": NO_TEXT,
    "function_call": _not(answer="use tool_calls"),
}
ITEM = {  # of the input of a response
    **_each("served", "type", "role", "name", "arguments", "call_id"),
    **dict.fromkeys(("content", "output"), _object(PART)),
    **_each("idle", "id", "status", "phase", "summary", "encrypted_content"),
    **_each("unserved", "namespace", "caller"),
}
SAMPLING = (  # fields that are parameters of the library, with the same names and meanings
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "banned_tokens",
    "bad_words",
    "min_tokens",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "seed",
    "n",
    "prompt_logprobs",
    "skip_special_tokens",
)
NOT_OF_RESPONSES = ("max_tokens", "n", "prompt_logprobs")
TEMPLATE = ("chat_template", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents")
FIELDS: Mapping[str, BodyField] = {
    **_each("served", *SAMPLING, "model", "logit_bias", "stream"),
    "speculation": _object(_each("served", *(option.name for option in fields(Speculation)))),
    "stream_options": _object(STREAM_OPTIONS),
    **_each("served", *NOT_OF_RESPONSES, "logprobs", "return_token_ids", "draft_details", endpoints=OLDER),
    "response_format": replace(FORMAT, endpoints=OLDER),
    "text": _object({"format": FORMAT, "verbosity": VERBOSITY}, RESPONSES),
    "structured_outputs": _object(STRUCTURED),
    **_each("served", *(f"guided_{form}" for form in FORMS)),
    **_each("served", "prompt", endpoints=("completions", "tokenize")),
    **_each("served", "add_special_tokens", endpoints=("completions", "tokenize")),
    **_each("served", "messages", endpoints=("chat", "tokenize")),
    **_each("served", *TEMPLATE, endpoints=("chat", "responses", "tokenize")),
    **_each("served", "tools", "tool_choice", endpoints=("chat", "responses", "tokenize")),
    **_each("served", "max_completion_tokens", endpoints=CHAT),
    **_each("served", "top_logprobs", "include_reasoning", "parallel_tool_calls", endpoints=TALKS),
    **_each("served", "reasoning_effort", endpoints=("chat", "tokenize")),
    **_each("served", "instructions", "max_output_tokens", "include", endpoints=RESPONSES),
    "input": _object(ITEM, RESPONSES),
    "reasoning": _object(REASONING, RESPONSES),
    **_each("served", "best_of", "echo", endpoints=COMPLETIONS),
    **_each("served", "return_token_strs", endpoints=("tokenize",)),
    **_each("served", "tokens", endpoints=("detokenize",)),
    # OpenAI's
    **_each("idle", "user", "request_id", "cache_salt"),
    **_each("idle", "metadata", "store", "safety_identifier", "service_tier", endpoints=TALKS),
    **_each("idle", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", endpoints=TALKS),
    **_each("idle", "prediction", endpoints=CHAT),
    **_each("idle", "max_tool_calls", endpoints=RESPONSES),  # of built-in tools, of which there are none
    "suffix": _not("", only=COMPLETIONS),
    "functions": _not([], answer="use tools", only=CHAT),
    "function_call": _not("none", "auto", answer="use tool_choice", only=CHAT),
    "modalities": _not(["text"], answer='forerun writes text; use ["text"]', only=CHAT),
    "audio": _not(answer="forerun writes text; leave it out", only=CHAT),
    "moderation": _not(only=TALKS),
    "background": _not(False, answer="wait for the answer, or read it as a stream", only=RESPONSES),
    "context_management": _not(answer="shorten the input", only=RESPONSES),
    "conversation": _not(answer="nothing is kept here: give the whole conversation as input", only=RESPONSES),
    "previous_response_id": _not(answer="nothing is kept here: give the whole conversation as input", only=RESPONSES),
    "truncation": _not("disabled", answer="shorten the input", only=RESPONSES),
    "web_search_options": _not(only=CHAT),
    "verbosity": replace(VERBOSITY, endpoints=CHAT),
    # vLLM's
    "allowed_token_ids": _not(answer="give all others a logit_bias"),
    "kv_transfer_params": _not(),
    "length_penalty": _not(1.0, 1, answer="forerun samples; use 1"),
    "logits_processors": _not([], answer="the library takes functions; a server does not"),
    "mm_processor_kwargs": _not(answer="forerun reads text only; leave it out"),
    "priority": _not(0, answer="tenants take turns; use 0"),
    "return_tokens_as_token_ids": _not(False, answer="use return_token_ids", only=OLDER),
    "spaces_between_special_tokens": _not(True, answer="use true"),
    "thinking_token_budget": _not(only=CHAT),
    "truncate_prompt_tokens": _not(answer="cut the token ids and give them as the prompt"),
    "use_beam_search": _not(False, answer="forerun samples; use n"),
    "vllm_xargs": _not(),
}


BLOCK = {  # of the content of one of Anthropic's messages
    **_each("served", "type", "text", "thinking", "id", "name", "input", "tool_use_id"),
    "content": _object(PART),
    **_each("idle", "cache_control", "citations", "signature", "caller", "toolset_name"),
    "is_error": IDLE,  # the content says so
    "source": NO_TEXT,
    "data": _not(answer="nothing here reads reasoning that is encrypted; leave the block out"),
}
TOOL = {  # of Anthropic's
    **_each("served", "type", "name", "description", "input_schema", "strict"),
    **_each("idle", "cache_control", "eager_input_streaming"),
    "defer_loading": _not(False, answer="every tool is shown"),
    "allowed_callers": _not(["direct"]),
    "input_examples": _not([], answer="write them into the description"),
}
THINKING = {
    "type": SERVED,
    "display": SERVED,
    "budget_tokens": _not(answer='there are no budgets; use {"type": "adaptive"}, and max_tokens for all'),
}
MESSAGES: Mapping[str, BodyField] = {  # what means something else there than in a chat, or is not in one
    "messages": _object({"role": SERVED, "content": _object(BLOCK)}),
    "system": _object(PART),
    "tools": _object(TOOL),
    "tool_choice": _object(_each("served", "type", "name", "disable_parallel_tool_use")),
    "thinking": _object(THINKING),
    "output_config": _object({"effort": SERVED, "format": FORMAT, "task_budget": _not()}),
    **_each("served", "stop_sequences", "max_tokens"),
    **_each("idle", "metadata", "service_tier", "cache_control", "inference_geo", "speed"),
    **dict.fromkeys(("stop", "max_completion_tokens"), _not(answer="use stop_sequences and max_tokens")),
    **_each("unserved", "container", "context_management", "mcp_servers"),
}
SHARED = (  # with a chat
    *(name for name in SAMPLING if name not in ("stop", "n", "prompt_logprobs")),
    *("model", "stream", "speculation", "logit_bias", "structured_outputs", "chat_template", "chat_template_kwargs"),
)
OTHERWISE: Mapping[Endpoint, Mapping[str, BodyField]] = {  # names that mean something else here
    "completions": {"messages": _not(answer="/v1/chat/completions takes it", only=COMPLETIONS)},
    "chat": {
        "echo": _not(False, answer="who sent the messages knows them", only=CHAT),
        "prompt": _not(answer="/v1/completions takes it", only=CHAT),
    },
    "responses": {"prompt": _not(answer="nothing is kept here: write the text as input", only=RESPONSES)},
}


def fields_of(endpoint: Endpoint) -> Mapping[str, BodyField]:
    """The fields that an endpoint knows."""
    own = {name: field for name, field in FIELDS.items() if endpoint in field.endpoints}
    return {**own, **OTHERWISE.get(endpoint, {})}


KNOWN: Mapping[Endpoint, Mapping[str, BodyField]] = {
    "completions": fields_of("completions"),
    "chat": fields_of("chat"),
    "responses": fields_of("responses"),
    "messages": {**{name: FIELDS[name] for name in SHARED}, **MESSAGES},
    "tokenize": fields_of("tokenize"),
    "detokenize": fields_of("detokenize"),
}
KNOWN = {name: {**fields, "model": FIELDS["model"]} for name, fields in KNOWN.items()}
