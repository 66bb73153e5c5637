"""The folder of a target that was tuned together with its heads: when one may be written, and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import FolderTaken, InvalidRequest
from forerun.fields import read_fields
from forerun.heads.fresh import save_config, save_weights
from forerun.heads.medusa.joint import merged
from forerun.models.loading import Blueprint
from forerun.models.projections import promised_tensors
from forerun.models.widen import companions, copy_files
from forerun.store import whole_folder, writable

TUNED = "forerun_tuned"  # what config.json of a tuned target says of its training


def check_free(folder: Path, heads: Path) -> None:
    """Raise where a folder for a tuned target is the heads' own, or holds anything but the target of these heads."""
    if folder.resolve() == heads.resolve():
        raise InvalidRequest("tune_target", f"{folder} is where the heads go: name another folder.")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    config = folder / "config.json"
    made = read_fields(config).values.get(TUNED) if config.is_file() else None
    if made != str(heads.resolve()):
        raise FolderTaken(f"{folder} is not the tuned target of {heads}: name another folder with --tune-target")


def write_target(target: Blueprint, adapters: Mapping[str, Tensor], folder: Path, heads: Path) -> None:
    """Write a tuned target, whole; what lies beside its weights is as it was, but what config.json says of `heads`."""
    config, checkpoint = target.config, target.checkpoint(torch.float32)
    fixed = {name: checkpoint.take(name, shape) for name, shape in promised_tensors(config)}
    values = {**read_fields(target.folder / "config.json").values, TUNED: str(heads.resolve())}
    with writable(folder, "tune_target"), whole_folder(folder) as part:
        copy_files(companions(target.folder), target.folder, part)
        save_config(values, part)
        save_weights(merged(fixed, {name: t.cpu() for name, t in adapters.items()}), config.dtype, part)
