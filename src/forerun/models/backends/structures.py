"""What Python hands to the compiled kernels of models: rows, and structures, field by field as in the C++ sources."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float

WIDTH = 64  # the kernels read rows with zeros behind them, up to a multiple of this: a width without tails


class CShape(Structure):
    """`Shape` in decoder.hpp."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "cache_format", "gelu")),
        *((name, c_float) for name in ("norm_eps", "score_cap")),
    ]


class CGroups(Structure):
    """`Groups` in linear.hpp."""

    _fields_: ClassVar = [(name, c_int64) for name in ("bits", "size", "has_least", "wide")]


class CGated(Structure):
    """`Gated` in decoder.hpp."""

    _fields_: ClassVar = [("gate_up", c_void_p), ("down", c_void_p)]


class CExperts(Structure):
    """`Experts` in decoder.hpp."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("count", "active", "normalised")),
        ("router", c_void_p),
        ("gated", POINTER(CGated)),
        *((name, c_float) for name in ("alpha", "limit")),
    ]


class CLayer(Structure):
    """`Layer` in decoder.hpp."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("qkv", "out")),
        ("every", CGated),
        ("experts", POINTER(CExperts)),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm")),
        ("qk_norm", c_void_p),
        ("joint_norm", c_int64),
        ("sinks", c_void_p),
        *((name, c_int64) for name in ("window", "first_turn", "first_query_turn", "parallel")),
    ]


class CPass(Structure):
    """`Pass` in decoder.hpp."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("num_tokens", "num_paths", "first_layer", "end_layer", "num_threads")),
        *((name, c_void_p) for name in ("x", "read", "positions", "slots", "path_of", "last_key")),
        *((name, c_void_p) for name in ("first_slots", "num_plain", "source_ends", "sources", "keys", "values")),
        ("num_slots", c_int64),
        *((name, c_void_p) for name in ("cos", "sin", "num_experts")),
    ]


class CEntry(Structure):
    """`Entry` in chain.cpp."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("map", "token_norm", "state_norm")),
        *((name, c_int64) for name in ("state_first", "normed_stream", "reads_stream")),
        ("output_norm", c_void_p),
    ]


class CChains(Structure):
    """`Chains` in chain.cpp."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("num_rows", "depth")),
        *((name, c_void_p) for name in ("depths", "starts", "positions", "logits")),
        *((name, c_int64) for name in ("stride", "num_ids")),
        *((name, c_void_p) for name in ("laws", "embedding")),
        *((name, c_int64) for name in ("embedding_format", "hidden", "num_layers")),
        *((name, c_void_p) for name in ("head", "head_ids", "norm")),
        ("entry", POINTER(CEntry)),
        *((name, c_void_p) for name in ("before", "text_counts", "text_tokens", "text_states", "roots")),
        *((name, c_float) for name in ("norm_eps", "slack")),
        *((name, c_void_p) for name in ("min_survival", "tokens", "survival", "states")),
    ]


def padded(size: int) -> int:
    """How wide a row of this size is to the kernels."""
    return -(-size // WIDTH) * WIDTH


def padded_to_width(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows padded"]:
    """Rows in float32, zeros behind each."""
    return functional.pad(x.float(), (0, padded(x.shape[1]) - x.shape[1])).contiguous()


def padded_gains(gain: Float[Tensor, " width"]) -> Float[Tensor, " padded"]:
    """A norm's gains in float32, zeros behind them."""
    return functional.pad(gain.float(), (0, padded(len(gain)) - len(gain)))
