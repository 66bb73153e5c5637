"""Drafters in training use the same tables and layers of the target as its decoder does, for every family.

Also for families that scale, centre, shift or bound their tables; layers that cannot be used are refused by name.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from forerun.errors import UnsupportedModel
from forerun.heads.fresh import TargetTables
from forerun.heads.trained_layer import LayerStack
from forerun.models.families import FAMILIES
from forerun.models.loading import Blueprint
from forerun.models.projections import EMBEDDING, FINAL_NORM, HEAD
from kit.reading import logits_in_pieces
from kit.sparse import write_architecture
from kit.texts import story

TRAINED = [f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "MiMo", "InternLM3")]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_stack_computes_what_the_decoder_computes_or_is_refused(architecture: str, tmp_path: Path) -> None:
    blueprint = Blueprint.of(str(write_architecture(tmp_path, architecture)), dtype="float32", kernels="torch")
    weights, text = load_file(tmp_path / "model.safetensors"), story(80, 1)
    if architecture not in TRAINED:
        with pytest.raises(UnsupportedModel, match=f"a {blueprint.config.family} with"):
            LayerStack.of(blueprint.config, weights)
        return
    stack = LayerStack.of(blueprint.config, weights)
    states = stack.normed(stack(weights[EMBEDDING][torch.tensor([text])]), FINAL_NORM)
    found = functional.linear(states, weights.get(HEAD, weights[EMBEDDING]))[0]
    torch.testing.assert_close(found, logits_in_pieces(blueprint.load(128), text, [len(text)]), rtol=0, atol=2e-4)


@pytest.mark.short("Gemma2*", "Granite*", "Starcoder2*")
@pytest.mark.parametrize("architecture", FAMILIES)
def test_tables_are_those_of_the_decoder_and_a_part_of_the_head_has_its_logits(
    architecture: str, tmp_path: Path
) -> None:
    folder = write_architecture(tmp_path, architecture, embedding_multiplier=3.0, logits_scaling=4.0)
    target = Blueprint.of(str(folder), dtype="float32", kernels="torch")
    decoder, tables = target.load(64).decoder, TargetTables.of(target)
    assert torch.allclose(tables.embedding, decoder.embedding)
    assert torch.allclose(tables.norm, decoder.norm.float())
    ids = torch.tensor([7, 3, 500])
    assert tables.head.cap == target.config.logits_cap
    states = 3 * torch.randn(5, target.config.hidden, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(target.head_rows(ids)(states), decoder.head(states)[:, ids], atol=1e-4)
    assert torch.allclose(tables.head(states), decoder.head(states), atol=1e-4)
    assert torch.allclose(tables.head[ids](states), decoder.head(states)[:, ids], atol=1e-4)
