"""Writes a Llama checkpoint of Hugging Face's layout as GGUF.

    python -m benchmarks.peers.gguf_export FOLDER FILE

This file decides the order of rotary rows and the vocabulary. llama.cpp rotates neighbours where Hugging Face rotates
halves, so the rows of query and key heads are interleaved. Weights keep their bits; norms become float32, which
llama.cpp requires. Its own converter recognises a byte-level tokenizer only by a hash of the tokenizer's output, so the
vocabulary is written here. Other architectures than Llama are refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor


def main(folder: Path, file: Path) -> None:
    """Write the file atomically. Raises SystemExit for other architectures and scaled rotary embeddings."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["architectures"] != ["LlamaForCausalLM"] or config["rope_parameters"]["rope_type"] != "default":
        raise SystemExit(f"{folder}: {config['architectures']} cannot be written; LlamaForCausalLM can")
    partial = file.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    write_shape(writer, config)
    write_vocabulary(writer, folder, config)
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            write_tensor(writer, config, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(file)


def write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the fields of config.json under llama.cpp's names."""
    writer.add_name("widened")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def write_vocabulary(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Write the byte-level tokens and merges of tokenizer.json."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    ids = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    size = config["vocab_size"]
    kinds = [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([ids.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types([kind if i in ids else gguf.TokenType.UNUSED for i, kind in enumerate(kinds)])
    writer.add_token_merges(
        [pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]]
    )
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])


def write_tensor(writer: gguf.GGUFWriter, config: dict[str, Any], name: str, tensor: Tensor) -> None:
    """Write one tensor under llama.cpp's name, with rotary rows in its order."""
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    new = known.get_name(name, (".weight",))
    if new is None or tensor.dtype != torch.bfloat16:
        raise SystemExit(f"{name} is {tensor.dtype}; only a Llama's tensors in bfloat16 are written")
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if part in name:
            tensor = neighbours(tensor, config[heads])
    if tensor.dim() == 1:
        writer.add_tensor(new, tensor.float().numpy())
    else:
        raw = tensor.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(new, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def neighbours(weight: Tensor, num_heads: int) -> Tensor:
    """Each head's rows in the order 0, h, 1, h + 1, ..., where h is half its width: rotated pairs are neighbours."""
    turned: Tensor = weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2)
    return turned.reshape(weight.shape)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
