"""What passes and verdicts take on a GPU beside weights and caches: the arithmetic of the memory plan.

Tensors that come and go in a captured graph stay in the graphs' own memory, where all graphs of a model have room in
turn; what is computed outside of graphs has its room beside that. `tests/models/test_gpu_memory.py` compares these
numbers with what is held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.models.backends.gpu.capture import LOGITS_ROWS
from forerun.models.backends.gpu.groups import LONG_READ
from forerun.models.backends.gpu.ops import SCRATCH_BYTES, SPLIT
from forerun.models.backends.gpu.verdicts import verdict_bytes
from forerun.models.config import ModelConfig
from forerun.models.rows import few_rows

STEP = 128  # the rows of passes without capture are rounded up to it
WIDE = 4  # bytes of a logit
OUTSIDE = 8.2  # times a round's logits that a verdict without a graph holds, by the widest filter, `top_p`
STREAMS = 6  # rows of the stream that a layer holds at once
TABLES_BYTES = 8 << 20  # of rows, paths and what a verdict is told


@dataclass(frozen=True, slots=True)
class PassSizes:
    """What passes are planned for: tokens of one at most, and those that are judged; those that a drafter judges."""

    rows: int
    judged: int
    drafted: int

    def of_drafter(self) -> PassSizes:
        return replace(self, judged=self.drafted)


USUAL_PASSES = PassSizes(rows=784, judged=272, drafted=16)  # of an engine whose options are not changed


def scratch_bytes(config: ModelConfig, size: int, passes: PassSizes, vocab: int, unpacks: bool) -> int:
    """What graphs keep, and the most that is held beside them for a while, of numbers of `size` bytes.

    `unpacks`: weights are held in groups, and unpacked for long reads.
    """
    logits, judged = vocab * WIDE, few_rows(passes.judged)
    rows = max(few_rows(passes.rows), -(-passes.rows // STEP) * STEP)
    one_pass = pass_bytes(config, size, rows, max(judged, STEP), vocab, unpacks)
    in_graphs = max(one_pass, verdict_bytes(vocab))
    warm_up = logits * passes.judged + verdict_bytes(vocab)  # before a capture, with a round's logits beside it
    outside = max(one_pass, warm_up, int(OUTSIDE * logits * passes.judged))
    kept = logits * (max(LOGITS_ROWS, judged) + 1) + rows * (rows // STEP + 2) * config.hidden * size
    return kept + in_graphs + outside + TABLES_BYTES


def pass_bytes(c: ModelConfig, size: int, rows: int, judged: int, vocab: int, unpacks: bool) -> int:
    """What a pass holds at once at most: a layer's rows, partial sums of attention, logits, and unpacked weights."""
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
    """Of a row in an MLP: gates, what they multiply, and the product, of all experts that it chose."""
    if c.experts is None:
        return 3 * c.intermediate
    e = c.experts
    return max(3 * c.intermediate, e.active * (3 * e.intermediate + c.hidden) + 3 * e.shared)
