"""Refusals: every body that cannot be served is answered with 400, the field, and the reason."""

import json
from typing import Any

import pytest

from kit.servers import JSON, Running, assert_valid, serving
from serve.call_templates import HERMES
from serve.test_serve_bodies import CHAT, OK
from serve.test_serve_messages import BODY, THINKS
from serve.test_serve_messages import WEATHER as TOOL
from serve.test_serve_responses import CALLING, PLAIN, WEATHER
from serve.test_serve_tools import TOOLS, earlier

server = serving(max_body_bytes=100_000)
Refusals = list[tuple[dict[str, Any], str, str]]  # fields, the one at fault, and a part of the message or its code
UNKNOWN_SCHEMA = [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}]
COMPLETIONS: Refusals = [
    ({"max_toke": 3}, "max_toke", "did you mean 'max_tokens'?"),
    ({"temprature": 3}, "temprature", "did you mean 'temperature'?"),
    ({"\ud800": 3}, "\ud800", "there is no field"),
    ({"input": "a"}, "input", "did you mean 'prompt'?"),
    ({"prompt": None}, "prompt", "it is missing"),
    ({"prompt": []}, "prompt", "it is an empty list"),
    ({"prompt": [[]]}, "prompt", "it is empty"),
    ({"prompt": [1, "a"]}, "prompt", "1 must be text or a list of token ids"),
    ({"prompt": ["a", {"prompt": "b"}]}, "prompt", "must be text or a list of token ids"),
    ({"prompt": ["a", [True]]}, "prompt", "true is not a token id"),
    ({"prompt": [-1]}, "prompt", "is not a token id from 0 to 511"),
    ({"prompt": [512]}, "prompt", "is not a token id from 0 to 511"),
    ({"prompt": "\ud800"}, "prompt", "is not valid Unicode"),
    ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
    ({"prompt": [1] * 600}, "prompt", "maximum context length is 512 tokens, and 600"),
    ({"prompt": [1] * 500, "max_tokens": 13}, "max_tokens", "use at most 12, or leave it out"),
    (
        {"prompt": [[1], [1] * 500], "max_tokens": 10**18},
        "max_tokens",
        "512 tokens, and 500 tokens of the prompt with 1000000",
    ),
    ({"n": 129}, "n", "129 cannot be served; use 1 or more answers per prompt, at most 128"),
    ({"n": 65, "prompt": ["a", "b"]}, "n", "130 samples"),
    ({"n": 0}, "n", "0 cannot be served"),
    ({"n": True}, "n", "n: true cannot be served"),
    ({"max_tokens": 0}, "max_tokens", "0 is possible only with echo: use 1 or more"),
    ({"max_tokens": -1}, "max_tokens", "-1 cannot be served; use at least 1 token"),
    ({"max_tokens": []}, "max_tokens", "or null: until the context is full"),
    ({"temperature": -1}, "temperature", "temperature: -1 cannot be served"),
    ({"stop": ["x", None]}, "stop", '["x", null]'),
    ({"logit_bias": {"x": 1}}, "logit_bias", "is not a token id"),
    ({"logit_bias": {"600": 1}}, "logit_bias", "below the vocabulary size"),
    ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", '"01" is not a token id'),
    ({"best_of": 2}, "best_of", "use n and choose"),
    ({"n": 2, "best_of": True}, "best_of", "use n and choose"),
    ({"echo": True, "logprobs": 1, "stream": True}, "echo", "a stream has no log-probabilities of the prompt"),
    ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs", "differs from logprobs"),
    ({"logprobs": True}, "logprobs", "cannot be served"),
    ({"logprobs": 129}, "logprobs", "at most 128"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "requires stream"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "no field"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "a stream has no log-probabilities"),
    ({"speculation": "far"}, "speculation", "cannot be served"),
    ({"speculation": -1}, "speculation.depth", "cannot be served"),
    ({"speculation": {"dept": 1}}, "speculation.dept", "did you mean 'depth'?"),
    ({"speculation": {"drafter": "eagle"}}, "speculation.drafter", "is not a drafter of this engine"),
    ({"speculation": {"tree": [[5, 5]]}}, "speculation.tree", "has no parent"),
    ({"chat_template": "x"}, "chat_template", "there is no field"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "there is no schema"),
    ({"response_format": {"type": "json_schema", "schema": {"type": "obj"}}}, "response_format", "Invalid type: obj"),
]
CHATS: Refusals = [
    ({"messages": None}, "messages", ""),
    ({"messages": []}, "messages", ""),
    (
        {"messages": [{"role": "user", "content": "a " * 600}]},
        "messages",
        "prompt is too long",
    ),  # which clients look for
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", ""),
    ({"messages": [{"role": "user", "content": [{"image_url": {}}]}]}, "messages[0].content[0].image_url", ""),
    ({"chat_template": "{% for %}"}, "chat_template", ""),
    ({"chat_template": "{{ raise_exception('no') }}"}, "messages", ""),
    ({"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, "chat_template", ""),
    ({"chat_template": None}, "chat_template", ""),
    ({"chat_template": "{# #}"}, "messages", "the tokenizer adds no BOS token"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "is not valid Unicode text"),
    ({"messages": [{"role": "usr", "content": "a"}], "chat_template": "b"}, "messages[0]", "ignores messages of"),
    ({"max_tokens": None, "max_completion_tokens": 511}, "max_completion_tokens", "context_length_exceeded"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", ""),
    ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens", ""),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", ""),
    ({"top_logprobs": 3}, "top_logprobs", ""),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs", ""),
    ({"reasoning_effort": "low"}, "reasoning_effort", ""),
    ({"reasoning_effort": 3}, "reasoning_effort", ""),
    ({"reasoning_effort": "none", "chat_template": "<think></think>"}, "reasoning_effort", ""),
    ({"messages": [{"role": "user", "content": "a", "temprature": 1}]}, "messages[0].temprature", ""),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
        "messages[0].content[0].b",
        "",
    ),
    ({"logprobs": True, "top_logprobs": 200}, "top_logprobs", ""),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", ""),
]
TOOLS_OF_CHATS: Refusals = [
    ({"chat_template": "{{ messages[0].content }}"}, "tools", "ignores tools"),
    ({"chat_template": "{{ tools }}{{ messages[0].content }}"}, "tools", "format of calls is unknown"),
    ({"messages": [earlier(arguments="[]")]}, "messages", "messages[0].tool_calls[1]: the arguments"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format", "leave out one"),
    ({"tools": [{}]}, "tools", "is not a function"),
    ({"tools": UNKNOWN_SCHEMA, "tool_choice": "required"}, "tools", "Unimplemented keys"),
]
RESPONSES: Refusals = [
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": []}, "input", "invalid_value"),
    ({"input": ["a"]}, "input", "invalid_value"),
    ({"input": [{"type": "image_generation_call"}]}, "input", "unsupported_parameter"),
    ({"input": [{"type": ["x"]}]}, "input", "invalid_value"),
    ({"input": [{"role": "nobody", "content": "x"}]}, "input", "invalid_value"),
    ({"input": [{"role": ["user"], "content": "x"}]}, "input", "invalid_value"),
    ({"input": [{"role": "user", "content": None}]}, "input", "invalid_value"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "invalid_value"),
    ({"input": [{"type": "function_call", "arguments": "{}"}]}, "input", "invalid_value"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "[1]"}]}, "input", "invalid_value"),
    ({"include": ["file_search_call.results"]}, "include", "unsupported_parameter"),
    ({"top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"max_tokens": 3}, "max_tokens", "did you mean 'max_output_tokens'?"),
    ({"messages": []}, "messages", "did you mean 'input'?"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"max_output_tokens": 5000}, "max_output_tokens", "context_length_exceeded"),
    ({"text": {"format": {"type": "xml"}}}, "text.format", "invalid_value"),
    ({"chat_template": "{{ raise_exception('no') }}"}, "input", "invalid_value"),
    ({"chat_template": "{# #}"}, "input", "the tokenizer adds no BOS token"),
]
TOOLS_OF_RESPONSES: Refusals = [
    ({"tools": [{"type": "web_search"}]}, "tools", "other kinds are not served"),
    ({"tools": TOOLS}, "tools", r'"function" is not served here: a function has name'),
    ({"tools": [{"type": "function", "parameters": {}}]}, "tools", "is not the name of a function"),
    ({"tools": [{**WEATHER, "strict": "true"}]}, "tools", "must be true or false"),
    ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools", '"defer_loading" is not served here'),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", 'or one of the functions ["weather", '),
    ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice", "must be"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": 3}}, "tool_choice", "must be"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "requires tools"),
    ({"chat_template": "{{ messages }}"}, "tools", "ignores tools"),
    ({"top_logprobs": 2}, "top_logprobs", "responses with tools have no log-probabilities"),
    ({"include": ["message.output_text.logprobs"]}, "include", "responses with tools have no log-probabilities"),
    ({"tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "text", "leave out one"),
]
MESSAGES: list[tuple[dict[str, Any], str]] = [  # whose errors name no field but in their words
    ({"max_tokens": None}, "max_tokens: it is missing"),
    ({"max_tokens": 0}, "max_tokens: 0 cannot be served; use at least 1 token"),
    ({"max_tokens": 5000}, "maximum context length is 512 tokens"),
    ({"messages": [{"role": "user", "content": "a " * 2000}]}, "messages: the prompt is too long: this model's max"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "tool", "content": ""}]}, "user, assistant, system"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "reads text only"),
    ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "messages[0] has no field"),
    ({"system": [{"type": "text", "text": 3}]}, "is not text"),
    ({"tools": [{"type": "web_search_20260101", "name": "web_search"}]}, "is not a custom tool"),
    ({"tools": [TOOL]}, "tools: the model's chat template ignores tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice"),
    ({"tools": [TOOL | {"strict": 1}]}, "must be true or false"),
    ({"tools": [TOOL], "tool_choice": {"type": []}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": 3}}, "true or false"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "there is no budget for thinking"),
    ({"thinking": {"type": "disabled"}, "chat_template": THINKS}, 'thinking: "none" has no effect'),
    ({"thinking": {"display": "omitted"}}, 'thinking: {"display": "omitted"} is not served'),
    ({"thinking": {"type": []}}, "is not served"),
    ({"output_config": {"effort": "high"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"temprature": 2}, "did you mean 'temperature'"),
]
REFUSED: dict[str, tuple[str, dict[str, Any], Refusals]] = {
    "completions": ("/v1/completions", OK, COMPLETIONS),
    "chats": ("/v1/chat/completions", CHAT, CHATS),
    "tools of chats": ("/v1/chat/completions", {**CHAT, "chat_template": HERMES, "tools": TOOLS}, TOOLS_OF_CHATS),
    "responses": ("/v1/responses", {**CALLING, "tools": None, "chat_template": PLAIN}, RESPONSES),
    "tools of responses": ("/v1/responses", {**CALLING, "chat_template": HERMES}, TOOLS_OF_RESPONSES),
    "messages": ("/v1/messages", BODY, [(fields, "", message) for fields, message in MESSAGES]),
}


@pytest.mark.parametrize(
    ("where", "fields", "param", "message"),
    [(where, *row) for where, (_, _, rows) in REFUSED.items() for row in rows],
    ids=lambda value: ascii(value)[:50],
)
def test_bodies_that_cannot_be_served_are_refused_by_field(
    server: Running, where: str, fields: dict[str, Any], param: str, message: str
) -> None:
    path, body, _ = REFUSED[where]
    with server.http() as http:
        answer = http.post(path, content=json.dumps(body | fields), headers=JSON)  # which escapes what has no UTF-8
    found = answer.json()
    assert (answer.status_code, found["error"]["type"]) == (400, "invalid_request_error"), found
    assert message in found["error"]["message"] or message == found["error"]["code"], found
    if where == "messages":
        assert found["type"] == "error"
    else:
        assert found["error"]["param"] == param, found
        assert_valid(found, "ErrorResponse")
