"""NativeBackend: linear layers, and all layers of a decoder in one call, by the compiled kernels of `kernels/`.

This file passes tensors as pointers and keeps their memory alive. Results equal those of torch's operators up to
rounding; the residual stream is float32. By construction, the bits of a row do not depend on other rows.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from array import array
from collections.abc import Sequence
from copy import copy
from ctypes import POINTER, addressof, c_float, c_int64, c_void_p, pointer
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.paged import PagedCache
from forerun.config import Quantization
from forerun.errors import UnsupportedModel
from forerun.kernels.sampling import RowLaws, address
from forerun.kernels.threads import num_threads
from forerun.models.backends.base import AttentionInputs, ChainDrawer, ChainStarts, DecoderParts, Stream
from forerun.models.backends.structures import (
    CChains,
    CEntry,
    CExperts,
    CGated,
    CGather,
    CGroups,
    CLayer,
    CPass,
    CShape,
)
from forerun.models.backends.torch_cpu.grouped import GroupedWeight
from forerun.models.backends.torch_cpu.quantized import quantize_groups, quantize_rows
from forerun.models.batch import SINGLE_QUERIES, TokenBatch
from forerun.models.layer import Bias, GatedMlp, Layer, Linear, Router, StateEntry, WeightMatrix
from forerun.models.rows import padded, padded_gains, padded_to_width
from forerun.sampling.draws import Draws

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float16: 4}
INT4 = 3  # numbers are passed as int8, and the library packs them
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of unquantized weights
MAX_HEAD_DIM = 512
TABLES = ("path_of", "last_key", "first_slots", "num_plain", "source_ends", "sources")  # fields of Pass in decoder.hpp
FIRST_SLOTS = TABLES.index("first_slots")


class NativeBackend:
    """The backend of the compiled kernels; `file` is the library's file name, which identifies sources, compiler and
    processor."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        lib.forerun_instructions.restype = ctypes.c_char_p
        lib.forerun_linear.restype = lib.forerun_decoder.restype = c_void_p
        lib.forerun_linear.argtypes = [c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p]
        lib.forerun_grouped.restype = c_void_p
        lib.forerun_grouped.argtypes = [POINTER(CGroups), c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p]
        lib.forerun_cap.argtypes = [c_void_p, c_float]
        lib.forerun_multiply.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_float, c_void_p, c_int64]
        lib.forerun_decoder.argtypes = [POINTER(CShape), POINTER(CLayer), c_int64]
        lib.forerun_forward.argtypes = [c_void_p, POINTER(CPass)]
        lib.forerun_norm.argtypes = [c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p]
        lib.forerun_chains.argtypes = [c_void_p, POINTER(CChains), POINTER(CPass)]
        lib.forerun_free_linear.argtypes = lib.forerun_free_decoder.argtypes = [c_void_p]
        self.instructions = lib.forerun_instructions().decode()
        self.file = Path(lib._name).stem

    @property
    def name(self) -> str:
        return f"{self.instructions} kernels"

    @property
    def arithmetic(self) -> str:
        """The instruction set of torch's elementwise functions, which sampling uses; the kernels give the same bits for
        any number of threads and any compiler."""
        return f"{torch.backends.cpu.get_cpu_capability()} "

    def linear(
        self, weight: WeightMatrix, bias: Bias | None = None, quantize: Quantization | None = None
    ) -> NativeLinear:
        """A packed layer, in int8 or int4 with `quantize`, else in the weight's dtype, which must be in WEIGHTS."""
        shape, scales = weight.shape, None
        if quantize is not None:
            weight, scales = (quantize_groups if quantize == "int4" else quantize_rows)(weight)
        number = INT4 if quantize == "int4" else FORMATS[weight.dtype]
        weight, bias = weight.contiguous(), None if bias is None else bias.float().contiguous()
        return NativeLinear(self.lib, shape, self.lib.forerun_linear(number, *shape, *addresses(weight, scales, bias)))

    def grouped(self, weight: GroupedWeight, bias: Bias | None = None) -> NativeLinear:
        """A packed layer of group-quantized weights; scales are stored in float16 if that is exact."""
        values = [weight.scales, *(() if weight.least is None else (weight.least,))]
        wide = any(not torch.equal(value.half().float(), value) for value in values)
        groups = CGroups(bits=weight.bits, size=weight.size, has_least=weight.least is not None, wide=wide)
        tensors = (weight.numbers, weight.scales, weight.least, None if bias is None else bias.float())
        contiguous = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        shape = weight.numbers.shape
        return NativeLinear(self.lib, shape, self.lib.forerun_grouped(groups, *shape, *addresses(*contiguous)))

    def stacked(self, experts: Sequence[GatedMlp], dtype: torch.dtype) -> None:
        """None, since the kernels compute experts one by one."""

    def capped(self, head: Linear, limit: float) -> Linear:
        """This layer, whose outputs are soft-capped from now on."""
        self.lib.forerun_cap(native(head).pointer, limit)
        return head

    def executor(self, parts: DecoderParts) -> NativeExecutor:
        return NativeExecutor(self, parts)


class NativeLinear:
    """A linear layer packed by the library; the bits of a row depend on that row alone."""

    def __init__(self, lib: ctypes.CDLL, shape: torch.Size, pointer: int | None) -> None:
        self.outputs, self.inputs = shape
        if not pointer:
            raise MemoryError(f"not enough memory for a layer of {self.outputs} x {self.inputs} weights")
        self.lib, self.pointer, self.width = lib, pointer, padded(self.outputs)
        weakref.finalize(self, lib.forerun_free_linear, pointer)

    def __call__(
        self, x: Float[Tensor, "rows inputs"], norm: Float[Tensor, " padded"] | None = None, eps: float = 0.0
    ) -> Float[Tensor, "rows outputs"]:
        """`x @ weight.T + bias`, computed in float32; of the RMS norm of `x` if its padded gains, `norm`, are given."""
        rows, count = x.float().contiguous(), x.shape[0]
        out = torch.empty(count, self.width)
        gains = None if norm is None else norm.data_ptr()
        self.lib.forerun_multiply(self.pointer, rows.data_ptr(), count, gains, eps, out.data_ptr(), num_threads(count))
        outputs = out if self.width == self.outputs else out[:, : self.outputs]
        return outputs if x.dtype == out.dtype else outputs.to(x.dtype)


class NativeExecutor:
    """Runs a decoder's layers in one call of the library."""

    def __init__(self, kernels: NativeBackend, parts: DecoderParts) -> None:
        config, layers, norm, entry = parts.config, parts.layers, parts.norm, parts.entry
        if config.head_dim > MAX_HEAD_DIM:
            message = f"kernels: heads of {config.head_dim} are wider than {MAX_HEAD_DIM}: use kernels='torch'"
            raise UnsupportedModel(message)
        self.stream_dtype, self.query_rule, self.num_experts_read = torch.float32, SINGLE_QUERIES, 0
        self.parts = parts
        self.lib = kernels.lib
        self.norm = None if norm is None else padded_gains(norm)
        self.head, self.norm_eps = native(parts.head), config.norm_eps
        self.num_layers = len(layers)  # `lower` has fewer
        self.memory: list[object] = [parts]  # owns the memory that the library points to
        self.entry = None if entry is None else self.state_entry(entry)
        local = config if parts.ranks is None else parts.ranks.shard.of(config)
        no_ranks: tuple[Any, int | None] = CGather(), None
        self.gather, ranks = no_ranks if parts.ranks is None else parts.ranks.connect(kernels.lib, config)
        shape = CShape(
            hidden=config.hidden,
            heads=local.heads,
            kv_heads=local.kv_heads,
            head_dim=config.head_dim,
            cache_format=FORMATS[parts.embedding.dtype],
            all_heads=config.heads,
            gelu=config.gelu,
            norm_eps=config.norm_eps,
            score_cap=config.score_cap or 0.0,
            gather=self.gather,
            ranks=ranks,
        )
        self.pointer = self.lib.forerun_decoder(shape, (CLayer * len(layers))(*map(self.layer, layers)), len(layers))
        weakref.finalize(self, self.lib.forerun_free_decoder, self.pointer)

    def layer(self, layer: Layer) -> CLayer:
        a, mlp = layer.attention, layer.mlp
        return CLayer(
            qkv=native(a.qkv).pointer,
            out=native(a.out).pointer,
            dense=CGated() if mlp.dense is None else gated(mlp.dense),
            experts=None if mlp.router is None else pointer(self.experts(mlp.router, mlp.experts)),
            attention_norm=self.gains(a.norm),
            mlp_norm=self.gains(mlp.norm),
            attention_out_norm=self.gains(a.out_norm),
            mlp_out_norm=self.gains(mlp.out_norm),
            qk_norm=None if a.qk_norm is None else self.keep(a.qk_norm.float().contiguous()),
            joint_norm=a.joint_norm,
            sinks=None if a.sinks is None else self.keep(a.sinks.float().contiguous()),
            window=a.window or 0,
            rope_start=a.rope_start,
            query_rope_start=a.query_rope_start,
            parallel=mlp.parallel,
        )

    def state_entry(self, entry: StateEntry) -> CEntry:
        norms = {name: getattr(entry, name) for name in ("token_norm", "state_norm", "output_norm")}
        return CEntry(
            map=None if entry.map is None else native(entry.map).pointer,
            state_first=entry.state_first,
            normed_stream=entry.normed_stream,
            reads_stream=entry.reads_stream,
            **{name: self.gains(gain) for name, gain in norms.items()},
        )

    def experts(self, router: Router, experts: Sequence[GatedMlp]) -> CExperts:
        clamp, mlps = experts[0].clamp, (CGated * len(experts))(*map(gated, experts))
        pointers = CExperts(
            count=len(experts),
            active=router.active,
            normalised=router.normalised,
            router=native(router.linear).pointer,
            gated=mlps,
            alpha=clamp.alpha if clamp else 0.0,
            limit=clamp.limit if clamp else 0.0,
        )
        self.memory.append(pointers)
        return pointers

    def gains(self, norm: Float[Tensor, " width"] | None) -> int | None:
        """The address of the padded gains of a norm; None without a norm."""
        return None if norm is None else self.keep(padded_gains(norm))

    def keep(self, tensor: Tensor) -> int:
        """Keep a tensor alive as long as this object; returns its address."""
        self.memory.append(tensor)
        return tensor.data_ptr()

    def lower(self, num_layers: int) -> NativeExecutor:
        """As in Executor; its chains are drafted with these layers."""
        part = copy(self)
        part.num_layers = num_layers
        part.memory = [self]  # which owns the memory of both
        return part

    def run(
        self, layers: range, x: Stream, batch: TokenBatch, cache: PagedCache, read: AttentionInputs | None = None
    ) -> Stream:
        tables = pass_tables(batch, cache.keys.shape[2])
        return self.compute(layers, x, (batch.positions, batch.slots), tables, cache, read)

    def compute(
        self,
        layers: range,
        x: Stream,
        places: tuple[Int[Tensor, " total"], Int[Tensor, " total"]],
        tables: Sequence[array[int]],
        cache: PagedCache,
        read: AttentionInputs | None = None,
    ) -> Stream:
        """As `run`; `places` are the tokens' positions and slots, and `tables` the result of `pass_tables`."""
        assert x.dtype == self.stream_dtype, f"the residual stream has {x.dtype} instead of {self.stream_dtype}"
        x, num_tokens = x.clone(memory_format=torch.contiguous_format), x.shape[0]
        read, num_experts = None if read is None else padded_to_width(read), c_int64(0)
        sizes = {"num_tokens": num_tokens, "num_paths": len(tables[FIRST_SLOTS])}
        bounds = {"first_layer": layers.start, "end_layer": layers.stop, "num_experts": addressof(num_experts)}
        tensors = dict(zip(("x", "read", "positions", "slots"), addresses(x, read, *places), strict=True))
        at = {name: table.buffer_info()[0] for name, table in zip(TABLES, tables, strict=True)}
        self.lib.forerun_forward(self.pointer, self.frame(cache, **sizes, **bounds, **tensors, **at))
        if self.parts.ranks is not None:
            self.parts.ranks.check()
        self.num_experts_read += num_experts.value
        return x

    def write_kv(self, read: AttentionInputs, batch: TokenBatch, cache: PagedCache) -> None:
        """As in Executor, by a pass without attention paths."""
        read, places = padded_to_width(read), {"positions": batch.positions.data_ptr(), "slots": batch.slots.data_ptr()}
        sizes = {"num_tokens": len(read), "end_layer": self.num_layers}
        self.lib.forerun_forward(self.pointer, self.frame(cache, read=read.data_ptr(), **places, **sizes))

    def frame(self, cache: PagedCache, **fields: int | None) -> CPass:
        """The CPass of a pass over this cache, with these other fields."""
        return CPass(
            num_threads=num_threads(fields.get("num_tokens") or 1),
            keys=cache.keys.data_ptr(),
            values=cache.values.data_ptr(),
            num_slots=cache.keys.shape[2],
            cos=self.parts.rope.cos.data_ptr(),
            sin=self.parts.rope.sin.data_ptr(),
            **fields,
        )

    def chain_drawer(self, draws: Draws, reads_states: bool) -> ChainDrawer | None:
        """As in Executor; for coupled sampling only, if the kernels can compute the law of every row."""
        if draws.rejection or reads_states != (self.entry is not None):
            return None
        laws = draws.row_laws
        return partial(self.draw_chains, laws) if laws is not None and laws.kernels_suffice else None

    def draw_chains(
        self, laws: RowLaws, begin: ChainStarts, cache: PagedCache, states: Float[Tensor, "starts depth hidden"] | None
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """A ChainDrawer's function, with the laws of all rows of the round."""
        laws, embedding, head_ids = laws.select([s.row for s in begin.starts]), self.parts.embedding, begin.head_ids
        depths, min_survival = [s.depth for s in begin.starts], array("f", [s.min_survival for s in begin.starts])
        has_survival = any(min_survival)
        before, logits = (None if each is None else each.float().contiguous() for each in (begin.states, begin.logits))
        deepest, texts, text_fields = max(depths), begin.texts, {}
        if texts is not None:
            counts, text_tokens = array("q", map(len, texts.tokens)), array("q", itertools.chain(*texts.tokens))
            assert texts.roots is not None, "the texts' outputs are needed"
            text_states = texts.states.float().contiguous()
            text_fields = {"text_counts": address(counts), "text_tokens": address(text_tokens)}
            text_fields |= {"text_states": text_states.data_ptr(), "roots": texts.roots.data_ptr()}
        tables = [array("q", numbers) for numbers in (depths, begin.slots, begin.positions)]
        tokens = array("q", bytes(8 * deepest * len(depths)))
        survival = array("f", bytes(4 * len(tokens) if has_survival else 0))
        chains = CChains(
            num_rows=len(depths),
            depth=deepest,
            **{n: address(t) for n, t in zip(("depths", "starts", "positions"), tables, strict=True)},
            logits=None if logits is None else logits.data_ptr(),
            stride=begin.vocab_size,
            num_ids=min(laws.num_ids, begin.vocab_size, self.head.outputs if head_ids is None else begin.vocab_size),
            laws=addressof(laws.rows),
            embedding=embedding.data_ptr(),
            embedding_format=FORMATS[embedding.dtype],
            hidden=embedding.shape[1],
            num_layers=self.num_layers,
            head=self.head.pointer,
            head_ids=None if head_ids is None else head_ids.data_ptr(),
            norm=None if self.norm is None else self.norm.data_ptr(),
            entry=None if self.entry is None else pointer(self.entry),
            before=None if before is None else before.data_ptr(),
            norm_eps=self.norm_eps,
            slack=laws.slack,
            min_survival=address(min_survival) if has_survival else None,
            tokens=address(tokens),
            survival=address(survival) if has_survival else None,
            states=None if states is None else states.data_ptr(),
            **text_fields,
        )
        self.lib.forerun_chains(self.pointer, chains, self.frame(cache))
        rows = [tokens[i * deepest : (i + 1) * deepest].tolist() for i in range(len(depths))]
        drafted = [list(itertools.takewhile(lambda token: token >= 0, row)) for row in rows]
        if not has_survival:
            return drafted, None
        return drafted, [survival[i * deepest : i * deepest + len(row)].tolist() for i, row in enumerate(drafted)]

    def norm_rows(self, x: Stream, gain: Float[Tensor, " hidden"]) -> Stream:
        rows, gains = padded_to_width(x), padded_gains(gain)
        normed = torch.empty_like(rows)
        sizes = len(x), x.shape[1]
        self.lib.forerun_norm(rows.data_ptr(), gains.data_ptr(), self.norm_eps, *sizes, normed.data_ptr())
        return normed[:, : x.shape[1]]

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        return self.head(hidden.float(), self.norm, self.norm_eps)


def pass_tables(batch: TokenBatch, num_slots: int) -> list[array[int]]:
    """The attention paths of a batch as the TABLES of a pass, over a cache of `num_slots` slots."""
    path_of, last_key = (array("q", [0]) * len(batch.tokens) for _ in range(2))
    for number, path in enumerate(batch.paths):
        for query, position in zip(path.queries, path.positions, strict=True):
            path_of[query], last_key[query] = number, position
        last, copied = path.first_slot + path.positions[-1], path.copy
        outside = copied is None or last < copied.first
        end = num_slots if outside or copied is None else copied.first + len(copied.source)
        assert last < end, f"{path} has no slot for its last query's key"
    copies = [path.copy for path in batch.paths]
    return [
        path_of,
        last_key,
        array("q", [path.first_slot for path in batch.paths]),
        array("q", [1 << 62 if p.copy is None else p.copy.first - p.first_slot for p in batch.paths]),
        array("q", itertools.accumulate(0 if copy is None else len(copy.source) for copy in copies)),
        array("q", [slot for copy in copies if copy is not None for slot in copy.source] or [0]),
    ]


def addresses(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def gated(mlp: GatedMlp) -> CGated:
    return CGated(native(mlp.gate_up).pointer, native(mlp.down).pointer, mlp.plain)


def native(linear: Linear) -> NativeLinear:
    """The linear layer, which must have been made by this backend."""
    assert isinstance(linear, NativeLinear), f"{linear} was not made by NativeBackend"
    return linear
