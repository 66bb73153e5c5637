"""Times on a device: of one call, and of kernels in turn without the host's launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from forerun.models.backends.gpu.capture import CAPTURES

WARM_UPS = 3


def device_ms(body: Callable[[], object], device: torch.device, runs: int) -> float:
    """Median time of `body` between two events on the device; on a CPU, which is not measured, one call's."""
    if device.type == "cpu":
        started = time.perf_counter()
        body()
        return (time.perf_counter() - started) * 1e3
    times: list[float] = []
    for _ in range(runs + WARM_UPS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        body()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times[WARM_UPS:])


def kernel_us(bodies: Sequence[Callable[[], object]], device: torch.device, runs: int) -> float:
    """Median microseconds of one of these bodies, all in turn, from one captured graph: no launch is waited for.

    Bodies that read other memory keep it out of the device's cache for each other.
    """

    def all_in_turn() -> None:
        for body in bodies:
            body()

    if device.type == "cpu":
        return device_ms(all_in_turn, device, runs) / len(bodies) * 1e3
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        all_in_turn()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    with CAPTURES, torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another engine may be at work
        all_in_turn()
    return device_ms(graph.replay, device, runs) / len(bodies) * 1e3
