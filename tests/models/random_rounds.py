"""Random rounds for verification: trees, laws with few likely tokens, and rows without a law."""

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.tree import DraftTree, HostTree
from kit.rows import rows_of

VOCAB = 40
NEUTRAL: dict[str, Any] = {
    field.name: field.default
    for field in fields(SamplingParams)
    if field.name in ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
                      "logit_bias", "banned_tokens", "min_tokens", "stop_token_ids")
}  # fmt: skip
TEMPERATURES = (0.0, 1.0, 0.7, 1e-3, 3.0)


def random_tree(dice: random.Random, width: int) -> HostTree:
    tree = HostTree.of_root(dice.randrange(VOCAB))
    for _ in range(dice.randrange(8)):
        parent = dice.randrange(max(0, len(tree.tokens) - width), len(tree.tokens))
        tree.add(dice.randrange(3), parent, 1.0)
    return tree


def filtered_rows(dice: random.Random, roots: Sequence[int]) -> list[RowSampling]:
    """Rows with a random choice of sampling parameters, other ones in each round."""
    kinds = [name for name in NEUTRAL if dice.random() < dice.choice([0.2, 0.5, 0.8])]
    words, grammars = dice.random() < 0.3, dice.random() < 0.3
    rows = []
    for row, root in zip(rows_of(dice, VOCAB, len(roots)), roots, strict=True):
        rows.append(
            replace(
                row,
                params=replace(row.params, **{name: NEUTRAL[name] for name in NEUTRAL if name not in kinds}),
                tokens=[*row.tokens, root],
                bad_words=row.bad_words if words else (),
                constraint=row.constraint if grammars else None,
            )
        )
    return rows


def round_of(
    dice: random.Random, width: int, batch: int, num_ids: int = VOCAB, device: str = "cpu", filtered: bool = False
) -> tuple[Draws, DraftTree, torch.Tensor]:
    """A round with few likely tokens, so that many draft tokens are accepted; now and then a row without a law."""
    hosts = [random_tree(dice, width) for _ in range(batch)]
    rows = filtered_rows(dice, [host.tokens[0] for host in hosts]) if filtered else []
    for i, host in enumerate(hosts[len(rows) :]):
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
