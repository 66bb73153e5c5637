"""Texts read by a runner in pieces, and with several numbers of threads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from forerun.models.backends.base import Backend
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder
from forerun.models.packing import WeightLoader
from forerun.models.runner import Read, Runner
from kit.unchecked import unchecked


def logits_in_pieces(runner: Runner, tokens: Sequence[int], sizes: Sequence[int], seq_id: int = 0) -> Tensor:
    """The logits of a text read in pieces of these sizes, each committed before the next."""
    assert sum(sizes) == len(tokens)
    logits, start = [], 0
    for size in sizes:
        logits.append(runner.read([Read(seq_id, tokens[start : start + size], judged=range(size))]).logits)
        runner.keep([seq_id], [range(size)])
        start += size
    runner.release([seq_id])
    return torch.cat(logits)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Within it torch computes with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bits_of_any_reading(runner: Runner, tokens: Sequence[int]) -> Tensor:
    """The logits of a text read token by token; asserts that pieces, threads, batches and trees give the same bits."""
    length = len(tokens)
    with unchecked():
        alone = logits_in_pieces(runner, tokens, [1] * length)
        of_33 = [33] * (length // 33) + [length % 33]
        for num_threads, sizes in ((1, [length]), (2, [17, 3, length - 20]), (3, of_33), (2, [5] * (length // 5))):
            with threads(num_threads):
                assert torch.equal(logits_in_pieces(runner, tokens, sizes), alone), (num_threads, sizes)
        texts = [[*tokens[-count:], *tokens[:3]] for count in (1, 2, 7, 64)]
        together = runner.read([Read(i, t, judged=range(len(t))) for i, t in enumerate(texts)]).logits
        runner.release(range(len(texts)))
        for logits, text in zip(together.split([len(t) for t in texts]), texts, strict=True):
            assert torch.equal(logits, logits_in_pieces(runner, text, [len(text)]))
        runner.read([Read(0, tokens[:60])])
        runner.keep([0], [range(60)])
        nodes, parents = tokens[60:68], [-1, -1, 0, 0, 1, 2, 4, 5]
        logits = runner.read([Read(0, nodes, parents, range(8), scratch=4)]).logits
        paths = [runner.tails[0].path(node) for node in range(8)]
        runner.release([0])
        for node, path in enumerate(paths):
            plain = logits_in_pieces(runner, [*tokens[:60], *(nodes[n] for n in path)], [60] + [1] * len(path))
            assert torch.equal(logits[node], plain[-1]), f"node {node}"
    return alone


def random_decoder(config: ModelConfig, dtype: torch.dtype, backend: Backend, scale: float = 4.0) -> Decoder:
    """A decoder of random weights whose logits are as spread as a trained model's."""
    generator = torch.Generator().manual_seed(5)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return 1 + 0.1 * torch.randn(shape, generator=generator)
        deviation = scale / shape[-1] ** 0.5 if name.startswith(("lm_head", "model.embed")) else shape[-1] ** -0.5
        return deviation * torch.randn(shape, generator=generator)

    return Decoder(config, WeightLoader(take, dtype, backend))
