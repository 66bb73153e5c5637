"""The bundled texts are as documented; every form of a line is read, and mistakes are reported with file and line."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.bench.material import (
    Passage,
    Template,
    check_lengths,
    mixed_passages,
    passages_of,
    read_passages,
    shipped,
    workload_of,
)
from forerun.bench.plan import GENERATED, REPLAYED, SHIPPED, Selection
from forerun.errors import InvalidRequest, TokenizerError
from forerun.models.bundled import BUNDLED
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET

CONTEXT = 1024
TALK = [{"role": "user", "content": "Tell a tale"}]
GOOD = {"prompt": "a", "answer": "b"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED["stdlib"])


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """A file of these lines, objects as JSON."""

    def write(*lines: object, name: str = "mine.jsonl") -> Path:
        path = tmp_path / name
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        path.write_bytes("".join(f"{text}\n" for text in texts).encode("utf-8", "surrogateescape"))
        return path

    return write


@pytest.mark.parametrize("name", GENERATED)
def test_generated_workloads_are_held_out_text_of_the_library(name: str, tokenizer: Tokenizer) -> None:
    passages = shipped(name)
    assert len({passage.prompt for passage in passages}) == len(passages) >= 8
    for passage in passages:
        assert isinstance(passage.prompt, str)
        assert int.from_bytes(hashlib.sha256(passage.place.encode()).digest()[:8], "big") % 50 == 0
        assert 100 <= len(tokenizer.encode(passage.prompt)) <= 220
        assert not passage.prompt[-1].isspace()
        source = Path(json.__file__).parent.parent / passage.place
        if sys.version_info[:2] == (3, 11) and source.exists():
            text = source.read_text(encoding="utf-8")
            assert passage.prompt.removeprefix('"""') in text
            assert name == "prose" or text.startswith(passage.prompt)


@pytest.mark.parametrize("name", REPLAYED)
def test_edits_fit_the_context_twice_are_small_and_large_and_change_something(name: str, tokenizer: Tokenizer) -> None:
    workload = workload_of(name, shipped(name), 100, tokenizer)
    assert workload.replayed
    assert len(workload.items) == 12
    assert workload.longest(0) <= CONTEXT
    lengths = [len(item.answer or ()) for item in workload.items]
    assert max(len(item.prompt) for item in workload.items) <= 460
    assert min(lengths) < 150
    assert 400 < max(lengths) <= 450
    for passage in shipped(name):
        assert isinstance(passage.prompt, str)
        old, _, rest = passage.prompt.partition("\n# The same lines after the change:")
        assert rest == ""
        assert isinstance(passage.answer, str)
        assert passage.answer.strip() != old.strip()


def test_the_default_workloads_are_the_bundled_ones(tokenizer: Tokenizer) -> None:
    selection = Selection()
    for name in SHIPPED:
        workload = workload_of(name, shipped(name), selection.num_prompts, tokenizer)
        check_lengths(workload, selection.num_tokens, CONTEXT)
        assert len(workload.items) == selection.num_prompts
        assert workload.digest() != workload_of(name, shipped(name)[1:], selection.num_prompts, tokenizer).digest()
    with pytest.raises(InvalidRequest, match=r"novels.*code, prose, edits"):
        shipped("novels")
    assert list(passages_of(None, None, None)) == ["code", "edits"]
    assert [p.category for p in mixed_passages()[:4]] == ["code", "prose", "code", "prose"]


def test_an_answer_is_encoded_behind_its_prompt(tokenizer: Tokenizer, written: Callable[..., Path]) -> None:
    file = written({"prompt": "def f", "answer": "(x):"}, {"prompt": [0, 5, 6], "answer": [7, 8]}, "")
    first, second = workload_of("own", read_passages(file, recorded=True), 9, tokenizer).items
    assert first.prompt == tuple(tokenizer.encode("def f"))
    assert tokenizer.decode([*first.prompt, *(first.answer or ())], skip_special_tokens=True) == "def f(x):"
    assert (second.prompt, second.answer, second.place) == ((0, 5, 6), (7, 8), f"{file}:2")


def test_a_line_holds_a_prompt_messages_or_turns_and_a_category(written: Callable[..., Path]) -> None:
    lines = [{"prompt": "a", "category": "x"}, {"messages": TALK}, {"turns": ["b", "c"], "category": "y"}]
    expected = [("a", "x"), (TALK, ""), ("b", "y")]
    for recorded in (False, True):
        more = {"answer": "z"} if recorded else {}
        path = written(lines[0] | more, "", *(line | more for line in lines[1:]))
        found = read_passages(path, recorded)
        assert [(p.prompt, p.category) for p in found] == expected
        assert [p.conversation for p in found] == [None, TALK, None]
        assert {p.answer for p in found} == {more.get("answer")}
        assert [p.place for p in found] == [f"{path}:{number}" for number in (1, 3, 4)]
    assert [p.prompt for p in read_passages(written("one", "", "two", name="mine.txt"))] == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": "x"}, "there is no prompt among its fields (question): add"),
        ({"messages": []}, "messages: [] is not a conversation"),
        ({"messages": [{"content": "x"}]}, "is not a message"),
        ({"messages": [*TALK, {"role": "assistant", "content": "x"}]}, "the last message is the assistant's"),
        ({"prompt": "x", "category": 3}, '"category" is 3'),
        ({"prompt": "a", "answer": None}, '"answer" is null'),
        ({"prompt": "a", "answer": []}, '"answer" is []'),
        ({"prompt": "a", "answer": [1, True]}, '"answer" is [1, true]'),
        ({"prompt": 7, "answer": "b"}, '"prompt" is 7'),
        ('{"prompt": "\udcff", "answer": "b"}', "not UTF-8"),
        ({"prompt": "a", "answer": [999999]}, "999999 is not a token id"),
        ({"prompt": [-1], "answer": "b"}, "-1 is not a token id"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(
    line: object, message: str, written: Callable[..., Path], tokenizer: Tokenizer
) -> None:
    recorded = "answer" in line
    file = written(GOOD, "", line)
    with pytest.raises(InvalidRequest) as caught:
        workload_of("own", read_passages(file, recorded), 9, tokenizer)
    assert message in str(caught.value)
    assert f"{file}:3" in str(caught.value)
    assert caught.value.field == ("replay" if recorded else "prompts")


def test_invalid_files_are_refused(written: Callable[..., Path], tmp_path: Path) -> None:
    for prompts, replay, message in (
        (None, tmp_path / "none.jsonl", "replay: .*cannot be read"),
        (None, tmp_path / "a.txt", r"does not end in \.jsonl: give such a file"),
        (None, written({"prompt": "x"}), '"answer" is missing'),
        (written(GOOD, name="a.jsonl"), written(GOOD, name="a.jsonl"), "cannot be combined with"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            mixed_passages(prompts, replay)


def test_a_text_beyond_the_context_is_named(tokenizer: Tokenizer, written: Callable[..., Path]) -> None:
    file = written("def f", "def f(a, b, c):", name="own.txt")
    workload = workload_of("own", read_passages(file), 9, tokenizer)
    longest = workload.longest(10)
    check_lengths(workload, 10, longest)
    with pytest.raises(InvalidRequest, match=f"{file}:2: it needs {longest} tokens, and the context has {longest - 1}"):
        check_lengths(workload, 10, longest - 1)
    ours = workload_of("code", shipped("code"), 9, Tokenizer.load(TARGET))
    with pytest.raises(InvalidRequest, match="use shorter --prompts, or fewer --max-tokens"):
        check_lengths(ours, 128, 512)  # a bundled text cannot be shortened by the user


def test_categories_take_turns_so_that_the_first_prompts_have_some_of_each(written: Callable[..., Path]) -> None:
    lines = [{"prompt": f"{kind} {i}", "category": kind} for kind, times in (("a", 6), ("b", 2)) for i in range(times)]
    passages = mixed_passages(written(*lines))
    assert [p.prompt for p in passages] == ["a 0", "b 0", "a 1", "b 1", "a 2", "a 3", "a 4", "a 5"]
    workload = workload_of("own", passages, 3, Tokenizer.load(TARGET))
    assert [item.category for item in workload.items] == ["a", "b", "a"]
    assert workload.template is None


def test_messages_go_through_the_template_which_is_reported_by_its_hash(tmp_path: Path) -> None:
    passages = [Passage(TALK, "mine.jsonl:1"), Passage("Hi", "mine.jsonl:2")]
    with pytest.raises(TokenizerError, match=r"mine\.jsonl:1 has messages, but no chat template"):
        workload_of("own", passages, 2, Tokenizer.load(TARGET))
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        if (TARGET / name).exists():
            (tmp_path / name).write_bytes((TARGET / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if enable_thinking %} think{% endif %}"
    )
    tokenizer = Tokenizer.load(tmp_path)
    prompts = {}
    for thinking in (None, True, False):
        template = Template({} if thinking is None else {"enable_thinking": thinking}, always=thinking is True)
        assert template.thinking is thinking
        workload = workload_of("own", passages, 2, tokenizer, template)
        assert workload.template == tokenizer.template().digest()
        prompts[thinking] = [tokenizer.decode(list(item.prompt)).strip() for item in workload.items]
    assert prompts[True] == ["<user>Tell a tale think", "<user>Hi think"]
    assert prompts[False] == prompts[None] == ["<user>Tell a tale", "Hi"]
