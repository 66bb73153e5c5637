"""Whatever raises in a round, and wherever: answers are those of plain decoding, or end with a named error.

A drafter that fails repeatedly is disabled; a request with which rounds fail ends; other requests are not affected. No
request waits for ever: every wait here has a limit.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from forerun.accept.delta import Delta
from forerun.async_llm import AsyncLLM
from forerun.control.controller import FixedDepth
from forerun.draft.base import Committed
from forerun.engine import engine as engine_module
from forerun.engine.recovery import STRIKES
from forerun.engine.sequence import ActiveSequences, Status
from forerun.engine.sequence import Sequence as TextSequence
from forerun.errors import OutOfMemory, RankLost, RequestFailed, RoundFailed, UnsupportedModel
from forerun.llm import LLM
from forerun.models.decoder import Outputs
from forerun.models.runner import Read
from forerun.output import RequestOutput
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from kit.assertions import assert_empty
from kit.checkpoints import SMALL, TARGET
from kit.engines import PATIENCE_S, params_with, plain_answer
from kit.oracles import exact_parts
from kit.texts import PROMPTS

pytestmark = pytest.mark.drafter_raises

NUM = 6


class Sabotage(Exception):
    """The error that tests raise on purpose."""


When = Callable[[int], bool]
ONCE: When = lambda call: call == 4  # noqa: E731
NOW_AND_THEN: When = lambda call: call % 5 == 4  # noqa: E731
ALWAYS: When = lambda call: True  # noqa: E731
ENDS = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit(), StopIteration(), BaseException()]
TIMES = {"once": ONCE, "now and then": NOW_AND_THEN, "always": ALWAYS}


@dataclass
class Fault:
    """A callable that raises in the calls that `when` selects."""

    when: When
    error: BaseException = field(default_factory=lambda: Sabotage("on purpose"))
    calls: itertools.count[int] = field(default_factory=itertools.count)
    num_raised: int = 0

    def __call__(self) -> None:
        if self.when(next(self.calls)):
            self.num_raised += 1
            raise self.error

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that may raise before it calls `call`."""

        def faulty(*args: Any, **kwargs: Any) -> Any:
            self()
            return call(*args, **kwargs)

        return faulty

    def after(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that may raise after it called `call`."""

        def faulty(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            self()
            return result

        return faulty


Answers = list[RequestOutput | BaseException]


async def side_by_side(front: AsyncLLM, params: Sequence[SamplingParams]) -> Answers:
    """The answers or errors of concurrent requests in an event loop."""
    asked = [front.generate(PROMPTS[i % 5], each) for i, each in enumerate(params)]
    return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE_S)


def answers(llm: LLM, params: Sequence[SamplingParams] = tuple(map(params_with, range(NUM)))) -> Answers:
    """The answers or errors of concurrent requests, in a new event loop."""

    async def main() -> Answers:
        async with AsyncLLM(llm) as front:
            return await side_by_side(front, params)

    return asyncio.run(main())


def assert_plain(found: Sequence[RequestOutput | BaseException]) -> None:
    for answer, expected in zip(found, map(plain_answer, range(NUM)), strict=True):
        assert isinstance(answer, RequestOutput), repr(answer)
        assert exact_parts(answer) == expected


def break_(llm: LLM, where: str, fault: Fault, monkeypatch: pytest.MonkeyPatch, late: bool = True) -> None:
    """Let a step of the round, its drafter or its controller raise, before or after its work."""
    owner: Any = llm.engine
    *parts, name = where.split(".")
    for part in parts:
        owner = getattr(owner, part)
    owners = {"verify": engine_module, "delta": TextSequence, "settle": ActiveSequences}
    owner = type(owner) if parts == ["drafter"] else owners.get(name, owner)
    call = getattr(owner, name)
    monkeypatch.setattr(owner, name, fault.after(call) if late else fault.before(call))


ROUND = ["plan", "draft", "run_target", "accept", "runner.read", "runner.keep", "verify", "delta", "active.settle"]
DRAFTING = [f"drafter.{name}" for name in ("propose", "observe", "forget", "outlook")]
CONTROLLING = [f"controller.{name}" for name in ("budgets", "admit", "record")]


@pytest.mark.short(
    "None-runner.read-after it",
    "None-accept-before its work",
    "model:*-draft-after it",
    "model:*-verify-before its work",
    "model:*-controller.record-after it",
)
@pytest.mark.parametrize("late", [False, True], ids=["before its work", "after it"])
@pytest.mark.parametrize(
    ("draft", "where"),
    [*((None, where) for where in ROUND if where != "draft"), *((f"model:{SMALL}", w) for w in ROUND + CONTROLLING)],
)
def test_a_round_that_fails_once_changes_no_answer(
    draft: str | None, where: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it fails before or after its computation, answers and log-probabilities are equal to the bit."""
    fault = Fault(lambda call: call == (4 if where in CONTROLLING else 9))
    llm = LLM(str(TARGET), draft, dtype="float32", max_num_seqs=4, speculation=4)
    break_(llm, where, fault, monkeypatch, late)
    found = answers(llm)
    assert fault.num_raised == 1
    assert_plain(found)
    assert_empty(llm)


@pytest.mark.short(
    "drafter.propose-once-Sabotage", "drafter.forget-always-Sabotage", "drafter.observe-now and then-CancelledError"
)
@pytest.mark.parametrize("error", [Sabotage("on purpose"), *ENDS], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("where", DRAFTING)
def test_a_failing_drafter_changes_no_answer_and_is_disabled(
    where: str, when: str, error: BaseException, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that goes on failing is disabled with a warning; so is one that cannot forget."""
    fault = Fault(TIMES[when], error)
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=4, speculation=4)
    break_(llm, where, fault, monkeypatch)
    for _ in range(2):
        assert_plain(answers(llm))
    dismissed, cannot_forget = llm.engine.drafter is None, where == "drafter.forget"
    assert dismissed == (cannot_forget or fault.num_raised == STRIKES)
    assert 0 < fault.num_raised <= (1 if cannot_forget else STRIKES)
    assert dismissed or when == "once"
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("forerun")]
    assert len(messages) == fault.num_raised
    assert all("the drafter ngram" in line or "The drafter ngram" in line for line in messages)
    assert dismissed == ("switched off" in messages[-1])
    assert_empty(llm)


def test_a_named_error_of_a_drafter_disables_it_at_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=4, speculation=4)
    break_(llm, "drafter.propose", Fault(ONCE, UnsupportedModel("this will not do")), monkeypatch)
    assert_plain(answers(llm))
    assert llm.engine.drafter is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"


@pytest.mark.parametrize("where", CONTROLLING)
def test_a_controller_that_always_fails_changes_no_answer(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(ALWAYS)
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=4, controller=FixedDepth())
    break_(llm, where, fault, monkeypatch, late=False)
    assert_plain(answers(llm))
    assert fault.num_raised > 0
    assert_empty(llm)


def test_if_every_pass_fails_every_request_ends_with_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """All samples end; and once passes work again, the engine answers."""
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=4)
    with monkeypatch.context() as patch:
        break_(llm, "runner.read", Fault(ALWAYS), patch, late=False)
        found = answers(llm, [params_with(i, n=1 + i % 3) for i in range(NUM)])
        assert all(isinstance(answer, RoundFailed) for answer in found)
        with pytest.raises(RoundFailed, match="rounds with it raise Sabotage, even without others"):
            llm.generate(list(PROMPTS))
        assert_empty(llm)
    assert_plain(answers(llm))


def stepped(llm: LLM) -> list[list[int] | Exception]:
    """The tokens or errors of requests for which this loop steps the engine."""
    sequences = [llm.requests.sequences(Request.of(PROMPTS[i % 5], params_with(i)))[0] for i in range(NUM)]
    found: dict[int, list[int] | Exception] = {sequence.id: [] for sequence in sequences}
    for sequence in sequences:
        llm.engine.submit(sequence)
    for _ in range(1000):
        for delta in llm.engine.step():
            tokens = found[delta.seq_id]
            assert isinstance(tokens, list), "a delta after the last"
            found[delta.seq_id] = delta.error or [*tokens, *delta.token_ids]
    assert not llm.engine.has_work
    return [found[sequence.id] for sequence in sequences]


def plain_tokens() -> list[list[int]]:
    """The tokens of the plain answers."""
    return [list(each["samples"][0][1]) for each in map(plain_answer, range(NUM))]


@pytest.mark.parametrize("draft", [None, f"model:{SMALL}"], ids=["plain", "drafted"])
@pytest.mark.parametrize("where", ["runner.clear", "scheduler.restart"])
def test_a_recovery_that_fails_once_changes_no_answer(
    where: str, draft: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(TARGET), draft, dtype="float32", max_num_seqs=4)
    break_(llm, "runner.read", Fault(ONCE, MemoryError()), monkeypatch, late=True)
    fault = Fault(lambda call: call == 0, MemoryError())
    break_(llm, where, fault, monkeypatch, late=False)
    assert stepped(llm) == plain_tokens()
    assert fault.num_raised == 1
    assert_empty(llm)


def test_committed_tokens_are_delivered_although_recovery_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the delivered tokens are the last ones of a text that ends in that round."""
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=4)
    fault = Fault(lambda call: call in (0, 1), MemoryError())
    honest, observe = llm.engine.runner.clear, llm.engine.drafter.observe
    decided: list[int] = []

    def observe_and_break(news: Committed) -> None:
        observe(news)
        if not decided and any(s.status is Status.FINISHED for s in llm.engine.sequences.values()):
            decided.extend(s.id for s in llm.engine.sequences.values() if s.status is Status.FINISHED)
            monkeypatch.setattr(llm.engine.runner, "clear", fault.before(honest))
            raise MemoryError

    monkeypatch.setattr(llm.engine.drafter, "observe", observe_and_break)
    found, expected = stepped(llm), plain_tokens()
    assert decided
    assert fault.num_raised == 2
    failed = [i for i in range(NUM) if isinstance(found[i], OutOfMemory)]
    assert len(failed) == 1
    assert [found[i] for i in range(NUM) if i not in failed] == [expected[i] for i in range(NUM) if i not in failed]
    assert_empty(llm)


def test_an_engine_that_cannot_recover_ends_requests_and_later_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread lives on, also for requests that arrive while memory is short; cancelling works then, too."""
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=4)
    lacking = Fault(ALWAYS, MemoryError())

    async def main() -> None:
        async with AsyncLLM(llm) as front:
            params = list(map(params_with, range(NUM)))
            with monkeypatch.context() as patch:
                for where in ("runner.read", "runner.clear"):
                    break_(llm, where, lacking, patch, late=True)
                for _ in range(2):
                    assert [type(answer) for answer in await side_by_side(front, params)] == [OutOfMemory] * NUM
                given_up = asyncio.create_task(front.generate(PROMPTS[0], params_with(0)))
                await asyncio.sleep(0)
                given_up.cancel()
            assert_plain(await side_by_side(front, params))
            assert front.thread.is_alive()

    asyncio.run(main())
    assert lacking.num_raised > 0
    assert_empty(llm)


@pytest.mark.parametrize("cleared", [True, False])
def test_a_drafter_is_blamed_only_if_a_round_without_it_succeeds(
    cleared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not if the requests are cancelled before, but also if the last of them is."""
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=4)
    break_(llm, "runner.read", Fault(lambda call: call == 3), monkeypatch)
    sequences = [llm.requests.sequences(Request.of(PROMPTS[i], params_with(i)))[0] for i in range(2)]
    for sequence in sequences:
        llm.engine.submit(sequence)
    while llm.engine.recovery.search is None:
        llm.engine.step()
    search = llm.engine.recovery.search
    if cleared:
        sequences[0].tokens.append(0)
        assert not search.clear(llm.engine.sequences)
    for sequence in sequences:
        llm.engine.cancel(sequence.request_id)
    (other,) = llm.requests.sequences(Request.of(PROMPTS[2], params_with(2)))
    llm.engine.submit(other)
    llm.engine.step()
    assert llm.engine.recovery.search is None
    assert llm.engine.recovery.strikes == cleared


def test_a_batch_that_fails_only_as_a_whole_is_answered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example because memory suffices for a few sequences only."""
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=4)
    honest = llm.engine.runner.read

    def read(reads: Sequence[Read], *args: Any, **kwargs: Any) -> Outputs:
        if len(reads) > 3:
            raise torch.OutOfMemoryError("on purpose")
        return honest(reads, *args, **kwargs)

    monkeypatch.setattr(llm.engine.runner, "read", read)
    assert_plain(answers(llm))
    assert llm.engine.drafter is not None


def test_a_sequence_is_finished_once_although_its_last_tokens_are_delivered_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drafter raises after each round is final, so recovery delivers the round's deltas again."""
    llm, finished = LLM(str(TARGET), f"model:{SMALL}", dtype="float32", speculation=4), list[bool]()
    monkeypatch.setattr("forerun.engine.recovery.STRIKES", 99)
    break_(llm, "drafter.observe", Fault(ALWAYS), monkeypatch, late=False)
    sequences = llm.requests.sequences(Request.of(PROMPTS[0], params_with(0, n=2)))

    async def main() -> list[Delta]:
        async with AsyncLLM(llm) as front:
            return [delta async for delta in front.follow(sequences, lambda: finished.append(True))]

    deltas = asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert len(finished) == 2 == sum(delta.finish_reason is not None for delta in deltas)


@pytest.mark.parametrize("kind", ["a lost rank", "invalid logits", "a request of another engine"])
def test_what_no_drafter_causes_is_no_error_of_the_drafter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(TARGET), "ngram", dtype="float32", max_num_seqs=4)
    read, calls = llm.engine.runner.read, itertools.count()

    def failing(*arguments: Any) -> Outputs:
        fails, states = next(calls) == 6, read(*arguments)
        if fails and kind == "a lost rank":
            raise RankLost("rank 1 has ended")
        if fails and kind == "a request of another engine":
            raise RequestFailed(10**6)
        if fails:
            states.logits.fill_(torch.nan)
        return states

    monkeypatch.setattr(llm.engine.runner, "read", failing)
    assert_plain(answers(llm))
    assert next(calls) > 6
    assert (llm.engine.recovery.strikes, llm.engine.drafter is None) == (0, False)


@pytest.mark.parametrize("where", ["drafter.observe", "active.settle"])
def test_a_step_returns_the_tokens_of_its_round_although_it_raised_after_the_verdict(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the error names a request, whose own code may have raised."""
    llm = LLM(str(TARGET), f"model:{SMALL}", dtype="float32", speculation=4)
    (sequence,) = llm.requests.sequences(Request.of(PROMPTS[0], params_with(0)))
    fault = Fault(lambda call: call == 1, RequestFailed(sequence.id))
    break_(llm, where, fault, monkeypatch, late=False)
    llm.engine.submit(sequence)
    deltas: list[Delta] = []
    while llm.engine.has_work:
        deltas += llm.engine.step()
    assert llm.engine.recovery.strikes == 1
    assert [token for delta in deltas for token in delta.token_ids] == sequence.tokens[sequence.num_prompt :]
