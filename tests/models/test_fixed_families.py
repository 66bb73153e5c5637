"""Layers of every family in passes of fixed shape: the CPU's logits, and drafted tokens that are plain decoding's.

Weights are random: nothing that a family has can be left out unseen.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.config import Quantization, Speculation
from forerun.device import CPU, Placement
from forerun.models.families import FAMILIES
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from kit.assertions import tokens_of
from kit.quantized_folders import write_mxfp4
from kit.sparse import write_architecture

FIXED = Placement(torch.device("cpu"), fixed=True)
TOLERANCE = 2e-4  # logits are of size 10: sums in another order
PROMPTS = ["Once upon a time", "The little dog", "One day, Tim", "Lily and her mom"]
TREE = [5, 6, 7, 8, 9, 10], [-1, 0, 0, 1, 2, 2]
LENGTH = 60  # beyond the windows, and beyond the context before scaling


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_are_those_of_the_cpu(architecture: str, tmp_path: Path) -> None:
    folder = str(write_architecture(tmp_path / "target", architecture))
    blueprints = [Blueprint.of(folder, dtype="float32", kernels="torch"), Blueprint.of(folder, device=FIXED)]
    plain, fixed = (each.load(LENGTH + 20, max_model_len=LENGTH + 20) for each in blueprints)
    for tokens, parents, kept in (
        (list(range(3, 3 + LENGTH)), None, range(LENGTH)),
        (*TREE, [0, 2, 5]),
        ([7], None, [0]),
    ):
        read = Read(0, tokens, parents, range(len(tokens)), scratch=0 if parents is None else 3)
        wanted, found = plain.read([read]).logits, fixed.read([read]).logits
        assert wanted.std() > 1
        assert (wanted - found).abs().max() <= TOLERANCE
        for runner in (plain, fixed):
            runner.keep([0], [kept])


@pytest.mark.parametrize("family", ["Qwen2Moe", "Mixtral", "Gemma2"])
def test_experts_that_are_read_are_counted_as_on_the_cpu(family: str, tmp_path: Path) -> None:
    folder = str(write_architecture(tmp_path / "target", f"{family}ForCausalLM"))
    plain, fixed = (
        Blueprint.of(folder, dtype="float32", kernels="torch").load(LENGTH + 20),
        Blueprint.of(folder, device=FIXED).load(LENGTH + 20),
    )
    counts = []
    for tokens in ([5], [7, 8, 9], list(range(3, 3 + LENGTH))):
        for runner in (plain, fixed):
            runner.read([Read(0, tokens)])
            runner.release([0])
        counts.append(plain.decoder.num_experts_read)
        assert fixed.decoder.num_experts_read == counts[-1]
    assert len(set(counts)) == (1 if family == "Gemma2" else 3)


DRAFTED = ("Gemma2", "Cohere2", "Olmo2", "Starcoder2", "Ministral3", "GptOss", "Qwen2Moe")
QUANTISED: tuple[Quantization, ...] = ("int8", "int4", "fp8")


@pytest.mark.short("Gemma2-*", "Cohere2-*", "GptOss-*", "Qwen2Moe-int4")
@pytest.mark.parametrize(
    ("family", "quantize"), [*((family, None) for family in DRAFTED), *(("Qwen2Moe", each) for each in QUANTISED)]
)
def test_drafted_tokens_are_those_of_plain_decoding(family: str, quantize: Quantization | None, tmp_path: Path) -> None:
    """On the CPU, but for weights of few bits, of which it computes others."""
    folder = str(write_architecture(tmp_path / "target", f"{family}ForCausalLM"))
    params = [SamplingParams(temperature=t, seed=3, max_tokens=8, ignore_eos=True) for t in (0, 1, 0.8, 1.5)]
    options: dict[str, Any] = {"dtype": "float32", "quantize": quantize, "max_model_len": 128}
    plain, *drafted = (
        LLM(folder, draft, device=place, speculation=shape, **options)
        for place, draft, shape in (
            (FIXED if quantize else CPU, None, 1),
            (FIXED, None, 1),
            (FIXED, "early-exit:2", 3),
            (FIXED, "early-exit:2", Speculation(depth=3, width=2)),
        )
    )
    wanted = tokens_of(plain.generate(PROMPTS, params))
    assert [tokens_of(llm.generate(PROMPTS, params)) for llm in drafted] == [wanted] * 3
    assert all(llm.stats.num_accepted > 0 for llm in drafted[1:])


def test_experts_stay_as_they_are_stored(tmp_path: Path) -> None:
    source = write_architecture(tmp_path / "gpt", "GptOssForCausalLM", hidden_size=64, intermediate_size=64)
    write_mxfp4(source, tmp_path / "stored")
    plain, fixed = (
        Blueprint.of(str(tmp_path / "stored"), device=place, kernels=kernels)
        for place, kernels in ((CPU, "torch"), (FIXED, "auto"))
    )
    assert fixed.format == "float32, MXFP4 weights"
    read = Read(0, list(range(3, 40)), judged=range(37))
    wanted, found = (blueprint.load(64).read([read]).logits for blueprint in (plain, fixed))
    assert (wanted - found).abs().max() <= TOLERANCE
