"""Quantised Hugging Face folders made from plain ones, written number by number from the formats' definitions.

Each packer gives the tensors that a program would store for a matrix, and the matrix that they stand for. None shares
code with what reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from kit.checkpoints import read_json, written

Numbers = NDArray[np.int64]
Packed = tuple[dict[str, Tensor], Tensor]  # tensors by the ends of their names, and the weight in float32
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.")  # what programs leave as it is
BELOW = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0]
NF4 = torch.tensor([*BELOW, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0])


@dataclass(frozen=True)
class Rounded:
    """`weight[o, i] = scales[o, g] * (numbers[o, i] - zeros[o, g])` with `g = group_of[i]`, numbers from 0 on."""

    numbers: Numbers
    zeros: Numbers
    scales: Tensor
    group_of: Numbers

    @property
    def dense(self) -> Tensor:
        shifted = self.numbers - self.zeros[:, self.group_of]
        return torch.from_numpy(shifted).float() * self.scales.float()[:, torch.from_numpy(self.group_of)]


def rounded(weight: Tensor, bits: int, size: int, symmetric: bool, dtype: torch.dtype, mixed: bool = False) -> Rounded:
    """The weight in groups of `size` inputs, 0 for all; `mixed`: neighbours lie in different groups."""
    outputs, inputs = weight.shape
    size, top = size or inputs, 2**bits - 1
    group_of = np.arange(inputs) // size
    if mixed:
        group_of = np.random.default_rng(inputs).permutation(group_of)
    order = torch.from_numpy(np.argsort(group_of, kind="stable"))
    groups = weight.float()[:, order].reshape(outputs, -1, size)
    if symmetric:
        scales = (groups.abs().amax(2) * 2 / top).to(dtype)
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
        scales = ((high - low) / top).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, top).long()
    index = torch.from_numpy(group_of)
    numbers = (weight.float() / scales.float()[:, index]).round().long() + zeros[:, index]
    return Rounded(numbers.clamp(0, top).numpy(), zeros.numpy(), scales, group_of)


def words(numbers: Numbers, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Rows of numbers in words of 32 bits; the i-th from the lowest bits on is number `places[i]` of each word's."""
    per = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per))).astype(np.uint64)
    result = np.zeros((len(padded), padded.shape[1] // per), np.uint64)
    for i in range(per):
        result |= padded[:, (i if places is None else places[i]) :: per] << np.uint64(bits * i)
    return torch.from_numpy(result.astype(np.uint32).view(np.int32))


def awq(weight: Tensor, size: int) -> Packed:
    r, places = rounded(weight, 4, size, False, torch.float16), (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {".qweight": words(r.numbers.T, 4, places), ".qzeros": words(r.zeros.T, 4, places)}
    return tensors | {".scales": r.scales.T}, r.dense


def gptq(
    weight: Tensor, size: int, bits: int = 4, sym: bool = True, v2: bool = False, desc_act: bool = False
) -> Packed:
    r = rounded(weight, bits, size, sym, torch.float16, desc_act)
    less = torch.tensor(0) if v2 else words(np.ones_like(r.zeros.T), bits)  # of whole words: neighbours may borrow
    tensors = {".qweight": words(r.numbers, bits).T, ".qzeros": words(r.zeros.T, bits) - less, ".scales": r.scales.T}
    return tensors | {".g_idx": torch.from_numpy(r.group_of).int()}, r.dense


def packed(weight: Tensor, size: int, bits: int = 4, symmetric: bool = True, mixed: bool = False) -> Packed:
    r = rounded(weight, bits, size, symmetric, torch.bfloat16, mixed)
    tensors = {".weight_packed": words(r.numbers, bits), ".weight_scale": r.scales}
    tensors[".weight_shape"] = torch.tensor(weight.shape)
    if not symmetric:
        tensors[".weight_zero_point"] = words(r.zeros.T, bits).T
    if mixed:
        tensors[".weight_g_idx"] = torch.from_numpy(r.group_of).int()
    return tensors, r.dense


def eight_bits(weight: Tensor) -> Packed:
    r = rounded(weight, 8, 0, True, torch.bfloat16)
    return {".weight": torch.from_numpy(r.numbers - 128).to(torch.int8), ".weight_scale": r.scales}, r.dense


def fp8(weight: Tensor, rows: int, columns: int, end: str) -> Packed:
    """Scales of blocks of `rows` x `columns`, 0 for all that there are."""
    of_all = not (rows or columns)
    rows, columns = rows or weight.shape[0], columns or weight.shape[1]
    numbers, dense = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight, dtype=torch.float32)
    scales = []
    for top in range(0, weight.shape[0], rows):
        for left in range(0, weight.shape[1], columns):
            block = (slice(top, top + rows), slice(left, left + columns))
            scales.append(weight[block].float().abs().max() / 448)
            numbers[block] = (weight[block].float() / scales[-1]).to(torch.float8_e4m3fn)
            dense[block] = numbers[block].float() * scales[-1]
    shape = (1,) if of_all else (-(-weight.shape[0] // rows), -1)
    return {".weight": numbers, end: torch.stack(scales).view(shape)}, dense


def nf4(weight: Tensor, nested: bool) -> Packed:
    blocks = weight.float().reshape(-1, 64)
    sizes = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors: dict[str, Tensor] = {".weight.quant_map": NF4.clone()}
    if nested:
        mean, table = sizes.mean(), torch.linspace(-1, 1, 256)
        outer = torch.nn.functional.pad(sizes - mean, (0, -len(sizes) % 256)).view(-1, 256).abs().amax(1)
        factors = outer.repeat_interleave(256)[: len(sizes)]
        places = (((sizes - mean) / factors)[:, None] - table).abs().argmin(1)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(mean)}
        tensors |= {".weight.absmax": places.to(torch.uint8), ".weight.nested_absmax": outer}
        tensors[".weight.nested_quant_map"] = table
        sizes = table[places] * factors + mean
    else:
        tensors[".weight.absmax"] = sizes
    numbers = ((blocks / sizes[:, None])[..., None] - NF4).abs().argmin(2)
    halves = numbers.view(-1, 2)
    tensors[".weight"] = (halves[:, 0] << 4 | halves[:, 1]).to(torch.uint8)[:, None]
    tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors, (NF4[numbers] * sizes[:, None]).view(weight.shape)


def largest(weight: Tensor) -> Packed:
    sizes = weight.float().abs().amax(1)
    numbers = (weight.float() * 127 / sizes[:, None]).round().to(torch.int8)
    tensors = {".weight": numbers, ".SCB": sizes, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, numbers * (sizes / 127)[:, None]


@dataclass(frozen=True)
class Kind:
    """How a folder is quantised: what config.json says, and a matrix's packer. `label` is what is shown of it.

    It takes matrices whose sizes `outputs` and `inputs` divide.
    """

    label: str
    config: Mapping[str, Any]
    pack: Callable[[Tensor], Packed]
    stays: bool = True
    outputs: int = 1
    inputs: int = 32


def gptq_kind(size: int, bits: int = 4, sym: bool = True, v2: bool = False, desc_act: bool = False) -> Kind:
    config = {"quant_method": "gptq", "bits": bits, "group_size": size or -1, "sym": sym, "desc_act": desc_act}
    config["checkpoint_format"] = "gptq_v2" if v2 else "gptq"
    pack = partial(gptq, size=size, bits=bits, sym=sym, v2=v2, desc_act=desc_act)
    return Kind(f"GPTQ int{bits}", config, pack, not desc_act, 8, size or 32)


def packed_kind(size: int, bits: int = 4, symmetric: bool = True, mixed: bool = False) -> Kind:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if size else "channel"}
    group = {"targets": ["Linear"], "weights": weights | {"group_size": size or None}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    pack = partial(packed, size=size, bits=bits, symmetric=symmetric, mixed=mixed)
    return Kind(f"compressed-tensors int{bits}", config, pack, not mixed, 1, size or 8)


OF_BYTES = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}
OF_FP8 = OF_BYTES | {"format": "float-quantized"}
NESTED = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
KINDS: dict[str, Kind] = {
    **{f"awq, {n}": Kind("AWQ int4", AWQ | {"group_size": n}, partial(awq, size=n), True, 8, n) for n in (32, 64, 128)},
    "gptq, 128": gptq_kind(128),
    "gptq, 32, zeros": gptq_kind(32, sym=False),
    "gptq 2, 64, zeros": gptq_kind(64, sym=False, v2=True),
    "gptq, by activations": gptq_kind(32, sym=False, desc_act=True),
    "gptq, outputs": gptq_kind(0),
    "gptq, 8 bits": gptq_kind(32, 8),
    "gptq, 8 bits, zeros": gptq_kind(64, 8, sym=False),
    "compressed, 128": packed_kind(128),
    "compressed, 32, zeros": packed_kind(32, symmetric=False),
    "compressed, 64": packed_kind(64),
    "compressed, outputs": packed_kind(0),
    "compressed, mixed": packed_kind(32, mixed=True),
    "compressed, 8 bits, zeros": packed_kind(64, 8, symmetric=False),
    "compressed, bytes": Kind("compressed-tensors int8", OF_BYTES, eight_bits),
    "compressed, fp8": Kind("FP8", OF_FP8, partial(fp8, rows=1, columns=0, end=".weight_scale"), False),
    "compressed, fp8, all": Kind("FP8", OF_FP8, partial(fp8, rows=0, columns=0, end=".weight_scale"), False),
    "fp8": Kind("FP8", {"quant_method": "fp8"}, partial(fp8, rows=128, columns=128, end=".weight_scale_inv"), False),
    **{
        f"fp8, {rows} x {columns}": Kind(
            "FP8",
            {"quant_method": "fp8", "weight_block_size": [rows, columns]},
            partial(fp8, rows=rows, columns=columns, end=".weight_scale_inv"),
            False,
        )
        for rows, columns in ((48, 80), (48, 192))
    },
    "nf4": Kind("NF4", NESTED, partial(nf4, nested=False), False, 2),
    "nf4, nested": Kind("NF4", NESTED, partial(nf4, nested=True), False, 2),
    "bitsandbytes, bytes": Kind("bitsandbytes int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}, largest),
}


def write_quantized(source: Path, into: Path, kind: str, kept: tuple[str, ...] = KEPT) -> dict[str, Tensor]:
    """The model of `source` in a folder of this kind, and the tensors that it stands for, in float32.

    Tensors whose names have something of `kept` in them stay as they are.
    """
    how, stored, meant = KINDS[kind], dict[str, Tensor](), dict[str, Tensor]()
    files = sorted(source.glob("*.safetensors"))
    for name, tensor in ((n, t) for file in files for n, t in load_file(file).items()):
        fits = tensor.dim() == 2 and not (tensor.shape[0] % how.outputs or tensor.shape[1] % how.inputs)
        if any(part in name for part in kept) or not fits:
            stored[name], meant[name] = tensor, tensor.float()
            continue
        parts, meant[name] = how.pack(tensor)
        stored |= {name.removesuffix(".weight") + end: part for end, part in parts.items()}
    write_like(source, into, how.config, stored)
    return meant


def write_like(source: Path, into: Path, config: Mapping[str, Any], stored: dict[str, Tensor]) -> None:
    """A folder with these tensors, and what else is in `source`."""
    into.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        shutil.copyfile(path, into / path.name)
    written(into, read_json(source / "config.json") | {"quantization_config": dict(config)}, stored)


def write_mxfp4(source: Path, into: Path) -> dict[str, Tensor]:
    """A model of gpt-oss with random experts in MXFP4, and the tensors that it stands for."""
    dice, values = torch.Generator().manual_seed(0), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    stored, meant = load_file(source / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in [*stored.items()]:
        meant[name] = tensor.float()
        if "experts" in name and tensor.dim() == 3:
            experts, inputs, outputs = stored.pop(name).shape
            codes = torch.randint(16, (experts, outputs, inputs), generator=dice)
            powers = torch.randint(120, 124, (experts, outputs, inputs // 32), generator=dice)
            halves = codes.view(experts, outputs, -1, 16, 2)
            stored[f"{name}_blocks"] = (halves[..., 0] | halves[..., 1] << 4).to(torch.uint8)
            stored[f"{name}_scales"] = powers.to(torch.uint8)
            weights = values[codes % 8] * (1 - 2 * (codes // 8)) * 2.0 ** (powers.repeat_interleave(32, 2) - 127)
            meant[name] = weights.transpose(1, 2)
    write_like(source, into, {"quant_method": "mxfp4"}, stored)
    return meant
