"""ExpertsConfig: the mixture-of-experts layers of a model, read from config.json into one form.

`families.py` lists the keys of each family; `projections.py` has the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.fields import AGAIN, Fields
from forerun.models.families import ExpertNames, Sparse

MOST_EXPERTS = 10_000  # of a layer: a plausibility limit
COUNT_KEYS = ("num_experts", "num_local_experts")  # two names of the same number


@dataclass(frozen=True, slots=True)
class Clamp:
    """A clamped activation: gate at most `limit`, up within [-limit, limit]; the sigmoid's input is times `alpha`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture-of-experts layers of a model: each of `layers` has `count` experts, `active` of them for each token.

    `intermediate` is the number of neurons of an expert, `shared` that of the gated shared expert; 0: there is none.
    `normalised`: routing weights are a softmax over the chosen experts, else over all. `clamp` None: SiLU.
    """

    names: ExpertNames
    layers: tuple[int, ...]
    count: int
    active: int
    intermediate: int
    shared: int
    normalised: bool
    bias: bool
    clamp: Clamp | None


def read_experts(fields: Fields, sparse: Sparse | None, layers: int) -> ExpertsConfig | None:
    """The experts of a model of a family with these facts; None if all layers are dense."""
    if sparse is None:
        return None
    count_key = next((key for key in COUNT_KEYS if fields.values.get(key) is not None), COUNT_KEYS[0])
    count = fields.whole(count_key, most=MOST_EXPERTS)
    active = fields.whole("num_experts_per_tok")
    if active > count:
        raise fields.refuse("num_experts_per_tok", f"it must be at most {count_key}, {count}: correct it")
    chosen = sparse_layers(fields, layers)
    clamp = Clamp(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)) if sparse.clamped else None
    normalised = sparse.normalised
    read = ExpertsConfig(
        names=sparse.names,
        layers=chosen,
        count=count,
        active=active,
        intermediate=fields.whole(sparse.intermediate),
        shared=0 if sparse.shared is None else fields.whole(sparse.shared),
        normalised=fields.flag(normalised) if isinstance(normalised, str) else normalised,
        bias=sparse.bias,
        clamp=clamp,
    )
    return read if chosen else None


def sparse_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """The layers with experts: every `decoder_sparse_step`-th, except those in mlp_only_layers."""
    dense = fields.values.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        raise fields.refuse("mlp_only_layers", f"it must be a list of layers: {AGAIN}")
    step, left_out = fields.whole("decoder_sparse_step", 1), set(dense)
    return tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in left_out)


def expected_distinct(count: int, active: int, num_tokens: int) -> float:
    """Expected number of experts of a layer that a pass reads, if routing is uniform and independent."""
    return count * (1 - (1 - active / count) ** num_tokens)
