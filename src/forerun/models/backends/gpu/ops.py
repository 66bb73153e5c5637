"""The operations between the matrix products of a pass of fixed shape: one class for any device and one for GPUs.

Both compute the same arithmetic: `TorchOps` with torch's functions on any device, `TritonOps` with fused kernels on a
GPU. In both the result of a row depends on that row alone. A row attends to its keys in the order of its own text,
wherever they are stored, so a tree node sums the same numbers in the same order as plain decoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.device import all_registers
from forerun.errors import DeviceUnavailable
from forerun.models.backends.gpu.experts import run_experts
from forerun.models.backends.torch_cpu.mlp import gelu, routes_of
from forerun.models.config import ModelConfig
from forerun.models.experts_config import Clamp
from forerun.models.layer import Attention, GatedMlp, Mlp
from forerun.models.rows import norm_heads, power_of_two, rms_norm, rotate

SPLIT = 256  # keys of one partial attention sum: rows are split at its multiples, whatever else is in the batch
TILE_ROWS = 32  # rows of a tile of the attention kernel: queries times the query heads that share a key head
WORKERS = 16  # programs that share the splits of a tile
SCRATCH_BYTES = 256 << 20  # most bytes of partial sums; with more, heads are computed one part after another
ACTIVATED = 1024  # columns that one program of `activate` computes
LOG2_E = math.log2(math.e)

Rows = Float[Tensor, "rows width"]
Store = Float[Tensor, "kv_heads slots head_dim"]


@dataclass(frozen=True, slots=True)
class KeyMap:
    """The cache slots of each row's keys. A row without position (-1) is padding and sees nothing.

    Key j of row i lies in block `tables[tile_of[i], j // block_size]` while j < `prefixes[i]`, and in slot
    `paths[i, j - prefixes[i]]` from there up to the row's own position. Tile t consists of rows `firsts[t]` to
    `firsts[t] + counts[t] - 1`, at most `fixed.tile_rows`; they share the slots of their keys up to key `shared[t]`, a
    multiple of SPLIT, or of all keys. `tile_of` is the tile of each row. `num_keys` bounds every position. With
    `num_runs` there are so many tiles, and the keys of each are contiguous slots.
    """

    positions: Int[Tensor, " rows"]
    prefixes: Int[Tensor, " rows"]
    tile_of: Int[Tensor, " rows"]
    firsts: Int[Tensor, " rows"]
    counts: Int[Tensor, " rows"]
    shared: Int[Tensor, " rows"]
    tables: Int[Tensor, "rows blocks"]
    paths: Int[Tensor, "rows path"]
    block_size: int
    num_keys: int
    num_runs: int | None = None


class TorchOps:
    """The row-wise operations of a layer by torch's functions, on any device; tensors are contiguous.

    Attention gathers every key of every row.
    """

    def add_norm(
        self, x: Rows, delta: Rows | None, gain: Tensor | None, eps: float, delta_gain: Tensor | None = None
    ) -> tuple[Rows, Rows]:
        """x + delta (normed first if it has a `delta_gain`), and the RMS norm of that, or the sum itself without
        `gain`."""
        if delta is not None:
            x = x + (delta if delta_gain is None else rms_norm(delta, delta_gain, eps))
        return x, x if gain is None else rms_norm(x, gain, eps)

    def rotate_store(
        self, qkv: Rows, rope: tuple[Tensor, Tensor], at: tuple[Tensor, Tensor], layer: Attention,
        shape: ModelConfig, store: tuple[Store, Store],
    ) -> Float[Tensor, "rows heads head_dim"]:  # fmt: skip
        """The normed and rotated queries; writes keys and values to `store`. `rope`: cosines, sines; `at`: positions,
        slots."""
        heads = qkv.view(len(qkv), -1, shape.head_dim)
        rotated, value = heads[:, : shape.heads + shape.kv_heads], heads[:, shape.heads + shape.kv_heads :]
        sizes, position, slot = (shape.heads, shape.kv_heads), at[0].long().clamp_min(0), at[1].long()
        if layer.qk_norm is not None:
            rotated = norm_heads(rotated, layer.qk_norm, sizes, shape.norm_eps, layer.joint_norm)
        parts, begins = rotated.split(sizes, 1), (layer.query_rope_start, layer.rope_start)
        turned = [[table[position + begin][:, None] for table in rope] for begin in begins]
        rotated = torch.cat([rotate(part, *angles) for part, angles in zip(parts, turned, strict=True)], dim=1)
        store[0].index_copy_(1, slot, rotated[:, shape.heads :].transpose(0, 1))
        store[1].index_copy_(1, slot, value.transpose(0, 1))
        return rotated[:, : shape.heads].contiguous()

    def attend(
        self, query: Float[Tensor, "rows heads head_dim"], keys: Store, values: Store, where: KeyMap,
        window: int | None, sinks: Float[Tensor, " heads"] | None = None, cap: float | None = None,
    ) -> Rows:  # fmt: skip
        """The attention output of each row, over the keys and values that it sees.

        `sinks` are extra scores of each head, which take weight but have no value; `cap` soft-caps the scores.
        """
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
            extra = sinks.float().view(1, len(keys), -1, 1).expand(rows, -1, -1, -1)
            scores = torch.cat([scores, extra], dim=3)
        weights = scores.softmax(-1).nan_to_num(0.0)[..., : where.num_keys]
        mixed = torch.einsum("rhgk,hrkd->rhgd", weights, values[:, slots].float())
        return mixed.reshape(rows, heads * head_dim).to(query.dtype)

    def activate(self, gate_up: Rows, mlp: GatedMlp) -> Float[Tensor, "rows inner"]:
        """The inputs of an MLP's last layer, from the outputs of its first."""
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
        dense: Rows | None,
    ) -> Rows:  # fmt: skip
        """The weighted sum of the experts that the router's `logits` choose for each row, plus `dense`, the shared
        expert's output, times its gate.

        A row without position is routed to no expert.
        """
        assert mlp.router is not None, "the layer needs a router"
        assert mlp.stacked is not None, "the experts must be stacked"
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
        if dense is not None and routes.dense_gate is not None:
            total = total + dense.float() * routes.dense_gate
        if stacked.num_read is not None:
            numbers = torch.arange(mlp.router.count, device=x.device)
            taken = (routes.experts[:, :, None] == numbers) & (positions >= 0)[:, None, None]
            stacked.num_read.add_(taken.any(1).any(0).sum())
        return total.to(x.dtype)


def key_slots(where: KeyMap) -> Int[Tensor, "rows keys"]:
    """The slot of every key of every row; slot 0 beyond the row's own position."""
    key = torch.arange(where.num_keys, device=where.positions.device)
    block = where.tables[where.tile_of.long()][:, key // where.block_size].long()
    slots = block * where.block_size + key % where.block_size
    if where.paths.shape[1]:
        index = key - where.prefixes.long()[:, None]
        on_path = where.paths.long().gather(1, index.clamp(0, where.paths.shape[1] - 1))
        slots = torch.where(index >= 0, on_path, slots)
    return torch.where(key <= where.positions[:, None], slots, 0)


class TritonOps:
    """The operations of TorchOps by the Triton kernels of this folder."""

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
        self, qkv: Rows, rope: tuple[Tensor, Tensor], at: tuple[Tensor, Tensor], layer: Attention,
        shape: ModelConfig, store: tuple[Store, Store],
    ) -> Float[Tensor, "rows heads head_dim"]:  # fmt: skip
        rows = len(qkv)
        query = qkv.new_empty(rows, shape.heads, shape.head_dim)
        keys, values = store
        self.kernels.rotate_store[(rows, shape.heads + 2 * shape.kv_heads)](
            qkv, *rope, *at, qkv if layer.qk_norm is None else layer.qk_norm, query, keys, values,
            shape.norm_eps, keys.stride(0), keys.stride(1), layer.query_rope_start, layer.rope_start,
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
                where.tile_of, where.firsts, where.counts, where.shared,
                *score_factors(head_dim, cap), keys.stride(0), keys.stride(1),
                where.tables.shape[1], num_splits, min(WORKERS, num_splits), window or 0, first,
                GROUP=group, TILE=tile, BLOCK_SIZE=where.block_size, PATHS=where.paths.shape[1], CAPPED=cap is not None,
                **shape, **attention_sizes(width, query.element_size(), self.kernels.BLOCK_KEYS),
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
        """As `attend`, to the bit, if each tile's keys are contiguous: one program computes all splits of a tile. On an
        H200 a prompt of 2,048 tokens takes 0.42 of the time."""
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
        dense: Rows | None,
    ) -> Rows:  # fmt: skip
        kernels = load_kernels("triton_experts")
        return run_experts(kernels, x, logits, positions, mlp, dense, self.activate)


Ops = TorchOps | TritonOps


def attention_sizes(width: int, element_bytes: int, most_keys: int) -> dict[str, int]:
    """Warps of an attention program, keys of a step, and registers of a thread for heads of this width: none spill.

    Products in float32 do not use tensor cores and keep both operands in registers. So they take few keys in a step,
    and for heads of up to 128 the compiler must not spill registers to run more programs at once.
    """
    warps = max(4, min(16, width * element_bytes // 64))
    if element_bytes < 4:
        return {"num_warps": warps, "BLOCK_KEYS": most_keys if width <= 256 else most_keys // 2}
    return {"num_warps": warps, "BLOCK_KEYS": most_keys // 4, **(all_registers(warps) if width <= 128 else {})}


def ops_for(device: torch.device) -> Ops:
    """TritonOps on CUDA; TorchOps on a CPU and on MPS."""
    return TorchOps() if device.type != "cuda" else TritonOps(load_kernels())


def load_kernels(name: str = "triton_kernels") -> Any:
    """The module of this folder with kernels. Raises DeviceUnavailable if triton is not installed."""
    try:
        return import_module(f"{__package__}.{name}")
    except ImportError as error:
        raise DeviceUnavailable(
            f"device 'cuda': its kernels need triton, which is not here ({error}): "
            "pip install triton, or use --device cpu"
        ) from error


def score_factors(head_dim: int, cap: float | None) -> tuple[float, float]:
    """The scale of attention scores and their soft cap (0 for none), both times log2(e), since kernels use exp2. With a
    cap, the scale is for twice the argument of tanh."""
    return LOG2_E / math.sqrt(head_dim) * (1 if cap is None else 2 / cap), LOG2_E * (cap or 0)
