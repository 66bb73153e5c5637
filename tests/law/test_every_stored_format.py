"""For every format that weights are stored in, drafting changes no token and no log-probability, without tolerance.

A batch, greedy and sampled, in chains and trees, with the options that `auto` chooses for the file. Models are random.
Covered are all formats of GGUF, the architectures that are read from it, quantised folders, and two published files in
the folder that FORERUN_REAL_MODELS names. tests/models compares the weights' values.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams, Speculation
from forerun.models.families import FAMILIES
from forerun.models.gguf.config import ARCHITECTURES
from forerun.models.gguf.formats import READABLE
from forerun.models.loading import Blueprint
from kit.checkpoints import TARGET, read_json
from kit.gguf_files import metadata_of, vocabulary, write_gguf
from kit.quantized_folders import KINDS, write_mxfp4, write_quantized
from kit.sparse import write_architecture, write_sparse

SIZES = {"num_hidden_layers": 3, "intermediate_size": 256, "torch_dtype": "bfloat16"}
REAL = ("smollm2-135m-instruct.Q4_1.gguf", "gemma-3-270m.Q4_K_M.gguf")
FILES = [*ARCHITECTURES.items(), ("llama", "MixtralForCausalLM"), ("mistral3", "MistralForCausalLM")]


def in_gguf(folder: Path, name: str, architecture: str, number_format: str, **sizes: Any) -> Path:
    """A file of a random model."""
    family = FAMILIES[architecture]
    rope = {"rope_type": "default", "rope_theta": 1e4, **family.rope}
    rope |= {} if family.rotary_share is None else {"partial_rotary_factor": family.rotary_share}
    usual = {"model_type": family.name, "mlp_only_layers": [], "rope_parameters": rope} | SIZES
    usual |= {} if family.moe else {"num_experts": None}
    source = write_architecture(folder / "source", architecture, **usual | sizes)
    metadata = metadata_of(read_json(source / "config.json")) | vocabulary(TARGET)
    return write_gguf(source, folder / "model.gguf", name, metadata, number_format)


def in_mxfp4(folder: Path) -> Path:
    """A folder of gpt-oss."""
    write_mxfp4(write_sparse(folder / "source", "gpt_oss", **SIZES | {"intermediate_size": 96}), folder / "quantised")
    return folder / "quantised"


def in_folder(folder: Path, kind: str, architecture: str = "LlamaForCausalLM", **sizes: Any) -> Path:
    """A quantised folder of a random model."""
    source = write_architecture(folder / "source", architecture, hidden_size=128, **SIZES | sizes)
    write_quantized(source, folder / "quantised", kind)
    return folder / "quantised"


def published(name: str) -> Path:
    """A file that others made."""
    folder = os.environ.get("FORERUN_REAL_MODELS")
    if folder is None or not (path := Path(folder) / name).exists():
        pytest.skip(f"let FORERUN_REAL_MODELS name a folder with {name}")
    return path


MODELS: dict[str, Callable[[Path], Path]] = {
    **{
        f"gguf {each}": lambda folder, each=each: in_gguf(folder, "llama", "LlamaForCausalLM", each, hidden_size=256)
        for each in READABLE
    },
    **{
        f"gguf of {name}, {each}": lambda folder, name=name, each=each: in_gguf(folder, name, each, "Q4_1")
        for name, each in FILES
    },
    "gguf of gpt-oss in MXFP4": lambda folder: in_gguf(folder, "gpt-oss", "GptOssForCausalLM", "MXFP4"),
    **{f"folder {kind}": lambda folder, kind=kind: in_folder(folder, kind) for kind in KINDS},
    "folder of experts": lambda folder: in_folder(folder, "awq, 64", "Qwen3MoeForCausalLM", moe_intermediate_size=128),
    "folder of gpt-oss in MXFP4": in_mxfp4,
    **{name: lambda _, name=name: published(name) for name in REAL},
}


@pytest.mark.short("gguf Q4_K", "gguf of gpt-oss in MXFP4", "folder awq, 64", "folder nf4, nested")
@pytest.mark.parametrize("name", MODELS)
def test_drafting_changes_no_token_in_any_stored_format(name: str, tmp_path: Path) -> None:
    model = str(MODELS[name](tmp_path))
    params = [SamplingParams(temperature=t, seed=7, max_tokens=24, logprobs=1, ignore_eos=True) for t in (0.0, 1.0)]
    prompts = ["Once upon a time", "Lily and"]
    options: dict[str, Any] = {"max_model_len": 256}
    expected = [each.outputs[0] for each in LLM(model, **options).generate(prompts, params)]
    for draft in ("ngram", f"model:{model}", "early-exit:2"):
        llm = LLM(model, draft, **options)
        for shape in (Speculation(4), Speculation(3, 2, 8)):
            answers = [each.outputs[0] for each in llm.generate(prompts, params, speculation=shape)]
            assert [(o.token_ids, o.logprobs) for o in answers] == [(o.token_ids, o.logprobs) for o in expected], draft
        assert llm.stats.num_drafted > 0, draft
        assert llm.stats.num_accepted > 0 or not draft.startswith("model"), draft
        llm.close()
    if Blueprint.of(model).keeps_groups:
        assert LLM(model, quantize="int8", **options).generate(prompts, params)
