"""The fields of request bodies: one table of all names that OpenAI's specification and vLLM's server have.

Each name is in one of three classes. SERVED has its effect. IDLE is accepted without effect, because it cannot change
the text. UNSERVED would change the text, or ask for something else that is not built: it is refused, unless its value
asks for what is done anyway. Any other name is unknown, and refused too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from forerun.limits import shown
from forerun.near import nearest
from forerun.serve.problems import refused

Endpoint = Literal["completions", "chat", "responses", "tokenize", "detokenize"]
FieldClass = Literal["served", "idle", "unserved"]
TEXT_ENDPOINTS: tuple[Endpoint, ...] = ("completions", "chat", "responses")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BodyField:
    """A field of a body. `harmless` are the values of an UNSERVED one that ask for what is done anyway; null always is.

    `answer` says what to do instead.
    """

    kind: FieldClass
    harmless: tuple[object, ...] = ()
    answer: str = "leave it out"
    endpoints: tuple[Endpoint, ...] = TEXT_ENDPOINTS

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
    **_each("served", *SAMPLING, "model", "logit_bias", "stream", "stream_options", "speculation"),
    **_each("served", *NOT_OF_RESPONSES, "logprobs", "return_token_ids", "draft_details", endpoints=OLDER),
    **_each("served", "response_format", endpoints=OLDER),
    **_each("served", "text", endpoints=RESPONSES),
    **_each("served", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    **_each("served", "guided_json_object"),
    **_each("served", "prompt", endpoints=("completions", "tokenize")),
    **_each("served", "add_special_tokens", endpoints=("completions", "tokenize")),
    **_each("served", "messages", endpoints=("chat", "tokenize")),
    **_each("served", *TEMPLATE, endpoints=("chat", "responses", "tokenize")),
    **_each("served", "tools", "tool_choice", endpoints=("chat", "responses", "tokenize")),
    **_each("served", "max_completion_tokens", endpoints=CHAT),
    **_each("served", "top_logprobs", "include_reasoning", "parallel_tool_calls", endpoints=TALKS),
    **_each("served", "input", "instructions", "max_output_tokens", "include", endpoints=RESPONSES),
    **_each("served", "return_token_strs", endpoints=("tokenize",)),
    **_each("served", "tokens", endpoints=("detokenize",)),
    # OpenAI's
    **_each("idle", "user", "request_id", "cache_salt"),
    **_each("idle", "metadata", "store", "safety_identifier", "service_tier", endpoints=TALKS),
    **_each("idle", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", endpoints=TALKS),
    **_each("idle", "prediction", endpoints=CHAT),
    **_each("idle", "max_tool_calls", endpoints=RESPONSES),  # of built-in tools, of which there are none
    "best_of": _not(1, answer="use n and choose by log-probability", only=COMPLETIONS),
    "echo": _not(False, answer="who sent the prompt knows it; prompt_logprobs has its log-probabilities", only=OLDER),
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
    "reasoning": _not({}, answer="say it to the template, in chat_template_kwargs", only=RESPONSES),
    "truncation": _not("disabled", answer="shorten the input", only=RESPONSES),
    "web_search_options": _not(only=CHAT),
    "verbosity": _not("medium", answer="say it in the prompt", only=CHAT),
    "reasoning_effort": _not(answer="say it to the template, in chat_template_kwargs", only=CHAT),
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


OTHERWISE: Mapping[Endpoint, Mapping[str, BodyField]] = {  # names that mean something else here
    "responses": {"prompt": _not(answer="nothing is kept here: write the text as input", only=RESPONSES)}
}


def fields_of(endpoint: Endpoint) -> Mapping[str, BodyField]:
    """The fields that an endpoint knows."""
    own = {name: field for name, field in FIELDS.items() if endpoint in field.endpoints}
    return {**own, **OTHERWISE.get(endpoint, {})}


KNOWN: Mapping[Endpoint, Mapping[str, BodyField]] = {
    "completions": fields_of("completions"),
    "chat": fields_of("chat"),
    "responses": fields_of("responses"),
    "tokenize": fields_of("tokenize"),
    "detokenize": fields_of("detokenize"),
}
KNOWN = {name: {**fields, "model": FIELDS["model"]} for name, fields in KNOWN.items()}


def served_fields(body: Mapping[str, Any], endpoint: Endpoint, lenient: bool = False) -> dict[str, Any]:
    """The served fields of a body that are not null. Raises the ApiError for 400, naming the first field at fault.

    With `lenient` unknown names are logged, and left out.
    """
    known, served = KNOWN[endpoint], {}
    for name, value in body.items():
        field = known.get(name)
        if field is None:
            near = nearest(name, known)
            told = f"there is no field {shown(name)} here" + (f": did you mean {near!r}?" if near else ".")
            if not lenient:
                raise refused(name, told, "unknown_parameter")
            log.warning("%s It was ignored.", told)
        elif value is None or field.kind == "idle":
            continue
        elif field.kind == "served":
            served[name] = value
        elif not field.accepts(value):
            message = f"{name}: {shown(value)} is not served here: {field.answer}."
            raise refused(name, message, "unsupported_parameter")
    return served
