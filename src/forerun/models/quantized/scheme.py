"""Scheme: what config.json says of how a folder's weights are quantised, and which of it is read.

Which weights are quantised, in how many bits and with which groups, is told by the tensors themselves. So lists of
layers that are not (`ignore`, `modules_to_not_convert`) and settings of single layers are followed without being read.
What tensors cannot tell is judged here, before any is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.fields import AGAIN, Fields, short
from forerun.models.foreign import ORIGINAL

KEYS = ("quantization_config", "compression_config")
# The methods that are read, and for keys of each the values that are; null or absent is always one of them.
METHODS: dict[str, Mapping[str, tuple[object, ...]]] = {
    "awq": {"bits": (4,), "version": ("gemm",), "format": ("gemm",)},
    "gptq": {
        "bits": (4, 8),
        "checkpoint_format": ("gptq", "gptq_v2"),
        "format": ("gptq", "gptq_v2"),
        "pack_dtype": ("int32",),
        "is_marlin_format": (False,),
    },
    "compressed-tensors": {
        "format": ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense"),
        "sparsity_config": ({}, {"format": "dense"}),
        "transform_config": ({},),
    },
    "fp8": {"expert_dtype": ("fp8",)},
    "mxfp4": {},
    "bitsandbytes": {},
}
BLOCK = (128, 128)  # where it is not said


@dataclass(frozen=True, slots=True)
class Scheme:
    """A method of METHODS, and what tensors do not tell.

    `less_one`: GPTQ's zero points are stored less 1, as its first format has them; `symmetric`: they are all in the
    middle of the range; `by_activations`: inputs lie in groups by the size of activations, so that a group's lie
    anywhere. `block` is how many rows and columns share a scale where scales are those of blocks.
    """

    method: str
    less_one: bool
    symmetric: bool
    by_activations: bool
    block: tuple[int, int]


def read_scheme(config: Fields) -> Scheme | None:
    """The scheme that config.json has; None where it has none. Raises UnsupportedModel for one that is not read."""
    key = next((key for key in KEYS if config.values.get(key) is not None), None)
    if key is None:
        return None
    fields = config.inside(key)
    method = fields.text("quant_method")
    if method is None and (fields.flag("load_in_4bit") or fields.flag("load_in_8bit")):
        method = "bitsandbytes"
    if method not in METHODS:
        raise fields.refuse("quant_method", f"read are {', '.join(METHODS)}: {ORIGINAL}")
    groups = fields.inside("config_groups").values
    for part in (fields, *(fields.inside("config_groups").inside(g) for g in groups if isinstance(groups[g], dict))):
        for name, readable in METHODS[method].items():
            value = part.values.get(name)
            if value is not None and lowered(value) not in readable:
                raise part.refuse(name, f"read {'is' if len(readable) == 1 else 'are'} {spelled(readable)}: {ORIGINAL}")
    less_one = "gptq_v2" not in (fields.values.get("checkpoint_format"), fields.values.get("format"))
    return Scheme(method, less_one, fields.flag("sym", True), fields.flag("desc_act"), read_block(fields, groups))


def read_block(fields: Fields, groups: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale, as either program says it."""
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    sizes = [
        fields.values.get("weight_block_size"),
        *(w.get("block_structure") for w in weights if isinstance(w, dict)),
    ]
    size = next((size for size in sizes if size is not None), BLOCK)
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise fields.refuse("weight_block_size", f"it must be two whole numbers: {AGAIN}")
    return size[0], size[1]


def lowered(value: Any) -> Any:
    """A text in small letters, as programs differ there; of an object its format, or else what is not empty."""
    if isinstance(value, dict):
        return {"format": value["format"]} if "format" in value else {k: v for k, v in value.items() if v}
    return value.lower() if isinstance(value, str) else value


def spelled(values: tuple[object, ...]) -> str:
    """The values that are read, for a message."""
    return ", ".join(short(value) for value in values)
