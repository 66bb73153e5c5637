"""Tokens per second of the bundled family, with the target widened to 1 B parameters.

Widening raises the cost of a pass and leaves the output as it is. Plain decoding is compared with every kind of
drafter, and with plain, assisted and prompt-lookup generation of the transformers library, if that is installed.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from benchmarks.gpu.setting import Setting, WeightFormat
from benchmarks.peers.huggingface import load
from benchmarks.peers.protocol import Mode, Setup

from forerun import LLM, SamplingParams
from forerun.config import Speculation
from forerun.device import Captures
from forerun.heads.widen import cached_widened_drafter
from forerun.machine import wait_for
from forerun.models.bundled import BUNDLED, BUNDLED_DRAFTS, BUNDLED_HEADS
from forerun.models.loading import Blueprint
from forerun.models.widen import Wider, cached_widened
from forerun.text.tokenizer import Tokenizer

Depth: TypeAlias = int | bool | Literal["auto"]
DRAFTS: Sequence[tuple[str | None, Depth]] = (
    (None, False),
    ("model:stdlib-draft", 4),
    ("model:stdlib-draft", "auto"),
    ("ngram", 4),
    ("suffix", 4),
)
PROMPTS = ("def read_lines(path):\n", "class Stack:\n    def push(self, ", "import os\nimport sys\n\ndef main(")
BATCHES, TOKENS = (1, 8, 32), 128
HEAD_DEPTH = 4
TREE = Speculation(4, width=2, nodes=8)
REQUESTS_AT_ONCE = 8
PARAMETERS_OF: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-p": {"top_p": 0.9},
    "top-k and min-p": {"top_k": 50, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2},
    "log-probabilities": {"logprobs": 5},
}
MODES = ("plain", "model-4", "ngram-4")  # that are measured with the transformers library
PARAMETERS = 1_000_000_000
Result = TypeVar("Result")


def target_of(setting: Setting) -> str:
    """The folder of the widened target, which is made at first use; in a dry run, of the bundled target."""
    source = str(BUNDLED["stdlib"])
    return source if setting.dry else str(cached_widened(source, wider_of(source)))


def wider_of(source: str) -> Wider:
    """The shape to which the target, and the drafters that read its states, are widened."""
    return Wider.of(Blueprint.of(source).config, PARAMETERS)


def widened(setting: Setting, form: WeightFormat) -> None:
    """Measure plain decoding, and drafts of models and of text look-ups."""
    measure(setting, form, DRAFTS[:2] if setting.dry else DRAFTS)


def heads(setting: Setting, form: WeightFormat) -> None:
    """Measure plain decoding, and drafts of the layers that are trained for the target and widened with it."""
    source, target = str(BUNDLED["stdlib"]), Path(target_of(setting))
    drafts: list[tuple[str | None, Depth]] = [(None, False)]
    for name in list(BUNDLED_HEADS)[: 1 if setting.dry else None]:
        draft = BUNDLED_DRAFTS[name]
        if not setting.dry:
            draft = str(cached_widened_drafter(draft, source, target, wider_of(source)))
        drafts.append((draft, HEAD_DEPTH))
    measure(setting, form, drafts)


def measure(setting: Setting, form: WeightFormat, drafts: Sequence[tuple[str | None, Depth]]) -> None:
    """Generate up to 32 sequences at a time with each draft, and compare answers with those of the first draft.

    The first draft is None, plain decoding.
    """
    target, num_tokens = target_of(setting), 4 if setting.dry else TOKENS
    plain: dict[tuple[float, int], list[tuple[int, ...]]] = {}
    for draft, depth in drafts:
        llm = engine(setting, form, target, draft, depth)
        for temperature, batch in ((0.0, 2),) if setting.dry else itertools.product((0.0, 1.0), BATCHES):
            params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True)
                      for seed in range(batch)]  # fmt: skip
            answers, figures = generated(setting, llm, params)
            same = sum(map(operator.eq, answers, plain.setdefault((temperature, batch), answers)))
            setting.add("family", engine="forerun", format=form.name, draft=named(draft), depth=depth,
                        temperature=temperature, batch=batch, same_as_plain=same, **figures)  # fmt: skip
        del llm


def requests(setting: Setting, form: WeightFormat) -> None:
    """Measure sampling parameters at temperature 1, in plain rounds and with chains and trees of a draft model.

    `reserved_mb` is the GPU memory that torch has reserved since the engine was made, mostly that of graphs.
    """
    batch, kinds = 2 if setting.dry else REQUESTS_AT_ONCE, list(PARAMETERS_OF.items())[: 2 if setting.dry else None]
    for draft, shapes in ((None, (Speculation(0),)), ("model:stdlib-draft", (Speculation(4), TREE))):
        llm = engine(setting, form, target_of(setting), draft, 4)
        before = 0 if setting.dry else torch.cuda.memory_reserved(setting.device)
        for (name, parameters), shape in itertools.product(kinds, shapes):
            params = [SamplingParams(temperature=1, seed=seed, max_tokens=4 if setting.dry else TOKENS, ignore_eos=True,
                                     **parameters) for seed in range(batch)]  # fmt: skip
            _, figures = generated(setting, llm, params, speculation=shape)
            reserved = 0 if setting.dry else torch.cuda.memory_reserved(setting.device) - before
            setting.add("requests", format=form.name, draft=named(draft), width=shape.width, parameters=name,
                        nodes=shape.nodes_within(shape.depth), batch=batch, reserved_mb=reserved / 1e6,
                        **figures)  # fmt: skip
        del llm


def engine(setting: Setting, form: WeightFormat, target: str, draft: str | None, depth: Depth) -> LLM:
    """An LLM with room for the largest batch of short texts."""
    return LLM(target, draft, device=setting.placement(form), dtype="float32" if setting.dry else "bfloat16",
               quantize=form.quantize, speculation=depth, max_model_len=512,
               max_num_seqs=2 if setting.dry else max(BATCHES))  # fmt: skip


def generated(
    setting: Setting, llm: LLM, params: Sequence[SamplingParams], **options: Any
) -> tuple[list[tuple[int, ...]], dict[str, float]]:
    """The answers to as many prompts as there are `params`, and the figures of their generation."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    before = llm.stats.num_emitted, llm.stats.num_rounds
    body = partial(llm.generate, prompts, params, use_tqdm=False, **options)
    spent, results, captures = best_of_two(body, setting)
    emitted, rounds = llm.stats.num_emitted - before[0], llm.stats.num_rounds - before[1]
    answers = [tuple(c.token_ids) for r in results for c in r.outputs]
    figures = {"tokens_per_s": sum(map(len, answers)) / spent, "tokens_per_round": emitted / rounds}
    return answers, figures | {"captures": captures}


def named(draft: str | None) -> str:
    """The name of a drafter in the journal: its kind alone if it is in a folder, "plain" for None."""
    return "plain" if draft is None else draft.partition(":")[0] if "/" in draft else draft


def by_transformers(setting: Setting) -> None:
    """Measure the transformers library with the first prompt at temperature 0, which is forerun's batch of one."""
    target, draft = target_of(setting), str(BUNDLED["stdlib-draft"])
    service = load(Setup(target, draft, "bfloat16", 1, "", device=str(setting.device)))
    prompt, num_tokens = Tokenizer.load(target).encode(PROMPTS[0]), 4 if setting.dry else TOKENS
    for mode in map(Mode.parse, MODES):
        spent, *_ = best_of_two(partial(service.generate, mode, prompt, num_tokens), setting)
        setting.add("family", engine=f"transformers {service.versions['transformers']}", format="library",
                    draft=mode.drafter, depth=mode.depth or False, temperature=0.0, batch=1,
                    tokens_per_s=num_tokens / spent, tokens_per_round=None, same_as_plain=None)  # fmt: skip


def best_of_two(body: Callable[[], Result], setting: Setting) -> tuple[float, Result, int]:
    """The shorter time of two runs of `body` in seconds, its last result, and the number of graphs captured in them.

    A first run, which is not measured, compiles kernels, captures graphs and lets the controller choose. Graphs that
    are captured later lengthen the measured runs, so they are counted.
    """
    times, captured = [], [0]
    for _ in range(1 if setting.dry else 3):
        wait_for(setting.device)
        captured.append(Captures.num)
        started = time.perf_counter()
        result = body()
        wait_for(setting.device)
        times.append(time.perf_counter() - started)
    return min(times[-2:]), result, Captures.num - captured[-2:][0]
