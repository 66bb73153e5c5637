"""`python -m recipes.smollm2 FILE.gguf`: make the drafter that ships for SmolLM2-135M-Instruct.

The target writes prompts and answers them, and the n-grams of the answers are counted. An MTP module that was trained
on the same answers for half an hour was slower than plain decoding (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import typer

from forerun import LLM, SamplingParams
from forerun.draft.auto import RECORD, DrafterRecord
from forerun.draft.text.ngram_table import FILE, LEAST_CHANCE, ORDER, write_ngrams
from forerun.models.loading import Blueprint
from forerun.models.spec import ModelSpec
from forerun.train.answers import AnswerSource
from forerun.train.data import PromptReader, TrainingData, read_data
from forerun.train.settings import TrainSettings
from forerun.train.train import answering_llm
from recipes.smollm2.prompts import write_prompts

NUM_PROMPTS = 1664
SETTINGS = TrainSettings(steps=80, batch=32, temperature=0.5, max_tokens=128)
NUM_ANSWERS = 80 * SETTINGS.batch
DEPTH = 8  # of drafts for held-out answers
Answer = tuple[Sequence[int], int]  # a text, and the index where its answer begins


def main(
    model: Annotated[str, typer.Argument(help="SmolLM2-135M-Instruct: a GGUF file, a folder or a hub id.")],
    work: Annotated[Path, typer.Option(help="Folder of the prompts.")] = Path("build/smollm2"),
    out: Annotated[Path, typer.Option(help="Folder of the drafter.")] = Path("build/smollm2/ngrams"),
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Write prompts and answers, and the drafter into `out`. Existing prompts are reused."""
    work.mkdir(parents=True, exist_ok=True)
    write_prompts(model, NUM_PROMPTS, work / "prompts.jsonl", threads)
    target = Blueprint.of(ModelSpec(model))
    reader = PromptReader(target.tokenizer(), target.config.max_positions, SETTINGS, chat=True)
    data = read_data([work / "prompts.jsonl"], reader)
    ship(model, data, answers(target, data), out, threads)
    typer.echo(f"The drafter is in {out}.")


def answers(target: Blueprint, data: TrainingData) -> list[Answer]:
    """The target's answers to the prompts, in a fixed order and with fixed seeds."""
    written: list[Answer] = []
    with answering_llm(target, data, SETTINGS, quiet) as llm:
        source = AnswerSource(llm, data, SETTINGS, ())
        while len(written) < NUM_ANSWERS:
            texts = source.of_step(len(written) // SETTINGS.batch, quiet)
            written += [(text.tokens, text.num_prompt) for text in texts]
            print(f"{len(written)} of {NUM_ANSWERS} answers", flush=True)
    return written


def quiet(*_: object) -> None:
    """Ignore progress."""


def ship(model: str, data: TrainingData, texts: Sequence[Answer], out: Path, threads: int | None = None) -> None:
    """Count n-grams, and write table, record and card to the folder."""
    target = Blueprint.of(ModelSpec(model))
    out.mkdir(parents=True, exist_ok=True)
    write_ngrams(out, texts, target.tokenizer().fingerprint())
    with LLM(model, draft=f"suffix:{out}", speculation=DEPTH, threads=threads) as llm:
        params = SamplingParams(temperature=0, max_tokens=SETTINGS.max_tokens)
        llm.generate([list(prompt) for prompt in data.held_out], params)
        stats = llm.stats
    accepted = accumulate(stats.accepted_at_depth)
    record = DrafterRecord(
        drafter="suffix",
        argument="",
        target=target.weights_digest(),
        temperature=0.0,
        acceptance_at_depth=stats.acceptance_at_depth,
        tokens_per_round=tuple(1 + num / stats.num_rounds for num in accepted),
        model=target.norms_digest(),
    )
    (out / RECORD).write_text(record.text(), "utf-8")
    num_tokens = sum(len(text) - first for text, first in texts)
    (out / "README.md").write_text(card(record, len(texts), num_tokens, (out / FILE).stat().st_size), "utf-8")


def card(record: DrafterRecord, num_answers: int, num_tokens: int, num_bytes: int) -> str:
    """The drafter's card: what it is, how it was made, and its results on held-out answers."""
    rows = "\n".join(
        f"| {depth} | {rate:.2f} | {tokens:.2f} |"
        for depth, (rate, tokens) in enumerate(
            zip(record.acceptance_at_depth[:4], record.tokens_per_round[:4], strict=True), start=1
        )
    )
    return f"""# N-grams for SmolLM2-135M-Instruct

The tokens that followed the last {ORDER} tokens in answers of the model, with a probability of at least
{LEAST_CHANCE:.0%}: `{FILE}`, {num_bytes / 1e6:.1f} MB, memory-mapped. The drafter `suffix:DIR` uses it if the text
and past answers have few occurrences of the last tokens. `--draft auto` chooses it for this model, in every number
format.

## How it was made

`python -m recipes.smollm2 FILE.gguf`. The target wrote {NUM_PROMPTS:,} prompts itself (Magpie, 2406.08464), of which
one in four is about a passage that it also wrote, and gave {num_answers:,} answers of at most {SETTINGS.max_tokens}
tokens at temperature {SETTINGS.temperature}, {num_tokens:,} tokens in all: about half an hour on one core.
Counting takes seconds. The prompts contain none of a benchmark, and no text of other authors.

On {SETTINGS.held_out} held-out prompts of the same kind, at temperature {record.temperature:.0f}, chains of {DEPTH}:

| depth | acceptance at this depth | tokens per round up to it |
|---|---|---|
{rows}

## Licence

The counts come under the licence of this repository; the target is under Apache-2.0.
"""


if __name__ == "__main__":
    typer.run(main)
