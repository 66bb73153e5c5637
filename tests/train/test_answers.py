"""What students learn from: the target's states are those that serving shows a drafter, in any batch."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forerun.cache.paged import PagedCache
from forerun.config import Speculation
from forerun.control.measured import MeasuredDepth
from forerun.draft.base import Committed
from forerun.draft.model.model import ModelDrafter
from forerun.engine.sequence import Sequence
from forerun.errors import InvalidRequest
from forerun.heads.adapter.drafter import EarlyExitDrafter
from forerun.heads.adapter.student import AdapterStudent
from forerun.heads.block.drafter import BlockDrafter
from forerun.heads.block.format import CONFIDENCE, MARKOV_W2, SUCCESSORS
from forerun.heads.block.network import BlockDecoder
from forerun.heads.block.student import BlockStudent
from forerun.heads.eagle.network import EagleDecoder
from forerun.heads.eagle.student import STEPS as EAGLE_STEPS
from forerun.heads.eagle.student import EagleStudent
from forerun.heads.fresh import NORM
from forerun.heads.medusa.network import MedusaHeads
from forerun.heads.medusa.student import MedusaStudent
from forerun.heads.mtp.network import MtpDecoder
from forerun.heads.mtp.student import STEPS as MTP_STEPS
from forerun.heads.mtp.student import MtpStudent
from forerun.heads.student import Student, StudentSizes, TargetText, TextBatch
from forerun.llm import LLM
from forerun.models.batch import TokenBatch
from forerun.models.decoder import Decoder, Hidden
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from forerun.train.answers import TRAINED, AnswerCache, AnswerSource
from forerun.train.kinds import DraftModelStudent
from forerun.train.settings import TrainSettings
from kit.checkpoints import TARGET
from train.material import quiet, read_prompts, source_of, write_prompts

SETTINGS = TrainSettings(steps=4, batch=3, max_tokens=20, held_out=2, temperature=0.8)
EXIT = 2
BLOCK = StudentSizes(layers=1, mlp=48, block=5)


@pytest.fixture(scope="module")
def adapter() -> AdapterStudent:
    """An adapter that does something."""
    student = AdapterStudent.fresh(Blueprint.of(str(TARGET)), StudentSizes(exit=EXIT, layers=2, mlp=48), 0)
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in student.weights.values():
            if tensor.dim() == 2:
                tensor.copy_(torch.randn(tensor.shape, generator=dice) * 0.1)
        student.weights[NORM].mul_(1.1)
    return student


@pytest.fixture(scope="module")
def source(adapter: AdapterStudent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnswerSource]:
    data = read_prompts([write_prompts(tmp_path_factory.mktemp("data"))], SETTINGS)
    found = source_of(data, SETTINGS, adapter)
    yield found
    found.llm.close()


def test_answers_are_drafted_as_far_as_that_pays(source: AnswerSource) -> None:
    """The engine is built without a drafter, and is given the recorder's later."""
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
    """Whether it was drafted, in how many passes and beside whom does not matter; nor do the tokens depend on it."""
    plain = LLM(str(TARGET), max_model_len=256, max_num_seqs=1)
    for step, texts in ((0, source.of_step(0, quiet)), (3, source.of_step(3, quiet))):
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


def test_answers_depend_on_their_number_alone(source: AnswerSource) -> None:
    """Asked for in another order, in groups of another size."""
    alone = [source.written([source.prompt(i)], TRAINED, [i], quiet)[0] for i in (7, 4)]
    third, second = source.of_step(2, quiet), source.of_step(1, quiet)
    assert same(alone[0], third[1])
    assert same(alone[1], second[1])
    seeds = {text.seed for step in range(4) for text in source.of_step(step, quiet)}
    assert len(seeds | {text.seed for text in source.held_out(quiet)}) == 14


def test_every_prompt_is_answered_before_any_is_answered_again(source: AnswerSource) -> None:
    count = len(source.data.train)
    epochs = [[source.prompt(i) for i in range(e * count, (e + 1) * count)] for e in range(2)]
    assert all(sorted(epoch) == sorted(source.data.train) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.full
def test_a_sequence_that_is_sent_back_is_recorded_from_its_start(source: AnswerSource, adapter: AdapterStudent) -> None:
    """In a cache that most of another sequence fills, so that not all have room."""
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
    small.llm.engine.submit = lambda s, hear=None: (sequences.append(s), submitted(s, hear))[1]  # type: ignore[method-assign,func-returns-value]
    found = small.written(prompts, TRAINED, numbers, quiet)
    small.llm.close()
    expected = source.written(prompts, TRAINED, numbers, quiet)
    source.settings = SETTINGS
    assert sum(s.num_preempted for s in sequences) > 0
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def served(draft: str, prompt: Seq[int], seed: int) -> tuple[LLM, list[int]]:
    """An answer with a drafter, four guesses a round."""
    llm = LLM(str(TARGET), draft, speculation=Speculation(4), max_model_len=256)
    answer = llm.generate([list(prompt)], SETTINGS.sampling(seed))[0]
    return llm, [*answer.prompt_token_ids, *answer.outputs[0].token_ids]


def test_an_adapter_reads_in_training_what_it_reads_when_serving(
    source: AnswerSource, adapter: AdapterStudent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors that enter it, to the bit: those of final text, and those of guesses that became final."""
    adapter.write(adapter.weights, tmp_path)
    shown: dict[int, Tensor] = {}  # by position
    logits: dict[int, Tensor] = {}
    tokens: dict[int, int] = {}
    plain_read = Runner.read

    def reading(own: Runner, reads: list[Read], *rest: object, **more: object) -> object:
        inputs = more.get("inputs")
        starts = [
            own.length(r.seq_id) + len(own.tails[r.seq_id].parents if r.seq_id in own.tails else ()) for r in reads
        ]
        states = plain_read(own, reads, *rest, **more)  # type: ignore[arg-type]
        if isinstance(inputs, Tensor):
            (read,), (start,) = reads, starts
            for i, token in enumerate(read.tokens):
                shown[start + i], tokens[start + i] = inputs[i].clone(), token
            for row, i in enumerate(read.judged):
                logits[start + i] = states.logits[row].clone()
        return states

    monkeypatch.setattr(Runner, "read", reading)
    text = source.of_step(0, quiet)[0]
    llm, served_tokens = served(adapter.spec(tmp_path), text.tokens[: text.num_prompt], text.seed)
    assert isinstance(llm.drafter, EarlyExitDrafter)
    assert llm.drafter.adapter is llm.drafter.runner
    assert tuple(served_tokens) == text.tokens
    batch = TextBatch.of([text, *source.of_step(1, quiet)])  # others beside it, longer or shorter
    inputs, predicted = adapter.inputs(batch)[0], adapter.predict(batch, None)
    assert [tokens[place] for place in range(len(text.tokens) - 1)] == list(text.tokens[:-1])
    for place in range(len(text.tokens) - 1):
        assert torch.equal(shown[place], inputs[place])
    judged = [place for place in logits if batch.first_root <= place < len(text.tokens) - 1]
    assert len(judged) > 5
    for place in judged:
        assert torch.allclose(predicted.logits[0][0, place - batch.first_root], logits[place], atol=1e-3)
    llm.close()


def test_a_draft_model_reads_in_training_what_it_reads_when_serving(
    source: AnswerSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens from position 0 on, and the same logits behind them."""
    student = DraftModelStudent.fresh(Blueprint.of(str(TARGET)), StudentSizes(layers=2, hidden=32, heads=2, mlp=64), 5)
    student.write(student.weights, tmp_path)
    seen: list[Committed] = []
    plain_observe = ModelDrafter.observe

    def observing(own: ModelDrafter, news: Committed) -> None:
        seen.append(news)
        plain_observe(own, news)

    monkeypatch.setattr(ModelDrafter, "observe", observing)
    text = source.of_step(0, quiet)[1]
    llm, _ = served(student.spec(tmp_path), text.tokens[: text.num_prompt], text.seed)
    batch = TextBatch.of(source.of_step(0, quiet))
    told = [token for news in seen for token in news.tokens]
    assert told == batch.read[1, : len(told)].tolist()
    assert len(told) == len(text.tokens) - 1
    assert isinstance(llm.drafter, ModelDrafter)
    runner = llm.drafter.runner
    logits = runner.read([Read(77, told, judged=range(batch.first_root, len(told)))]).logits
    found = student.predict(batch, None).logits[0][1, : len(logits)]
    assert torch.allclose(found, logits, atol=1e-3)
    llm.close()


@pytest.mark.short("True")
@pytest.mark.parametrize("hydra", [False, True])
def test_medusa_reads_in_training_what_it_reads_when_serving(
    source: AnswerSource, hydra: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states, to the bit, and the tokens between, where the guesses before are the text's; and the same logits."""
    student = MedusaStudent.fresh(Blueprint.of(str(TARGET)), StudentSizes(heads=3, hydra=hydra), 0)
    student.write(student.weights, tmp_path)
    asked: list[tuple[int, Tensor, Tensor, Tensor]] = []
    plain_logits = MedusaHeads.logits

    def noting(own: MedusaHeads, head: int, states: Tensor, tokens: Tensor) -> Tensor:
        found = plain_logits(own, head, states, tokens)
        asked.append((head, states.clone(), tokens.clone(), found))
        return found

    monkeypatch.setattr(MedusaHeads, "logits", noting)
    small = source_of(source.data, SETTINGS, student)
    text = small.of_step(0, quiet)[0]
    llm, tokens = served(student.spec(tmp_path), text.tokens[: text.num_prompt], text.seed)
    llm.close()
    assert tuple(tokens) == text.tokens
    batch = TextBatch.of([text, *small.of_step(1, quiet)])
    inputs = [student.inputs(batch, head)[0] for head in range(3)]
    predicted, width, num_seen = student.predict(batch, None), batch.taps.shape[-1], 0
    for head, states, seen, logits in asked:
        begun = [r for r in text.roots if torch.equal(inputs[head][r - batch.first_root, :width], states[0])]
        for root in begun:
            if seen[0].tolist() == list(text.tokens[root : root + 1 + head]):
                num_seen += 1
                place = root - batch.first_root
                assert torch.allclose(predicted.logits[head][0, place], logits[0], atol=1e-3)
        assert begun
    assert num_seen > 10
    small.llm.close()


@pytest.mark.short("eagle", "mtp, portable")
@pytest.mark.parametrize("kind", ["eagle", "eagle, shared head", "mtp", "mtp, portable"])
def test_layers_on_states_read_in_training_what_they_read_when_serving(
    kind: str, source: AnswerSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states beside final tokens and roots, and where guesses came true their own outputs beside them."""
    target, is_mtp = Blueprint.of(str(TARGET)), kind.startswith("mtp")
    sizes = StudentSizes(mlp=48, portable=kind == "mtp, portable" or None, shared_head="shared" in kind or None)
    reader, learner = (MtpDecoder, MtpStudent) if is_mtp else (EagleDecoder, EagleStudent)
    student: Student = learner.fresh(target, sizes, 0)
    student.write(student.weights, tmp_path)
    shown: list[tuple[int, int, Tensor]] = []  # position, token, state
    plain_forward = reader.forward

    def reading(own: Decoder, batch: TokenBatch, cache: PagedCache, **more: Tensor) -> Hidden:
        shown.extend(zip(batch.positions.tolist(), batch.tokens.tolist(), more["inputs"].clone(), strict=True))
        return plain_forward(own, batch, cache, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "forward", reading)
    monkeypatch.setattr(Runner, "draw_chains", lambda *_: None)  # step by step, where each pass is seen
    small = source_of(source.data, SETTINGS, student)
    text = small.of_step(0, quiet)[0]
    llm, tokens = served(student.spec(tmp_path), text.tokens[: text.num_prompt], text.seed)
    llm.close()
    assert tuple(tokens) == text.tokens
    inputs: list[dict[int, Tensor]] = []  # of each step, the first text's by position
    plain_step = learner.step

    def learning(
        own: Student, embedded: Tensor, states: Tensor, places: Tensor, past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        positions = (places[0] + len(inputs)).tolist()
        inputs.append(dict(zip(positions, states[0].detach(), strict=True)))
        output: Tensor = plain_step(own, embedded, states, places, past)
        return output

    monkeypatch.setattr(learner, "step", learning)
    student.predict(TextBatch.of([text, *small.of_step(1, quiet)]), None)
    small.llm.close()
    final, num_guesses = set(), 0
    for position, token, state in shown:
        close = [position in states and torch.allclose(states[position], state, atol=1e-4) for states in inputs]
        if close[0] and token == text.tokens[position + 1]:
            final.add(position)
        num_guesses += any(close[1:])
    assert final >= set(range(len(text.tokens) - 2))
    assert num_guesses > 10


@pytest.mark.short("Markov", "portable")
@pytest.mark.parametrize(
    "shape",
    [BLOCK, replace(BLOCK, selector_rank=8), replace(BLOCK, markov_rank=8, portable=True)],
    ids=["Markov", "selector", "portable"],
)
def test_a_block_reads_in_training_what_it_reads_when_serving(
    source: AnswerSource, shape: StudentSizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of all text before a root, to the bit, and from them the same block, guess by guess."""
    student = BlockStudent.fresh(Blueprint.of(str(TARGET)), shape, 0)
    dice = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name in {MARKOV_W2, SUCCESSORS, CONFIDENCE} & set(student.weights):
            student.weights[name].copy_(torch.randn(student.weights[name].shape, generator=dice))
    student.write(student.weights, tmp_path)
    read: list[Tensor] = []
    drawn: list[tuple[Tensor, Tensor]] = []
    plain_fuse, plain_states = BlockDecoder.fuse, BlockDecoder.states

    def fusing(own: BlockDecoder, states: Tensor) -> Tensor:
        read.append(states.clone())
        return plain_fuse(own, states)

    def noting(own: BlockDecoder, hidden: Tensor) -> Tensor:
        drawn.append((torch.cat(read), plain_states(own, hidden)))
        return drawn[-1][1]

    monkeypatch.setattr(BlockDecoder, "fuse", fusing)
    monkeypatch.setattr(BlockDecoder, "states", noting)
    small = source_of(source.data, SETTINGS, student)
    text = small.of_step(0, quiet)[0]
    llm, tokens = served(student.spec(tmp_path), text.tokens[: text.num_prompt], text.seed)
    assert tuple(tokens) == text.tokens
    batch = TextBatch.of([text, *small.of_step(1, quiet)])
    states, predicted = student.states(batch, batch.roots)[0], student.predict(batch, None)
    assert len(drawn) > 5
    for shown, found in drawn:
        root = len(shown)
        assert torch.equal(shown, batch.taps[0, :root])
        assert torch.allclose(found, states[root - batch.first_root, : len(found)], atol=1e-4)
    assert isinstance(llm.drafter, BlockDrafter)
    heads, head = llm.drafter.heads, llm.engine.runner.decoder.head
    assert heads.after is not None
    assert heads.confidence is not None
    for root in range(batch.first_root, len(text.tokens) - 6):
        own, before = states[root - batch.first_root], torch.tensor(text.tokens[root : root + 5])
        for depth, logits in enumerate(heads.after(head(own), own, before)):
            assert torch.allclose(predicted.logits[depth][0, root - batch.first_root], logits, atol=1e-3)
        told = torch.stack([each[0, root - batch.first_root] for each in predicted.confidence]).sigmoid()
        assert torch.allclose(told, heads.confidence(own, before), atol=1e-5)
    llm.close()
    small.llm.close()


def students_of_drafts(target: Blueprint) -> list[tuple[Student, int]]:
    """One of each kind that learns from some roots, and of how many places one is a root."""
    return [
        (BlockStudent.fresh(target, BLOCK, 0), 5),
        (EagleStudent.fresh(target, StudentSizes(mlp=48, shared_head=True), 0), EAGLE_STEPS),
        (MtpStudent.fresh(target, StudentSizes(mlp=48), 0), MTP_STEPS),
    ]


@pytest.mark.short("eagle")
@pytest.mark.parametrize("number", range(3), ids=["block", "eagle", "mtp"])
def test_drafts_of_a_step_begin_at_some_roots_of_every_answer(source: AnswerSource, number: int) -> None:
    """As many as guess each token about once, others in other steps; the laws are those that all roots have there."""
    student, one_in = students_of_drafts(Blueprint.of(str(TARGET)))[number]
    small = source_of(source.data, SETTINGS, student)
    batch = TextBatch.of(small.of_step(0, quiet))
    small.llm.close()
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


def test_answers_are_learnt_from_as_often_as_asked_in_orders_of_their_own(source: AnswerSource) -> None:
    """All answers of a group once in their order, then again in others; a step's depend on its number alone."""
    settings = replace(SETTINGS, steps=100, passes=3, max_tokens=4)
    small = source_of(source.data, settings, adapter_of_nothing())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.train.settings.POOL", 9)
        steps = [[text.seed for text in small.of_step(step, quiet)] for step in range(18)]
        once = source_of(source.data, replace(SETTINGS, max_tokens=4), adapter_of_nothing())
        plain = [[text.seed for text in once.of_step(step, quiet)] for step in range(6)]
        once.llm.close()
        assert [[text.seed for text in small.of_step(step, quiet)] for step in (4, 13, 4)] == [
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


def adapter_of_nothing() -> AdapterStudent:
    """A student of which only the taps count."""
    return AdapterStudent.fresh(Blueprint.of(str(TARGET)), StudentSizes(exit=EXIT, mlp=8), 0)


def test_a_cache_gives_back_the_very_same_answers_and_says_its_size_first(
    source: AnswerSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = AnswerCache.at(tmp_path, {"target": "x"}, 5_000_000)
    assert "will take up to 5.00 MB" in capsys.readouterr().err
    texts = source.of_step(1, quiet)
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
    with pytest.raises(InvalidRequest, match=r"cache: The cache .* are free\. Name a folder with more room"):
        AnswerCache.at(tmp_path, {"target": "x"}, 10**18)
