"""What an engine requests from the memory plan: cache for draft tokens, tables for the context; and its warnings."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import LLM, SamplingParams
from forerun.cache.plan import MemoryPlan
from forerun.config import EngineOptions, Speculation
from forerun.control.controller import slots_of
from forerun.draft.base import Budget
from forerun.draft.model.model import ModelDrafter
from forerun.draft.plan import DraftContext, DraftPlan
from forerun.drafters import plan_drafter
from forerun.engine.memory import pass_sizes, plan_engine, tail_tokens
from forerun.models.backends.gpu.capture import Graphs
from forerun.models.backends.gpu.memory import PassSizes, pass_bytes
from forerun.models.backends.gpu.verdicts import MOST_ROWS, ROWS_AT_ONCE, VerdictGraph, verdict_bytes
from forerun.models.loading import Blueprint
from forerun.sampling.draws import Draws
from forerun.sampling.tables import RowSampling
from forerun.shape import StaticTree
from forerun.tree import DraftTree
from forerun.verify.verify import follow_packed
from kit.card import CARD, PLACEMENT, Held, imagined
from kit.checkpoints import SMALL, TARGET, rewritten
from kit.rows import RandomMasks

SPECULATIONS = st.one_of(
    st.builds(Speculation, st.integers(0, 60), st.integers(1, 3), st.none() | st.integers(1, 40)),
    st.just(Speculation(tree=StaticTree([[0], [1], [0, 0], [0, 0, 0], [0, 0, 1]]))),
)


@settings(max_examples=300, deadline=None)
@given(SPECULATIONS, st.integers(1, 3), st.integers(2, 50))
def test_tail_tokens_are_the_most_slots_that_drafts_take_beyond_the_context(
    speculation: Speculation, members: int, longest: int
) -> None:
    beyond = [0]
    for length in range(1, longest):
        budget = Budget.of(speculation, longest - length - 1)
        slots = slots_of(budget if members == 1 else budget.merged(members))
        beyond.append(length + slots - longest)
    assert tail_tokens(speculation, members, longest) == max(beyond)


def planned(
    target: Path | str, draft: str | None = None, speculation: Speculation | None = None, **options: int | None
) -> MemoryPlan:
    blueprint = Blueprint.of(str(target), dtype="float32")
    drafter = plan_drafter(draft, DraftContext(blueprint, blueprint.tokenizer())) if draft else none_drafts()
    options = {"max_model_len": None, "max_num_seqs": 16, "memory_bytes": 10**9} | options
    return plan_engine(blueprint, drafter, speculation or Speculation(4), **options)  # type: ignore[arg-type]


def none_drafts() -> DraftPlan:
    return DraftPlan({}, lambda _tokens, _progress, _target: None)


def test_the_default_budget_leaves_a_fifth_of_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.engine.memory.available_bytes", lambda: 10**9)
    assert planned(TARGET, memory_bytes=None).budget_bytes == 8 * 10**8


def test_deep_chains_take_no_more_memory_than_the_context() -> None:
    for draft in (None, f"model:{SMALL}"):
        plans = [planned(TARGET, draft, Speculation(depth)) for depth in (0, 4, 256)]
        assert plans[0] == plans[1] == plans[2]
        assert plans[0].cache_tokens == 16 * 512
    deep = planned(TARGET, None, Speculation(256, 2))
    assert 16 * 512 < deep.cache_tokens <= 16 * (512 + 512)


def test_a_draft_model_gets_its_part_of_a_small_budget() -> None:
    """A regression test: the target's longest contexts took all memory."""
    llm = LLM("stdlib", draft="model:stdlib-draft", dtype="float32", memory_bytes=150_000_000, speculation=4)
    assert llm.plan.max_model_len == 2048
    assert llm.plan.num_sequences_speculative == llm.plan.num_sequences_plain >= 5
    assert llm.plan.lines()[-1].startswith("without a drafter's cache there would be room for 7 sequences")
    llm.generate("import os", SamplingParams(temperature=0, max_tokens=8))
    assert llm.stats.num_drafted > 0


def test_a_drafter_without_memory_for_its_cache_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    name = f"model:{SMALL}"
    with caplog.at_level(logging.WARNING, "forerun"):
        assert planned(TARGET, name).silent_drafters == []
        assert not caplog.records
        short = planned(TARGET, name, memory_bytes=4_000_000, max_model_len=512)
    assert short.silent_drafters == [name]
    assert f"{name} cache: no memory left, will not draft" in short.lines()
    (record,) = caplog.records
    assert record.name == "forerun"
    assert record.getMessage().startswith(f"{name} will not draft: there is no memory left for its KV cache")


@pytest.fixture(scope="module")
def long_context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of ten million positions, whose tables alone would take 640 MB."""
    folder = tmp_path_factory.mktemp("far") / "model"
    shutil.copytree(TARGET, folder)
    return rewritten(folder, {}, {"max_position_embeddings": 10**7})


def test_rotary_tables_are_as_long_as_the_context(long_context: Path) -> None:
    plan = planned(long_context, f"model:{long_context}", max_model_len=64, memory_bytes=10_000_000)
    assert plan.num_sequences_speculative == plan.num_sequences_plain == 16
    llm = LLM(
        str(long_context),
        f"model:{long_context}",
        dtype="float32",
        max_model_len=64,
        memory_bytes=10_000_000,
        speculation=4,
    )
    assert len(llm.engine.runner.decoder.rope.cos) == 64
    assert isinstance(llm.drafter, ModelDrafter)
    assert len(llm.drafter.runner.decoder.rope.cos) == 64
    llm.generate("Once", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert llm.stats.num_accepted == llm.stats.num_drafted > 40
    assert planned(long_context, memory_bytes=100_000_000).max_model_len < 10**6


def test_rotary_tables_of_a_translated_drafter_are_long_enough() -> None:
    """A drafter with shorter tokens than the target's needs more positions for the same text."""
    llm = LLM("stdlib", "model:stdlib-draft-1024", dtype="float32", max_model_len=200, memory_bytes=200_000_000)
    assert len(llm.engine.runner.decoder.rope.cos) == 200
    assert llm.drafter is not None
    assert len(llm.drafter.model.runner.decoder.rope.cos) == 400  # type: ignore[attr-defined]


def test_passes_take_planned_memory_on_a_gpu_only_with_the_largest_unpacked_layer() -> None:
    host, card = (Blueprint.of(str(TARGET), device=device) for device in (None, PLACEMENT))
    assert host.memory.scratch_bytes == 0
    assert "passes" not in planned(TARGET).lines()[0]
    config, size = card.config, card.dtype.itemsize
    largest = max(config.vocab_size, 2 * config.intermediate) * config.hidden * size
    whole, unpacking = (pass_bytes(config, size, 512, 256, config.vocab_size, unpacks) for unpacks in (False, True))
    assert unpacking == whole + largest
    alone = Blueprint.of(str(TARGET), device=replace(PLACEMENT, one_gemm=True), quantize="int8")
    assert alone.memory.scratch_bytes == replace(alone, spec=card.spec).memory.scratch_bytes > 0


@pytest.mark.short("filters", "penalties")
@pytest.mark.parametrize(
    ("depth", "params"),
    [
        (5, {}),
        (5, {"top_k": 20, "top_p": 0.9, "logprobs": 20}),
        (4, {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 1.0, "logit_bias": {4: 1.0}}),
        (16, {"presence_penalty": 1.0}),
        (1, {"top_p": 0.9, "frequency_penalty": 0.1}),
    ],
    ids=["temperature", "filters", "penalties", "deep", "long"],
)
def test_a_verdict_takes_no_more_gpu_memory_than_planned(
    monkeypatch: pytest.MonkeyPatch, depth: int, params: dict[str, Any]
) -> None:
    """Counted in tensors: memory inside of torch's sort is not seen here."""
    vocab, batch = 8192, MOST_ROWS // (1 + depth)
    text = list(range(vocab // depth))
    rows = [
        RowSampling(i, SamplingParams(**params), i, 0, text, 1, constraint=RandomMasks(i, vocab)) for i in range(batch)
    ]
    with imagined(monkeypatch), torch.inference_mode(), Held() as held:
        graph = VerdictGraph(Graphs(CARD), CARD, vocab)
        tree = DraftTree.of_texts([[vocab - 1, *range(depth)]] * batch).to(CARD)
        draws = Draws(rows, vocab, device=CARD, num_ids=vocab - 8)
        logits = torch.zeros(len(rows) * (1 + depth), vocab).to(CARD)
        before = held.bytes
        assert graph.judge(draws, tree, logits, follow_packed) is not None
        assert graph.tables.flat is not None
        table_bytes = graph.tables.flat.nbytes  # of all verdicts together, with room to grow
    planned = MOST_ROWS * vocab * 4 + verdict_bytes(vocab) + table_bytes - 5 * ROWS_AT_ONCE * vocab * 4
    assert MOST_ROWS * vocab * 4 < held.most_bytes - before <= planned


@pytest.mark.parametrize(
    ("options", "drafts", "sizes"),
    [
        (EngineOptions(), True, PassSizes(784, 272, 16)),
        (EngineOptions(), False, PassSizes(528, 16, 16)),
        (EngineOptions(2, 100, speculation=Speculation(8, 4)), True, PassSizes(100 + 66, 66, 66)),
        (EngineOptions(2, "auto", speculation=Speculation(8)), True, PassSizes(512 + 18, 18, 2)),
    ],
)
def test_passes_are_as_large_as_the_options_say(options: EngineOptions, drafts: bool, sizes: PassSizes) -> None:
    assert pass_sizes(options, drafts) == sizes
