"""Folders made by other programs: near-checkpoints are loaded, and for others the error names the cause and the fix."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import MissingWeights, ModelError, ModelNotFound, TokenizerError, UnsupportedModel
from forerun.models.foreign import TENSORS, foreign_tensors
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET

TEXT = [1, 9, 30, 8]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be changed."""
    return shutil.copytree(TARGET, tmp_path / "model")


def logits(folder: Path) -> torch.Tensor:
    """The model's logits after TEXT."""
    runner = Blueprint.of(str(folder), dtype="float32", kernels="torch").load(64)
    return runner.read([Read(0, TEXT, judged=range(len(TEXT)))]).logits


def configured(folder: Path, **values: Any) -> Path:
    """The folder with other values in its config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}), encoding="utf-8")
    return folder


def renamed(folder: Path, name: Callable[[str], str], **config: Any) -> Path:
    """The folder with other names of its tensors."""
    file = folder / "model.safetensors"
    save_file({name(key): tensor for key, tensor in load_file(file).items()}, file)
    return configured(folder, **config)


def cut(folder: Path, counts: list[int], pattern: str = "model-{:05}-of-{:05}.safetensors") -> list[Path]:
    """The folder's tensors in shards of so many, without an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files, names = [], list(tensors)
    for number, count in enumerate(counts, start=1):
        own = [names.pop() for _ in range(min(count, len(names)))]
        files.append(folder / pattern.format(number, len(counts)))
        save_file({name: tensors[name] for name in own}, files[-1])
    assert not names
    return files


def refused(folder: Path, error: type[ModelError], *parts: str) -> None:
    """Loading the folder raises this error, in whose message all parts are."""
    with pytest.raises(error) as caught:
        Blueprint.of(str(folder))
    message = str(caught.value)
    for part in parts:
        assert re.search(part, message), message
    assert len(message) < 900


@pytest.mark.parametrize("before", ["", "module.model.", "_orig_mod.model.", "language_model.model.", "transformer."])
def test_other_names_in_front_are_read(before: str, folder: Path) -> None:
    """A base model that was saved without its head, and what wrappers of a model save."""
    wanted = logits(folder)
    renamed(folder, lambda name: before + name.removeprefix("model."))
    assert torch.equal(logits(folder), wanted)


def test_a_base_model_of_transformers_is_read(folder: Path) -> None:
    import transformers

    wanted = logits(folder)
    transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaModel"]
    assert "layers.0.mlp.up_proj.weight" in load_file(folder / "model.safetensors")
    assert torch.equal(logits(folder), wanted)


def test_a_head_next_to_another_prefix_is_read(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    head = 2 * tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    configured(folder, tie_word_embeddings=False)
    wanted = logits(folder)
    renamed(folder, lambda name: f"module.{name}")
    assert torch.equal(logits(folder), wanted)


def test_a_base_model_without_its_head_is_refused_with_the_reason(folder: Path) -> None:
    configured(folder, tie_word_embeddings=False)
    parts = ["has no tensor lm_head.weight", "AutoModelForCausalLM, not AutoModel", "tie_word_embeddings to true"]
    refused(folder, MissingWeights, *parts)
    refused(renamed(folder, lambda name: name.removeprefix("model.")), MissingWeights, *parts)


@pytest.mark.parametrize("counts", [[100], [3, 97], [20, 20, 60]])
def test_shards_without_an_index_are_read(counts: list[int], folder: Path) -> None:
    wanted = logits(folder)
    files = cut(folder, counts)
    assert torch.equal(logits(folder), wanted)
    for file in files if len(files) > 1 else ():
        content = file.read_bytes()
        file.unlink()
        refused(folder, MissingWeights, f"{file.name} is missing: download it again")
        file.write_bytes(content)
    files[0].with_name("model-00001-of-00009.safetensors").write_bytes(files[0].read_bytes())
    refused(folder, MissingWeights, "of different checkpoints: remove")


def test_all_missing_shards_are_counted_and_a_broken_off_download_is_known(folder: Path) -> None:
    first, second, third = cut(folder, [20, 20, 60])
    second.unlink()
    first.unlink()
    refused(folder, MissingWeights, f"{first.name} is missing, and 1 more of 3 are too: download it again")
    names = [path.name for path in (first, second, third)]
    index = {"weight_map": {f"t{i}": name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    refused(folder, MissingWeights, f"{first.name} is missing, and 1 more of 3 are too: download it again")
    part = folder / ".cache" / "huggingface" / "download" / "aWQ.0123.incomplete"
    part.parent.mkdir(parents=True)
    part.touch()
    refused(folder, MissingWeights, "is missing, .* download was interrupted, as aWQ.* shows: repeat it")


def test_a_similar_name_is_not_taken_for_a_quantised_format() -> None:
    assert foreign_tensors(["visual.trunk_blocks.0.weight", "model.scales_head.weight"]) is None


@pytest.mark.parametrize("part", TENSORS)
def test_quantised_tensors_are_recognised_by_their_names(part: str, folder: Path) -> None:
    """Also where config.json does not say how they are quantised."""
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = torch.zeros(172, 8, dtype=torch.int32)  # as MLX packs them, under the weight's own name
    tensors[f"{name.removesuffix('.weight')}{part}{'weight' if part.endswith('.') else ''}"] = torch.ones(3)
    save_file(tensors, folder / "model.safetensors")
    cure = "merge it into its base" if part == ".lora_A." else "use the float16 or bfloat16 original"
    refused(folder, UnsupportedModel, f"its tensors are {re.escape(TENSORS[part])}.*: {cure}")


def test_tensor_names_of_each_quantising_program_are_recognised(folder: Path) -> None:
    """All of a layer's names together, since programs share some of them."""
    layouts = {
        "GPTQ or AWQ": ("qweight", "qzeros", "scales", "g_idx"),
        "bitsandbytes": ("weight", "weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"),
        "FP8 in blocks": ("weight", "weight_scale_inv"),
        "MLX": ("weight", "scales", "biases"),
        "compressed-tensors": ("weight_packed", "weight_scale", "weight_shape", "weight_g_idx"),
    }
    plain = load_file(folder / "model.safetensors")
    for program, ends in layouts.items():
        added = {f"model.layers.0.mlp.up_proj.{end}": torch.ones(4) for end in ends}
        save_file(plain | added, folder / "model.safetensors")
        refused(folder, UnsupportedModel, f"quantised (by|to) {program}, as names")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"quantization": {"group_size": 64, "bits": 4}}, ["quantization is .*by MLX are not read: use the float16"]),
        ({"compression_config": {"quant_method": None}}, ["quant_method is None; supported are awq, "]),
        ({"quantization_config": [4]}, ["quantization_config is .*; it must be an object"]),
    ],
)
def test_quantised_checkpoints_are_recognised_by_their_configuration(
    config: dict[str, Any], parts: list[str], folder: Path
) -> None:
    refused(configured(folder, **config), UnsupportedModel, *parts)


@pytest.mark.parametrize(
    ("architecture", "part", "inner"),
    [
        ("PaliGemmaForConditionalGeneration", "text_config", "gemma2"),
        ("Llama4ForConditionalGeneration", "text_config", "llama4_text"),
        ("Qwen2_5_VLForConditionalGeneration", "text_config", "qwen2_5_vl_text"),
        ("InternVLChatModel", "llm_config", "qwen2"),
        ("Qwen2_5OmniModel", "thinker_config", "qwen2_5_omni_thinker"),
    ],
)
def test_the_error_for_multi_part_models_names_the_parts(
    architecture: str, part: str, inner: str, folder: Path
) -> None:
    """Their configurations have no key of a language model at the top."""
    values = {"architectures": [architecture], "model_type": "vlm", part: {"model_type": inner, "vocab_size": 9}}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    refused(
        folder, UnsupportedModel, architecture, f"multimodal model, whose {part} is of type '{inner}'; supported are"
    )


def test_a_sentence_transformers_model_that_is_no_language_model_is_named_as_such(folder: Path) -> None:
    (folder / "modules.json").write_text("[]", encoding="utf-8")
    assert Blueprint.of(str(folder)).config.family == "llama"  # some say text as well
    configured(folder, architectures=["BertModel"])
    refused(
        folder, UnsupportedModel, r"architectures is \['BertModel'\]; the folder is a model of sentence-transformers"
    )


OTHER_FORMATS = {
    "mmproj-f16.gguf": r"has mmproj-f16\.gguf, the image encoder of a model: name",
    "modules.json": r"sentence-transformers, which computes embeddings: choose",
    "model_index.json": r"pipeline of diffusers",
    "pytorch_model-00001-of-00002.bin": r"has pytorch_model.*AutoModelForCausalLM.*save_pretrained",
    "consolidated.00.pth": r"publisher's own layout, which is not supported: use the version",
    "model.onnx": r"has model\.onnx, and weights in this format are not supported: use the version in safetensors",
    "flax_model.msgpack": "weights in this format are not supported",
    "model.pt": "weights in this format are not supported",
    "weights.safetensors": r"has weights\.safetensors but no model\.safetensors: rename it",
    "model.safetensors.incomplete": "lacks files whose download was interrupted, as model.*incomplete shows: repeat it",
    "model.safetensors.aria2": "download was interrupted",
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_the_error_for_a_folder_names_what_it_holds(name: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_text("{}", encoding="utf-8")
    refused(folder, MissingWeights, OTHER_FORMATS[name])
    (folder / "config.json").unlink()
    refused(folder, ModelNotFound, r"has no config\.json and (has|is|lacks)", OTHER_FORMATS[name])


def test_an_adapter_names_its_base(folder: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    values = {"base_model_name_or_path": "owner/base", "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file({"base_model.model.model.layers.0.q.lora_A.weight": torch.ones(2)}, folder / "adapter_model.safetensors")
    refused(folder, ModelNotFound, r"is an adapter \(LoRA\) of 'owner/base', and adapters are not supported: merge it")


BEGINNINGS = {
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n": "is a pointer of Git LFS.*git lfs pull",
    b"<!DOCTYPE html>\n<html></html>": "is a web page and not the file itself: download the file",
    b"GGUF\x03\0\0\0": "is a GGUF file with another name: let its name end in .gguf",
    b"PK\x03\x04" + bytes(60): "is an archive of torch.save",
}


@pytest.mark.parametrize("content", BEGINNINGS, ids=lambda content: str(content[:4]))
@pytest.mark.parametrize(
    ("name", "error"), [("model.safetensors", MissingWeights), ("config.json", ModelError)], ids=lambda name: str(name)
)
def test_the_error_for_a_wrong_file_names_what_it_is(
    name: str, error: type[ModelError], content: bytes, folder: Path
) -> None:
    (folder / name).write_bytes(content)
    refused(folder, error, re.escape(str(folder / name)), BEGINNINGS[content])


def test_a_gguf_file_in_place_of_a_folder_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"GGUF\x03")
    refused(tmp_path / "model", ModelNotFound, "is a GGUF file with another name")


@pytest.mark.parametrize("content", BEGINNINGS, ids=lambda content: str(content[:4]))
def test_a_tokenizer_that_was_not_fetched_is_named_as_such(content: bytes, folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json {BEGINNINGS[content]}"):
        Tokenizer.load(folder)
