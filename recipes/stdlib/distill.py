"""Stage 3: the students learn the target's distribution, alternating between the corpus and the target's texts.

All students learn from the same pass of the target. The loss is KL in the first tenth of the steps, then LK-lambda.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor, nn

from forerun.train.objective import LOSSES, LawPair
from forerun.train.optimizer import step_optimizers
from recipes.stdlib.training import CHECKPOINT_EVERY, Run, Schedule, Shape, build_llama, build_optimizers

KL_SHARE = 0.1


def open_students(path: Path, shapes: Mapping[str, Shape], vocab_size: int, schedule: Schedule) -> Run:
    """The training run of the students, resumed from its checkpoint; its losses are 1 - acceptance."""
    models: dict[str, nn.Module] = {name: build_llama(s, vocab_size, schedule.seed) for name, s in shapes.items()}
    optimizers = {name: build_optimizers(model, schedule) for name, model in models.items()}
    run = Run(path, models, optimizers, losses={name: [] for name in models})
    run.load()
    return run


def distill(
    run: Run, target: nn.Module, corpus: Tensor, texts: Tensor, schedule: Schedule, bos: int, bar: Progress
) -> None:
    """Train all students to the schedule's end on the 1-D token streams `corpus` and `texts`."""
    task = bar.add_task("students", total=schedule.steps, completed=run.step)
    target.eval()
    while run.step < schedule.steps:
        started = time.perf_counter()
        stream = texts if run.step % 2 else corpus
        windows = schedule.windows(stream, run.step, bos)
        rows, following = windows[:, :-1], windows[:, 1:].flatten()
        loss_name = "kl" if run.step < KL_SHARE * schedule.steps else "lk-lambda"
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            log_p = target(rows).logits.float().flatten(0, 1).log_softmax(-1)
        log_p = log_p.clone()  # a tensor of inference mode cannot enter a backward pass
        for name, student in run.models.items():
            with torch.autocast("cpu", torch.bfloat16):
                logits = student(rows).logits
            laws = LawPair(log_p, logits.float().flatten(0, 1).log_softmax(-1), following)
            LOSSES[loss_name](laws, torch.ones_like(following, dtype=torch.bool)).mean().backward()
            step_optimizers(student.parameters(), run.optimizers[name], schedule.rate_at(run.step))
            run.losses[name].append(1 - float(laws.overlap.detach().mean()))
        run.step += 1
        run.seconds += time.perf_counter() - started
        recent = {name: sum(losses[-50:]) / len(losses[-50:]) for name, losses in run.losses.items()}
        shown = "  ".join(f"{name} accepts {1 - loss:.3f}" for name, loss in recent.items())
        bar.update(task, completed=run.step, description=f"students  {shown}")
        if run.step % CHECKPOINT_EVERY == 0 or run.step == schedule.steps:
            run.save()
