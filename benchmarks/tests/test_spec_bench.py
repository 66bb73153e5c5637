"""Spec-Bench: the choice of questions, the figures of answers, and an entire run on a small model."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.options import options_of
from benchmarks.peers.__main__ import STOPPED
from benchmarks.peers.protocol import Answer, Mode
from benchmarks.peers.state import Cell
from benchmarks.spec_bench.__main__ import Options, Workload, main, mode_of
from benchmarks.spec_bench.answers import AnswerFile, Turn, answer_all
from benchmarks.spec_bench.figures import figure, markdown, summaries
from benchmarks.spec_bench.questions import CATEGORIES, CONVERSATION, Question, read_questions

from forerun import LLM, SamplingParams
from kit.checkpoints import TARGET

FIRST, SECOND = "Once upon a time there was a cat.", "The cat went out and"


def question_file(tmp_path: Path, counts: Sequence[tuple[str, int]]) -> Path:
    """A file with this number of questions of each category; those of MT-bench have two turns."""
    names = [name for name, count in counts for _ in range(count)]
    path = tmp_path / "question.jsonl"
    turns = [[f"{i}. {FIRST}", SECOND] if name in CATEGORIES[:8] else [f"{i}. {FIRST}"] for i, name in enumerate(names)]
    lines = [{"question_id": i, "category": name, "turns": turns[i]} for i, name in enumerate(names)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_each_category_gives_its_share_at_equal_distances(tmp_path: Path) -> None:
    path = question_file(tmp_path, [("rag", 9), ("writing", 4), ("qa", 2)])
    found = read_questions(path, per_category=3)
    assert [each.number for each in found] == [9, 11, 12, 13, 14, 1, 4, 7]
    assert Counter(each.task for each in found) == {CONVERSATION: 3, "qa": 2, "rag": 3}
    assert len(read_questions(path)) == 15


@pytest.mark.parametrize("line", ["{", "[]", '{"id": 1}', '{"id": 1, "category": "x", "turns": ["a"]}'])
def test_errors_about_missing_files_and_wrong_lines_name_the_source(tmp_path: Path, line: str) -> None:
    path = tmp_path / "question.jsonl"
    with pytest.raises(SystemExit, match=r"no file .*hemingkx/Spec-Bench"):
        read_questions(path)
    path.write_text(line + "\n")
    with pytest.raises(SystemExit, match=f"{path}, line 1: .*Spec-Bench"):
        read_questions(path)


def test_a_drafter_without_a_depth_has_depth_auto_and_peers_are_greedy() -> None:
    assert mode_of("mix[ngram,suffix]") == Mode("mix[ngram,suffix]", 0, spec=True)
    assert mode_of("ngram@7") == Mode("ngram", 7, spec=True)
    needed = ["--model", "m.gguf", "--questions", "q"]
    assert options_of(Options, [*needed, "--peers"]).peers == ["llama.cpp", "transformers"]
    for wrong in (["--peers", "vllm"], ["--peers", "--temperature", "1"], ["--peers", "--model", "folder"]):
        with pytest.raises(SystemExit):
            options_of(Options, [*needed, *wrong])


TURNS = [
    Turn(0, "writing", CONVERSATION, 0, [1], [5, 6, 7, 8]),
    Turn(0, "writing", CONVERSATION, 1, [1], [5, 6]),
    Turn(1, "rag", "rag", 0, [2], [9, 9, 9]),
]


def cells(mode: str, factor: float, *, engine: str = "forerun", shift: int = 0) -> list[Cell]:
    """An answer to each turn: one second of prefill, and `factor` seconds for each further token."""
    return [
        Cell(engine, mode, i, Answer([t + shift for t in turn.answer_ids], n - 1, 1.0, factor * (n - 1), n - 1))
        for i, turn in enumerate(TURNS)
        for n in [len(turn.answer_ids)]
    ]


def test_speed_ups_are_spec_benchs_and_paired_within_a_repetition() -> None:
    repetitions = {
        0: [*cells("plain", 7.0), *cells("suffix@auto", 3.5)],
        1: [*cells("plain", 100.0), *cells("suffix@auto", 50.0)],
        2: [*cells("plain", 1.0), *cells("suffix@auto", 0.5), *cells("plain", 2.0, engine="peer", shift=1)],
    }
    plain, drafted, peer = summaries(TURNS, repetitions)
    writing, rag = (2 + 7 * 4) / (2 + 3.5 * 4), (1 + 7 * 2) / (1 + 3.5 * 2)  # seconds of both turns, of one
    assert [each.speed_up for each in drafted.figures] == pytest.approx([writing, rag, writing])
    assert [each.category for each in drafted.figures] == ["writing", "rag", CONVERSATION]
    assert drafted.speed_up == pytest.approx((writing + rag) / 2)
    assert drafted.decoding == pytest.approx(2)
    assert plain.speed_up == plain.geometric == plain.decoding == pytest.approx(1)
    assert (plain.num_different, plain.num_answers, drafted.num_answers) == (0, 9, 9)
    assert peer.num_different == 3
    assert peer.decoding == pytest.approx(0.5)
    assert drafted.tokens_per_round == 1
    table = markdown([plain, drafted, peer], TURNS)
    assert f"| **{CONVERSATION}** | 1 | 1.00 | 1.88 |" in table


def test_a_categorys_speed_is_the_mean_of_its_questions() -> None:
    turns = [Turn(i, "qa", "qa", 0, [1], [1] * 10) for i in range(2)]
    plain = {0: [Cell("", "", i, Answer([1] * 10, 9, 0.0, 10.0 / (1 + i))) for i in range(2)]}
    drafted = {0: [Cell("", "", i, Answer([1] * 10, 9, 0.0, 5.0)) for i in range(2)]}
    found = figure("qa", turns, drafted, plain)
    assert found is not None
    assert found.tokens_per_s == pytest.approx(2)
    assert found.speed_up == pytest.approx((2 + 2) / (1 + 2))
    assert figure("rag", turns, drafted, plain) is None


def test_later_turns_follow_the_plain_answers_and_saved_answers_are_reused(tmp_path: Path) -> None:
    llm = LLM(str(TARGET), use_tqdm_on_load=False)
    questions = [Question(0, "writing", (FIRST, SECOND)), Question(1, "qa", (SECOND,))]
    params, saved = SamplingParams(temperature=0.7, seed=0, max_tokens=9), AnswerFile(tmp_path / "saved.jsonl", "run")
    turns = answer_all(llm, questions, params, saved)
    assert [(turn.number, turn.turn) for turn in turns] == [(0, 0), (0, 1), (1, 0)]
    first = llm.tokenizer.decode(turns[0].answer_ids, skip_special_tokens=True)
    assert llm.tokenizer.decode(turns[1].prompt_ids, skip_special_tokens=True).split() == (
        f"{FIRST} {first} {SECOND}".split()
    )
    for turn in turns:
        (alone,) = llm.generate([list(turn.prompt_ids)], params)
        assert list(alone.outputs[0].token_ids) == list(turn.answer_ids)
    saved.path.write_text(saved.path.read_text() + '{"run": "run", "tur')
    assert answer_all(None, questions, params, saved) == turns  # type: ignore[arg-type]  # nothing is generated
    workload = Workload(turns)
    assert (len(workload.prompts), len(workload.prompts[-1]), workload.lengths[:3]) == (4, 512, [9, 9, 9])


@pytest.mark.full
def test_a_run_gives_the_same_tokens_in_every_mode_and_can_be_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = question_file(tmp_path, [("writing", 2), ("qa", 1)])
    words = ["--model", "stdlib", "--questions", str(questions), "--draft", "ngram", "--draft", "suffix@3"]
    words += ["--folder", str(tmp_path), "--tokens", "12", "--repeats", "1", "--prompts-per-category", "1"]
    words += ["--threads", "1", "--context", "1024", "--temperature", "0.8", "--output", str(tmp_path / "out.json")]
    assert main([*words, "--time-limit", "0.001"]) == STOPPED
    assert main(words) == 0
    assert "1 repetitions" in capsys.readouterr().out
    found = json.loads((tmp_path / "out.json").read_text())
    assert [each["mode"] for each in found["summaries"]] == ["plain", "ngram@auto", "suffix@3"]
    assert all(each["num_different"] == 0 and each["num_answers"] == 3 for each in found["summaries"])
    assert found["steps"][0]["first_token_s"] > 0
    assert (tmp_path / "out.md").read_text().startswith("### Spec-Bench: stdlib")
    assert main(words) == 0
    assert "warm-up" not in capsys.readouterr().out
