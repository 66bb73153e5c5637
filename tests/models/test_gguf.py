"""A GGUF file is a model like any other: its answers have the bits of the Hugging Face folder that it was made of."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from forerun.models.families import FAMILIES
from forerun.models.gguf.config import query_scalar
from forerun.models.gguf.file import GgufFile
from forerun.models.gguf.tensors import hugging_face_tensors
from forerun.models.loading import Blueprint
from kit.gguf_files import metadata_of, write_gguf, write_rounded
from models.test_families import (
    EXPERTS,
    GEMMA2,
    GPT_OSS,
    LENGTH,
    LINEAR,
    MINISTRAL,
    SHARED,
    TOKENS,
    WINDOW,
    YARN,
    Case,
    build,
    our_logits,
)

BIASED = {"attention_bias": True, "mlp_bias": True, "head_dim": 24}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW, "tie_word_embeddings": True}
CASES = {
    "llama, tied": ("llama", "llama", {"tie_word_embeddings": True}),
    "llama, biases, wide heads": ("llama", "llama", BIASED),
    "llama, linear": ("llama", "llama", {"rope_parameters": LINEAR}),
    "llama, yarn": ("llama", "llama", {"rope_parameters": YARN}),
    "internlm 2": ("internlm2", "llama", {}),
    "mixtral": ("llama", "mixtral", MIXTRAL),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen2, experts": ("qwen2moe", "qwen2_moe", EXPERTS | SHARED),
    "qwen3, experts": ("qwen3moe", "qwen3_moe", EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "gemma 3": ("gemma3", "gemma3_text", GEMMA),
    "gpt-oss": ("gpt-oss", "gpt_oss", GPT_OSS),
    "gemma 2": ("gemma2", "gemma2", GEMMA2 | {"query_pre_attn_scalar": 32}),
    "ministral 3": ("mistral3", "ministral3", {"head_dim": 32, "rope_parameters": MINISTRAL}),
    "mistral": ("mistral3", "mistral", {"head_dim": 32, "sliding_window": None}),
    "glm 4": ("glm4", "glm4", {"head_dim": 32, "attention_bias": True}),
    "mistral, older": ("llama", "mistral", {"head_dim": 32, "sliding_window": None}),
}


def both(case: str, tmp_path: Path, number_format: str) -> tuple[Path, Path]:
    """A folder, and a GGUF file of the same numbers."""
    architecture, family, options = CASES[case]
    source = tmp_path / "source"
    build(Case(case, family, {"intermediate_size": 96} | options), source)
    config = json.loads((source / "config.json").read_text())
    file = write_gguf(source, tmp_path / "model.gguf", architecture, metadata_of(config), number_format)
    return write_rounded(source, tmp_path / "folder", number_format), file


@pytest.mark.short("*-F32", "llama, tied-*", "*experts-Q4_1", "gpt-oss-Q8_0")
@pytest.mark.parametrize("number_format", ["F32", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("case", CASES)
def test_a_file_gives_the_bits_of_the_folder_that_it_was_made_of(case: str, number_format: str, tmp_path: Path) -> None:
    folder, file = both(case, tmp_path, number_format)
    expected, found = (
        our_logits(Blueprint.of(str(path), dtype="float32", kernels="torch"), TOKENS.tolist(), [LENGTH])
        for path in (folder, file)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "head_dim", "number"),
    [
        ("gemma2", 42, 3584, 16, 256, 256),
        ("gemma2", 46, 4608, 32, 128, 144),
        ("gemma3", 48, 3840, 16, 256, 256),
        ("gemma3", 62, 5376, 32, 128, 168),
    ],
)
def test_queries_of_the_largest_gemmas_are_divided_by_the_root_of_another_number(
    name: str, layers: int, width: int, heads: int, head_dim: int, number: int
) -> None:
    """The query_pre_attn_scalar of the config.json, which is not in the file."""
    config = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "head_dim": head_dim}
    assert query_scalar(GgufFile(Path("model.gguf"), {"general.architecture": name}, {}), config) == number


@pytest.mark.parametrize(("case", "family"), [("llama, tied", "LlamaForCausalLM"), ("gpt-oss", "GptOssForCausalLM")])
def test_a_weight_in_groups_has_the_numbers_of_the_unpacked_one(case: str, family: str, tmp_path: Path) -> None:
    """Heads in Hugging Face's order and experts' gates beside their ups included."""
    num_in_groups = 0
    _, file = both(case, tmp_path, "Q8_0")
    for name, tensor in hugging_face_tensors(GgufFile.read(file), FAMILIES[family]).items():
        parts: Iterable[int | None] = range(tensor.shape[0]) if tensor.transposed else [None]
        for part in parts if tensor.form is not None else ():
            groups = tensor.groups(part)
            assert groups is not None
            assert torch.equal(groups.dense(), tensor.read() if part is None else tensor.read()[part].T), name
            num_in_groups += 1
    assert num_in_groups > 5
