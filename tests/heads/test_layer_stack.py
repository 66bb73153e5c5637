"""Layers in training are those of the decoder for every family, or are refused by the family's name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from forerun.errors import UnsupportedModel
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
