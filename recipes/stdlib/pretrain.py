"""Stage 1: the target is trained on the corpus, by the cross-entropy of the next token."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from forerun.train.optimizer import step_optimizers
from recipes.stdlib.training import CHECKPOINT_EVERY, Run, Schedule, Shape, build_llama, build_optimizers


def open_run(path: Path, shape: Shape, vocab_size: int, schedule: Schedule) -> Run:
    """The target's run, resumed from its checkpoint."""
    model = build_llama(shape, vocab_size, schedule.seed)
    run = Run(path, {"target": model}, {"target": build_optimizers(model, schedule)}, losses={"target": []})
    run.load()
    return run


def pretrain(run: Run, tokens: Tensor, schedule: Schedule, bos: int, bar: Progress) -> None:
    """Train to the schedule's end on the 1-D stream `tokens`, with a checkpoint every CHECKPOINT_EVERY steps."""
    model, optimizers = run.models["target"], run.optimizers["target"]
    task = bar.add_task("target", total=schedule.steps, completed=run.step)
    while run.step < schedule.steps:
        started = time.perf_counter()
        rows = schedule.windows(tokens, run.step, bos)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(rows[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        step_optimizers(model.parameters(), optimizers, schedule.rate_at(run.step))
        run.losses["target"].append(float(loss.detach()))
        run.step += 1
        run.seconds += time.perf_counter() - started
        recent = run.losses["target"][-50:]
        bar.update(task, completed=run.step, description=f"target  loss {sum(recent) / len(recent):.3f}")
        if run.step % CHECKPOINT_EVERY == 0 or run.step == schedule.steps:
            run.save()
