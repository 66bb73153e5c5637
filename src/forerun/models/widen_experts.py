"""Widening with experts: a source's experts grow like its MLPs, and a dense source can be converted to experts.

Each expert of a dense source computes the source's MLP, with the same neurons at positions of its own among others that
have no effect. So the experts' weights differ, but any choice of them gives the same output. The routers are random: a
pass reads about as many experts as in a model with balanced routing.
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
    """The widened experts of a source, whose dense MLP grows to `mlp` neurons and whose layer i is from `layers[i]`."""
    e = config.experts
    if e is None:
        return None
    if e.names.is_stacked and not e.names.transposed:
        cure = "save it with transformers, which writes each expert by itself"
        raise UnsupportedModel(f"a checkpoint of {config.family} whose experts lie in one tensor cannot grow: {cure}")
    inner, shared = (round(size * mlp / config.intermediate) for size in (e.intermediate, e.shared))
    sparse = tuple(i for i, origin in enumerate(layers) if origin in e.layers)
    return replace(e, intermediate=inner, shared=shared, layers=sparse)


def to_experts(config: ModelConfig, wide: ModelConfig, count: int, active: int) -> ModelConfig:
    """`wide`, the widened dense `config`, with `count` experts in every layer, `active` for each token.

    Raises InvalidRequest for a source with experts, or if its family has no variant with experts.
    """
    form = FAMILIES.get(family_of(config).with_experts or "")
    if config.experts is not None or form is None or form.sparse is None:
        raise InvalidRequest("experts", f"{count} cannot be given to a model of {config.family}: leave it out.")
    require_whole("active", active, 1)
    require_whole("experts", count, active)
    experts = ExpertsConfig(
        names=form.sparse.names,
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
    """The fields of config.json for the experts of `wide` and, for a dense source, those of the new family."""
    e, family = wide.experts, family_of(wide)
    if e is None or family.sparse is None:
        return {}
    dense = [layer for layer in range(wide.layers) if layer not in e.layers]
    fields: dict[str, Any] = {"num_experts": e.count, "num_local_experts": e.count, "num_experts_per_tok": e.active}
    fields |= {family.sparse.intermediate: e.intermediate, "decoder_sparse_step": 1}
    fields |= {"mlp_only_layers": dense} if dense or "mlp_only_layers" in values else {}
    fields |= {family.sparse.shared: e.shared} if family.sparse.shared else {}
    if source.experts is not None:
        return fields
    architecture = next(name for name, row in FAMILIES.items() if row is family)
    fields |= {"architectures": [architecture], "model_type": family.name, "norm_topk_prob": True}
    fields |= {"sliding_window": wide.windows[0], "use_sliding_window": wide.windows[0] is not None}
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    return fields if "rope_theta" in rope else fields | {"rope_theta": wide.rope.theta}


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """The source's tensor of an expert's tensor: its name inside the layer; the expert, and the axis of neurons."""

    name: str
    expert: int
    axis: int

    def places(self, source: int, wide: int, layer: int, seed: int) -> Int[Tensor, " neurons"]:
        """The positions of the source's neurons among those of this expert."""
        dice = torch.Generator().manual_seed(((seed * 10_007 + layer) * 10_007 + self.expert) % 2**63)
        return torch.randperm(wide, generator=dice)[:source]


@cache
def parts_of(source: ModelConfig, wide: ModelConfig) -> dict[str, ExpertPart]:
    """The experts' tensors of a widened dense source, by their names inside a layer; empty for other sources."""
    table = LayerTable.of(source, 0)
    if source.experts is not None or wide.experts is None or table.dense is None:
        return {}
    parts = {}
    for number, expert in enumerate(LayerTable.of(wide, 0).experts):
        for mine, its, axis in ((table.dense.gate_up, expert.gate_up, 0), (table.dense.down, expert.down, 1)):
            for name, new in zip(mine.weights(), its.weights(), strict=True):
                parts[new] = ExpertPart(name, number, axis)
    return parts
