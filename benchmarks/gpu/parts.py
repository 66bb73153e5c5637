"""The parts of a run in one table, the most important first, each with its time limit in seconds."""

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
    """A part of the run, which is executed in its own process and stopped after `limit_s`."""

    name: str
    group: str
    limit_s: float
    body: Callable[[Setting], None]


def all_parts() -> list[MeasuredPart]:
    """Every part in the order of execution. The first one, which queries the card, belongs to every run."""
    forms = FORMATS.values()
    return [
        MeasuredPart(CARD, CARD, 60, card),
        *(MeasuredPart(f"tests/{path.stem}", "tests", 240, partial(suite.run_file, path=path))
          for path in suite.test_files()),
        *(MeasuredPart(f"experts/{form.name}", "kernels", 60, partial(kernels.experts, form=form)) for form in forms
          if not form.one_gemm),
        MeasuredPart("requests", "speed", 90, partial(family.requests, form=FORMATS["library"])),
        *(MeasuredPart(f"products/{form.name}", "kernels", 60, partial(kernels.products, form=form)) for form in forms),
        MeasuredPart("tiles", "kernels", 90, tiles.every_tile),
        MeasuredPart("attention", "kernels", 90, kernels.attention),
        *(MeasuredPart(f"steps/{form.name}", "speed", 90, partial(passes.steps, form=form)) for form in forms),
        *(MeasuredPart(f"texts/{form.name}", "speed", 60, partial(passes.texts, form=form)) for form in forms),
        *(MeasuredPart(f"family/{form.name}", "speed", 150, partial(family.widened, form=form)) for form in forms
          if form.widened),
        MeasuredPart("unseen", "speed", 60, partial(unseen.unseen_draft_tokens, form=FORMATS["library"])),
        *(MeasuredPart(f"heads/{form.name}", "speed", 120, partial(family.heads, form=form)) for form in forms
          if form.quantize is None),
        MeasuredPart("transformers", "speed", 90, family.by_transformers),
        MeasuredPart("row work", "kernels", 30, kernels.row_work),
        *(MeasuredPart(f"profile/{form.name}", "speed", 40, partial(passes.profile, form=form)) for form in forms),
    ]  # fmt: skip


def chosen(names: Sequence[str]) -> list[MeasuredPart]:
    """The parts with these names, or in groups with these names, in the order of `names`; without names, all parts.

    Raises ValueError for an unknown name.
    """
    parts = all_parts()
    selected = parts[:1]
    for name in names or ("all",):
        match = [p for p in parts if name in ("all", p.group, p.name, p.name.partition("/")[0])]
        if not match:
            known = ", ".join(["all", *GROUPS, *(part.name for part in parts)])
            raise ValueError(f"{name!r} is no part: use {known}")
        selected += [part for part in match if part not in selected]
    return selected


def card(setting: Setting) -> None:
    """Record the card, the driver, the versions and the bandwidth of a copy.

    Raises RuntimeError if torch sees no GPU.
    """
    if not (setting.dry or torch.cuda.is_available()):
        raise RuntimeError("torch sees no GPU here")
    answer = shell("nvidia-smi", "--query-gpu=driver_version,memory.total,clocks.max.sm", "--format=csv,noheader")
    driver, memory, clock = ([*answer.splitlines()[0].split(", ")] if answer else ["", "", ""])[:3]
    setting.add(
        "card",
        name="no GPU: a dry run" if setting.dry else torch.cuda.get_device_name(setting.device),
        driver=driver, memory=memory, clock=clock, torch=torch.__version__, cuda=torch.version.cuda,
        triton=installed("triton"), transformers=installed("transformers"), python=sys.version.split()[0],
        cores=os.cpu_count(), commit=shell("git", "rev-parse", "--short", "HEAD"), sources=sources_digest(),
        date=time.strftime("%Y-%m-%d"), bandwidth_gb_s=bandwidth(setting.device, 1 << 20 if setting.dry else 4 << 30),
    )  # fmt: skip


def bandwidth(device: torch.device, num_bytes: int) -> float:
    """The bandwidth of a copy in GB/s, counting bytes read and written."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / device_ms(lambda: target.copy_(source), device, 20) / 1e6


def shell(*command: str) -> str:
    """The output of a program; empty if the program is missing or takes more than 20 seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=suite.PROJECT, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def installed(package: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
