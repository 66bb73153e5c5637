"""The drafter with another vocabulary: what its model reads, what it drafts, and the state of its cache."""

import math
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draft.rounds import Row, committed, draws_of
from draft.vocabularies import byte_level_copy, sentence_piece
from forerun.bench.material import shipped
from forerun.device import CPU, Placement
from forerun.draft.base import Budget, Committed
from forerun.draft.model.model import ModelDrafter
from forerun.draft.vocab.transcript import Transcriber, Transcript
from forerun.draft.vocab.translate import TranslatingDrafter, plan_translation, translated
from forerun.draft.vocab.vocabulary import shared_ids
from forerun.drafters import plan_drafter
from forerun.errors import UnknownDrafter, VocabularyMismatch
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import LogitsProcessor, SamplingParams
from kit.checkpoints import SMALL, TARGET
from law.drafters import context, spelled
from law.fuzz import rows_of

VOCAB = 512
FIXED = Placement(torch.device("cpu"), fixed=True)
PROMPTS = ["Once upon a time", "Lily and Tom went to the park", "naïve café, 你好 👩‍👧: The", "One day"]


@cache
def small(placement: Placement = CPU) -> Blueprint:
    """The reference drafter in byte-level tokens, with other ids."""
    return Blueprint.of(spelled("model:shared").removeprefix("model:"), dtype="float32", device=placement)


@cache
def transcriber() -> Transcriber:
    planned = plan_translation(context(), small())
    assert planned is not None
    return planned


def make(shared: bool, placement: Placement = CPU) -> TranslatingDrafter:
    return translated(small(placement).load(2048), VOCAB, transcriber(), shared)


def model_tokens(text: Sequence[int]) -> list[int]:
    """The draft model's tokens of a text that arrives at once."""
    transcript = Transcript()
    closed = transcriber().extend(transcript, text)
    return closed + transcriber().ending(transcript)


@cache
def reader(folder: Path) -> Runner:
    return Blueprint.of(str(folder), dtype="float32").load(1024)


def read_plainly(tokens: Sequence[int]) -> Tensor:
    """The model's logits after each of its tokens."""
    runner = reader(small().folder)
    runner.release([0])
    return runner.read([Read(0, list(tokens), judged=range(len(tokens)))]).logits


def cached_at_once(tokens: Sequence[int]) -> Tensor:
    """Keys and values of these tokens, read in one pass."""
    read_plainly(tokens)
    runner = reader(small().folder)
    runner.keep([0], [range(len(tokens))])
    return rows_of(runner, 0)


WORDS = ["Once", "upon", "there", "was", "naïve", "你好", "👩‍👧", "Lily's", "dog,", '"e\u0301"', "—", "he", "ran.\n"]

SPELLED_OUT = [" there", " little", " happy", " they were", " said", " wanted", " played"]


def some_text(length: int, seed: int) -> list[int]:
    """Words, letters and raw bytes by turns: characters begin and end anywhere, merges cross any boundary."""
    rng, letters = random.Random(seed), context().tokenizer.encoder(inside=True)
    text = [1]
    while len(text) < length:
        kind = rng.random()
        if kind < 0.5:
            text += context().tokenizer.encode(" ".join(rng.choices(WORDS, k=3)))
        elif kind < 0.8:
            text += [token for letter in rng.choice(SPELLED_OUT) for token in letters(letter)]
        else:
            text += [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 3))]
    return text[:length]


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_the_model_has_read_the_committed_text_after_any_history(
    shared: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After random rounds the model's text has the target's bytes, and its cache the bits of reading it at once."""
    rng, drafter, cuts = random.Random(seed), make(shared), []
    truncate = Runner.truncate

    def counting(runner: Runner, seq_id: int, length: int) -> None:
        cuts.append(runner.length(seq_id) - length)
        truncate(runner, seq_id, length)

    monkeypatch.setattr(Runner, "truncate", counting)
    texts = {s: some_text(5 + 12 * s, 10 * seed + s) for s in range(3)}
    coming = {s: some_text(300, 100 * seed + s)[1:] for s in range(3)}
    letters = context().tokenizer.encoder(inside=True)
    coming[0] = [token for letter in "".join(rng.choices(SPELLED_OUT, k=30)) for token in letters(letter)]
    drafter.observe(committed([Row(s, t) for s, t in texts.items()]))
    for _ in range(15):
        rows = [Row(s, list(texts[s])) for s in [0, *rng.sample([1, 2], rng.randint(0, 2))]]
        budgets = [Budget(rng.randint(1 - min(1, row.seq_id), 2), rng.randint(1, 2), 4) for row in rows]
        tree = drafter.propose(draws_of(rows, VOCAB, temperature=1.0), budgets).tree
        for b, row in enumerate(rows):
            chain = [token for token in tree.tokens[b, 1:].tolist() if token >= 0]
            if rng.random() < 0.3 and tree.width == 1 and row.seq_id:
                texts[row.seq_id] += chain[: rng.randint(0, len(chain))]
            for _ in range(rng.choice([1, 3]) if row.seq_id else 1):
                texts[row.seq_id].append(coming[row.seq_id].pop(0))
        drafter.observe(committed([Row(r.seq_id, texts[r.seq_id]) for r in rows], [len(r.text) - 1 for r in rows]))
        for seq_id, text in texts.items():
            following = drafter.model.sequences[seq_id]
            read = following.tokens(0)
            assert read == model_tokens(text)
            written = b"".join(transcriber().target.token_bytes[token] or b"" for token in text).removeprefix(b" ")
            assert transcriber().drafter.to_bytes(read) == written
            length = drafter.model.runner.length(seq_id)
            if length:
                assert torch.equal(rows_of(drafter.model.runner, seq_id), cached_at_once(read[:length]))
        drafter.model.runner.cache.check()
    assert cuts, "no merge changed tokens that were read"
    assert max(cuts) < 8, "more was removed from the cache than what might change"


def test_declared_laws_are_the_models_laws_on_shared_tokens() -> None:
    ids = shared_ids(transcriber().target, transcriber().drafter)
    rows = [Row(s, some_text(15 + 9 * s, s)) for s in range(2)]
    drafter = make(shared=True)
    drafter.observe(committed(rows))
    draft = drafter.propose(draws_of(rows, VOCAB, temperature=1.0, rejection=True), [Budget(3), Budget(2, 2, 4)])
    law = draft.tree.q
    assert law is not None
    paths = draft.tree.path_tokens()
    for b, row in enumerate(rows):
        for node in range(int(draft.tree.valid[b].sum())):
            at = int(law.row[b, node])
            if at < 0:
                continue
            drafted = [ids[token] for token in paths[b, node].tolist() if token >= 0]
            logits = read_plainly(model_tokens(row.text) + drafted)[-1]
            expected = torch.full((VOCAB,), -math.inf)
            expected[list(ids)] = logits[list(ids.values())]
            assert torch.allclose(law.dense(VOCAB)[at], expected.softmax(0), atol=1e-6)
    assert int((law.row >= 0).sum()) >= 4


def test_a_draft_encoded_again_is_the_models_greedy_text() -> None:
    for seed in range(4):
        text = context().tokenizer.encode(PROMPTS[seed])
        row, prompt_tokens = Row(seed, text), model_tokens(text)
        drafter = make(shared=False)
        drafter.observe(committed([row]))
        draft_tokens = drafter.propose(draws_of([row], VOCAB, temperature=1.0), [Budget(4)]).tree.tokens[0, 1:].tolist()
        written: list[int] = []
        while len(written) < 8 and transcriber().drafter.begin not in written:
            written.append(int(read_plainly(prompt_tokens + written)[-1].argmax()))
        assert 1 <= len(draft_tokens) <= 4
        assert transcriber().drafter.to_bytes(written).startswith(transcriber().target.to_bytes(draft_tokens))
        whole = context().tokenizer.encode(PROMPTS[seed] + transcriber().target.to_bytes(draft_tokens).decode())
        assert whole == [*text, *draft_tokens]


def test_the_models_end_token_becomes_the_targets() -> None:
    drafter, text = make(shared=False), context().tokenizer.encode("The end")
    begin, end = transcriber().drafter.begin, transcriber().drafter.end
    assert begin is not None
    assert end is not None
    drafter.observe(committed([Row(0, text)]))
    more = transcriber().drafter.encode(" of it", starts=False)
    tokens = context().tokenizer.encode("The end of it")[len(text) :]
    assert drafter.target_tokens(0, more, 9) == tokens[:-1], "the last token may change with more text"
    assert drafter.target_tokens(0, [*more, end, *more], 9) == [*tokens, 2]
    assert drafter.target_tokens(0, [*more, begin, *more], 9) == tokens, "a special token ends a word, too"
    assert drafter.target_tokens(0, [end], 9) == [2]
    assert drafter.target_tokens(0, [*more, end], 2) == tokens[:2]
    assert drafter.target_tokens(0, [-1], 9) == drafter.target_tokens(0, more, 0) == []


@pytest.mark.parametrize("shared", [True, False])
def test_a_failed_proposal_removes_its_tail(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    text = some_text(30, 0)
    drafter = make(shared)
    drafter.observe(committed([Row(0, text[:20])]))
    tail, rows = committed([Row(0, text)], [19]), [Row(0, text)]
    before = drafter.model.sequences[0].tokens(0)
    with monkeypatch.context() as patch:
        patch.setattr(ModelDrafter, "propose", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drafter.propose(draws_of(rows, VOCAB), [Budget(3)], tail)
    assert drafter.model.sequences[0].tokens(0) == before
    drafter.observe(committed(rows, [19]))
    assert drafter.model.sequences[0].tokens(0) == model_tokens(text)


def generated(llm: LLM, **changes: object) -> list[tuple[int, ...]]:
    params = [SamplingParams(**({"seed": i, "max_tokens": 12, "ignore_eos": True} | changes)) for i in range(4)]  # type: ignore[arg-type]
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params)]


@pytest.mark.short("0.8-True")
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_with_passes_of_fixed_shape_as_many_tokens_are_drafted_and_accepted(shared: bool, temperature: float) -> None:
    """Where chains are drawn on the device, draft tokens are translated there."""
    plain = generated(LLM(str(TARGET), dtype="float32"), temperature=temperature)
    found = []
    for placement in (CPU, FIXED):
        llm = LLM(str(TARGET), make(shared, placement), dtype="float32", speculation=4)
        assert generated(llm, temperature=temperature) == plain
        found.append((llm.stats.num_drafted, llm.stats.num_accepted))
    assert found[0] == found[1]
    assert found[0][1] > 8


@pytest.mark.parametrize("placement", [CPU, FIXED], ids=["cpu", "fixed"])
def test_accepted_draft_tokens_are_not_read_again(placement: Placement) -> None:
    text = context().tokenizer.encode("Once upon a time, there was a little")
    drafter = make(True, placement)
    drafter.observe(committed([Row(0, text)]))
    draft_tokens = drafter.propose(draws_of([Row(0, text)], VOCAB), [Budget(4)]).tree.tokens[0, 1:].tolist()
    drafter.observe(committed([Row(0, [*text, *draft_tokens[:3], 13])], [len(text) - 1]))
    assert drafter.model.runner.length(0) == len(model_tokens(text)) + 3
    drafter.model.runner.cache.check()


@pytest.mark.short("True-token")
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("shared", [True, False])
def test_under_rejection_rules_texts_do_not_depend_on_the_shape_of_passes(shared: bool, rule: str) -> None:
    texts = []
    for placement in (CPU, FIXED):
        llm = LLM(str(TARGET), make(shared, placement), dtype="float32", verification=rule, speculation=3)  # type: ignore[arg-type]
        texts.append(generated(llm))
        assert 0 < llm.stats.num_accepted < llm.stats.num_drafted
    assert texts[0] == texts[1]
    if not shared:
        assert texts[0] == generated(LLM(str(TARGET), dtype="float32", verification=rule))  # type: ignore[arg-type]


def test_forced_tokens_that_the_drafter_lacks_are_drafted_all_the_same() -> None:
    """A logits processor may force tokens that the drafter lacks, even siblings: drafting and reading go on."""
    unshared = sorted(set(range(3, VOCAB)) - set(shared_ids(transcriber().target, transcriber().drafter)))[:5]
    assert len(unshared) > 2

    def only_unshared(text: Sequence[int], logits: Tensor) -> Tensor:
        forced = torch.full_like(logits, -math.inf)
        forced[unshared] = torch.arange(len(unshared), dtype=logits.dtype) * 0.1
        return forced

    processor: LogitsProcessor = only_unshared
    plain = generated(LLM(str(TARGET), dtype="float32"), logits_processors=(processor,))
    drafter = make(shared=True)
    llm = LLM(str(TARGET), drafter, dtype="float32")
    for shape in ((3, 2, 12), (4, 1, 4)):
        rows = [Row(i, [1, 9 + i, 300]) for i in range(2)]
        lone = make(shared=True)
        lone.observe(committed(rows))
        params = SamplingParams(temperature=1.0, logits_processors=(processor,))
        draws = Draws([RowSampling(r.seq_id, params, 3, 0, r.text, 1) for r in rows], VOCAB)
        tree = lone.propose(draws, [Budget(*shape)] * 2).tree
        assert set(tree.tokens[tree.valid].tolist()) <= {300, *unshared}
        assert tree.depth == shape[0]
        for row in rows:
            assert len(lone.model.sequences[row.seq_id].tail) == len(lone.model.runner.tails[row.seq_id].parents)
        more = [Row(r.seq_id, [*r.text, *tree.path_tokens()[i, -1].tolist(), 5]) for i, r in enumerate(rows)]
        lone.observe(committed(more, [2, 2]))
        lone.model.runner.cache.check()
        again = make(shared=True)
        again.observe(committed(more))
        assert lone.model.sequences[0].tokens(0) == again.model.sequences[0].tokens(0)
    assert generated(llm, logits_processors=(processor,)) == plain


def test_a_row_without_readable_text_is_not_drafted() -> None:
    for shared in (True, False):
        drafter = make(shared)
        row = Row(0, [0])  # the model has no token for it: no text is left to read
        drafter.observe(committed([row]))
        assert drafter.outlook([0, 7]).limit == [0, 0]
        assert drafter.propose(draws_of([row, Row(7, [5])], VOCAB), [Budget(3)] * 2).tree.tokens.tolist() == [[0], [5]]
        drafter.observe(Committed([0], [0], [0, 1], [300]))
        assert drafter.propose(draws_of([Row(0, [0, 300])], VOCAB), [Budget(9)]).tree.depth > 0


def test_only_models_of_other_vocabularies_are_translated() -> None:
    def build(folder: Path) -> object:
        return plan_drafter(f"model:{folder}", context()).build(
            {f"model:{folder}": 256}, None, context().target.load(64)
        )

    assert isinstance(build(SMALL), ModelDrafter), "models with the target's vocabulary are not translated"
    near = build(small().folder)
    assert isinstance(near, TranslatingDrafter)
    assert near.model.shared is not None
    assert near.model.vocab_size == VOCAB


def test_in_a_cascade_it_drafts_for_a_model_of_the_targets_vocabulary() -> None:
    """It drafts several times in a round, each time after another tail."""
    plain = generated(LLM(str(TARGET), dtype="float32"), temperature=0.8)
    llm = LLM(str(TARGET), f"cascade[model:{small().folder},model:{SMALL}]", dtype="float32", speculation=5)
    alone = LLM(str(TARGET), f"model:{SMALL}", dtype="float32", speculation=5)
    for each in (llm, alone):
        assert generated(each, temperature=0.8) == plain
    assert llm.stats.num_accepted == alone.stats.num_accepted
    with pytest.raises(UnknownDrafter, match="with the target's tokenizer"):
        plan_drafter(f"cascade[ngram,model:{small().folder}]", context())


def test_with_too_few_shared_tokens_drafts_are_encoded_again(tmp_path: Path) -> None:
    folder = byte_level_copy(SMALL, tmp_path / "pieces", dropped=("Ġt", "he", "Ġa"))
    far = plan_drafter(f"model:{folder}", context()).build({f"model:{folder}": 256}, None, context().target.load(64))
    assert isinstance(far, TranslatingDrafter)
    assert far.model.shared is None
    assert far.model.vocab_size == Blueprint.of(str(folder)).config.vocab_size != VOCAB


@pytest.mark.parametrize("damage", ["missing", "no bytes"])
def test_a_drafter_whose_tokens_cannot_be_compared_is_refused(tmp_path: Path, damage: str) -> None:
    folder = byte_level_copy(SMALL, tmp_path / "copy")
    if damage == "missing":
        (folder / "tokenizer.json").unlink()
    else:
        words = sentence_piece(400)._backend
        words.decoder = None
        words.save(str(folder / "tokenizer.json"))
    with pytest.raises(VocabularyMismatch) as error:
        plan_drafter(f"model:{folder}", context())
    unusable = "tokenizer.json" if damage == "missing" else "bytes"
    for part in (str(folder), str(context().target.folder), "ngram", unusable):
        assert part in str(error.value)


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_bundled_draft_of_1024_tokens_is_accepted_about_half_as_often_as_the_familys_or_more(
    temperature: float,
) -> None:
    """On held-out code, greedy and sampled; measured at 0.6 to 0.7. The output is that of plain decoding."""
    prompts = [str(passage.prompt) for passage in shipped("code")]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=64, ignore_eos=True) for i in range(8)]
    rates, plain = [], None
    for draft in (None, "model:stdlib-draft", "model:stdlib-draft-1024"):
        llm = LLM("stdlib", draft, dtype="float32", max_num_seqs=8, speculation=4)
        answers = [result.outputs[0].token_ids for result in llm.generate(prompts, params)]
        plain = plain or answers
        assert answers == plain
        rates.append(llm.stats.acceptance_rate)
    _, family, foreign = rates
    assert family is not None
    assert foreign is not None
    assert 0.45 * family < foreign < family
