"""A request that makes rounds fail, or whose processors raise, ends with a named error; others are not affected."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.test_failures import ENDS, NUM, ONCE, Fault, Sabotage, answers, assert_plain, break_, plain_tokens, stepped
from forerun.config import Verification
from forerun.engine.sequence import Status
from forerun.errors import ModelError, ModelOutputInvalid, OutOfMemory, RequestFailed, RoundFailed
from forerun.llm import LLM
from forerun.models.decoder import Outputs
from forerun.models.runner import Read, Runner
from forerun.output import RequestOutput
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from kit.assertions import assert_empty
from kit.checkpoints import SMALL, TARGET
from kit.engines import params_with, plain, plain_answer
from kit.oracles import exact_parts
from kit.texts import PROMPTS, story

pytestmark = pytest.mark.drafter_raises

PROCESSOR_ERRORS = [Sabotage("mine"), StopAsyncIteration(), *ENDS]


def breaks_on(runner: Runner, culprit: Callable[[Read], bool]) -> Callable[..., Outputs]:
    """A runner's `read` that raises if `culprit` holds for one of its reads."""
    honest = runner.read

    def read(reads: Sequence[Read], *args: Any, **kwargs: Any) -> Outputs:
        if any(map(culprit, reads)):
            raise Sabotage("its data breaks the pass")
        return honest(reads, *args, **kwargs)

    return read


@pytest.mark.parametrize("draft", [None, "ngram", f"model:{SMALL}"])
def test_the_request_that_breaks_rounds_is_found_and_fails_alone(
    draft: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes fail that read a certain token, which is in one request's prompt."""
    llm = LLM(str(TARGET), draft, dtype="float32", max_num_seqs=4)
    bad = llm.tokenizer.encode(PROMPTS[2])[-1]
    others = [i for i in range(NUM) if bad not in plain_answer(i)["samples"][0][1]]
    others = [i for i in others if bad not in llm.tokenizer.encode(PROMPTS[i % 5])]
    assert 2 not in others
    assert len(others) > 2
    breaking = breaks_on(llm.engine.runner, lambda read: bad in read.tokens)  # in a prompt, an answer or a draft
    monkeypatch.setattr(llm.engine.runner, "read", breaking)
    found = answers(llm)
    for i in others:
        answer = found[i]
        assert isinstance(answer, RequestOutput), repr(answer)
        assert exact_parts(answer) == plain_answer(i)
    failed = found[2]
    assert isinstance(failed, RoundFailed)
    assert isinstance(failed.__cause__, Sabotage)
    assert_empty(llm)


NUM_GOOD = 5
LOGITS = {"NaN": torch.nan, "nothing": -torch.inf}


@pytest.mark.short(
    "None-coupled-greedy-NaN",
    "model:*-coupled-top_p-nothing",
    "model:*-token-plain-NaN",
    "model:*-block-greedy-nothing",
)
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("law", [{}, {"temperature": 0}, {"top_p": 0.9}], ids=["plain", "greedy", "top_p"])
@pytest.mark.parametrize(
    ("draft", "verification"),
    [(None, "coupled"), *((f"model:{SMALL}", rule) for rule in ("coupled", "token", "block"))],
)
def test_a_request_whose_logits_are_invalid_fails_alone(
    draft: str | None, verification: Verification, law: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although NaN keys reach every row in the batch, masked or not, and a round names the first bad row it finds."""
    options: dict[str, Any] = {"kernels": "torch", "max_model_len": 96, "verification": verification}
    llm = LLM(str(TARGET), draft, dtype="float32", max_num_seqs=4, **options)
    params, other = (SamplingParams(**{"max_tokens": 20, "seed": i, "ignore_eos": True} | law) for i in (4, 9))
    expected, honest = (llm.generate(PROMPTS[0], each)[0].outputs[0].token_ids for each in (params, other))
    cache, read, broken = llm.engine.runner.cache, Runner.read, list[int]()

    def poisoned(self: Runner, reads: Sequence[Read], *others: Any, **named: Any) -> Outputs:
        late = [s.id for s in llm.engine.sequences.values() if s.request_id in broken and s.num_output >= NUM_GOOD]
        sick = [each.seq_id for each in reads if each.seq_id in late and self is llm.engine.runner]
        for seq_id in sick:
            run, size = cache.blocks.run(seq_id), cache.blocks.block_size
            for tensor in (cache.keys, cache.values):
                tensor[:, :, run.start * size : run.end * size] = LOGITS[kind]
        states = read(self, reads, *others, **named)
        judged = (each for each in reads for _ in each.judged)
        rows = [row for row, each in enumerate(judged) if each.seq_id in sick]
        states.logits[rows] = LOGITS[kind]
        return states

    monkeypatch.setattr(Runner, "read", poisoned)
    mate, culprit = llm.stream(PROMPTS[0], other), llm.stream(PROMPTS[0], params)
    begun, first = next(mate), next(culprit)
    broken.append(first.request_id)
    received = [*first.token_ids]
    with pytest.raises(
        ModelOutputInvalid, match="contain NaN, or are all -inf: check that its files are complete"
    ) as caught:
        received.extend(token for delta in culprit for token in delta.token_ids)
    assert isinstance(caught.value, ModelError)
    assert NUM_GOOD <= len(received) < 20
    tokens = tuple(token for delta in (begun, *mate) for token in delta.token_ids)
    assert len(tokens) == 20
    if verification == "coupled":
        assert tuple(received) == expected[: len(received)]
        assert tokens == honest
    assert cache.keys.isfinite().all()
    assert_empty(llm)


def test_if_memory_is_short_for_recovery_only_the_longest_requests_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with the longest texts end; the others are answered."""
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=4)
    engine, honest = llm.engine, llm.engine.runner.clear
    ended: list[list[int]] = []

    def clear() -> None:
        left = [len(s.tokens) for s in engine.sequences.values() if s.status is not Status.FINISHED]
        if len(left) > 4:
            ended.append(left)
            raise MemoryError
        honest()

    break_(llm, "runner.read", Fault(ONCE, MemoryError()), monkeypatch, late=True)
    monkeypatch.setattr(engine.runner, "clear", clear)
    found, expected = stepped(llm), plain_tokens()
    failed = [i for i in range(NUM) if isinstance(found[i], OutOfMemory)]
    assert len(failed) == 2
    assert 1 in failed  # its prompt is by far the longest
    assert [found[i] for i in range(NUM) if i not in failed] == [expected[i] for i in range(NUM) if i not in failed]
    assert [len(left) for left in ended] == [6, 6, 5, 5]  # everything is tried twice
    assert_empty(llm)
    assert stepped(llm) == expected


def test_if_memory_is_short_for_recovery_the_request_that_broke_a_round_alone_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although others are longer."""
    llm = LLM(str(TARGET), dtype="float32", max_num_seqs=4)
    engine, bad = llm.engine, llm.tokenizer.encode(PROMPTS[2])[-1]
    fault = Fault(lambda call: call > 0, MemoryError())  # not after the first round, which reads both texts
    monkeypatch.setattr(engine.runner, "read", breaks_on(engine.runner, lambda read: bad in read.tokens))
    long, short = (llm.requests.sequences(Request.of(PROMPTS[i], params_with(i)))[0] for i in (1, 2))
    assert len(long.tokens) > len(short.tokens)
    assert bad not in long.tokens
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "clear", fault.before(engine.runner.clear))
        for sequence in (short, long):
            engine.submit(sequence)
        errors: list[tuple[int, type[Exception]]] = []
        while not errors:
            errors = [(delta.seq_id, type(delta.error)) for delta in engine.step() if delta.error is not None]
    assert errors == [(short.id, OutOfMemory)]
    while engine.has_work:
        engine.step()
    assert long.tokens[long.num_prompt :] == plain_tokens()[1]
    assert_empty(llm)


def raising(error: BaseException, length: int) -> Callable[[Sequence[int], Tensor], Tensor]:
    def processor(tokens: Sequence[int], logits: Tensor) -> Tensor:
        if len(tokens) >= length:
            raise error
        return logits

    return processor


@pytest.mark.short("KeyboardInterrupt-9", "CancelledError-0")
@pytest.mark.parametrize("length", [0, 9])
@pytest.mark.parametrize("error", PROCESSOR_ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_in_a_requests_own_code_fails_that_request_alone(error: BaseException, length: int) -> None:
    """Exceptions that would end a program, a task or a loop elsewhere are raised as RequestFailed."""
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=4)
    params = [params_with(i) for i in range(NUM)]
    params[1] = params_with(1, logits_processors=[raising(error, length)], n=2)
    found = answers(llm, params)
    assert_plain([*found[:1], plain().generate([PROMPTS[1]], params_with(1))[0], *found[2:]])
    failed = found[1]
    if isinstance(error, Sabotage):
        assert failed is error
    else:
        assert type(failed) is RequestFailed
        assert failed.__cause__ is error
    assert_empty(llm)


def test_a_request_whose_draft_tokens_lead_to_invalid_logits_is_drafted_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else every second of its rounds would fail."""
    llm, num_failed = LLM(str(TARGET), f"model:{SMALL}", dtype="float32"), itertools.count()
    read = llm.engine.runner.read

    def failing(reads: Sequence[Read], *arguments: Any) -> Outputs:
        states = read(reads, *arguments)
        if any(len(each.judged) > 1 for each in reads):
            next(num_failed)
            states.logits.fill_(torch.nan)
        return states

    monkeypatch.setattr(llm.engine.runner, "read", failing)
    (answer,) = llm.generate([PROMPTS[0]], params_with(0), speculation=4)
    assert exact_parts(answer) == plain_answer(0)
    assert next(num_failed) == 1


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_the_same_prompt_is_answered_after_a_request_that_failed(draft: str | None) -> None:
    """The keys and values of a request that failed are zeroed, so no later text may start with them."""
    llm = LLM(str(TARGET), draft, dtype="float32")
    text = story(2 * llm.engine.runner.cache.blocks.block_size + 1, 0)
    with pytest.raises(Sabotage):
        llm.generate([text], params_with(0, logits_processors=[raising(Sabotage("mine"), len(text) + 4)]))
    assert not llm.engine.runner.cache.keys.any()
    (answer,), (expected,) = (each.generate([text], params_with(0)) for each in (llm, plain()))
    assert exact_parts(answer) == exact_parts(expected)


@pytest.mark.short("StopIteration", "SystemExit")
@pytest.mark.parametrize("error", PROCESSOR_ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_in_a_requests_own_code_fails_it_alone_without_an_event_loop(error: BaseException) -> None:
    """A KeyboardInterrupt is raised as it is, since it may be Ctrl-C. A concurrent stream goes on unaffected."""
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=4)
    stream = llm.stream(PROMPTS[0], params_with(0))
    deltas = [next(stream)]
    kind = type(error) if isinstance(error, Sabotage | KeyboardInterrupt) else RequestFailed
    with pytest.raises(kind):
        llm.generate(PROMPTS[1], params_with(1, logits_processors=[raising(error, 9)]))
    deltas += stream
    (expected,) = plain_answer(0)["samples"]
    assert tuple(token for delta in deltas for token in delta.token_ids) == expected[1]
    assert tuple(logprob for delta in deltas for logprob in delta.logprobs) == expected[3]
    assert_empty(llm)


def test_a_processor_that_asks_its_own_llm_is_refused() -> None:
    """The request would wait for itself."""
    llm = LLM(str(TARGET), dtype="float32")

    def nested(tokens: Sequence[int], logits: Tensor) -> Tensor:
        llm.generate("The", params_with(0))
        return logits

    with pytest.raises(Exception, match="cannot wait for an answer from the same engine"):
        llm.generate("The", params_with(0, logits_processors=[nested]))
    assert_empty(llm)


def test_a_cancelled_request_does_not_go_on_although_its_removal_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=4)
    engine = llm.engine
    cancelled, other = (llm.requests.sequences(Request.of(PROMPTS[i], params_with(i)))[0] for i in range(2))
    for sequence in (cancelled, other):
        engine.submit(sequence)
    engine.step()
    before = list(cancelled.tokens)
    break_(llm, "runner.hand_over", Fault(lambda call: call == 0), monkeypatch, late=False)
    with pytest.raises(Sabotage):
        engine.cancel(cancelled.request_id)
    while engine.has_work:
        engine.step()
    assert cancelled.tokens == before
    assert other.tokens[other.num_prompt :] == plain_tokens()[1]
    assert_empty(llm)
