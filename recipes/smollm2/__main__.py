"""`python -m recipes.smollm2 FILE.gguf`: make a drafter for SmolLM2-135M-Instruct, or go on making it.

The target writes prompts, answers them, and an MTP module learns its law. None ships yet: what half an hour on one core
gave did not pay (benchmarks/RESULTS.md), so `--hours` asks for a night.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from forerun.draft.auto import RECORD, DrafterRecord
from forerun.heads.sizes import StudentSizes
from forerun.models.spec import ModelSpec
from forerun.progress import LoadingBar
from forerun.train.settings import TrainSettings
from forerun.train.train import TrainTask, train
from recipes.smollm2.prompts import write_prompts

FILES = ("config.json", "model.safetensors")
NUM_PROMPTS = 1664
SIZES = StudentSizes(mlp=1280, draft_vocab=8192)
SETTINGS = TrainSettings(rate=5e-4, temperature=0.5, bfloat16=True, passes=2, look_every=200, patience=50)
HOURS = 10.0
MIXED_WITH = "suffix"  # what was measured to pay beside it


def main(
    model: Annotated[str, typer.Argument(help="SmolLM2-135M-Instruct: a GGUF file, a folder or a hub id.")],
    work: Annotated[Path, typer.Option(help="Where prompts and checkpoints are kept.")] = Path("build/smollm2"),
    out: Annotated[Path, typer.Option(help="Where the drafter goes.")] = Path("build/smollm2/drafter"),
    hours: Annotated[float, typer.Option(help="Hours to train.")] = HOURS,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Write prompts, train, and put into `out` what a drafter needs; a second call goes on from the first."""
    work.mkdir(parents=True, exist_ok=True)
    write_prompts(model, NUM_PROMPTS, work / "prompts.jsonl", threads)
    task = TrainTask("mtp", ModelSpec(model), [work / "prompts.jsonl"], work / "mtp", SIZES, True, threads=threads)
    with LoadingBar(Console(stderr=True, highlight=False)) as bar:
        train(task, replace(SETTINGS, steps=None, hours=hours), bar)
    ship(work / "mtp", out)
    typer.echo(f"The drafter is in {out}.")


def ship(made: Path, out: Path) -> None:
    """Copy what a drafter needs, with a record that leaves its speed to the machine where it drafts."""
    record = DrafterRecord.read(made)
    assert record is not None, "the training is over"
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(made / name, out / name)
    (out / RECORD).write_text(replace(record, speed_up=None, mixed_with=MIXED_WITH).text(), "utf-8")
    entries = [json.loads(line) for line in (made / "train.jsonl").read_text("utf-8").splitlines()]
    (out / "README.md").write_text(card(record, [entry for entry in entries if "held_out" in entry]), "utf-8")


def card(record: DrafterRecord, looks: Sequence[Mapping[str, Any]]) -> str:
    """What the drafter is, how it was made, and what held-out answers say of it."""
    last = looks[-1]
    size = (SIZES.draft_vocab or 0, SIZES.mlp or 0)
    rows = "\n".join(
        f"| {depth} | {rate:.2f} | {tokens:.2f} |"
        for depth, (rate, tokens) in enumerate(
            zip(record.acceptance_at_depth[:4], record.tokens_per_round[:4], strict=True), start=1
        )
    )
    return f"""# A drafter for SmolLM2-135M-Instruct

An MTP module (2412.19437, 2509.18362): one layer of {size[1]:,} neurons on the target's last state, used again for
every guess. It guesses the {size[0]:,} tokens that the target says most often, by those rows of the target's own head.
Beside the target, `--draft auto` finds it for every number format, and drafts with it in a mix with `{MIXED_WITH}`.

## How it was made

`python -m recipes.smollm2 FILE.gguf`. The target wrote {NUM_PROMPTS:,} prompts itself (Magpie, 2406.08464), of which
one in four is about a passage that it wrote, too, and answered them at temperature {SETTINGS.temperature}. The module
began at a least-squares fit and learnt for {last["step"]:,} steps of {SETTINGS.batch} answers, each learnt from
{SETTINGS.passes} times: {last["seconds"] / 60:.0f} minutes on one core, while other work ran. No prompt of a benchmark
was among them.

On {SETTINGS.held_out} held-out prompts of the same kind, at temperature {record.temperature}:

| depth | accepted | tokens per round |
|---|---|---|
{rows}

## Licence

The weights come under the licence of this repository; the target is under Apache-2.0.
"""


if __name__ == "__main__":
    typer.run(main)
