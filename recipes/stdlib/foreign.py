"""A draft model with another vocabulary: as large as the family's, with 1,024 tokens, trained on text alone.

`python -m recipes.stdlib.foreign` makes it, or resumes; it takes less than an hour on 2 cores. The target's
distribution is over other tokens, so the draft model cannot learn it token by token. It learns from text: from the
corpus and from texts of the target, alternating, by the cross-entropy of the next token.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from transformers.utils.logging import disable_progress_bar

from forerun.train.optimizer import step_optimizers
from recipes.stdlib.corpus import SourceFile, read_corpus, standard_library
from recipes.stdlib.generate import Texts, generate_texts
from recipes.stdlib.recipe import check_teacher, claim, export, tokenize, trained_tokenizer
from recipes.stdlib.training import CHECKPOINT_EVERY, Run, Schedule, Shape, build_llama, build_optimizers

NAME = "draft-1024"
FAMILY = Path(__file__).resolve().parents[2] / "src" / "forerun" / "bundled" / "stdlib"


@dataclass(frozen=True, slots=True)
class Foreign:
    """Everything that determines the result, apart from the corpus and the target."""

    vocab_size: int
    target_vocab_size: int
    shape: Shape
    texts: Texts
    schedule: Schedule
    texts_one_in: int = 2  # one step in so many reads the target's texts, the others read the corpus


# As many parameters and layers as the family's draft: the MLPs are larger by what the smaller vocabulary saves.
FOREIGN = Foreign(
    vocab_size=1024,
    target_vocab_size=4096,
    shape=Shape(hidden=128, layers=2, heads=2, kv_heads=2, mlp=864),
    texts=Texts(count=4_096),
    schedule=Schedule(steps=4_000),
)


def cook_foreign(recipe: Foreign, source: Path, target: Path, work: Path, out: Path, bar: Progress) -> None:
    """Train the draft into `out`; `work` stores tokenizer, texts and checkpoint, from which a later call resumes.

    Raises ValueError if `work` belongs to another corpus, recipe or target, and FileNotFoundError if `target` is not a
    target of the family.
    """
    disable_progress_bar()
    check_teacher(target, recipe.target_vocab_size)
    files = read_corpus(source)
    claim(work, recipe, files, target)
    corpus = tokenize(files, trained_tokenizer(files, recipe.vocab_size, work / "tokenizer"))
    texts = target_texts(recipe, files, target, work, corpus.tokenizer, bar)
    model = build_llama(recipe.shape, recipe.vocab_size, recipe.schedule.seed)
    run = Run(work / f"{NAME}.pt", {NAME: model}, {NAME: build_optimizers(model, recipe.schedule)}, losses={NAME: []})
    run.load()
    learn(run, [corpus.train, texts], recipe, corpus.bos, bar)
    export(run, NAME, recipe.schedule, corpus.tokenizer, out)


def target_texts(
    recipe: Foreign, files: Sequence[SourceFile], target: Path, work: Path, tokenizer: Tokenizer, bar: Progress
) -> Tensor:
    """The target's continuations of excerpts of training files, in the draft's tokens, as one stream."""
    target_tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    corpus = tokenize(files, target_tokenizer)
    folder = work / "texts"
    generate_texts(target, recipe.texts.prompts(corpus.train, corpus.bos), recipe.texts, folder, bar)
    rows = [row for file in sorted(folder.glob("*.json")) for row in json.loads(file.read_text("utf-8"))]
    decoded = target_tokenizer.decode_batch(rows, skip_special_tokens=False)  # both tokenizers end a text with </s>
    encoded = tokenizer.encode_batch(decoded, add_special_tokens=False)
    return torch.tensor([token for each in encoded for token in each.ids])


def learn(run: Run, streams: Sequence[Tensor], recipe: Foreign, bos: int, bar: Progress) -> None:
    """Train to the schedule's end on `streams`: the corpus and the target's texts, both 1-D."""
    schedule, model, optimizers = recipe.schedule, run.models[NAME], run.optimizers[NAME]
    task = bar.add_task(NAME, total=schedule.steps, completed=run.step)
    while run.step < schedule.steps:
        started = time.perf_counter()
        stream = streams[run.step % recipe.texts_one_in == recipe.texts_one_in - 1]
        rows = schedule.windows(stream, run.step, bos)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(rows[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        step_optimizers(model.parameters(), optimizers, schedule.rate_at(run.step))
        run.losses[NAME].append(float(loss.detach()))
        run.step += 1
        run.seconds += time.perf_counter() - started
        recent = run.losses[NAME][-50:]
        bar.update(task, completed=run.step, description=f"{NAME}  loss {sum(recent) / len(recent):.3f}")
        if run.step % CHECKPOINT_EVERY == 0 or run.step == schedule.steps:
            run.save()


def main(
    source: Annotated[Path | None, typer.Option(help="Folder of Python source; default: the standard library.")] = None,
    target: Annotated[Path, typer.Option(help="The family's target, which writes the texts.")] = FAMILY / "target",
    work: Annotated[Path, typer.Option(help="Folder of checkpoints, from which it resumes.")] = Path("build/foreign"),
    out: Annotated[Path, typer.Option(help="Parent folder of the draft's folder.")] = Path("build/foreign/out"),
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
) -> None:
    """Train a tokenizer of 1,024 tokens, and a draft model with it."""
    if threads is not None:
        torch.set_num_threads(threads)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns) as bar:
        cook_foreign(FOREIGN, source or standard_library(), target, work, out, bar)
    typer.echo(f"The draft is in {out / NAME}: measure it with python -m benchmarks.vocabularies {out / NAME}")


if __name__ == "__main__":
    typer.run(main)
