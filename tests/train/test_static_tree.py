"""The static tree of a training: accuracies by brute force, the best nodes by enumeration, and drafts in its shape."""

import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forerun.config import Speculation
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.sampling.params import SamplingParams
from forerun.shape import StaticTree
from forerun.train.held_out import MOST_CHILDREN, accuracies, judge_held_out, likeliest_tree, ranks_of
from forerun.train.settings import TrainSettings
from heads.trained import heads_of
from kit.checkpoints import TARGET
from train.material import no_report, source_for
from train.test_held_out import student_of


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_has_the_likeliest_nodes_of_all_possible_ones(seed: int) -> None:
    dice = random.Random(seed)
    shares = [sorted((dice.random() for _ in range(3)), reverse=True) for _ in range(3)]
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    worth = {path: math.prod(shares[d][rank] for d, rank in enumerate(path)) for path in every}
    for num_nodes in (1, 4, 9, 30, 100):
        tree = likeliest_tree(shares, num_nodes)
        likely = sorted(every, key=lambda path: -worth[path])[:num_nodes]
        assert sum(worth[tuple(path)] for path in tree.paths) == pytest.approx(sum(worth[path] for path in likely))
        assert len(tree.paths) == min(num_nodes, len(every))


@pytest.mark.full
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 1.0])
def test_accuracies_are_those_of_the_draft_tokens_and_an_engine_accepts_more_in_the_trees_shape(
    temperature: float, tmp_path: Path
) -> None:
    settings = TrainSettings(steps=1, max_tokens=32, held_out=6, temperature=temperature, draft_depth=3)
    target = Blueprint.of(str(TARGET))
    student = student_of("medusa", target, tmp_path / "heads")
    source = source_for(student, settings, tmp_path)
    objective, texts = source.objective, source.held_out(no_report)
    shares = accuracies(objective, student, texts)
    first = judge_held_out(objective, student, texts, no_report)
    source.llm.close()
    assert [len(by_rank) for by_rank in shares] == [MOST_CHILDREN] * 3
    assert all(0 <= share <= 1 for by_rank in shares for share in by_rank)
    assert all(sum(by_rank) <= 1 for by_rank in shares)
    assert shares[0][0] == pytest.approx(first.acceptance_at_depth[0], abs=0.15)
    folder = heads_of(TARGET, tmp_path / "heads", 3)
    accepted = []
    for shape in (StaticTree([[0], [0, 0], [0, 0, 0]]), likeliest_tree(shares, 12)):
        llm = LLM(str(TARGET), f"medusa:{folder}", speculation=Speculation(tree=shape), max_num_seqs=1)
        for text in texts:
            params = SamplingParams(temperature=temperature, seed=text.seed, max_tokens=32, ignore_eos=True)
            answer = llm.generate([list(text.tokens[: text.num_prompt])], params)[0]
            assert (*answer.prompt_token_ids, *answer.outputs[0].token_ids) == text.tokens
        accepted.append(llm.stats.tokens_per_round)
    assert accepted[1] > 1.1 * accepted[0]


def test_a_tokens_rank_is_its_place_among_the_draft_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = TrainSettings(steps=1, max_tokens=12, held_out=2, temperature=0.0)
    student = student_of("medusa", Blueprint.of(str(TARGET)), tmp_path / "heads")
    source = source_for(student, settings, tmp_path)
    objective, text = source.objective, source.held_out(no_report)[0]
    source.llm.close()
    answer_tokens = torch.tensor(text.tokens[text.num_prompt :])
    right = [
        torch.nn.functional.one_hot(answer_tokens.roll(-depth), objective.num_ids)[None].float() for depth in range(3)
    ]
    with monkeypatch.context() as patch:
        patch.setattr(type(student), "predict", lambda *_: SimpleNamespace(logits=right))
        assert [by_rank[0] for by_rank in accuracies(objective, student, [text])] == [1.0] * 3
    logits = torch.zeros(1, len(text.roots), objective.num_ids)
    for rank in range(4):
        logits.zero_()
        for place, token in enumerate(answer_tokens.tolist()):
            others = [t for t in range(3, 10) if t != token][:rank]
            logits[0, place, others], logits[0, place, token] = 5.0, 4.0
        ranks = ranks_of(objective, student, text, logits, 1, 4)[: len(answer_tokens)]
        assert ranks.tolist() == [rank] * len(answer_tokens)
