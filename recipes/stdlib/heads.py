"""`python -m recipes.stdlib.heads`: train the family's heads, or resume, and measure all drafters.

The heads draft from the bundled target's states. They are trained as by `forerun train` with the settings in the table
below, on answers that the target writes to prompts from the training files of the corpus. Then all drafters of the
family are measured on held-out files (`judge.py`), and each folder gets its record and its card.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forerun.heads.sizes import StudentSizes
from forerun.models.spec import ModelSpec
from forerun.progress import LoadingBar
from forerun.train.settings import TrainSettings
from forerun.train.train import TrainTask, train
from recipes.stdlib.corpus import read_corpus, standard_library
from recipes.stdlib.judge import DrafterFigures, figures_table, judge_family, time_family, write_records

FAMILY = Path(__file__).resolve().parents[2] / "src" / "forerun" / "bundled" / "stdlib"
SHIPPED = ("config.json", "model.safetensors")


@dataclass(frozen=True, slots=True)
class Head:
    """One of the family's heads: its kind, its sizes, and how it is trained.

    `about` and `minutes`, the duration of the training without interruptions, are printed in its card.
    """

    kind: str
    sizes: StudentSizes
    settings: TrainSettings
    threads: int
    minutes: int
    about: str

    @property
    def command(self) -> str:
        """The equivalent command line; corpus.jsonl has the training files as texts."""
        usual = asdict(TrainSettings())
        learning = {name: value for name, value in asdict(self.settings).items() if value != usual[name]}
        settings = {**asdict(self.sizes), **learning, "threads": self.threads}
        options = [option_text(name, value) for name, value in settings.items() if value is not None]
        return " ".join([f"forerun train {self.kind} --model stdlib --data corpus.jsonl", *options])


def option_text(name: str, value: object) -> str:
    """The text of an option of `forerun train`."""
    option = f"--{name.replace('_', '-')}"
    if value is True:
        return option
    return f"{option} {value}"


QUICK = TrainSettings(look_every=500, bfloat16=True, passes=4)
HEADS: Mapping[str, Head] = {
    "early-exit": Head(
        "early-exit",
        StudentSizes(exit=2, mlp=96),
        TrainSettings(steps=500, look_every=200),
        1,
        19,
        "An adapter: a layer of 96 neurons that reads the target's states after its second layer",
    ),
    "block": Head(
        "block",
        StudentSizes(layers=1, mlp=256, markov_rank=16, taps="4,6"),
        replace(QUICK, steps=2500),
        2,
        26,
        "A block drafter: a layer of 256 neurons that reads two of the target's states, with a Markov head of rank 16",
    ),
    "medusa": Head(
        "medusa",
        StudentSizes(heads=3, shared_head=True),
        replace(QUICK, steps=1500),
        1,
        16,
        "Three Medusa heads, under the target's own output matrix",
    ),
    "eagle": Head(
        "eagle",
        StudentSizes(mlp=256, shared_head=True, taps="4,6"),
        replace(QUICK, steps=2500, look_every=250),
        1,
        42,
        "An EAGLE-3 layer of 256 neurons that reads two of the target's states, under the target's own output matrix",
    ),
    "mtp": Head(
        "mtp",
        StudentSizes(mlp=128),
        replace(QUICK, steps=2500),
        1,
        37,
        "An MTP module of 128 neurons, used again for every draft token",
    ),
}


def main(
    work: Annotated[Path, typer.Option(help="Folder of trainings, from which it resumes.")] = Path("build/heads"),
    out: Annotated[Path, typer.Option(help="Folder of the family, with the target; heads are written to it.")] = FAMILY,
    only: Annotated[list[str] | None, typer.Option(help="Train only these heads.")] = None,
    figures: Annotated[bool, typer.Option("--figures", help="Only measure the existing drafters.")] = False,
    rounds: Annotated[bool, typer.Option("--rounds", help="Also time rounds; run no other program then.")] = False,
) -> None:
    """Train the heads of the bundled target, and measure all drafters of the family."""
    work.mkdir(parents=True, exist_ok=True)
    for name, head in HEADS.items():
        if not figures and (only is None or name in only):
            ship(make(head, work / name, corpus_file(work), out / "target"), out / name)
    existing = [name for name in HEADS if (out / name / "config.json").exists()]
    measured = judge_family(out, existing, work / "figures.json")
    if rounds:
        measured = time_family(out, existing, work / "figures.json")
    write_records(measured, out)
    for name, head in HEADS.items():
        if name in measured:
            write_card(name, head, out / name, measured[name])
    typer.echo(figures_table(measured))


def corpus_file(work: Path) -> Path:
    """Write the training files of the corpus, one text per line."""
    path = work / "corpus.jsonl"
    if not path.exists():
        texts = (file.text for file in read_corpus(standard_library()) if not file.held_out)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


def make(head: Head, folder: Path, data: Path, target: Path) -> Path:
    """Train a head, or resume; returns its folder."""
    with LoadingBar(Console(stderr=True, highlight=False)) as bar:
        task = TrainTask(head.kind, ModelSpec(str(target)), [data], folder, head.sizes, threads=head.threads)
        train(task, head.settings, bar)
    return folder


def ship(made: Path, folder: Path) -> None:
    """Copy the files of a drafter."""
    folder.mkdir(exist_ok=True)
    for name in SHIPPED:
        shutil.copyfile(made / name, folder / name)


def training_text(settings: TrainSettings) -> str:
    """A clause for the card about steps, answers and passes."""
    times = "" if settings.passes == 1 else f", each answer used {settings.passes} times"
    return f"{settings.steps:,} steps of {settings.batch} answers of the target at temperature 1{times}"


def write_card(name: str, head: Head, folder: Path, figures: DrafterFigures) -> None:
    """The card of a head, as Markdown."""
    size = sum((folder / each).stat().st_size for each in SHIPPED) / 1e6
    cores = "one core" if head.threads == 1 else f"{head.threads} cores"
    rows = "\n".join(
        f"| {temperature} | {' '.join(f'{rate:.2f}' for rate in each.acceptance_at_depth)} "
        f"| {each.tokens_per_round[-1]:.2f} |"
        for temperature, each in figures.by_temperature.items()
    )
    (folder / "README.md").write_text(
        f"""# stdlib-{name}

{head.about}.
It drafts for the bundled target `stdlib`, as `--draft {figures.draft}`; {size:.1f} MB.

Made by this command, which `python -m recipes.stdlib.heads` runs; `corpus.jsonl` holds the training files of
[corpus.tsv](../corpus.tsv), one text per line, without the held-out ones. {training_text(head.settings)};
{head.minutes} minutes on {cores}, while other work ran.

```sh
{head.command}
```

On held-out files, with drafts {figures.depth} deep, 24 prompts of 96 tokens and answers of 128 tokens:

| temperature | acceptance at depth 1, 2, … | tokens per round |
|---|---|---|
{rows}

`benchmarks/RESULTS.md` has the figures of all drafters of the family, and the times of their rounds.
""",
        "utf-8",
    )


if __name__ == "__main__":
    typer.run(main)
