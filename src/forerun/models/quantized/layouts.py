"""The layouts of quantized weights in Hugging Face folders: which tensors form a weight, and what their numbers mean.

LAYOUTS lists those of each method: AutoAWQ, AutoGPTQ and GPTQModel, compressed-tensors, bitsandbytes, and FP8 and MXFP4
in transformers. A layout is recognised by the name ending of one tensor; all tensors of a weight are checked by the
files' headers before any weight is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from forerun.errors import MissingWeights, UnsupportedModel, WrongShape
from forerun.fields import Fields, short
from forerun.models.backends.torch_cpu.grouped import GroupedWeight, GroupForm
from forerun.models.foreign import ORIGINAL
from forerun.models.quantized.scheme import Scheme
from forerun.models.quantized.tensors import GROUP, IntegerWeight, QuantizedTensor, group_form, unpacked
from forerun.models.stored import DOWNLOAD, StoredTensor

WeightParts = Mapping[str, StoredTensor]  # the tensors of one weight by name ending, the identifying one first
FLOATS, WORDS, INDEX, BYTES = ("F16", "BF16", "F32"), ("I32",), ("I32", "I64"), ("U8",)
FP8 = ("F8_E4M3", "F8_E5M2")
FP8_GROUP = 64  # FP8 weights stay in groups if the inputs of a block are a multiple of this
SINGLE = ((), (1,))  # shapes of a scale for the entire tensor
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight outputs, stored as 0 2 4 6 1 3 5 7
ONES = {4: 0x11111111, 8: 0x01010101}  # by bits: a word with 1 in each of its numbers
MXFP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8)  # twice the magnitudes
STATE, TABLES = ".quant_state.bitsandbytes__", (".nested_absmax", ".nested_quant_map")
# Scales of activations and KV caches, which forerun does not quantize.
OF_ACTIVATIONS = ("input_scale", "output_scale", "activation_scale", "input_zero_point", ".k_scale", ".v_scale")


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Name endings: of the tensor that identifies the layout (`sign`), of the others, and of the unquantized weight."""

    sign: str
    others: tuple[str, ...]
    weight: str
    read: Callable[[WeightParts, Scheme], QuantizedTensor]


def quantized_tensors(scheme: Scheme, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | QuantizedTensor]:
    """All tensors; those of each quantized weight become one, under the name of the unquantized weight.

    Raises MissingWeights, WrongShape or UnsupportedModel, with the name of a tensor.
    """
    rest = {name: part for name, part in stored.items() if not name.endswith(OF_ACTIVATIONS)}
    weights, layouts = dict[str, QuantizedTensor](), LAYOUTS[scheme.method]
    endings = {end for layout in layouts for end in layout.others if end not in ("", ".weight")}
    for layout in layouts:
        for name in [name for name in rest if name.endswith(layout.sign)]:
            stem = name.removesuffix(layout.sign)
            ends = [end for end in (layout.sign, *layout.others) if stem + end in rest]
            weights[stem + layout.weight] = layout.read({end: rest.pop(stem + end) for end in ends}, scheme)
    for name in rest:
        if name in weights or name.endswith(tuple(endings)):
            problem = "exists both quantised and not" if name in weights else "exists, but not the weight it belongs to"
            raise MissingWeights(f"{rest[name].file}: {short(name)} {problem}: {DOWNLOAD}")
    return {**rest, **weights}


def get_part(parts: WeightParts, end: str, formats: Sequence[str], shape: Sequence[int] | None = None) -> StoredTensor:
    """The part with this name ending; raises ModelError unless it has one of these formats and this shape."""
    sign, first = next(iter(parts.items()))
    part = parts.get(end)
    if part is None:
        missing = first.name.removesuffix(sign) + end
        raise MissingWeights(f"{first.file} has {short(first.name)}, but not {short(missing)}: {DOWNLOAD}")
    if part.format not in formats:
        supported = f"supported: {', '.join(formats)}; {ORIGINAL}"
        raise UnsupportedModel(f"{part.file}: {part.name} is stored as {part.format}; {supported}")
    if shape is not None and part.shape != tuple(shape):
        raise shape_error(part, f"for {short(first.name)} of {list(first.shape)} it must be {list(shape)}")
    return part


def shape_error(part: StoredTensor, needed: str) -> WrongShape:
    """The error for a part of the wrong shape; `needed` describes the right one."""
    return WrongShape(f"{part.file}: {part.name} has shape {list(part.shape)}; {needed}: {DOWNLOAD}")


def matrix(parts: WeightParts, end: str, formats: Sequence[str]) -> tuple[StoredTensor, int, int]:
    """The part with this name ending, which must be a matrix, and its two sizes."""
    part = get_part(parts, end, formats)
    if len(part.shape) != 2 or not all(part.shape):
        raise shape_error(part, "it must be a matrix")
    return part, *part.shape


def groups_of(
    parts: WeightParts, end: str, scales: StoredTensor, num_groups: int, inputs: int
) -> Callable[[], Tensor | None]:
    """A function that reads the group of each input from the part with this ending; without such a part it returns
    None, for groups of equal size."""
    if end in parts:
        return partial(read_groups, get_part(parts, end, INDEX, (inputs,)), num_groups)
    if inputs % num_groups:
        raise shape_error(scales, f"{inputs} inputs cannot be divided into {num_groups} groups")
    return lambda: None


def read_groups(part: StoredTensor, num_groups: int) -> Tensor:
    """The group of each input, read from a tensor. Raises WrongShape for an invalid group."""
    groups = part.read().long()
    for number in (int(groups.min()), int(groups.max())):
        if not 0 <= number < num_groups:
            raise WrongShape(f"{part.file}: {part.name} has group {number}, but only {num_groups} exist: {DOWNLOAD}")
    return groups


def awq(parts: WeightParts, scheme: Scheme) -> QuantizedTensor:
    """AWQ: a word holds eight outputs of one input; a weight is `(q - z) * s`."""
    first, inputs, words = matrix(parts, ".qweight", WORDS)
    _, num_groups, _ = matrix(parts, ".scales", FLOATS)
    scales = get_part(parts, ".scales", FLOATS, (num_groups, 8 * words))
    zeros = get_part(parts, ".qzeros", WORDS, (num_groups, words))
    groups = groups_of(parts, ".g_idx", scales, num_groups, inputs)

    def numbers(part: StoredTensor) -> Tensor:
        words = part.read().T.contiguous()
        return torch.stack([(words >> 4 * place & 15).to(torch.int8) - 8 for place in AWQ_PLACES], 1).flatten(0, 1)

    def unpack() -> IntegerWeight:
        return IntegerWeight(numbers(first), scales.read().float().T, numbers(zeros), 4, groups())

    form = group_form(4, inputs, num_groups, scales.format, has_zeros=True)
    return QuantizedTensor(first.file, (8 * words, inputs), "AWQ int4", unpack, form)


def gptq(parts: WeightParts, scheme: Scheme) -> QuantizedTensor:
    """GPTQ: a word holds eight or four inputs of one output, or the zero points of eight or four outputs.

    The first format stores zero points minus 1. The 1 is added to entire words, as GPTQModel subtracts it: there a zero
    point of 0 borrows from the next number. Without zero points of 0, as in AutoGPTQ's files, this adds 1 to each.
    """
    first, words, outputs = matrix(parts, ".qweight", WORDS)
    zeros, num_groups, zero_words = matrix(parts, ".qzeros", WORDS)
    scales = get_part(parts, ".scales", FLOATS, (num_groups, outputs))
    bits = next((bits for bits in ONES if outputs * bits == 32 * zero_words), None)
    if bits is None:
        raise shape_error(zeros, f"for {outputs} outputs it is neither 4 nor 8 bits each")
    inputs, added = words * 32 // bits, ONES[bits] if scheme.less_one else 0
    groups = groups_of(parts, ".g_idx", scales, num_groups, inputs)

    def unpack() -> IntegerWeight:
        offsets = unpacked(zeros.read() + added, bits).T
        return IntegerWeight(unpacked(first.read().T, bits), scales.read().float().T, offsets, bits, groups())

    form = group_form(bits, inputs, num_groups, scales.format, not scheme.symmetric, scheme.by_activations)
    return QuantizedTensor(first.file, (outputs, inputs), f"GPTQ int{bits}", unpack, form)


def packed_integers(parts: WeightParts, scheme: Scheme) -> QuantizedTensor:
    """compressed-tensors, packed: a word holds inputs of one output, or zero points of several outputs; both are stored
    plus half the range."""
    first, outputs, words = matrix(parts, "_packed", WORDS)
    size = get_part(parts, "_shape", INDEX, (2,)).read().tolist()
    bits = next((bits for bits in ONES if [outputs, words] == [size[0], -(-size[1] * bits // 32)]), None)
    if bits is None:
        raise shape_error(first, f"for {short(parts['_shape'].name)}, {size}, it is neither 4 nor 8 bits each")
    inputs, zeros = size[1], parts.get("_zero_point")
    scales, num_groups = scales_of(parts, outputs)
    groups = groups_of(parts, "_g_idx", scales, num_groups, inputs)
    if zeros is not None:
        get_part(parts, "_zero_point", WORDS, (-(-outputs * bits // 32), num_groups))

    def unpack() -> IntegerWeight:
        offsets = None if zeros is None else unpacked(zeros.read().T, bits)[:, :outputs].T
        factors = scales.read().float().view(-1, num_groups).expand(outputs, -1)
        return IntegerWeight(unpacked(first.read(), bits)[:, :inputs], factors, offsets, bits, groups())

    form = group_form(bits, inputs, num_groups, scales.format, zeros is not None, "_g_idx" in parts)
    return QuantizedTensor(first.file, (outputs, inputs), f"compressed-tensors int{bits}", unpack, form)


def scales_of(parts: WeightParts, outputs: int) -> tuple[StoredTensor, int]:
    """The scales of an integer weight, and the number of scales for each output; 1 if all outputs share a scale."""
    part = get_part(parts, "_scale", FLOATS)
    if part.shape in (*SINGLE, (outputs,)):
        return part, 1
    if len(part.shape) != 2 or part.shape[0] != outputs or not part.shape[1]:
        raise shape_error(part, f"the weight has {outputs} outputs")
    return part, part.shape[1]


def single_bytes(parts: WeightParts, scheme: Scheme) -> QuantizedTensor:
    """compressed-tensors, not packed: int8 or FP8 numbers of one byte."""
    if get_part(parts, "", ("I8", *FP8)).format != "I8":
        return fp8(parts, scheme)
    first, outputs, inputs = matrix(parts, "", ("I8",))
    scales, num_groups = scales_of(parts, outputs)
    groups, zeros = groups_of(parts, "_g_idx", scales, num_groups, inputs), parts.get("_zero_point")
    if zeros is not None:
        get_part(parts, "_zero_point", ("I8",), scales.shape)

    def unpack() -> IntegerWeight:
        offsets = None if zeros is None else zeros.read().view(-1, num_groups).expand(outputs, -1)
        factors = scales.read().float().view(-1, num_groups).expand(outputs, -1)
        return IntegerWeight(first.read(), factors, offsets, 8, groups())

    form = group_form(8, inputs, num_groups, scales.format, zeros is not None, "_g_idx" in parts)
    return QuantizedTensor(first.file, (outputs, inputs), "compressed-tensors int8", unpack, form)


def fp8(parts: WeightParts, scheme: Scheme) -> QuantizedTensor:
    """FP8 numbers with a scale for the entire tensor, each output or each block; blocks at the edges may be smaller."""
    weight, scales = get_part(parts, "", FP8), get_part(parts, next(iter(parts)), (*FLOATS, "F8_E8M0"))
    if len(weight.shape) < 2:
        raise shape_error(weight, "it must be a matrix")
    *outer, outputs, inputs = weight.shape
    per_output = scales.shape in ((*outer, outputs), (*outer, outputs, 1))
    rows, columns = (outputs, inputs) if scales.shape in SINGLE else (1, inputs) if per_output else scheme.block
    blocks = (
        (*(1 for _ in outer), 1, 1) if scales.shape in SINGLE else (*outer, -(-outputs // rows), -(-inputs // columns))
    )
    if scales.shape not in SINGLE and not per_output and scales.shape != blocks:
        raise shape_error(scales, f"{short(weight.name)} has {list(blocks)} blocks of {rows} x {columns}")

    def unpack() -> Tensor:
        factors = scales.read().float().view(blocks).repeat_interleave(min(rows, outputs), -2)[..., :outputs, :]
        return weight.read().float() * factors.repeat_interleave(min(columns, inputs), -1)[..., :inputs]

    def floats(_part: int | None) -> GroupedWeight | None:
        """The weight in groups of inputs, each with a scale for every output; None if it contains NaN."""
        numbers = weight.read()
        if bool(numbers.isnan().any()):
            return None
        factors = scales.read().float().view(blocks).repeat_interleave(min(rows, outputs), 0)[:outputs]
        return GroupedWeight(numbers, factors.contiguous(), None, 8, inputs // factors.shape[1])

    fits = not outer and weight.format == "F8_E4M3" and (blocks[1] == 1 or inputs % columns == columns % FP8_GROUP == 0)
    form = GroupForm(0, inputs if blocks[-1] == 1 else FP8_GROUP, gpu_bits=8) if fits else None
    return QuantizedTensor(weight.file, weight.shape, "FP8", unpack, form, floats)


def mxfp4(parts: WeightParts, scheme: Scheme) -> QuantizedTensor:
    """MXFP4 in gpt-oss: a byte holds two numbers, the lower four bits first; 32 numbers share a power of two."""
    blocks = get_part(parts, "_blocks", BYTES)
    if len(blocks.shape) != 4 or blocks.shape[3] != 16:
        raise shape_error(blocks, "it must be [experts, outputs, groups, 16]")
    experts, outputs, num_groups, _ = blocks.shape
    exponents, values = get_part(parts, "_scales", BYTES, blocks.shape[:3]), torch.cat([MXFP4, -MXFP4])

    def expert(number: int) -> IntegerWeight:
        pairs = blocks.read_part(number)
        whole = values[torch.stack([pairs & 15, pairs >> 4], -1).flatten(2).int()]
        scales = torch.ldexp(whole.any(2).float(), exponents.read_part(number).int() - 128)
        return IntegerWeight(whole.flatten(1), scales, None, 8)

    def unpack() -> Tensor:
        sizes = (outputs, 32 * num_groups)
        dense = (expert(i).dense_into(torch.empty(sizes, dtype=torch.bfloat16)).T for i in range(experts))
        return torch.stack([*dense])

    def groups(part: int | None) -> GroupedWeight | None:
        return None if part is None else expert(part).grouped()

    shape = (experts, 32 * num_groups, outputs)
    return QuantizedTensor(blocks.file, shape, "MXFP4", unpack, GroupForm(8, GROUP, gpu_bits=4), groups)


def bnb_4bit(parts: WeightParts, scheme: Scheme) -> QuantizedTensor:
    """bitsandbytes, 4 bits: a byte holds two indices into a table of values, the upper four bits first; each block is
    multiplied by its largest magnitude. These magnitudes, minus their mean, may be quantized in the same way.
    """
    sign = next(iter(parts))
    weight, state = get_part(parts, "", BYTES), get_part(parts, sign, BYTES)
    try:
        fields = Fields(state.file, json.loads(bytes(state.read().tolist())))
        shape = tuple(int(size) for size in fields.values["shape"])
        mean = float(fields.values.get("nested_offset") or 0.0)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise MissingWeights(f"{state.file}: {state.name} is damaged ({short(error)}): {DOWNLOAD}") from error
    size, nested = fields.whole("blocksize"), fields.values.get("nested_blocksize") is not None
    outer = fields.whole("nested_blocksize") if nested else 1
    count = math.prod(shape)
    num_blocks = -(-count // size)
    get_part(parts, "", BYTES, (-(-count // 2), 1))
    table, sizes = (
        get_part(parts, ".quant_map", ("F32",), (16,)),
        get_part(parts, ".absmax", BYTES if nested else ("F32",), (num_blocks,)),
    )
    if nested:
        for end, length in zip(TABLES, (-(-num_blocks // outer), 256), strict=True):
            get_part(parts, end, ("F32",), (length,))

    def unpack() -> Tensor:
        largest = sizes.read()
        if nested:
            factors, places = (parts[end].read() for end in TABLES)
            largest = places[largest.int()] * factors.repeat_interleave(min(outer, num_blocks))[:num_blocks] + mean
        pairs = weight.read().flatten()
        numbers = table.read()[torch.stack([pairs >> 4, pairs & 15], -1).flatten()[:count].int()]
        return (numbers * largest.repeat_interleave(min(size, count))[:count]).view(shape)

    return QuantizedTensor(weight.file, shape, sign.removeprefix(STATE).upper(), unpack)


def bnb_8bit(parts: WeightParts, scheme: Scheme) -> QuantizedTensor:
    """bitsandbytes, 8 bits: int8 numbers, of which 127 is the largest magnitude of the output."""
    first, outputs, inputs = matrix(parts, ".weight", ("I8",))
    scales, order = get_part(parts, ".SCB", ("F32",), (outputs,)), parts.get(".weight_format")
    if order is not None and order.read().any():
        fix = "save the model with a newer bitsandbytes"
        raise UnsupportedModel(f"{order.file}: {order.name} is not 0, so numbers are not stored row by row: {fix}")

    def unpack() -> IntegerWeight:
        return IntegerWeight(first.read(), scales.read()[:, None] / 127, None, 8)

    form = group_form(8, inputs, 1, scales.format)
    return QuantizedTensor(first.file, (outputs, inputs), "bitsandbytes int8", unpack, form)


LAYOUTS: dict[str, tuple[WeightLayout, ...]] = {  # by the methods of scheme.py
    "awq": (WeightLayout(".qweight", (".qzeros", ".scales"), ".weight", awq),),
    "gptq": (WeightLayout(".qweight", (".qzeros", ".scales", ".g_idx"), ".weight", gptq),),
    "compressed-tensors": (
        WeightLayout("_packed", ("_scale", "_shape", "_zero_point", "_g_idx"), "", packed_integers),
        WeightLayout("_scale", ("", "_zero_point", "_g_idx"), "", single_bytes),
    ),
    "fp8": (WeightLayout("_scale_inv", ("",), "", fp8), WeightLayout("_scale", ("",), "", fp8)),
    "mxfp4": (WeightLayout("_blocks", ("_scales",), "", mxfp4),),
    "bitsandbytes": (
        *(WeightLayout(STATE + kind, ("", ".absmax", ".quant_map", *TABLES), "", bnb_4bit) for kind in ("nf4", "fp4")),
        WeightLayout(".SCB", (".weight", ".weight_format"), ".weight", bnb_8bit),
    ),
}
