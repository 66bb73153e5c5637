"""The recipe on a made-up corpus: it runs end to end, goes on after a kill, and learns from no held-out file."""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from recipes.stdlib import recipe as stages
from recipes.stdlib.corpus import read_corpus, standard_library
from recipes.stdlib.generate import Texts
from recipes.stdlib.recipe import Recipe, claim, cook, tokenize, trained_tokenizer
from recipes.stdlib.tokenizer import train_tokenizer
from recipes.stdlib.training import Record, Schedule, Shape
from rich.progress import Progress

from forerun import LLM, SamplingParams
from kit.recipe_material import SHORT, Killed, dying, write_source

TINY = Recipe(
    vocab_size=320,
    target=Shape(hidden=32, layers=2, heads=2, kv_heads=1, mlp=64),
    students={"middle": Shape(32, 1, 2, 1, 64), "draft": Shape(32, 1, 1, 1, 32)},
    pretraining=SHORT,
    texts=Texts(count=70, num_prompt=8, num_new=8),
    distillation=SHORT,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.fixture(autouse=True, scope="module")
def small_measurement() -> Iterator[None]:
    """A card's figures from few texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.stdlib.measure.NUM_PROMPTS", 4)
        patch.setattr("recipes.stdlib.measure.NUM_NEW_TOKENS", 24)
        yield


@pytest.fixture(scope="module")
def quiet() -> Iterator[Progress]:
    with Progress(disable=True) as bar:
        yield bar


@pytest.fixture(scope="module")
def cooked(tmp_path_factory: pytest.TempPathFactory, quiet: Progress) -> Path:
    """What a whole run leaves: its `source`, its `work` and the `family`, which are only read."""
    root = tmp_path_factory.mktemp("cooked")
    cook(TINY, write_source(root / "source"), root / "work", root / "family", quiet)
    return root


def weights(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("*/model.safetensors"))
    return {file.parent.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.full
def test_the_split_depends_on_the_path_alone_and_takes_about_one_file_in_fifty(tmp_path: Path) -> None:
    library = read_corpus(standard_library())
    share = sum(file.held_out for file in library) / len(library)
    assert 0.01 < share < 0.04
    for text in ("a = 1\n", "b = 2\n"):
        for path in ("operator.py", "argparse.py"):
            (tmp_path / path).write_text(text, "utf-8")
        sides = {file.path: file.held_out for file in read_corpus(tmp_path)}
        assert sides == {f.path: f.held_out for f in library if f.path in sides}


def test_what_is_no_text_of_the_library_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x = 1\n", "utf-8")
    (tmp_path / "latin.py").write_bytes("x = 'é'\n".encode("latin-1"))
    (tmp_path / "empty.py").write_text("\n", "utf-8")
    with pytest.raises(FileNotFoundError, match=r"--source"):
        read_corpus(tmp_path)
    (tmp_path / "good.py").write_bytes(b"x = 1\r\n")
    assert [(file.path, file.text) for file in read_corpus(tmp_path)] == [("good.py", "x = 1\n")]


def test_the_tokenizer_gives_every_text_back(source: Path) -> None:
    tokenizer = train_tokenizer((file.text for file in read_corpus(source)), 320)
    for text in ("def f():\n\treturn 'é漢🙂'\r\n", "  \n\n   x", "\x00\x7f"):
        ids = tokenizer.encode(text).ids
        assert ids[0] == tokenizer.token_to_id("<s>") == 0
        assert tokenizer.decode(ids) == text


def test_every_place_of_the_stream_is_read_once_before_any_is_read_again() -> None:
    tokens = torch.arange(1, 32 * 40 + 2)
    schedule = Schedule(steps=10, batch_tokens=128, context=32, long_share=0)
    rows = torch.cat([schedule.windows(tokens, step, 0) for step in range(10)])
    assert (rows[:, 0] == 0).all()
    starts = rows[:, 1]
    assert len(set(((starts - 1) // 32).tolist())) >= 39  # all 40 places; the last may be pushed back into the stream
    assert torch.equal(rows[:, 2:], rows[:, 1:-1] + 1)
    assert torch.equal(rows[:4], schedule.windows(tokens, 0, 0)), "a step's windows are a function of its number"


def test_the_whole_recipe_makes_checkpoints_that_draft_for_each_other(cooked: Path) -> None:
    out = cooked / "family"
    assert set(weights(out)) == {"target", "middle", "draft"}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    drafted = LLM(str(out / "target"), draft=f"model:{out / 'draft'}").generate("def function_1(x):", params)
    assert len(drafted[0].outputs[0].token_ids) == 12
    card = (out / "README.md").read_text("utf-8")
    assert "160 files" in card
    assert "nan" not in card
    listed = [line.split("\t") for line in (out / "corpus.tsv").read_text("utf-8").splitlines()]
    assert {(path, side) for side, _, path in listed} == {
        (f.path, "held-out" if f.held_out else "train") for f in read_corpus(cooked / "source")
    }
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_students_are_taught_again_by_a_target_that_is_there(
    source: Path, cooked: Path, tmp_path: Path, quiet: Progress
) -> None:
    whole = cooked / "family"
    cook(TINY, source, tmp_path / "again", tmp_path / "students", quiet, teacher=whole / "target")
    assert weights(tmp_path / "students") == weights(whole)
    assert Record.read(tmp_path / "students" / "target") == Record.read(whole / "target")
    with pytest.raises(ValueError, match="another recipe, corpus or teacher"):
        cook(TINY, source, tmp_path / "again", tmp_path / "students", quiet)


@pytest.mark.parametrize("missing", ["training.json", "tokenizer.json"])
def test_what_is_no_target_of_the_recipe_is_refused_and_nothing_is_touched(
    missing: str, source: Path, tmp_path: Path, quiet: Progress
) -> None:
    target, out = tmp_path / "target", tmp_path / "out"
    for folder in (target, out / "target"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text('{"vocab_size": 321}', "utf-8")
        for name in ("training.json", "tokenizer.json", "model.safetensors"):
            (folder / name).write_text("kept", "utf-8")
    with pytest.raises(ValueError, match="has 321 tokens, the recipe 320"):
        cook(TINY, source, tmp_path / "work", out, quiet, teacher=target)
    (target / missing).unlink()
    with pytest.raises(FileNotFoundError, match=rf"has no {missing}: name a target of this recipe"):
        cook(TINY, source, tmp_path / "work", out, quiet, teacher=target)
    assert not (target / missing).exists()
    assert (out / "target" / "model.safetensors").read_text("utf-8") == "kept"
    assert not (tmp_path / "work").exists()


@pytest.mark.full
def test_a_killed_run_goes_on_to_the_very_same_weights(
    source: Path, cooked: Path, tmp_path: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recipes.stdlib.pretrain.CHECKPOINT_EVERY", 2)
    monkeypatch.setattr("recipes.stdlib.distill.CHECKPOINT_EVERY", 2)
    with dying(2, 5):
        for _ in range(2):
            with pytest.raises(Killed):
                cook(TINY, source, tmp_path / "again", tmp_path / "parts", quiet)
    cook(TINY, source, tmp_path / "again", tmp_path / "parts", quiet)
    assert weights(tmp_path / "parts") == weights(cooked / "family")


def test_no_model_and_no_tokenizer_sees_a_held_out_file(source: Path, tmp_path: Path) -> None:
    files = read_corpus(source)
    held_out = [file for file in files if file.held_out]
    assert held_out, "the made-up corpus holds no file out"
    corpus = tokenize(files, trained_tokenizer(files, 320, tmp_path / "before"))
    for file in held_out:
        (source / file.path).write_text("entirely = 'something else: ÄÖÜ'\n" * 40, "utf-8")
    files = read_corpus(source)
    changed = tokenize(files, trained_tokenizer(files, 320, tmp_path / "after"))
    assert torch.equal(corpus.train, changed.train)
    assert corpus.tokenizer.get_vocab() == changed.tokenizer.get_vocab()
    assert not torch.equal(corpus.held_out, changed.held_out)


def test_work_of_another_corpus_is_refused_and_kept(source: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    claim(work, TINY, read_corpus(source), None)
    claim(work, TINY, read_corpus(source), None)
    (work / "target.pt").write_bytes(b"days of work")
    shutil.rmtree(source / "part0")
    with pytest.raises(ValueError, match="another recipe, corpus or teacher"):
        claim(work, TINY, read_corpus(source), None)
    assert (work / "target.pt").read_bytes() == b"days of work"


def test_stages_that_are_done_are_not_done_again(
    cooked: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = weights(cooked / "family")

    def refuse(*_: object) -> None:
        raise AssertionError("a finished stage was entered again")

    monkeypatch.setattr("recipes.stdlib.pretrain.step_optimizers", refuse)
    monkeypatch.setattr("recipes.stdlib.distill.step_optimizers", refuse)
    monkeypatch.setattr("recipes.stdlib.generate.LLM", refuse)
    monkeypatch.setattr(stages, "train_tokenizer", refuse)
    cook(TINY, cooked / "source", cooked / "work", cooked / "family", quiet)
    assert weights(cooked / "family") == before
