"""Rotary tables are those of transformers, bit for bit, for every supported scaling."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forerun.llm import LLM
from forerun.models.config import read_config
from forerun.models.loading import Blueprint
from forerun.models.rope import RopeTables, rope_tables
from kit.reading import threads
from kit.sparse import write_sparse

POSITIONS = 192


def make(rope: dict[str, Any], head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=POSITIONS,
        rope_parameters=rope,
    )


def ours(config: LlamaConfig, length: int | None = None) -> RopeTables:
    """Through config.json, as a checkpoint would come; of an engine for texts of this length."""
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        read = read_config(Path(name))
    length = length or read.max_positions
    return rope_tables(replace(read, max_positions=length, longest_text=length))


def theirs(config: LlamaConfig, length: int = POSITIONS) -> RopeTables:
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(0), torch.arange(length)[None])
    return RopeTables(cos[0], sin[0])


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


THETA = st.sampled_from([500.0, 10_000.0, 1e6])
ORIGINAL = st.sampled_from([16, 24, 64, POSITIONS])
FACTOR = st.floats(1.0, 16.0)
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 24}
ROPES = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("default"), "rope_theta": THETA}),
    st.fixed_dictionaries({"rope_type": st.sampled_from(["linear", "dynamic"]), "rope_theta": THETA, "factor": FACTOR}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "rope_theta": THETA,
            "factor": FACTOR,
            "low_freq_factor": st.sampled_from([0.5, 1.0, 2.0]),
            "high_freq_factor": st.sampled_from([2.5, 4.0, 8.0]),
            "original_max_position_embeddings": ORIGINAL,
        }
    ),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("yarn"),
            "rope_theta": THETA,
            "factor": optional(FACTOR),
            "original_max_position_embeddings": ORIGINAL,
        },
        optional={
            "attention_factor": optional(st.floats(0.5, 2.0)),
            "beta_fast": optional(st.sampled_from([4.0, 32.0, 64])),
            "beta_slow": optional(st.sampled_from([0.5, 1.0, 2])),
            "mscale": optional(st.sampled_from([0.0, 0.7, 1.0])),
            "mscale_all_dim": optional(st.sampled_from([0.0, 0.4, 1.0])),
            "truncate": st.booleans(),
        },
    ),
)


@given(rope=ROPES, head_dim=st.sampled_from([2, 6, 8, 16, 64, 128]))
@example(rope=YARN | {"mscale": 0.7, "mscale_all_dim": 0.4}, head_dim=16)
@example(rope=YARN | {"rope_theta": 500.0, "original_max_position_embeddings": 16_384}, head_dim=16)  # ramps to the end
@settings(max_examples=200, deadline=None)
def test_tables_are_those_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    assume(head_dim > 2 or rope["rope_type"] != "dynamic")  # transformers divides by head_dim - 2
    config = make(rope, head_dim)
    expected, found = theirs(config), ours(config)
    assert found.cos.dtype == found.sin.dtype == torch.float32
    assert found.cos.shape == (POSITIONS, head_dim)
    assert torch.equal(found.cos, expected.cos)
    assert torch.equal(found.sin, expected.sin)


def tables(max_positions: int, tmp_path: Path) -> RopeTables:
    config = json.loads(make({"rope_type": "default", "rope_theta": 1e4}, 8).to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": max_positions}))
    return rope_tables(read_config(tmp_path))


def test_a_position_has_the_same_bits_in_a_table_of_any_length_and_number_of_threads(tmp_path: Path) -> None:
    """A draft model may have fewer positions than its target, and a machine any number of cores."""
    long = tables(20_011, tmp_path)
    for count in (1, 2, 3):
        with threads(count):
            assert torch.equal(tables(20_011, tmp_path).cos, long.cos)
            for length in (1, 7, 33, 4_099):
                short = tables(length, tmp_path)
                assert torch.equal(short.cos, long.cos[:length])
                assert torch.equal(short.sin, long.sin[:length])


def test_no_table_is_shared_out_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first cosine of a process ran on two threads, one of them now and then computed with errors of 1e-4."""
    sizes: list[int] = []
    for name in ("cos", "sin"):
        exact = getattr(torch, name)

        def measured(x: torch.Tensor, exact: Any = exact) -> torch.Tensor:
            sizes.append(x.numel())
            return exact(x)

        monkeypatch.setattr(torch, name, measured)
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64, max_position_embeddings=5000)
    config.architectures = ["LlamaForCausalLM"]
    tables = ours(config)
    assert len(tables.cos) == 5000
    assert sum(sizes) == 2 * 5000 * 32, "all angles went through these functions"
    assert max(sizes) <= 2048


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64} | {
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}


@pytest.mark.parametrize("rope", [LONG, LONG | {"factor": 2.0}, LONG | {"attention_factor": 1.3}], ids=str)
def test_longrope_depends_on_the_context_length(rope: dict[str, Any]) -> None:
    """transformers goes by the text that it reads: here all of one length, which is what an engine is loaded for."""
    config = make(rope, 8)
    for length in (1, 63, 64, 65, POSITIONS):
        expected, found = theirs(config, length), ours(config, length)
        assert torch.equal(found.cos, expected.cos)
        assert torch.equal(found.sin, expected.sin)


def test_longrope_depends_on_the_requested_context_and_not_on_free_memory(tmp_path: Path) -> None:
    """Where a drafter's cache makes the context shorter, tokens are those of plain decoding all the same."""
    asked = Blueprint.of(str(write_sparse(tmp_path, "phi3")))
    whole, shortened = (asked.load(64, max_model_len=length).decoder.rope.cos for length in (None, 48))
    assert torch.equal(shortened, whole[:48])
    short = asked.for_texts(48)
    assert not torch.equal(short.load(64, max_model_len=48).decoder.rope.cos, shortened)
    prints = [LLM(str(tmp_path), max_model_len=length).fingerprint for length in (None, 65, 64, 48)]
    assert prints == [asked.fingerprint(), asked.fingerprint(), short.fingerprint(), short.fingerprint()]
    assert len(set(prints)) == 2


def test_dimensions_without_rotation_are_not_scaled() -> None:
    config = make(LONG | {"attention_factor": 1.5}, 8)
    with tempfile.TemporaryDirectory() as name:
        config.save_pretrained(name)
        found = rope_tables(replace(read_config(Path(name)), head_dim=12, rotary_dim=8))
    assert (found.cos[:, [4, 5, 10, 11]] == 1).all()
    assert torch.equal(found.cos[0, :4], torch.full((4,), 1.5))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_queries_are_scaled_by_kinds_that_use_the_original_context(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "factor": 2.0, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 32}
    config = read_config(write_sparse(tmp_path, "ministral3", rope_parameters=rope))
    tables = rope_tables(config).cos.view(2, config.max_positions, -1)
    grown = 1 + 0.3 * torch.log(1 + torch.arange(config.max_positions) // 32)
    assert torch.allclose(tables[1], tables[0] * grown[:, None])
