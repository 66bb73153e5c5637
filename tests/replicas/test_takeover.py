"""Takeover: what another replica generates again is left out, wherever its rounds end and whatever was held back."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric

from forerun.accept.commit import Origin
from forerun.accept.delta import Delta, Segment
from forerun.accept.outcome import LiveGain, RowOutcome
from forerun.engine.sequence import Sequence as Sample
from forerun.errors import AnswerDiffers
from forerun.output import Answers
from forerun.replicas.front import ReplicaFront, SampleReader, skip_characters
from forerun.replicas.replica import Call, ReplicaNews, SampleState
from forerun.request import Request
from forerun.sampling.logprobs import TokenLogprobs
from forerun.sampling.params import SamplingParams
from kit.engines import plain

WORDS = ["Once", " upon", " a", " time", "", " there", " was", " é", " dog", "."]


def sequence() -> Sample:
    """A sample that has sent nothing yet."""
    return plain().requests.sequences(Request.of([5, 6, 7], SamplingParams(seed=1)))[0]


def rounds(ends: Sequence[int], held: Sequence[int]) -> list[Delta]:
    """The answer in rounds that end behind these tokens, with the text of so many letters held back at each."""
    text, deltas, first, shown = "".join(WORDS), [], 0, 0
    for end, letters in zip([*ends, len(WORDS)], [*held, 0], strict=False):
        sure = max(shown, len("".join(WORDS[:end])) - letters)
        deltas.append(
            Delta(
                request_id=99,
                sample=0,
                seq_id=98,
                token_ids=tuple(range(first, end)),
                origins=(Origin.TARGET,) * (end - first),
                segments=(Segment(text[shown:sure], Origin.TARGET),) if sure > shown else (),
                logprobs=tuple(TokenLogprobs(token, -1.0, 1, (), ()) for token in range(first, end)),
                finish_reason="length" if end == len(WORDS) else None,
                stop_reason=None,
                outcome=RowOutcome(98, 1, 1, 1, end - first),
            )
        )
        first, shown = end, sure
    return deltas


PLANS = st.lists(st.tuples(st.integers(1, len(WORDS) - 1), st.integers(0, 6)), max_size=6).map(
    lambda plan: rounds(sorted({end for end, _ in plan}), [letters for _, letters in plan][: len({e for e, _ in plan})])
)


@settings(deadline=None)
@given(runs=st.lists(st.tuples(PLANS, st.integers(0, 7)), max_size=3), last=PLANS)
def test_the_reader_gets_every_token_and_letter_once(runs: list[tuple[list[Delta], int]], last: list[Delta]) -> None:
    reader, got = SampleReader(sequence()), list[Delta]()
    for deltas, num_given in [*((deltas, num) for deltas, num in runs), (last, len(last))]:
        reader.restart()
        got += [new for delta in deltas[:num_given] if (new := reader.take(delta)) is not None]
    tokens = [token for delta in got for token in delta.token_ids]
    assert tokens == list(range(len(WORDS))) == reader.sequence.tokens[3:]
    assert "".join(delta.text for delta in got) == "".join(WORDS)
    assert [each.token_id for delta in got for each in delta.logprobs] == tokens
    assert [delta.finish_reason for delta in got if delta.finish_reason] == ["length"]
    assert got[-1].finish_reason == "length"
    assert {(delta.request_id, delta.seq_id) for delta in got} == {(reader.sequence.request_id, reader.sequence.id)}
    assert all(delta.outcome.seq_id == reader.sequence.id for delta in got if delta.outcome)
    assert len(reader.sequence.origins) == len(WORDS)


def test_other_tokens_are_no_continuation() -> None:
    reader = SampleReader(sequence())
    first, *_ = rounds([4], [0])
    assert reader.take(first) is not None
    reader.restart()
    with pytest.raises(AnswerDiffers, match="different tokens"):
        reader.take(first._replace(token_ids=(0, 1, 9, 3)))


def test_of_several_pieces_of_text_the_first_characters_are_skipped() -> None:
    pieces = [Segment(text, Origin.TARGET) for text in ("ab", "cd", "ef")]
    for number in range(7):
        left = list(skip_characters(pieces, number))
        assert "".join(piece.text for piece in left) == "abcdef"[number:]
        assert all(piece.text for piece in left)


@dataclass
class LostTwice:
    """Replicas of which two are lost: the answers that they give, in order."""

    answers: list[list[Delta]]
    calls: list[Call] = field(default_factory=list)

    async def answer(self, call: Call) -> AsyncGenerator[ReplicaNews, None]:
        self.calls.append(call)
        for delta in self.answers[len(self.calls) - 1]:
            state = SampleState(0, 500.0 * len(self.calls), (), LiveGain())
            yield ReplicaNews("same", [delta], {0: state})

    async def readings(self) -> Mapping[str, Sequence[Metric]]:
        return {}

    async def num_running(self) -> int:
        return 1


def test_a_taken_over_request_keeps_its_seed_and_start_and_its_rounds_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And each further loss is followed by a longer pause; nothing of the request is left at the end."""
    whole, pauses, finished = rounds([2, 6], [0, 0]), list[float](), list[None]()
    replicas = LostTwice([rounds([4], [0])[:1], [], whole])
    front, sample = ReplicaFront(replicas), plain().requests.sequences(Request.of([5, 6, 7], SamplingParams()))[0]
    before_s = time.perf_counter()

    async def pause(length_s: float) -> None:
        if length_s:  # asyncio itself sleeps for 0 s
            pauses.append(length_s)

    async def read() -> list[Delta]:
        answers = Answers([(Request.of([5, 6, 7], SamplingParams()), [sample])], "")
        return [delta async for delta in front.follow(answers, on_finish=lambda: finished.append(None))]

    monkeypatch.setattr("asyncio.sleep", pause)
    deltas = asyncio.run(read())
    assert [delta.token_ids for delta in deltas] == [(0, 1, 2, 3), (4, 5), (6, 7, 8, 9)]
    assert [delta.outcome is None for delta in deltas] == [False, True, False]
    sent = [call.request.sampling_params for call in replicas.calls]
    assert [params.seed for params in sent if isinstance(params, SamplingParams)] == [sample.seed] * 3
    assert sample.started_s is not None
    assert before_s + 500 <= sample.started_s < time.perf_counter() + 500
    assert len(pauses) == 2
    assert pauses[1] == 2 * pauses[0] > 0
    assert (len(finished), front.outboxes, front.num_taken_over) == (1, {}, 2)
