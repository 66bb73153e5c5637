"""Rounds to be judged, at random: trees, laws of few likely tokens, and rows without a law."""

import random

import torch

from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftTree, HostTree

VOCAB = 40
TEMPERATURES = (0.0, 1.0, 0.7, 1e-3, 3.0)


def random_tree(dice: random.Random, width: int) -> HostTree:
    tree = HostTree.of_root(dice.randrange(VOCAB))
    for _ in range(dice.randrange(8)):
        parent = dice.randrange(max(0, len(tree.tokens) - width), len(tree.tokens))
        tree.add(dice.randrange(3), parent, 1.0)
    return tree


def round_of(
    dice: random.Random, width: int, batch: int, num_ids: int = VOCAB, device: str = "cpu"
) -> tuple[Draws, DraftTree, torch.Tensor]:
    """A round of few likely tokens, so that many guesses are right; now and then a row without a law."""
    hosts = [random_tree(dice, width) for _ in range(batch)]
    rows = []
    for i, host in enumerate(hosts):
        text = [dice.randrange(VOCAB) for _ in range(dice.randint(0, 5))] + host.tokens[:1]
        params = SamplingParams(temperature=dice.choice(TEMPERATURES), seed=dice.randrange(9))
        rows.append(RowSampling(i, params, dice.randrange(2**63), 0, text, len(text)))
    children = [host.parents.count(node) for host in hosts for node in range(len(host.tokens))]
    tree = DraftTree.of_hosts(hosts, max(1, *children))
    logits = torch.randn(len(children), VOCAB, generator=torch.Generator().manual_seed(dice.randrange(99)))
    logits[:, :3] += 8
    for row in range(len(logits)):
        if dice.random() < 0.2:
            logits[row, dice.randrange(VOCAB)] = dice.choice([float("nan"), float("inf"), -float("inf")])
        if dice.random() < 0.05:
            logits[row] = -float("inf")
    return Draws(rows, VOCAB, num_ids=num_ids, device=device), tree.to(torch.device(device)), logits.to(device)
