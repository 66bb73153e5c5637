"""Measures passes of fixed shape, with random weights of the shape of Llama 3 8B.

- Steps: passes over 1 to 144 tokens of one sequence after 512 tokens, v(k), and the time with the host's work.
- Texts: prompts that are read in one pass, and passes over 1 and 8 tokens after them.
- Gaps: an engine's plain rounds, and how long the device is idle between two of them.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.setting import Setting, WeightFormat
from torch import Tensor
from torch.profiler import ProfilerActivity

from forerun.accept.stop import StopChecker
from forerun.config import Speculation
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence
from forerun.machine import wait_for
from forerun.models.backends.gpu.backend import GpuBackend
from forerun.models.backends.gpu.capture import Graphs
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.backends.gpu.tiles import device_ms
from forerun.models.backends.gpu.verdicts import VerdictShape
from forerun.models.config import ModelConfig, read_config
from forerun.models.decoder import Decoder
from forerun.models.packing import WeightLoader
from forerun.models.runner import Read
from forerun.sampling.params import SamplingParams

COUNTS = (1, 8, 16, 32, 64, 128, 144)  # up to 16 share a graph
CONTEXT, TINY_CONTEXT = 512, 40
TEXTS, TINY_TEXTS = (512, 2048, 8192), (40,)  # tokens
RUNS, PROMPT_RUNS, WARM_UP = 30, 5, 6
PROFILED, MOST_KERNELS = 5, 12  # passes that are profiled, and kernels that are reported


def config_of(setting: Setting) -> ModelConfig:
    """The configuration of the measured model."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(setting.fields))
        return read_config(Path(folder))


def random_runner(setting: Setting, form: WeightFormat) -> GraphRunner:
    """A runner of the measured model with random weights, in this format."""
    config, placement = config_of(setting), setting.placement(form)
    dice = torch.Generator(placement.device).manual_seed(0)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16, device=placement.device)
        return torch.randn(shape, generator=dice, dtype=torch.bfloat16, device=placement.device) * 0.02

    decoder = Decoder(config, WeightLoader(take, torch.bfloat16, GpuBackend(placement), form.quantize))
    runner = GraphRunner.of(decoder, config.max_positions)
    assert isinstance(runner, GraphRunner)
    return runner


def weight_bytes(c: ModelConfig, bits: float) -> float:
    """The bytes of weights that a pass reads: those of all layers and the head, without the embedding."""
    attention = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    return bits / 8 * (c.layers * (attention + 3 * c.hidden * c.intermediate) + c.vocab_size * c.hidden)


def steps(setting: Setting, form: WeightFormat) -> None:
    """Measure v(k), and the time of passes with the host's work, in one format."""
    runner, device, runs = random_runner(setting, form), setting.device, 1 if setting.dry else RUNS
    num_bytes = weight_bytes(runner.decoder.config, form.bits)
    context = TINY_CONTEXT if setting.dry else CONTEXT
    runner.read([Read(0, [7] * context)])
    runner.keep([0], [range(context)])
    single = 0.0
    for count in COUNTS[:3] if setting.dry else COUNTS:
        read = Read(0, [5] * count, judged=range(count))

        def whole(read: Read = read) -> None:
            runner.read([read])
            runner.drop([0])

        whole()
        pass_ms = device_ms(replays(runner) or whole, device, runs)
        wait_for(device)
        started = time.perf_counter()
        for _ in range(runs):
            whole()
        wait_for(device)
        round_ms = (time.perf_counter() - started) / runs * 1e3
        single = single or pass_ms
        setting.add("steps", format=form.name, tokens=count, pass_ms=pass_ms, v=pass_ms / single,
                    weight_bytes=num_bytes, with_host_ms=round_ms)  # fmt: skip
    gaps(setting, form, runner, runs)


def texts(setting: Setting, form: WeightFormat) -> None:
    """Measure prompts that are read in one pass, and passes over one token and over eight after them."""
    runner, device = random_runner(setting, form), setting.device

    def whole(read: Read) -> None:
        runner.read([read])
        runner.drop([0])

    for length in TINY_TEXTS if setting.dry else TEXTS:
        prompt = [7 + i % 100 for i in range(length)]
        reading = partial(whole, Read(0, prompt, judged=[length - 1]))
        times = {"prompt_ms": device_ms(reading, device, PROMPT_RUNS)}
        runner.read([Read(0, prompt)])
        runner.keep([0], [range(length)])
        for count in (1, 8):
            read = Read(0, [5] * count, judged=range(count))
            whole(read)
            times[f"pass_of_{count}_ms"] = device_ms(replays(runner) or partial(whole, read), device, RUNS)
        runner.release([0])
        setting.add("texts", format=form.name, length=length, **times)


def replays(runner: GraphRunner) -> Callable[[], object] | None:
    """The function that replays the last captured graph; None if no graph is captured."""
    if not runner.graphs.captured:
        return None
    graph, _ = list(runner.graphs.captured.values())[-1]
    return graph.replay


def gaps(setting: Setting, form: WeightFormat, runner: GraphRunner, runs: int) -> None:
    """Measure one sequence's plain rounds, and how long the device is idle between a verdict and the next pass.

    Rounds with passes ahead, which start before the host has the verdict, alternate with rounds without them. Does
    nothing on a CPU.
    """
    if not runner.graphs.enabled:
        return
    runner.release([0])
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for ahead in (True, False, False, True):
        events, round_s = plain_rounds(runner, ahead, runs)
        idle = [before[1].elapsed_time(after[0]) * 1e3 for before, after in itertools.pairwise(events)]
        between = [us for (_, _, is_pass), us in zip(events[1:], idle, strict=True) if is_pass]
        found[ahead].append((statistics.median(between), statistics.median(round_s) * 1e3))
    for ahead, rows in found.items():
        idle_us, round_ms = (statistics.mean(column) for column in zip(*rows, strict=True))
        setting.add("gaps", format=form.name, ahead=ahead, idle_us=idle_us, round_ms=round_ms)


def plain_rounds(
    runner: GraphRunner, ahead: bool, runs: int
) -> tuple[list[tuple[torch.cuda.Event, torch.cuda.Event, bool]], list[float]]:
    """Events of the start and the end of each graph, with whether it is a pass; and the seconds of each round."""
    params = SamplingParams(temperature=1, max_tokens=runs + WARM_UP, ignore_eos=True)
    stop = StopChecker(params, (), None, runs + WARM_UP)
    engine, events = Engine(runner), list[tuple[torch.cuda.Event, torch.cuda.Event, bool]]()
    engine.submit(Sequence(0, 0, 0, [7] * TINY_CONTEXT, TINY_CONTEXT, params, 0, (), CONTEXT, Speculation(0), stop))
    replay, begin = Graphs.replay, runner.read_ahead

    def timed(self: Graphs, key: Any, body: Any) -> Any:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        result = replay(self, key, body)
        last.record()
        events.append((first, last, not isinstance(key[0], VerdictShape)))
        return result

    round_s = []
    setattr(Graphs, "replay", timed)  # noqa: B010 (mypy knows its type)
    setattr(runner, "read_ahead", begin if ahead else lambda *_: None)  # noqa: B010
    try:
        while engine.has_work:
            started_s = time.perf_counter()
            engine.step()
            round_s.append(time.perf_counter() - started_s)
    finally:
        setattr(Graphs, "replay", replay)  # noqa: B010
        del runner.read_ahead
    wait_for(runner.device)
    return events[2 * WARM_UP :], round_s[WARM_UP:]


def profile(setting: Setting, form: WeightFormat) -> None:
    """Measure the time of each kernel in a pass over one token after a short text."""
    runner = random_runner(setting, form)
    runner.read([Read(0, [7] * TINY_CONTEXT)])
    runner.keep([0], [range(TINY_CONTEXT)])

    def whole() -> None:
        runner.read([Read(0, [5], judged=[0])])
        runner.drop([0])

    whole()
    body, wanted = replays(runner) or whole, ProfilerActivity.CPU if setting.dry else ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[wanted]) as seen:
        for _ in range(PROFILED):
            body()
        wait_for(setting.device)
    found = [(e.self_cpu_time_total if setting.dry else e.self_device_time_total, e) for e in seen.key_averages()]
    for us, event in sorted(found, key=lambda each: -each[0])[:MOST_KERNELS]:
        setting.add("profile", format=form.name, kernel=event.key[:80], calls=event.count / PROFILED, us=us / PROFILED)
