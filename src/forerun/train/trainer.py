"""The training loop.

A step gets answers, computes the loss and updates the weights. Every `look_every` steps the student is evaluated on the
held-out answers, and the log, the checkpoint, the best drafter and the curves are written. The data of a step depend
only on its number, and early stopping only on evaluations, so a resumed training ends with the same weights.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from forerun.errors import TrainingDiverged
from forerun.heads.student import Student, TargetText, TextBatch
from forerun.machine import disturbs
from forerun.progress import rounded_duration
from forerun.sampling.noise import mix
from forerun.store import Journal, whole_folder, writable, write_whole
from forerun.train.answers import SEEDS, AnswerSource
from forerun.train.held_out import HeldOutFigures, judge_held_out
from forerun.train.objective import StepFigures
from forerun.train.optimizer import build_optimizers, step_optimizers
from forerun.train.report import curves
from forerun.train.speed import best_depth
from forerun.train.state import TrainFolder, TrainState
from forerun.tune.passes import RowCosts

CURVES = "train.svg"
LEAST_RISE = 1e-4  # increase of the overlap that counts as an improvement
MOST_LOST = 0.01  # relative increase of a tuned target's loss up to which its weights may be the best
MOST_LOGITS = 1 << 25  # in memory at a time: a step's answers are split into parts
LOGGED_EVERY = 10  # steps
logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """A training, resumed from its folder's checkpoint if there is one. `costs` of rounds predict the speed-up."""

    student: Student
    source: AnswerSource
    folder: TrainFolder
    held_out: Sequence[TargetText]
    costs: RowCosts | None
    report: Callable[..., None]  # as a LoadingBar is called
    state: TrainState = field(init=False)
    log: Journal = field(init=False)
    optimizers: list[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        self.settings, self.team, self.objective = self.source.settings, self.source.team, self.source.objective
        self.optimizers = build_optimizers(self.student.weights, self.settings.rate)
        saved = self.team.of_first(self.folder.load)
        self.state = saved or TrainState()
        if saved is not None:
            self.student.set_weights(saved.weights)
            for optimizer, values in zip(self.optimizers, saved.optimizers, strict=True):
                optimizer.load_state_dict(values)
        self.log = self.folder.log(-1 if saved is None else self.state.step)
        if saved is None:
            self.fit()
            self.evaluate()
            return
        if saved.stopped and saved.asked < self.settings.length:
            saved.stopped, saved.looks_since = "", 0
        verb = "is finished, after step" if saved.stopped else "resumes at step"
        self.log_info("%s %s %d: %s", self.folder.folder, verb, saved.step, self.summary)
        self.publish()

    def fit(self) -> None:
        """Initialize a student that has a closed-form fit; in a team all use the first process's result."""
        steps = -(-self.student.fitted_answers // self.settings.batch)
        steps = steps if self.settings.steps is None else min(steps, self.settings.steps)
        texts = [text for step in range(steps) for text in self.source.of_step(step, self.report)]
        if texts:
            self.student.fit(texts)
            self.student.set_weights(self.team.of_first(lambda: self.student.weights))

    @property
    def best(self) -> HeldOutFigures:
        """The figures of the best weights so far."""
        assert self.state.best_figures is not None, "the weights are evaluated before the first step"
        return HeldOutFigures(**self.state.best_figures)

    @property
    def summary(self) -> str:
        """The figures of the best weights so far, in words."""
        figures = self.best
        predicted = best_depth(self.costs, figures.tokens_per_round)
        depth, speed_up = predicted or (len(figures.tokens_per_round), 0.0)
        accepted = figures.acceptance_at_depth[0] if figures.acceptance_at_depth else 0.0
        text = f"{accepted:.2f} accepted at depth 1, {figures.tokens_per_round[depth - 1]:.2f} tokens per round"
        disturbed = ", disturbed" if self.costs is not None and disturbs(self.costs.num_busy) else ""
        return f"{text}, ×{speed_up:.2f} predicted{disturbed}" if speed_up else text

    @property
    def share_done(self) -> float:
        """The completed share of the training."""
        return self.settings.share_done(self.state.step, self.state.seconds)

    @property
    def time_left(self) -> str:
        """The remaining time in words, without evaluations; empty before the first step and after the last one."""
        share = self.share_done
        seconds = self.state.seconds * (1 - share) / share if share else 0.0
        return f", about {rounded_duration(seconds)} left" if seconds else ""

    def run(self) -> TrainState:
        """Train to the end."""
        while not self.state.stopped:
            if self.share_done >= 1:
                self.state.stopped = "all steps are done" if self.settings.steps else "the time is over"
                self.evaluate()
                break
            started_s = time.perf_counter()
            figures = self.step()
            (taken_s,) = self.team.sums([time.perf_counter() - started_s])
            self.state.seconds += taken_s / self.team.size
            self.state.step += 1
            if self.state.step % LOGGED_EVERY == 0 or self.state.step == 1:
                self.add_entry({"step": self.state.step, "loss": figures.loss, "overlap": figures.overlap})
            self.report("training", self.share_done, f"loss {figures.loss:.3f}, {self.summary}")
            if self.share_done < 1 and self.state.step % self.settings.look_every == 0:
                self.evaluate()
            elif self.share_done < 1 and self.state.step % self.settings.checkpoint_every == 0:
                self.save_checkpoint()
        return self.state

    def step(self) -> StepFigures:
        """Compute the loss of one step and update the weights."""
        step, settings = self.state.step, self.settings
        share = self.share_done
        texts = self.source.of_step(step, self.report)
        texts = [replace(text, num_prompt=1) for text in texts] if settings.whole else texts  # roots in prompts too
        student = self.student.at_depth_1() if share < settings.first_share else self.student
        generator = torch.Generator().manual_seed(mix((settings.seed, 2, step)) % SEEDS)
        sums = [(0.0, 0.0, 0.0, 0.0)]  # a process may have no part
        for part in self.parts(texts):
            batch, name = TextBatch.of(part), settings.loss_at(share)
            with torch.autocast(batch.last.device.type, torch.bfloat16, enabled=settings.bfloat16):
                loss, figures = self.objective.loss(student, batch, generator, name)
            if not math.isfinite(figures.loss):
                raise TrainingDiverged(
                    f"the loss of step {step + 1} is {figures.loss}: train again with a lower --rate than "
                    f"{settings.rate:g}; the best weights so far are in {self.folder.folder}"
                )
            (loss * figures.weight).backward()  # the mean over all parts follows from the sums
            weight, places = figures.weight, float(figures.num_places)
            sums.append((weight, weight * figures.loss, places, places * figures.overlap))
        self.team.add_gradients(self.student.weights.values())
        weight, loss_sum, num_places, overlap_sum = self.team.sums([sum(each) for each in zip(*sums, strict=True)])
        for tensor in self.student.weights.values():
            if tensor.grad is not None:
                tensor.grad /= weight
        step_optimizers(self.student.weights.values(), self.optimizers, settings.rate_at(step, share))
        return StepFigures(loss_sum / weight, overlap_sum / num_places, int(num_places), weight)

    def parts(self, texts: Sequence[TargetText]) -> list[Sequence[TargetText]]:
        """Split answers into parts of at most MOST_LOGITS logits, but at least one answer each."""
        longest = max(len(text.tokens) for text in texts)
        most = max(1, MOST_LOGITS // (longest * self.objective.num_ids))
        return [texts[i : i + most] for i in range(0, len(texts), most)]

    def evaluate(self) -> None:
        """Evaluate the weights, and write the checkpoint, the log, the best drafter and the curves."""
        state = self.state
        figures = self.team.of_first(lambda: judge_held_out(self.objective, self.student, self.held_out, self.report))
        figure_values = figures.as_object()
        entry = {"step": state.step, "seconds": round(state.seconds, 3), "held_out": figure_values}
        if predicted := best_depth(self.costs, figures.tokens_per_round):
            entry["predicted"] = {"depth": predicted[0], "speed_up": predicted[1]}
        state.first_figures = state.first_figures or figure_values
        may_be_best = (figures.target_rise or 0.0) <= MOST_LOST
        if state.best_figures is None or (may_be_best and figures.overlap > state.best_figures["overlap"] + LEAST_RISE):
            state.best_figures, state.best_step, state.looks_since = figure_values, state.step, 0
            state.best = {name: tensor.detach().clone() for name, tensor in self.student.weights.items()}
        else:
            state.looks_since += 1
            if state.looks_since >= self.settings.patience and not state.stopped:
                state.stopped = f"held-out acceptance has not risen in {self.settings.patience} evaluations"
        self.log_info("step %d, %.0f %% done%s: %s", state.step, 100 * self.share_done, self.time_left, self.summary)
        self.add_entry(entry)
        self.save_checkpoint()
        self.publish()

    def add_entry(self, entry: Mapping[str, Any]) -> None:
        """Append a line to train.jsonl."""
        with writable(self.folder.folder):
            self.log.add(entry)

    def log_info(self, message: str, *values: object) -> None:
        """Log a message, in the first process only."""
        if self.team.is_first:
            logger.info(message, *values)

    def save_checkpoint(self) -> None:
        """Save the checkpoint, in the first process only."""
        if not self.team.is_first:
            return
        state = self.state
        state.weights = {name: tensor.detach() for name, tensor in self.student.weights.items()}
        state.optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state.asked = self.settings.length
        self.folder.save(state)

    def publish(self) -> None:
        """Write the best drafter so far and the curves, in the first process only."""
        if not self.team.is_first:
            return
        folder = self.folder.folder
        with writable(folder):
            with whole_folder(folder) as part:
                self.student.write(self.state.best, part)
            write_whole(folder / CURVES, curves(self.log.entries))
