"""The acceptance computed from held-out answers is what an engine that serves the drafter counts."""

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from forerun.accept.outcome import Outcome
from forerun.config import Speculation
from forerun.control.controller import FixedDepth
from forerun.fields import Fields
from forerun.heads.block.format import BlockTensors
from forerun.heads.block.student import BlockStudent
from forerun.heads.eagle.student import EagleStudent
from forerun.heads.fresh import TargetTables, trainable
from forerun.heads.medusa.student import MedusaStudent
from forerun.heads.mtp.student import MtpStudent
from forerun.heads.sizes import StudentSizes
from forerun.heads.student import Student
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.train.held_out import figures_of, judge_held_out, rounds_of
from forerun.train.kinds import make_student
from forerun.train.settings import TrainSettings
from forerun.train.speed import best_depth, costs_of_student, read_costs
from forerun.tune.passes import RowCosts
from heads.modules import module_tensors
from heads.trained import block_of, eagle_of, heads_of
from kit.checkpoints import SMALL, TARGET
from kit.sparse import write_sparse
from train.material import no_report, source_for

DEPTH = 4
OF_OTHERS = ["early-exit of gemma2", "early-exit of starcoder2"]
BLOCKS = {
    "block": {"markov_rank": 32, "enable_confidence_head": True, "block_size": 4, "sample_from_anchor": True},
    "block, causal, selector": {"selector_rank": 32, "selector_top_k": 200, "block_size": 4, "causal": True},
}


def student_of(kind: str, target: Blueprint, folder: Path) -> Student:
    """A student some of whose draft tokens are accepted."""
    if kind == "draft":
        return make_student("draft", target, StudentSizes(init=str(SMALL)), 0)
    if kind.startswith("early-exit"):
        return make_student("early-exit", target, StudentSizes(exit=3), 0)
    if kind == "eagle":
        weights = load_file(eagle_of(TARGET, folder) / "model.safetensors")
        ids = torch.arange(400) + weights.pop("d2t")
        student = EagleStudent.fresh(target, StudentSizes(mlp=96, draft_vocab=400), 0).with_vocabulary(ids)
        assert {n: t.shape for n, t in student.weights.items()} == {n: t.shape for n, t in weights.items()}
        return replace(student, weights=trainable(weights, torch.device("cpu")))
    if kind in BLOCKS:
        block = block_of(TARGET, folder, **BLOCKS[kind])
        values, weights = json.loads((block / "config.json").read_text()), load_file(block / "model.safetensors")
        tensors = BlockTensors.of(Fields(folder, values), weights.keys(), target.config, target.name)
        config, depths = tensors.config, tensors.config.most_depth
        return BlockStudent.untrained(
            target, values, weights, tables=TargetTables.of(target), config=config, taps=config.taps,
            depth_weights=(1.0,) * depths, most_depth=depths,
        )  # fmt: skip
    if kind == "mtp":
        fresh, modules = MtpStudent.fresh(target, StudentSizes(), 0), module_tensors(TARGET, 1, "qwen")
        assert fresh.weights.keys() == modules.keys()
        return replace(fresh, weights=trainable(modules, torch.device("cpu")))
    student = MedusaStudent.fresh(target, StudentSizes(heads=DEPTH - 1, hydra=kind == "hydra"), 0)
    fitted = load_file(heads_of(TARGET, folder, DEPTH - 1, kind == "hydra") / "model.safetensors")
    assert student.weights.keys() == fitted.keys()
    return replace(student, weights=trainable(fitted, torch.device("cpu")))


def target_of(kind: str, folder: Path) -> Path:
    """The stories target, or one whose logits are bounded, or have a bias."""
    _, _, family = kind.partition(" of ")
    return write_sparse(folder, family) if family else TARGET


@pytest.mark.short("draft-1.0", "early-exit of gemma2-1.0")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["draft", "early-exit", "medusa", "hydra", "eagle", "mtp", *BLOCKS, *OF_OTHERS])
def test_acceptance_on_held_out_answers_is_what_an_engine_counts(kind: str, temperature: float, tmp_path: Path) -> None:
    """The very same counts: the rounds of the replay are those of the engine."""
    settings = TrainSettings(
        steps=1, max_tokens=32, held_out=7, temperature=temperature, draft_depth=DEPTH, top_k=40, top_p=0.95
    )
    model = target_of(kind, tmp_path / "target")
    target = Blueprint.of(str(model))
    student = student_of(kind, target, tmp_path / "heads")
    source = source_for(student, settings, tmp_path, model)
    texts = source.held_out(no_report)
    figures = judge_held_out(source.objective, student, texts, no_report)
    source.llm.close()
    folder = tmp_path / "drafter"
    folder.mkdir()
    student.write(student.weights, folder)
    llm = LLM(str(model), student.spec(folder), speculation=Speculation(DEPTH), controller=FixedDepth(), max_num_seqs=1)
    offered, accepted, rounds = Counter[int](), Counter[int](), list[int]()
    plain_record = llm.engine.controller.record

    def recording(outcome: Outcome) -> None:
        for row in () if outcome.num_prompt_tokens else outcome.rows:
            rounds.append(row.accepted)
            for j in range(min(row.num_drafted, row.accepted + 1)):
                offered[j] += 1
                accepted[j] += j < row.accepted
        plain_record(outcome)

    llm.engine.controller.record = recording  # type: ignore[method-assign]
    for text in texts:
        assert text.is_cut
        answer = llm.generate([list(text.tokens[: text.num_prompt])], settings.sampling(text.seed))[0]
        assert (*answer.prompt_token_ids, *answer.outputs[0].token_ids) == text.tokens
    llm.close()
    assert figures.acceptance_at_depth == tuple(accepted[j] / offered[j] for j in sorted(offered))
    assert figures.acceptance_at_depth[0] > {"eagle": 0.03, **dict.fromkeys(BLOCKS, 0.03)}.get(kind, 0.1)
    assert figures.tokens_per_round[-1] == 1 + sum(rounds) / len(rounds)


def test_rounds_are_replayed_from_hits() -> None:
    hits = [[True, True, False, True, True, True], [True, False, True, True, True, False]]
    text = rounds_of(hits, 6, is_cut=True)
    assert text.at_depth(1) == [(1, 1), (1, 1), (0, 0)]
    assert text.at_depth(2) == [(2, 1), (2, 2)]
    assert rounds_of(hits, 6, is_cut=False).at_depth(1) == [(1, 1), (1, 1), (1, 1)]
    figures = figures_of(0.5, [text], 2)
    assert figures.acceptance_at_depth == (1.0, 0.5)
    assert figures.tokens_per_round == (1 + 2 / 3, 1 + 3 / 2)
    assert figures_of(0.5, [rounds_of(hits, 1, is_cut=True)], 2).tokens_per_round == (1.0, 1.0)


RATIOS = st.floats(1e-6, 10.0)


@given(st.lists(st.tuples(RATIOS, RATIOS), min_size=1, max_size=16), st.lists(st.floats(1.0, 17.0), min_size=1))
def test_the_predicted_speedup_is_that_of_the_best_depth_and_at_most_the_tokens_per_round(
    ratios: list[tuple[float, float]], tokens: list[float]
) -> None:
    """Whatever other programs on the same cores did to the times: a drafted round contains a plain pass."""
    passes = {1 + depth: of_pass for depth, (of_pass, _) in enumerate(ratios, start=1)}
    drafts = {depth: of_draft for depth, (_, of_draft) in enumerate(ratios, start=1)}
    costs = RowCosts(2.0, {1: 1.0, **passes}, drafts)
    depth, speed_up = best_depth(costs, tokens)
    gains = [t / max(1.0, costs.round_ratio(d)) for d, t in enumerate(tokens, start=1)]
    assert speed_up == gains[depth - 1] == max(gains)
    assert speed_up <= tokens[depth - 1]


def test_costs_are_measured_of_untrained_drafts_and_kept(tmp_path: Path) -> None:
    target = Blueprint.of(str(TARGET))
    student = make_student("early-exit", target, StudentSizes(exit=3), 0)
    llm = LLM(str(TARGET), max_model_len=64, max_num_seqs=2, prefix_cache=False)
    costs = costs_of_student(llm, target, student, [(1, 2, 3), (1, 5)], 1.0, 6, no_report)
    assert costs is not None
    assert sorted(costs.passes) == [1, 2, 3, 5, 7]
    assert costs.passes[1] == 1.0
    assert costs_of_student(llm, target, student, [(1,) * 60], 1.0, 6, no_report) is None  # no room
    llm.close()
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(asdict(costs)))
    assert read_costs(path) == costs
    for damaged in ("{", "[]", '{"plain_s": 1, "drafted_s": [1]}'):
        path.write_text(damaged)
        assert read_costs(path) is None
