"""Parsing: request bodies as requests of the library.

This file decides which request of the library the fields of a body stand for. The library checks the values themselves.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.config import Speculation
from forerun.errors import InvalidRequest, PromptTooLong
from forerun.limits import shown, whole
from forerun.llm import LLM
from forerun.output import Answers
from forerun.request import Request, SpeculationOption, requests_of
from forerun.sampling.params import SamplingParams
from forerun.serve.body import served_fields
from forerun.serve.conversation import ChatBody
from forerun.serve.inputs import message_fields, response_fields, response_logprobs
from forerun.serve.parts import AnswerForm
from forerun.serve.problems import MISSING, TOO_MANY_TOKENS, refused
from forerun.serve.schema import PROMPTS, SAMPLING, Endpoint
from forerun.serve.settings import MOST_SAMPLES_AT_ONCE, ServeSettings
from forerun.serve.structured import formed
from forerun.serve.template_forms import answer_form, call_form
from forerun.serve.tools import tools_of
from forerun.shape import StaticTree

MAX_TOKENS = 16  # of a completion that does not say, by OpenAI's specification
SEED_BITS = 53  # of seeds drawn here: every reader of JSON keeps such a number exactly
LIMITS = ("max_output_tokens", "max_completion_tokens", "max_tokens")
MOST_CHAT_LOGPROBS = 128
FEW_LOGPROBS = 1 << 20  # of one body, which take half a gigabyte until they are written; a full context has 21 a token


@dataclass(frozen=True, slots=True)
class Asked:
    """What a body asks for: one request for each prompt, each with `n` samples, and the form of the answer.

    `limit_field` is the field that says how many tokens an answer may have, if one does. `form` says how its reasoning
    is written, which is told if `include_reasoning` says so, and how it calls the functions of the `tools`. `body`
    is what was sent, for answers that repeat it, and `drafters` are the names of what drafts. With `echo` a completion
    begins with its prompt; with `only_prompt` it is the prompt alone, and the one token behind it is not told. The
    answers have at most `num_logprobs` log-probabilities.
    """

    endpoint: Endpoint
    requests: Seq[Request]
    n: int
    seed: int
    limit_field: str | None = None
    form: AnswerForm = field(default_factory=AnswerForm)
    include_reasoning: bool = True
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    echo: bool = False
    only_prompt: bool = False
    num_logprobs: int = 0
    drafters: Seq[str] = ()
    body: Mapping[str, Any] = field(default_factory=dict)


def prepared(
    body: Mapping[str, Any], endpoint: Endpoint, llm: LLM, tenant: str, settings: ServeSettings
) -> tuple[Asked, Answers]:
    """What a body asks for, and its sequences; nothing runs yet. Raises InvalidRequest or ApiError, naming a field."""
    with prompt_named(PROMPTS[endpoint]):
        asked = asked_of(body, endpoint, llm, tenant, settings)
        answers = llm.ask(asked.requests)
    require_room(asked, [samples[0].num_prompt for _, samples in answers.requests], llm.plan.max_model_len)
    most = max(FEW_LOGPROBS, 21 * llm.plan.max_model_len)
    if (number := num_logprobs(answers)) > most:
        name = next((name for name in ("prompt_logprobs", "top_logprobs") if body.get(name) is not None), "logprobs")
        problem = f"{number} log-probabilities, of all tokens, samples and prompts together, are more than {most}"
        raise refused(name, f"{name}: {problem}: ask for fewer, or for fewer tokens, samples or prompts at once.")
    return replace(asked, num_logprobs=number), answers


def num_logprobs(answers: Answers) -> int:
    """How many log-probabilities the answers to one body may have, those of their prompts included, before it runs."""
    number = 0
    for _, samples in answers.requests:
        first, params = samples[0], samples[0].params
        if params.prompt_logprobs is not None:
            number += first.num_prompt * (params.prompt_logprobs + 1)
        if params.logprobs is not None:
            number += len(samples) * first.room * (params.logprobs + 1)
    return number


@contextmanager
def prompt_named(name: str) -> Iterator[None]:
    """Within it a prompt that is too long is answered with 400 and the name of the field that it comes from."""
    try:
        yield
    except PromptTooLong as error:
        raise refused(name, str(error).replace(error.field, name, 1), TOO_MANY_TOKENS) from error


def asked_of(body: Mapping[str, Any], endpoint: Endpoint, llm: LLM, tenant: str, settings: ServeSettings) -> Asked:
    """What a body asks for. Raises InvalidRequest or ApiError, naming the field at fault."""
    fields = served_fields(body, endpoint, settings.lenient)
    if endpoint == "responses":
        fields = response_fields(fields)
    elif endpoint == "messages":
        if "max_tokens" not in fields:
            raise refused("max_tokens", "max_tokens: it is missing: give how many tokens the answer may have.", MISSING)
        fields = message_fields(fields)
    stream, stream_options = fields.get("stream", False), fields.get("stream_options", {})
    if stream_options and not stream:
        raise refused("stream_options", "stream_options: it goes with stream: true alone.")
    params = params_of(fields, endpoint, llm)
    if stream and params.prompt_logprobs is not None:
        name = "prompt_logprobs" if "prompt_logprobs" in fields else "echo"
        raise refused(name, f"{name}: a stream has no log-probabilities of its prompt; leave out one of both.")
    speculation = speculation_of(fields.get("speculation"))
    chat = None if endpoint == "completions" else ChatBody.of(fields, llm, settings)
    tools = None if chat is None else tools_of(fields, lambda: call_form(llm.tokenizer, chat.options.chat_template))
    if tools is not None and endpoint == "responses" and params.logprobs is not None:
        field = "top_logprobs" if "top_logprobs" in fields else "include"
        problem = "calls have no log-probabilities in responses; leave out it or the tools, or ask for a chat"
        raise refused(field, f"{field}: {problem}.", "unsupported_parameter")
    if chat is None:
        requests, form = completion_requests(fields, params, speculation, tenant, llm), AnswerForm()
    else:
        prompt = chat.request(llm, PROMPTS[endpoint])
        form = answer_form(chat.options, prompt.prompt or "", chat.continued, tools, llm.tokenizer)
        prompt = replace(prompt, sampling_params=params, speculation=speculation, tenant=tenant)
        requests = [replace(prompt, shown_special_ids=form.shown_special_ids)]
    if fields.get("draft_details"):
        if not stream:
            raise refused("draft_details", "draft_details: it goes with stream: true alone.")
        requests = [replace(request, draft_details=True) for request in requests]
    requests = formed(requests, fields, tools, form, llm)
    asked = Asked(
        endpoint=endpoint,
        requests=requests,
        n=params.n,
        seed=params.resolve_seed(),
        limit_field=next((name for name in LIMITS if name in fields), None),
        form=form,
        include_reasoning=fields.get("include_reasoning", True),
        stream=stream,
        include_usage=bool(stream_options.get("include_usage") or stream_options.get("continuous_usage_stats")),
        continuous_usage=bool(stream_options.get("continuous_usage_stats")),
        return_token_ids=fields.get("return_token_ids", False),
        echo=fields.get("echo", False),
        only_prompt=asks_for_nothing(fields, endpoint),
        drafters=llm.drafter_names,
        body=body,
    )
    if (num_samples := params.n * len(requests)) > MOST_SAMPLES_AT_ONCE:
        problem = f"{num_samples} samples, of all prompts together, are more than {MOST_SAMPLES_AT_ONCE}"
        raise refused("n", f"n: {problem}: ask for fewer at once.")
    return asked


def require_room(asked: Asked, prompt_lengths: Seq[int], room: int) -> None:
    """Raise the ApiError for 400 where a prompt and the tokens that the body allows its answer exceed the context.

    A limit that is not of the body, such as the model's own, is cut instead: such an answer ends with "length".
    """
    params = asked.requests[0].sampling_params
    if asked.limit_field is None or params is None or params.max_tokens is None:
        return
    longest = max(prompt_lengths)
    if longest + params.max_tokens > room:
        raise refused(
            asked.limit_field,
            f"{asked.limit_field}: this model's maximum context length is {room} tokens, and {longest} of the prompt "
            f"with {params.max_tokens} of the answer are more ({TOO_MANY_TOKENS}): ask for at most {room - longest}, "
            "or leave it out.",
            TOO_MANY_TOKENS,
        )


def params_of(given: Mapping[str, Any], endpoint: Endpoint, llm: LLM) -> SamplingParams:
    """The sampling parameters: those of the body, and otherwise the model's defaults, with OpenAI's `max_tokens`."""
    defaults = llm.get_default_sampling_params()
    values = {name: given[name] for name in SAMPLING if name in given}
    values.setdefault("seed", secrets.randbits(SEED_BITS))
    if "n" in given:
        fix = f"use 1 or more answers per prompt, at most {MOST_SAMPLES_AT_ONCE}"
        whole("n", given["n"], fix, 1, MOST_SAMPLES_AT_ONCE)
    limits = [given[name] for name in LIMITS if name in given]
    if len(limits) == 2 and limits[0] != limits[1]:
        raise refused("max_tokens", "max_tokens: max_completion_tokens says otherwise; use that one alone.")
    default = llm.generation_defaults.given.get("max_tokens")
    values["max_tokens"] = limits[0] if limits else default or (MAX_TOKENS if endpoint == "completions" else None)
    if asks_for_nothing(given, endpoint):
        values["max_tokens"] = 1  # no round gives less; it is not told
    if "logit_bias" in given:
        values["logit_bias"] = biases(given["logit_bias"])
    values["logprobs"] = LOGPROBS[endpoint](given)
    echoed = values["logprobs"] if given.get("echo") else None
    if echoed is not None and values.setdefault("prompt_logprobs", echoed) != echoed:
        raise refused("prompt_logprobs", "prompt_logprobs: logprobs with echo say otherwise; use one of both.")
    best = given.get("best_of")
    if best is not None and (isinstance(best, bool) or best != given.get("n", 1)):
        problem = f"best_of: {shown(best)} is not served here: use n and choose by log-probability."
        raise refused("best_of", problem, "unsupported_parameter")
    try:
        return replace(defaults, **values)
    except InvalidRequest as error:
        renamed = {"max_tokens": LIMITS[:2], "logprobs": ("top_logprobs",)}.get(error.field, ())
        for name in renamed:
            if name in given:
                raise refused(name, str(error).replace(error.field, name, 1)) from error
        raise


def asks_for_nothing(given: Mapping[str, Any], endpoint: Endpoint) -> bool:
    """Whether a completion is to have no token but those of the prompt that it repeats."""
    limit = given.get("max_tokens")
    if endpoint != "completions" or isinstance(limit, bool) or limit != 0:
        return False
    if not given.get("echo"):
        raise refused("max_tokens", "max_tokens: 0 leaves no answer: ask for 1 or more, or for the prompt with echo.")
    return True


def chat_logprobs(given: Mapping[str, Any]) -> int | None:
    """How many alternatives are wanted; None for no log-probabilities."""
    is_asked, top = given.get("logprobs", False), given.get("top_logprobs")
    if top and not is_asked:
        raise refused("top_logprobs", "top_logprobs: it needs logprobs: true.")
    if top is not None:
        top = whole("top_logprobs", top, f"use a number up to {MOST_CHAT_LOGPROBS}", 0, MOST_CHAT_LOGPROBS)
    return (top or 0) if is_asked else None


LOGPROBS: Mapping[Endpoint, Callable[[Mapping[str, Any]], Any]] = {
    "completions": lambda given: given.get("logprobs"),
    "chat": chat_logprobs,
    "responses": response_logprobs,
    "messages": lambda _: None,
}


def biases(values: Mapping[str, Any]) -> dict[int, Any]:
    """`logit_bias` with token ids as numbers; in JSON they are strings."""
    for key in values:
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and (key == "0" or key[0] != "0")):
            raise refused("logit_bias", f"logit_bias: {shown(key)} is not a token id.")
    return {int(key): bias for key, bias in values.items()}


def speculation_of(value: Any) -> SpeculationOption:
    """`speculation` as in the library; an object has the fields of Speculation."""
    if not isinstance(value, dict):
        return value  # type: ignore[no-any-return]
    options = {name: member for name, member in value.items() if member is not None}
    return Speculation(**options | ({"tree": StaticTree(options["tree"])} if "tree" in options else {}))


def completion_requests(
    given: Mapping[str, Any], params: SamplingParams, speculation: SpeculationOption, tenant: str, llm: LLM
) -> Seq[Request]:
    """One request for each prompt: text, or token ids, or a list of either."""
    prompt = given.get("prompt")
    if prompt is None:
        raise refused("prompt", "prompt: it is missing: give text or token ids.", MISSING)
    if not prompt:
        raise refused("prompt", f"prompt: {shown(prompt)} is no text, no token ids, and no list of either.")
    one = isinstance(prompt, str) or all(isinstance(item, int) for item in prompt)
    prompts = [prompt] if one else prompt
    if len(prompts) > MOST_SAMPLES_AT_ONCE:
        raise refused("prompt", f"prompt: these are {len(prompts)} prompts: give at most {MOST_SAMPLES_AT_ONCE}.")
    for each in prompts:
        if not isinstance(each, str | list):
            raise refused("prompt", f"prompt: {shown(each)} is no text and no list of token ids.")
    requests = requests_of(prompts, params, speculation, tenant)
    if given.get("add_special_tokens", True):
        return requests
    encode, most = llm.tokenizer.encode_within, llm.plan.max_model_len
    return [
        each if each.prompt is None else replace(each, prompt_token_ids=tuple(encode(each.prompt, most, False)))
        for each in requests
    ]
