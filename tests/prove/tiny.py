"""A pair of random Llamas over twelve tokens, as checkpoints: small enough to be asked thousands of times."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.config import Speculation
from forerun.llm import LLM

VOCAB, HIDDEN, LAYERS, INNER = ["<s>", "</s>", *"abcdefghij"], 32, 2, 64


def weights(generator: torch.Generator) -> dict[str, Tensor]:
    """Random ones, large enough for laws that vary with the text."""

    def matrix(rows: int, columns: int, spread: float = 1.0) -> Tensor:
        return spread * torch.randn(rows, columns, generator=generator) / columns**0.5

    found = {"model.embed_tokens.weight": matrix(len(VOCAB), HIDDEN, 4.0), "model.norm.weight": torch.ones(HIDDEN)}
    found["lm_head.weight"] = matrix(len(VOCAB), HIDDEN, 1.5)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        found |= {f"{layer}self_attn.{name}_proj.weight": matrix(HIDDEN, HIDDEN, 1.5) for name in "qkvo"}
        found |= {f"{layer}mlp.{name}_proj.weight": matrix(INNER, HIDDEN) for name in ("gate", "up")}
        found[f"{layer}mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        found |= {f"{layer}{name}_layernorm.weight": torch.ones(HIDDEN) for name in ("input", "post_attention")}
    return found


def save(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """A Hugging Face folder."""
    config = LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(tensors)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCAB)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def tiny_llm(folder: Path, seed: int = 0) -> LLM:
    """A target, and a drafter that is the target with some noise on its weights."""
    generator = torch.Generator().manual_seed(seed)
    right, noise = weights(generator), weights(generator)
    near = {name: w if "norm" in name else w + 0.3 * noise[name] for name, w in right.items()}
    target, draft = save(folder / "target", right), save(folder / "draft", near)
    return LLM(str(target), f"model:{draft}", speculation=Speculation(3, 2))
