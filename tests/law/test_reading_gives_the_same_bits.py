"""A text's logits and cache have the same bits in any chunks, batches, trees and positions of the cache."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.models.backends.torch_cpu.backend import TorchBackend
from forerun.models.config import ModelConfig, read_config
from forerun.models.decoder import Decoder
from forerun.models.experts_config import ExpertsConfig
from forerun.models.families import NUMBERED_MOE
from forerun.models.loading import Blueprint
from forerun.models.packing import WeightLoader
from forerun.models.runner import Read, Runner
from forerun.models.weights import Checkpoint
from kit.checkpoints import SMALL, TARGET
from kit.reading import logits_in_pieces, random_decoder, threads
from kit.unchecked import unchecked
from law.fuzz import rows_of

CHUNKS = {1: (1, 3, 8, 33, 64, 201, 400), 2: (201, 400, 1100)}  # by threads
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full)]


@pytest.fixture(scope="module")
def stories() -> ModelConfig:
    return read_config(TARGET)


@pytest.fixture(scope="module", params=DTYPES, ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module")
def decoders(dtype: torch.dtype, stories: ModelConfig) -> list[Decoder]:
    """A real model, a windowed one of random weights whose head_dim, width and context are awkward, one with experts.

    The last one has all options of experts: a shared expert, biases, sinks, dense layers.
    """
    real = Decoder(stories, WeightLoader(Checkpoint(TARGET, dtype).take, dtype, TorchBackend()))
    odd = replace(
        stories, max_positions=2048, intermediate=83, windows=(None, 700, 37, None, 512), qkv_bias=True, qk_norm=True
    )
    experts = ExpertsConfig(
        NUMBERED_MOE,
        layers=(0, 2, 3),
        count=6,
        active=2,
        intermediate=45,
        shared=30,
        normalised=True,
        bias=True,
        clamp=None,
    )
    sparse = replace(odd, windows=(None, 300, None, 41, None), sinks=True, experts=experts)
    return [real, random_decoder(odd, dtype, TorchBackend()), random_decoder(sparse, dtype, TorchBackend())]


@pytest.fixture(scope="module")
def drafting(dtype: torch.dtype) -> list[Decoder]:
    """The decoders that drafters run: a draft model, a target, and the target's lower layers."""
    name = str(dtype).removeprefix("torch.")
    target, small = (Blueprint.of(str(folder), dtype=name).load(64).decoder for folder in (TARGET, SMALL))
    return [small, target, target.lower(1), target.lower(4)]


def read_in_chunks(decoder: Decoder, text: list[int], chunk: int) -> Tensor:
    sizes = [min(chunk, len(text) - first) for first in range(0, len(text), chunk)]
    with unchecked():
        return logits_in_pieces(Runner.of(decoder, 4096, 16), text, sizes)


def keep(runner: Runner, seq_id: int, text: list[int]) -> None:
    """Read more of a text and keep it."""
    runner.read([Read(seq_id, text)])
    runner.keep([seq_id], [range(len(text))])


@pytest.mark.short("fp32-100-1", "bf16-1100-2")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("length", [100, 300, 1100])
def test_chunks_and_threads_give_the_same_bits(decoders: list[Decoder], length: int, num_threads: int) -> None:
    """Wide prompts are where torch splits work over threads."""
    for decoder in decoders:
        length = min(length, decoder.config.max_positions)
        text = [random.Random(length).randrange(3, 500) for _ in range(length)]
        whole = read_in_chunks(decoder, text, length)
        assert whole.std() > 1.5
        with threads(num_threads):
            for chunk in CHUNKS[num_threads]:
                assert torch.equal(read_in_chunks(decoder, text, chunk), whole), chunk


def test_batches_give_the_same_bits(decoders: list[Decoder]) -> None:
    rng = random.Random(1)
    for decoder in decoders:
        texts = [[rng.randrange(3, 500) for _ in range(n)] for n in (1, 2, 7, 64, 130, 501)]
        alone = [read_in_chunks(decoder, text, len(text)) for text in texts]
        together = (
            Runner.of(decoder, 4096, 16).read([Read(i, t, judged=range(len(t))) for i, t in enumerate(texts)]).logits
        )
        for i, logits in enumerate(together.split([len(t) for t in texts])):
            assert torch.equal(logits, alone[i])


def random_tree(rng: random.Random, nodes: int, shape: str) -> list[int]:
    parent = {"chain": lambda i: i - 1, "star": lambda i: 0, "bush": lambda i: rng.randrange(i)}[shape]
    return [-1] + [parent(i) for i in range(1, nodes)]


def read_tree(runner: Runner, text: list[int], tokens: list[int], parents: list[int]) -> list[list[int]]:
    """Read a tree behind a text that is kept; the paths of its nodes, each of which has the logits of its path."""
    count = len(tokens)
    logits = runner.read([Read(0, tokens, parents, range(count), scratch=count)]).logits
    paths = [runner.tails[0].path(n) for n in range(count)]
    for node, path in enumerate(paths):
        plain = read_in_chunks(runner.decoder, text + [tokens[n] for n in path], 64)
        assert torch.equal(logits[node], plain[-1])
    return paths


SHAPES = ["chain", "star", "bush"]


@pytest.mark.short("bf16-bush")
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tree_node_has_the_logits_of_its_path(
    decoders: list[Decoder], drafting: list[Decoder], shape: str
) -> None:
    """And the kept path leaves the same bits in the cache as the path read as a text."""
    rng = random.Random(2)
    for decoder in (*decoders, *drafting):
        for length in (0, 5, 63, min(505, decoder.config.max_positions - 7)):
            r, text = Runner.of(decoder, 4096, 16), [rng.randrange(3, 500) for _ in range(length)]
            if text:
                keep(r, 0, text)
            nodes = rng.randrange(1, 8)
            tokens, parents = [rng.randrange(3, 500) for _ in range(nodes)], random_tree(rng, nodes, shape)
            chosen = rng.choice(read_tree(r, text, tokens, parents))
            r.keep([0], [chosen])
            fresh = Runner.of(decoder, 4096, 16)
            keep(fresh, 1, text + [tokens[n] for n in chosen])
            assert torch.equal(rows_of(r, 0), rows_of(fresh, 1))


@pytest.mark.parametrize("shape", SHAPES)
def test_lower_layers_read_trees_in_the_targets_cache(drafting: list[Decoder], shape: str) -> None:
    """The drafter reads a tree and drops it, then the target reads it: each node has the logits of its path."""
    rng, whole = random.Random(6), drafting[1]
    for layers in (1, 4):
        target, text = Runner.of(whole, 4096, 16), [rng.randrange(3, 500) for _ in range(70)]
        keep(target, 0, text)
        tokens, parents = [rng.randrange(3, 500) for _ in range(7)], random_tree(rng, 7, shape)
        for runner in (target.lower(layers), target):
            read_tree(runner, text, tokens, parents)
            runner.drop([0])
        assert target.cache.length(0) == len(text)
        target.cache.check()


def test_a_tree_grown_level_by_level_has_the_logits_of_the_tree_read_at_once(decoders: list[Decoder]) -> None:
    rng = random.Random(3)
    for decoder in decoders:
        parents = [-1, -1, 0, 0, 1, 2, 4, 5]
        levels = [[0, 1], [2, 3, 4], [5, 6], [7]]
        text, tokens = [rng.randrange(3, 500) for _ in range(70)], [rng.randrange(3, 500) for _ in parents]
        at_once, grown = Runner.of(decoder, 4096, 16), Runner.of(decoder, 4096, 16)
        for r in (at_once, grown):
            keep(r, 0, text)
        expected = at_once.read([Read(0, tokens, parents, range(8), scratch=4)]).logits
        for level in levels:
            read = Read(0, [tokens[n] for n in level], [parents[n] for n in level], range(len(level)), scratch=4)
            assert torch.equal(grown.read([read]).logits, expected[level])


@pytest.mark.full
def test_cache_rows_keep_their_bits_when_they_are_moved(decoders: list[Decoder]) -> None:
    """Small blocks and a nearly full cache: rows grow into each other and move."""
    rng = random.Random(4)
    for decoder in decoders:
        r = Runner.of(decoder, num_tokens=400, block_size=8)
        texts = [[rng.randrange(3, 500) for _ in range(120)] for _ in range(3)]
        done, moves, starts = [0, 0, 0], 0, {}
        while min(done) < 120:
            i = rng.randrange(3)
            part = texts[i][done[i] : done[i] + rng.randrange(1, 9)]
            if part:
                keep(r, i, part)
                done[i] += len(part)
            for j in range(3):
                if j in r.cache:
                    moves += starts.get(j, r.cache.start(j)) != r.cache.start(j)
                    starts[j] = r.cache.start(j)
        assert moves > 0
        for i, text in enumerate(texts):
            fresh = Runner.of(decoder, 4096, 16)
            keep(fresh, 0, text)
            assert torch.equal(rows_of(r, i), rows_of(fresh, 0))
