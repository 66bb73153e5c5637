"""`python -m recipes.smollm2 FILE.gguf`: make the drafter that ships for SmolLM2-135M-Instruct, or go on making it.

About an hour and a half on one core: the target writes prompts, answers them, and an MTP module learns its law.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forerun.draft.auto import RECORD, DrafterRecord
from forerun.heads.sizes import StudentSizes
from forerun.models.bundled import FOLDER
from forerun.models.spec import ModelSpec
from forerun.progress import LoadingBar
from forerun.train.settings import TrainSettings
from forerun.train.train import TrainTask, train
from recipes.smollm2.prompts import write_prompts

SHIPPED = FOLDER / "smollm2-135m-instruct" / "mtp"
FILES = ("config.json", "model.safetensors")
NUM_PROMPTS = 1664
SIZES = StudentSizes(mlp=1280, draft_vocab=8192)
SETTINGS = TrainSettings(hours=1.05, temperature=0.5, bfloat16=True, passes=2, look_every=150, patience=50)
MIXED_WITH = "suffix"  # what was measured to pay beside it


def main(
    model: Annotated[str, typer.Argument(help="SmolLM2-135M-Instruct: a GGUF file, a folder or a hub id.")],
    work: Annotated[Path, typer.Option(help="Where prompts and checkpoints are kept.")] = Path("build/smollm2"),
    out: Annotated[Path, typer.Option(help="Where the drafter goes.")] = SHIPPED,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Write prompts, train, and put into `out` what a drafter needs; a second call goes on from the first."""
    work.mkdir(parents=True, exist_ok=True)
    write_prompts(model, NUM_PROMPTS, work / "prompts.jsonl", threads)
    task = TrainTask("mtp", ModelSpec(model), [work / "prompts.jsonl"], work / "mtp", SIZES, True, threads=threads)
    with LoadingBar(Console(stderr=True, highlight=False)) as bar:
        train(task, SETTINGS, bar)
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
    looks = [json.loads(line) for line in (made / "train.jsonl").read_text("utf-8").splitlines()]
    (out / "training.json").write_text(json.dumps([each for each in looks if "held_out" in each]) + "\n", "utf-8")


if __name__ == "__main__":
    typer.run(main)
