"""Widens trained heads together with their target, so that they draft the same tokens at the larger target's cost.

The heads' outputs to the residual stream are 0 in the new channels, weights that read these channels may have any
value, and norm gains are scaled down. A tensor that reads several concatenated streams is widened inside each of them.
This file computes the tensors and writes the folder; the blueprint of each kind lists the tensors and fields. Draft
models, which do not read the target's states, are widened like targets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from forerun.draft.auto import RECORD, DrafterRecord
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.errors import InvalidRequest
from forerun.fields import read_fields
from forerun.heads.blueprint import WideDrafter, checked_heads
from forerun.heads.folder import OWN_EMBEDDING
from forerun.heads.fresh import save_weights
from forerun.heads.kinds import HEADS
from forerun.heads.vocabulary import OFFSETS
from forerun.models.config import WIDENED
from forerun.models.loading import Blueprint
from forerun.models.projections import Shapes
from forerun.models.weights import Checkpoint
from forerun.models.widen import HEAD_NORMED, Plan, Wider, shrunk, unused_weights
from forerun.store import save_json, whole_folder, writable

HEAD_NORMS = ("q_norm.weight", "k_norm.weight")


def widen_drafter(draft: str, source: str, target: Path, wider: Wider, seed: int = 0) -> DraftSpec:
    """Widen the drafter `draft` of `source` for the widened checkpoint in `target`; returns its specification.

    It is written to a folder in `target`; a folder from an earlier call with the same arguments is reused. Raises
    InvalidRequest for a drafter that is not in HEADS, and if the folder contains something else; ModelError for an
    unusable drafter.
    """
    plan, wide_drafter = planned(draft, source, wider, seed)
    return write_once(wide_drafter, plan, target / parse_spec(draft).name, draft)


def cached_widened_drafter(draft: str, source: str, target: Path, wider: Wider) -> DraftSpec:
    """Widen a drafter as `widen_drafter` does, for a checkpoint in the user's cache folder.

    The folder's name contains a digest of the drafter's weights, so later calls with the same weights reuse it.
    """
    plan, wide_drafter = planned(draft, source, wider, 0)
    digest = hashlib.sha256(plan.recipe.encode())
    for path in (wide_drafter.folder.path / "config.json", *sorted(wide_drafter.folder.path.glob("*.safetensors"))):
        digest.update(path.read_bytes())
    name = f"{parse_spec(draft).name}-{digest.hexdigest()[:16]}"
    with FileLock(target / f".{name}.lock"):
        return write_once(wide_drafter, plan, target / name, draft, keys=("recipe", "seed"))


def planned(draft: str, source: str, wider: Wider, seed: int) -> tuple[Plan, WideDrafter]:
    """The plan of the target's widening, and the widened drafter; nothing is written."""
    spec, plan = parse_spec(draft), Plan.of(source, wider, seed)
    if spec.name not in HEADS or spec.argument is None:
        fix = f"widen one of {', '.join(HEADS)} with its folder; a model is widened by itself, with --model"
        raise InvalidRequest("draft", f"{draft} reads no states of the target: {fix}.")
    return plan, checked_heads(spec, plan.source).widened(plan)


def write_once(
    drafter: WideDrafter, plan: Plan, folder: Path, draft: str, keys: Sequence[str] = ("from", "recipe", "seed")
) -> DraftSpec:
    """Write the drafter to the folder, unless it is already there with equal values of `keys`; returns its spec."""
    spec = parse_spec(draft)
    origin = {"from": spec.argument, "recipe": plan.recipe, "seed": plan.seed}
    if folder.exists():
        here = read_fields(folder / "config.json").values.get(WIDENED) if (folder / "config.json").is_file() else None
        if not isinstance(here, dict) or any(here.get(key) != origin[key] for key in keys):
            raise InvalidRequest("folder", f"{folder} exists and is not this drafter: remove it, or choose another.")
    else:
        write(drafter, plan, folder, origin)
    return DraftSpec(spec.name, argument=f"{drafter.argument}{folder}")


def write(drafter: WideDrafter, plan: Plan, folder: Path, origin: Mapping[str, Any]) -> None:
    """Write weights, config.json with `origin`, and the record without a speed-up, to a new folder."""
    with writable(folder), whole_folder(folder) as part:
        source = drafter.folder.path
        checkpoint = Checkpoint(source, plan.wide.dtype)
        generator = torch.Generator().manual_seed(plan.seed)
        tensors = {
            name: widened(drafter, plan, name, checkpoint.take(name, shape), generator)
            for name, shape in drafter.narrow.items()
        }
        if OFFSETS in checkpoint.stored:  # ids do not change
            tensors[OFFSETS] = checkpoint.take_ids(OFFSETS, checkpoint.stored[OFFSETS].shape)
        save_weights(tensors, plan.wide.dtype, part)
        counts = {"parameters_before": count(drafter.narrow), "parameters": count(drafter.wide)}
        values = {**drafter.folder.fields.values, **drafter.fields, WIDENED: {**origin, **counts}}
        save_json(values, part / "config.json")
        record = DrafterRecord.read(source)
        if record is not None:
            digest = Blueprint.of(str(folder.parent)).weights_digest()
            wide = replace(record.untimed(digest), argument=drafter.argument)
            (part / RECORD).write_text(wide.text(), "utf-8")


def count(shapes: Shapes) -> int:
    """The number of parameters of tensors with these shapes."""
    return sum(map(math.prod, shapes.values()))


def widened(drafter: WideDrafter, plan: Plan, name: str, source: Tensor, generator: torch.Generator) -> Tensor:
    """A widened tensor: the source's values in the old channels, and zeros or random weights in the new ones.

    Only weights that read channels which are always 0 are random.
    """
    shape, hidden, wide = drafter.wide[name], plan.source.config.hidden, plan.wide.hidden
    is_norm = source.dim() == 1 and "norm" in name and not name.endswith(HEAD_NORMS)
    if is_norm or (drafter.qk_norm and name.endswith(HEAD_NORMED)):
        source = shrunk(source, plan)
    tensor = unused_weights(source, shape, name.endswith((*drafter.writers, OWN_EMBEDDING)), generator)
    reads = is_norm or name.endswith(drafter.readers) or (source.dim() == 2 and not name.endswith(drafter.inner))
    size = hidden if reads else source.shape[-1]
    for i, part in enumerate(source.split(size, dim=-1)):
        corner = [slice(each) for each in source.shape[:-1]]
        tensor[(*corner, slice(i * wide, i * wide + size))] = part
    return tensor
