"""The size of prefill chunks follows the time of passes, and changes no answer."""

from dataclasses import replace

import pytest

from forerun import LLM, SamplingParams
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.engine.scheduler import MAX_CHANGE, MAX_CHUNK_TOKENS, SHORT_PROMPT_TOKENS, ChunkSize
from kit.checkpoints import TARGET


def played(chunk: ChunkSize, start_s: float, token_s: float, count: int = 60) -> list[int]:
    """The chunk sizes of `count` passes over a long prompt, each of which takes `start_s` and `token_s` per token."""
    sizes = []
    for _ in range(count):
        sizes.append(chunk.tokens)
        chunk.record(Outcome([], chunk.tokens, 0.0, start_s + token_s * chunk.tokens, 0.0))
    return sizes


@pytest.mark.parametrize(("start_s", "token_s", "fits"), [(0.03, 0.001, 70), (0.0, 0.001, 100), (0.05, 0.0005, 100)])
def test_the_chunk_size_converges_to_the_time_limit(start_s: float, token_s: float, fits: int) -> None:
    assert played(ChunkSize(64, limit_s=0.1), start_s, token_s)[-1] == pytest.approx(fits, abs=1)


def test_the_chunk_size_stays_within_its_bounds_and_recovers() -> None:
    chunk = ChunkSize(64, limit_s=0.1)
    assert played(chunk, 0.05, 0.0)[-1] == MAX_CHUNK_TOKENS
    assert played(chunk, 9.0, 0.0)[-1] == SHORT_PROMPT_TOKENS
    assert played(chunk, 0.05, 0.0)[-1] == MAX_CHUNK_TOKENS


def test_small_passes_and_decoding_change_the_size_only_if_too_slow() -> None:
    chunk, small = ChunkSize(100, limit_s=0.1), Outcome([], 10, 0.0, 0.01, 0.0)
    chunk.record(small)
    chunk.record(replace(small, num_prompt_tokens=0, pass_s=9.0))
    assert chunk.tokens == 100
    chunk.record(replace(small, pass_s=0.2))
    assert chunk.tokens == 50
    chunk.record(replace(small, num_prompt_tokens=50))
    assert chunk.tokens == round(50 * MAX_CHANGE)


def test_time_of_rows_decoded_in_the_same_pass_is_not_charged_to_the_chunk() -> None:
    """The time of decoded rows and of drafting is not charged to the chunk."""
    rows = [RowOutcome(row, 1, 1, 0, 1) for row in range(25)]
    chunk = ChunkSize(100, limit_s=0.1)
    chunk.record(Outcome(rows[:1], 100, 9.0, 0.1 * 102 / 100, 0.0))
    assert chunk.tokens == 100
    chunk.record(Outcome(rows, 50, 9.0, 0.4, 0.0))
    assert chunk.tokens == 50


def test_a_chunk_size_set_by_the_user_stays() -> None:
    assert set(played(ChunkSize(100), 9.0, 1.0)) == {100}


def test_auto_chunk_size_changes_no_answer_and_its_measurement_leaves_no_state() -> None:
    prompts, params = [[1, *range(5, 205)], [1, 7], [1, *range(9, 90)]], SamplingParams(temperature=1.0, seed=1)
    llm = LLM(str(TARGET), dtype="float32", chunk_tokens="auto")
    assert llm.engine.runner.cache.num_rows == 0
    assert not llm.engine.runner.tails
    assert llm.engine.scheduler.chunk.limit_s
    expected = LLM(str(TARGET), dtype="float32").generate(prompts, params)
    assert llm.generate(prompts, params) == expected
