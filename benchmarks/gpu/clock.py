"""Waiting for a device, and the bandwidth of its memory."""

from __future__ import annotations

import torch

from forerun.models.backends.gpu.tiles import device_ms


def wait(device: torch.device) -> None:
    """Until the device has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidth(device: torch.device, num_bytes: int) -> float:
    """GB/s of a copy, bytes read and written."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / device_ms(lambda: target.copy_(source), device, 20) / 1e6
