"""Prompts to tune on: every form of a line, and every mistake in one with its place."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.errors import InvalidRequest, TokenizerError
from forerun.text.tokenizer import Tokenizer
from forerun.tune.material import Template, TunePrompt, by_turns, read_tune_prompts, texts_of
from kit.checkpoints import TARGET

TALK = [{"role": "user", "content": "Tell a tale"}]


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """A file of these lines, objects as JSON."""

    def write(*lines: object, name: str = "mine.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write


def test_a_line_holds_a_prompt_messages_or_turns_and_a_category(written: Callable[..., Path]) -> None:
    path = written({"prompt": "a", "category": "x"}, "", {"messages": TALK}, {"turns": ["b", "c"], "category": "y"})
    found = read_tune_prompts(path, None)
    assert [(p.words, p.messages, p.category) for p in found] == [("a", None, "x"), (None, TALK, ""), ("b", None, "y")]
    assert [p.place for p in found] == [f"{path}:{number}" for number in (1, 3, 4)]
    assert [p.words for p in read_tune_prompts(written("one", "", "two", name="mine.txt"), None)] == ["one", "two"]


def test_recorded_answers_go_with_any_form(written: Callable[..., Path]) -> None:
    path = written(
        {"prompt": [5, 6], "answer": [7]}, {"messages": TALK, "answer": "b"}, {"turns": ["a"], "answer": "b"}
    )
    found = read_tune_prompts(None, path)
    assert [(p.words, p.answer) for p in found] == [([5, 6], [7]), (None, "b"), ("a", "b")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "mine.jsonl:2: not JSON"),
        ("[1]", "mine.jsonl:2: [1] is no object"),
        ({"question": "x"}, "mine.jsonl:2: no field prompt, text, turns (it has question)"),
        ({"prompt": ""}, 'mine.jsonl:2: "prompt" is ""'),
        ({"messages": []}, "mine.jsonl:2: messages: [] is no conversation"),
        ({"messages": [{"content": "x"}]}, "is not a message"),
        ({"messages": [*TALK, {"role": "assistant", "content": "x"}]}, "the last message is the model's own"),
        ({"prompt": "x", "category": 3}, '"category" is 3'),
    ],
)
def test_a_bad_line_is_named_by_its_number(written: Callable[..., Path], line: object, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_tune_prompts(written({"prompt": "fine"}, line), None)
    assert said in str(raised.value)


def test_files_that_cannot_be_used_are_refused(written: Callable[..., Path], tmp_path: Path) -> None:
    for prompts, replay, said in (
        (written("", name="empty.txt"), None, "there is no prompt in it"),
        (tmp_path / "none.jsonl", None, "cannot be read"),
        (tmp_path / "prompts.csv", None, "'.csv': give a .jsonl or a .txt"),
        (None, tmp_path / "none.jsonl", "cannot be read"),
        (None, tmp_path / "a.txt", "give a .jsonl"),
        (None, written({"prompt": "x"}), '"answer" is missing'),
        (written({"prompt": "x"}), written({"prompt": "x"}), "give one of them"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            read_tune_prompts(prompts, replay)


def test_what_ships_is_used_where_no_file_is_named() -> None:
    assert [p.category for p in read_tune_prompts(None, None)[:4]] == ["code", "prose", "code", "prose"]


def test_categories_take_turns_so_that_the_first_prompts_have_some_of_each() -> None:
    prompts = [
        TunePrompt(f"{kind} {i}", "", category=kind) for kind, times in (("a", 6), ("b", 2)) for i in range(times)
    ]
    assert [p.words for p in by_turns(prompts)] == ["a 0", "b 0", "a 1", "b 1", "a 2", "a 3", "a 4", "a 5"]
    texts = texts_of(by_turns(prompts), 3, Tokenizer.load(TARGET), Template())
    assert texts.categories == ("a", "b", "a")
    assert len(texts.workload.items) == 3
    assert texts.template is None


def test_messages_go_through_the_template_which_is_told_by_its_hash(tmp_path: Path) -> None:
    prompts = [TunePrompt(None, "mine.jsonl:1", TALK), TunePrompt("Hi", "mine.jsonl:2")]
    with pytest.raises(TokenizerError, match=r"mine\.jsonl:1 holds messages, and no chat template"):
        texts_of(prompts, 2, Tokenizer.load(TARGET), Template())
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        if (TARGET / name).exists():
            (tmp_path / name).write_bytes((TARGET / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if enable_thinking %} think{% endif %}"
    )
    tokenizer = Tokenizer.load(tmp_path)
    said = {}
    for thinking in (None, True, False):
        template = Template({} if thinking is None else {"enable_thinking": thinking}, always=thinking is True)
        assert template.thinking is thinking
        texts = texts_of(prompts, 2, tokenizer, template)
        assert texts.template == tokenizer.template_digest()
        said[thinking] = [tokenizer.decode(list(item.prompt)).strip() for item in texts.workload.items]
    assert said[True] == ["<user>Tell a tale think", "<user>Hi think"]
    assert said[False] == said[None] == ["<user>Tell a tale", "Hi"]
