"""The memory plan of a GPU compared with what engines hold on an imagined GPU, counted as by torch's allocator."""

import itertools
import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import SamplingParams
from forerun.config import EngineOptions, Quantization, Speculation
from forerun.control.controller import FixedDepth
from forerun.device import Placement
from forerun.draft.base import Drafter
from forerun.draft.model.model import ModelDrafter
from forerun.draft.plan import DraftPlan
from forerun.draft.text.ngram import NgramDrafter
from forerun.engine.engine import Engine
from forerun.engine.memory import pass_sizes, plan_engine
from forerun.engine.request_check import RequestChecker
from forerun.models.backends.gpu.backend import QUANTIZERS, OneGemmLinear
from forerun.models.backends.gpu.graphs import GraphRunner
from forerun.models.backends.gpu.groups import GroupLinear
from forerun.models.backends.gpu.verdicts import MOST_ROWS, VerdictShape
from forerun.models.backends.torch_cpu.quantized import GROUP
from forerun.models.choice import BackendChoice, BackendKind
from forerun.models.config import read_config
from forerun.models.loading import Blueprint
from forerun.models.projections import count_parameters
from forerun.models.spec import ModelSpec
from forerun.request import Request
from kit.card import PLACEMENT
from kit.interpreted import products  # noqa: F401  # the kernels' modules need triton
from kit.memory import counted_memory
from law.test_every_stored_format import MODELS as STORED

MOST_OF_PEAK = 2.0  # how much more may be planned for passes than they hold at their peak
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    **LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 1000, "hidden_size": 1024, "head_dim": 64,
    "intermediate_size": 2048, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], Quantization | None]] = {
    "llama": (LLAMA, None),
    "llama-int8": (LLAMA, "int8"),
    "llama-int4": (LLAMA, "int4"),
    "experts": (EXPERTS, None),
    "experts-int8": (EXPERTS, "int8"),
    "experts-int4": (EXPERTS, "int4"),
    "large-vocabulary": ({
        **LLAMA, "vocab_size": 256_000, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    }, None),
}  # fmt: skip
OPTIONS = EngineOptions(speculation=Speculation(16), prefix_cache=False)


class Shapes:
    """A checkpoint of any tensors, all of them zeros."""

    groups = None

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros((), dtype=self.dtype).expand(shape)


def blueprint(folder: Path, fields: dict[str, Any], quantize: Quantization | None) -> Blueprint:
    """A model of this configuration without weights."""
    (folder / "config.json").write_text(json.dumps(fields))
    config, choice = read_config(folder), BackendChoice(BackendKind("torch", torch.bfloat16))
    num_bytes = count_parameters(config) * torch.bfloat16.itemsize
    spec = ModelSpec(str(folder), device=PLACEMENT, quantize=quantize)
    made = Blueprint(spec, "imagined", folder, config, choice, num_bytes, PLACEMENT)
    return replace(made, passes=pass_sizes(OPTIONS, drafts=True))


def in_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """What `quantize_groups` gives, without the search for scales."""
    return weight.to(torch.int8), weight.unflatten(1, (-1, GROUP))[:, :, 0].float()


def submit(engine: Engine, num: int, prompt: int, depth: int, **fields: Any) -> list[int]:
    """Submit `num` requests with prompts of this length, drafted to this depth; their ids."""
    params = SamplingParams(**{"temperature": 1.0, "ignore_eos": True, **fields})
    first = 1 + max(engine.sequences, default=-1)
    checker = RequestChecker(None, engine.runner.vocab_size, engine.runner.window, (2,), Speculation(depth))
    checker.request_ids, checker.seq_ids = itertools.count(first), itertools.count(first)
    for _ in range(num):
        for sequence in checker.sequences(Request.of({"prompt_token_ids": [0] * prompt}, params)):
            engine.submit(sequence)
    return [*range(first, first + num)]


def most_judged(engine: Engine, rounds: int) -> int:
    """The largest number of roots and draft tokens in one of `rounds` rounds."""
    counts = []
    for _ in range(rounds):
        before = engine.stats.num_drafted
        deltas = engine.step()
        counts.append(engine.stats.num_drafted - before + len(deltas))
    assert engine.drafter is not None, "an error would switch drafting off"
    return max(counts)


def plain_round(engine: Engine) -> None:
    submit(engine, 1, 40, depth=0)
    assert most_judged(engine, 3) == 1


def long_prompts(engine: Engine) -> None:
    submit(engine, 2, 1500, depth=0)
    most_judged(engine, 6)


def largest_verdict_graph(engine: Engine) -> None:
    submit(engine, 16, 40, depth=11)
    assert most_judged(engine, 5) == MOST_ROWS
    assert isinstance(engine.runner, GraphRunner)
    assert MOST_ROWS in {key[0].rows for key in engine.runner.graphs.captured if isinstance(key[0], VerdictShape)}


def most_draft_tokens(engine: Engine) -> None:
    submit(engine, 16, 40, depth=16)
    assert most_judged(engine, 4) == 16 * 17


def prompts_with_drafts(engine: Engine) -> None:
    submit(engine, 8, 40, depth=16)
    most_judged(engine, 3)
    submit(engine, 8, 64, depth=16)
    assert most_judged(engine, 1) == 8 * 17 + 8


def widest_filter(engine: Engine) -> None:
    submit(engine, 16, 40, depth=16, top_p=0.9)
    assert most_judged(engine, 4) == 16 * 17


ROUNDS = (plain_round, long_prompts, largest_verdict_graph, prompts_with_drafts, most_draft_tokens, widest_filter)


@pytest.mark.short("experts-int4", "large-vocabulary")
@pytest.mark.parametrize("name", MODELS)
def test_passes_hold_at_most_the_planned_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, tmp_path, MODELS[name], None)


@pytest.mark.full
def test_passes_of_a_draft_model_hold_at_most_the_planned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(monkeypatch, tmp_path, MODELS["llama"], {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192})


def check(
    monkeypatch: pytest.MonkeyPatch, folder: Path, model: tuple[dict[str, Any], Quantization | None], draft: Any
) -> None:
    """Assert that neither loading nor rounds, in an order in which graphs keep their memory, hold more than planned."""
    monkeypatch.setattr(Blueprint, "checkpoint", lambda _self, dtype: Shapes(dtype))
    monkeypatch.setitem(QUANTIZERS, "int4", in_groups)
    with counted_memory(monkeypatch, free_bytes=80 << 30) as memory, torch.inference_mode():
        target, models = blueprint(folder, *model), {}
        if draft is not None:
            small = blueprint(folder, draft, None)
            small = replace(small, passes=small.passes.of_drafter())
            models = {"draft": small.memory}
        plan = plan_engine(target, DraftPlan(models, lambda *_: None), OPTIONS.speculation, 8192, 16, 80 << 30)
        runner = target.load(plan.cache_tokens, None, plan.max_model_len)
        drafter: Drafter = NgramDrafter()
        if draft is not None:
            loaded_draft = small.load(plan.drafter_cache_tokens["draft"], None, plan.max_model_len)
            drafter = ModelDrafter(loaded_draft, target.config.vocab_size)
        loaded = memory.held
        assert loaded == pytest.approx(
            plan.num_bytes - plan.scratch_bytes, rel=2e-3
        )  # scales of outputs are not planned for
        assert memory.peak <= plan.num_bytes
        memory.peak = loaded
        for rounds in ROUNDS:
            engine = Engine(runner, drafter, options=OPTIONS, controller=FixedDepth())
            rounds(engine)
            for seq_id in [*engine.sequences]:
                engine.cancel(seq_id)
    assert memory.peak <= plan.num_bytes
    assert plan.scratch_bytes <= MOST_OF_PEAK * (memory.peak - loaded)


@pytest.mark.short("gguf Q8_0", "gguf of gpt-oss*", "folder gptq*", "folder fp8")
@pytest.mark.parametrize(
    "name",
    ["gguf Q8_0", "gguf Q5_1", "gguf of gpt-oss in MXFP4", "folder of experts", "folder gptq, 8 bits", "folder fp8"],
)
def test_stored_weights_take_the_planned_memory(name: str, tmp_path: Path) -> None:
    """In groups, experts among them, in the bits that GPUs hold, which may be other ones than those of CPUs."""
    model = Blueprint.of(str(STORED[name](tmp_path)), device=Placement(torch.device("cpu"), True, True))
    assert model.keeps_groups
    decoder, held = model.decoder(), 0
    pending: list[object] = [decoder.embedding, decoder.head, *decoder.layers]
    while pending:
        part = pending.pop()
        if isinstance(part, Tensor):
            held += part.nbytes
        elif isinstance(part, GroupLinear | OneGemmLinear):
            pending += [part.weight, part.bias]
        elif is_dataclass(part):
            pending += [getattr(part, field.name) for field in fields(part) if field.name != "form"]
    assert 0.9 <= held / model.weights_bytes <= 1.02
