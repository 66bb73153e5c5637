"""An MTP module starts as the least-squares map to the target's next state, where there are enough answers."""

from dataclasses import replace
from pathlib import Path

import torch

from forerun.heads.mtp.student import LEAST_ROWS, RIDGE, MtpStudent
from forerun.heads.sizes import StudentSizes
from forerun.heads.student import TextBatch
from forerun.models.loading import Blueprint
from forerun.models.mtp_names import QWEN
from forerun.train.held_out import judge_held_out
from forerun.train.settings import TrainSettings
from kit.checkpoints import TARGET
from train.material import no_report, source_for

SETTINGS = TrainSettings(steps=4, batch=8, max_tokens=48, held_out=6)


def test_the_fit_is_that_of_a_least_squares_solver_and_drafts_better_than_fresh_weights(tmp_path: Path) -> None:
    student = MtpStudent.fresh(Blueprint.of(str(TARGET)), StudentSizes(mlp=32), 0)
    source = source_for(student, SETTINGS, tmp_path)
    texts, held_out = (
        [text for step in range(4) for text in source.of_step(step, no_report)],
        source.held_out(no_report),
    )
    fresh = judge_held_out(source.objective, student, held_out, no_report)
    student.fit(texts)
    fitted = judge_held_out(source.objective, student, held_out, no_report)
    assert fitted.overlap > 1.5 * fresh.overlap
    read, wanted = [], []
    for text in texts:
        for place in range(text.num_prompt, len(text.taps)):
            embedded, state = student.tables.embedding[text.tokens[place]], text.taps[place - 1, 0].float()
            read.append(
                torch.cat([each / each.square().mean().add(1e-5).sqrt() for each in (embedded, state)]).double()
            )
            wanted.append((text.taps[place, 0].float() / student.weights[QWEN.norm].detach()).double())
    rows, states = torch.stack(read), torch.stack(wanted)
    ridge = (RIDGE * rows.square().sum(0).mean()).sqrt() * torch.eye(rows.shape[1], dtype=torch.float64)
    expected = torch.linalg.lstsq(torch.cat([rows, ridge]), torch.cat([states, states.new_zeros(len(ridge), 64)]))
    found = student.weights[QWEN.projection].detach().double().T
    assert torch.allclose(found, expected.solution, atol=1e-3)
    with torch.no_grad():
        batch = TextBatch.of(texts[:1])
        logits = student.predict(batch, None).logits[0][0, 1:]
    states = (rows[: len(logits)] @ found).float()
    output = states / states.square().mean(1, keepdim=True).add(1e-5).sqrt() * student.weights[QWEN.norm].detach()
    assert torch.allclose(logits, output @ student.tables.head.weight.T, atol=1e-2), "the layer adds something"


def test_too_few_answers_leave_the_module_as_it_was(tmp_path: Path) -> None:
    student = MtpStudent.fresh(Blueprint.of(str(TARGET)), StudentSizes(mlp=32), 0)
    source = source_for(student, replace(SETTINGS, max_tokens=8), tmp_path)
    texts = source.of_step(0, no_report)
    assert sum(len(text.roots) for text in texts) < LEAST_ROWS * 128
    before = {name: weight.detach().clone() for name, weight in student.weights.items()}
    student.fit(texts)
    assert all(torch.equal(before[name], weight) for name, weight in student.weights.items())
