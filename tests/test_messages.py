"""Conversations: one or many, with options for the template, through both front doors; what is none is named."""

import asyncio
from functools import cache
from typing import Any

import pytest

from forerun import LLM, AsyncLLM, InvalidRequest, SamplingParams
from forerun.request import ChatOptions, with_text
from kit.checkpoints import TARGET
from kit.unchecked import unchecked

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if tools %}[{{ tools | map(attribute='name') | join(',') }}]{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}(quick){% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
STORY = [{"role": "user", "content": "Tell me a story."}]
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, seed=1)


@cache
def llm() -> LLM:
    return LLM(str(TARGET), "ngram", dtype="float32")


def test_a_conversation_is_answered_as_the_prompt_that_the_template_makes() -> None:
    (result,) = llm().chat(HELLO, SHORT, chat_template=TEMPLATE, use_tqdm=False)
    assert result.prompt == "<system>Be kind.\n<user>Hello\n<assistant>"
    ids = llm().get_tokenizer().encode(result.prompt, add_special_tokens=False)
    assert list(result.prompt_token_ids) == ids
    assert result == llm().generate([ids], SHORT)[0]


def test_many_conversations_are_answered_in_order() -> None:
    both = llm().chat([HELLO, STORY], [SHORT, SHORT], chat_template=TEMPLATE)
    assert [result.prompt for result in both] == [
        "<system>Be kind.\n<user>Hello\n<assistant>",
        "<user>Tell me a story.\n<assistant>",
    ]
    assert both[1] == llm().chat(STORY, SHORT, chat_template=TEMPLATE)[0]
    assert llm().chat([], SHORT, chat_template=TEMPLATE) == []


def test_the_templates_options_reach_it() -> None:
    (result,) = llm().chat(
        STORY,
        SHORT,
        chat_template=TEMPLATE,
        add_generation_prompt=False,
        tools=[{"name": "add"}, {"name": "sub"}],
        chat_template_kwargs={"enable_thinking": False},
    )
    assert result.prompt == "<user>Tell me a story.\n[add,sub](quick)"
    begun = [*STORY, {"role": "assistant", "content": "Once upon"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    (result,) = llm().chat(begun, SHORT, chat_template=TEMPLATE, **options)  # type: ignore[arg-type]
    assert result.prompt == "<user>Tell me a story.\n<assistant>Once upon"


def test_the_other_door_says_the_same() -> None:
    async def main() -> None:
        async with AsyncLLM(llm()) as front:
            assert front.get_tokenizer() is llm().get_tokenizer()
            assert front.get_default_sampling_params() == llm().get_default_sampling_params()
            found = await front.chat(HELLO, SHORT, chat_template=TEMPLATE)
            prompt = front.llm.chat_prompt(HELLO, ChatOptions(TEMPLATE))
            deltas = [delta async for delta in front.stream(prompt, SHORT)]
            assert "".join(delta.text for delta in deltas) == found.outputs[0].text
            assert found == expected

    (expected,) = llm().chat(HELLO, SHORT, chat_template=TEMPLATE)
    asyncio.run(main())


def test_text_in_parts_is_text() -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}, "!"]
    assert with_text({"role": "user", "content": parts}) == {"role": "user", "content": "Hello\nthere\n!"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    assert with_text(call) == call


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hello", "messages: 'Hello' is not a conversation: use a list such as"),
        (5, "messages: 5 is not a conversation"),
        ({"role": "user"}, "messages: .* is not a conversation"),
        (["Hello"], "messages: 'Hello' is not a conversation"),
        ([HELLO, "Hello"], "messages: 'Hello' is not a conversation"),
        ([{"content": "a"}], "messages: "),
        ([{"role": 5, "content": "a"}], "messages: "),
        ([HELLO, [5]], "messages: "),
        ([{"role": "user", "content": 7}], "messages: "),
        ([*HELLO, {"role": "user", "content": None}], r"messages\[2\].content: it is missing: give text"),
        ([{"role": "system", "content": None}], r"messages\[0\].content: it is missing: give text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "messages: .* is not text"),
    ],
)
def test_what_is_no_conversation_is_named(messages: Any, message: str) -> None:
    with unchecked(), pytest.raises(InvalidRequest, match=message):
        llm().chat(messages, SHORT, chat_template=TEMPLATE)
