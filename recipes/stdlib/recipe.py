"""The recipe as one value, and its stages in order; a stage whose result exists is skipped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import cast

import torch
from rich.progress import Progress
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from recipes.stdlib import card
from recipes.stdlib.corpus import SourceFile, read_corpus
from recipes.stdlib.distill import distill, open_students
from recipes.stdlib.generate import Texts, generate_texts
from recipes.stdlib.measure import measure
from recipes.stdlib.pretrain import open_run, pretrain
from recipes.stdlib.tokenizer import BOS, EOS, VOCAB_SIZE, save_tokenizer, train_tokenizer
from recipes.stdlib.training import RECORD, Record, Run, Schedule, Shape


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that determines the result, apart from the corpus."""

    vocab_size: int
    target: Shape
    students: Mapping[str, Shape]
    pretraining: Schedule
    texts: Texts
    distillation: Schedule


STDLIB = Recipe(
    vocab_size=VOCAB_SIZE,
    target=Shape(hidden=384, layers=6, heads=6, kv_heads=2, mlp=1024),
    students={
        "middle": Shape(hidden=256, layers=4, heads=4, kv_heads=2, mlp=688),
        "draft": Shape(hidden=128, layers=2, heads=2, kv_heads=2, mlp=352),
    },
    pretraining=Schedule(steps=2_400),
    texts=Texts(count=1_024),
    distillation=Schedule(steps=2_000),
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """The corpus as tokens: a training stream and a held-out stream, each with its files separated by </s>."""

    files: Sequence[SourceFile]
    tokenizer: Tokenizer
    train: Tensor
    held_out: Tensor

    @property
    def bos(self) -> int:
        """The id of `<s>`."""
        return cast(int, self.tokenizer.token_to_id(BOS))


def cook(recipe: Recipe, source: Path, work: Path, out: Path, bar: Progress, teacher: Path | None = None) -> None:
    """Train the family into `out`; `work` stores checkpoints, from which a later call resumes.

    With a `teacher`, the target of an earlier call, only the students are trained. Raises ValueError if `work` belongs
    to another corpus, recipe or teacher, or if the teacher has another vocabulary; FileNotFoundError if it is not a
    target of this recipe.
    """
    disable_progress_bar()  # the bar of transformers would overwrite this one
    files = read_corpus(source)
    if teacher is not None:
        check_teacher(teacher, recipe.vocab_size)
    claim(work, recipe, files, teacher)
    if teacher is None:
        corpus = tokenize(files, trained_tokenizer(files, recipe.vocab_size, work / "tokenizer"))
        run = open_run(work / "target.pt", recipe.target, recipe.vocab_size, recipe.pretraining)
        pretrain(run, corpus.train, recipe.pretraining, corpus.bos, bar)
        export(run, "target", recipe.pretraining, corpus.tokenizer, out)
    else:
        corpus = tokenize(files, Tokenizer.from_file(str(teacher / "tokenizer.json")))
        if teacher.resolve() != (out / "target").resolve():
            shutil.copytree(teacher, out / "target", dirs_exist_ok=True)
    target = LlamaForCausalLM.from_pretrained(out / "target", dtype=torch.float32)
    prompts = recipe.texts.prompts(corpus.train, corpus.bos)
    texts = generate_texts(out / "target", prompts, recipe.texts, work / "texts", bar)
    students = open_students(work / "students.pt", recipe.students, recipe.vocab_size, recipe.distillation)
    distill(students, target, corpus.train, texts, recipe.distillation, corpus.bos, bar)
    for name in recipe.students:
        export(students, name, recipe.distillation, corpus.tokenizer, out)
    describe(corpus, recipe, out)


def check_teacher(folder: Path, vocab_size: int) -> None:
    """Raise FileNotFoundError unless this recipe made the folder, ValueError for another vocabulary."""
    for name in (RECORD, "config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}: name a target of this recipe with --target.")
    found_size = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    if found_size != vocab_size:
        raise ValueError(f"{folder} has {found_size} tokens, the recipe {vocab_size}: name a target of this recipe.")


def claim(work: Path, recipe: object, files: Sequence[SourceFile], teacher: Path | None) -> None:
    """Record recipe, corpus and teacher in the work folder. Raises ValueError if it belongs to others."""
    digest = sha256(repr(recipe).encode())
    for file in files:
        digest.update(f"{file.path} {file.sha256}\n".encode())
    if teacher is not None:
        digest.update((teacher / "model.safetensors").read_bytes())
    mark, name = work / "recipe.txt", digest.hexdigest()
    if not mark.exists():
        work.mkdir(parents=True, exist_ok=True)
        mark.write_text(name, "utf-8")
    if mark.read_text("utf-8") != name:
        raise ValueError(f"{work} belongs to another recipe, corpus or teacher: name another folder with --work")


def trained_tokenizer(files: Sequence[SourceFile], vocab_size: int, folder: Path) -> Tokenizer:
    """The tokenizer, trained once and stored in the folder."""
    path = folder / "tokenizer.json"
    if not path.exists():
        save_tokenizer(train_tokenizer((f.text for f in files if not f.held_out), vocab_size), path.parent)
    return Tokenizer.from_file(str(path))


def tokenize(files: Sequence[SourceFile], tokenizer: Tokenizer) -> Corpus:
    """Encode the corpus."""
    end = tokenizer.token_to_id(EOS)

    def stream(part: Sequence[SourceFile]) -> Tensor:
        encoded = tokenizer.encode_batch([file.text for file in part], add_special_tokens=False)
        return torch.tensor([token for each in encoded for token in [*each.ids, end]])

    train = stream([f for f in files if not f.held_out])
    return Corpus(files, tokenizer, train, stream([f for f in files if f.held_out]))


def export(run: Run, name: str, schedule: Schedule, tokenizer: Tokenizer, out: Path) -> None:
    """Write a model of the run as a Hugging Face folder in bfloat16, with the record of its training."""
    model, folder = cast(LlamaForCausalLM, run.models[name]), out / name
    shutil.rmtree(folder, ignore_errors=True)
    rounded = LlamaForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
    save_tokenizer(tokenizer, folder)
    run.record(name, schedule).write(folder)


def describe(corpus: Corpus, recipe: Recipe, out: Path) -> None:
    """Measure the family and write its card."""
    folders = {name: out / name for name in ("target", *recipe.students)}
    pairs = [("target", name) for name in recipe.students] + [("middle", "draft")]
    figures = measure(folders, corpus.held_out, corpus.bos, [pair for pair in pairs if set(pair) <= set(folders)])
    records = {name: Record.read(folder) for name, folder in folders.items()}
    card.write_manifest(corpus.files, out / "corpus.tsv")
    card.draw_losses(records, out / "losses.png")
    card.write_card(out / "README.md", corpus.files, records, recipe.texts.count, figures)
