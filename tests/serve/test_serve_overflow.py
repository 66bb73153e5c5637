"""Overflows: a prompt and limit that exceed the context are refused with the field names of the body."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.serve.schema import KNOWN, Endpoint
from kit.engines import plain
from kit.servers import TEMPLATE, drafting, running

ROOM = 512
LIMITS = {
    "completions": ["max_tokens"],
    "chat/completions": ["max_completion_tokens", "max_tokens"],
    "responses": ["max_output_tokens"],
    "messages": ["max_tokens"],
}
ENDPOINTS: dict[str, Endpoint] = {where: where.split("/")[0] for where in LIMITS}
NAMES = {"prompt", "messages", "input"}.union(*LIMITS.values())
PROMPTS = {"completions": "prompt", "responses": "input"}  # elsewhere messages
COUNTS = (
    st.integers(1, 40)
    | st.integers(1, 40)
    | st.integers(1, 40)
    | st.integers(1, 40)
    | st.integers(ROOM - 6, ROOM + 3)
    | st.integers(1, 3 * ROOM)
)
ENDS = {"stop_token_ids": list(range(ROOM)), "chat_template": TEMPLATE, "seed": 1}  # the first token is the last


@pytest.fixture(scope="module")
def http() -> Iterator[Any]:
    with drafting() as llm, running(llm, lenient=True) as server, server.http() as client:
        yield client


def text_of(num_words: int) -> str:
    return "a dog" + " ran" * num_words


def num_tokens(prompt: str | list[int], special: bool) -> int:
    return len(prompt if isinstance(prompt, list) else plain().tokenizer.encode(prompt, add_special_tokens=special))


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any], int]:
    """An address, a body, and the tokens of its longest prompt."""
    where = draw(st.sampled_from(["completions", *LIMITS]))
    if where == "completions":
        one = COUNTS.map(lambda count: [1] * count) | COUNTS.map(text_of)
        prompts = draw(st.lists(one, min_size=1, max_size=3))
        body = {"prompt": prompts if len(prompts) > 1 else prompts[0], "stop_token_ids": ENDS["stop_token_ids"]}
        return where, body, max(num_tokens(prompt, True) for prompt in prompts)
    words = draw(st.lists(COUNTS, min_size=1, max_size=2))
    contents = [text_of(count) for count in words]
    length = num_tokens("".join(f"{content} " for content in contents) + "One day", False)
    talk: Any = [
        {"role": role, "content": content}
        for role, content in zip(("system", "user")[-len(words) :], contents, strict=True)
    ]
    if where == "responses":
        talk = contents[0] if len(words) == 1 and draw(st.booleans()) else talk
        if len(words) == 2 and draw(st.booleans()):
            return where, ENDS | {"instructions": contents[0], "input": contents[1]}, length
        return where, ENDS | {"input": talk}, length
    if where == "messages" and len(words) == 2:
        return where, ENDS | {"system": contents[0], "messages": talk[1:]}, length
    return where, ENDS | {"messages": talk}, length


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any], int, int]:
    """Such a body with limits, or nulls in their place, and what it allows the answer at least."""
    where, body, length = draw(bodies())
    near = st.sampled_from([-1, 0, 1, 1]).map(lambda more: max(1, ROOM - length + more))
    limit = draw(near | near | COUNTS)
    names = LIMITS[where]
    limits = draw(st.sampled_from([*([name] for name in names), names, [] if where != "messages" else names]))
    body |= {name: None for name in names if draw(st.booleans())} | dict.fromkeys(limits, limit)
    if where in ("completions", "chat/completions"):
        body["n"] = draw(st.integers(1, 3))
    body["stream"] = draw(st.booleans())
    known = KNOWN[ENDPOINTS[where]]
    strays = draw(st.sets(st.sampled_from(sorted(NAMES - known.keys()))))  # which are ignored
    body |= dict.fromkeys(strays, 7)
    return where, body, length, limit if limits else 1


@settings(max_examples=120, deadline=None)
@given(request=requests())
def test_overflows_are_refused_with_the_field_names_of_the_body(
    http: Any, request: tuple[str, dict[str, Any], int, int]
) -> None:
    where, body, length, limit = request
    answer = http.post(f"/v1/{where}", json=body)
    assert answer.headers["x-request-id"]
    if length + limit <= ROOM:
        assert answer.status_code == 200, answer.text
        return
    assert answer.status_code == 400
    error, param = answer.json()["error"], PROMPTS.get(where, "messages")
    if length < ROOM:
        param = next(name for name in LIMITS[where] if body.get(name) is not None)
    if where != "messages":  # whose errors have neither
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert error["message"].startswith(f"{param}: ")
    assert f"this model's maximum context length is {ROOM} tokens" in error["message"]
    for name in NAMES - {"prompt", param}:  # which is a word too
        assert not re.search(rf"\b{name}\b", error["message"])
