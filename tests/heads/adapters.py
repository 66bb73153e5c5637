"""Adapter folders for tests: layers of the target, layers that add nothing, layers of another family.

And requests for drafters that exit early, with an adapter and without.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from draft.rounds import Row, committed, draws_of
from forerun.config import Speculation
from forerun.draft.base import Budget, Drafter
from forerun.engine.engine import Engine
from forerun.engine.sequence import Sequence as TextSequence
from forerun.fields import read_fields
from forerun.models.config import config_of
from forerun.models.projections import tensor_shapes
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from kit.assertions import assert_same
from kit.checkpoints import written
from kit.texts import VOCAB, random_text
from law.fuzz import Bench, run

OTHER_FAMILY = {  # another family, and other heads, widths and positions than any target of the tests
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": True, "hidden_size": 64, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 100, "rms_norm_eps": 1e-6, "rope_theta": 5000.0,
}  # fmt: skip
LONG_ONLY = [pytest.param(numbers, marks=pytest.mark.full) for numbers in ("int8", "float16", "float32 by torch")]
FORMATS = ("float32", "bfloat16", "int4", "bfloat16 by torch", *LONG_ONLY)
SHAPES = {
    "chains": (Speculation(2), Speculation(5), Speculation(4)),
    "trees": (Speculation(3, 2, 7),),
    "mixed": (Speculation(1), Speculation(3, 3, 9), Speculation(6), Speculation(2, 2)),
}
Benches = Callable[[str], Bench]
QUIET = ("self_attn.o_proj", "mlp.down_proj")


def adapter_of(source: Path, folder: Path, exit_layer: int, layers: range, norm: bool = False) -> Path:
    """Layers of a checkpoint as an adapter, with or without its norm."""
    tensors, chosen = load_file(source / "model.safetensors"), {}
    for i, layer in enumerate(layers):
        prefix = f"model.layers.{layer}."
        chosen |= {f"model.layers.{i}.{n.removeprefix(prefix)}": t for n, t in tensors.items() if n.startswith(prefix)}
    if norm:
        chosen["model.norm.weight"] = tensors["model.norm.weight"]
    config = json.loads((source / "config.json").read_text())
    for key in ("vocab_size", "rms_norm_eps", "max_position_embeddings", "eos_token_id"):
        config.pop(key, None)  # the target's
    return written(folder, config | {"num_hidden_layers": len(layers), "exit_layer": exit_layer}, chosen)


def silent_adapter(folder: Path, exit_layer: int) -> Path:
    """An adapter whose layer adds nothing to its input."""
    config = OTHER_FAMILY | {"num_hidden_layers": 1, "exit_layer": exit_layer, "rms_norm_eps": 1e-5}
    tensors = random_tensors(config, folder)
    del tensors["model.norm.weight"]
    return written(folder, config, {n: t * (not any(quiet in n for quiet in QUIET)) for n, t in tensors.items()})


def other_family_adapter(folder: Path, exit_layer: int, layers: int = 1, **keys: object) -> Path:
    """An adapter of random layers with another shape than the target's, and a norm."""
    config = OTHER_FAMILY | {"num_hidden_layers": layers, "exit_layer": exit_layer} | keys
    return written(folder, config, random_tensors(config, folder))


def random_tensors(config: Mapping[str, object], folder: Path) -> dict[str, Tensor]:
    """Random weights for this configuration that change a state about as much as a trained layer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config) | {"vocab_size": 1, "max_position_embeddings": 1}))
    dice = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(config_of(read_fields(folder / "config.json")))
    tensors = {n: torch.randn(s, generator=dice) * 0.1 + ("norm" in n) for n, s in shapes.items()}
    return {n: t for n, t in tensors.items() if n not in ("model.embed_tokens.weight", "lm_head.weight")}


def assert_same_drafts(ours: Drafter, theirs: Drafter, rng: random.Random, num_rounds: int) -> int:
    """Assert that two drafters draft the same to the bit, after any history; the number of draft tokens."""
    texts, num_drafted = {seq_id: random_text(3 + 20 * seq_id, seq_id) for seq_id in range(4)}, 0
    news = committed([Row(s, t) for s, t in texts.items()])
    for number in range(num_rounds):
        for drafter in (ours, theirs):
            drafter.observe(news)
        rows = [Row(s, list(texts[s])) for s in rng.sample(sorted(texts), rng.randint(1, 4))]
        budgets = [Budget(rng.randint(0, 5), 1 if number % 3 else 2, rng.randint(4, 9)) for _ in rows]
        draws = draws_of(rows, VOCAB, temperature=rng.choice([0.0, 1.0]), rejection=number % 4 == 3)
        found = ours.propose(draws, budgets)
        assert_same(found, theirs.propose(draws, budgets))
        num_drafted += int(found.tree.valid.sum()) - len(rows)
        for i, row in enumerate(rows):
            chain = [token for token in found.tree.tokens[i, 1:].tolist() if token >= 0]
            texts[row.seq_id] += [*chain[: rng.randint(0, len(chain))], rng.randrange(3, VOCAB)]
        news = committed([Row(r.seq_id, texts[r.seq_id]) for r in rows], [len(r.text) - 1 for r in rows])
    return num_drafted


def some_texts(bench: Bench, engine: Engine, count: int, shapes: Sequence[Speculation]) -> list[TextSequence]:
    """Requests of several lengths, greedy and sampled in turn; with many shapes some have more parameters."""
    rng, texts, requests = random.Random(count), list[TextSequence](), bench.requests()
    for i in range(count):
        more: dict[str, Any] = {"repetition_penalty": 1.2, "top_k": 20} if i % 4 == 3 and len(shapes) > 3 else {}
        params = SamplingParams(temperature=i % 2, seed=i, max_tokens=20, ignore_eos=True, **more)
        speculation = shapes[i % len(shapes)] if engine.drafter else Speculation(0)
        texts += requests.sequences(Request.of(random_text(rng.choice([1, 2, 30, 70]), i), params, speculation))
    return texts


def plain(bench: Bench, count: int, shapes: Sequence[Speculation]) -> list[list[int]]:
    """The tokens of these requests by plain decoding."""
    engine = bench.engine()
    return run(engine, some_texts(bench, engine, count, shapes))
