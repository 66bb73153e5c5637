"""Training data: what lines may hold, what is left out, and what is held out."""

import json
import logging
import re
from pathlib import Path

import pytest

from forerun.errors import InvalidRequest, TokenizerError, UnusableData
from forerun.models.bundled import BUNDLED
from forerun.text.tokenizer import Tokenizer
from forerun.train.data import PromptReader
from forerun.train.settings import TrainSettings
from kit.checkpoints import TARGET
from train.material import read_prompts

SETTINGS = TrainSettings(steps=1, prompt_tokens=8, max_tokens=24, held_out=3)
TOKENIZER = Tokenizer.load(TARGET)


def lines(path: Path, *entries: object) -> Path:
    path.write_text("".join(e if isinstance(e, str) else json.dumps(e) + "\n" for e in entries), "utf-8")
    return path


def test_prompts_and_texts_become_tokens(tmp_path: Path) -> None:
    story = "Once upon a time there was a dog. " * 20
    path = lines(tmp_path / "a.jsonl", {"prompt": "Lily had a ball"}, {"prompt": "Tom ran", "more": 1}, {"text": story})
    data = read_prompts([path], SETTINGS)
    found = {*data.train, *data.held_out}
    assert {tuple(TOKENIZER.encode(p)) for p in ("Lily had a ball", "Tom ran")} <= found
    ids = TOKENIZER.encode(story, add_special_tokens=False)
    cut = {tuple(ids[i : i + 8]) for i in range(0, len(ids), 32)}  # this tokenizer puts nothing in front
    assert found == cut | {tuple(TOKENIZER.encode(p)) for p in ("Lily had a ball", "Tom ran")}
    whole = tmp_path / "story.md"
    whole.write_text(story, "utf-8")
    alone = read_prompts([whole], SETTINGS)
    assert {*alone.train, *alone.held_out} == cut


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.md"])
def test_a_byte_order_mark_changes_no_prompt(tmp_path: Path, name: str) -> None:
    content = '{"prompt": "Lily had a ball"}\n{"prompt": "Tom ran to the park"}\n'
    found = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / name).write_text(content, encoding)
        found.append(read_prompts([tmp_path / name], SETTINGS))
    assert found[0] == found[1]


def test_a_part_of_a_text_begins_as_every_prompt_does() -> None:
    tokenizer = Tokenizer.load(BUNDLED["stdlib"])
    (first, second) = PromptReader(tokenizer, 99, SETTINGS).of_text("import os\n" * 30)[:2]
    assert first[0] == second[0] == tokenizer.bos_token_id
    assert len(first) == 9


def test_conversations_go_through_the_template_without_the_models_last_answer(tmp_path: Path) -> None:
    reader = PromptReader(Tokenizer.load(BUNDLED["stdlib"]), 99, SETTINGS, chat=True)
    asked = {"role": "user", "content": "Sort a list"}
    answered = [asked, {"role": "assistant", "content": "x.sort()"}]
    found = [reader.of_entry(json.dumps({"messages": talk})) for talk in ([asked], answered)]
    assert found[0] == found[1] == [reader.of_prompt("Sort a list")]
    assert reader.tokenizer.decode(found[0][0]) == "<s># Sort a list\n"
    path = lines(tmp_path / "a.jsonl", {"prompt": "Once"}, {"messages": [asked]})
    with pytest.raises(TokenizerError, match=rf"{path}:2 has messages, but "):
        read_prompts([path], SETTINGS)


def test_the_same_prompt_is_never_on_both_sides_and_the_split_is_that_of_the_prompts_alone(tmp_path: Path) -> None:
    prompts = [f"Story number {i}" for i in range(20)]
    first = read_prompts([lines(tmp_path / "a.txt", *(p + "\n" for p in prompts * 2))], SETTINGS)
    second = read_prompts([lines(tmp_path / "b.txt", *(p + "\n" for p in reversed(prompts)))], SETTINGS)
    assert (len(first.train), len(first.held_out)) == (17, 3)
    assert not {*first.train} & {*first.held_out}
    assert first.held_out == second.held_out
    assert first.digest != second.digest  # the order of prompts decides what steps learn from


BAD = {
    '{"prompt": 3}\n': r'"prompt" is 3: it must be a text that is not empty',
    '{"prompt": ""}\n': r'"prompt" is \'\': it must be a text that is not empty',
    '{"other": "x"}\n': r"no field prompt, messages, text \(it has other\)",
    "[1]\n": r"\[1\] is not an object",
    "null\n": r"null is not an object",
    "{\n": r"not JSON",
    '{"messages": []}\n': r'"messages" is \[\]',
    '{"prompt": "\\ud800"}\n': r"not valid Unicode",
    json.dumps({"prompt": "long " * 600}) + "\n": r"tokens leave no room for an answer in a context of 512",
}


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_line_is_reported_by_file_and_line_and_left_out(
    bad: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = [{"prompt": f"Story {i}"} for i in range(99)]
    path = lines(tmp_path / "a.jsonl", *good[:40], bad, *good[40:])
    with caplog.at_level(logging.WARNING):
        data = read_prompts([path], SETTINGS)
    assert len(data.train) + len(data.held_out) == 99
    assert [r.getMessage() for r in caplog.records] == [f"skipped: {data.bad[0]}"]
    assert data.bad[0].startswith(f"{path}:41: ")
    assert re.search(BAD[bad], data.bad[0])


def test_more_than_one_bad_line_in_a_hundred_ends_the_training(tmp_path: Path) -> None:
    good = [{"prompt": f"Story {i}"} for i in range(198)]
    assert len(read_prompts([lines(tmp_path / "a.jsonl", *good, "{\n", "{\n")], SETTINGS).bad) == 2
    path = lines(tmp_path / "b.jsonl", *good, "{\n", "{\n", "{\n")
    with pytest.raises(UnusableData, match=rf"3 of 201 lines cannot be used, .*The first is {path}:199: not JSON"):
        read_prompts([path], SETTINGS)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    latin = tmp_path / "latin.md"
    latin.write_bytes("Größe".encode("latin-1"))
    with pytest.raises(UnusableData, match=r"latin\.md: not UTF-8"):
        read_prompts([latin], SETTINGS)
    with pytest.raises(InvalidRequest, match=r"data: .*missing\.txt cannot be read"):
        read_prompts([tmp_path / "missing.txt"], SETTINGS)
    with pytest.raises(InvalidRequest, match="different prompts in all: 1; give at least 2"):
        read_prompts([lines(tmp_path / "c.txt", "Once\n", "Once\n")], SETTINGS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 1, "hours": 1.0}, "hours: it excludes --steps"),
        ({"steps": 0}, "steps: 0"),
        ({"hours": 0.0}, "hours: 0"),
        ({"loss": "lk-lamda"}, "loss: 'lk-lamda' is not known: did you mean lk-lambda"),
        ({"place_weights": "x"}, "place_weights: 'x' is not known: .*choose one of decay, d-pace"),
        ({"place_weights": "d-pace", "decay": 0.5}, "decay: 0.5 has no effect with d-pace"),
        ({"draft_depth": 99}, "draft_depth: 99 must be at most 16"),
        ({"kl_share": 2.0}, "kl_share: 2"),
        ({"temperature": -1.0}, "temperature: "),
    ],
)
def test_invalid_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        TrainSettings(**values)  # type: ignore[arg-type]


def test_the_rate_rises_and_falls_and_kl_comes_first() -> None:
    settings = TrainSettings(steps=100, kl_share=0.1)
    shares = [settings.share_done(step, 0.0) for step in range(100)]
    rates = [settings.rate_at(step, share) for step, share in enumerate(shares)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(rates[9], abs=0.1)
    assert rates[-1] == pytest.approx(0.01)
    assert [settings.loss_at(share) for share in shares].count("kl") == 10
    timed = TrainSettings(hours=2.0)
    assert timed.share_done(12345, 3600.0) == pytest.approx(0.5)
