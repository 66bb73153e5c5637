"""Widening the drafters of a target together with it, so that they guess the same at the larger target's cost.

A drafter that reads a target's states reads, of the widened one, the same states with zeros behind them. So its own
tensors grow as the target's do (`models/widen.py`): what it writes to a residual stream stays 0 in the new channels,
what reads them may hold any value, and norms shrink. A tensor that reads several streams side by side grows inside each
of them. Layers that it names, as taps or as its exit, become those where the same states are in the widened target.
This file decides, kind by kind, which tensors and fields these are. Models, which read no states, are widened alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors.torch import save_file
from torch import Tensor

from forerun.draft.record import RECORD, DrafterRecord
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.errors import InvalidRequest
from forerun.fields import read_fields
from forerun.heads.adapter.format import HOSTS, plan_adapter
from forerun.heads.block.format import INSIDE as DFLASH
from forerun.heads.block.format import MASK_EMBEDDING, layer_ids
from forerun.heads.block.network import plan_block_drafter
from forerun.heads.eagle.blueprint import plan_layer
from forerun.heads.eagle.fields import SPECULATORS, TAP_IDS
from forerun.heads.eagle.format import EMBEDDING, MASK_STATE, OFFSETS
from forerun.heads.medusa.network import plan_heads
from forerun.heads.mtp.network import plan_modules
from forerun.models.config import WIDENED, ModelConfig
from forerun.models.loading import Blueprint
from forerun.models.projections import Shapes, promised_tensors
from forerun.models.weights import Checkpoint
from forerun.models.widen import HEAD_NORMED, WRITERS, Plan, Wider, shrinkage

WEIGHTS = "model.safetensors"
HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
INSIDE = ("o_proj.weight", "down_proj.weight", "markov_w1.weight", "markov_w2.weight", "_codebook")  # read no stream


@dataclass(frozen=True, slots=True)
class WideDrafter:
    """What becomes of a drafter: its folder, the shapes before and after, and the fields that change.

    `writers` are the ends of the names of tensors that add to a residual stream. `qk_norm` says that its layers norm
    queries and keys, and `argument` what its argument says before the folder.
    """

    source: Path
    narrow: Shapes
    wide: Shapes
    fields: Mapping[str, Any]
    writers: tuple[str, ...]
    qk_norm: bool = False
    argument: str = ""


def medusa(folder: str, plan: Plan) -> WideDrafter:
    """Heads: what their blocks add stays 0 in the new channels."""
    heads = plan_heads(folder, plan.source)
    wide = replace(heads.config, hidden=plan.wide.hidden)
    fields = {"hidden_size": wide.hidden, "vocab_size": wide.vocab_size}
    writers = ("linear.weight", "linear.bias", "in.weight")
    return WideDrafter(heads.folder, heads.config.shapes(), wide.shapes(), fields, writers)


def eagle(folder: str, plan: Plan) -> WideDrafter:
    """A layer, and the map of the states that it reads."""
    found = plan_layer(folder, plan.source)
    tensors = found.tensors
    if SPECULATORS in read_fields(found.layer.folder / "config.json").values:
        wanted = f"write one in its authors' with `forerun convert {folder} --to eagle --out NEW`, and widen that"
        raise InvalidRequest("draft", f"{folder} is in the layout of speculators: {wanted}.")
    if tensors.config.hidden != plan.source.config.hidden:
        raise InvalidRequest("draft", f"{folder} has a width of its own, and cannot be widened with the target.")
    config = replace(widened_layers(tensors.config, plan), vocab_size=tensors.config.vocab_size)
    wide = replace(tensors, config=config, target_hidden=plan.wide.hidden)
    fields = layer_fields(config) | {"vocab_size": config.vocab_size}
    if not tensors.form.joined:
        fields[TAP_IDS] = [widened_tap(plan, tap) for tap in found.taps]
    writers = (*WRITERS, "fc.weight", "fc.bias", MASK_STATE)
    return WideDrafter(found.layer.folder, tensors.shapes(), wide.shapes(), fields, writers, tensors.config.qk_norm)


def mtp(folder: str, plan: Plan) -> WideDrafter:
    """Modules in a folder of their own: what they map into their residual stream stays 0 in the new channels."""
    found = plan_modules(folder, plan.source)
    tensors = found.tensors
    if tensors.naming.behind_layers:
        raise InvalidRequest("draft", f"{folder} numbers its modules behind the target's layers, which become more.")
    config = replace(widened_layers(tensors.config, plan), vocab_size=tensors.config.vocab_size)
    fields = layer_fields(config) | {"vocab_size": config.vocab_size}
    writers = (*WRITERS, tensors.naming.projection.rpartition("}.")[2])
    wide = replace(tensors, config=config).shapes()
    return WideDrafter(found.layers.folder, tensors.shapes(), wide, fields, writers, tensors.config.qk_norm)


def early_exit(argument: str, plan: Plan) -> WideDrafter:
    """The layers of an adapter, for the same exit."""
    exit_layer, _, folder = argument.partition(":")
    if not exit_layer.isdecimal() or not folder:
        raise InvalidRequest("draft", f"early-exit:{argument} has no weights of its own: name an adapter's folder.")
    adapter = plan_adapter(folder, plan.source, int(exit_layer))
    config, exit_wide = widened_layers(adapter.config, plan), widened_tap(plan, int(exit_layer))
    stored = Checkpoint(adapter.folder, adapter.config.dtype)
    names = [n for n, _ in promised_tensors(adapter.config) if n in stored and n not in HOSTS]
    narrow, wide = (dict(promised_tensors(each)) for each in (adapter.config, config))
    fields = layer_fields(config) | {"exit_layer": exit_wide}
    return WideDrafter(
        adapter.folder,
        {name: narrow[name] for name in names},
        {name: wide[name] for name in names},
        fields,
        WRITERS,
        adapter.config.qk_norm,
        f"{exit_wide}:",
    )


def block(folder: str, plan: Plan) -> WideDrafter:
    """The layers of a block drafter, the map of the states that they read, and what stands on their own."""
    found = plan_block_drafter(folder, plan.source)
    tensors, layers = found.tensors, found.tensors.config.layers
    if layers.hidden != plan.source.config.hidden:
        raise InvalidRequest("draft", f"{folder} has a width of its own, and cannot be widened with the target.")
    wide_layers = replace(widened_layers(layers, plan), vocab_size=layers.vocab_size)
    taps = tuple(widened_tap(plan, tap) for tap in tensors.config.taps)
    config = replace(tensors.config, layers=wide_layers, taps=taps)
    before = read_fields(found.own.folder / "config.json").inside(DFLASH).values
    ids = {"target_layer_ids": layer_ids(taps, plan.wide.layers)}
    fields = layer_fields(wide_layers) | {"vocab_size": layers.vocab_size, DFLASH: {**before, **ids}}
    wide = replace(tensors, config=config, target_hidden=plan.wide.hidden)
    writers = (*WRITERS, "fc.weight", MASK_EMBEDDING)
    return WideDrafter(found.own.folder, tensors.shapes(), wide.shapes(), fields, writers, layers.qk_norm)


KINDS: Mapping[str, Callable[[str, Plan], WideDrafter]] = {
    "block": block,
    "eagle": eagle,
    "early-exit": early_exit,
    "medusa": medusa,
    "mtp": mtp,
}


def widened_layers(config: ModelConfig, plan: Plan) -> ModelConfig:
    """The layers' shape, grown as far as the target's."""
    return Wider(plan.wide.hidden, config.layers).shape(config)


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


def widen_drafter(draft: str, source: str, target: Path, wider: Wider, seed: int = 0) -> DraftSpec:
    """Write the drafter of `source` that the specification finds, grown to fit the widened checkpoint in `target`, into
    a folder inside that one; returns its specification.

    A folder that the same call made before is taken as it is. Raises InvalidRequest for a drafter that is none of
    KINDS, for a padded vocabulary, and where the folder holds something else; ModelError for an unusable drafter.
    """
    plan, found = planned(draft, source, wider, seed)
    return put(found, plan, target / parse_spec(draft).name, draft)


def cached_widened_drafter(draft: str, source: str, target: Path, wider: Wider) -> DraftSpec:
    """The same for a checkpoint in the user's cache folder, where the drafter gets a folder of its own weights: a later
    call with equal weights finds it, and one with others does not meet it."""
    plan, found = planned(draft, source, wider, 0)
    digest = hashlib.sha256(plan.recipe.encode())
    for path in (found.source / "config.json", *sorted(found.source.glob("*.safetensors"))):
        digest.update(path.read_bytes())
    name = f"{parse_spec(draft).name}-{digest.hexdigest()[:16]}"
    with FileLock(target / f".{name}.lock"):
        return put(found, plan, target / name, draft, told=("recipe", "seed"))  # the name stands for the weights


def planned(draft: str, source: str, wider: Wider, seed: int) -> tuple[Plan, WideDrafter]:
    """The target's widening and what becomes of its drafter; nothing is written."""
    spec, plan = parse_spec(draft), Plan.of(source, wider, seed)
    make = KINDS.get(spec.name)
    if make is None or spec.argument is None:
        wanted = f"widen one of {', '.join(KINDS)} with its folder; a model is widened by itself, with --model"
        raise InvalidRequest("draft", f"{draft} reads no states of the target: {wanted}.")
    if plan.wide.vocab_size != plan.source.config.vocab_size:
        raise InvalidRequest("vocab_size", "drafters have the source's vocabulary: leave it as it is.")
    return plan, make(spec.argument, plan)


def put(
    found: WideDrafter, plan: Plan, folder: Path, draft: str, told: Sequence[str] = ("from", "recipe", "seed")
) -> DraftSpec:
    """Write the drafter into the folder, unless the same one is there, by what of it is `told`; its specification."""
    spec = parse_spec(draft)
    made = {"from": spec.argument, "recipe": plan.recipe, "seed": plan.seed}
    if folder.exists():
        here = read_fields(folder / "config.json").values.get(WIDENED) if (folder / "config.json").is_file() else None
        if not isinstance(here, dict) or any(here.get(key) != made[key] for key in told):
            raise InvalidRequest("folder", f"{folder} exists and is not this drafter: remove it, or choose another.")
    else:
        write(found, plan, folder, made)
    return DraftSpec(spec.name, argument=f"{found.argument}{folder}")


def write(found: WideDrafter, plan: Plan, folder: Path, made: Mapping[str, Any]) -> None:
    """Write the drafter beside its place, and rename it."""
    part = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        checkpoint = Checkpoint(found.source, plan.wide.dtype)
        dice = torch.Generator().manual_seed(plan.seed)
        tensors = {
            name: grown(found, plan, name, checkpoint.take(name, shape), dice) for name, shape in found.narrow.items()
        }
        if OFFSETS in checkpoint.stored:  # tokens have the ids that they had
            tensors[OFFSETS] = checkpoint.take_ids(OFFSETS, checkpoint.stored[OFFSETS].shape)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part / WEIGHTS, {"format": "pt"})
        (part / WEIGHTS).chmod(0o644)  # safetensors leaves it to its owner alone
        counts = {"parameters_before": count(found.narrow), "parameters": count(found.wide)}
        before = read_fields(found.source / "config.json").values
        fields = {**before, **found.fields, WIDENED: {**made, **counts}}
        (part / "config.json").write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
        record = DrafterRecord.read(found.source)
        if record is not None:
            digest = Blueprint.of(str(folder.parent)).weights_digest()
            wide = replace(record.untimed(digest), argument=found.argument)
            (part / RECORD).write_text(wide.text(), "utf-8")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def count(shapes: Shapes) -> int:
    """The numbers in all tensors."""
    return sum(map(math.prod, shapes.values()))


def grown(found: WideDrafter, plan: Plan, name: str, source: Tensor, dice: torch.Generator) -> Tensor:
    """One tensor, grown: the source's values where the source's channels are, dead weights or zeros around them."""
    shape, hidden, wide = found.wide[name], plan.source.config.hidden, plan.wide.hidden
    is_norm = source.dim() == 1 and "norm" in name and not name.endswith(HEAD_NORMS)
    if is_norm or (found.qk_norm and name.endswith(HEAD_NORMED)):
        source = (source.double() * shrinkage(plan.source.config, plan.wide)).to(source.dtype)
    if name.endswith((*found.writers, EMBEDDING)):
        tensor = source.new_zeros(shape)
    else:
        mean, std = source.float().mean().item(), source.float().std(correction=0).item()
        tensor = source.new_empty(shape).normal_(mean, std, generator=dice)
    reads = is_norm or name == MASK_STATE or (source.dim() == 2 and not name.endswith(INSIDE))
    size = hidden if reads else source.shape[-1]
    for i, part in enumerate(source.split(size, dim=-1)):
        corner = [slice(each) for each in source.shape[:-1]]
        tensor[(*corner, slice(i * wide, i * wide + size))] = part
    return tensor
