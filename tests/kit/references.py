"""The parts of a decoder layer in a few lines of torch, over an entire text: a reference for computed layers."""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gain


def rotated(x: Tensor, first: int = 0) -> Tensor:
    """Rotary embedding for positions from `first` on; `x` is [positions, heads, head_dim]."""
    positions, width = first + torch.arange(len(x)), x.shape[-1]
    angles = positions[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    cos, sin = (torch.cat([f(angles)] * 2, dim=-1)[:, None] for f in (torch.cos, torch.sin))
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-other, one], dim=-1) * sin


def attention(w: dict[str, Tensor], place: str, x: Tensor, heads: int, kv_heads: int) -> Tensor:
    """The output of causal self-attention, which is added to the stream."""
    q, k, v = (x @ w[f"{place}self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k, v = q.view(len(x), heads, -1), k.view(len(x), kv_heads, -1), v.view(len(x), kv_heads, -1)
    k, v = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (rotated(k), v))
    q, k, v = (each.transpose(0, 1) for each in (rotated(q), k, v))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(0, 1).flatten(1) @ w[f"{place}self_attn.o_proj.weight"].T


def with_mlp(w: dict[str, Tensor], place: str, x: Tensor) -> Tensor:
    """The stream after the MLP."""
    inner = rms_norm(x, w[f"{place}post_attention_layernorm.weight"])
    gate, up = (inner @ w[f"{place}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (functional.silu(gate) * up) @ w[f"{place}mlp.down_proj.weight"].T
