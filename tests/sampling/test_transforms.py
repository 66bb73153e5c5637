"""Transforms compared with a slow oracle in plain Python, one row at a time; ties, order, paths, processors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.errors import InvalidRequest, RequestFailed
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftTree
from kit.laws import edited_logits, filtered_logits, softmax

VOCAB = 23
EOS = (2, 5)


def oracle(logits: list[float], row: RowSampling, num_ids: int) -> list[float]:
    """The law after a row's text, as probabilities, by the definition of each parameter."""
    x = np.array([value if token < num_ids else -math.inf for token, value in enumerate(logits)])
    x = edited_logits(x, list(row.tokens), row.num_prompt, row.params, EOS, row.bad_words)
    if row.params.greedy:
        return [float(token == x.argmax()) for token in range(len(x))]
    return softmax(filtered_logits(x, row.params)).tolist()


def alternate(text: Sequence[int], logits: Tensor) -> Tensor:
    """A processor that depends on the whole text: forbids the neighbours of the last token."""
    last = text[-1]
    logits[[(last + 1) % VOCAB, (last + 3) % VOCAB]] = -math.inf
    return logits + 0.1 * len(text)


tokens = st.integers(0, VOCAB - 1)
params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, -1, 1, 4, 22, 23, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -1.0]),
    logit_bias=st.one_of(st.none(), st.dictionaries(tokens, st.sampled_from([-math.inf, -3.0, 2.5]), max_size=4)),
    banned_tokens=st.lists(tokens, max_size=4),
    min_tokens=st.integers(0, 4),
    stop_token_ids=st.lists(tokens, max_size=2),
    logits_processors=st.sampled_from([(), (alternate,), (alternate, alternate)]),
)


@st.composite
def sequences(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of a RowSampling."""
    text = draw(st.lists(tokens, min_size=1, max_size=10))
    words = draw(st.lists(st.lists(st.sampled_from([*text, 4]), min_size=2, max_size=4), max_size=4))
    return {
        "seq_id": draw(st.integers(0, 10**6)),
        "params": draw(params_of),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "sample": draw(st.integers(0, 3)),
        "tokens": text,
        "num_prompt": draw(st.integers(1, len(text))),
        "eos_ids": EOS,
        "bad_words": words,
    }


def random_logits(rows: int, seed: int, dtype: torch.dtype = torch.float64, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


def chains(rows: list[RowSampling], paths: list[list[int]]) -> DraftTree:
    return DraftTree.chains(torch.tensor([row.tokens[-1] for row in rows]), torch.tensor(paths))


@pytest.mark.full
@settings(max_examples=200, deadline=None)
@given(st.lists(sequences(), min_size=1, max_size=4), st.integers(0, 2**31), st.sampled_from([VOCAB, VOCAB - 2]))
def test_mixed_batches_have_the_laws_of_the_oracle(specs: list[dict[str, Any]], seed: int, num_ids: int) -> None:
    rows = [RowSampling(**spec) for spec in specs]
    draws = Draws(rows, VOCAB, num_ids=num_ids)
    logits = random_logits(len(rows), seed)
    before = logits.clone()
    law = draws.probs(logits, draws.roots())
    assert torch.equal(logits, before), "the caller's logits were changed"
    assert law.dtype == torch.float64
    for row, own, got in zip(rows, logits.tolist(), law.tolist(), strict=True):
        assert got == pytest.approx(oracle(own, row, num_ids), abs=1e-9)


@settings(max_examples=80, deadline=None)
@given(st.lists(sequences(), min_size=1, max_size=3), st.integers(0, 2**31), st.data())
def test_nodes_have_the_law_of_their_path_as_committed_text(
    specs: list[dict[str, Any]], seed: int, data: st.DataObject
) -> None:
    """Penalties, bad words, minimum length and processors advance along each node's own path; siblings do not mix."""
    rows = [RowSampling(**spec) for spec in specs]
    paths = [data.draw(st.lists(tokens | st.sampled_from(row.tokens), min_size=3, max_size=3)) for row in rows]
    tree = chains(rows, paths)
    fork = torch.tensor([[(g[0] + 1) % VOCAB] for g in paths])  # a second child of the root
    tree = DraftTree(torch.cat([tree.tokens, fork], 1), torch.cat([tree.parents, torch.zeros_like(fork)], 1), 3, 2)
    draws = Draws(rows, VOCAB)
    at = draws.nodes(tree)
    logits = random_logits(len(at.row), seed, torch.float32)
    law, drawn = draws.probs(logits, at), draws.draw(logits, at)
    for node, (index, path) in enumerate(zip(at.row.tolist(), at.drawn.tolist(), strict=True)):
        row = rows[index]
        text = [*row.tokens, *(token for token in path if token >= 0)]
        fresh = Draws([replace(row, tokens=text)], VOCAB)
        assert torch.equal(fresh.probs(logits[node : node + 1], fresh.roots())[0], law[node])
        assert torch.equal(fresh.draw(logits[node : node + 1], fresh.roots())[0], drawn[node])


def law_of(logits: list[float], **params: Any) -> list[float]:
    draws = Draws([RowSampling(0, SamplingParams(**params), 0, 0, [0, 1], 1, ())], len(logits))
    return draws.probs(torch.tensor([logits]), draws.roots())[0].tolist()


def test_ties_are_kept_together_by_filters_and_split_by_greedy() -> None:
    tied = [1.0, 2.0, 2.0, 2.0, 0.0]
    third = pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0])
    assert law_of(tied, top_k=1) == third
    assert law_of(tied, top_k=2) == third
    assert law_of(tied, top_p=0.1) == third
    assert law_of(tied, min_p=1.0) == third
    assert law_of(tied, temperature=0.0) == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("rejection", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_that_the_tokenizer_lacks_have_no_probability(temperature: float, rejection: bool) -> None:
    row = RowSampling(0, SamplingParams(temperature=temperature), 0, 0, [0, 1], 1, ())
    draws = Draws([row], 6, rejection=rejection, num_ids=4)
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0, 9.0, 8.0]])
    assert draws.probs(logits, draws.roots())[0, 4:].tolist() == [0, 0]
    assert int(draws.draw(logits, draws.roots())) < 4
    assert sorted(draws.children(logits, draws.roots(), 6).tokens[0].tolist())[:2] == [-1, -1]
    assert int(draws.children(logits, draws.roots(), 6).tokens.max()) < 4


def test_a_nucleus_ends_where_the_probabilities_reach_top_p_exactly() -> None:
    assert law_of([1.0, 0.0], top_p=law_of([1.0, 0.0])[0]) == [1, 0]


def test_filters_of_one_row_do_not_change_rows_without_filters() -> None:
    """A row without filters keeps all its tokens although another row has filters (cumulated sums exceed 1)."""
    logits = random_logits(2, 3, torch.float32, 5000)
    plain, filtered = SamplingParams(), SamplingParams(top_k=10, top_p=0.5, min_p=0.1)
    draws = Draws([RowSampling(i, p, 0, 0, [1], 1) for i, p in enumerate((plain, filtered))], 5000)
    assert draws.probs(logits, draws.roots())[0].gt(0).all()


def test_a_nucleus_has_the_same_bits_with_full_and_partial_sorting() -> None:
    """With a flat row the entire batch sorts all tokens; a peaked row alone needs only the largest."""
    logits = random_logits(3, 4, torch.float32, 20_001) * torch.tensor([[0.01], [1.0], [4.0]])
    rows = [RowSampling(i, SamplingParams(top_p=p), 0, 0, [1], 1) for i, p in enumerate((0.95, 0.95, 0.5))]
    draws = Draws(rows, 20_001)
    together = draws.probs(logits, draws.roots())
    for i, row in enumerate(rows):
        alone = Draws([row], 20_001)
        assert torch.equal(alone.probs(logits[i : i + 1], alone.roots())[0], together[i])
        kept = together[i] > 0
        probs = logits[i].double().softmax(0)
        assert probs[kept].sum() >= row.params.top_p - 1e-6
        assert probs[kept].sum() - probs[kept].min() < row.params.top_p + 1e-6
        assert probs[~kept].max() <= probs[kept].min()


def processed(processor: Any, eos_ids: tuple[int, ...] = ()) -> Tensor:
    params = SamplingParams(logits_processors=[processor])
    draws = Draws([RowSampling(0, params, 0, 0, [1, 2], 1, eos_ids)], 4)
    return draws.probs(torch.zeros(1, 4), draws.roots())[0]


def failure_of(processor: Callable[..., object]) -> BaseException | None:
    """The cause of the failure of a request with this processor."""
    with pytest.raises(RequestFailed) as caught:
        processed(processor)
    assert caught.value.seq_id == 0
    return caught.value.__cause__


@pytest.mark.parametrize(
    "result",
    [torch.zeros(3), torch.zeros(1, 4), torch.zeros(4, dtype=torch.int64), None, [0.0] * 4, torch.full((4,), math.nan)],
)
def test_processors_that_give_no_logits_are_refused(result: object) -> None:
    error = failure_of(lambda _, logits: result)
    assert isinstance(error, InvalidRequest)
    assert "return" in str(error)
    assert error.field == "logits_processors"


def test_a_processor_that_excludes_all_tokens_ends_the_text() -> None:
    nothing = torch.full((4,), -math.inf)
    assert processed(lambda _, logits: nothing, eos_ids=(3,)).tolist() == [0, 0, 0, 1]
    error = failure_of(lambda _, logits: nothing)
    assert isinstance(error, InvalidRequest)
    assert "exclude every token after 2" in str(error)


def test_an_error_in_a_processor_names_its_sequence() -> None:
    error = failure_of(lambda text, _: text[99])
    assert isinstance(error, IndexError)


def test_processors_cannot_change_the_round() -> None:
    """Writing into the received logits or text changes neither the caller's logits nor the sequence."""

    def rude(text: Any, logits: Tensor) -> Tensor:
        text.append(99)
        return logits.zero_()

    row = RowSampling(0, SamplingParams(logits_processors=[rude]), 0, 0, [1, 2], 1)
    draws, logits = Draws([row], 4), torch.ones(1, 4)
    draws.probs(logits, draws.roots())
    assert logits.tolist() == [[1.0] * 4]
    assert row.tokens == [1, 2]


def test_a_minimum_length_without_end_tokens_bans_nothing() -> None:
    """Next to a row that has end tokens, so that there is a table of them."""
    params = SamplingParams(min_tokens=4)
    rows = [RowSampling(i, params, 5, 0, [7, 8], 1, ends) for i, ends in enumerate([(), (2,)])]
    draws = Draws(rows, VOCAB)
    banned = draws.transforms.edit(torch.zeros(2, VOCAB), draws.roots()).isneginf()
    assert banned.nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_repetition_penalty_leaves_the_largest_finite_logits_finite(sign: float) -> None:
    largest = sign * torch.finfo(torch.float32).max
    draws = Draws([RowSampling(0, SamplingParams(repetition_penalty=0.5 if sign > 0 else 2.0), 5, 0, [7, 8], 1)], VOCAB)
    edited = draws.transforms.edit(torch.full((1, VOCAB), largest), draws.roots())
    assert edited.tolist() == [[largest] * VOCAB]


def test_no_processor_makes_a_padding_id_possible() -> None:
    params = SamplingParams(logits_processors=[lambda _text, logits: torch.zeros_like(logits)])
    draws = Draws([RowSampling(0, params, 5, 0, [7, 8], 1)], VOCAB, num_ids=VOCAB - 3)
    edited = draws.transforms.edit(torch.ones(1, VOCAB), draws.roots())
    assert edited.tolist() == [[0.0] * (VOCAB - 3) + [-math.inf] * 3]
