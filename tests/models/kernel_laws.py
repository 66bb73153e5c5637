"""What the kernels must compute, for any device: on a CPU they run in Triton's interpreter, on a GPU as they are.

Each law is a function of the operations under test; references are by definition, row by row.
"""

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.models.backends.gpu.fixed import Inputs, Layout, Shape, tile_rows
from forerun.models.backends.gpu.ops import SPLIT, KeyMap, Ops, TorchOps, power_of_two
from forerun.models.config import read_config
from kit.checkpoints import TARGET

SPARE_SLOTS = 4


@dataclass(frozen=True)
class Case:
    """Rows of a ragged batch in a paged store, and for each row the slots of its keys in the order of its text."""

    query: Tensor
    keys: Tensor
    values: Tensor
    where: KeyMap
    chains: list[list[int]]  # per row, up to itself
    window: int | None
    sinks: Tensor | None = None
    cap: float | None = None

    def attended(self, ops: Ops) -> Tensor:
        seen = self.window, self.sinks, self.cap
        return ops.attend(self.query, self.keys, self.values, self.where, *seen)[: len(self.chains)]


def random_tree(dice: random.Random, num_nodes: int, branching: float) -> list[int]:
    """Parents of a tail; each node hangs off the one before it, or off an earlier one, or off the text."""
    return [i - 1 if dice.random() > branching else dice.randrange(-1, i) for i in range(num_nodes)]


def paths_of(parents: list[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), i])
    return paths


def random_case(
    seed: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    window: int | None = None,
    sinks: bool = False,
    cap: float | None = None,
    lengths: tuple[int, ...] = (0, 5, 300),
    most_nodes: int = 9,
    branching: float = 0.5,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    """Sequences of these lengths, each with a random tail, their blocks in any order in the store."""
    dice, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    tails = [paths_of(random_tree(dice, dice.randint(1, most_nodes), branching)) for _ in lengths]
    sizes = [-(-(length + len(tail)) // block_size) for length, tail in zip(lengths, tails, strict=True)]
    order = list(range(len(lengths)))
    dice.shuffle(order)
    run, runs = 0, {}
    for i in order:
        runs[i] = run * block_size
        run += sizes[i] + dice.randint(0, 2)
    layout, chains = Layout(tile_rows(heads, kv_heads)), []
    for i, (length, tail) in enumerate(zip(lengths, tails, strict=True)):
        layout.add([0] * len(tail), tail, 0, runs[i], length)
        chains += [[*range(runs[i], runs[i] + length), *(runs[i] + length + n for n in path)] for path in tail]
    rows = power_of_two(len(chains))
    path = power_of_two(layout.longest_path) if layout.longest_path else 0
    inputs = Inputs(Shape(rows, path, 0, -(-layout.num_keys // SPLIT) * SPLIT), torch.device(device))
    inputs.fill(layout, [], block_size, run * block_size)
    query = torch.randn(rows, heads, head_dim, generator=noise)
    keys, values = (torch.randn(kv_heads, run * block_size + SPARE_SLOTS, head_dim, generator=noise) for _ in range(2))
    query, keys, values = (t.to(device, dtype) for t in (query, keys, values))
    scores = 2 + torch.randn(heads, generator=noise).to(device, dtype) if sinks else None
    return Case(query, keys, values, inputs.key_map(block_size), chains, window, scores, cap)


def scattered(case: Case, seed: int) -> Case:
    """The same with blocks in any order: each tile's table is a permutation instead of a run."""
    size = case.where.block_size
    num_blocks = case.keys.shape[1] // size
    new = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    to = torch.arange(case.keys.shape[1])
    for block in range(num_blocks):
        to[block * size : (block + 1) * size] = new[block] * size + torch.arange(size)
    back = torch.empty_like(to)
    back[to] = torch.arange(len(to))
    to, back, device = to.int(), back.to(case.keys.device), case.keys.device
    tables = case.where.tables.clamp_max(num_blocks - 1).cpu().long()
    where = replace(
        case.where,
        tables=torch.tensor(new, dtype=torch.int32)[tables].to(device),
        paths=to[case.where.paths.cpu().long()].to(device),
    )
    chains = [[int(to[slot]) for slot in chain] for chain in case.chains]
    return replace(case, keys=case.keys[:, back].contiguous(), values=case.values[:, back].contiguous(), where=where,
                   chains=chains)  # fmt: skip


def by_definition(case: Case) -> Tensor:
    """Every row on its own, in float64 over exactly the keys it sees; a sink is the score of one more, of no value."""
    rows = []
    for i, chain in enumerate(case.chains):
        seen = chain if case.window is None else chain[-case.window :]
        k, v = (t[:, seen].double() for t in (case.keys, case.values))
        q = case.query[i].double().view(len(k), -1, k.shape[2])
        scores = q @ k.transpose(1, 2) / k.shape[2] ** 0.5
        scores = scores if case.cap is None else (scores / case.cap).tanh() * case.cap
        if case.sinks is not None:
            scores = torch.cat([scores, case.sinks.double().view(len(k), -1, 1)], 2)
        rows.append((scores.softmax(2)[..., : len(seen)] @ v).flatten())
    return torch.stack(rows)


def check_attention(ops: Ops, case: Case, tolerance: float) -> None:
    """The kernel agrees with the definition."""
    found, wanted = case.attended(ops).double(), by_definition(case)
    assert (found - wanted).abs().max() <= tolerance


def check_rows_are_strangers(ops: Ops, case: Case) -> None:
    """A row has the same bits alone, as a token that plain decoding reads behind its own path, as in company."""
    together = case.attended(ops)
    size = case.where.block_size
    for i, chain in enumerate(case.chains):
        num_blocks = -(-len(chain) // size)
        keys, values = (t.new_zeros(t.shape[0], num_blocks * size + SPARE_SLOTS, t.shape[2])
                        for t in (case.keys, case.values))  # fmt: skip
        keys[:, : len(chain)], values[:, : len(chain)] = case.keys[:, chain], case.values[:, chain]
        layout = Layout(1)
        layout.add([0], [[0]], 0, 0, len(chain) - 1)
        inputs = Inputs(Shape(1, 0, 0, -(-len(chain) // SPLIT) * SPLIT), case.keys.device)
        inputs.fill(layout, [], size, num_blocks * size)
        alone = replace(
            case, query=case.query[i : i + 1], keys=keys, values=values, where=inputs.key_map(size), chains=[chain]
        )
        assert torch.equal(alone.attended(ops)[0], together[i]), f"row {i} of {len(case.chains)}"


def check_row_work(ops: Ops, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Norms, rotation, storing and activation give what torch's own functions give, and rows are strangers."""
    noise = torch.Generator().manual_seed(3)
    rows, hidden, inner, slots = 5, 96, 160, 32
    shape = replace(read_config(TARGET), heads=4, kv_heads=2, head_dim=24, norm_eps=1e-5)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=noise).to(device, dtype)

    def close(a: Tensor, b: Tensor) -> None:
        assert (a.float() - b.float()).abs().max() <= tolerance * max(1.0, b.float().abs().max().item())

    x, delta, gain, qkv = draw(rows, hidden), draw(rows, hidden), draw(hidden), draw(rows, 8 * 24)
    plain = TorchOps()
    for other in (None, delta):
        for found, wanted in zip(ops.add_norm(x, other, gain, 1e-5), plain.add_norm(x, other, gain, 1e-5), strict=True):
            close(found, wanted)
        alone = [
            ops.add_norm(x[i : i + 1], None if other is None else other[i : i + 1], gain, 1e-5)[1] for i in range(5)
        ]
        assert torch.equal(torch.cat(alone), ops.add_norm(x, other, gain, 1e-5)[1])
    gate_up = draw(rows, 2 * inner)
    close(ops.silu_mul(gate_up), plain.silu_mul(gate_up))
    angles = torch.randn(64, 12, generator=noise)
    turns = tuple(torch.cat([t, t], 1).to(device) for t in (angles.cos(), angles.sin()))
    at = tuple(torch.tensor(t, dtype=torch.int32, device=device) for t in ([3, 4, 9, 63, -1], [7, 8, 1, 30, 31]))
    for gains in (None, draw(6, 24)):
        stores = [tuple(torch.zeros(2, slots, 24, dtype=dtype, device=device) for _ in range(2)) for _ in range(2)]
        close(ops.rotate_store(qkv, turns, at, gains, shape, stores[0]),
              plain.rotate_store(qkv, turns, at, gains, shape, stores[1]))  # fmt: skip
        for found, wanted in zip(*stores, strict=True):
            close(found, wanted)
