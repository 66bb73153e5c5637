"""Writes a Llama checkpoint of Hugging Face's layout as GGUF; runs in llama.cpp's environment.

    python -m benchmarks.peers.gguf_export FOLDER FILE

Decides names, the order of rotary rows and the vocabulary. llama.cpp rotates neighbours where Hugging Face rotates
halves, so the rows of query and key heads are interleaved. Weights keep their bits; norms become float32, as
llama.cpp wants them. Its own converter knows a byte-level tokenizer only by a hash of what it does, so the vocabulary
is written here. Knows no other architecture and refuses it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = "model.layers."
Bits = NDArray[np.uint16]  # bfloat16, which numpy does not know


def main(folder: Path, file: Path) -> None:
    """The whole file; it appears under its name when it is complete."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["architectures"] != ["LlamaForCausalLM"] or config["rope_parameters"]["rope_type"] != "default":
        raise SystemExit(f"{folder}: {config['architectures']} cannot be written; LlamaForCausalLM can")
    partial = file.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    write_shape(writer, config)
    write_vocabulary(writer, folder, config)
    for name, tensor in tensors(folder):
        write_tensor(writer, config, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(file)


def write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What config.json says, in llama.cpp's words."""
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
    """The byte-level tokens and merges of tokenizer.json."""
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


def tensors(folder: Path) -> Iterator[tuple[str, Bits]]:
    """All tensors of all shards, mapped from disk: a safetensors file is a length, a JSON table, and bytes."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as shard:
            length = int.from_bytes(shard.read(8), "little")
            table = json.loads(shard.read(length))
        table.pop("__metadata__", None)
        for name, entry in table.items():
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{path}: {name} is {entry['dtype']}; only BF16 is written")
            first, shape = entry["data_offsets"][0], tuple(entry["shape"])
            yield name, np.memmap(path, np.dtype("<u2"), "r", 8 + length + first, shape)


def write_tensor(writer: gguf.GGUFWriter, config: dict[str, Any], name: str, tensor: Bits) -> None:
    """One tensor under llama.cpp's name and in its order."""
    if name.startswith(LAYER):
        layer, _, inner = name.removeprefix(LAYER).partition(".")
        part = inner.removesuffix(".weight")
        if part == "self_attn.q_proj":
            tensor = neighbours(tensor, config["num_attention_heads"])
        elif part == "self_attn.k_proj":
            tensor = neighbours(tensor, config["num_key_value_heads"])
        new = f"blk.{layer}.{NAMES[part]}.weight"
    else:
        new = TOP[name]
    if tensor.ndim == 1:
        writer.add_tensor(new, (tensor.astype(np.uint32) << 16).view(np.float32))
    else:
        raw = np.ascontiguousarray(tensor).view(np.uint8)
        writer.add_tensor(new, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def neighbours(weight: Bits, num_heads: int) -> Bits:
    """Each head's rows 0, h, 1, h + 1, ... where h is half its width: what is rotated together stands together."""
    rows, width = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, width).swapaxes(1, 2).reshape(rows, width)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
