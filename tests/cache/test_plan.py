"""The memory plan compared with a direct calculation, and its guarantees for every budget."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forerun.cache.paged import PagedCache
from forerun.cache.plan import MIN_AUTO_LEN, USUAL_LEN, MemoryPlan, MemoryShares, ModelMemory, size
from forerun.errors import NotEnoughMemory

BLOCK, PAD = 4, 8
MODELS = st.builds(
    ModelMemory,
    weights_bytes=st.integers(0, 300),
    bytes_per_token=st.integers(1, 12),
    bytes_per_position=st.integers(0, 3),
    max_positions=st.integers(1, 60),
    stretch=st.integers(1, 2),
)
ASKED = st.fixed_dictionaries(
    {
        "target": MODELS,
        "drafters": st.dictionaries(st.sampled_from("abc"), MODELS, max_size=2),
        "remembered_bytes": st.dictionaries(st.sampled_from("xy"), st.integers(0, 300)),
        "budget_bytes": st.integers(0, 4000),
        "max_model_len": st.integers(1, 60),
        "max_num_seqs": st.integers(1, 5),
        "tail_tokens": st.integers(0, 9),
    }
)
UNASKED = st.fixed_dictionaries(  # without max_model_len: the plan halves contexts of 16,384 and more positions
    {
        "target": st.builds(replace, MODELS, max_positions=st.sampled_from([100, 1500, 3000, 4096, 16_384, 40_960])),
        "drafters": st.dictionaries(st.sampled_from("ab"), st.builds(replace, MODELS, max_positions=st.just(20_000))),
        "budget_bytes": st.integers(0, 700_000),
        "max_num_seqs": st.integers(1, 4),
    }
)


def plan_memory(*models, max_model_len=None, **options) -> MemoryPlan:
    return MemoryShares(*models, **options).plan(max_model_len)


def plan(**options) -> MemoryPlan:
    return plan_memory(**options, block_size=BLOCK, key_pad=PAD)


def plan_or_none(**options) -> MemoryPlan | None:
    try:
        return plan(**options)
    except NotEnoughMemory:
        return None


def whole(tokens: int) -> int:
    """Tokens rounded up to entire blocks."""
    return len(range(0, tokens, BLOCK)) * BLOCK


def undrafted(drafters: Mapping[str, ModelMemory]) -> dict[str, ModelMemory]:
    """The drafters' memory with weights and without caches."""
    return {name: replace(model, bytes_per_token=0) for name, model in drafters.items()}


def planned_bytes(options, tokens: int, of_drafters: int) -> int:
    """The bytes of caches for `tokens` tokens; a drafter's cache holds at most its positions for every sequence."""
    total = (tokens + PAD) * options["target"].bytes_per_token
    for model in options["drafters"].values() if of_drafters else ():
        row = whole(min(options["max_model_len"], model.max_positions) + options["tail_tokens"])
        total += (min(of_drafters, options["max_num_seqs"] * row) + PAD) * model.bytes_per_token
    return total


def loaded_bytes(options) -> int:
    models, length = [options["target"], *options["drafters"].values()], options["max_model_len"]
    positions = [min(model.max_positions, model.stretch * length) for model in models]
    return sum(m.weights_bytes + p * m.bytes_per_position for m, p in zip(models, positions, strict=True))


@settings(max_examples=150, deadline=None)
@given(ASKED)
def test_caches_are_the_largest_that_fit_one_sequence_first_then_all(options):
    one, left = whole(options["max_model_len"]), options["budget_bytes"] - loaded_bytes(options)
    got = plan_or_none(**options)
    if left < planned_bytes(options, one, 0):
        assert got is None
        return
    assert got is not None
    assert got.max_model_len == options["max_model_len"]
    assert got.weights_bytes == loaded_bytes(options)
    rest = left - sum(got.remembered_bytes.values())
    tokens, drafted = got.cache_tokens, max(got.drafter_cache_tokens.values(), default=0)
    assert tokens >= one
    most = options["max_num_seqs"] * whole(options["max_model_len"] + options["tail_tokens"])
    if tokens < most and options["drafters"] and drafted < tokens and planned_bytes(options, tokens, tokens) > rest:
        assert tokens == one, "the target has more than one sequence, its drafters less than it"
        assert planned_bytes(options, one, drafted + BLOCK) > rest - len(got.remembered_bytes)
    elif tokens < most:
        assert planned_bytes(options, tokens + BLOCK, tokens + BLOCK) > rest - len(got.remembered_bytes)
    else:
        assert tokens == most
    for name, model in options["drafters"].items():
        row = whole(min(options["max_model_len"], model.max_positions) + options["tail_tokens"])
        assert got.drafter_cache_tokens[name] <= min(tokens, options["max_num_seqs"] * row)


@settings(max_examples=150, deadline=None)
@given(st.one_of(ASKED, UNASKED))
def test_a_plan_stays_within_its_budget(options):
    got = plan_or_none(**options)
    if got is not None:
        assert got.num_bytes <= got.budget_bytes == options["budget_bytes"]
        assert 1 <= got.num_sequences_plain <= options["max_num_seqs"]
        assert got.num_sequences_speculative <= got.num_sequences_plain


@settings(max_examples=150, deadline=None)
@given(ASKED, st.integers(0, 1000))
def test_more_memory_never_makes_a_cache_smaller(options, more):
    got = plan_or_none(**options)
    if got is None:
        return
    richer = plan(**options | {"budget_bytes": options["budget_bytes"] + more})
    assert richer.cache_tokens >= got.cache_tokens
    assert richer.num_sequences_plain >= got.num_sequences_plain
    assert richer.num_sequences_speculative >= got.num_sequences_speculative
    for table in ("drafter_cache_tokens", "remembered_bytes"):
        before, after = getattr(got, table), getattr(richer, table)
        assert before.keys() == after.keys()
        assert all(after[name] >= before[name] for name in before), table


@settings(max_examples=150, deadline=None)
@given(UNASKED, st.integers(0, 300_000))
def test_more_memory_never_gives_a_shorter_context(options, more):
    got = plan_or_none(**options)
    if got is not None:
        assert plan(**options | {"budget_bytes": options["budget_bytes"] + more}).max_model_len >= got.max_model_len


@settings(max_examples=150, deadline=None)
@given(ASKED)
def test_drafters_never_reduce_the_sequences_that_the_target_can_serve(options):
    """The refused options are the same as without their caches; a requested context is granted."""
    alone, got = plan_or_none(**options | {"drafters": undrafted(options["drafters"])}), plan_or_none(**options)
    assert (alone is None) == (got is None)
    if got is None or alone is None:
        return
    assert got.max_model_len == alone.max_model_len == options["max_model_len"]
    more = alone.num_sequences_plain > got.num_sequences_plain
    assert (got.alone is not None) == more
    assert got.alone is None or got.alone.num_sequences_plain == alone.num_sequences_plain


@settings(max_examples=150, deadline=None)
@given(ASKED)
def test_a_drafter_gets_a_row_if_one_fits_with_a_sequence(options):
    options |= {"remembered_bytes": {}}
    one, got = whole(options["max_model_len"]), plan_or_none(**options)
    if got is None or planned_bytes(options, one, one) > options["budget_bytes"] - loaded_bytes(options):
        return
    for name, model in options["drafters"].items():
        assert got.drafter_cache_tokens[name] >= min(options["max_model_len"], model.max_positions)
    assert got.silent_drafters == []


@settings(max_examples=150, deadline=None)
@given(UNASKED)
@example(  # two sequences may be drafted, and memory suffices for one row
    {
        "target": ModelMemory(0, 1, 0, 40_960),
        "drafters": {"a": ModelMemory(0, 1, 0, 20_000)},
        "budget_bytes": 60_976,
        "max_num_seqs": 2,
    }
)
def test_a_default_context_is_shortened_for_drafters_to_a_usual_length_at_least(options):
    limit = options["target"].max_positions
    lengths = [limit // 2**i for i in range(6) if i == 0 or limit // 2 ** (i - 1) >= 2 * MIN_AUTO_LEN]
    plans = {length: plan_or_none(**options, max_model_len=length) for length in lengths}
    served = [length for length in lengths if plans[length] is not None]
    full = [n for n in served if all(t >= min(n, 20_000) for t in plans[n].drafter_cache_tokens.values())]
    usual = min([length for length in lengths if length >= USUAL_LEN], default=limit)
    got = plan_or_none(**options)
    if got is None:
        assert not served
    elif full and full[0] >= usual:
        assert got.max_model_len == full[0]
    else:
        assert got.max_model_len == max(length for length in served if length <= usual)
    if got is not None:
        assert replace(got, alone=None) == replace(plan(**options, max_model_len=got.max_model_len), alone=None)


def test_planned_bytes_are_those_of_real_caches():
    shape: dict[str, Any] = {"layers": 2, "kv_heads": 3, "head_dim": 8, "dtype": torch.bfloat16}
    each = PagedCache.bytes_per_token(**shape)
    model = ModelMemory(0, each, 0, 4096)
    got = plan_memory(model, {"model": model}, max_model_len=100, max_num_seqs=3, budget_bytes=10**7)
    cache = PagedCache(**shape, num_tokens=got.cache_tokens)
    assert 2 * cache.keys.nbytes == got.cache_bytes == got.drafter_cache_bytes["model"]
    assert cache.num_free_tokens == got.cache_tokens == 3 * 128
    cache.reserve([0, 1, 2], [100] * 3)


def test_the_planned_sequences_fit_into_the_cache():
    model = ModelMemory(0, 10, 0, 4096)
    got = plan(target=model, max_model_len=30, max_num_seqs=9, tail_tokens=5, budget_bytes=2000)
    shape: dict[str, Any] = {
        "layers": 1,
        "kv_heads": 1,
        "head_dim": 1,
        "dtype": torch.int8,
        "block_size": BLOCK,
        "key_pad": PAD,
    }
    cache = PagedCache(**shape, num_tokens=got.cache_tokens)
    num_plain, num_speculative = got.num_sequences_plain, got.num_sequences_speculative
    assert (num_plain, num_speculative) == (6, 5)
    assert cache.can_reserve(range(num_plain), [30] * num_plain)
    assert not cache.can_reserve(range(num_plain + 1), [30] * (num_plain + 1))
    assert cache.can_reserve(range(num_speculative), [35] * num_speculative)
    assert not cache.can_reserve(range(num_speculative + 1), [35] * (num_speculative + 1))


def test_the_memory_cost_of_drafting_is_one_line():
    """Llama 3 8B with a 1B draft model, in bfloat16, on 24 GB."""
    models = ModelMemory(int(16.06e9), 131_072, 1024, 131_072), {"draft": ModelMemory(3 * 10**9, 32_768, 512, 131_072)}
    options = {"budget_bytes": 24 * 10**9, "max_num_seqs": 16}
    lines = plan_memory(*models, **options).lines()
    assert lines[-2:] == [
        "room for 1 sequence of 16,384 tokens",
        "without a drafter's cache there would be room for 1 sequence of 32,768 tokens",
    ]
    few = plan_memory(*models, **options, max_model_len=4096).lines()
    assert few[-1] == "without a drafter's cache there would be room for 9 sequences of 4,096 tokens"
    assert "without" not in plan_memory(models[0], **options).lines()[-1]


def test_a_refusal_names_the_numbers_and_a_max_model_len_that_works():
    options = {"target": ModelMemory(10**9, 50_000, 0, 10**6), "max_num_seqs": 4, "budget_bytes": 11 * 10**8}
    with pytest.raises(NotEnoughMemory) as refused:
        plan_memory(**options, max_model_len=4096)
    words = (
        "max_model_len 4,096|1.23 GB|1.00 GB weights|4,608 cache slots at 50.0 kB|budget is 1.10 GB|dtype|to 1,472 at"
    )
    assert [word for word in words.split("|") if word not in str(refused.value)] == []
    assert plan_memory(**options, max_model_len=1472).num_sequences_plain == 1
    with pytest.raises(NotEnoughMemory):
        plan_memory(**options, max_model_len=1473)


@settings(max_examples=60, deadline=None)
@given(ASKED)
def test_the_max_model_len_in_a_refusal_is_the_longest_that_works(options):
    if plan_or_none(**options) is not None:
        return
    lengths = [
        n
        for n in range(BLOCK, whole(options["max_model_len"]) + 1, BLOCK)
        if plan_or_none(**options | {"max_model_len": n})
    ]
    with pytest.raises(NotEnoughMemory) as refused:
        plan(**options)
    assert (f"to {lengths[-1]} at most" if lengths else "no max_model_len is small enough") in str(refused.value)


def test_the_lines_of_a_plan():
    options = {
        "target": ModelMemory(1_000_000_000, 49_152, 0, 2048),
        "drafters": {"model:small": ModelMemory(90_000_000, 12_288, 0, 2048)},
        "max_num_seqs": 4,
    }
    assert plan_memory(**options, budget_bytes=8 * 10**9).lines() == [
        "memory: 1.62 GB of 8.00 GB, weights 1.09 GB",
        "target cache: 428 MB, 8,192 tokens at 49.2 kB",
        "model:small cache: 107 MB, 8,192 tokens at 12.3 kB",
        "room for 4 sequences of 2,048 tokens",
    ]
    least = plan_memory(**options, max_model_len=2048, budget_bytes=1_220_000_000)
    assert least.lines()[2:] == [
        "model:small cache: no memory left, will not draft",
        "room for 1 sequence of 2,048 tokens, 0 with speculation",
    ]
    assert least.silent_drafters == ["model:small"]
    for budget, line in ((8 * 10**9, "at most 268 MB"), (1_320_000_000, "at most 14.4 MB")):
        lines = plan_memory(**options, budget_bytes=budget, remembered_bytes={"past answers": 256 << 20}).lines()
        assert lines[3] == f"past answers: {line}"
    one = 1_090_000_000 + (2048 + 512) * 49_152
    none = plan_memory(**options, budget_bytes=one, remembered_bytes={"past answers": 256 << 20})
    assert none.lines()[3] == "past answers: no memory left, none are stored"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (45_600, "45.6 kB"),
        (123_456_789, "123 MB"),
        (2 * 10**12, "2000 GB"),
    ],
)
def test_sizes_have_three_digits(num_bytes, text):
    assert size(num_bytes) == text
