"""The GPU memory that passes and verdicts need in addition to weights and caches, for the memory plan.

The temporary tensors of captured graphs lie in the graphs' memory pool, which all graphs of a model share in turn;
computations outside of graphs need other memory. `tests/models/test_gpu_memory.py` compares these estimates with
measured use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.models.backends.gpu.capture import LOGITS_ROWS
from forerun.models.backends.gpu.groups import LONG_READ
from forerun.models.backends.gpu.ops import SCRATCH_BYTES, SPLIT
from forerun.models.backends.gpu.verdicts import verdict_bytes
from forerun.models.config import ModelConfig
from forerun.models.rows import few_rows

STEP = 128  # rows of uncaptured passes are multiples of it
WIDE = 4  # bytes of a logit
OUTSIDE = 8.2  # memory of a verdict without a graph, in units of the round's logits; `top_p` needs the most
STREAMS = 6  # copies of the residual stream that a layer holds at once
TABLES_BYTES = 8 << 20  # of the tables of passes, verdicts and chains


@dataclass(frozen=True, slots=True)
class PassSizes:
    """Largest numbers of rows in one pass: rows, rows with logits (`judged`), and those of a drafter's pass."""

    rows: int
    judged: int
    drafted: int

    def of_drafter(self) -> PassSizes:
        return replace(self, judged=self.drafted)


USUAL_PASSES = PassSizes(rows=784, judged=272, drafted=16)  # with the default engine options


def scratch_bytes(config: ModelConfig, size: int, passes: PassSizes, vocab: int, unpacks: bool) -> int:
    """Bytes of the graphs' buffers and pool, and of the largest other tensors, for a dtype of `size` bytes.

    `unpacks`: weights are quantized in groups, and dequantized for passes of many rows.
    """
    logits, judged = vocab * WIDE, few_rows(passes.judged)
    rows = max(few_rows(passes.rows), -(-passes.rows // STEP) * STEP)
    one_pass = pass_bytes(config, size, rows, max(judged, STEP), vocab, unpacks)
    in_graphs = max(one_pass, verdict_bytes(vocab))
    warm_up = logits * passes.judged + verdict_bytes(vocab)  # before a capture, while a round's logits exist
    outside = max(one_pass, warm_up, int(OUTSIDE * logits * passes.judged))
    kept = logits * (max(LOGITS_ROWS, judged) + 1) + rows * (rows // STEP + 2) * config.hidden * size
    return kept + in_graphs + outside + TABLES_BYTES


def pass_bytes(c: ModelConfig, size: int, rows: int, judged: int, vocab: int, unpacks: bool) -> int:
    """Peak bytes of a pass: a layer's activations, partial sums of attention, logits, and dequantized weights."""
    qkv = (c.heads + 2 * c.kv_heads) * c.head_dim
    row = STREAMS * c.hidden + qkv + 2 * c.heads * c.head_dim + mlp_numbers(c)
    splits = -(-(c.longest_text or c.max_positions) // SPLIT)
    of_head = WIDE * rows * c.group * splits * (c.head_dim + 2)
    sums = min(c.kv_heads * of_head, max(SCRATCH_BYTES, of_head))
    tables = 4 * rows * splits * (SPLIT // 64)
    outputs = max(2 * c.intermediate, qkv, vocab if judged >= LONG_READ else 0)
    weights = outputs * c.hidden * size if unpacks and rows >= LONG_READ else 0
    return row * size * rows + sums + tables + judged * vocab * (size + WIDE) + weights


def mlp_numbers(c: ModelConfig) -> int:
    """Numbers that a row takes in an MLP: gate, up and their product, for all experts that it is routed to."""
    if c.experts is None:
        return 3 * c.intermediate
    e = c.experts
    return max(3 * c.intermediate, e.active * (3 * e.intermediate + c.hidden) + 3 * e.shared)
