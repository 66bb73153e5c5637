"""A roofline model: the time of a model's pass on one or several cards, from the bytes and operations of the pass.

Each kind of work (layers, experts, attention, head) takes the longer of the times to read and to compute, plus the part
of the shorter one that does not overlap with it. Weights are split evenly over the cards, which exchange results in two
all-reduces per layer. `datasheets.json` has the makers' figures for the SXM or OAM form of each card (arithmetic
without sparsity, links in one direction), and the fields that matter here of each model's config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forerun.fields import Fields
from forerun.models.config import ModelConfig, config_of, read_config
from forerun.models.projections import num_inactive, products

DATASHEETS: Any = json.loads(Path(__file__).with_name("datasheets.json").read_text(encoding="utf-8"))
EAGLE_VOCAB = 32_000  # the draft vocabulary of the EAGLE-3 heads that its authors publish
NUMBER_BYTES = 2  # of keys and values in the cache, and of states that cards exchange


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model that determine the time of a pass.

    `dense` counts the weights in all layers that every token uses, `expert` those of one expert, `head` the head's.
    """

    layers: int
    hidden: int
    queries: int  # heads times their width
    kv_heads: int
    head_dim: int
    dense: float
    head: float
    expert: float = 0.0
    experts: int = 0  # of a layer; all layers have them
    active: int = 0

    @classmethod
    def of(cls, config: ModelConfig) -> Shape:
        """The shape of the model with this configuration."""
        head, experts = float(config.vocab_size * config.hidden), config.experts
        taken = float(sum(outputs * inputs * num for (outputs, inputs), num in products(config).items())) - head
        form = (config.layers, config.hidden, config.heads * config.head_dim, config.kv_heads, config.head_dim)
        if experts is None:
            return cls(*form, taken, head)
        expert = num_inactive(config) / (experts.count - experts.active) / len(experts.layers)
        dense = taken - expert * experts.active * len(experts.layers)
        return cls(*form, dense, head, expert, experts.count, experts.active)

    def touched(self, num_tokens: float) -> float:
        """Experts of a layer that a pass over `num_tokens` reads, if routers choose evenly and independently."""
        return self.experts * (1 - (1 - self.active / self.experts) ** num_tokens) if self.experts else 0.0

    @property
    def num_weights(self) -> float:
        """The number of weights of all layers, with all experts, and of the head."""
        return self.dense + self.head + self.layers * self.experts * self.expert

    @property
    def cache_bytes(self) -> float:
        """The bytes of keys and values of one token in all layers."""
        return 2.0 * NUMBER_BYTES * self.layers * self.kv_heads * self.head_dim


def config_named(name: str) -> ModelConfig:
    """The configuration of a model in `datasheets.json`, or of a folder with a config.json.

    Raises SystemExit for anything else.
    """
    models = DATASHEETS["models"]
    if name in models:
        return config_of(Fields(Path(name), models[name]))
    if (Path(name) / "config.json").is_file():
        return read_config(Path(name))
    raise SystemExit(f"model {name!r}: use {', '.join(models)}, or a folder with a config.json")


def drafter_of(name: str, config: ModelConfig) -> Shape | None:
    """The shape of the drafter: `model:NAME`, or a head for this target; None for `ngram`, which reads no weights."""
    if name == "ngram":
        return None
    if name.startswith("model:"):
        return Shape.of(config_named(name.removeprefix("model:")))
    h, form = config.hidden, Shape.of(replace(config, layers=1, windows=(None,), experts=None))
    if name == "eagle":  # a projection of a state and an embedding, one layer, and the target's head
        return replace(form, dense=form.dense + 2 * h * h)
    if name == "eagle3":  # attention reads states and embeddings; another product joins the states of three layers
        projections = (config.heads + 2 * config.kv_heads) * config.head_dim
        return replace(form, dense=form.dense + h * projections + 3 * h * h, head=float(EAGLE_VOCAB * h))
    raise SystemExit(f"draft {name!r}: use model:NAME, eagle, eagle3 or ngram")


@dataclass(frozen=True, slots=True)
class Card:
    """The datasheet of an accelerator; `flops` has the operations per second by the bits of the weights."""

    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    flops: Mapping[str, float]


CARDS = {name: Card(**card) for name, card in DATASHEETS["cards"].items()}


@dataclass(frozen=True, slots=True)
class Constants:
    """The shares of a datasheet's figures that passes reach, and the times of a round outside of passes.

    All but `sum_s` were measured on an H100 (`benchmarks/RESULTS.md`, "A first GPU" and the next section):
    `memory_share` from products that read 15 GB in 5.63 ms; `layer_s` from the other kernels of the 32 layers;
    `compute_share` and `overlap`, the part of the shorter of reading and computing that the longer one hides, from
    passes of 64 to 144 rows; `host_s` from 0.2 to 0.5 ms between passes; `step_s` from 0.1 to 0.3 ms to replay a graph;
    `drafted_s` from about 1 ms that a drafted round took in addition to its passes. `sum_s`, the time of an all-reduce
    of few bytes, is assumed.
    """

    memory_share: float = 0.79
    compute_share: float = 0.7
    overlap: float = 0.5
    layer_s: float = 22e-6
    host_s: float = 0.4e-3
    drafted_s: float = 1.0e-3
    step_s: float = 0.1e-3
    sum_s: float = 10e-6


@dataclass(frozen=True, slots=True)
class Machine:
    """Several cards of one kind that compute one model together, with weights of `bits` bits."""

    card: Card
    num_cards: int = 1
    bits: int = 16
    constants: Constants = field(default_factory=Constants)

    def work_s(self, num_bytes: float, num_operations: float) -> float:
        """Seconds of one kind of work, which is divided evenly between the cards."""
        c, flops = self.constants, self.card.flops[str(self.bits)]
        reading_s = num_bytes / (self.num_cards * c.memory_share * self.card.memory_bytes_per_s)
        computing_s = num_operations / (self.num_cards * c.compute_share * flops)
        return max(reading_s, computing_s) + (1 - c.overlap) * min(reading_s, computing_s)

    def sum_s(self, num_bytes: float) -> float:
        """Seconds of an all-reduce of `num_bytes`: each card sends and receives almost all of them once."""
        share = 2 * (self.num_cards - 1) / self.num_cards
        return self.constants.sum_s + share * num_bytes / self.card.link_bytes_per_s if share else 0.0

    def pass_s(self, shape: Shape, num_tokens: float, num_rows: int, context: float) -> float:
        """Seconds of a pass over `num_tokens` tokens of `num_rows` sequences with `context` tokens each."""
        s, size = shape, self.bits / 8
        copies = max(1.0, self.num_cards / s.kv_heads)  # of each key head, where there are more cards than such heads
        kinds = (
            (size * s.dense, 2 * s.dense * num_tokens),
            (size * s.layers * s.expert * s.touched(num_tokens), 2 * s.layers * s.expert * s.active * num_tokens),
            (copies * num_rows * context * s.cache_bytes, 4 * s.layers * s.queries * context * num_tokens),
            (size * s.head, 2 * s.head * num_tokens),
        )
        sums_s = (2 * s.layers + 1) * self.sum_s(NUMBER_BYTES * s.hidden * num_tokens)
        return sum(self.work_s(*kind) for kind in kinds) + sums_s + s.layers * self.constants.layer_s
