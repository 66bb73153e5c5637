"""The memory plan against arithmetic done the long way: within budget, target first, nothing left lying about."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.cache.paged import PagedCache
from forerun.cache.plan import MemoryPlan, available_bytes, default_budget, plan_memory, size
from forerun.errors import NotEnoughMemory

BLOCK, PAD = 4, 8
ASKED = st.fixed_dictionaries(
    {
        "budget_bytes": st.integers(0, 4000),
        "weights_bytes": st.integers(0, 1000),
        "target_bytes_per_token": st.integers(1, 12),
        "drafter_bytes_per_token": st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)),
        "max_model_len": st.integers(1, 60),
        "max_num_seqs": st.integers(1, 5),
        "tail_tokens": st.integers(0, 9),
    }
)


def plan(**asked) -> MemoryPlan:
    return plan_memory(**asked, block_size=BLOCK, key_pad=PAD)


def rows_that_fit(cache_tokens: int, row_tokens: int, most: int) -> int:
    """Hand out whole blocks to row after row."""
    blocks, rows = cache_tokens // BLOCK, 0
    while rows < most:
        for _ in range(0, row_tokens, BLOCK):
            blocks -= 1
        if blocks < 0:
            break
        rows += 1
    return rows


def largest_cache(num_bytes: int, each: int, most: int) -> int:
    """Try every number of whole blocks."""
    return max((t for t in range(0, most + 1, BLOCK) if (t + PAD) * each <= num_bytes), default=0)


@settings(max_examples=400, deadline=None)
@given(ASKED)
def test_the_plan_is_the_largest_that_fits_target_first(asked):
    longest = asked["max_model_len"] + asked["tail_tokens"]
    wanted = asked["max_num_seqs"] * len(range(0, longest, BLOCK)) * BLOCK
    left = asked["budget_bytes"] - asked["weights_bytes"]
    tokens = largest_cache(left, asked["target_bytes_per_token"], wanted)
    if tokens < asked["max_model_len"]:
        with pytest.raises(NotEnoughMemory):
            plan(**asked)
        return
    got = plan(**asked)
    assert got.cache_tokens == tokens
    drafters = {name: each for name, each in asked["drafter_bytes_per_token"].items() if each}
    left -= (tokens + PAD) * asked["target_bytes_per_token"]
    drafted = largest_cache(left, sum(drafters.values()), tokens) if drafters else tokens
    assert got.drafter_cache_tokens == dict.fromkeys(drafters, drafted)
    assert got.num_bytes <= got.budget_bytes
    plain = rows_that_fit(tokens, asked["max_model_len"], asked["max_num_seqs"])
    assert got.num_sequences_plain == plain >= 1
    assert got.num_sequences_speculative == rows_that_fit(min(tokens, drafted), longest, plain)


@settings(max_examples=100, deadline=None)
@given(ASKED, st.integers(0, 1000))
def test_more_memory_never_gives_less_and_drafters_cost_the_target_nothing(asked, more):
    try:
        got = plan(**asked)
    except NotEnoughMemory:
        return
    richer = plan(**asked | {"budget_bytes": asked["budget_bytes"] + more})
    assert richer.num_sequences_plain >= got.num_sequences_plain
    alone = plan(**asked | {"drafter_bytes_per_token": {}})
    assert (alone.cache_tokens, alone.num_sequences_plain) == (got.cache_tokens, got.num_sequences_plain)
    assert alone.num_sequences_speculative >= got.num_sequences_speculative


@settings(max_examples=200, deadline=None)
@given(ASKED, st.dictionaries(st.sampled_from("xy"), st.integers(0, 300)))
def test_what_is_remembered_is_within_the_budget_and_turns_nobody_away(asked, wishes):
    try:
        without = plan(**asked)
    except NotEnoughMemory:
        with pytest.raises(NotEnoughMemory):
            plan(**asked, remembered_bytes=wishes)
        return
    got = plan(**asked, remembered_bytes=wishes)
    assert got.num_bytes <= got.budget_bytes
    share = (asked["budget_bytes"] - asked["weights_bytes"]) // 16
    granted = {name: min(wish, share) for name, wish in wishes.items()}
    assert got.remembered_bytes in (granted, dict.fromkeys(wishes, 0))
    if got.remembered_bytes == granted:
        less = asked | {"budget_bytes": asked["budget_bytes"] - sum(granted.values())}
        assert plan(**less).cache_tokens == got.cache_tokens
    else:
        assert got.cache_tokens == without.cache_tokens


def test_planned_bytes_are_those_of_the_caches_built():
    shape = {"layers": 2, "kv_heads": 3, "head_dim": 8, "dtype": torch.bfloat16}
    each = PagedCache.bytes_per_token(**shape)
    got = plan_memory(
        weights_bytes=0,
        target_bytes_per_token=each,
        drafter_bytes_per_token={"model": each},
        max_model_len=100,
        max_num_seqs=3,
        budget_bytes=10**7,
    )
    cache = PagedCache(**shape, num_tokens=got.cache_tokens)
    assert cache.num_bytes == got.cache_bytes == got.drafter_cache_bytes["model"]
    assert cache.num_free_tokens == got.cache_tokens == 3 * 128
    cache.reserve([0, 1, 2], [100] * 3)


def test_the_planned_sequences_fit_the_cache_built():
    got = plan(
        weights_bytes=0, target_bytes_per_token=10, max_model_len=30, max_num_seqs=9, tail_tokens=5, budget_bytes=2000
    )
    shape = {"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": torch.int8, "block_size": BLOCK, "key_pad": PAD}
    cache = PagedCache(**shape, num_tokens=got.cache_tokens)
    num_plain, num_speculative = got.num_sequences_plain, got.num_sequences_speculative
    assert (num_plain, num_speculative) == (6, 5)
    assert cache.can_reserve(range(num_plain), [30] * num_plain)
    assert not cache.can_reserve(range(num_plain + 1), [30] * (num_plain + 1))
    assert cache.can_reserve(range(num_speculative), [35] * num_speculative)
    assert not cache.can_reserve(range(num_speculative + 1), [35] * (num_speculative + 1))


def test_a_refusal_says_the_numbers_and_a_max_len_that_works():
    asked = {"weights_bytes": 10**9, "target_bytes_per_token": 50_000, "max_num_seqs": 4, "budget_bytes": 11 * 10**8}
    with pytest.raises(NotEnoughMemory) as refused:
        plan_memory(**asked, max_model_len=4096)
    words = (
        "max_model_len 4,096|1.23 GB|1.00 GB weights|4,608 cache slots at 50.0 kB|budget is 1.10 GB|dtype|to 1,472 at"
    )
    assert [word for word in words.split("|") if word not in str(refused.value)] == []
    assert plan_memory(**asked, max_model_len=1472).num_sequences_plain == 1
    with pytest.raises(NotEnoughMemory):
        plan_memory(**asked, max_model_len=1473)


def test_weights_alone_that_exceed_the_budget_are_refused():
    with pytest.raises(NotEnoughMemory, match="no max_model_len is small enough"):
        plan(weights_bytes=100, target_bytes_per_token=1, max_model_len=1, max_num_seqs=1, budget_bytes=100)


def test_lines_for_the_reader():
    asked = {
        "weights_bytes": 1_090_000_000,
        "target_bytes_per_token": 49_152,
        "drafter_bytes_per_token": {"model:small": 12_288, "ngram": 0},
        "max_model_len": 2048,
        "max_num_seqs": 4,
    }
    assert plan_memory(**asked, budget_bytes=8 * 10**9).lines() == [
        "memory: 1.62 GB of 8.00 GB, weights 1.09 GB",
        "target cache: 428 MB, 8,192 tokens at 49.2 kB",
        "model:small cache: 107 MB, 8,192 tokens at 12.3 kB",
        "room for 4 sequences of 2,048 tokens, 4 with speculation",
    ]
    assert plan_memory(**asked, budget_bytes=1_400_000_000).lines()[2:] == [
        "model:small cache: no memory left, will not draft",
        "room for 2 sequences of 2,048 tokens, 0 with speculation",
    ]
    for budget, line in ((8 * 10**9, "at most 268 MB"), (1_320_000_000, "at most 14.4 MB")):
        told = plan_memory(**asked, budget_bytes=budget, remembered_bytes={"past answers": 256 << 20}).lines()
        assert told[3] == f"past answers: {line}"
    least = plan_memory(**asked, budget_bytes=1_220_000_000, remembered_bytes={"past answers": 256 << 20})
    assert least.lines()[3] == "past answers: no memory left, none are kept"


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


def write_system(folder: Path, available_kb: int, limit: str | None) -> tuple[Path, Path]:
    meminfo = folder / "meminfo"
    meminfo.write_text(f"MemTotal:  900 kB\nMemAvailable:  {available_kb} kB\nHugePages_Free:  0\n")
    if limit is not None:
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("300000\n")
        (folder / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    return meminfo, folder


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, 512_000), ("max", 512_000), ("600000", 350_000), ("100000", 0), ("9000000", 512_000)],
)
def test_available_memory_is_the_machines_or_the_containers(tmp_path, limit, expected):
    assert available_bytes(*write_system(tmp_path, 500, limit)) == expected


def test_without_meminfo_half_of_the_physical_memory_counts(tmp_path):
    half = available_bytes(tmp_path / "none", tmp_path)
    assert half > 0
    if Path("/proc/meminfo").exists():
        total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
        assert half == pytest.approx(total / 2, rel=0.01)


def test_the_default_budget_is_used_and_leaves_a_fifth(monkeypatch):
    monkeypatch.setattr("forerun.cache.plan.available_bytes", lambda: 1000)
    assert default_budget() == 800
    assert default_budget(loaded_bytes=500) == 1200
    got = plan(weights_bytes=100, target_bytes_per_token=1, max_model_len=4, max_num_seqs=10**3)
    assert (got.budget_bytes, got.cache_tokens) == (800, 692)


def test_a_plan_is_plain_data():
    got = plan(weights_bytes=0, target_bytes_per_token=1, max_model_len=4, max_num_seqs=1, budget_bytes=100)
    assert MemoryPlan(**asdict(got)) == got
