"""Trained drafters for tests, with no training: output matrices fitted by least squares to what the target says."""

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.llm import LLM
from forerun.models.decoder import rms_norm
from forerun.models.eagle import EagleDecoder, plan_layer
from forerun.models.loading import Blueprint
from forerun.models.runner import Read
from forerun.sampling.params import SamplingParams

PROMPTS = ("Once upon a time", "Lily and Tom went to the park", "The", "One day, a big dog", "She said", "They")


@cache
def texts(source: Path) -> list[list[int]]:
    """What the target writes."""
    params = [SamplingParams(temperature=t, seed=t, max_tokens=150, ignore_eos=True) for t in (0, 1) for _ in PROMPTS]
    found = LLM(str(source), dtype="float32").generate([*PROMPTS, *PROMPTS], params)
    return [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in found]


@cache
def states(source: Path) -> list[Tensor]:
    """Its last states in these texts, behind the final norm."""
    runner = Blueprint.of(str(source), dtype="float32").load(4096)
    found = []
    for seq_id, text in enumerate(texts(source)):
        taps = runner.read([Read(seq_id, text)], taps=(-1,)).taps
        assert taps is not None
        found.append(taps[:, 0])
        runner.release([seq_id])
    return found


def written_heads(folder: Path, tensors: dict[str, Tensor], num_heads: int, **keys: object) -> Path:
    """A folder of heads."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": num_heads, **keys}))
    return folder


def heads_of(source: Path, folder: Path, num_heads: int, hydra: bool = False) -> Path:
    """Heads that are right now and then."""
    target = Blueprint.of(str(source), dtype="float32")
    embedding = target.load(64).decoder.embedding
    hidden, vocab = target.config.hidden, target.config.vocab_size
    tensors: dict[str, Tensor] = {}
    for head in range(num_heads):
        pairs = list(zip(texts(source), states(source), strict=True))
        x = torch.cat([own[: len(text) - 2 - head] for text, own in pairs])
        wanted = torch.cat([torch.tensor(text[2 + head :]) for text, _ in pairs])
        if hydra:
            seen = torch.cat([embedding[torch.tensor(text[1 + head : -1])] for text, _ in pairs])
            entry = torch.zeros(hidden, (2 + head) * hidden)
            entry[:, :hidden], entry[:, -hidden:] = torch.eye(hidden), 8 * torch.eye(hidden)  # the last token
            tensors[f"{head}.in.weight"], x = entry, x + 8 * seen
        tensors[f"{head}.0.linear.weight"] = torch.zeros(hidden, hidden)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(hidden)
        sought = 20 * torch.nn.functional.one_hot(wanted, vocab).float()
        tensors[f"{head}.1.weight"] = torch.linalg.lstsq(x, sought).solution.T
    return written_heads(folder, tensors, num_heads, hydra=hydra)


def eagle_of(source: Path, folder: Path, num_ids: int = 400, **keys: object) -> Path:
    """An EAGLE-3 layer of random weights, over the most frequent tokens, whose head is fitted to its outputs."""
    target = Blueprint.of(str(source), dtype="float32")
    hidden, vocab = target.config.hidden, target.config.vocab_size
    said = torch.tensor([token for text in texts(source) for token in text])
    ids = torch.bincount(said, minlength=vocab).argsort(descending=True, stable=True)[:num_ids].sort().values
    config = EAGLE_CONFIG | {"hidden_size": hidden, "vocab_size": vocab, "draft_vocab_size": num_ids} | keys
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {"d2t": ids - torch.arange(num_ids)}
    written_eagle(folder, config, tensors | {"lm_head.weight": torch.zeros(num_ids, hidden)}, hidden, generator)
    layer, host = plan_layer(str(folder), target), target.load(4096)
    runner = layer.load(4096, 512, host.decoder)
    assert isinstance(runner.decoder, EagleDecoder)
    outputs, wanted = [], []
    for seq_id, text in enumerate(texts(source)):
        taps = host.read([Read(seq_id, text)], taps=layer.taps).taps
        assert taps is not None
        read = runner.read([Read(seq_id, text[1:-1])], inputs=runner.decoder.fuse(taps[:-2]))
        outputs.append(rms_norm(read.hidden, runner.decoder.norm, target.config.norm_eps))
        wanted.append(torch.tensor(text[2:]))
        host.release([seq_id])
        runner.release([seq_id])
    sought = 20 * (torch.cat(wanted)[:, None] == ids).float()
    tensors["lm_head.weight"] = torch.linalg.lstsq(torch.cat(outputs), sought).solution.T
    return written_eagle(folder, config, tensors, hidden, torch.Generator().manual_seed(0))


EAGLE_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}


def written_eagle(
    folder: Path, config: dict[str, object], tensors: dict[str, Tensor], hidden: int, generator: torch.Generator
) -> Path:
    """A folder in the authors' layout; tensors that are not given are random."""
    wide = {"q_proj": (64, 2 * hidden), "k_proj": (32, 2 * hidden), "v_proj": (32, 2 * hidden), "o_proj": (hidden, 64)}
    shapes = {f"midlayer.self_attn.{name}.weight": shape for name, shape in wide.items()}
    shapes |= {f"midlayer.mlp.{name}_proj.weight": (96, hidden) for name in ("gate", "up")}
    shapes |= {"midlayer.mlp.down_proj.weight": (hidden, 96), "fc.weight": (hidden, 3 * hidden)}
    drawn = {name: torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in shapes.items()}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    drawn |= {f"midlayer.{name}.weight": torch.ones(hidden) for name in norms} | {"norm.weight": torch.ones(hidden)}
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: tensor.contiguous() for name, tensor in (drawn | tensors).items()}
    save_file(found, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
