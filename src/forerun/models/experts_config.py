"""ExpertsConfig: the mixture-of-experts layers of a model, read from config.json into one form.

`families.py` declares the keys of each family, and `projections.py` the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.fields import FIX, INT32, Fields, is_list_of_whole
from forerun.models.families import ExpertNames, MoeForm

MOST_EXPERTS = 10_000  # of a layer; more are taken for a damaged config.json
COUNT_KEYS = ("num_experts", "num_local_experts")  # two names of the same number


@dataclass(frozen=True, slots=True)
class Clamp:
    """Clamped SwiGLU: gate <= limit, -limit <= up <= limit, and `gate * sigmoid(alpha * gate) * (up + 1)`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture-of-experts layers of a model: each of `layers` has `count` experts, `active` of them for each token.

    `intermediate` is the width of an expert's MLP, `shared` that of the gated shared expert's (0: there is none).
    `normalised`: routing weights are a softmax over the chosen experts' logits, else over all. `clamp` None: SiLU.
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


def read_experts(fields: Fields, form: MoeForm | None, layers: int) -> ExpertsConfig | None:
    """The experts of a model whose family declares `form`; None if all layers are dense."""
    if form is None:
        return None
    count_key = next((key for key in COUNT_KEYS if fields.values.get(key) is not None), COUNT_KEYS[0])
    count = fields.whole(count_key, most=MOST_EXPERTS)
    active = fields.whole("num_experts_per_tok")
    if active > count:
        raise fields.refuse("num_experts_per_tok", f"it must be at most {count_key}, {count}: correct it")
    chosen = sparse_layers(fields, layers)
    clamp = Clamp(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)) if form.clamped else None
    normalised = form.normalised
    read = ExpertsConfig(
        names=form.names,
        layers=chosen,
        count=count,
        active=active,
        intermediate=fields.whole(form.intermediate),
        shared=0 if form.shared is None else fields.whole(form.shared),
        normalised=fields.flag(normalised) if isinstance(normalised, str) else normalised,
        bias=form.bias,
        clamp=clamp,
    )
    return read if chosen else None


def sparse_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """The layers with experts: every `decoder_sparse_step`-th, except those in mlp_only_layers."""
    dense = fields.values.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not is_list_of_whole(dense, -INT32):
        raise fields.refuse("mlp_only_layers", f"it must be a list of layers: {FIX}")
    step, left_out = fields.whole("decoder_sparse_step", 1), set(dense)
    return tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in left_out)


def expected_distinct(count: int, active: int, num_tokens: int) -> float:
    """The expected number of distinct experts that a pass reads in a layer, if routing is uniform and independent."""
    return count * (1 - (1 - active / count) ** num_tokens)
