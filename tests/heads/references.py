"""The forms of heads that tests make, and reference implementations from the papers over entire texts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import override

from forerun.sampling.params import SamplingParams
from heads.adapters import other_family_adapter
from heads.modules import apart
from heads.trained import block_of, eagle_of, first_eagle_of, heads_of
from kit.checkpoints import EMBEDDING, TARGET, read_json
from kit.references import attention, rms_norm, rotated, with_mlp

HEADS, KV_HEADS, HEAD_DIM, LAYERS, DEPTH = 4, 2, 16, 2, 4
OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
Reference = Callable[[list[int], Tensor], list[int]]  # (text, states of all but its last token) -> draft tokens


class EagleReference:
    """EAGLE-3 over an entire text, as the paper and the options of `speculators` define it."""

    def __init__(self, folder: Path) -> None:
        self.w, self.table = load_file(folder / "model.safetensors"), load_file(TARGET / "model.safetensors")[EMBEDDING]
        config = read_json(folder / "config.json")
        self.options = {name for name in OPTIONS if config.get(name)}

    def fused(self, taps: Tensor) -> Tensor:
        """The target's states, joined into one vector per position."""
        if "fc_norm" in self.options:
            gains = torch.stack([self.w[f"fc_norm.{tap}.weight"] for tap in range(3)])
            taps = rms_norm(taps, gains)
        joined = taps.flatten(1)
        joined = rms_norm(joined, self.w["input_norm.weight"]) if "norm_before_fc" in self.options else joined
        return joined @ self.w["fc.weight"].T

    def output(self, embedded: Tensor, states: Tensor) -> Tensor:
        """The layer's output, which later draft tokens read."""
        normed = rms_norm(states, self.w["midlayer.hidden_norm.weight"])
        read = torch.cat([rms_norm(embedded, self.w["midlayer.input_layernorm.weight"]), normed], -1)
        residual = normed if "norm_before_residual" in self.options else states
        x = with_mlp(self.w, "midlayer.", residual + attention(self.w, "midlayer.", read, HEADS, KV_HEADS))
        return rms_norm(x, self.w["norm.weight"]) if "norm_output" in self.options else x

    def token(self, output: Tensor) -> int:
        """The likeliest token."""
        x = output if "norm_output" in self.options else rms_norm(output, self.w["norm.weight"])
        best = int((self.w["lm_head.weight"] @ x).argmax())
        return best + int(self.w["d2t"][best])

    def draft_tokens(self, text: list[int], taps: Tensor) -> list[int]:
        """The likeliest chain after `text`; `taps` are the target's states of all its tokens but the last."""
        states, tokens, found = self.fused(taps), text[1:], list[int]()
        for _ in range(DEPTH):
            out = self.output(self.table[torch.tensor(tokens)], states)[-1]
            found.append(self.token(out))
            tokens, states = [*tokens, found[-1]], torch.cat([states, out[None]])
        return found


class FirstEagleReference(EagleReference):
    """EAGLE-1 and EAGLE-2: embedding and state through one map, no norm before attention, the target's head."""

    @override
    def fused(self, taps: Tensor) -> Tensor:
        return taps[:, 0]

    @override
    def output(self, embedded: Tensor, states: Tensor) -> Tensor:
        x = torch.cat([embedded, states], -1) @ self.w["fc.weight"].T + self.w.get("fc.bias", torch.zeros(1))
        return with_mlp(self.w, "layers.0.", x + attention(self.w, "layers.0.", x, HEADS, KV_HEADS))

    @override
    def token(self, output: Tensor) -> int:
        return int((self.table @ output).argmax())


def block_states(w: dict[str, Tensor], places: Tensor, taps: Tensor, causal: bool) -> Tensor:
    """The normed states of a block's positions: `places` are embeddings, `taps` the states of all text before it."""
    context = rms_norm(taps.flatten(1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    x, root, count = places, len(taps), len(places)
    for layer in range(LAYERS):
        own = {name.removeprefix(f"layers.{layer}."): t for name, t in w.items() if name.startswith(f"layers.{layer}.")}
        inner = rms_norm(x, own["input_layernorm.weight"])
        q = (inner @ own["self_attn.q_proj.weight"].T).view(-1, HEADS, HEAD_DIM)
        both = torch.cat([context, inner])
        k, v = ((both @ own[f"self_attn.{name}_proj.weight"].T).view(-1, KV_HEADS, HEAD_DIM) for name in "kv")
        q = rotated(rms_norm(q, own["self_attn.q_norm.weight"]), root)
        k = rotated(rms_norm(k, own["self_attn.k_norm.weight"]), 0)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for t in (k, v))
        scores = q.transpose(0, 1) @ k.mT / math.sqrt(HEAD_DIM)
        if causal:
            scores = scores.masked_fill(torch.ones(count, root + count).triu(root + 1).bool(), -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + mixed @ own["self_attn.o_proj.weight"].T
        inner = rms_norm(x, own["post_attention_layernorm.weight"])
        gate, up = (inner @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ own["mlp.down_proj.weight"].T
    return rms_norm(x, w["norm.weight"])


def block_draft(
    w: dict[str, Tensor], config: dict[str, Any], embedding: Tensor, text: list[int], taps: Tensor
) -> tuple[list[int], list[float]]:
    """The likeliest block after `text`, and the confidence in each token; `taps` are of all but its last token."""
    inside = config["dflash_config"]
    assert isinstance(inside, dict)
    fields = config | inside
    mask = w["mask_embedding"] if "mask_embedding" in w else embedding[int(str(fields["mask_token_id"]))]
    places = torch.stack([embedding[text[-1]], *[mask] * (int(str(fields["block_size"])) - 1)])
    states = block_states(w, places, taps, bool(fields.get("causal")))
    states = states if fields.get("sample_from_anchor") else states[1:]
    head, ids = w.get("lm_head.weight", embedding), torch.arange(len(embedding))
    if "d2t" in w:
        ids = torch.arange(len(head)) + w["d2t"]
    before, draft_tokens, chances = text[-1], list[int](), list[float]()
    for state in states:
        logits = head @ state
        if "markov_head.markov_w1.weight" in w:
            logits = logits + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][before]
        if "candidate_selector.predecessor_codebook" in w:
            candidates = logits.topk(int(str(fields["selector_top_k"]))).indices
            weighed = w["candidate_selector.predecessor_codebook"][before] * (
                w["candidate_selector.hidden_projection.weight"] @ state
            )
            pairs = w["candidate_selector.successor_codebook"][candidates] @ weighed
            best = int(candidates[(logits[candidates] + pairs).argmax()])
        else:
            best = int(ids[logits.argmax()])
        if "confidence_head.proj.weight" in w:
            read = torch.cat([state, w["markov_head.markov_w1.weight"][before]])
            chances.append(float((w["confidence_head.proj.weight"] @ read + w["confidence_head.proj.bias"]).sigmoid()))
        draft_tokens.append(best)
        before = best
    return draft_tokens, chances


def block(folder: Path) -> Reference:
    """The reference of a block drafter."""
    weights, config = load_file(folder / "model.safetensors"), read_json(folder / "config.json")
    table = load_file(TARGET / "model.safetensors")[EMBEDDING]
    return lambda text, taps: block_draft(weights, config, table, text, taps)[0]


def medusa(folder: Path) -> Reference:
    """The reference of Medusa heads; hydra's draft one after the other."""
    weights, table = load_file(folder / "model.safetensors"), load_file(TARGET / "model.safetensors")[EMBEDDING]

    def draft_tokens(text: list[int], taps: Tensor) -> list[int]:
        drafted: list[int] = []
        for head in range(3):
            x = taps[-1, 0]
            if f"{head}.in.weight" in weights:
                seen = table[torch.tensor([text[-1], *drafted])].flatten()
                x = weights[f"{head}.in.weight"] @ torch.cat([x, seen])
            drafted.append(int((weights[f"{head}.1.weight"] @ x).argmax()))
        return drafted

    return draft_tokens


def eagle(folder: Path) -> Reference:
    """The reference of an EAGLE-3 layer."""
    return EagleReference(folder).draft_tokens


def first_eagle(folder: Path) -> Reference:
    """The reference of an EAGLE-1 layer."""
    return FirstEagleReference(folder).draft_tokens


GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
CAUSAL = {"num_ids": 512, "causal": True, "sample_from_anchor": True, "mask_token_id": 7}
SPARK = {"markov_rank": 32, "enable_confidence_head": True, "sample_from_anchor": True}


@dataclass(frozen=True)
class Form:
    """A form of heads: how a folder is made and spelled, its reference, depth and least acceptance."""

    spelled: str
    make: Callable[[Path], Path]
    reference: Callable[[Path], Reference] | None = None
    depth: int = 4
    least: int = 20


FORMS = {
    "medusa": Form("medusa:{}", partial(heads_of, TARGET, num_heads=3), medusa, 3),
    "hydra": Form("medusa:{}", partial(heads_of, TARGET, num_heads=3, hydra=True), medusa, 3),
    "eagle-3": Form("eagle:{}", partial(eagle_of, TARGET), eagle, least=40),
    "normed": Form("eagle:{}", partial(eagle_of, TARGET, norm_before_residual=True, norm_before_fc=True), eagle),
    "eagle-3.1": Form("eagle:{}", partial(eagle_of, TARGET, fc_norm=True, norm_output=True), eagle),
    "eagle-1": Form("eagle:{}", partial(first_eagle_of, TARGET), first_eagle),
    "eagle-1 without bias": Form("eagle:{}", partial(first_eagle_of, TARGET, bias=False), first_eagle),
    "dflash": Form("block:{}", partial(block_of, TARGET, num_ids=400), block),
    "dspark": Form("block:{}", partial(block_of, TARGET, **SPARK), block),  # type: ignore[arg-type]
    "causal": Form("block:{}", partial(block_of, TARGET, **CAUSAL), block),  # type: ignore[arg-type]
    "selector": Form("block:{}", partial(block_of, TARGET, selector_rank=32, selector_top_k=200), block),
    "mtp": Form("mtp:{}", partial(apart, TARGET, num_modules=1, naming="mimo"), depth=5),
    "mtp of 3": Form("mtp:{}", partial(apart, TARGET, num_modules=3, naming="mimo"), depth=5),
    "adapter": Form("early-exit:2:{}", partial(other_family_adapter, exit_layer=2)),
}
