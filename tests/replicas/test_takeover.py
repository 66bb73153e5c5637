"""Takeover: what another replica generates again is left out, wherever its rounds end and whatever was held back."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.accept.commit import Origin
from forerun.accept.delta import Delta, Segment
from forerun.accept.outcome import RowOutcome
from forerun.engine.sequence import Sequence as Sample
from forerun.errors import AnswerDiffers
from forerun.replicas.front import SampleReader
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
