"""What results say of themselves: whose they are, and how they came about, counted from the rounds themselves."""

import pytest

from forerun import LLM, SamplingParams
from forerun.accept.commit import Origin
from kit.checkpoints import SMALL, TARGET

PROMPTS = ["Once upon a time", "Lily and Tom went to the park. Lily and Tom", "The"]


def params_with(seed: int, **others: object) -> SamplingParams:
    return SamplingParams(**({"seed": seed, "max_tokens": 14, "ignore_eos": True} | others))  # type: ignore[arg-type]


@pytest.mark.parametrize("draft", [None, "ngram", f"model:{SMALL}", f"mix[ngram,model:{SMALL}]"])
def test_the_metrics_of_requests_add_up_to_those_of_the_engine(draft: str | None) -> None:
    """All rounds of the engine are some request's, with samples, ends within a run, and more requests than places."""
    llm = LLM(str(TARGET), draft, dtype="float32", max_num_seqs=3)
    params = [params_with(0, n=2), params_with(1, temperature=0.0), params_with(2, max_tokens=9)]
    results = llm.generate(PROMPTS, params)
    for name in ("num_rounds", "num_drafted", "num_accepted", "num_emitted"):
        assert sum(getattr(result.metrics, name) for result in results) == getattr(llm.stats, name)
    for name in ("offered_at_depth", "accepted_at_depth"):
        columns = [getattr(result.metrics, name) for result in results]
        longest = max(map(len, columns))
        padded = [[*column, *[0] * (longest - len(column))] for column in columns]
        assert [sum(each) for each in zip(*padded, strict=True)] == getattr(llm.stats, name)
    for arm, counts in llm.stats.drafters.items():
        own = [result.metrics.drafters[arm] for result in results if arm in result.metrics.drafters]
        assert sum(each.num_rounds for each in own) == counts.num_rounds
        assert sum(each.num_accepted for each in own) == counts.num_accepted
    for result in results:
        tokens = [token for sample in result.outputs for token in sample.token_ids]
        drafted = [origin for sample in result.outputs for origin in sample.origins if origin is Origin.DRAFTED]
        assert result.metrics.num_emitted == len(tokens)
        assert len(drafted) <= result.metrics.num_accepted
        assert (result.metrics.acceptance_rate is None) == (result.metrics.num_drafted == 0)
        assert 0 < result.metrics.first_token_s <= result.metrics.total_s
        assert result.metrics.tokens_per_s == pytest.approx(len(tokens) / result.metrics.total_s)


def test_results_are_told_apart_by_their_number_and_equal_by_their_answer() -> None:
    llm = LLM(str(TARGET), "ngram", dtype="float32")
    first, again = (llm.generate(PROMPTS[0], params_with(3))[0] for _ in range(2))
    (plain,) = llm.generate([llm.get_tokenizer().encode(PROMPTS[0])], params_with(3), speculation=False)
    (other,) = llm.generate(PROMPTS[0], params_with(4))
    assert first == again
    assert first != other
    assert len({result.request_id for result in (first, again, plain, other)}) == 4
    assert all(isinstance(result.request_id, str) and result.finished for result in (first, again))
    assert (first.prompt, plain.prompt) == (PROMPTS[0], None)
    assert plain.metrics.num_drafted == 0
    assert plain.outputs == first.outputs


def test_the_sum_of_the_log_probabilities_is_there_if_they_are() -> None:
    llm = LLM(str(TARGET), dtype="float32")
    (scored,) = llm.generate(PROMPTS[0], params_with(1, logprobs=0))[0].outputs
    assert scored.cumulative_logprob == pytest.approx(sum(each.logprob for each in scored.logprobs))
    (silent,) = llm.generate(PROMPTS[0], params_with(1))[0].outputs
    assert silent.cumulative_logprob is None
    assert silent.logprobs == ()


def test_each_delta_carries_its_rounds_counts() -> None:
    llm = LLM(str(TARGET), f"model:{SMALL}", dtype="float32")
    deltas = list(llm.stream(PROMPTS[0], params_with(5)))
    assert [delta.outcome.num_emitted for delta in deltas if delta.outcome] == [len(d.token_ids) for d in deltas]
    assert {delta.outcome.seq_id for delta in deltas if delta.outcome} == {delta.seq_id for delta in deltas}
