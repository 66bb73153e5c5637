"""Scheme: the quantization that config.json describes, and a check that it is supported.

The tensors themselves show which weights are quantized, with how many bits and in which groups, so lists of excluded
layers (`ignore`, `modules_to_not_convert`) and settings of single layers are not read. This file reads and checks the
keys that the tensors do not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.fields import FIX, Fields, short
from forerun.models.foreign import ORIGINAL

KEYS = ("quantization_config", "compression_config")
# The supported methods, and the supported values of their keys. A key may always be null or absent.
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
BLOCK = (128, 128)  # the default of weight_block_size


@dataclass(frozen=True, slots=True)
class Scheme:
    """A method of METHODS, with properties that the tensors do not show.

    `less_one`: GPTQ's zero points are stored minus 1, as in its first format. `symmetric`: all zero points are in the
    middle of the range. `by_activations`: inputs are grouped by the size of activations (act-order), so a group's
    inputs are not contiguous. `block` is the number of rows and columns of a block with one scale.
    """

    method: str
    less_one: bool
    symmetric: bool
    by_activations: bool
    block: tuple[int, int]


def read_scheme(config: Fields) -> Scheme | None:
    """The scheme in config.json; None for an unquantized checkpoint. Raises UnsupportedModel for other schemes."""
    key = next((key for key in KEYS if config.values.get(key) is not None), None)
    if key is None:
        return None
    fields = config.inside(key)
    method = fields.text("quant_method")
    if method is None and (fields.flag("load_in_4bit") or fields.flag("load_in_8bit")):
        method = "bitsandbytes"
    if method not in METHODS:
        raise fields.refuse("quant_method", f"supported are {', '.join(METHODS)}: {ORIGINAL}")
    groups = fields.inside("config_groups").values
    for part in (fields, *(fields.inside("config_groups").inside(g) for g in groups if isinstance(groups[g], dict))):
        for name, supported in METHODS[method].items():
            value = part.values.get(name)
            if value is not None and normalised(value) not in supported:
                raise part.refuse(name, f"supported: {', '.join(map(short, supported))}; {ORIGINAL}")
    less_one = "gptq_v2" not in (fields.values.get("checkpoint_format"), fields.values.get("format"))
    return Scheme(method, less_one, fields.flag("sym", True), fields.flag("desc_act"), read_block(fields, groups))


def read_block(fields: Fields, groups: Mapping[str, Any]) -> tuple[int, int]:
    """The rows and columns of a block, from the keys of transformers or of compressed-tensors."""
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    sizes = [
        fields.values.get("weight_block_size"),
        *(w.get("block_structure") for w in weights if isinstance(w, dict)),
    ]
    size = next((size for size in sizes if size is not None), BLOCK)
    if not isinstance(size, list | tuple) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise fields.refuse("weight_block_size", f"it must be two whole numbers: {FIX}")
    return size[0], size[1]


def normalised(value: Any) -> Any:
    """A text in lower case, since programs differ in case; an object reduced to its format or its non-empty values."""
    if isinstance(value, dict):
        return {"format": value["format"]} if "format" in value else {k: v for k, v in value.items() if v}
    return value.lower() if isinstance(value, str) else value
