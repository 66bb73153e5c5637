"""What becomes of heads whose target is widened: the shapes of their tensors, and the fields that change.

Heads read, of the widened target, the states that they read before with zeros behind them. So their own tensors grow as
the target's do (`models/widen.py`), and layers that they name, as taps or as an exit, become those where the same
states are in the widened target. Which tensors and fields these are is said by the blueprint of each kind; `widen.py`
writes the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.errors import InvalidRequest
from forerun.heads.folder import HeadFolder
from forerun.models.config import ModelConfig
from forerun.models.projections import Shapes
from forerun.models.widen import Plan, Wider

INNER = ("o_proj.weight", "down_proj.weight")  # of a layer's matrices: those that read no residual stream


@dataclass(frozen=True, slots=True)
class WideDrafter:
    """What becomes of a drafter: the shapes of its tensors before and after, and the fields that change.

    Tensors are told by the ends of their names: `writers` add to a residual stream, matrices that are `inner` read
    none, and `readers` read one though they are no matrices. `qk_norm` says that its layers norm queries and keys, and
    `argument` what its argument says before the folder.
    """

    folder: HeadFolder
    narrow: Shapes
    wide: Shapes
    fields: Mapping[str, Any]
    writers: tuple[str, ...]
    qk_norm: bool = False
    argument: str = ""
    inner: tuple[str, ...] = INNER
    readers: tuple[str, ...] = ()


def widened_layers(config: ModelConfig, plan: Plan, name: str) -> ModelConfig:
    """The layers' shape, grown as far as the target's. Raises InvalidRequest for layers of another width than it."""
    if config.hidden != plan.source.config.hidden:
        raise InvalidRequest("draft", f"{name} has a width of its own, and cannot be widened with the target.")
    return replace(Wider(plan.wide.hidden, config.layers).shape(config), vocab_size=config.vocab_size)


def widened_tap(plan: Plan, tap: int) -> int:
    """The layer of the widened target that the state entering this layer of the source enters."""
    real = [layer for layer, origin in enumerate(plan.origins) if origin.real]
    return real[tap - 1] + 1 if tap > 0 else tap


def layer_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of a layer's shape."""
    return {
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate,
        "rms_norm_eps": config.norm_eps,
    }
