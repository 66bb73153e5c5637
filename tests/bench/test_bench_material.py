"""The texts that ship are what they are said to be, and lines that cannot be run are refused by their place."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

from forerun.bench.material import Workload, check_lengths, prompt_file, replay_file, shipped, workload_of
from forerun.bench.plan import GENERATED, REPLAYED, SHIPPED, Selection
from forerun.errors import InvalidRequest
from forerun.models.bundled import BUNDLED
from forerun.text.tokenizer import Tokenizer

CONTEXT = 1024


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED["stdlib"])


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
def test_edits_fit_twice_over_are_small_and_large_and_change_something(name: str, tokenizer: Tokenizer) -> None:
    workload = workload_of(name, shipped(name), 100, tokenizer)
    assert workload.replayed
    assert len(workload.items) == 12
    assert workload.longest(0) <= CONTEXT
    lengths = [len(item.answer or ()) for item in workload.items]
    assert max(len(item.prompt) for item in workload.items) <= 460
    assert min(lengths) < 150
    assert 400 < max(lengths) <= 450
    separator = "\n# The same lines after the change:"
    for passage in shipped(name):
        assert isinstance(passage.prompt, str)
        old, _, rest = passage.prompt.partition(separator)
        assert rest == ""
        assert isinstance(passage.answer, str)
        assert passage.answer.strip() != old.strip()


def test_the_default_is_made_of_what_ships(tokenizer: Tokenizer) -> None:
    selection = Selection()
    for name in SHIPPED:
        workload = workload_of(name, shipped(name), selection.num_prompts, tokenizer)
        check_lengths(workload, selection.num_tokens, CONTEXT)
        assert len(workload.items) == selection.num_prompts
        assert workload.digest() != workload_of(name, shipped(name)[1:], selection.num_prompts, tokenizer).digest()
    with pytest.raises(InvalidRequest, match=r"novels.*code, prose, edits"):
        shipped("novels")


def test_an_answer_is_spelled_behind_its_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    lines = [{"prompt": "def f", "answer": "(x):"}, {"prompt": [0, 5, 6], "answer": [7, 8]}]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    first, second = workload_of("own", replay_file(file), 9, tokenizer).items
    assert first.prompt == tuple(tokenizer.encode("def f"))
    assert tokenizer.decode([*first.prompt, *(first.answer or ())], skip_special_tokens=True) == "def f(x):"
    assert (second.prompt, second.answer, second.place) == ((0, 5, 6), (7, 8), f"{file}:2")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[1]", r"\[1\] is not an object"),
        ("null", "null is not an object"),
        ('{"prompt": "a"}', '"answer" is missing'),
        ('{"prompt": "", "answer": "b"}', '"prompt" is ""'),
        ('{"prompt": "a", "answer": []}', r'"answer" is \[\]'),
        ('{"prompt": "a", "answer": [1, true]}', r'"answer" is \[1, true\]'),
        ('{"prompt": 7, "answer": "b"}', '"prompt" is 7'),
        ('{"prompt": "\udcff", "answer": "b"}', "not JSON in UTF-8"),
        ('{"prompt": "a", "answer": [999999]}', "999999 is not a token id"),
        ('{"prompt": [-1], "answer": "b"}', "-1 is not a token id"),
    ],
)
def test_a_line_that_cannot_be_replayed_is_named(line: str, said: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "own.jsonl"
    file.write_bytes(b'{"prompt": "a", "answer": "b"}\n\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(InvalidRequest, match=said) as caught:
        workload_of("own", replay_file(file), 9, tokenizer)
    assert f"{file}:3" in str(caught.value)
    assert caught.value.field == "replay"


def test_files_without_a_line_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for path in (tmp_path / "none.jsonl", tmp_path / "empty.jsonl"):
        with pytest.raises(InvalidRequest, match=str(path)):
            replay_file(path)


def test_a_text_beyond_the_context_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = tmp_path / "own.txt"
    file.write_text("def f\ndef f(a, b, c):\n")
    workload: Workload = workload_of("own", prompt_file(file), 9, tokenizer)
    longest = workload.longest(10)
    check_lengths(workload, 10, longest)
    with pytest.raises(InvalidRequest, match=f"{file}:2: it needs {longest} tokens of a context of {longest - 1}"):
        check_lengths(workload, 10, longest - 1)
