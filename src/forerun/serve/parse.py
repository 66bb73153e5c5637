"""Parsing: turns request bodies into requests of the library, which checks the values.

This file maps the fields of a body to sampling parameters, prompts and options of the answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.config import Speculation
from forerun.errors import InvalidRequest
from forerun.limits import shown, whole
from forerun.llm import LLM
from forerun.output import Answers
from forerun.request import Request, SpeculationOption
from forerun.sampling.params import SamplingParams
from forerun.serve.body import served_fields
from forerun.serve.conversation import ChatBody
from forerun.serve.inputs import chat_fields
from forerun.serve.parts import AnswerForm
from forerun.serve.problems import TOO_MANY_TOKENS, missing, refused, renamed, unserved
from forerun.serve.schema import PROMPTS, SAMPLING, Endpoint
from forerun.serve.settings import MOST_SAMPLES_AT_ONCE, ServeSettings
from forerun.serve.structured import answer_grammar
from forerun.serve.template_forms import answer_form, call_form
from forerun.serve.tools import ToolUse, tools_of
from forerun.shape import StaticTree

MAX_TOKENS = 16  # default of completions in OpenAI's specification
SEED_BITS = 53  # of generated seeds: JSON parsers keep such integers exactly
LIMITS = ("max_output_tokens", "max_completion_tokens", "max_tokens")
MOST_CHAT_LOGPROBS = 128
MOST_LOGPROBS = 1 << 20  # per body, which takes half a gigabyte; a full context with 21 per token is always allowed


@dataclass(frozen=True, slots=True)
class ParsedBody:
    """The options of the answer to a parsed body.

    `form`: the format of reasoning and tool calls. `body`: the body as sent, for answers that repeat parts of it.
    `drafters`: names of the drafters. With `echo` a completion starts with its prompt; with `only_prompt` it is only
    the prompt, and the one generated token is hidden. `num_logprobs`: upper bound of the log-probabilities in the
    answers.
    """

    endpoint: Endpoint
    form: AnswerForm
    include_reasoning: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    echo: bool
    only_prompt: bool
    num_logprobs: int
    drafters: Seq[str]
    body: Mapping[str, Any]


def prepare(
    body: Mapping[str, Any], endpoint: Endpoint, llm: LLM, tenant: str, settings: ServeSettings
) -> tuple[ParsedBody, Answers]:
    """Parse a body and create its sequences, without running them. Raises InvalidRequest or ApiError with the field.

    A body is a completion or, in any of the other interfaces, a chat.
    """
    fields = chat_fields(served_fields(body, endpoint, settings.lenient), endpoint)
    with naming_prompt(PROMPTS[endpoint]):
        params = params_of(fields, endpoint, llm)
        prompts = completion_prompts(fields, llm) if endpoint == "completions" else chat_prompts(fields, llm, settings)
        check_stream(fields, params)
        if (num_samples := params.n * len(prompts.requests)) > MOST_SAMPLES_AT_ONCE:
            problem = f"the body requests {num_samples} samples, of all prompts together"
            raise refused("n", f"{problem}: request at most {MOST_SAMPLES_AT_ONCE} at once.")
        options = {
            "sampling_params": replace(params, grammar=answer_grammar(fields, prompts.tools, prompts.form, llm)),
            "speculation": speculation_of(fields.get("speculation")),
            "draft_details": fields.get("draft_details", False),
            "tenant": tenant,
        }
        answers = llm.ask([replace(request, **options) for request in prompts.requests])
    check_context(fields, answers, llm.plan.max_model_len)
    usage = fields.get("stream_options", {})
    parsed = ParsedBody(
        endpoint=endpoint,
        form=prompts.form,
        include_reasoning=fields.get("include_reasoning", True),
        stream=fields.get("stream", False),
        include_usage=bool(usage.get("include_usage") or usage.get("continuous_usage_stats")),
        continuous_usage=bool(usage.get("continuous_usage_stats")),
        return_token_ids=fields.get("return_token_ids", False),
        echo=fields.get("echo", False),
        only_prompt=is_only_prompt(fields, endpoint),
        num_logprobs=num_logprobs(fields, answers, llm.plan.max_model_len),
        drafters=llm.drafter_names,
        body=body,
    )
    return parsed, answers


@contextmanager
def naming_prompt(name: str) -> Iterator[None]:
    """Context in which the library's errors about a prompt become ApiError 400 that names this field."""
    try:
        yield
    except InvalidRequest as error:
        if error.field not in ("prompt", "messages"):
            raise
        raise renamed(error, name) from error


def check_stream(fields: Mapping[str, Any], params: SamplingParams) -> None:
    """Raise ApiError 400 for options of streams in a body without one, or for options that streams do not have."""
    if fields.get("stream"):
        if params.prompt_logprobs is not None:
            name = "prompt_logprobs" if "prompt_logprobs" in fields else "echo"
            raise refused(name, "a stream has no log-probabilities of the prompt: leave this or stream out.")
        return
    for name in ("stream_options", "draft_details"):
        if fields.get(name):
            raise refused(name, "it requires stream: true.")


def check_context(fields: Mapping[str, Any], answers: Answers, context: int) -> None:
    """Raise ApiError 400 if a prompt and the body's maximum number of output tokens exceed the context length.

    A default maximum, such as the model's, is reduced instead: such an answer ends with "length".
    """
    name = next((name for name in LIMITS if name in fields), None)
    most, longest = answers.sequences[0].params.max_tokens, max(each.num_prompt for each in answers.sequences)
    if name is None or most is None or longest + most <= context:
        return
    raise refused(
        name,
        f"this model's maximum context length is {context} tokens, and {longest} tokens of the prompt with {most} of "
        f"the answer exceed it ({TOO_MANY_TOKENS}): use at most {context - longest}, or leave it out.",
        TOO_MANY_TOKENS,
    )


def num_logprobs(fields: Mapping[str, Any], answers: Answers, context: int) -> int:
    """Upper bound of the log-probabilities in the answers to one body, those of prompts included.

    Raises ApiError 400 if there are too many.
    """
    number = 0
    for _, samples in answers.requests:
        first, params = samples[0], samples[0].params
        if params.prompt_logprobs is not None:
            number += first.num_prompt * (params.prompt_logprobs + 1)
        if params.logprobs is not None:
            number += len(samples) * first.room * (params.logprobs + 1)
    if number > (most := max(MOST_LOGPROBS, 21 * context)):
        name = next((name for name in ("prompt_logprobs", "top_logprobs") if name in fields), "logprobs")
        problem = f"the body requests {number} log-probabilities, for all tokens, samples and prompts together"
        raise refused(name, f"{problem}; at most {most} are possible: request fewer of any of these.")
    return number


def params_of(body: Mapping[str, Any], endpoint: Endpoint, llm: LLM) -> SamplingParams:
    """The sampling parameters of a body, with the model's defaults."""
    defaults = llm.get_default_sampling_params()
    values = {name: body[name] for name in SAMPLING if name in body}
    values.setdefault("seed", secrets.randbits(SEED_BITS))
    if "n" in body:
        fix = f"use 1 or more answers per prompt, at most {MOST_SAMPLES_AT_ONCE}"
        whole("n", body["n"], fix, 1, MOST_SAMPLES_AT_ONCE)
    values["max_tokens"] = max_tokens_of(body, endpoint, llm)
    if "logit_bias" in body:
        values["logit_bias"] = biases(body["logit_bias"])
    values["logprobs"] = body.get("logprobs") if endpoint == "completions" else chat_logprobs(body)
    echoed = values["logprobs"] if body.get("echo") else None
    if echoed is not None and values.setdefault("prompt_logprobs", echoed) != echoed:
        raise refused("prompt_logprobs", "it differs from logprobs, which with echo count for the prompt: use one.")
    best = body.get("best_of")
    if best is not None and (isinstance(best, bool) or best != body.get("n", 1)):
        raise unserved("best_of", best, "use n and choose by log-probability")
    try:
        return replace(defaults, **values)
    except InvalidRequest as error:
        names = {"max_tokens": LIMITS[:2], "logprobs": ("top_logprobs",)}.get(error.field, ())
        for name in names:
            if name in body:
                raise renamed(error, name) from error
        raise


def max_tokens_of(body: Mapping[str, Any], endpoint: Endpoint, llm: LLM) -> Any:
    """The body's maximum number of output tokens, else the model's, else OpenAI's, which only completions have."""
    limits = [body[name] for name in LIMITS if name in body]
    if len(limits) == 2 and limits[0] != limits[1]:
        raise refused("max_tokens", "it differs from max_completion_tokens: use only one of the two.")
    if is_only_prompt(body, endpoint):
        return 1  # the engine generates at least one token, which is hidden
    default = llm.generation_defaults.given.get("max_tokens")
    return limits[0] if limits else default or (MAX_TOKENS if endpoint == "completions" else None)


def is_only_prompt(body: Mapping[str, Any], endpoint: Endpoint) -> bool:
    """Whether a completion echoes its prompt without an answer (`max_tokens` 0). Raises ApiError for 0 without echo."""
    limit = body.get("max_tokens")
    if endpoint != "completions" or isinstance(limit, bool) or limit != 0:
        return False
    if not body.get("echo"):
        raise refused("max_tokens", "0 is possible only with echo: use 1 or more.")
    return True


def chat_logprobs(body: Mapping[str, Any]) -> int | None:
    """The number of alternatives per token in a chat; None for no log-probabilities."""
    is_requested, top = body.get("logprobs", False), body.get("top_logprobs")
    if top and not is_requested:
        raise refused("top_logprobs", "it requires logprobs: true.")
    if top is not None:
        top = whole("top_logprobs", top, f"use a number up to {MOST_CHAT_LOGPROBS}", 0, MOST_CHAT_LOGPROBS)
    return (top or 0) if is_requested else None


def biases(values: Mapping[str, Any]) -> dict[int, Any]:
    """`logit_bias` with its keys, strings in JSON, as token ids."""
    for key in values:
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and (key == "0" or key[0] != "0")):
            raise refused("logit_bias", f"{shown(key)} is not a token id.")
    return {int(key): bias for key, bias in values.items()}


def speculation_of(value: Any) -> SpeculationOption:
    """The library's value for `speculation`; an object has the fields of Speculation, whose default depth is "auto"."""
    if not isinstance(value, dict):
        return value  # type: ignore[no-any-return]
    options = {name: each for name, each in value.items() if each is not None}
    return Speculation(**options | ({"tree": StaticTree(options["tree"])} if "tree" in options else {}))


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a body as requests without parameters, and the form of their answers."""

    requests: Seq[Request]
    form: AnswerForm = field(default_factory=AnswerForm)
    tools: ToolUse | None = None


def chat_prompts(fields: Mapping[str, Any], llm: LLM, settings: ServeSettings) -> Prompts:
    """The prompt of a chat: its messages, rendered by the chat template."""
    chat = ChatBody.of(fields, llm, settings)
    tools = tools_of(fields, lambda: call_form(llm.tokenizer, chat.options.chat_template))
    request = Request.of(llm.chat_prompt(chat.messages, chat.options))
    form = answer_form(chat.options, request.prompt or "", chat.continued, tools, llm.tokenizer)
    return Prompts([replace(request, shown_special_ids=form.shown_special_ids)], form, tools)


def completion_prompts(fields: Mapping[str, Any], llm: LLM) -> Prompts:
    """The prompts of a completion: text, token ids, or a list of either."""
    prompt = fields.get("prompt")
    if prompt is None:
        raise missing("prompt", "give text or token ids")
    if not isinstance(prompt, str) and not prompt:
        raise refused("prompt", "it is an empty list: give text, token ids, or a list of either.")
    one = isinstance(prompt, str) or all(isinstance(item, int) for item in prompt)
    prompts = [prompt] if one else prompt
    if len(prompts) > MOST_SAMPLES_AT_ONCE:
        raise refused("prompt", f"it is a list of {len(prompts)} prompts: give at most {MOST_SAMPLES_AT_ONCE}.")
    for each in prompts:
        if not isinstance(each, str | list):
            raise refused("prompt", f"{shown(each)} must be text or a list of token ids.")
    requests = [Request.of(each) for each in prompts]
    if fields.get("add_special_tokens", True):
        return Prompts(requests)
    encode, most = llm.tokenizer.encode_within, llm.plan.max_model_len
    return Prompts(
        [
            each if each.prompt is None else replace(each, prompt_token_ids=tuple(encode(each.prompt, most, False)))
            for each in requests
        ]
    )
