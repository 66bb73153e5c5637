"""Measures single kernels with the shapes of Llama 3 8B: microseconds, and the bytes that each has to move.

A kernel is measured in a graph of many launches. These use several copies of weights, keys and values in turn, so that
they are read from memory, as in a pass; activations may stay in the GPU's cache. Attention is compared with torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from benchmarks.gpu.passes import config_of
from benchmarks.gpu.setting import Setting, WeightFormat, has_triton
from torch import Tensor
from torch.nn import functional

from forerun.models.backends.gpu.backend import GpuBackend
from forerun.models.backends.gpu.fixed import Inputs, Layout, Shape, tile_rows
from forerun.models.backends.gpu.graphs import LEAST_ROWS
from forerun.models.backends.gpu.ops import SPLIT, Ops, TorchOps, TritonOps, load_kernels, ops_for
from forerun.models.backends.gpu.tiles import kernel_us
from forerun.models.config import ModelConfig
from forerun.models.layer import Attention, GatedMlp, Linear, Mlp, Router
from forerun.models.rows import power_of_two

ROWS = (1, 8, 16, 32, 64, 128)
ROW_WORK = (1, 16, 128, 2048)
CONTEXTS, TINY_CONTEXTS = (512, 2048, 8192), (40,)
COMPANY = ((1, 1), (1, 8), (8, 1), (8, 8))  # sequences, and the rows of each
BLOCK_SIZE, SPARE_SLOTS = 64, 4
EXPERTS, TINY_EXPERTS = (128, 8, 2048, 768), (4, 2, 64, 32)  # all, those of a row, hidden size, size of each
EXPERT_ROWS, ROUTINGS = (1, 8, 32, 144, 2048), 8
COLD_BYTES = 200 << 20  # of all copies: more than the cache of any card
FEWEST_LAUNCHES, MOST_COPIES, RUNS, PROMPT_RUNS = 8, 32, 15, 5


def copies_of(num_bytes: float) -> int:
    """The number of copies of a tensor of `num_bytes` that are needed so that none is read from the GPU's cache."""
    return max(2, min(MOST_COPIES, -(-COLD_BYTES // max(1, int(num_bytes)))))


def matrices(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """The numbers of outputs and inputs of the matrices of a pass, by name."""
    return {
        "qkv": ((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
        "out": (c.hidden, c.heads * c.head_dim),
        "gate and up": (2 * c.intermediate, c.hidden),
        "down": (c.hidden, c.intermediate),
        "head": (c.vocab_size, c.hidden),
    }


def drawing(device: torch.device) -> Callable[..., Tensor]:
    """A function that draws a random tensor of a given shape, in bfloat16."""
    noise = torch.Generator(device).manual_seed(0)
    return partial(torch.randn, generator=noise, device=device, dtype=torch.bfloat16)


def products(setting: Setting, form: WeightFormat) -> None:
    """Measure every matrix product of a layer, and of the head, with several numbers of rows."""
    backend, device = GpuBackend(setting.placement(form, products=True)), setting.device
    drawn = drawing(device)
    for name, (outputs, inputs) in [*matrices(config_of(setting)).items()][: 1 if setting.dry else None]:
        num_bytes = form.bits / 8 * outputs * inputs
        copies = 1 if setting.dry else copies_of(num_bytes)
        layers = [backend.linear(drawn(outputs, inputs) * 0.02, None, form.quantize) for _ in range(copies)]
        for rows in ROWS[1:2] if setting.dry else ROWS:
            x = drawn(rows, inputs)
            bodies = [partial(layer, x) for layer in layers] * (1 if setting.dry else -(-FEWEST_LAUNCHES // copies))
            setting.add("products", format=form.name, matrix=name, outputs=outputs, inputs=inputs, rows=rows,
                        us=kernel_us(bodies, device, RUNS),
                        bytes=num_bytes + 2 * rows * (inputs + outputs))  # fmt: skip


def ops_of(setting: Setting) -> Ops:
    """The kernels; in a dry run Triton's interpreter runs them, or torch's functions replace them without Triton."""
    if not setting.dry:
        return ops_for(setting.device)
    return TritonOps(load_kernels()) if has_triton() else TorchOps()


def chains(
    c: ModelConfig, lengths: Sequence[int], rows: int, slots: int, captured: bool, device: torch.device
) -> Inputs:
    """The tables of a pass over a chain of `rows` after each text; the slots of sequence i begin at i * `slots`."""
    layout = Layout(tile_rows(c.heads, c.kv_heads))
    for i, length in enumerate(lengths):
        layout.add([0] * rows, range(rows), i * slots, length)
    total = len(lengths) * rows
    size = max(LEAST_ROWS, power_of_two(total)) if captured else total
    keys = c.max_positions if captured else max(lengths) + rows  # a captured pass serves the longest text
    tables = Inputs(Shape(size, 0, 0, -(-keys // SPLIT) * SPLIT, captured), device)
    tables.fill(layout, [], BLOCK_SIZE, len(lengths) * slots)
    return tables


def attention(setting: Setting) -> None:
    """Measure attention of a few rows after long texts, as in captured passes, and of prompts."""
    c, contexts = config_of(setting), TINY_CONTEXTS if setting.dry else CONTEXTS
    for sequences, rows in COMPANY[1:2] if setting.dry else COMPANY:
        for length in contexts:
            attend(setting, c, "behind a text", sequences, rows, length)
    for length in contexts:
        attend(setting, c, "prompt", 1, length, 0)


def attend(setting: Setting, c: ModelConfig, kind: str, sequences: int, rows: int, length: int) -> None:
    """Measure one case, and torch's attention over the same keys, with all rows of a sequence in one masked matrix."""
    ops, device, captured = ops_of(setting), setting.device, length > 0
    slots = -(-(length + rows) // BLOCK_SIZE) * BLOCK_SIZE
    tables = chains(c, [length] * sequences, rows, slots, captured, device)
    where = tables.key_map(BLOCK_SIZE)
    drawn = drawing(device)
    keys = length + rows
    num_bytes = 4.0 * sequences * keys * c.kv_heads * c.head_dim
    copies = 1 if setting.dry else 2 if not captured else copies_of(num_bytes)
    stores = [tuple(drawn(c.kv_heads, sequences * slots + SPARE_SLOTS, c.head_dim) for _ in range(2))
              for _ in range(copies)]  # fmt: skip
    query = drawn(tables.shape.rows, c.heads, c.head_dim)
    ours = [partial(ops.attend, query, k, v, where, None) for k, v in stores]
    apart = query[: sequences * rows].view(sequences, rows, c.heads, c.head_dim).transpose(1, 2)
    whole = [
        tuple(t[:, : sequences * slots].unflatten(1, (sequences, slots)).transpose(0, 1)[:, :, :keys] for t in store)
        for store in stores
    ]
    mask = None if rows == 1 or not captured else torch.ones(rows, keys, dtype=torch.bool, device=device).tril(length)
    theirs = [
        partial(functional.scaled_dot_product_attention, apart, k, v, attn_mask=mask, is_causal=not captured,
                enable_gqa=True)
        for k, v in whole
    ]  # fmt: skip
    runs = RUNS if captured else PROMPT_RUNS
    pairs = sequences * rows * (length + (rows + 1) / 2)
    setting.add("attention", kind=kind, sequences=sequences, rows=rows, context=length,
                us=kernel_us(ours, device, runs), torch_us=kernel_us(theirs, device, runs),
                bytes=num_bytes, flops=4.0 * pairs * c.heads * c.head_dim)  # fmt: skip


def experts(setting: Setting, form: WeightFormat) -> None:
    """Measure the experts of a layer, from the router's logits to the sum, with a different routing in each launch."""
    backend, ops, device = GpuBackend(setting.placement(form, products=True)), ops_of(setting), setting.device
    drawn, (count, active, hidden, inner) = drawing(device), TINY_EXPERTS if setting.dry else EXPERTS

    def linear(outputs: int, inputs: int) -> Linear:
        return backend.linear(drawn(outputs, inputs) * 0.02, None, form.quantize)

    layers = [GatedMlp(linear(2 * inner, hidden), linear(hidden, inner)) for _ in range(count)]
    stacked = backend.stacked(layers, torch.bfloat16)
    mlp = Mlp(None, None, Router(unread, count, active, True), stacked=stacked)
    assert stacked.num_read is not None, "the backend counts the experts that are read"
    for rows in EXPERT_ROWS[1:2] if setting.dry else EXPERT_ROWS:
        positions = torch.zeros(rows, dtype=torch.int32, device=device)
        bodies = [partial(ops.experts, drawn(rows, hidden), drawn(rows, count), positions, mlp, None)
                  for _ in range(1 if setting.dry else ROUTINGS)]  # fmt: skip
        before = int(stacked.num_read)
        for body in bodies:
            body()
        num_read = (int(stacked.num_read) - before) / len(bodies)
        setting.add("experts", format=form.name, rows=rows, num_read=num_read, us=kernel_us(bodies, device, RUNS),
                    bytes=num_read * form.bits / 8 * 3 * inner * hidden + 4 * rows * hidden)  # fmt: skip


def unread(x: Tensor) -> Tensor:
    """A linear layer that must not be called."""
    raise AssertionError("the measured kernels call no linear layer")


def row_work(setting: Setting) -> None:
    """Measure the kernels between products and attention: norms, rotation and storing, activation."""
    c, device, ops = config_of(setting), setting.device, ops_of(setting)
    drawn, layer = drawing(device), Attention(None, unread, unread, None, None, None)
    for rows in ROW_WORK[:1] if setting.dry else ROW_WORK:
        x, delta, gain, gate_up = (
            drawn(rows, c.hidden),
            drawn(rows, c.hidden),
            drawn(c.hidden),
            drawn(rows, 2 * c.intermediate),
        )
        qkv = drawn(rows, (c.heads + 2 * c.kv_heads) * c.head_dim)
        store = (drawn(c.kv_heads, rows + SPARE_SLOTS, c.head_dim), drawn(c.kv_heads, rows + SPARE_SLOTS, c.head_dim))
        turns = (torch.ones(rows, c.head_dim, device=device), torch.zeros(rows, c.head_dim, device=device))
        numbers = torch.arange(rows, dtype=torch.int32, device=device)
        bodies: dict[str, tuple[Callable[[], object], int]] = {
            "add and norm": (partial(ops.add_norm, x, delta, gain, c.norm_eps), 4 * c.hidden),
            "rotate and store": (
                partial(ops.rotate_store, qkv, turns, (numbers, numbers), layer, c, store),
                2 * qkv.shape[1],
            ),
            "silu": (partial(ops.activate, gate_up, GatedMlp(unread, unread)), 3 * c.intermediate),
        }
        for name, (body, numbers_moved) in bodies.items():
            us = kernel_us([body] * (1 if setting.dry else 20), device, RUNS)
            setting.add("row_work", kernel=name, rows=rows, us=us, bytes=2.0 * rows * numbers_moved)
