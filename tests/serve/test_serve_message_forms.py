"""Messages, chats and responses: a conversation in Anthropic's form, or in items, equals the corresponding chat."""

import json
from functools import cache
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.serve.parse import prepare
from forerun.serve.settings import ServeSettings
from kit.engines import plain
from kit.servers import Running, serving
from serve.replies import reply_of, response_of

PLAIN = (  # it shows all that a message may have
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }} {{ m.tool_call_id }}>{{ m.reasoning_content }}|{{ m.content }}"
    '{% for call in m.tool_calls or [] %}<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>{{ call.id }}{% endfor %}{% endfor %}"
)
THINKING = PLAIN + "{% if enable_thinking and add_generation_prompt %}<think>{% endif %}{# </think> #}"
UNSHOWN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Once"}], "max_tokens": 20, "seed": 3, "chat_template": THINKING,
    "thinking": {"type": "adaptive", "display": "omitted"},
}  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"to": {"enum": ["Rome", "Oslo"]}},
    "required": ["to"],
    "additionalProperties": False,
}
NAMES = ("go", "see")
FEW: dict[str, Any] = {"max_size": 2}
WORDS = st.sampled_from(["", "Once", "a dog", "upon\n", " ran", "<think>", "é"])
TEXT = st.builds(lambda text: {"type": "text", "text": text, "cache_control": None}, WORDS)
TEXTS = WORDS | st.lists(TEXT, min_size=1, **FEW)
IDS = st.sampled_from(["t1", "t2"])
USE = st.builds(
    lambda name, call_id, to: {"type": "tool_use", "id": call_id, "name": name, "input": {"to": to} if to else {}},
    st.sampled_from(NAMES), IDS, st.none() | st.sampled_from(["Rome", 3, {"x": ["y"]}]),
)  # fmt: skip
THOUGHT = st.builds(lambda text: {"type": "thinking", "thinking": text, "signature": "s"}, WORDS)
RESULT = st.builds(
    lambda call_id, wrong, content: {"type": "tool_result", "tool_use_id": call_id, "is_error": wrong} | content,
    IDS, st.booleans(), st.just({}) | TEXTS.map(lambda content: {"content": content}),
)  # fmt: skip
MESSAGE = st.one_of(
    st.builds(
        lambda content: {"role": "user", "content": content}, WORDS | st.lists(TEXT | RESULT, min_size=1, max_size=3)
    ),
    st.builds(lambda content: {"role": "system", "content": content}, TEXTS),
    st.builds(
        lambda content: {"role": "assistant", "content": content},
        WORDS | st.lists(TEXT | USE | THOUGHT, min_size=1, max_size=3),
    ),
)
CHOICES: dict[str, Any] = {"auto": "auto", "none": "none", "any": "required"}


server = serving()


@cache
def blanks() -> dict[str, int]:
    """Biases against blanks, of which a grammar allows any number."""
    decode = plain().tokenizer.decode
    return {str(token): -30 for token in range(512) if not decode([token]).strip()}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A body of /v1/messages."""
    body: dict[str, Any] = {"messages": draw(st.lists(MESSAGE, min_size=1, max_size=4))}
    body |= {
        "max_tokens": draw(st.sampled_from([1, 2, 8, 20])),
        "seed": draw(st.integers(0, 9)),
        "chat_template": draw(st.sampled_from([PLAIN, THINKING])),
    }
    maybe = {
        "system": TEXTS,
        "temperature": st.sampled_from([0.0, 1.0]),
        "top_k": st.just(5),
        "top_p": st.just(0.9),
        "speculation": st.just(False),
        "stop_sequences": st.lists(st.sampled_from(["a", " the", "."]), **FEW),
        "thinking": st.builds(
            lambda kind, display: {"type": kind, "display": display},
            st.sampled_from(["enabled", "adaptive", "disabled"]), st.sampled_from([None, "omitted", "summarized"]),
        ),
    }  # fmt: skip
    body |= draw(st.fixed_dictionaries({}, optional=maybe))
    if draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
        described = draw(st.sampled_from([{}, {"description": "d"}]))
        body["tools"] = [{"name": name, "input_schema": SCHEMA, **described} for name in names]
        kind = draw(st.sampled_from([None, "auto", "none", "any", "any", "any", "tool"]))
        if kind is not None:
            one = draw(st.sampled_from([{}, {"disable_parallel_tool_use": False}, {"disable_parallel_tool_use": True}]))
            body["tool_choice"] = {"type": kind, **one} | ({"name": names[0]} if kind == "tool" else {})
        if kind in ("any", "tool"):
            body |= {
                "max_tokens": draw(st.sampled_from([8, 120, 120])),
                "logit_bias": blanks(),
            }  # enough for calls, or not
    return body


def text_of(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(block["text"] for block in content)


def chat_of(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a chat that it stands for."""
    same = ("max_tokens", "seed", "chat_template", "temperature", "top_k", "top_p", "speculation", "logit_bias")
    chat = {name: body[name] for name in same if name in body}
    chat |= {"stop": body["stop_sequences"]} if "stop_sequences" in body else {}
    blocks = [
        (message["role"], block)
        for message in body["messages"]
        for content in [message["content"]]
        for block in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]
    messages = [{"role": "system", "content": text_of(body["system"])}] if "system" in body else []
    # A result is a message of its own, and what stands between results is one for each role.
    for (role, _), group in groupby(
        enumerate(blocks), lambda each: (each[1][0], each[0] if each[1][1]["type"] == "tool_result" else -1)
    ):
        members = [block for _, (_, block) in group]
        kinds = {
            kind: [block for block in members if block["type"] == kind]
            for kind in ("text", "thinking", "tool_use", "tool_result")
        }
        if kinds["tool_result"]:
            (result,) = members
            messages.append(
                {"role": "tool", "tool_call_id": result["tool_use_id"], "content": text_of(result.get("content", ""))}
            )
            continue
        message: dict[str, Any] = {
            "role": role,
            "content": text_of([block for block in kinds["text"] if block["text"]]),
        }
        if kinds["thinking"]:
            message["reasoning_content"] = "\n".join(block["thinking"] for block in kinds["thinking"])
        if kinds["tool_use"]:
            message["tool_calls"] = [
                {
                    "id": use["id"],
                    "type": "function",
                    "function": {"name": use["name"], "arguments": json.dumps(use["input"])},
                }
                for use in kinds["tool_use"]
            ]
        messages.append(message)
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        chat["continue_final_message"] = True
    if "thinking" in body:
        chat["chat_template_kwargs"] = {"enable_thinking": body["thinking"]["type"] != "disabled"}
        chat["include_reasoning"] = body["thinking"]["display"] != "omitted"
    for tool in body.get("tools", ()):
        function = {name: tool[name] for name in ("name", "description") if name in tool} | {
            "parameters": tool["input_schema"]
        }
        chat.setdefault("tools", []).append({"type": "function", "function": function})
    if choice := body.get("tool_choice"):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = CHOICES.get(choice["type"], named)
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    return chat | {"messages": messages}


def asked(body: dict[str, Any], endpoint: Any) -> Any:
    """The tokens of the prompt, and all else that the answer depends on; or why there is none."""
    try:
        ask, answers = prepare(body, endpoint, plain(), "", ServeSettings(trust_request_templates=True))
    except Exception as error:
        return type(error), str(error).partition(": ")[2]
    ((request, (sequence,)),) = answers.requests
    return sequence.tokens, request, ask.form, ask.include_reasoning


@settings(max_examples=50, deadline=None)
@given(bodies())
def test_a_message_body_gives_the_request_of_its_chat(body: dict[str, Any]) -> None:
    chat = chat_of(body)
    assert asked(body, "messages") == asked(chat, "chat") == asked(response_of(chat), "responses")


@pytest.mark.parametrize("count", [8, pytest.param(60, marks=pytest.mark.full)])
def test_an_answer_is_that_of_its_chat(server: Running, count: int) -> None:
    """In responses too; whole, and as a stream, whose events are in their order."""

    def check(body: dict[str, Any]) -> None:
        chat = chat_of(body)
        message = server.post("/v1/messages", **body).json()
        if message["type"] == "error":  # the prompt may be too long for so many tokens
            assert message["error"]["message"] == server.post("/v1/chat/completions", **chat).json()["error"]["message"]
            return
        reply = reply_of(server, chat, response_of(chat), body)
        counted = server.post("/v1/messages/count_tokens", **body).json()
        assert counted == {"input_tokens": reply.counts[0]}

    check(UNSHOWN)
    settings(max_examples=count, deadline=None)(given(bodies())(check))()
