"""The recipe as one value, and its stages in order: each is skipped where its result is there already."""

from __future__ import annotations

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
from recipes.stdlib.training import Run, Schedule, Shape


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what comes out, beside the corpus."""

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
    distillation=Schedule(steps=3_000),
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """The corpus as tokens: one stream to learn from and one held out, files one after the other with </s> between."""

    files: Sequence[SourceFile]
    tokenizer: Tokenizer
    train: Tensor
    held_out: Tensor

    @property
    def bos(self) -> int:
        """The id of `<s>`."""
        return cast(int, self.tokenizer.token_to_id(BOS))


def cook(recipe: Recipe, source: Path, work: Path, out: Path, bar: Progress) -> None:
    """Make the family in `out`; `work` keeps checkpoints, and a second call goes on from them.

    Raises ValueError where `work` was begun from another corpus or by another recipe.
    """
    disable_progress_bar()  # transformers' own, which would break into this one
    files = read_corpus(source)
    claim(work, recipe, files)
    corpus = tokenize(files, recipe.vocab_size, work)
    run = open_run(work / "target.pt", recipe.target, recipe.vocab_size, recipe.pretraining)
    pretrain(run, corpus.train, recipe.pretraining, corpus.bos, bar)
    target = cast(LlamaForCausalLM, run.models["target"])
    folders = {"target": export(target, corpus.tokenizer, out / "target")}
    prompts = recipe.texts.prompts(corpus.train, corpus.bos)
    texts = generate_texts(folders["target"], prompts, recipe.texts, work / "texts", bar)
    students = open_students(work / "students.pt", recipe.students, recipe.vocab_size, recipe.distillation)
    distill(students, target, corpus.train, texts, recipe.distillation, corpus.bos, bar)
    for name, student in students.models.items():
        folders[name] = export(cast(LlamaForCausalLM, student), corpus.tokenizer, out / name)
    describe(corpus, run, students, recipe, folders, out)


def claim(work: Path, recipe: Recipe, files: Sequence[SourceFile]) -> None:
    """Mark the work folder as this recipe's on this corpus, or refuse one that is another's."""
    digest = sha256(repr(recipe).encode())
    for file in files:
        digest.update(f"{file.path} {file.sha256}\n".encode())
    mark, own = work / "recipe.txt", digest.hexdigest()
    if not mark.exists():
        work.mkdir(parents=True, exist_ok=True)
        mark.write_text(own, "utf-8")
    if mark.read_text("utf-8") != own:
        raise ValueError(f"{work} holds the work of another recipe or corpus: name another folder with --work")


def tokenize(files: Sequence[SourceFile], vocab_size: int, work: Path) -> Corpus:
    """The tokenizer, trained once and kept in the work folder, and the corpus by it."""
    path = work / "tokenizer" / "tokenizer.json"
    if not path.exists():
        save_tokenizer(train_tokenizer((f.text for f in files if not f.held_out), vocab_size), path.parent)
    tokenizer = Tokenizer.from_file(str(path))
    end = tokenizer.token_to_id(EOS)

    def stream(part: Sequence[SourceFile]) -> Tensor:
        encoded = tokenizer.encode_batch([file.text for file in part], add_special_tokens=False)
        return torch.tensor([token for each in encoded for token in [*each.ids, end]])

    train = stream([f for f in files if not f.held_out])
    return Corpus(files, tokenizer, train, stream([f for f in files if f.held_out]))


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> Path:
    """The model as a Hugging Face folder in bfloat16."""
    shutil.rmtree(folder, ignore_errors=True)
    rounded = LlamaForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.bfloat16().save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


def describe(
    corpus: Corpus, pretraining: Run, distillation: Run, recipe: Recipe, folders: Mapping[str, Path], out: Path
) -> None:
    """Measure what ships and write the card."""
    pairs = [("target", name) for name in recipe.students] + [("middle", "draft")]
    pairs = [pair for pair in pairs if set(pair) <= set(folders)]
    figures = measure(folders, corpus.held_out, corpus.bos, pairs)
    models = pretraining.models | distillation.models
    parameters = {name: sum(p.numel() for p in models[name].parameters()) for name in folders}
    stages = [
        card.Training(schedule.steps, schedule.batch_tokens, run.seconds, run.losses)
        for schedule, run in ((recipe.pretraining, pretraining), (recipe.distillation, distillation))
    ]
    card.write_manifest(corpus.files, out / "corpus.tsv")
    card.draw_losses(stages[0], stages[1], out / "losses.png")
    num_texts = recipe.texts.count
    card.write_card(out / "README.md", corpus.files, parameters, stages[0], num_texts, stages[1], figures)
