"""The operations between the matrix products of a pass of fixed shape: one protocol with two implementations.

Both implementations compute the same arithmetic: `TorchOps` consists of torch's own functions and runs anywhere,
`TritonOps` of kernels without gaps between them on a GPU. In both a row's result depends on that row alone. A row
attends to its keys in the order of its own text, wherever they are stored, so a node of a tree adds up the same numbers
in the same order as plain decoding would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.errors import DeviceUnavailable
from forerun.models.backends.gpu.experts import run_experts
from forerun.models.backends.torch_cpu.mlp import gelu, routes_of
from forerun.models.config import ModelConfig
from forerun.models.experts_config import Clamp
from forerun.models.layer import Attention, GatedMlp, Mlp
from forerun.models.rows import norm_heads, power_of_two, rms_norm, rotate

SPLIT = 256  # keys of one partial sum: a row is cut at multiples of it, whatever its company
TILE_ROWS = 32  # query heads that share a key head, times queries: one tile of the attention kernel
WORKERS = 16  # programs among which the splits of a tile are dealt out
SCRATCH_BYTES = 256 << 20  # of partial sums; beyond it heads are done in turns
ACTIVATED = 1024  # numbers that a program does
LOG2_E = math.log2(math.e)

Rows = Float[Tensor, "rows width"]
Store = Float[Tensor, "kv_heads slots head_dim"]


@dataclass(frozen=True, slots=True)
class KeyMap:
    """Where each row's keys lie. A row without position (-1) is padding and sees nothing.

    Key j of row i lies in block `tables[homes[i], j // block_size]` while j < `prefixes[i]`, and in slot
    `paths[i, j - prefixes[i]]` from there up to the row's own position. Tile t is rows `firsts[t]` to
    `firsts[t] + counts[t] - 1`; their keys lie in the same slots up to `shared[t]`, a multiple of SPLIT, or all of
    them. `num_keys` bounds every position. With `num_runs` there are so many tiles, whose keys are a run of slots each,
    in their order.
    """

    positions: Int[Tensor, " rows"]
    prefixes: Int[Tensor, " rows"]
    homes: Int[Tensor, " rows"]
    firsts: Int[Tensor, " rows"]
    counts: Int[Tensor, " rows"]
    shared: Int[Tensor, " rows"]
    tables: Int[Tensor, "rows blocks"]
    paths: Int[Tensor, "rows path"]
    block_size: int
    num_keys: int
    num_runs: int | None = None


@runtime_checkable
class Ops(Protocol):
    """Row-wise work of one layer; tensors are contiguous."""

    def add_norm(
        self, x: Rows, delta: Rows | None, gain: Tensor | None, eps: float, delta_gain: Tensor | None = None
    ) -> tuple[Rows, Rows]:
        """x + delta, which is normed where it has gains, and the norm of the sum: without gains the sum itself."""
        ...

    def rotate_store(
        self, qkv: Rows, turns: tuple[Tensor, Tensor], at: tuple[Tensor, Tensor], layer: Attention,
        shape: ModelConfig, store: tuple[Store, Store],
    ) -> Float[Tensor, "rows heads head_dim"]:  # fmt: skip
        """Normed and rotated queries; keys and values are stored. `turns`: cosines, sines; `at`: positions, slots."""
        ...

    def attend(
        self, query: Float[Tensor, "rows heads head_dim"], keys: Store, values: Store, where: KeyMap,
        window: int | None, sinks: Float[Tensor, " heads"] | None = None, cap: float | None = None,
    ) -> Rows:  # fmt: skip
        """Each row's weighted sum of the values it sees.

        `sinks` are scores of nothing, which take weight; `cap` bounds scores softly.
        """
        ...

    def activate(self, gate_up: Rows, mlp: GatedMlp) -> Float[Tensor, "rows inner"]:
        """What goes into an MLP's last layer, of what came out of its first."""
        ...

    def experts(
        self, x: Rows, logits: Float[Tensor, "rows outputs"], positions: Int[Tensor, " rows"], mlp: Mlp,
        every: Rows | None,
    ) -> Rows:  # fmt: skip
        """What the experts add that rows choose by their logits, and `every` beside them, by its gate.

        A row without position chooses none.
        """
        ...


class TorchOps:
    """By torch's own functions, on any device; attention looks up every key of every row."""

    def add_norm(
        self, x: Rows, delta: Rows | None, gain: Tensor | None, eps: float, delta_gain: Tensor | None = None
    ) -> tuple[Rows, Rows]:
        if delta is not None:
            x = x + (delta if delta_gain is None else rms_norm(delta, delta_gain, eps))
        return x, x if gain is None else rms_norm(x, gain, eps)

    def rotate_store(
        self, qkv: Rows, turns: tuple[Tensor, Tensor], at: tuple[Tensor, Tensor], layer: Attention,
        shape: ModelConfig, store: tuple[Store, Store],
    ) -> Float[Tensor, "rows heads head_dim"]:  # fmt: skip
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        rotated, value = heads[:, : shape.heads + shape.kv_heads], heads[:, shape.heads + shape.kv_heads :]
        sizes, position, slot = (shape.heads, shape.kv_heads), at[0].long().clamp_min(0), at[1].long()
        if layer.qk_norm is not None:
            rotated = norm_heads(rotated, layer.qk_norm, sizes, shape.norm_eps, layer.joint_norm)
        parts, begins = rotated.split(sizes, 1), (query_turn(layer), layer.first_turn)
        turned = [[table[position + begin][:, None] for table in turns] for begin in begins]
        rotated = torch.cat([rotate(part, *angles) for part, angles in zip(parts, turned, strict=True)], dim=1)
        store[0].index_copy_(1, slot, rotated[:, shape.heads :].transpose(0, 1))
        store[1].index_copy_(1, slot, value.transpose(0, 1))
        return rotated[:, : shape.heads].contiguous()

    def attend(
        self, query: Float[Tensor, "rows heads head_dim"], keys: Store, values: Store, where: KeyMap,
        window: int | None, sinks: Float[Tensor, " heads"] | None = None, cap: float | None = None,
    ) -> Rows:  # fmt: skip
        rows, heads, head_dim = query.shape
        slots = key_slots(where)
        key = torch.arange(where.num_keys, device=query.device)
        seen = key <= where.positions[:, None]
        if window is not None:
            seen &= key > where.positions[:, None] - window
        grouped = query.view(rows, len(keys), -1, head_dim).float()
        scores = torch.einsum("rhgd,hrkd->rhgk", grouped, keys[:, slots].float()) / math.sqrt(head_dim)
        scores = scores if cap is None else torch.tanh(scores / cap) * cap
        scores = scores.masked_fill(~seen[:, None, None], -math.inf)
        if sinks is not None:
            nothing = sinks.float().view(1, len(keys), -1, 1).expand(rows, -1, -1, -1)
            scores = torch.cat([scores, nothing], dim=3)
        weights = scores.softmax(-1).nan_to_num(0.0)[..., : where.num_keys]
        mixed = torch.einsum("rhgk,hrkd->rhgd", weights, values[:, slots].float())
        return mixed.reshape(rows, heads * head_dim).to(query.dtype)

    def activate(self, gate_up: Rows, mlp: GatedMlp) -> Float[Tensor, "rows inner"]:
        activation = gelu if mlp.gelu else functional.silu
        if mlp.plain:
            return activation(gate_up)
        gate, up = gate_up.chunk(2, dim=1)
        if mlp.clamp is None:
            return activation(gate) * up
        limit, gate = mlp.clamp.limit, gate.float().clamp(max=mlp.clamp.limit)
        turned = gate * torch.sigmoid(gate * mlp.clamp.alpha) * (up.float().clamp(-limit, limit) + 1)
        return turned.to(up.dtype)

    def experts(
        self, x: Rows, logits: Float[Tensor, "rows outputs"], positions: Int[Tensor, " rows"], mlp: Mlp,
        every: Rows | None,
    ) -> Rows:  # fmt: skip
        assert mlp.router is not None, "what chooses experts"
        assert mlp.stacked is not None, "experts are one"
        routes, stacked = routes_of(mlp.router, logits.float()), mlp.stacked
        weights = torch.where(positions[:, None] < 0, 0.0, routes.weights)
        per_rank = x.new_zeros(*routes.experts.shape, x.shape[1])
        for expert in range(mlp.router.count):
            inner = self.activate(stacked.gate_up.of(expert)(x), stacked.form)
            chosen = (routes.experts == expert)[:, :, None]
            per_rank = torch.where(chosen, stacked.down.of(expert)(inner)[:, None], per_rank)
        total = torch.zeros_like(x, dtype=torch.float32)
        for rank in range(mlp.router.active):
            total = total + per_rank[:, rank].float() * weights[:, rank : rank + 1]
        if every is not None and routes.every is not None:
            total = total + every.float() * routes.every
        if stacked.num_read is not None:
            numbers = torch.arange(mlp.router.count, device=x.device)
            taken = (routes.experts[:, :, None] == numbers) & (positions >= 0)[:, None, None]
            stacked.num_read.add_(taken.any(1).any(0).sum())
        return total.to(x.dtype)


def key_slots(where: KeyMap) -> Int[Tensor, "rows keys"]:
    """The slot of every key of every row; slot 0 beyond the row's own position."""
    key = torch.arange(where.num_keys, device=where.positions.device)
    block = where.tables[where.homes.long()][:, key // where.block_size].long()
    slots = block * where.block_size + key % where.block_size
    if where.paths.shape[1]:
        behind = key - where.prefixes.long()[:, None]
        astray = where.paths.long().gather(1, behind.clamp(0, where.paths.shape[1] - 1))
        slots = torch.where(behind >= 0, astray, slots)
    return torch.where(key <= where.positions[:, None], slots, 0)


class TritonOps:
    """By the kernels of triton_kernels.py."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels

    def add_norm(
        self, x: Rows, delta: Rows | None, gain: Tensor | None, eps: float, delta_gain: Tensor | None = None
    ) -> tuple[Rows, Rows]:
        rows, hidden = x.shape
        added = x if delta is None else torch.empty_like(x)
        normed = added if gain is None else torch.empty_like(x)
        if normed is not x:
            self.kernels.add_norm[(rows,)](
                x, x if delta is None else delta, x if delta_gain is None else delta_gain, x if gain is None else gain,
                added, normed, eps, HIDDEN=hidden, WIDTH=power_of_two(hidden), ADDS=delta is not None,
                DELTA_NORMS=delta_gain is not None, NORMS=gain is not None, num_warps=8, **self.kernels.OPTIONS,
            )  # fmt: skip
        return added, normed

    def rotate_store(
        self, qkv: Rows, turns: tuple[Tensor, Tensor], at: tuple[Tensor, Tensor], layer: Attention,
        shape: ModelConfig, store: tuple[Store, Store],
    ) -> Float[Tensor, "rows heads head_dim"]:  # fmt: skip
        rows = len(qkv)
        query = qkv.new_empty(rows, shape.heads, shape.head_dim)
        keys, values = store
        self.kernels.rotate_store[(rows, shape.heads + 2 * shape.kv_heads)](
            qkv, *turns, *at, qkv if layer.qk_norm is None else layer.qk_norm, query, keys, values,
            shape.norm_eps, keys.stride(0), keys.stride(1), query_turn(layer), layer.first_turn,
            HEADS=shape.heads, KV_HEADS=shape.kv_heads, HEAD_DIM=shape.head_dim,
            HALF=power_of_two(shape.head_dim // 2), NORMS=layer.qk_norm is not None, JOINT=layer.joint_norm,
            num_warps=1, **self.kernels.OPTIONS,
        )  # fmt: skip
        return query

    def attend(
        self, query: Float[Tensor, "rows heads head_dim"], keys: Store, values: Store, where: KeyMap,
        window: int | None, sinks: Float[Tensor, " heads"] | None = None, cap: float | None = None,
    ) -> Rows:  # fmt: skip
        if where.num_runs is not None:
            return self.attend_runs(query, keys, values, where, window, sinks, cap)
        rows, heads, head_dim = query.shape
        kv_heads, group = len(keys), heads // len(keys)
        num_splits = -(-where.num_keys // SPLIT)
        at_once = max(1, min(kv_heads, SCRATCH_BYTES // (rows * group * num_splits * (head_dim + 2) * 4)))
        largest, total = (query.new_empty(rows * at_once * group * num_splits, dtype=torch.float32) for _ in range(2))
        mixed = query.new_empty(rows * at_once * group * num_splits * head_dim, dtype=torch.float32)
        out = query.new_empty(rows, heads * head_dim)
        tile, width = max(TILE_ROWS, power_of_two(group)), max(16, power_of_two(head_dim))
        for first in range(0, kv_heads, at_once):
            part = min(at_once, kv_heads - first)
            shape = {"HEADS": heads, "PART_HEADS": part * group, "HEAD_DIM": head_dim, "WIDTH": width}
            shape |= {"WINDOWED": window is not None, "SPLIT": SPLIT, **self.kernels.OPTIONS}
            self.kernels.attend_splits[(rows, part, min(WORKERS, num_splits))](
                query, keys[first:], values[first:], largest, total, mixed,
                where.tables, where.positions, where.prefixes, where.paths,
                where.homes, where.firsts, where.counts, where.shared,
                *score_factors(head_dim, cap), keys.stride(0), keys.stride(1),
                where.tables.shape[1], num_splits, min(WORKERS, num_splits), window or 0, first,
                GROUP=group, TILE=tile, QUERIES=tile // group, BLOCK_SIZE=where.block_size, PATHS=where.paths.shape[1],
                CAPPED=cap is not None, **shape,
                **attention_sizes(width, query.element_size(), self.kernels.BLOCK_KEYS),
            )  # fmt: skip
            self.kernels.join_splits[(rows, part * group)](
                largest, total, mixed, where.positions, out if sinks is None else sinks, out, num_splits, window or 0,
                first * group, SINKS=sinks is not None, **shape, num_warps=1,
            )  # fmt: skip
        return out

    def attend_runs(
        self, query: Float[Tensor, "rows heads head_dim"], keys: Store, values: Store, where: KeyMap,
        window: int | None, sinks: Float[Tensor, " heads"] | None, cap: float | None,
    ) -> Rows:  # fmt: skip
        """The bits of `attend`, where each tile's keys are a run: all its splits are one program's. On an H200 a prompt
        of 2,048 tokens takes 0.42 of the time."""
        rows, heads, head_dim = query.shape
        group, out = heads // len(keys), query.new_zeros(rows, heads * head_dim)
        load_kernels("prompt_kernels").attend_run[where.num_runs, len(keys)](
            query, keys, values, out, where.tables, where.positions, where.firsts, where.counts,
            out if sinks is None else sinks, *score_factors(head_dim, cap), keys.stride(0), keys.stride(1),
            where.tables.shape[1], window or 0,
            HEADS=heads, GROUP=group, HEAD_DIM=head_dim, WIDTH=max(16, power_of_two(head_dim)),
            TILE=max(TILE_ROWS, power_of_two(group)), BLOCK_SIZE=where.block_size, WINDOWED=window is not None,
            CAPPED=cap is not None, SINKS=sinks is not None, SPLIT=SPLIT, num_stages=2, **self.kernels.OPTIONS,
            **attention_sizes(max(16, power_of_two(head_dim)), query.element_size(), self.kernels.BLOCK_KEYS),
        )  # fmt: skip
        return out

    def activate(self, gate_up: Rows, mlp: GatedMlp) -> Float[Tensor, "rows inner"]:
        rows, width = len(gate_up), gate_up.shape[1] // (1 if mlp.plain else 2)
        out, clamp = gate_up.new_empty(rows, width), mlp.clamp or Clamp(1.0, 1.0)
        self.kernels.activate[rows, -(-width // ACTIVATED)](
            gate_up, out, clamp.alpha, clamp.limit, WIDTH=width, PLAIN=mlp.plain, GELU=mlp.gelu,
            CLAMPED=mlp.clamp is not None, BLOCK=ACTIVATED, **self.kernels.OPTIONS,
        )  # fmt: skip
        return out

    def experts(
        self, x: Rows, logits: Float[Tensor, "rows outputs"], positions: Int[Tensor, " rows"], mlp: Mlp,
        every: Rows | None,
    ) -> Rows:  # fmt: skip
        kernels = load_kernels("triton_experts")
        return run_experts(kernels, x, logits, positions, mlp, every, self.activate)


def attention_sizes(width: int, element_bytes: int, most_keys: int) -> dict[str, int]:
    """Warps of an attention program, and keys of a step, for heads this wide: so that no registers spill.

    Products of float32 are no tensor cores' and have both factors in registers.
    """
    warps = max(4, min(16, width * element_bytes**2 // 128))
    return {"num_warps": warps, "BLOCK_KEYS": most_keys if width * element_bytes <= 512 else most_keys // 2}


def query_turn(layer: Attention) -> int:
    """Where the table of a layer's queries begins."""
    return layer.first_turn if layer.first_query_turn is None else layer.first_query_turn


def ops_for(device: torch.device) -> Ops:
    """Kernels where Triton compiles them, torch's own functions on a CPU and on MPS."""
    return TorchOps() if device.type != "cuda" else TritonOps(load_kernels())


def load_kernels(name: str = "triton_kernels") -> Any:
    """The module of this folder with the kernels; raises DeviceUnavailable where triton is not installed."""
    try:
        return import_module(f"{__package__}.{name}")
    except ImportError as error:
        raise DeviceUnavailable(
            f"device 'cuda': its kernels need triton, which is not here ({error}): "
            "pip install triton, or use --device cpu"
        ) from error


def score_factors(head_dim: int, cap: float | None) -> tuple[float, float]:
    """What products of queries and keys are multiplied by, and the bound of what comes of it, both for logarithms to
    base 2; with a bound the first is for twice the argument of its tanh."""
    return LOG2_E / math.sqrt(head_dim) * (1 if cap is None else 2 / cap), LOG2_E * (cap or 0)
