"""Chat templates: options reach them as in transformers, and what fails blames whom it should."""

import json
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from forerun.errors import InvalidRequest, TokenizerError
from forerun.models.bundled import BUNDLED
from forerun.text.chat import LONGEST_VALUES, MARK, ChatTemplate
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET

TALK = [
    {"role": "user", "content": " <hi> & é "},
    {"role": "assistant", "content": "yes "},
    {"role": "user", "content": "and?"},
]
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<me>{% endif %}"


def rendered(source: object, messages: object = TALK, **options: Any) -> str:
    return ChatTemplate(source, "a test").render(messages, **options)


QWEN = """{%- set ns = namespace(seeking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.seeking and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.seeking = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {%- if loop.index0 > 0 and messages[loop.index0 - 1].role == message.role %}{{ raise_exception('no') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("number", "words"), [(1000, 200), (3, 300_000), pytest.param(80_000, 1, marks=pytest.mark.full)]
)
def test_a_long_conversation_is_rendered(number: int, words: int) -> None:
    """By a template as those of Qwen, which looks at every message twice."""
    roles = ("user", "assistant")
    talk = [{"role": roles[i % 2], "content": "so </think>" + "word " * words} for i in range(number)]
    assert rendered(QWEN, talk).count("word") == number * words


def test_a_template_that_refuses_blames_the_conversation() -> None:
    with pytest.raises(InvalidRequest, match="the chat template refuses them: no"):
        rendered(QWEN, [TALK[0], TALK[0]])


BY_ROLE = "{% for m in messages %}{% if m.role in known %}<{{ m.role }}>{{ m.content | trim }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("role", ["developer", "usr", "User", ""])
@pytest.mark.parametrize("content", ["Be brief.", "", [{"type": "text", "text": "Be brief."}]])
def test_messages_that_the_template_would_ignore_are_refused(role: str, content: object) -> None:
    """Their role may be misspelled. A template may know other roles than the usual ones."""
    talk = [TALK[0], {"role": role, "content": content}]
    for more in ({"add_generation_prompt": True}, {"continue_final_message": isinstance(content, str)}):
        with pytest.raises(InvalidRequest, match=rf"messages\[1\]: .* ignores messages of the role '{role}': use"):
            rendered(BY_ROLE, talk, known=["user"], **more)
    assert rendered(BY_ROLE, talk, known=["user", role]).startswith(f"<user><hi> & é<{role}>")


def test_a_template_that_fails_for_another_content_does_not_ignore_it() -> None:
    source = "{% for m in messages %}{{ raise_exception('no') if '|' in m.content }}{{ m.role }}{% endfor %}"
    assert rendered(source, [{"role": "function", "content": "{}"}]) == "function"


def test_templates_may_ask_for_the_date() -> None:
    assert int(rendered("{{ strftime_now('%Y') }}")) >= 2024


def test_one_text_as_long_as_any_context_is_rendered() -> None:
    text = "a" * (LONGEST_VALUES // 4)
    assert (
        rendered(
            "{% for m in messages %}{{ '<u>' + m.content | trim }}{% endfor %}", [{"role": "user", "content": text}]
        )
        == "<u>" + text
    )


def folder(where: Path, declared: object = None, file: bytes | None = None) -> Path:
    """A tokenizer's folder with chat templates of any kind."""
    where.mkdir(exist_ok=True)
    backend = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(where / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (where / "tokenizer_config.json").write_text(
        json.dumps(config | ({} if declared is None else {"chat_template": declared}))
    )
    if file is not None:
        (where / "chat_template.jinja").write_bytes(file)
    return where


BROKEN: dict[str, Callable[[Path], Path]] = {
    "number": lambda path: folder(path, 5),
    "object": lambda path: folder(path, {"default": PLAIN}),
    "list of texts": lambda path: folder(path, [PLAIN]),
    "no name": lambda path: folder(path, [{"template": PLAIN}]),
    "number by name": lambda path: folder(path, [{"name": "default", "template": 5}]),
    "list as name": lambda path: folder(path, [{"name": ["default"], "template": PLAIN}]),
    "bytes": lambda path: folder(path, PLAIN, b"\xff\xfe"),
    "folder": lambda path: ((folder(path, PLAIN) / "chat_template.jinja").mkdir(), path)[1],
    "syntax": lambda path: folder(path, "{% if %}"),
    "syntax in the file": lambda path: folder(path, PLAIN, b"{% if %}"),
    "nothing": lambda path: folder(path),
}


IN_FILE = ("bytes", "folder", "syntax in the file", "nothing")  # of these the message names chat_template.jinja


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_template_fails_chats_alone(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer.load(BROKEN[kind](tmp_path / "model"))
    assert tokenizer.encode("Once") == [1, 403]
    for work in (tokenizer.template().require, lambda: tokenizer.apply_chat_template(TALK)):
        with pytest.raises(TokenizerError, match=r"chat_template") as caught:
            work()
        assert str(tmp_path / "model") in str(caught.value)
        assert ("chat_template.jinja" in str(caught.value)) == (kind in IN_FILE)


OPTIONS = """{% if enable_thinking is defined and enable_thinking is false %}<no>{% endif %}{% for t in tools or [] %}
{{ t | tojson(indent=4) }}{{ t.function.name | upper }}{% endfor %}
{{ documents }}{{ reasoning_effort }}{{ bos_token }}"""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"é": {}}}}}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_thinking": False},
        {"enable_thinking": True, "reasoning_effort": "low"},
        {"tools": [TOOL, TOOL]},
        {"documents": [{"title": "a", "text": "b"}]},
        {"bos_token": "<other>"},
        {"chat_template": "{{ messages | length }}"},
    ],
    ids=str,
)
def test_options_reach_the_template_as_in_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    path = folder(tmp_path, OPTIONS)
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    expected = theirs.apply_chat_template(TALK, tokenize=False, **options)
    assert ours.apply_chat_template(TALK, tokenize=False, **options) == expected
    assert ours.apply_chat_template(TALK, **options) == theirs(expected, add_special_tokens=False).input_ids


NAMED: dict[str, dict[str, str]] = {
    "both": {"default": "plain", "tool_use": "tools {{ tools | length }}", "rag": "none"},
    "default alone": {"default": "plain"},
    "tools alone": {"tool_use": "tools {{ tools | length }}"},
}


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("in_files", [True, False])
def test_templates_by_name_are_read_as_transformers_writes_them(tmp_path: Path, kind: str, in_files: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder(tmp_path / "first"))
    tokenizer.chat_template = NAMED[kind]
    tokenizer.save_pretrained(tmp_path / "saved", save_jinja_files=in_files)
    ours, theirs = Tokenizer.load(tmp_path / "saved"), AutoTokenizer.from_pretrained(tmp_path / "saved")
    either: tuple[list[Any] | None, ...] = (None, [TOOL])
    for tools in either:
        if kind == "tools alone" and tools is None:
            with pytest.raises(TokenizerError, match=r"no chat template .* which has .*tool_use"):
                ours.apply_chat_template(TALK, tools, tokenize=False)
            continue
        found = ours.apply_chat_template(TALK, tools, tokenize=False)
        assert found == theirs.apply_chat_template(TALK, tools=tools, tokenize=False)


def test_a_damaged_template_by_name_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "model", PLAIN)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"additional_chat_templates.tool_use\.jinja cannot be read"):
        Tokenizer.load(path).apply_chat_template(TALK, [TOOL])


TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"


@pytest.mark.parametrize("template", [PLAIN, TRIMMING, OPTIONS + TRIMMING])
@pytest.mark.parametrize("end", ["I think", "I think ", " s", "<", "user", ""])
def test_the_last_message_may_be_left_open(tmp_path: Path, template: str, end: str) -> None:
    path = folder(tmp_path, template)
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    talk = [*TALK, {"role": "assistant", "content": end}]
    found = ours.apply_chat_template(talk, tokenize=False, continue_final_message=True)
    assert MARK not in found
    assert found == theirs.apply_chat_template(talk, tokenize=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        ([], {}),
        ([{"role": "assistant", "content": None}], {}),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}]}], {}),
        (TALK, {"add_generation_prompt": True}),
    ],
)
def test_what_cannot_be_left_open_is_refused(messages: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message: "):
        rendered(PLAIN, messages, continue_final_message=True, **options)
    with pytest.raises(InvalidRequest, match="continue_final_message: the template changes the last message"):
        rendered("nothing", continue_final_message=True)


LOOP: list[Any] = []
LOOP.append({"role": "user", "content": LOOP})
DEEP: Any = "x"
for _ in range(500):
    DEEP = [DEEP]
WIDE: Any = "x"
for _ in range(40):
    WIDE = [WIDE, WIDE]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        5,
        "hello",
        b"hello",
        {"role": "user", "content": "x"},
        ["hello"],
        [None],
        [["role", "user"]],
        [{}],
        [{"content": "x"}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": b"x"}],
        [{"role": "user", "content": float("nan")}],
        [{"role": "user", "content": {"text": "x"}}],
        [{"role": "user", "content": [float("inf")]}],
        [{"role": "user", "content": [10**5000]}],
        [{"role": "user", "content": "x", 5: 6}],
        [{"role": "user", "content": "x", "extra": object()}],
        [{"role": "user", "content": "x", "extra": {1, 2}}],
        [{"role": "user", "content": DEEP}],
        [{"role": "user", "content": WIDE}],
        [{"role": "user", "content": "x" * (LONGEST_VALUES + 1)}],
        LOOP,
    ],
)
def test_messages_that_are_none_are_the_requests_mistake(messages: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: ") as caught:
        rendered(PLAIN, messages)
    assert caught.value.field == "messages"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("field", ["tools", "documents", "anything"])
@pytest.mark.parametrize("value", [float("nan"), object(), LOOP, print], ids=["nan", "object", "loop", "function"])
def test_an_option_that_is_no_json_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        rendered(PLAIN, **{field: [value]})


def test_messages_of_other_types_are_read_as_what_they_hold() -> None:
    talk = tuple(UserDict(message) for message in TALK)
    assert rendered(PLAIN, talk, add_generation_prompt=True) == rendered(PLAIN, TALK, add_generation_prompt=True)


def test_a_template_cannot_change_the_messages() -> None:
    talk = [dict(message) for message in TALK]
    with pytest.raises(TokenizerError, match="fails"):
        rendered("{% for m in messages %}{{ m.update(role='x') }}{% endfor %}", talk)
    assert talk == TALK


def test_the_bundled_template_is_rendered_as_in_transformers() -> None:
    path = BUNDLED["stdlib"]
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    for ask in (False, True):
        expected = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=ask)
        assert ours.apply_chat_template(TALK, tokenize=False, add_generation_prompt=ask) == expected


def test_what_scripts_do_with_a_tokenizer_works_as_in_transformers() -> None:
    path = TARGET
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    texts = ["Once upon a time", "there was"]
    assert ours("Once upon").input_ids == ours("Once upon")["input_ids"] == theirs("Once upon").input_ids
    assert ours(texts).input_ids == theirs(texts).input_ids
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.convert_tokens_to_ids("</s>") == theirs.convert_tokens_to_ids("</s>") == 2
    for name in ("bos_token", "eos_token", "pad_token", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)
    ids = [1, *theirs(texts[0]).input_ids, 2]
    assert ours.batch_decode([ids, [403]]) == theirs.batch_decode([ids, [403]])
    assert ours.decode(403) == theirs.decode(403)
    for wrong in ([-1], [2**40], -1):
        with pytest.raises(InvalidRequest, match=r"^ids: .* are not token ids"):
            ours.decode(wrong)
