"""What might make passes faster, as prototypes: weights that are prefetched, and activations rounded to 8 bits.

Prefetch: while the small kernels between two products run, memory is idle; a kernel on a second stream asks for the
beginning of the next weights, which then lie in the L2 cache. It needs a card of compute capability 9.0. Rounded
activations: 8-bit weights times activations of 8 bits on tensor cores, beside the kernel that widens the weights. Their
rows are rounded alone, so bits would not depend on other rows; but answers would not be those of wide activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from benchmarks.gpu.kernels import RUNS, copies_of, matrices
from benchmarks.gpu.passes import CONTEXT, TINY_CONTEXT, config_of, random_runner, replays, weight_bytes
from benchmarks.gpu.setting import FORMATS, Setting, WeightFormat
from torch import Tensor
from torch.nn import functional

from forerun.models.backends.gpu.backend import GpuBackend
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.backends.gpu.tiles import choose_tiles, device_ms, kernel_us
from forerun.models.layer import Layer, Linear
from forerun.models.runner import Read

MEGABYTES = {"out": 48, "gate_up": 16, "down": 16, "qkv": 16}  # of each product's weights: what its pause has time for
LARGEST_EIGHT, FEWEST_ROWS = 127, 32  # of a number of 8 bits; of the library's product of such numbers
ROUNDED_ROWS = (1, 32, 64, 128, 512)
LANES = 128


@dataclass
class Prefetch:
    """Asks for weights; `share` of MEGABYTES, of every row its beginning or the first rows whole.

    `under_way`: whether the stream has work that the other one does not wait for yet.
    """

    share: float
    of_every_row: bool
    stream: Any
    under_way: bool = False

    def begin(self, weight: Tensor, megabytes: int) -> None:
        """Launch the kernel that asks for the beginning of this matrix; without a stream nothing is launched."""
        wanted = min(weight.nbytes, int(self.share * (megabytes << 20)))
        size = stride = 8192
        count = wanted // size
        if self.of_every_row and weight.ndim == 2:
            count, stride = len(weight), weight.stride(0) * weight.element_size()
            size = max(16, stride * wanted // weight.nbytes // 128 * 128)
        if self.stream is None:
            return
        from benchmarks.gpu.prefetch_kernel import prefetch

        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            prefetch[(-(-count // LANES),)](weight.data_ptr(), count, stride, size, LANES=LANES, num_warps=4)
        self.under_way = True

    def join(self) -> None:
        """Let the current stream wait for what was asked for; a capture has to end with one stream."""
        if self.under_way:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.under_way = False


@dataclass(frozen=True)
class Ahead:
    """A linear layer behind whose product the next one's weights are asked for."""

    linear: Linear
    prefetch: Prefetch
    following: Tensor | None = None
    megabytes: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.prefetch.join()
        result = self.linear(x)
        if self.following is not None:
            self.prefetch.begin(self.following, self.megabytes)
        return result


def numbers_of(linear: Any) -> Tensor:
    """The matrix that a product reads from memory."""
    weight = linear.weight
    return weight if isinstance(weight, Tensor) else weight.numbers


def with_prefetch(layers: list[Layer], prefetch: Prefetch) -> list[Layer]:
    """These layers, whose mixers are dense, each product followed by the request for the next one's weights."""
    found = []
    for layer, behind in zip(layers, [*layers[1:], None], strict=True):
        every, attention = layer.mlp.every, layer.attention
        assert every is not None, "layers of a dense model"
        ahead: Callable[..., Ahead] = partial(Ahead, prefetch=prefetch)
        following = None if behind is None else numbers_of(behind.attention.qkv)
        qkv = ahead(attention.qkv, following=numbers_of(attention.out), megabytes=MEGABYTES["out"])
        out = ahead(attention.out, following=numbers_of(every.gate_up), megabytes=MEGABYTES["gate_up"])
        gate_up = ahead(every.gate_up, following=numbers_of(every.down), megabytes=MEGABYTES["down"])
        down = ahead(every.down, following=following, megabytes=MEGABYTES["qkv"])
        mlp = replace(layer.mlp, every=replace(every, gate_up=gate_up, down=down))
        found.append(replace(layer, attention=replace(attention, qkv=qkv, out=out), mlp=mlp))
    return found


def prefetched(setting: Setting, form: WeightFormat) -> None:
    """A pass of one token with weights that are asked for ahead, in several amounts, and without, by turns."""
    runner, context = random_runner(setting, form), TINY_CONTEXT if setting.dry else CONTEXT
    runner.read([Read(0, [7] * context)])
    runner.keep([0], [range(context)])
    plain, num_bytes = [*runner.decoder.layers], weight_bytes(runner.decoder.config, form.bits)
    graphs, first = dict[str, Callable[[], object]](), Tensor()
    for share, of_every_row in ((0, False), (0.5, True), (1, True), (2, True), (0.5, False), (1, False), (2, False)):
        if share:
            stream = None if setting.dry else torch.cuda.Stream(setting.device)
            runner.decoder.layers = with_prefetch(plain, Prefetch(share, of_every_row, stream))
        name = f"{share:g} × {'of every row' if of_every_row else 'first rows'}" if share else "none"
        graphs[name], logits = fresh(runner)
        first = first if share else logits
        assert torch.equal(logits, first), f"{name}: other bits"
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for name in 3 * [*graphs]:
        times[name].append(device_ms(graphs[name], setting.device, 1 if setting.dry else RUNS))
    for name, ms in times.items():
        setting.add("prefetch", format=form.name, ahead=name, pass_ms=sorted(ms)[1], weight_bytes=num_bytes)


def fresh(runner: GraphRunner) -> tuple[Callable[[], object], Tensor]:
    """A pass of one token captured anew: what replays it, and its logits."""
    kept = runner.graphs.captured
    runner.graphs.captured = {}
    logits = runner.read([Read(0, [5], judged=[0])]).logits.clone()
    runner.drop([0])
    again = replays(runner)
    if again is None:
        assert not runner.graphs.enabled, "the pass could not be captured"
        return (lambda: None), logits
    runner.graphs.captured |= {(*key, len(kept)): graph for key, graph in kept.items()}  # whose tensors stay
    return again, logits


def rounded(setting: Setting) -> None:
    """Products of 8-bit weights: widened to 16 bits, and with activations rounded to 8 bits."""
    device, form = setting.device, FORMATS["int8"]
    noise, backend = torch.Generator(device).manual_seed(0), GpuBackend(setting.placement(form, products=True))
    for name, (outputs, inputs) in [*matrices(config_of(setting)).items()][: 1 if setting.dry else 4]:
        copies = 1 if setting.dry else copies_of(outputs * inputs)
        wide = [torch.randn(outputs, inputs, generator=noise, device=device) * 0.02 for _ in range(copies)]
        layers = [backend.linear(each.bfloat16(), None, form.quantize) for each in wide]
        if not setting.dry:
            choose_tiles(layers, device, torch.bfloat16)
        largest = [each.abs().amax(1) / LARGEST_EIGHT for each in wide]
        numbers = [(each / scale[:, None]).round().to(torch.int8) for each, scale in zip(wide, largest, strict=True)]
        for rows in ROUNDED_ROWS[1:2] if setting.dry else ROUNDED_ROWS:
            x = torch.randn(rows, inputs, generator=noise, device=device).bfloat16()
            by_eight = [partial(times_rounded, x, *each) for each in zip(numbers, largest, strict=True)]
            setting.add("rounded", matrix=name, rows=rows,
                        widened_us=kernel_us([partial(layer, x) for layer in layers], device, RUNS),
                        rounded_us=kernel_us(by_eight, device, RUNS))  # fmt: skip


def times_rounded(x: Tensor, numbers: Tensor, scales: Tensor) -> Tensor:
    """The product of rows, each rounded to 8 bits, and a weight with a scale for each output."""
    wide = functional.pad(x, (0, 0, 0, max(0, FEWEST_ROWS - len(x)))).float()
    size = wide.abs().amax(1, keepdim=True).clamp_min(1e-9) / LARGEST_EIGHT
    sums = torch._int_mm((wide / size).round().to(torch.int8), numbers.t())
    return (sums * size * scales).to(x.dtype)[: len(x)]
