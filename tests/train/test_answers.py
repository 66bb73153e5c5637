"""What students learn from: the target's states are those that a drafter gets when serving, in any batch."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from forerun.accept.delta import Delta
from forerun.config import Speculation
from forerun.control.measured import MeasuredDepth
from forerun.engine.sequence import Sequence
from forerun.errors import InvalidRequest
from forerun.heads.block.drafter import BlockDrafter
from forerun.heads.block.student import BlockStudent
from forerun.heads.eagle.student import STEPS as EAGLE_STEPS
from forerun.heads.mtp.student import STEPS as MTP_STEPS
from forerun.heads.sizes import StudentSizes
from forerun.heads.student import Student, TargetText, TextBatch
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from forerun.sampling.draws import Draws, HostChildren
from forerun.train.answers import TRAINED, AnswerCache, AnswerSource
from forerun.train.kinds import make_student
from forerun.train.settings import TrainSettings
from forerun.train.train import answering_llm
from kit.checkpoints import TARGET
from kit.sparse import write_sparse
from train.material import no_report, read_prompts, source_of, write_prompts

AnyStudent = TypeVar("AnyStudent", bound=Student)
SETTINGS = TrainSettings(steps=4, batch=3, max_tokens=20, held_out=2, temperature=0.8)
EXIT = 2
BLOCK = StudentSizes(layers=1, mlp=48, block=5)


def stirred(student: AnyStudent) -> AnyStudent:
    """With random weights everywhere, so that every weight has an effect."""
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in student.weights.values():
            tensor.add_(torch.randn(tensor.shape, generator=dice) * 0.1)
    return student


def batch_of(source: AnswerSource, student: Student, steps: int = 1) -> TextBatch:
    """Answers to the first prompts, with the states that this student reads."""
    of_student = source_of(source.data, SETTINGS, student)
    texts = [text for step in range(steps) for text in of_student.of_step(step, no_report)]
    of_student.llm.close()
    return TextBatch.of(texts)


@pytest.fixture(scope="module")
def adapter() -> Student:
    return stirred(make_student("early-exit", Blueprint.of(str(TARGET)), SERVED["early-exit"], 0))


@pytest.fixture(scope="module")
def source(adapter: Student, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnswerSource]:
    data = read_prompts([write_prompts(tmp_path_factory.mktemp("data"))], SETTINGS)
    found = source_of(data, SETTINGS, adapter)
    yield found
    found.llm.close()


def test_answers_are_generated_with_drafting_at_a_measured_depth(source: AnswerSource) -> None:
    """The engine is built without a drafter; the recorder's is set afterwards."""
    assert source.llm.engine.drafter is source.recorder
    assert isinstance(source.llm.engine.controller, MeasuredDepth)


def same(one: TargetText, other: TargetText) -> bool:
    tensors = torch.equal(one.taps, other.taps) and torch.equal(one.last, other.last)
    return tensors and (one.tokens, one.num_prompt, one.seed, one.is_cut) == (
        other.tokens,
        other.num_prompt,
        other.seed,
        other.is_cut,
    )


def test_states_are_those_of_reading_the_finished_text_to_the_bit(source: AnswerSource) -> None:
    """Whether it was drafted, in how many passes and in which batch does not matter; nor do the tokens depend on it."""
    plain = LLM(str(TARGET), max_model_len=256, max_num_seqs=1)
    for step, texts in ((0, source.of_step(0, no_report)), (3, source.of_step(3, no_report))):
        for i, text in enumerate(texts):
            params = SETTINGS.sampling(text.seed)
            answer = plain.generate([list(source.prompt(3 * step + i))], params)[0]
            assert (*answer.prompt_token_ids, *answer.outputs[0].token_ids) == text.tokens
            runner = plain.engine.runner
            states = runner.read([Read(9, text.tokens[:-1])], taps=(EXIT, 5))
            runner.release([9])
            assert states.taps is not None
            assert torch.equal(states.taps[:, :1], text.taps)
            assert torch.equal(states.taps[:, 1], text.last)
    plain.close()
    assert source.llm.stats.num_drafted > 0


def test_rotary_factors_for_long_texts_are_used_for_short_answers_as_when_serving(tmp_path: Path) -> None:
    """LongRoPE has other factors where no text may be long; the target's are those for texts of up to 64 tokens."""
    target = Blueprint.of(str(write_sparse(tmp_path / "target", "phi3")))
    data = read_prompts([write_prompts(tmp_path)], SETTINGS)
    with answering_llm(target, data, SETTINGS, no_report) as llm:
        found = llm.engine.runner.decoder.rope
    assert torch.equal(found.cos[:60], target.load(64).decoder.rope.cos[:60])
    assert not torch.equal(found.cos[:60], target.for_texts(60).load(64).decoder.rope.cos[:60])


def test_an_answer_depends_only_on_its_number(source: AnswerSource) -> None:
    """Also when requested in another order and in groups of another size."""
    alone = [source.generate([source.prompt(i)], TRAINED, [i], no_report)[0] for i in (7, 4)]
    third, second = source.of_step(2, no_report), source.of_step(1, no_report)
    assert same(alone[0], third[1])
    assert same(alone[1], second[1])
    seeds = {text.seed for step in range(4) for text in source.of_step(step, no_report)}
    assert len(seeds | {text.seed for text in source.held_out(no_report)}) == 14


def test_every_prompt_is_answered_before_any_is_answered_again(source: AnswerSource) -> None:
    count = len(source.data.train)
    epochs = [[source.prompt(i) for i in range(e * count, (e + 1) * count)] for e in range(2)]
    assert all(sorted(epoch) == sorted(source.data.train) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.full
def test_a_preempted_sequence_is_recorded_again_from_its_start(source: AnswerSource, adapter: Student) -> None:
    """In a cache with room for few sequences, so that some are preempted."""
    small = source_of(source.data, SETTINGS, adapter)
    runner = small.llm.engine.runner
    held = [1] * min(250, runner.cache.num_free_tokens - 200)
    for other in range(-1, -99, -1):
        if runner.cache.num_free_tokens < 2 * len(held):
            break
        runner.read([Read(other, held)])
        runner.keep([other], [range(len(held))])
    prompts, numbers, sequences = [source.prompt(i) for i in range(6)], range(6), list[Sequence]()
    small.settings = source.settings = replace(SETTINGS, max_tokens=90)
    submitted = small.llm.engine.submit

    def counted(sequence: Sequence, on_delta: Callable[[Delta], None] | None = None) -> None:
        sequences.append(sequence)
        submitted(sequence, on_delta)

    small.llm.engine.submit = counted  # type: ignore[method-assign]
    found = small.generate(prompts, TRAINED, numbers, no_report)
    small.llm.close()
    expected = source.generate(prompts, TRAINED, numbers, no_report)
    source.settings = SETTINGS
    assert sum(s.num_preempted for s in sequences) > 0
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


SERVED = {
    "draft": StudentSizes(layers=2, hidden=32, heads=2, mlp=64),
    "early-exit": StudentSizes(exit=EXIT, layers=2, mlp=48),
    "medusa": StudentSizes(heads=3),
    "medusa, hydra": StudentSizes(heads=3, hydra=True),
    "eagle": StudentSizes(mlp=48),
    "eagle, shared head": StudentSizes(mlp=48, shared_head=True),
    "eagle, some tokens": StudentSizes(mlp=48, shared_head=True, draft_vocab=300),
    "mtp": StudentSizes(mlp=48),
    "mtp, some tokens": StudentSizes(mlp=48, draft_vocab=300),
    "mtp, portable": StudentSizes(mlp=48, portable=True),
    "block": BLOCK,
    "block, some tokens": replace(BLOCK, draft_vocab=300),
    "block, selector of some tokens": replace(BLOCK, selector_rank=8, draft_vocab=300),
    "block, selector": replace(BLOCK, selector_rank=8),
    "block, portable": replace(BLOCK, markov_rank=8, portable=True),
}


SOME_IDS = torch.randperm(512, generator=torch.Generator().manual_seed(0))[:300].sort().values


@dataclass
class ScriptedDraft:
    """Replaces a drafter's tokens, mostly by the text's own; records its logits by depth where they were the text's."""

    tokens: Seq[int]
    dice: random.Random
    seen: list[tuple[int, int, Tensor]] = field(default_factory=list)  # root, depth, logits

    def draft_tokens(self, draws: Draws, logits: Tensor, rows: Seq[int], paths: Seq[Seq[int]]) -> list[int]:
        tokens = []
        for row, path, shown in zip(rows, paths, logits, strict=True):
            root = len(draws.rows[row].tokens) - 1
            behind = self.tokens[root + 1 :]
            if list(path) == list(behind[: len(path)]):
                self.seen.append((root, len(path), shown.clone()))
            right = behind[len(path)] if len(path) < len(behind) else 3
            tokens.append(right if self.dice.random() < 0.8 else 3)
        return tokens


@pytest.mark.short(
    "draft", "early-exit", "medusa, hydra", "eagle, some tokens", "mtp, some tokens", "block, some tokens"
)
@pytest.mark.parametrize("name", SERVED)
def test_a_student_learns_by_the_logits_that_its_drafter_has_when_serving(
    name: str, source: AnswerSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every depth, where the draft tokens before were the text's; equal logits show that its inputs are equal."""
    target = Blueprint.of(str(TARGET))
    student = make_student(name.partition(",")[0], target, SERVED[name], 0)
    if SERVED[name].draft_vocab is not None:
        student = student.with_vocabulary(SOME_IDS)
    student = stirred(student)
    student.write(student.weights, tmp_path)
    batch = batch_of(source, student, steps=2)
    with torch.no_grad():
        predicted = student.predict(batch, None)
    plain_offer = Draws.offer
    monkeypatch.setattr(Runner, "draw_chains", lambda *_, **__: None)  # step by step, where each pass is seen

    def offer(
        draws: Draws, logits: Tensor, rows: Seq[int], paths: Seq[Seq[int]], *more: int, **by: bool
    ) -> HostChildren:
        children, firsts = (
            plain_offer(draws, logits, rows, paths, *more, **by),
            scripted.draft_tokens(draws, logits, rows, paths),
        )
        return replace(
            children, tokens=[[first, *rest[1:]] for first, rest in zip(firsts, children.tokens, strict=True)]
        )

    monkeypatch.setattr(Draws, "offer", offer)
    llm = LLM(str(TARGET), student.spec(tmp_path), speculation=Speculation(4), max_model_len=256)
    depths = Counter[int]()
    for i, text in enumerate(batch.texts):
        scripted = ScriptedDraft(text.tokens, random.Random(i))
        answer = llm.generate([list(text.tokens[: text.num_prompt])], SETTINGS.sampling(text.seed))[0]
        assert (*answer.prompt_token_ids, *answer.outputs[0].token_ids) == text.tokens
        for root, depth, logits in scripted.seen:
            is_read_again = len(predicted.logits) == 1  # a deeper draft token is the first one from a later root
            place = root - batch.first_root + depth * is_read_again
            if place < predicted.logits[0].shape[1]:
                depths[depth] += 1
                expected = predicted.logits[0 if is_read_again else depth][i, place]
                logits = logits if student.vocabulary is None else logits[student.vocabulary]
                both = expected.isfinite() & logits.isfinite()  # of a selector's candidates, the last may be tied
                assert both.sum() >= max(expected.isfinite().sum(), logits.isfinite().sum()) - 1
                assert torch.allclose(expected[both], logits[both], atol=1e-3), (root, depth)
    llm.close()
    assert min(depths[depth] for depth in range(min(4, student.most_depth or 4))) > 4, depths


def test_a_draft_tokens_confidence_is_the_same_in_training_as_when_serving(
    source: AnswerSource, tmp_path: Path
) -> None:
    student = stirred(BlockStudent.fresh(Blueprint.of(str(TARGET)), BLOCK, 0))
    student.write(student.weights, tmp_path)
    batch = batch_of(source, student)
    llm = LLM(str(TARGET), student.spec(tmp_path), max_model_len=256)
    assert isinstance(llm.drafter, BlockDrafter)
    assert llm.drafter.decoder.confidence is not None
    with torch.no_grad():
        states, predicted = student.states(batch, batch.roots)[0], student.predict(batch, None)
    for place, root in enumerate(batch.roots[0, :-5].tolist()):
        served = llm.drafter.decoder.confidence(states[place], batch.tokens[0, root : root + 5])
        learnt = torch.stack([each[0, place] for each in predicted.confidence]).sigmoid()
        assert torch.allclose(learnt, served, atol=1e-5)
    llm.close()


@pytest.mark.short("eagle")
@pytest.mark.parametrize(
    ("kind", "one_in"), [("block", 5), ("eagle", EAGLE_STEPS), ("mtp", MTP_STEPS)], ids=["block", "eagle", "mtp"]
)
def test_drafts_of_a_step_begin_at_some_roots_of_every_answer(source: AnswerSource, kind: str, one_in: int) -> None:
    """As many roots as draft each token about once, others in other steps; the distributions are those of all roots."""
    student = make_student(kind, Blueprint.of(str(TARGET)), SERVED[kind], 0)
    batch = batch_of(source, student)
    found = [student.predict(batch, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(found[0].roots, found[1].roots)
    assert not torch.equal(found[0].roots, found[2].roots)
    for text, own in zip(batch.texts, found[0].roots.tolist(), strict=True):
        assert len(set(own)) == len(own) == -(-batch.roots.shape[1] // one_in)
        assert len(set(own) & set(text.roots)) == min(len(own), len(text.roots))
    whole = student.predict(batch, None)
    for prediction in found:
        places = prediction.roots - batch.first_root
        for logits, every in zip(prediction.logits, whole.logits, strict=True):
            assert torch.allclose(logits, every[torch.arange(len(places))[:, None], places], atol=1e-4)


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
def test_first_draft_tokens_are_those_of_whole_drafts_from_every_root_of_a_text(
    source: AnswerSource, kind: str
) -> None:
    """Those that begin in a prompt are compared with the target's distribution there. In a part of the vocabulary
    that is the distribution over all tokens, normalised to sum to 1 within the part."""
    student = stirred(make_student(kind, Blueprint.of(str(TARGET)), SERVED[f"{kind}, some tokens"], 0))
    student = student.with_vocabulary(SOME_IDS)
    small = source_of(source.data, SETTINGS, student)
    batch, objective = (
        TextBatch.of([replace(text, num_prompt=1) for text in small.of_step(0, no_report)]),
        small.objective,
    )
    assert batch.first_root == 0 < small.of_step(0, no_report)[0].num_prompt - 1
    first = student.at_depth_1()
    assert first.weights is student.weights
    predicted = first.predict(batch, torch.Generator().manual_seed(0))
    assert len(predicted.logits) == 1
    assert torch.equal(predicted.roots, batch.roots)
    assert torch.allclose(predicted.logits[0], student.predict(batch, None).logits[0], atol=1e-4)
    exact = objective.target_law(batch, student.vocabulary)
    draft = objective.draft_law(student, batch)
    small.llm.close()
    assert draft is not None
    assert exact.exp().sum(-1).min() < 0.9
    assert torch.allclose(draft, exact.log_softmax(-1), atol=1e-3)


def test_answers_are_repeated_as_often_as_set_each_time_in_another_order(
    source: AnswerSource, adapter: Student
) -> None:
    """All answers of a group once in their order, then again in others; a step's depend on its number alone."""
    settings = replace(SETTINGS, steps=100, passes=3, max_tokens=4)
    small = source_of(source.data, settings, adapter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.train.settings.POOL", 9)
        steps = [[text.seed for text in small.of_step(step, no_report)] for step in range(18)]
        once = source_of(source.data, replace(SETTINGS, max_tokens=4), adapter)
        plain = [[text.seed for text in once.of_step(step, no_report)] for step in range(6)]
        once.llm.close()
        assert [[text.seed for text in small.of_step(step, no_report)] for step in (4, 13, 4)] == [
            steps[i] for i in (4, 13, 4)
        ]
    small.llm.close()
    assert steps[:3] == plain[:3]
    assert steps[9:12] == plain[3:]
    turns = [list(chain(*steps[i : i + 3])) for i in range(0, 18, 3)]
    assert sorted(turns[0]) == sorted(turns[1]) == sorted(turns[2])
    assert sorted(turns[3]) == sorted(turns[4]) == sorted(turns[5])
    assert len(set(map(tuple, turns))) == 6
    assert not set(turns[0]) & set(turns[3])
    assert replace(settings, steps=4).group_steps == 2, "no more answers are written than the steps learn from"


def test_a_cache_returns_equal_answers_and_reports_its_size_before_it_is_written(
    source: AnswerSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = AnswerCache.at(tmp_path, {"target": "x"}, 5_000_000)
    assert "will take up to 5.00 MB" in capsys.readouterr().err
    texts = source.of_step(1, no_report)
    cache.save(0, texts)
    found = AnswerCache.at(tmp_path, {"target": "x"}, 1).load(0)
    assert found is not None
    assert all(same(a, b) for a, b in zip(texts, found, strict=True))
    assert AnswerCache.at(tmp_path, {"target": "y"}, 1).load(0) is None
    bare = [replace(text, taps=text.taps[:, :0]) for text in texts]
    cache.save(1, bare)
    kept = cache.load(1)
    assert kept is not None
    assert all(same(a, b) for a, b in zip(bare, kept, strict=True))
    path = cache.path(0)
    path.write_bytes(path.read_bytes()[:-10])
    assert cache.load(0) is None
    with pytest.raises(InvalidRequest, match=r"cache: The cache .* are free\. Name a folder on a larger disk"):
        AnswerCache.at(tmp_path, {"target": "x"}, 10**18)
