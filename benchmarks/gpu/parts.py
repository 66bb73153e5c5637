"""The parts of a run in one table: the dearest questions first, each with the seconds that it may take."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from benchmarks.gpu import family, kernels, passes, suite, tiles, unseen
from benchmarks.gpu.setting import FORMATS, Setting

from forerun.machine import sources_digest
from forerun.models.backends.gpu.tiles import device_ms

CARD = "card"
GROUPS = ("tests", "kernels", "speed")


@dataclass(frozen=True, slots=True)
class MeasuredPart:
    """One part: it runs in a process of its own and is stopped after `limit_s`."""

    name: str
    group: str
    limit_s: float
    body: Callable[[Setting], None]


def all_parts() -> list[MeasuredPart]:
    """Every part, in the order in which they are run; the card's own facts come first, whatever is asked for."""
    forms = FORMATS.values()
    return [
        MeasuredPart(CARD, CARD, 60, card),
        *(MeasuredPart(f"tests/{path.stem}", "tests", 240, partial(suite.run_file, path=path))
          for path in suite.test_files()),
        *(MeasuredPart(f"products/{form.name}", "kernels", 60, partial(kernels.products, form=form)) for form in forms),
        MeasuredPart("tiles", "kernels", 90, tiles.every_tile),
        MeasuredPart("attention", "kernels", 90, kernels.attention),
        *(MeasuredPart(f"steps/{form.name}", "speed", 90, partial(passes.steps, form=form)) for form in forms),
        *(MeasuredPart(f"texts/{form.name}", "speed", 60, partial(passes.texts, form=form)) for form in forms),
        *(MeasuredPart(f"family/{form.name}", "speed", 150, partial(family.widened, form=form)) for form in forms
          if form.widened),
        MeasuredPart("unseen", "speed", 60, partial(unseen.unseen_guesses, form=FORMATS["library"])),
        *(MeasuredPart(f"heads/{form.name}", "speed", 120, partial(family.heads, form=form)) for form in forms
          if form.quantize is None),
        MeasuredPart("transformers", "speed", 90, family.by_transformers),
        MeasuredPart("row work", "kernels", 30, kernels.row_work),
        *(MeasuredPart(f"profile/{form.name}", "speed", 40, partial(passes.profile, form=form)) for form in forms),
    ]  # fmt: skip


def chosen(names: Sequence[str]) -> list[MeasuredPart]:
    """The parts of these groups, or with these names, in the order of the names; all of them where there is none.

    Raises ValueError for a name that there is not.
    """
    there = all_parts()
    found = there[:1]
    for name in names or ("all",):
        match = [p for p in there if name in ("all", p.group, p.name, p.name.partition("/")[0])]
        if not match:
            known = ", ".join(["all", *GROUPS, *(part.name for part in there)])
            raise ValueError(f"{name!r} is no part: use {known}")
        found += [part for part in match if part not in found]
    return found


def card(setting: Setting) -> None:
    """What computes here, and what a copy moves."""
    if not (setting.dry or torch.cuda.is_available()):
        raise RuntimeError("torch sees no GPU here")
    said = shell("nvidia-smi", "--query-gpu=driver_version,memory.total,clocks.max.sm", "--format=csv,noheader")
    driver, memory, clock = ([*said.splitlines()[0].split(", ")] if said else ["", "", ""])[:3]
    setting.add(
        "card",
        name="no GPU: a dry run" if setting.dry else torch.cuda.get_device_name(setting.device),
        driver=driver, memory=memory, clock=clock, torch=torch.__version__, cuda=torch.version.cuda,
        triton=installed("triton"), transformers=installed("transformers"), python=sys.version.split()[0],
        cores=os.cpu_count(), commit=shell("git", "rev-parse", "--short", "HEAD"), sources=sources_digest(),
        date=time.strftime("%Y-%m-%d"), bandwidth_gb_s=bandwidth(setting.device, 1 << 20 if setting.dry else 4 << 30),
    )  # fmt: skip


def bandwidth(device: torch.device, num_bytes: int) -> float:
    """GB/s of a copy, bytes read and written."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / device_ms(lambda: target.copy_(source), device, 20) / 1e6


def shell(*command: str) -> str:
    """What a program prints; empty where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=suite.PROJECT, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def installed(package: str) -> str:
    """Its version, or nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
