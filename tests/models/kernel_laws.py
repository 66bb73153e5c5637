"""Laws of the kernels for any device: on a CPU they run in Triton's interpreter, on a GPU compiled.

Each law is a function of the operations under test; references follow the definition, row by row.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.config import Quantization
from forerun.device import Placement
from forerun.models.backends.gpu.backend import GpuBackend, stack
from forerun.models.backends.gpu.fixed import Inputs, Layout, Shape, tile_rows
from forerun.models.backends.gpu.groups import GroupLinear
from forerun.models.backends.gpu.ops import SPLIT, KeyMap, Ops
from forerun.models.config import read_config
from forerun.models.experts_config import Clamp
from forerun.models.layer import Attention, ExpertLayers, GatedMlp, Mlp, Router, StackedExperts
from forerun.models.rows import power_of_two
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
        layout.add([0] * len(tail), range(len(tail)), runs[i], length, tail)
        chains += [[*range(runs[i], runs[i] + length), *(runs[i] + length + n for n in path)] for path in tail]
    rows = power_of_two(len(chains))
    path = power_of_two(layout.longest_path) if layout.longest_path else 0
    inputs = Inputs(Shape(rows, path, 0, -(-(max(layout.positions) + 1) // SPLIT) * SPLIT), torch.device(device))
    inputs.fill(layout, [], block_size, run * block_size)
    query = torch.randn(rows, heads, head_dim, generator=noise)
    keys, values = (torch.randn(kv_heads, run * block_size + SPARE_SLOTS, head_dim, generator=noise) for _ in range(2))
    query, keys, values = (t.to(device, dtype) for t in (query, keys, values))
    scores = 2 + torch.randn(heads, generator=noise).to(device, dtype) if sinks else None
    return Case(query, keys, values, inputs.key_map(block_size), chains, window, scores, cap)


def scattered(case: Case, seed: int) -> Case:
    """The case with blocks in any order: each tile's table is a permutation instead of a run."""
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


def check_rows_are_independent(ops: Ops, case: Case) -> None:
    """A row has the same bits in a batch and alone, as a token that plain decoding reads after its path."""
    together = case.attended(ops)
    size = case.where.block_size
    for i, chain in enumerate(case.chains):
        num_blocks = -(-len(chain) // size)
        keys, values = (t.new_zeros(t.shape[0], num_blocks * size + SPARE_SLOTS, t.shape[2])
                        for t in (case.keys, case.values))  # fmt: skip
        keys[:, : len(chain)], values[:, : len(chain)] = case.keys[:, chain], case.values[:, chain]
        layout = Layout(1)
        layout.add([0], range(1), 0, len(chain) - 1)
        inputs = Inputs(Shape(1, 0, 0, -(-len(chain) // SPLIT) * SPLIT), case.keys.device)
        inputs.fill(layout, [], size, num_blocks * size)
        alone = replace(
            case, query=case.query[i : i + 1], keys=keys, values=values, where=inputs.key_map(size), chains=[chain]
        )
        assert torch.equal(alone.attended(ops)[0], together[i]), f"row {i} of {len(case.chains)}"


def check_norms(ops: Ops, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Sums and norms of the stream and its additions follow their definitions in float64, and rows are independent."""
    noise = torch.Generator().manual_seed(3)
    rows, hidden = 5, 96

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=noise).to(device, dtype)

    def close(a: Tensor, b: Tensor) -> None:
        assert (a.double() - b.double()).abs().max() <= tolerance * max(1.0, b.double().abs().max().item())

    def norm(x: Tensor, gain: Tensor | None) -> Tensor:
        wide = x.double()
        return wide if gain is None else wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain.double()

    x, delta, gain = draw(rows, hidden), draw(rows, hidden), draw(hidden)
    for more, delta_gain, each in product((None, delta), (None, gain + 1), (None, *in_formats(gain))):
        added, normed = ops.add_norm(x, more, each, 1e-5, delta_gain)
        wanted = x.double() if more is None else x.double() + norm(more, delta_gain)
        close(added, wanted)
        close(normed, norm(wanted, each))
        alone = [ops.add_norm(x[i : i + 1], None if more is None else more[i : i + 1], each, 1e-5, delta_gain)[1]
                 for i in range(rows)]  # fmt: skip
        assert torch.equal(torch.cat(alone), normed)


def in_formats(gain: Tensor) -> list[Tensor]:
    """The gain in the format of the rows, and in float32 if that is another one."""
    return [gain] if gain.dtype == torch.float32 else [gain, gain.float()]


def check_activations(ops: Ops, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """An MLP's activation, of each kind, is its definition in float64."""
    noise = torch.Generator().manual_seed(4)
    gate_up = (3 * torch.randn(5, 2 * 160, generator=noise)).to(device, dtype)
    gate, up = gate_up.double().chunk(2, 1)
    bounded, limits = gate.clamp(max=2.0), Clamp(1.7, 2.0)
    tanh = partial(functional.gelu, approximate="tanh")
    for options, wanted in (
        ({}, functional.silu(gate) * up),
        ({"gelu": True}, tanh(gate) * up),
        ({"plain": True}, functional.silu(gate_up.double())),
        ({"plain": True, "gelu": True}, tanh(gate_up.double())),
        ({"clamp": limits}, bounded * torch.sigmoid(1.7 * bounded) * (up.clamp(-2.0, 2.0) + 1)),
    ):
        found = ops.activate(gate_up, GatedMlp(nothing, nothing, **options))
        assert (found.double() - wanted).abs().max() <= tolerance * wanted.abs().max(), options
        assert torch.equal(found[2:3], ops.activate(gate_up[2:3], GatedMlp(nothing, nothing, **options)))


def nothing(x: Tensor) -> Tensor:
    raise AssertionError("no linear layer is asked")


def check_rotation(ops: Ops, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Queries and keys are normed, each head or all as one, turned by tables of their own, and stored, in float64."""
    noise = torch.Generator().manual_seed(5)
    heads, kv_heads, width, slots, positions = 4, 2, 24, 32, [3, 4, 9, 20, -1]
    shape = replace(read_config(TARGET), heads=heads, kv_heads=kv_heads, head_dim=width, norm_eps=1e-5)
    qkv = torch.randn(5, 8 * width, generator=noise).to(device, dtype)
    angles = torch.randn(64, width // 2, generator=noise).repeat(1, 2)
    turns = angles.cos().to(device), angles.sin().to(device)
    place, slot = (torch.tensor(t, dtype=torch.int32, device=device) for t in (positions, [7, 8, 1, 30, 31]))
    at = place, slot
    gains = torch.randn(6, width, generator=noise).to(device, dtype)
    normed = [(None, False), *product(in_formats(gains), (False, True))]
    for (gain, joint), begins in product(normed, ((0, 0), (21, 21), (21, 42))):
        layer = Attention(None, nothing, nothing, gain, None, None, None, *begins, joint)
        empty = torch.zeros(kv_heads, slots, width, dtype=dtype, device=device)
        stores = (empty, empty.clone())
        query = ops.rotate_store(qkv, turns, at, layer, shape, stores)
        queries, keys, values = qkv.double().view(5, 8, width).split([heads, kv_heads, kv_heads], 1)
        for i, position in enumerate(positions[:-1]):
            found, store = query[i], [each[:, int(at[1][i])] for each in stores]
            parts = zip(
                ((queries[i], found), (keys[i], store[0])), ((0, heads), (heads, 6)), (begins[1], None), strict=True
            )
            for (wanted, mine), part, own in parts:
                if gain is not None:
                    squares = wanted.square().mean() if joint else wanted.square().mean(-1, keepdim=True)
                    wanted = wanted / (squares + 1e-5).sqrt() * gain[slice(*part)].double()
                turn = position + (begins[0] if own is None else own)
                a, b = wanted.chunk(2, 1)
                c, s = (table[turn, : width // 2].double() for table in turns)
                wanted = torch.cat([a * c - b * s, b * c + a * s], 1)
                assert (mine.double() - wanted).abs().max() <= tolerance * wanted.abs().max(), (joint, begins)
            assert torch.equal(store[1], values[i].to(dtype))


def check_runs_have_the_bits_of_splits(ops: Ops, case: Case) -> None:
    """A prompt's tiles, whose keys are runs, give what any tiles give; rows of no tile get zeros."""
    assert not case.where.paths.shape[1], "chains alone"
    runs = replace(case, where=replace(case.where, num_runs=int((case.where.counts > 0).sum())))
    assert torch.equal(runs.attended(ops), case.attended(ops))
    everything = ops.attend(runs.query, runs.keys, runs.values, runs.where, runs.window, runs.sinks, runs.cap)
    assert not everything[len(case.chains) :].any()


def random_experts(
    seed: int, device: str, dtype: torch.dtype, count: int, active: int, normalised: bool, gated: bool, form: GatedMlp,
    quantize: Quantization | None = None,
) -> Mlp:  # fmt: skip
    """Experts of 32 neurons that read 48 numbers, with biases where they are bounded."""
    noise = torch.Generator().manual_seed(seed)
    backend = GpuBackend(Placement(torch.device(device), fixed=True, one_gemm=True))

    def layers(outputs: int, inputs: int) -> ExpertLayers:
        weights = (torch.randn(count, outputs, inputs, generator=noise) * inputs**-0.5).to(device, dtype)
        biases = torch.randn(count, outputs, generator=noise).to(device, dtype) if form.clamp else [None] * count
        return stack([backend.linear(w, b, quantize) for w, b in zip(weights, biases, strict=True)], dtype)

    router = Router(nothing, count, active, normalised)
    num_read = torch.zeros(1, dtype=torch.int64, device=device)
    stacked = StackedExperts(layers(64, 48), layers(48, 32), form, False, num_read)
    return Mlp(None, form if gated else None, router, stacked=stacked)


def exactly(layer: Any) -> Callable[[Tensor], Tensor]:
    """A layer in float64."""
    weight = layer.weight.unpacked(torch.float32) if isinstance(layer, GroupLinear) else layer.weight
    return partial(functional.linear, weight=weight.double(), bias=None if layer.bias is None else layer.bias.double())


def by_each_expert(mlp: Mlp, x: Tensor, logits: Tensor, dense: Tensor | None) -> Tensor:
    """A row's experts by the definition, in float64, expert after expert."""
    assert mlp.router is not None
    assert mlp.stacked is not None
    router, wide, rows = mlp.router, logits[:, : mlp.router.count].double(), []
    layers = [[exactly(each.of(i)) for i in range(router.count)] for each in (mlp.stacked.gate_up, mlp.stacked.down)]
    for i, scores in enumerate(wide):
        chosen = sorted(range(router.count), key=lambda e: (-float(scores[e]), e))[: router.active]
        weights = scores[chosen].softmax(0) if router.normalised else scores.softmax(0)[chosen]
        total = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        for expert, weight in zip(chosen, weights, strict=True):
            first, second = (each[expert] for each in layers)
            gate, up = first(x[i].double()).chunk(2)
            if clamp := mlp.stacked.form.clamp:
                gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit) + 1
            total += weight * second(gate * torch.sigmoid(gate * (clamp.alpha if clamp else 1.0)) * up)
        if dense is not None:
            total += dense[i].double() * torch.sigmoid(logits[i, -1].double())
        rows.append(total)
    return torch.stack(rows)


EXPERTS = {  # how many, how many of them a row takes, whether their weights add up to 1, whether one has a gate, clamp
    "normalised": (4, 2, True, False, None),
    "shared": (7, 3, False, True, None),
    "many": (32, 5, False, False, None),
    "clamped": (8, 1, True, True, Clamp(1.7, 0.5)),
}


def check_experts(
    ops: Ops,
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    quantize: Quantization | None = None,
    kinds: Iterable[str] = EXPERTS,
) -> None:
    """What experts add is the definition in float64 for any choice, and a row has the same bits alone; experts count.

    Results of products are rounded twice on the way.
    """
    for seed, kind in enumerate(kinds):
        count, active, normalised, gated, clamp = EXPERTS[kind]
        form = GatedMlp(nothing, nothing, clamp)
        mlp = random_experts(seed, device, dtype, count, active, normalised, gated, form, quantize)
        noise, outputs = torch.Generator().manual_seed(seed), count + gated
        for rows in (1, 24):
            x, dense = (torch.randn(rows, 48, generator=noise).to(device, dtype) for _ in range(2))
            logits = (torch.randn(rows, outputs, generator=noise) * 2).round().to(device, dtype)  # many are equal
            logits[: rows // 2, 0] = 9  # and many rows choose the first expert
            positions = torch.arange(rows, dtype=torch.int32, device=device)
            positions[rows // 2 :: 3] = -1 if rows > 1 else 0
            given, seen = dense if gated else None, positions >= 0
            assert mlp.stacked is not None
            assert mlp.stacked.num_read is not None
            mlp.stacked.num_read.zero_()
            found = ops.experts(x, logits, positions, mlp, given)
            ranked = logits[seen, :count].float().sort(dim=1, descending=True, stable=True).indices
            assert int(mlp.stacked.num_read) == len(ranked[:, :active].unique()), "each expert counts once"
            wanted = by_each_expert(mlp, x, logits, given)
            assert (found.double() - wanted)[seen].abs().max() <= 4 * tolerance * wanted.abs().max(), seed
            if given is None:
                assert not found[~seen].any(), "padding chooses none"
            for i in range(0, rows if rows > 1 else 0, 8):
                row = slice(i, i + 1)
                alone = ops.experts(x[row], logits[row], positions[row], mlp, None if given is None else given[row])
                assert torch.equal(alone, found[row]), f"row {i} of {rows}"


def check_tiles_of_experts(ops: Ops, device: str, dtype: torch.dtype, rows: int) -> None:
    """Larger tiles, which many rows of an expert get, give the bits of small ones."""
    mlp, noise = random_experts(5, device, dtype, 4, 2, True, False, GatedMlp(nothing, nothing)), torch.Generator()
    x, logits = (torch.randn(rows, n, generator=noise.manual_seed(n)).to(device, dtype) for n in (48, 4))
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    assert mlp.stacked is not None
    large = replace(mlp, stacked=replace(mlp.stacked, tiled=True))
    small, found = (ops.experts(x, logits, positions, each, None) for each in (mlp, large))
    assert torch.equal(found, small)
