"""Prompts from files: every format people have, and mistakes named by file and line."""

from pathlib import Path

import pytest

from forerun.bench.material import read_passages
from forerun.errors import InvalidRequest


def test_every_field_that_holds_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"id": 7, "text": "two"}\n{"turns": ["three", "and then"]}\n')
    found = read_passages(file)
    assert [p.prompt for p in found] == ["one", "two", "three"]
    assert [p.place for p in found] == [f"{file}:{line}" for line in (1, 3, 4)]


def test_a_text_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("  indented\r\n\nschön\u2028still the same line\n".encode())
    assert [p.prompt for p in read_passages(file)] == ["  indented", "schön\u2028still the same line"]


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", "one\r\ntwo\r\n"), ("a.jsonl", '{"prompt": "one"}\n{"prompt": "two"}\n')]
)
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8-sig", newline="")
    assert [p.prompt for p in read_passages(tmp_path / name)] == ["one", "two"]


def test_no_more_are_read_than_are_wanted(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "one"}\nnot JSON\n')
    assert [p.prompt for p in read_passages(file, most=1)] == ["one"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", r"\[1\] is not an object"),
        ("null", "null is not an object"),
        ('{"question": "?"}', r"no prompt among its fields \(question\)"),
        ('{"prompt": 3}', '"prompt" is 3'),
        ('{"prompt": ""}', '"prompt" is ""'),
        ('{"turns": []}', '"turns" is \\[\\]'),
        ("[" * 100_000, "not JSON"),
        ('{"turns": [1]}', '"turns" is \\[1\\]'),
        (r'{"prompt": "a\ud800"}', r'"prompt" is not Unicode \(.* at character 1\)'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(InvalidRequest, match=f"a.jsonl:2: .*{complaint}"):
        read_passages(file)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"fine\n\xe4\n")
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "a.csv").write_text("x")
    for name, complaint in [
        ("latin.txt", "latin.txt:2: not UTF-8"),
        ("empty.txt", "it contains no prompts"),
        ("a.csv", r"does not end in \.jsonl or \.txt: give such a file"),
        ("none.txt", "No such file"),
    ]:
        with pytest.raises(InvalidRequest, match=complaint):
            read_passages(tmp_path / name)
