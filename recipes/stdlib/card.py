"""Stage 5: the model card, the list of the corpus' files, and the picture of the losses."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from recipes.stdlib.corpus import SourceFile
from recipes.stdlib.measure import Figures
from recipes.stdlib.training import Record

SMOOTH = 25


def write_manifest(files: Sequence[SourceFile], path: Path) -> None:
    """Every file of the corpus: `train` or `held-out`, the SHA-256 of its bytes, its path; tab-separated."""
    lines = [f"{'held-out' if f.held_out else 'train'}\t{f.sha256}\t{f.path}" for f in sorted(files, key=path_of)]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def path_of(file: SourceFile) -> str:
    """The sort key of the manifest."""
    return file.path


def draw_losses(records: Mapping[str, Record], path: Path) -> None:
    """Draw a panel per stage: the target's cross-entropy, and one minus the students' acceptance."""
    import matplotlib  # here, as the import takes a second and the other stages draw nothing

    matplotlib.use("Agg")
    from matplotlib import pyplot

    students = {name: record for name, record in records.items() if name != "target"}
    stages = [
        ({"target": records["target"]}, "the target's cross-entropy, nats per token"),
        (students, "the students' 1 - sum of min(p, q)"),
    ]
    drawn = [stage for stage in stages if any(record.losses for record in stage[0].values())]
    figure, axes = pyplot.subplots(1, len(drawn), figsize=(5 * len(drawn), 3.6), layout="constrained", squeeze=False)
    for axis, (stage, label) in zip(axes[0], drawn, strict=True):
        for name, record in stage.items():
            axis.plot(range(1, len(record.losses) + 1), smoothed(record.losses), label=name, linewidth=1.2)
        axis.set_ylim(top=min(6, max(axis.get_ylim())))
        axis.set_xlabel("step")
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Means over the last SMOOTH steps."""
    tails = (losses[max(0, i - SMOOTH + 1) : i + 1] for i in range(len(losses)))
    return [sum(tail) / len(tail) for tail in tails]


def write_card(
    path: Path, files: Sequence[SourceFile], records: Mapping[str, Record], num_texts: int, figures: Figures
) -> None:
    """Write the card of the family, as Markdown."""
    held_out = [f for f in files if f.held_out]
    target, draft = records["target"], records["draft"]
    python, distinct = platform.python_version(), figures.distinct_ngrams
    curve = "" if target.losses else " Those of the target were not saved."
    megabytes = sum(len(f.text.encode()) for f in files) / 1e6
    rows = "\n".join(
        f"| `{name}` | {count / 1e6:.1f} M | {figures.loss[name]:.3f} | {figures.loss_long[name]:.3f} |"
        for name, count in figures.parameters.items()
    )
    pairs = "\n".join(
        f"| `{p.draft}` drafts for `{p.target}` | {p.acceptance:.3f} | {p.greedy_agreement:.3f} |"
        for p in figures.pairs
    )
    path.write_text(
        f"""# The stdlib family

Three Llamas with one byte-level BPE of 4,096 tokens, trained on the source of the standard library of Python
{python}. They are for trying, testing and measuring speculative decoding with real acceptance rates, on any machine and
without a download. They write Python that looks right but should not be run. End a prompt before a line break, not
after it, because the break and the indentation that follows are one token.

| model | parameters | held-out loss, windows of 256 tokens | of 1,024 tokens |
|---|---|---|---|
{rows}

Losses are in nats per token, for the weights that ship (bfloat16, computed in float32).

| pair | sum of min(p, q) at temperature 1 | greedy agreement |
|---|---|---|
{pairs}

Measured on the target's own continuations (128 tokens) of 24 held-out prompts. Of their 8-grams
{distinct[1.0]:.1%} are distinct at temperature 1 and {distinct[0.0]:.1%} at temperature 0, where a small model
repeats itself: acceptance at temperature 0 is therefore too favourable for every drafter.

## Data

{len(files):,} files, {megabytes:.1f} MB, under the PSF licence; files that are not UTF-8 or empty were left out.
{len(held_out)} files (one in 50, by a hash of the path) were held out: neither the models nor the tokenizer saw them.
[corpus.tsv](corpus.tsv) lists every file with its hash and whether it was held out.

## Recipe

`python -m recipes.stdlib` repeats everything, and resumes after an interruption.

1. The tokenizer, then the target: {target.steps:,} steps of {target.batch_tokens:,} tokens, windows of 256 tokens and
   in the last fifth of 1,024, every window after `<s>`; Muon for matrices, AdamW for the rest; bfloat16 autocast;
   {target.seconds / 60:.0f} minutes.
2. The target continues {num_texts:,} beginnings of training files, at temperatures 1 and 0.7.
3. Draft and middle learn the target's distribution together, {draft.steps:,} steps of {draft.batch_tokens:,} tokens,
   on the corpus and on those texts, alternating: KL for a tenth of the steps, then LK-lambda;
   {draft.seconds / 60:.0f} minutes.

Times on 2 cores ({platform.machine()}), while other work ran. Positions beyond 1,024 are hardly trained. The file
`training.json` next to each model holds its losses.{curve}
The curves jump where windows become longer.

![losses](losses.png)

## Another vocabulary

`draft-1024` is as large as `draft` and has a vocabulary of 1,024 tokens, learned from the same files. It is for trying
draft models with another tokenizer than the target's. `python -m recipes.stdlib.foreign` makes it: the tokenizer;
4,096 texts that the target wrote, from beginnings of training files at temperatures 1 and 0.7; 4,000 steps of 4,096
tokens of cross-entropy on the corpus and on those texts, alternating; 23 minutes, while other work ran.

## Licence

The source is under the Python Software Foundation licence, see <https://docs.python.org/3/license.html>; the weights
come under the licence of this repository.
""",
        "utf-8",
    )
