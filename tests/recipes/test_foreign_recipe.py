"""The recipe for a draft of another vocabulary, on a made-up corpus: it runs, goes on after a kill, and drafts."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from recipes.stdlib import foreign
from recipes.stdlib.corpus import read_corpus
from recipes.stdlib.foreign import FOREIGN, NAME, Foreign, cook_foreign, target_texts
from recipes.stdlib.generate import Texts
from recipes.stdlib.pretrain import open_run, pretrain
from recipes.stdlib.recipe import STDLIB, export, tokenize, trained_tokenizer
from recipes.stdlib.training import Record, Shape, build_llama
from rich.progress import Progress

from forerun import LLM, SamplingParams
from forerun.draft.vocab.translate import TranslatingDrafter
from kit.recipe_material import SHORT, Killed, dying, write_source

TINY = Foreign(
    vocab_size=290,
    target_vocab_size=320,
    shape=Shape(hidden=32, layers=1, heads=1, kv_heads=1, mlp=32),
    texts=Texts(count=70, num_prompt=8, num_new=8),
    schedule=SHORT,
)


@pytest.fixture
def quiet() -> Iterator[Progress]:
    with Progress(disable=True) as bar:
        yield bar


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.fixture
def target(source: Path, tmp_path: Path, quiet: Progress) -> Path:
    """A target of the family's kind."""
    files = read_corpus(source)
    corpus = tokenize(files, trained_tokenizer(files, 320, tmp_path / "tokenizer"))
    run = open_run(tmp_path / "target.pt", Shape(32, 1, 1, 1, 32), 320, SHORT)
    pretrain(run, corpus.train, SHORT, corpus.bos, quiet)
    export(run, "target", SHORT, corpus.tokenizer, tmp_path / "family")
    return tmp_path / "family" / "target"


def weights(out: Path) -> str:
    return hashlib.sha256((out / NAME / "model.safetensors").read_bytes()).hexdigest()


def test_it_is_as_large_as_the_draft_of_the_family() -> None:
    sizes = []
    for shape, vocab_size in ((STDLIB.students["draft"], STDLIB.vocab_size), (FOREIGN.shape, FOREIGN.vocab_size)):
        sizes.append(sum(p.numel() for p in build_llama(shape, vocab_size, 0).parameters()))
    assert sizes[0] == sizes[1]
    assert FOREIGN.vocab_size == 1024
    assert FOREIGN.target_vocab_size == STDLIB.vocab_size


def test_it_makes_a_drafter_that_is_translated(source: Path, target: Path, tmp_path: Path, quiet: Progress) -> None:
    out = tmp_path / "out"
    cook_foreign(TINY, source, target, tmp_path / "work", out, quiet)
    record = Record.read(out / NAME)
    assert record.steps == len(record.losses) == 6
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain, drafted = LLM(str(target)), LLM(str(target), f"model:{out / NAME}", speculation=4)
    assert isinstance(drafted.drafter, TranslatingDrafter)
    one, other = (llm.generate("def function_1(x):", params)[0].outputs[0].token_ids for llm in (plain, drafted))
    assert one == other
    assert drafted.stats.num_drafted > 0


@pytest.mark.full
def test_a_killed_run_goes_on_to_the_very_same_weights(
    source: Path, target: Path, tmp_path: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "CHECKPOINT_EVERY", 2)
    cook_foreign(TINY, source, target, tmp_path / "work", tmp_path / "whole", quiet)
    with dying(2), pytest.raises(Killed):
        cook_foreign(TINY, source, target, tmp_path / "again", tmp_path / "parts", quiet)
    monkeypatch.setattr(foreign, "generate_texts", lambda *_: None)  # they are there
    cook_foreign(TINY, source, target, tmp_path / "again", tmp_path / "parts", quiet)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    other = Foreign(**{name: getattr(TINY, name) for name in TINY.__slots__} | {"vocab_size": 300})
    with pytest.raises(ValueError, match="another recipe, corpus or teacher"):
        cook_foreign(other, source, target, tmp_path / "again", tmp_path / "parts", quiet)


def test_the_targets_texts_are_encoded_in_the_drafts_tokens(
    source: Path, target: Path, tmp_path: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = read_corpus(source)
    own = tokenize(files, trained_tokenizer(files, 320, tmp_path / "tokenizer")).tokenizer
    small = trained_tokenizer(files, 290, tmp_path / "small")
    written = own.encode("def f(x): # naïve 你好", add_special_tokens=False).ids
    (tmp_path / "work" / "texts").mkdir(parents=True)
    (tmp_path / "work" / "texts" / "000000.json").write_text(str([[*written, 1], written]))
    monkeypatch.setattr(foreign, "generate_texts", lambda *_: None)
    tokens = target_texts(TINY, files, target, tmp_path / "work", small, quiet)
    encoded = small.encode("def f(x): # naïve 你好", add_special_tokens=False).ids
    assert torch.equal(tokens, torch.tensor([*encoded, 1, *encoded]))


def test_a_target_of_another_family_is_refused(source: Path, target: Path, tmp_path: Path, quiet: Progress) -> None:
    with pytest.raises(ValueError, match="has 320 tokens, the recipe 4096"):
        cook_foreign(FOREIGN, source, target, tmp_path / "work", tmp_path / "out", quiet)
    assert not (tmp_path / "work").exists()
