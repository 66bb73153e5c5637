"""Widening of experts: those of a source grow like its MLPs, and a dense source can be given experts.

Each expert made from a dense MLP computes that MLP: its neurons are at random positions among neurons without effect.
So the experts' weights differ, but any choice of experts gives the same output. The routers are random, so a pass reads
about as many experts as in a model with balanced routing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from forerun.annotations import Int
from forerun.config import require_whole
from forerun.errors import InvalidRequest, UnsupportedModel
from forerun.models.config import ModelConfig
from forerun.models.experts_config import ExpertsConfig
from forerun.models.families import FAMILIES, Family
from forerun.models.projections import LayerTable


def family_of(config: ModelConfig) -> Family:
    return next(family for family in FAMILIES.values() if family.name == config.family)


def grown_experts(config: ModelConfig, mlp: int, layers: Sequence[int]) -> ExpertsConfig | None:
    """The widened experts of a source whose dense MLPs grow to `mlp` neurons; layer i is its layer `layers[i]`."""
    e = config.experts
    if e is None:
        return None
    if e.names.is_stacked and not e.names.transposed:
        fix = "save it with transformers, which writes each expert by itself"
        raise UnsupportedModel(f"{config.family} with all experts in one tensor cannot be widened: {fix}")
    inner, shared = (round(size * mlp / config.intermediate) for size in (e.intermediate, e.shared))
    sparse = tuple(i for i, origin in enumerate(layers) if origin in e.layers)
    return replace(e, intermediate=inner, shared=shared, layers=sparse)


def to_experts(config: ModelConfig, wide: ModelConfig, count: int, active: int) -> ModelConfig:
    """`wide`, the widened dense `config`, with `count` experts in every layer, `active` of them for each token.

    Raises InvalidRequest for a source with experts, or if its family has no variant with experts.
    """
    form = FAMILIES.get(family_of(config).moe_architecture or "")
    if config.experts is not None or form is None or form.moe is None:
        raise InvalidRequest("experts", f"{count} are not possible for a model of {config.family}: leave it out.")
    require_whole("active", active, 1)
    require_whole("experts", count, active)
    experts = ExpertsConfig(
        names=form.moe.names,
        layers=tuple(range(wide.layers)),
        count=count,
        active=active,
        intermediate=wide.intermediate,
        shared=0,
        normalised=True,
        bias=False,
        clamp=None,
    )
    return replace(wide, family=form.name, experts=experts)


def expert_values(source: ModelConfig, wide: ModelConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of config.json for the experts of `wide` and, if the source is dense, for the new family."""
    e, family = wide.experts, family_of(wide)
    if e is None or family.moe is None:
        return {}
    dense = [layer for layer in range(wide.layers) if layer not in e.layers]
    fields: dict[str, Any] = {"num_experts": e.count, "num_local_experts": e.count, "num_experts_per_tok": e.active}
    fields |= {family.moe.intermediate: e.intermediate, "decoder_sparse_step": 1}
    fields |= {"mlp_only_layers": dense} if dense or "mlp_only_layers" in values else {}
    fields |= {family.moe.shared: e.shared} if family.moe.shared else {}
    if source.experts is not None:
        return fields
    architecture = next(name for name, row in FAMILIES.items() if row is family)
    fields |= {"architectures": [architecture], "model_type": family.name, "norm_topk_prob": True}
    fields |= {"sliding_window": wide.windows[0], "use_sliding_window": wide.windows[0] is not None}
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return fields if "rope_theta" in rope else fields | {"rope_theta": wide.rope.theta}


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """The origin of an expert's tensor in a dense source: the name there, the expert, and the axis of neurons."""

    name: str
    expert: int
    axis: int

    def places(self, source: int, wide: int, layer: int, seed: int) -> Int[Tensor, " neurons"]:
        """The positions of the source's neurons among this expert's `wide` neurons."""
        generator = torch.Generator().manual_seed(((seed * 10_007 + layer) * 10_007 + self.expert) % 2**63)
        return torch.randperm(wide, generator=generator)[:source]


@cache
def parts_of(source: ModelConfig, wide: ModelConfig) -> dict[str, ExpertPart]:
    """The origins of the experts' tensors of a widened dense source, by name inside a layer; else empty."""
    table = LayerTable.of(source, 0)
    if source.experts is not None or wide.experts is None or table.dense is None:
        return {}
    parts = {}
    for number, expert in enumerate(LayerTable.of(wide, 0).experts):
        pairs = ((table.dense.gate_up, expert.gate_up, 0), (table.dense.down, expert.down, 1))
        for dense, in_expert, axis in pairs:
            for name, new_name in zip(dense.weight_shapes(), in_expert.weight_shapes(), strict=True):
                parts[new_name] = ExpertPart(name, number, axis)
    return parts
