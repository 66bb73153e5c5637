"""Early exit compared with a checkpoint cut off at the exit, with plain decoding, and with texts read at once."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from dataclasses import replace as changed
from functools import cache
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typing_extensions import override

from draft.rounds import DrafterWithTarget, Row, committed, draws_of
from forerun.config import EngineOptions, Speculation
from forerun.control.controller import FixedDepth, Load
from forerun.draft.base import Budget, Committed, Draft, Drafter
from forerun.draft.model.model import ModelDrafter
from forerun.drafters import draft_label
from forerun.engine.engine import Engine
from forerun.errors import WrongTarget
from forerun.heads.adapter.drafter import EarlyExitDrafter
from forerun.models.batch import TokenBatch
from forerun.models.decoder import Decoder, LayerOutputs
from forerun.models.loading import Blueprint
from forerun.models.runner import Read, Runner
from forerun.request import Request
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftTree
from heads.adapters import FORMATS, SHAPES, Benches, assert_same_drafts, plain, some_texts
from kit.checkpoints import TARGET, read_json, written
from kit.compiled import require_compiler
from kit.texts import VOCAB, random_text
from law.fuzz import Bench, number_format, run, run_checked

LAYERS = 5


def edited(source: Path, folder: Path, layers: int, quiet: int = LAYERS) -> Path:
    """A checkpoint of the first layers with norm and head; layers from `quiet` on add little to their input."""
    folder.mkdir()
    copy(source / "tokenizer.json", folder)
    tensors = load_file(source / "model.safetensors")
    for i in range(layers, LAYERS):
        tensors = {name: t for name, t in tensors.items() if not name.startswith(f"model.layers.{i}.")}
    for i in range(quiet, layers):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{i}.{name}.weight"] *= 0.5
    return written(folder, read_json(source / "config.json") | {"num_hidden_layers": layers}, tensors)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first layers predict its tokens, like those of a model trained for early exit."""
    return edited(TARGET, tmp_path_factory.mktemp("early") / "target", LAYERS, quiet=2)


@pytest.fixture(scope="module")
def bench_of(target: Path) -> Benches:
    return cache(lambda name: Bench.of(target, target, name))


@pytest.mark.short("float32-1")
@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_drafts_are_those_of_a_checkpoint_cut_off_at_the_exit(
    bench_of: Benches, target: Path, name: str, layer: int, tmp_path: Path
) -> None:
    """To the bit: the same chains and trees, survival and laws, after any history."""
    rng, bench = random.Random(layer), bench_of(name)
    short = Blueprint.of(str(edited(target, tmp_path / "short", layer)), **number_format(name))
    runner = bench.with_cache(bench.runner, 2048)
    ours = DrafterWithTarget(runner, EarlyExitDrafter(runner, layer))
    theirs = ModelDrafter(short.load(2048), VOCAB)
    assert assert_same_drafts(ours, theirs, rng, 12) > 30


def engine_of(bench: Bench, layer: int, num_tokens: int = 2048, **options: Any) -> Engine:
    engine = bench.engine(None, num_tokens, options=EngineOptions(**options))
    engine.drafter = EarlyExitDrafter(engine.runner, layer)
    engine.kernels = bench.target.sampling_kernels()
    return engine


@pytest.mark.short("bfloat16-5-2")
@pytest.mark.parametrize(("batch", "layer"), [(1, 4), (5, 2)])
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_keys_and_values_are_those_of_plain_decoding(
    bench_of: Benches, name: str, batch: int, layer: int
) -> None:
    """Chains and trees in batches with prompts in chunks, in a cache that is too small for all sequences."""
    bench = bench_of(name)
    for shapes in SHAPES:
        engine = engine_of(bench, layer, 256 if batch > 1 else 2048, max_num_seqs=batch, chunk_tokens=24)
        texts = some_texts(bench, engine, batch + 1, SHAPES[shapes])
        assert run_checked(bench, engine, texts) == plain(bench, batch + 1, SHAPES[shapes]), shapes
        assert 0 < engine.stats.num_accepted < engine.stats.num_drafted
        assert not engine.drafter.sequences


@dataclass(slots=True)
class Work:
    """Records for each pass of a decoder the number of tokens and the layers."""

    passes: list[tuple[int, int, int]] = field(default_factory=list)

    def layers_run(self) -> int:
        return sum(count * (stop - start) for count, start, stop in self.passes)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    """Counts the passes of decoders; chains that a drafter draws in one call are not counted."""
    work, forward = Work(), Decoder.forward

    def counting(
        self: Decoder, batch: TokenBatch, *rest: object, layers: range | None = None, **more: object
    ) -> LayerOutputs:
        through = layers or range(self.config.layers)
        work.passes.append((len(batch.tokens), through.start, through.stop))
        return forward(self, batch, *rest, layers=layers, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "forward", counting)
        yield work


@dataclass(slots=True)
class WithoutResume:
    """A drafter that does not report the layers it has processed (`resume`)."""

    drafter: Drafter

    def __getattr__(self, name: str) -> object:
        return getattr(self.drafter, name)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        return changed(self.drafter.propose(draws, budgets, tail), resume=None)


def recorded(engine: Engine) -> list[torch.Tensor]:
    """A list to which each pass of the engine appends its logits and states."""
    found: list[torch.Tensor] = []
    read = engine.runner.read

    def reading(*arguments: object) -> object:
        states = read(*arguments)  # type: ignore[arg-type]
        found.extend((states.logits.clone(), states.hidden.clone()))
        return states

    engine.runner.read = reading  # type: ignore[assignment,method-assign]
    return found


@pytest.mark.short("bfloat16-mixed")
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_pass_resumed_at_the_exit_layer_gives_the_bits_of_a_full_pass(
    bench_of: Benches, name: str, shapes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, made = bench_of(name), []
    for without_resume in (False, True):
        engine = engine_of(bench, 3, max_num_seqs=4, chunk_tokens=40)
        if without_resume:
            assert isinstance(engine.drafter, EarlyExitDrafter)
            wrapped: Any = WithoutResume(engine.drafter)  # it has the other methods of the drafter that it wraps
            engine.drafter = wrapped
        texts, found = some_texts(bench, engine, 6, SHAPES[shapes]), recorded(engine)
        with watched(monkeypatch) as work:
            tokens = run(engine, texts)
        made.append((tokens, found, work.layers_run(), engine.stats.num_accepted))
    (tokens, found, layers_run, accepted), (whole_tokens, whole, all_layers, whole_accepted) = made
    assert tokens == whole_tokens
    assert accepted == whole_accepted > 0
    assert all(torch.equal(a, b) for a, b in zip(found, whole, strict=True))
    assert (layers_run < all_layers) == (shapes != "trees")


@pytest.mark.parametrize("name", ["float32", "float32 by torch"])
def test_lower_layers_do_not_process_draft_tokens_again(
    bench_of: Benches, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a round of two sequences with depths 4 and 2, only each last draft token goes through the lower layers."""
    require_compiler()
    bench = bench_of(name)
    engine = engine_of(bench, 2)
    requests = bench.requests()
    for i, depth in enumerate((4, 2)):
        params = SamplingParams(temperature=0.0, seed=i, max_tokens=30, ignore_eos=True)
        (text,) = requests.sequences(Request.of(random_text(20, i), params, Speculation(depth)))
        engine.submit(text)
    engine.step()
    with watched(monkeypatch) as work:
        engine.step()
    assert work.passes[0] == (2, 0, 2)  # the roots, by the drafter
    assert work.passes[-2:] == [(2, 0, 2), (8, 2, 5)]
    drafted = (
        [(2, 0, 2), (1, 0, 2), (1, 0, 2)] if name.endswith("torch") else []
    )  # else in one call, which is not counted
    assert work.passes[1:-2] == drafted


class Pruning(FixedDepth):
    """Removes the last draft token of every chain, or all of them."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    @override
    def admit(self, draft: Draft, load: Load) -> DraftTree:
        tree = draft.tree
        last = tree.valid.sum(1) - 1
        node = torch.arange(tree.tokens.shape[1]).expand_as(tree.tokens)
        gone = (node > 0) if self.first else (node > 0) & (node == last[:, None])
        return changed(tree, tokens=tree.tokens.masked_fill(gone, -1), parents=tree.parents.masked_fill(gone, -1))


@pytest.mark.parametrize("first", [False, True])
def test_a_draft_changed_by_the_controller_is_processed_from_the_first_layer(
    bench_of: Benches, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = bench_of("float32")
    engine = engine_of(bench, 2, max_num_seqs=3)
    engine.controller = Pruning(first)
    texts = some_texts(bench, engine, 6, SHAPES["chains"])
    read = engine.runner.read

    def reading(reads: Sequence[Read], *rest: object) -> object:
        cache = engine.runner.cache
        assert all(cache.tail(r.seq_id) == 0 for r in reads if r.seq_id in cache), "unused slots are taken"
        return read(reads, *rest)  # type: ignore[arg-type]

    engine.runner.read = reading  # type: ignore[assignment,method-assign]
    with watched(monkeypatch) as work:
        assert run_checked(bench, engine, texts) == plain(bench, 6, SHAPES["chains"])
    assert all(start == 0 for _, start, _ in work.passes)
    assert (engine.stats.num_drafted > 0) != first


def test_with_too_little_cache_drafts_are_shallower(bench_of: Benches) -> None:
    """In a cache with space for `left` more tokens, alone and with another sequence."""
    bench, text = bench_of("float32"), random_text(60, 0)
    for left in range(0, 7):
        target = Runner.of(bench.runner.decoder, len(text) - 1 + left, block_size=1)
        drafter = EarlyExitDrafter(target, 2)
        with_target = DrafterWithTarget(target, drafter)
        with_target.observe(committed([Row(0, text)]))
        for budget in (Budget(5), Budget(3, 2, 6)):
            tree = drafter.propose(draws_of([Row(0, text)], VOCAB, temperature=1.0), [budget]).tree
            target.drop([0])
            assert int(tree.depths().max()) == min(left, 5) or budget.width > 1
            assert target.cache.num_free_tokens == left
            target.cache.check()
    target = Runner.of(bench.runner.decoder, 2 * len(text) - 1, block_size=1)
    with_target = DrafterWithTarget(target, EarlyExitDrafter(target, 2))
    rows = [Row(0, text), Row(1, text)]
    with_target.observe(committed(rows))
    tree = with_target.propose(draws_of(rows, VOCAB), [Budget(5), Budget(5)]).tree
    assert tree.depths().max(1).values.tolist() == [1, 0]  # the youngest gets no draft
    assert target.cache.num_free_tokens == 1


def test_a_logits_processor_that_fails_once_while_drafting_changes_no_answer(bench_of: Benches) -> None:
    bench, calls = bench_of("float32"), []

    def fails(text: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append(len(text))
        if len(calls) == 7:
            raise RuntimeError("once")
        return logits

    engine = engine_of(bench, 2)
    requests = bench.requests()
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=20, ignore_eos=True)
    each = [params, changed(params, logits_processors=(fails,)), params]
    texts = [requests.sequences(Request.of(random_text(20, 0), p, Speculation(4)))[0] for p in each]
    assert len({tuple(tokens) for tokens in run_checked(bench, engine, texts)}) == 1
    assert len(calls) > 7
    assert not engine.drafter.lower.tails


@pytest.mark.drafter_raises
def test_an_engine_with_another_runner_disables_the_drafter_with_a_warning(
    bench_of: Benches, caplog: pytest.LogCaptureFixture
) -> None:
    bench = bench_of("float32")
    elsewhere = EarlyExitDrafter(bench.with_cache(bench.runner, 512), 2)
    engine = bench.engine(elsewhere)
    run(engine, some_texts(bench, engine, 1, SHAPES["chains"]))
    assert engine.drafter is None
    (record,) = caplog.records
    assert record.getMessage() == "Drafting is switched off: the drafter early-exit failed."
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], WrongTarget)
    assert "early-exit:2 uses the cache of the target that it was built for" in str(record.exc_info[1])


def test_layers_are_shared_not_copied(bench_of: Benches) -> None:
    target = bench_of("float32 by torch").runner
    part = target.lower(2)
    assert part.cache is target.cache
    assert [a is b for a, b in zip(part.decoder.layers, target.decoder.layers, strict=False)] == [True, True]
    assert part.decoder.head is target.decoder.head
    whole = target.read([Read(7, [1, 2, 3], judged=[2])], taps=(2,))
    target.drop([7])
    lower = part.read([Read(7, [1, 2, 3], judged=[2])])
    part.drop([7])
    assert whole.taps is not None
    assert torch.equal(lower.hidden, whole.taps[:, 0])
    assert torch.equal(lower.logits, target.decoder.logits(whole.taps[2:, 0]))


def test_the_label_does_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert draft_label("early-exit:2") == "early-exit:2"
    assert draft_label("mix[ngram,early-exit:auto]") == "mix[ngram,early-exit:auto]"
