"""The ctypes structures of the compiled kernels for models; their fields must equal those in the C++ sources."""

from __future__ import annotations

from ctypes import CFUNCTYPE, POINTER, Structure, c_float, c_int64, c_void_p
from typing import ClassVar

CGather = CFUNCTYPE(None, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64)  # `Gather` in decoder.hpp


class CShape(Structure):
    """`Shape` in decoder.hpp."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in ("hidden", "heads", "kv_heads", "head_dim", "cache_format", "all_heads", "gelu")),
        *((name, c_float) for name in ("norm_eps", "score_cap")),
        ("gather", CGather),
        ("ranks", c_void_p),
    ]


class CGroups(Structure):
    """`Groups` in linear.hpp."""

    _fields_: ClassVar = [(name, c_int64) for name in ("bits", "size", "has_least", "wide")]


class CGated(Structure):
    """`Gated` in decoder.hpp."""

    _fields_: ClassVar = [("gate_up", c_void_p), ("down", c_void_p), ("plain", c_int64)]


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
        ("dense", CGated),
        ("experts", POINTER(CExperts)),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm")),
        ("qk_norm", c_void_p),
        ("joint_norm", c_int64),
        ("sinks", c_void_p),
        *((name, c_int64) for name in ("window", "rope_start", "query_rope_start", "parallel")),
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
