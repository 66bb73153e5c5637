"""ExpertsConfig: the sparse MLPs of a model, as config.json has them, in one spelling.

The file decides which layers have experts, how many each token takes, and how their weights are made. Which keys a
family has for that is in `families.py`, and where the tensors lie in `projections.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.fields import AGAIN, Fields
from forerun.models.families import ExpertNames, Sparse

MOST_EXPERTS = 10_000  # of a layer; the tensors will say how many there are
COUNT_KEYS = ("num_experts", "num_local_experts")  # two names of one number


@dataclass(frozen=True, slots=True)
class Clamp:
    """A bounded activation: gates up to `limit`, the rest from -limit to limit; `alpha` sharpens the sigmoid."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The sparse MLPs of a model: in each of `layers`, `count` experts, of which each token takes `active`.

    `intermediate` is an expert's number of neurons, `shared` that of the expert that all tokens take, weighed by a gate
    of its own; 0: there is none. `normalised`: the weights of a token's experts add up to 1, as a softmax over these
    alone gives them; otherwise it goes over all. `clamp` None: the activation is SiLU.
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
    """The experts of a model of a family with these facts; None where no layer has any."""
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
    """The layers that have experts: every `decoder_sparse_step`-th, but those that mlp_only_layers lists."""
    dense = fields.values.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        raise fields.refuse("mlp_only_layers", f"it must be a list of layers: {AGAIN}")
    step, left_out = fields.whole("decoder_sparse_step", 1), set(dense)
    return tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in left_out)


def expected_distinct(count: int, active: int, num_tokens: int) -> float:
    """Experts of a layer that a pass reads, if each token chose `active` of `count` evenly and for itself."""
    return count * (1 - (1 - active / count) ** num_tokens)
