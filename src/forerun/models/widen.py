"""Widening: makes a larger checkpoint that computes the same function as a small one.

With it, costs and gains of speculation can be measured at the size of a real model when none is at hand. The residual
stream gets additional channels that stay 0: no layer writes to them, so weights that read them may have any value.
Additional heads and neurons compute, but their output weights are 0; additional layers write nothing; widen_experts.py
handles experts. Unused weights are random and as large as the real ones, so that no kernel can skip them. The mean
square of a norm's input shrinks by the ratio of the widths, so its gain is divided by the root of the ratio, and its
eps by the ratio; norms of query and key heads use the same eps, so their inputs are scaled down too. At ratios of 4,
16, ... all factors are powers of two, which are exact.

config.json marks a widened checkpoint (`forerun_widened`), and every measurement shows the mark. The logits of both
models are compared before the checkpoint gets its final name.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from forerun.annotations import ProgressCallback
from forerun.config import require_whole
from forerun.errors import InvalidRequest, UnsupportedModel, WidenedDiffers
from forerun.fields import read_fields
from forerun.models.agreement import Agreement, compare_logits
from forerun.models.config import WIDENED, ModelConfig, amount, config_of, read_config
from forerun.models.gguf.folder import INDEX
from forerun.models.inside import text_part
from forerun.models.loading import Blueprint
from forerun.models.projections import ADDING, EMBEDDING, FINAL_NORM, count_parameters, tensor_shapes
from forerun.models.quantized.scheme import KEYS
from forerun.models.weights import Checkpoint
from forerun.models.widen_experts import expert_values, grown_experts, parts_of, to_experts
from forerun.store import cache_folder, save_json, save_tensors, whole_folder, writable
from forerun.text.chat import OTHER_FILES

RECIPE = 1  # increased when the weights for a shape and seed change
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
# Name endings of all tensors that write to the residual stream; the last three are of experts.
WRITERS: tuple[str, ...] = (*ADDING, "o_proj.bias", "down_proj.bias")
WRITERS += ("w2.weight", "experts.down_proj", "experts.down_proj_bias")
HEAD_NORMED = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")  # in families with head norms
STREAM_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", FINAL_NORM)
SHARD_BYTES = 256 << 20
# Files that are copied, except those that are written for the new checkpoint.
COMPANIONS = ("*.json", "tokenizer*", "*.txt", "*.jinja", OTHER_FILES, "LICENSE*")
WEIGHTS = "*.safetensors"
cached_shapes = cache(tensor_shapes)  # of the source, which are needed for each tensor


@dataclass(frozen=True, slots=True)
class Wider:
    """The shape of a widened model. By default `mlp` and `heads` grow in proportion to `hidden`; the width and grouping
    of heads do not change.

    Additional layers are distributed between the source's layers, of which the last stays last. With `experts`, every
    MLP of a dense source becomes this number of experts of `mlp` neurons each, `active` of them for each token.
    """

    hidden: int
    layers: int
    mlp: int | None = None
    heads: int | None = None
    experts: int | None = None
    active: int = 2

    @classmethod
    def of(cls, config: ModelConfig, num_parameters: int) -> Wider:
        """A shape of about `num_parameters`, as wide as the layers allow, in factors of 4, which are exact."""
        if num_parameters < (least := count_parameters(config)):
            raise InvalidRequest(
                "parameters", f"{amount(num_parameters)} must be at least the model's own {amount(least)}."
            )
        wider, hidden = cls(config.hidden, config.layers), config.hidden
        while True:
            first, second = (count_parameters(cls(hidden, config.layers + i).shape(config)) for i in (0, 1))
            layers = config.layers + round((num_parameters - first) / (second - first))
            if layers < config.layers:
                return wider
            wider, hidden = cls(hidden, layers), hidden * 4

    def shape(self, config: ModelConfig) -> ModelConfig:
        """`config` with this shape. Raises InvalidRequest if a size would shrink or does not divide."""
        for name in ("hidden", "layers"):
            require_whole(name, getattr(self, name), getattr(config, name))
        ratio = self.hidden / config.hidden
        heads = self.default_heads(config) if self.heads is None else self.heads
        mlp = round(config.intermediate * ratio) if self.mlp is None else self.mlp
        require_whole("heads", heads, config.heads)
        require_whole("mlp", mlp, config.intermediate)
        if heads % config.group:
            raise InvalidRequest("heads", f"{heads} must be a multiple of {config.group}, the heads that share a key.")
        if self.hidden % heads and not config.hidden % config.heads:
            raise InvalidRequest("heads", f"{heads} must divide hidden, {self.hidden}, as other programs require.")
        origins = [origin.layer for origin in self.origins(config)]
        wide = replace(
            config,
            hidden=self.hidden,
            layers=self.layers,
            heads=heads,
            kv_heads=heads // config.group,
            intermediate=mlp,
            norm_eps=config.norm_eps / ratio,
            windows=tuple(config.windows[layer] for layer in origins),
            experts=grown_experts(config, mlp, origins),
        )
        return wide if self.experts is None else to_experts(config, wide, self.experts, self.active)

    def default_heads(self, config: ModelConfig) -> int:
        """The default number of heads: in proportion to `hidden`, or a little less, so that it divides `hidden`."""
        most = round(config.kv_heads * self.hidden / config.hidden) * config.group
        fitting = (heads for heads in range(most, config.heads, -config.group) if self.hidden % heads == 0)
        return next(fitting, config.heads)

    def origins(self, config: ModelConfig) -> list[LayerOrigin]:
        """The origin of each layer of the widened model."""
        count = config.layers
        places = [(i + 1) * self.layers // count - 1 for i in range(count)]
        nearest = [bisect_left(places, layer) for layer in range(self.layers)]
        return [LayerOrigin(source, places[source] == layer) for layer, source in enumerate(nearest)]


@dataclass(frozen=True, slots=True)
class LayerOrigin:
    """The source layer of a layer; if not `real`, the layer is an addition with random weights of similar size."""

    layer: int
    real: bool


def widen(
    source: str, destination: Path, wider: Wider, progress: ProgressCallback | None = None, seed: int = 0
) -> Path:
    """Write the widened `source`, in its dtype, to the folder `destination`; returns the folder.

    The folder is created only when it is complete and checked; one from an earlier call with the same arguments is
    reused. Raises InvalidRequest for any other existing folder or a shape that does not fit, UnsupportedModel for a
    source that is widened already, WidenedDiffers if the logits differ.
    """
    plan = Plan.of(source, wider, seed)
    destination = Path(destination)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        alone = FileLock(destination.with_name(f".{destination.name}.lock")).acquire()
    except OSError as error:
        raise InvalidRequest("out", f"{destination} cannot be written ({error}): choose another.") from error
    with alone:
        if not plan.is_at(destination):
            write_checked(plan, destination, progress)
    return destination


def cached_widened(source: str, wider: Wider, progress: ProgressCallback | None = None) -> Path:
    """Widen to a folder in the user's cache, which later calls with the same weights and shape reuse.

    Raises InvalidRequest for "cache" if the folder cannot be written.
    """
    try:
        folder = cache_folder("widened")
    except OSError as error:
        raise InvalidRequest("cache", str(error)) from error
    try:
        return widen(source, folder / Plan.of(source, wider, 0).recipe, wider, progress)
    except InvalidRequest as error:
        if error.field != "out":
            raise
        problem = str(error).removeprefix("out: ").rpartition(": ")[0]
        raise InvalidRequest("cache", f"{problem}: set XDG_CACHE_HOME to a folder of your own with space.") from error


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked widening: the source, the new shape, and a digest of all inputs (`recipe`)."""

    source: Blueprint
    wide: ModelConfig
    origins: list[LayerOrigin]
    seed: int
    recipe: str

    @classmethod
    def of(cls, source: str, wider: Wider, seed: int) -> Plan:
        """Check the source and the shape; nothing is written."""
        blueprint = Blueprint.of(source)
        if blueprint.config.widened is not None:
            raise UnsupportedModel(f"{source} is already widened, {blueprint.name}: widen its source instead")
        fields = read_fields(blueprint.folder / "config.json")
        if not blueprint.config.is_plain or text_part(fields) is not fields:
            kind = blueprint.config.family if text_part(fields) is fields else "a multimodal model"
            raise UnsupportedModel(f"{source} has layers of {kind}: only Llama's layers can be widened")
        wide = wider.shape(blueprint.config)
        digest = hashlib.sha256(f"{RECIPE} {source} {wide} {seed}".encode())
        for path in [*companions(blueprint.folder), *sorted(blueprint.folder.glob(WEIGHTS))]:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        plan = cls(blueprint, wide, wider.origins(blueprint.config), seed, digest.hexdigest()[:16])
        refuse_inexpressible(plan)
        return plan

    def is_at(self, folder: Path) -> bool:
        """Whether the folder holds this widening. Raises InvalidRequest if it holds anything else."""
        if not folder.exists():
            return False
        made = read_fields(folder / "config.json").values.get(WIDENED) if (folder / "config.json").is_file() else None
        if isinstance(made, dict) and made.get("recipe") == self.recipe:
            return True
        raise InvalidRequest("out", f"{folder} exists and is not this widening: choose another, or remove it.")


def refuse_inexpressible(plan: Plan) -> None:
    """Raise InvalidRequest if the family with experts has no keys for the dense source's biases or windows."""
    fields, wide = read_fields(plan.source.folder / "config.json"), plan.wide
    if plan.source.config.experts is not None or wide.experts is None:
        return
    with suppress(UnsupportedModel):
        written = config_of(replace(fields, values=config_values(plan, None)), wide.bos_id, wide.eos_ids)
        if replace(written, widened=None) == wide:
            return
    problem = f"{wide.family} has no biases or windows like those of {plan.source.name}: leave it out."
    raise InvalidRequest("experts", f"{wide.experts.count} are not possible: {problem}")


def write_checked(plan: Plan, destination: Path, progress: ProgressCallback | None) -> None:
    """Write the checkpoint under a temporary name, check it, and give it its final name."""
    with writable(destination), whole_folder(destination) as partial:
        size = count_parameters(plan.wide) * plan.wide.dtype.itemsize
        free = shutil.disk_usage(partial).free
        if size > free:
            problem = f"{size / 1e9:.1f} GB are needed there, {free / 1e9:.1f} GB are free: choose another disk"
            raise InvalidRequest("out", f"{destination}: {problem}")
        copy_files(companions(plan.source.folder), plan.source.folder, partial)
        write_weights(plan, partial, progress)
        save_json(config_values(plan, None), partial / "config.json")
        assert replace(read_config(partial), widened=None) == plan.wide, "config.json differs from the plan"
        gap = compare_logits(plan.source, partial, progress)
        if not gap.largest_difference <= gap.tolerance:
            raise WidenedDiffers(
                f"the widened {plan.source.name} has logits that differ by up to {gap.largest_difference:.3g}, where "
                f"{gap.tolerance:.3g} is allowed: the checkpoint was removed; please report this with its config.json"
            )
        save_json(config_values(plan, gap), partial / "config.json")


def companions(folder: Path) -> list[Path]:
    """config.json and all other files except weights, which are copied to a widened checkpoint."""
    files = {path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()}
    return sorted(path for path in files if not path.name.endswith((".safetensors.index.json", INDEX)))


def copy_files(paths: Iterable[Path], folder: Path, destination: Path) -> None:
    """Copy files from one folder to the same places in another."""
    for path in paths:
        copy = destination / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)


def config_values(plan: Plan, found: Agreement | None) -> dict[str, Any]:
    """The source's config.json with the new shape and the mark of a widened checkpoint."""
    config, fields = plan.wide, read_fields(plan.source.folder / "config.json")
    kept = {key: value for key, value in fields.values.items() if key not in KEYS}  # weights are written dequantized
    values = {**kept, **config.layer_fields()} | {
        "num_hidden_layers": config.layers,
        "tie_word_embeddings": config.tied,
        WIDENED: {
            "from": plan.source.name,
            "parameters_before": count_parameters(plan.source.config),
            "parameters": count_parameters(config),
            "recipe": plan.recipe,
            "seed": plan.seed,
            "real_layers": [layer for layer, origin in enumerate(plan.origins) if origin.real],
            "check": None if found is None else asdict(found),
        },
    }
    values |= expert_values(plan.source.config, config, fields.values)
    asked = fields.values.get("layer_types") or fields.values.get("use_sliding_window")
    if asked or len(set(config.windows)) > 1:
        values["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
    return values


def write_weights(plan: Plan, folder: Path, progress: ProgressCallback | None) -> None:
    """Write all tensors in shards, one of which is in memory at a time, and the index."""
    checkpoint = plan.source.checkpoint(plan.wide.dtype)
    generator = torch.Generator().manual_seed(plan.seed)
    shapes = tensor_shapes(plan.wide)
    groups = split_into_shards(shapes, plan.wide.dtype.itemsize)
    places: dict[str, str] = {}
    for i, names in enumerate(groups):
        file = f"model-{i + 1:05}-of-{len(groups):05}.safetensors"
        tensors = {}
        for name in names:
            tensors[name] = widened(plan, checkpoint, name, shapes[name], generator)
            places[name] = file
            if progress is not None:
                progress(f"widening {plan.source.name}", len(places) / len(shapes))
        save_tensors(tensors, folder / file)
    size = count_parameters(plan.wide) * plan.wide.dtype.itemsize
    save_json({"metadata": {"total_size": size}, "weight_map": places}, folder / "model.safetensors.index.json")


def split_into_shards(shapes: dict[str, tuple[int, ...]], itemsize: int) -> list[list[str]]:
    """The tensor names in order, in groups of at least SHARD_BYTES, except for the last."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        if size >= SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += math.prod(shape) * itemsize
    return groups


def widened(
    plan: Plan, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], generator: torch.Generator
) -> Tensor:
    """One tensor of the widened model: the source's values at the lowest indices, elsewhere zeros or unused weights."""
    config, layer = plan.source.config, LAYER.fullmatch(name)
    number = int(layer[1]) if layer else 0
    origin = plan.origins[number] if layer else LayerOrigin(0, True)
    part = parts_of(config, plan.wide).get(layer[2]) if layer else None
    source_name = f"model.layers.{origin.layer}.{part.name if part else layer[2]}" if layer else name
    source_shape = cached_shapes(config).get(source_name)
    if source_shape is None:  # a router, which a dense source lacks; its logits get a standard deviation of 1
        return torch.empty(shape).normal_(0, config.hidden**-0.5, generator=generator).to(plan.wide.dtype)
    source = checkpoint.take(source_name, source_shape)
    if name.endswith(STREAM_NORMS) or (config.qk_norm and name.endswith(HEAD_NORMED)):
        source = shrunk(source, plan)
    tensor = unused_weights(source, shape, name.endswith(WRITERS), generator)
    if name == EMBEDDING:
        tensor[:, config.hidden :] = 0
    if origin.real:
        corner: list[slice | Tensor] = [slice(size) for size in source.shape]
        if part is not None:
            corner[part.axis] = part.places(source.shape[part.axis], shape[part.axis], number, plan.seed)
        tensor[tuple(corner)] = source
    return tensor


def unused_weights(source: Tensor, shape: Sequence[int], writes: bool, generator: torch.Generator) -> Tensor:
    """A tensor of this shape whose weights have no effect: zeros if it `writes` to the residual stream, else random
    weights as large as the source's."""
    if writes:
        return source.new_zeros(shape)
    mean, std = source.float().mean().item(), source.float().std(correction=0).item()
    return source.new_empty(shape).normal_(mean, std, generator=generator)


def shrunk(source: Tensor, plan: Plan) -> Tensor:
    """A tensor times the factor by which the added zeros shrink the root mean square of the residual stream."""
    return (source.double() * math.sqrt(plan.source.config.hidden / plan.wide.hidden)).to(source.dtype)
