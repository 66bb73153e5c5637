"""Adapters compared with exits without one, with deeper exits, with plain decoding, and with texts read at once."""

import inspect
import json
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draft.rounds import DrafterWithTarget, Row, committed, draws_of
from forerun import cli
from forerun.commands.bench import BenchOptions
from forerun.commands.prove import ProveOptions
from forerun.config import EngineOptions, Speculation
from forerun.draft.base import NO_DRAFT, Budget
from forerun.draft.model.drafted_text import DraftRow
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.engine.engine import Engine
from forerun.errors import ForerunError, ModelNotFound, UnknownDrafter
from forerun.heads.adapter.drafter import EarlyExitDrafter
from forerun.models.runner import Read, Runner
from forerun.options import ModelOptions
from heads.adapters import (
    FORMATS,
    SHAPES,
    adapter_of,
    assert_same_drafts,
    other_family_adapter,
    plain,
    silent_adapter,
    some_texts,
)
from kit.checkpoints import TARGET
from kit.command import command, refusal
from kit.texts import VOCAB, random_text
from law.fuzz import Bench, bench_of, rows_of, run

CHAINS, MIXED = SHAPES["chains"], SHAPES["mixed"]


def context(bench: Bench) -> DraftContext:
    return DraftContext(bench.target, bench.target.tokenizer())


def drafter_of(
    bench: Bench, runner: Runner, spec: str, num_tokens: int = 2048, block_size: int = 16
) -> EarlyExitDrafter:
    """The drafter of a spec for this runner; its adapter's cache has small blocks."""
    plan = plan_drafter(spec, context(bench))
    drafter = plan.build(dict.fromkeys(plan.models, 0), None, runner)
    assert isinstance(drafter, EarlyExitDrafter)
    if drafter.adapter is None:
        return drafter
    adapter = type(runner).of(drafter.adapter.decoder, num_tokens, block_size)
    return EarlyExitDrafter(runner, drafter.layer, adapter)


def with_target(bench: Bench, spec: str) -> DrafterWithTarget:
    runner = bench.with_cache(bench.runner, 2048)
    return DrafterWithTarget(runner, drafter_of(bench, runner, spec))


def adapted(drafter: object) -> tuple[EarlyExitDrafter, Runner]:
    """A drafter and the runner of its adapter."""
    assert isinstance(drafter, EarlyExitDrafter)
    assert drafter.adapter is not None
    return drafter, drafter.adapter


@pytest.mark.short("float32-next two layers", "bfloat16-next layer")
@pytest.mark.parametrize("kind", ["silent", "next layer", "next two layers"])
@pytest.mark.parametrize("name", FORMATS)
def test_drafts_are_those_of_an_exit_that_computes_the_same(name: str, kind: str, tmp_path: Path) -> None:
    """To the bit, after any history: an adapter that adds nothing is none, the next layers are a later exit."""
    rng, bench, layer = random.Random(kind), bench_of(name), 2
    deeper = {"silent": 0, "next layer": 1, "next two layers": 2}[kind]
    folder = tmp_path / "a"
    if deeper == 0:
        silent_adapter(folder, layer)
    else:
        adapter_of(TARGET, folder, layer, range(layer, layer + deeper), norm=deeper == 2)
    ours, theirs = (
        with_target(bench, f"early-exit:{layer}:{folder}"),
        with_target(bench, f"early-exit:{layer + deeper}"),
    )
    assert assert_same_drafts(ours, theirs, rng, 8) > 20


def test_accepted_draft_tokens_are_not_read_again(tmp_path: Path) -> None:
    """Draft tokens of a chain that were read are not read again. `check` compares the adapter's cache, in engines."""
    spec, text = f"early-exit:2:{other_family_adapter(tmp_path / 'a', 2)}", random_text(30, 0)
    drafter = with_target(bench_of("float32"), spec)
    _, adapter = adapted(drafter.drafter)
    drafter.observe(committed([Row(0, text)]))
    draft_tokens = drafter.propose(draws_of([Row(0, text)], VOCAB), [Budget(4)]).tree.tokens[0, 1:].tolist()
    read, plain_read = list[int](), adapter.read

    def counted(reads: Sequence[Read], *rest: Any, **more: Any) -> Any:
        read.extend(len(r.tokens) for r in reads)
        return plain_read(reads, *rest, **more)

    adapter.read = counted  # type: ignore[method-assign]
    text += [*draft_tokens, 7]
    drafter.observe(committed([Row(0, text)], [len(text) - 6]))
    assert drafter.outlook([0]).unread == [1], "the last draft token"
    drafter.propose(draws_of([Row(0, text)], VOCAB), [Budget(1)])
    assert read == [1, 1], "the last draft token, and the root"


def engine_of(bench: Bench, spec: str, num_tokens: int, adapter_tokens: int, **options: object) -> Engine:
    engine = bench.engine(None, num_tokens, options=EngineOptions(**options))  # type: ignore[arg-type]
    engine.drafter = drafter_of(bench, engine.runner, spec, adapter_tokens)
    engine.kernels = bench.target.sampling_kernels()
    return engine


def check(engine: Engine, fresh: DrafterWithTarget) -> None:
    """Assert that the adapter's cache of each sequence equals that of a fresh drafter which observes it at once."""
    (drafter, adapter), (other, others_adapter) = adapted(engine.drafter), adapted(fresh.drafter)
    adapter.cache.check()
    texts = [t for t in engine.sequences.values() if t.num_read and t.id in drafter.sequences]
    fresh.observe(committed([Row(t.id, t.tokens[: t.num_read + 1]) for t in texts]))
    for each in (drafter, other):
        each.catch_up([DraftRow(text.id, (), NO_DRAFT) for text in texts if not each.sequences[text.id].lost], 0)
    for text in texts:
        if drafter.sequences[text.id].lost:
            assert text.id not in adapter.cache
            continue
        assert torch.equal(rows_of(adapter, text.id), rows_of(others_adapter, text.id))


@pytest.mark.short("float32-mixed", "int4-chains")
@pytest.mark.parametrize(("batch", "shapes"), [(1, MIXED), (5, MIXED), (5, CHAINS)], ids=["alone", "mixed", "chains"])
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_plain_decoding(
    name: str, batch: int, shapes: tuple[Speculation, ...], tmp_path: Path
) -> None:
    """In batches with prompts in chunks and caches too small for all sequences, of which the adapter's is smaller."""
    bench, spec = bench_of(name), f"early-exit:2:{adapter_of(TARGET, tmp_path / 'a', 2, range(3, 5))}"
    sizes = (256, 200) if batch > 1 else (2048, 2048)
    engine = engine_of(bench, spec, *sizes, max_num_seqs=batch, chunk_tokens=24)
    texts = some_texts(bench, engine, batch + 1, shapes)
    rounds = count(1)

    def after_round() -> None:
        engine.runner.cache.check()
        if next(rounds) % 5 == 0:
            check(engine, with_target(bench, spec))

    assert run(engine, texts, after_round=after_round) == plain(bench, batch + 1, shapes)
    assert 0 < engine.stats.num_accepted < engine.stats.num_drafted
    drafter, adapter = adapted(engine.drafter)
    assert not any((drafter.sequences, drafter.lower.tails, adapter.tails))
    assert adapter.cache.num_rows == 0


def test_with_too_little_cache_or_positions_drafts_are_shallower(tmp_path: Path) -> None:
    """With little space in the adapter's cache, and with few positions left."""
    bench, text = bench_of("float32"), random_text(60, 0)
    far = f"early-exit:2:{other_family_adapter(tmp_path / 'far', 2)}"
    for left in range(0, 7):
        near = other_family_adapter(tmp_path / f"near {left}", 2, max_position_embeddings=len(text) - 1 + left)
        for spec, num_tokens in ((far, len(text) - 1 + left), (f"early-exit:2:{near}", 2048)):
            runner = bench.with_cache(bench.runner, 2048)
            drafter = DrafterWithTarget(runner, drafter_of(bench, runner, spec, num_tokens, block_size=1))
            drafter.observe(committed([Row(0, text)]))
            assert drafter.outlook([0]).limit == [left]
            for budget in (Budget(5), Budget(3, 2, 6)):
                tree = drafter.propose(draws_of([Row(0, text)], VOCAB, temperature=1.0), [budget]).tree
                assert int(tree.depths().max()) == min(left, 5) or budget.width > 1
                assert int(tree.depths().max()) <= left
        drafter.observe(committed([Row(0, text + [5] * 9)], [len(text) - 1]))
        assert drafter.outlook([0]).limit == [0]  # its text is longer than the adapter's context
        assert adapted(drafter.drafter)[1].cache.num_rows == 0
        drafter.forget([0])
        drafter.observe(committed([Row(0, text)]))
        assert drafter.outlook([0]).limit == [left]


def test_an_adapter_needs_the_targets_states(tmp_path: Path) -> None:
    """It declares taps, and cannot be a judge, which would need states of draft tokens."""
    bench, spec = bench_of("float32"), f"early-exit:2:{other_family_adapter(tmp_path / 'a', 2)}"
    assert with_target(bench, spec).taps == (2,)
    with pytest.raises(UnknownDrafter, match="cannot verify the drafts"):
        plan_drafter(f"cascade[ngram,{spec}]", context(bench))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4"])
def test_memory_of_an_adapter_is_planned(name: str, tmp_path: Path) -> None:
    """Planned are weights, rotary tables, and its own cache; embedding and head are the target's."""
    bench, folder = bench_of(name), other_family_adapter(tmp_path / "a", 3, layers=2, max_position_embeddings=100)
    spec = f"early-exit:3:{folder}"
    plan = plan_drafter(spec, context(bench))
    size = bench.target.dtype.itemsize
    memory = plan.models[spec]
    assert memory.bytes_per_token == 2 * 2 * 2 * 16 * size  # layers, K and V, heads, their width
    held = sum(t.numel() for t in load_file(folder / "model.safetensors").values()) * {"int8": 1, "int4": 4.5 / 8}.get(
        name, size
    )
    assert memory.weights_bytes == int(held)
    assert (memory.bytes_per_position, memory.positions(512), memory.positions(64)) == (2 * 16 * 4, 100, 64)
    other = plan_drafter(f"early-exit:3:{other_family_adapter(tmp_path / 'b', 3)}", context(bench))
    assert plan.fingerprint() != other.fingerprint()
    (_, adapter), target = adapted(plan.build({spec: 128}, None, bench.runner)), bench.runner
    assert adapter.decoder.embedding is target.decoder.embedding
    assert adapter.decoder.head is target.decoder.head
    assert adapter.decoder.dtype == target.decoder.dtype
    assert type(adapter.decoder.executor) is type(target.decoder.executor)
    assert adapter.cache.num_free_tokens == 128


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("early-exit:2:", UnknownDrafter, "name the adapter's folder after the second colon, as in early-exit:2:DIR"),
        ("early-exit:5:a", UnknownDrafter, "at most 4, as the target has 5"),
        ("early-exit::a", UnknownDrafter, "at least 1"),
        ("early-exit:2:/no/such/folder", ModelNotFound, "/no/such/folder"),
    ],
)
def test_a_misspelt_adapter_is_refused(spec: str, error: type[ForerunError], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_drafter(spec, context(bench_of("float32")))


def test_an_adapter_is_used_with_early_exit(tmp_path: Path) -> None:
    """The adapter joins the drafter's name, the text stays the same, and any other drafter is refused in one line."""
    folder = adapter_of(TARGET, tmp_path / "an adapter, trained", 2, range(3, 5))
    common = ("generate", "-m", str(TARGET), "Once upon a time", "-n", "24", "--seed", "7", "--json", "--depth", "4")
    plain = json.loads(command(*common).stdout)
    drafted = json.loads(command(*common, "--draft", "early-exit:2", "--adapter", str(folder)).stdout)
    spelt = json.loads(command(*common, "--draft", f'early-exit:"2:{folder}"').stdout)
    assert drafted["text"] == spelt["text"] == plain["text"]
    assert drafted["stats"]["num_accepted"] == spelt["stats"]["num_accepted"] > 0
    for draft in ((), ("-d", "ngram"), ("-d", "early-exit"), ("-d", "early-exit:2:a"), ("-d", "cascade[ngram,ngram]")):
        message = refusal(*common, *draft, "--adapter", "DIR")
        assert message.startswith("error: --adapter DIR needs --draft early-exit:E")
    assert "exit_layer is 2" in refusal(*common, "--draft", "early-exit:3", "--adapter", str(folder))


def test_every_command_that_drafts_takes_an_adapter() -> None:
    assert ModelOptions("m", draft="early-exit:2", adapter=Path("DIR")).draft == "early-exit:2:DIR"
    assert ProveOptions(Path("p.txt"), "m", "early-exit:2", adapter=Path("DIR")).draft == "early-exit:2:DIR"
    assert BenchOptions(draft="early-exit:2", adapter=Path("a,b")).draft == 'early-exit:"2:a,b"'
    for each in cli.app.registered_commands:
        names = inspect.signature(each.callback).parameters  # type: ignore[arg-type]
        drafts = "draft" in names and each.name != "widen"  # which widens the drafter that it is given
        assert drafts == ("adapter" in names), each.name
