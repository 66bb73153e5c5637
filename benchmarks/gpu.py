"""What a GPU does with passes of fixed shape: step time against bandwidth, v(k), gaps between launches, one_gemm.

    python benchmarks/gpu.py               # all of it, on the first GPU; Markdown, then one line of JSON
    python benchmarks/gpu.py steps texts   # some parts of it
    python benchmarks/gpu.py --dry-run     # tiny shapes on a CPU: shows that it runs, measures nothing

Steps: random weights of the shape of Llama 3 8B in bfloat16, one sequence with 512 tokens of context. Texts: prompts
read at once, and one token behind long ones, by the same model. Family: the bundled
family, its target widened to 1 B parameters (the same function at a larger cost), plain against drafted. Bandwidth is
that of a copy on the same card in the same run, bytes read and written. Times are medians.
"""

import argparse
import itertools
import json
import operator
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun import LLM, SamplingParams
from forerun.device import Placement
from forerun.models.backends.gpu.backend import GpuBackend
from forerun.models.backends.gpu.capture import Graphs
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.bundled import BUNDLED
from forerun.models.config import ModelConfig, read_config
from forerun.models.decoder import Decoder
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from forerun.models.widen import Wider, cached_widened

COUNTS = (1, 8, 16, 32, 64, 128, 144)  # up to 16 share a graph
CONTEXT = 512
TEXTS = (512, 2048, 7936)  # tokens
PARTS = ("steps", "texts", "family")
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0, "max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}  # fmt: skip
TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 1024,
}  # fmt: skip
DRAFTS = ((None, False), ("model:stdlib-draft", 4), ("model:stdlib-draft", "auto"), ("ngram", 4), ("suffix", 4))
PROMPTS = ("def read_lines(path):\n", "class Stack:\n    def push(self, ", "import os\nimport sys\n\ndef main(")


@dataclass
class Report:
    """Everything measured, by name."""

    card: str
    torch: str
    bandwidth_gb_s: float = 0.0
    weights_gb: float = 0.0
    steps: list[dict[str, Any]] = field(default_factory=list)
    gaps: dict[str, float] = field(default_factory=dict)
    texts: list[dict[str, Any]] = field(default_factory=list)
    widened: list[dict[str, Any]] = field(default_factory=list)

    def add(self, table: str, **row: Any) -> None:
        """A row, also printed at once: what was measured is not lost with a machine whose time is up."""
        getattr(self, table).append(row)
        print(table, json.dumps(row), file=sys.stderr, flush=True)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_ms(body: Callable[[], object], device: torch.device, runs: int) -> float:
    """Median time of `body` between two events on the device; on a CPU, by the clock."""
    times = []
    for _ in range(runs + 3):
        if device.type == "cpu":
            started = time.perf_counter()
            body()
            times.append((time.perf_counter() - started) * 1e3)
            continue
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        body()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times[3:])


def bandwidth(device: torch.device, num_bytes: int) -> float:
    """GB/s of a copy, bytes read and written."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / device_ms(lambda: target.copy_(source), device, 20) / 1e6


def random_runner(fields: dict[str, Any], placement: Placement) -> GraphRunner:
    """A decoder of this shape with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        config = read_config(Path(folder))
    dice = torch.Generator(placement.device).manual_seed(0)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16, device=placement.device)
        return torch.randn(shape, generator=dice, dtype=torch.bfloat16, device=placement.device) * 0.02

    decoder = Decoder(config, take, torch.bfloat16, GpuBackend(placement))
    runner = GraphRunner.of(decoder, config.max_positions)
    assert isinstance(runner, GraphRunner)
    return runner


def weight_bytes(c: ModelConfig) -> int:
    """What a pass reads of the weights: all layers and the head, not the embedding."""
    attention = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    return 2 * (c.layers * (attention + 3 * c.hidden * c.intermediate) + c.vocab_size * c.hidden)


def steps(fields: dict[str, Any], placement: Placement, report: Report, runs: int) -> None:
    """v(k) and the share of bandwidth, for one way to multiply."""
    runner, device = random_runner(fields, placement), placement.device
    report.weights_gb = weight_bytes(runner.decoder.config) / 1e9
    context = min(CONTEXT, runner.decoder.config.max_positions // 2)
    runner.read([Read(0, [7] * context)])
    runner.keep([0], [range(context)])
    single = 0.0
    for count in COUNTS:
        read = Read(0, [5] * count, judged=range(count))

        def whole(read: Read = read) -> None:
            runner.read([read])
            runner.drop([0])

        whole()
        alone = replays(runner)
        pass_ms = device_ms(alone or whole, device, runs)
        wait(device)
        started = time.perf_counter()
        for _ in range(runs):
            whole()
        wait(device)
        round_ms = (time.perf_counter() - started) / runs * 1e3
        single = single or pass_ms
        share = weight_bytes(runner.decoder.config) / pass_ms / 1e6 / report.bandwidth_gb_s
        report.add("steps", one_gemm=placement.one_gemm, tokens=count, pass_ms=pass_ms, v=pass_ms / single,
                   share_of_bandwidth=share, with_host_ms=round_ms)  # fmt: skip
    gaps(runner, report, runs)


def texts(fields: dict[str, Any], placement: Placement, report: Report, runs: int) -> None:
    """Reading a prompt in one pass, and passes of one token and of eight behind it."""
    runner, device = random_runner(fields, placement), placement.device

    def whole(read: Read) -> None:
        runner.read([read])
        runner.drop([0])

    for length in (length for length in TEXTS if length < runner.decoder.config.max_positions):
        prompt = [7 + i % 100 for i in range(length)]
        reading = partial(whole, Read(0, prompt, judged=[length - 1]))
        times = {"prompt_ms": device_ms(reading, device, max(2, runs // 4))}
        runner.read([Read(0, prompt)])
        runner.keep([0], [range(length)])
        for count in (1, 8):
            read = Read(0, [5] * count, judged=range(count))
            whole(read)
            times[f"pass_of_{count}_ms"] = device_ms(replays(runner) or partial(whole, read), device, runs)
        runner.release([0])
        report.add("texts", one_gemm=placement.one_gemm, length=length, **times)


def replays(runner: GraphRunner) -> Callable[[], object] | None:
    """Replaying the graph that was used last, and nothing else; None where nothing is captured."""
    if not runner.graphs.captured:
        return None
    graph, _ = list(runner.graphs.captured.values())[-1]
    return graph.replay


def gaps(runner: GraphRunner, report: Report, runs: int) -> None:
    """The device's idle time between two passes of one token, by events around the replays. GPUs only."""
    if not runner.graphs.enabled:
        return
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    replay = Graphs.replay

    def timed(self: Graphs, key: Any, body: Any) -> Any:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        result = replay(self, key, body)
        last.record()
        events.append((first, last))
        return result

    Graphs.replay = timed  # type: ignore[method-assign]
    try:
        for _ in range(runs):
            logits = runner.read([Read(0, [5], judged=[0])]).logits
            runner.drop([0])
            logits.argmax(1).tolist()  # what a round waits for
    finally:
        Graphs.replay = replay  # type: ignore[method-assign]
    idle = [before[1].elapsed_time(after[0]) * 1e3 for before, after in itertools.pairwise(events)]
    report.gaps["one_gemm" if report.steps[-1]["one_gemm"] else "library"] = statistics.median(idle)


def widened(placement: Placement, report: Report, dry: bool) -> None:
    """Tokens per second of the bundled family: the target widened, plain and drafted, up to 32 at a time."""
    source = str(BUNDLED["stdlib"])
    wider = Wider.of(Blueprint.of(source).config, 1_000_000_000)
    target = source if dry else str(cached_widened(source, wider))
    plain: dict[tuple[float, int], list[tuple[int, ...]]] = {}
    for draft, depth in DRAFTS:
        llm = LLM(target, draft, device=placement, dtype="float32" if dry else "bfloat16", speculation=depth,
                  max_model_len=512, max_num_seqs=2 if dry else 32)  # fmt: skip
        for temperature, batch in ((0.0, 2),) if dry else itertools.product((0.0, 1.0), (1, 8, 32)):
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=8 if dry else 128, ignore_eos=True)
            prompts = [PROMPTS[i % len(PROMPTS)] for i in range(batch)]
            llm.generate(prompts, params)  # captures and compiles
            wait(placement.device)
            started = time.perf_counter()
            results = llm.generate(prompts, params)
            spent = time.perf_counter() - started
            texts = [tuple(c.token_ids) for r in results for c in r.outputs]
            same = sum(map(operator.eq, texts, plain.setdefault((temperature, batch), texts)))
            report.add("widened", one_gemm=placement.one_gemm, draft=draft or "plain", depth=depth,
                       temperature=temperature, batch=batch, tokens_per_s=sum(map(len, texts)) / spent,
                       tokens_per_round=llm.stats.tokens_per_round, same_as_plain=same)  # fmt: skip
        del llm


def markdown(report: Report) -> str:
    """The report for a reader."""
    lines = [f"{report.card}, torch {report.torch}; a copy moves {report.bandwidth_gb_s:,.0f} GB/s; "
             f"a pass reads {report.weights_gb:.1f} GB of weights", "",
             "| product | tokens | pass, ms | v | share of bandwidth | with the host, ms |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for s in report.steps:
        product = "one_gemm" if s["one_gemm"] else "library"
        lines.append(f"| {product} | {s['tokens']} | {s['pass_ms']:.2f} | {s['v']:.2f} | "
                     f"{s['share_of_bandwidth']:.0%} | {s['with_host_ms']:.2f} |")  # fmt: skip
    lines += ["", "| product | tokens | prompt, ms | then one token, ms | eight |", "|---|---|---|---|---|"]
    for t in report.texts:
        product = "one_gemm" if t["one_gemm"] else "library"
        lines.append(f"| {product} | {t['length']} | {t['prompt_ms']:.1f} | {t['pass_of_1_ms']:.2f} | "
                     f"{t['pass_of_8_ms']:.2f} |")  # fmt: skip
    lines += ["", *(f"idle between passes, {name}: {gap:.0f} µs" for name, gap in report.gaps.items()), ""]
    lines += ["| product | draft | depth | temperature | batch | tokens/s | tokens per round | answers as plain |",
              "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for w in report.widened:
        product = "one_gemm" if w["one_gemm"] else "library"
        lines.append(f"| {product} | {w['draft']} | {w['depth'] or ''} | {w['temperature']} | {w['batch']} | "
                     f"{w['tokens_per_s']:.0f} | {w['tokens_per_round']:.2f} | {w['same_as_plain']} |")  # fmt: skip
    return "\n".join(lines)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="Measure passes of fixed shape on a GPU.")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU; measures nothing")
    parser.add_argument("parts", nargs="*", help="steps, texts, family; all by default")
    options = parser.parse_args()
    dry, parts = options.dry_run, options.parts or PARTS
    if not dry and not torch.cuda.is_available():
        print("skipped: torch sees no GPU here (--dry-run runs tiny shapes on the CPU)")
        sys.exit(0)
    placement = Placement(torch.device("cpu"), fixed=True) if dry else Placement.of("cuda")
    card = "dry run, no GPU" if dry else torch.cuda.get_device_name(placement.device)
    report = Report(card, torch.__version__)
    report.bandwidth_gb_s = bandwidth(placement.device, 1 << 20 if dry else 4 << 30)
    products = [replace(placement, one_gemm=one_gemm) for one_gemm in ((False,) if dry else (False, True))]
    for measure in (part for name, part in (("steps", steps), ("texts", texts)) if name in parts):
        for product in products:
            measure(TINY if dry else LLAMA_8B, product, report, 2 if dry else 30)
            if not dry:
                torch.cuda.empty_cache()
    for product in products if "family" in parts else ():
        widened(product, report, dry)
    print(markdown(report))
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    main()
