"""A file of prompts: answered as one by one, resumable after anything, and nothing of the user's is lost."""

import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from forerun.commands import batch
from forerun.commands.answer_file import AnswerFile
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.sampling.params import SamplingParams
from forerun.text.chat import ChatTemplate
from kit.checkpoints import DATA, TARGET
from kit.command import command, refusal
from kit.unchecked import unchecked

STORIES = ["Once upon a time", "Lily had a red ball", "Tom and his dog", "The sun was", "One day", "Sam saw"]
GIVEN = ["--max-tokens", "7", "--seed", "5", "--max-num-seqs", "2"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    data = DATA
    with unchecked():
        return LLM(str(data / "stories260k"), f"model:{data / 'stories280k'}", max_num_seqs=2, max_model_len=64)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": story, "id": f"q{i}"}) + "\n" for i, story in enumerate(STORIES)))
    return file


@pytest.fixture
def run(llm: LLM, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command on a loaded model; answers go to answers.jsonl in the folder of the prompts."""
    monkeypatch.setattr(batch, "build_llm", lambda *_: llm)

    def invoke(*more: str, output: str | None = "answers.jsonl", given: list[str] = GIVEN) -> Result:
        goal = [] if output is None else ["--output", str(prompts.with_name(output))]
        return command("generate", "-m", "m", "-i", str(prompts), *goal, *given, *more)

    return invoke


def answers(prompts: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in prompts.with_name("answers.jsonl").read_text().splitlines()]


def test_answers_are_those_of_single_requests_in_the_order_of_the_input(
    run: Callable[..., Result], prompts: Path, llm: LLM
) -> None:
    result = run()
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "6 of 6 lines answered." in result.stderr
    answered = answers(prompts)
    assert [answer["line"] for answer in answered] == [1, 2, 3, 4, 5, 6]
    assert [answer["id"] for answer in answered] == [f"q{i}" for i in range(6)]
    for i, answer in enumerate(answered):
        with unchecked():
            (alone,) = llm.generate(STORIES[i], SamplingParams(max_tokens=7, seed=5 + i), speculation=False)
        assert (answer["text"], answer["seed"]) == (alone.outputs[0].text, 5 + i)
        assert tuple(answer["token_ids"]) == alone.outputs[0].token_ids
    assert not llm.engine.has_work


def test_a_file_cut_off_at_any_place_is_completed_to_the_same_file(run: Callable[..., Result], prompts: Path) -> None:
    run()
    file = prompts.with_name("answers.jsonl")
    whole = file.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [0, 1, 8, 9, ends[0] - 1, ends[0], ends[2] + 5, ends[3] + 40, ends[4], len(whole) - 1, len(whole)]:
        file.write_bytes(whole[:cut])
        result = run(given=GIVEN[:2] + GIVEN[4:] if cut >= ends[0] else GIVEN)  # without a seed it is that of the file
        assert result.exit_code == 0, (cut, result.output)
        assert file.read_bytes() == whole, cut
        num_before = sum(end <= cut for end in ends)
        assert (f"{num_before} of them in earlier runs" in result.stderr) == (num_before > 0)


@pytest.mark.parametrize("stop_at", [1, 3, 6])
def test_control_c_keeps_finished_answers_and_a_second_run_completes_the_same_file(
    stop_at: int, run: Callable[..., Result], prompts: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    file, count = prompts.with_name("answers.jsonl"), 0
    whole = file.read_bytes()
    file.unlink()
    real = llm.engine.step

    def step() -> Any:
        nonlocal count
        count += 1
        if count == stop_at:
            signal.raise_signal(signal.SIGINT)
        return real()

    monkeypatch.setattr(llm.engine, "step", step)
    stopped = run()
    assert stopped.exit_code == 130
    assert "The same command resumes." in stopped.stderr
    assert not llm.engine.has_work
    assert all(line + b"\n" in whole for line in file.read_bytes().splitlines())
    assert run().exit_code == 0
    assert file.read_bytes() == whole


def test_a_full_disk_loses_no_finished_answer(
    run: Callable[..., Result], prompts: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    file, left = prompts.with_name("answers.jsonl"), 1500
    whole, real = file.read_bytes(), os.write
    file.unlink()

    def write(number: int, data: Any) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(number, data[:left])
        left -= done
        return done

    monkeypatch.setattr(os, "write", write)
    full = run()
    assert full.exit_code == 2
    assert full.stderr.startswith(f"error: output: {file} cannot be written (No space left on device)")
    monkeypatch.setattr(os, "write", real)
    kept = file.read_bytes()
    assert kept.endswith(b"\n")
    assert all(line + b"\n" in whole for line in kept.splitlines())
    assert run().exit_code == 0
    assert file.read_bytes() == whole


def test_invalid_lines_are_reported_and_can_be_corrected(run: Callable[..., Result], prompts: Path) -> None:
    lines = [
        '{"prompt": "One"}',
        "no json",
        "",
        '{"promt": "x"}',
        '{"prompt": "' + "a " * 99 + '"}',
        "[" * 100_000,
        "\xff",
    ]
    prompts.write_bytes(
        "\n".join(lines).encode("latin-1") + b'\n{"prompt_token_ids": [1, 5, 6]}\n{"prompt_token_ids": "x"}\n'
    )
    result = run()
    assert result.exit_code == 2
    for number in (2, 4, 6, 7, 9):
        assert f"error: {prompts}:{number}: " in result.stderr
    assert "error: line 5: prompt: " in result.stderr
    assert "2 of 8 lines answered; 6 skipped: fix them and run the same command again" in result.stderr
    assert [answer["line"] for answer in answers(prompts)] == [1, 8]
    lines[1] = '{"prompt": "Two"}'
    prompts.write_text("\n".join(lines[:2]) + "\n\n\n\n\n\n" + '{"prompt_token_ids": [1, 5, 6]}')
    assert run().exit_code == 0
    assert [answer["line"] for answer in answers(prompts)] == [1, 2, 8]


@pytest.mark.parametrize("id_", ["NaN", "-Infinity", "1e999", '[{"a": -1e999}]'])
def test_answers_are_json_whatever_the_ids_are(id_: str, run: Callable[..., Result], prompts: Path) -> None:
    prompts.write_text(f'{{"prompt": "Once", "id": {id_}}}\n{{"prompt": "One", "id": [1e99, null]}}\n')
    assert f"error: {prompts}:1: not JSON (" in run().stderr
    assert [(answer["line"], answer["id"]) for answer in answers(prompts)] == [(2, [1e99, None])]


@pytest.mark.parametrize("line", ['{"prompt": "a", "prompt": "b"}', '{"prompt": "a", "id": {"b": 1, "b": 1}}'])
def test_a_line_that_names_a_field_twice_is_not_answered(line: str, run: Callable[..., Result], prompts: Path) -> None:
    prompts.write_text(f"{line}\n")
    result = run()
    assert result.exit_code == 2
    assert " occurs twice): write one object per line" in result.stderr
    assert not answers(prompts)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (["--temperature", "0.5"], "temperature"),
        (["--max-tokens", "8"], "max_tokens"),
        (["--seed", "6"], "seed"),
        (["--verification", "token"], "verification"),
        (["--tokenizer", str(TARGET)], "tokenizer"),
    ],
)
def test_other_settings_are_refused_by_name_and_the_file_stays(
    given: list[str], name: str, run: Callable[..., Result], prompts: Path
) -> None:
    run()
    file = prompts.with_name("answers.jsonl")
    before = file.read_bytes()
    refused = run(*given)
    assert refused.exit_code == 2
    assert f"other settings ({name}" in refused.stderr
    assert file.read_bytes() == before
    assert run(*given, "--fresh").exit_code == 0
    assert file.read_bytes() != before


def test_a_file_may_be_completed_with_another_drafter(run: Callable[..., Result], prompts: Path) -> None:
    assert run("--draft", "ngram", "--depth", "2").exit_code == 0
    assert run("--depth", "3").exit_code == 0


def test_another_input_is_refused_and_a_longer_one_is_not(run: Callable[..., Result], prompts: Path) -> None:
    run()
    before = prompts.with_name("answers.jsonl").read_bytes()
    text = prompts.read_text()
    prompts.write_text(text + '{"prompt": "More"}\n')
    assert run().exit_code == 0
    assert prompts.with_name("answers.jsonl").read_bytes().startswith(before)
    prompts.write_text(text.replace("Lily", "Anna"))
    refused = run()
    assert refused.exit_code == 2
    assert "an answer to line 2 of the input, whose prompt has changed" in refused.stderr


@pytest.mark.parametrize(
    "content", [b"notes of mine", b"notes\n", b'{"a": 1}\n', b'{"line": 1}\n', b"\0\0\0", b'{"line": 1, "x\nnotes']
)
def test_a_file_of_something_else_is_left_as_it_is(content: bytes, run: Callable[..., Result], prompts: Path) -> None:
    file = prompts.with_name("answers.jsonl")
    file.write_bytes(content)
    for more in ([], ["--fresh"]):
        refused = run(*more)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: output: ")
        assert file.read_bytes() == content


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    first = AnswerFile.open(tmp_path / "a.jsonl")
    with pytest.raises(InvalidRequest, match="written by another process"):
        AnswerFile.open(tmp_path / "a.jsonl")
    first.close(True)
    AnswerFile.open(tmp_path / "a.jsonl").close(True)


def test_without_an_output_answers_are_printed(run: Callable[..., Result]) -> None:
    result = run(output=None)
    assert result.exit_code == 0
    assert sorted(json.loads(line)["line"] for line in result.stdout.splitlines()) == [1, 2, 3, 4, 5, 6]


def test_json_describes_the_batch_and_needs_an_output(run: Callable[..., Result]) -> None:
    report = json.loads(run("--json").stdout)
    assert (report["num_lines"], report["num_answered"], report["num_skipped"]) == (6, 6, 0)
    assert report["stats"]["num_tokens"] > 6
    assert run("--json", output=None).exit_code == 2
    assert "there is a prompt argument as well" in run("Once").stderr


@pytest.mark.parametrize(("name", "reason"), [("none.jsonl", "cannot be read"), ("a.csv", "does not end in .jsonl")])
def test_an_unreadable_input_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    message = refusal("generate", "-m", "m", "-i", str(tmp_path / name))
    assert message.startswith(f"error: input: {tmp_path / name}")
    assert reason in message


def test_a_line_with_sampling_parameters_is_not_answered_without_them(
    run: Callable[..., Result], prompts: Path
) -> None:
    prompts.write_text('{"prompt": "Once", "max_tokens": 3}\n{"prompt": "One", "category": "tales"}\n')
    result = run()
    assert f"{prompts}:1: max_tokens cannot be set in a line" in result.stderr
    assert len(answers(prompts)) == 1


TEMPLATE = "{% for m in messages %}{{ m.content }}: {% endfor %}"


def test_messages_and_with_chat_prompts_go_through_the_chat_template(
    run: Callable[..., Result], prompts: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = [{"role": "user", "content": "Once"}]
    prompts.write_text(json.dumps({"messages": talk}) + '\n{"prompt": "Once"}\n{"prompt": "Once: "}\n')
    monkeypatch.setattr(batch, "require_template", lambda _: None)
    monkeypatch.setattr(llm.tokenizer, "_template", ChatTemplate(TEMPLATE, "test"))
    assert run("--temperature", "0").exit_code == 0
    messages, prompt, rendered = [answer["text"] for answer in answers(prompts)]
    assert messages == rendered != prompt
    refused = run("--temperature", "0", "--chat")
    assert "an answer to line 2 of the input, whose prompt has changed" in refused.stderr
    assert run("--temperature", "0", "--chat", "--fresh").exit_code == 0
    assert [answer["text"] for answer in answers(prompts)[:2]] == [messages, messages]
    monkeypatch.setattr(llm.tokenizer, "_template", ChatTemplate(TEMPLATE + "x", "test"))
    assert "other settings (template)" in run("--temperature", "0", "--chat").stderr


def test_messages_of_a_model_without_a_template_are_refused_before_it_is_loaded(prompts: Path) -> None:
    prompts.write_text('{"messages": [{"role": "user", "content": "Once"}]}\n')
    assert "no chat template" in refusal("generate", "-m", str(TARGET), "-i", str(prompts))
    assert "forerun chat" in refusal("generate", "-m", str(TARGET), "--chat", "Once")
