"""Attention: right, and a query's bits do not depend on others; the padding is chosen to achieve that."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.models.backends.invariance import cancelling_scores, cancelling_values
from forerun.models.backends.torch_cpu import attention
from forerun.models.backends.torch_cpu.attention import attend, attend_path, query_rule
from forerun.models.batch import QueryRule, SlotCopy
from forerun.models.runner import make_paths

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(6, 2, 64), (4, 4, 16), (3, 1, 128), (2, 2, 96), (2, 1, 256)]
NUM_KEYS = 520


def slots(k: Tensor) -> Tensor:
    """Keys or values as a cache holds them: zeros behind."""
    return torch.nn.functional.pad(k, (0, 0, 0, 1024 - k.shape[1]))


def read(q: Tensor, k: Tensor, v: Tensor, first: int, count: int, rule: QueryRule, cap: float | None = None) -> Tensor:
    """Queries `first` to `first + count` of a text, each seeing the keys up to its own."""
    paths = make_paths(list(range(count)), list(range(first, first + count)), 0, rule)
    return attend(q[first : first + count], slots(k), slots(v), paths, None, cap=cap)


@pytest.mark.short("cancelling_values-shape0-dtype1-*")
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("probe", [cancelling_scores, cancelling_values])
def test_the_bits_of_a_query_do_not_depend_on_other_queries(
    probe, shape: tuple[int, int, int], dtype: torch.dtype, cap: float | None
) -> None:
    q, k, v = probe(NUM_KEYS, *shape, NUM_KEYS, dtype)
    rule, rng = query_rule(*shape, dtype, torch.get_num_threads(), cap), random.Random(1)
    for chosen in (rule, QueryRule(8, 8)):
        alone = torch.cat([read(q, k, v, i, 1, chosen, cap) for i in range(NUM_KEYS)])
        for size in (2, 3, 4, 5, 7, 11, 12, 16, 28, 33, 64, 100, 203, NUM_KEYS):
            first = rng.randrange(NUM_KEYS - size + 1)
            assert torch.equal(read(q, k, v, first, size, chosen, cap), alone[first : first + size]), f"{size} queries"


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("rule", [QueryRule(4), QueryRule(8), QueryRule(8, 8)])
def test_attention_is_the_weighted_sum_of_visible_values(rule: QueryRule, cap: float | None) -> None:
    dice, heads, kv_heads, head_dim, count = torch.Generator().manual_seed(0), 6, 2, 16, 21
    q, k, v = (torch.randn(n, m, head_dim, generator=dice) for n, m in ((count, heads), (kv_heads, 60), (kv_heads, 60)))
    paths = make_paths(list(range(count)), list(range(30, 30 + count)), 0, rule)
    found = attend(q, slots(k), slots(v), paths, 7, cap=cap)
    for i in range(count):
        seen = slice(30 + i - 6, 30 + i + 1)
        for head in range(heads):
            scores = k[head // 3, seen].double() @ q[i, head].double() / math.sqrt(head_dim)
            scores = scores if cap is None else cap * (scores / cap).tanh()
            expected = scores.softmax(0) @ v[head // 3, seen].double()
            assert torch.allclose(found[i, head].double(), expected, atol=1e-5)


def test_a_path_in_pieces_is_laid_out_once() -> None:
    copy = SlotCopy([9, 8], 5)
    paths = make_paths(list(range(3, 22)), list(range(100, 119)), 64, QueryRule(8, 8), copy)
    assert [path.copy for path in paths] == [copy, None, None]
    assert [query for path in paths for query in path.queries] == list(range(3, 22))
    assert [len(path.padded_queries) for path in paths] == [8, 8, 8]
    assert {path.first_slot for path in paths} == {64}


@pytest.mark.parametrize(("rows", "pad"), [(4, 4), (8, 8), (16, 16), (24, 8)])
def test_the_padding_is_the_smallest_under_which_a_kernel_is_invariant(
    rows: int, pad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that adds in another order where its queries are no multiple of `rows`; for 24, no padding will do."""
    honest = attend_path

    def fickle(q: Tensor, keys: Tensor, values: Tensor, path: Any, window: int | None, **more: Any) -> Tensor:
        found = honest(q, keys, values, path, window, **more)
        return found + 1e-7 if len(q) % rows else found

    monkeypatch.setattr(attention, "attend_path", fickle)
    query_rule.cache_clear()
    try:
        rule = query_rule(2, 2, 16, torch.float32, torch.get_num_threads())
    finally:
        query_rule.cache_clear()
    assert rule == (QueryRule(pad) if rows < 24 else QueryRule(8, 8))
