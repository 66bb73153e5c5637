"""An MTP module made by the package `speculators`, and what it computes with it; only its own Python can run this.

    python tests/heads/package_mtp.py

writes tests/data/speculators/mtp anew, as `package.py` does for EAGLE-3. Beside it stand states of a target, tokens,
and what the package's module says at each place of them, and then at each place with its own output for a state.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from heads.package import FOLDER, HIDDEN, LAYER, LENGTH, TARGET, VOCAB

NAME, STEPS, TABLE = "mtp", 2, "model.embed_tokens.weight"
PLACES = LENGTH - STEPS - 1  # that have a token further on for every step


def logits_of(model: Any, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a model of the package says at both steps; [places, tokens]."""
    with torch.no_grad():
        found = model(tokens[None], states[None])[0]
    return found[0][0].float(), found[1][0].float()


def with_the_targets_tables(model: Any) -> Any:
    """The model with the embedding and the head of the target, which its folder does not hold."""
    table = load_file(TARGET / "model.safetensors")[TABLE]
    with torch.no_grad():
        for own in (model.embed_tokens.weight, model.lm_head.weight):
            own.copy_(table)
    return model


def load(folder: Path) -> Any:
    """A checkpoint as the package loads it, with attention that a CPU computes."""
    from speculators import SpeculatorModelConfig
    from speculators.models.mtp import MTPDraftModel

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    config.speculators_config.proposal_methods[0].speculative_tokens = STEPS
    config.speculators_config.verifier.name_or_path = None
    model = MTPDraftModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    return with_the_targets_tables(model)


def make() -> Path:
    """The checkpoint, with weights that are numbers of float16, in which they are stored."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    told = SpeculatorsConfig(
        algorithm=NAME,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    layer = Qwen3Config(**{**LAYER, "num_hidden_layers": 5}, attn_implementation="eager")
    model = MTPDraftModel(MTPSpeculatorConfig(transformer_layer_config=layer, speculators_config=told)).eval()
    dice = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            spread = 0.2 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
            tensor.copy_((centre + spread * torch.randn(tensor.shape, generator=dice)).half())
    with_the_targets_tables(model)
    del model.verifier_lm_head  # as the package does once it has read the tables of a target
    states = torch.randn(LENGTH, HIDDEN, generator=dice)
    tokens = torch.randint(VOCAB, (LENGTH,), generator=dice)
    first, second = logits_of(model, states, tokens)
    folder = FOLDER / NAME
    model.half().save_pretrained(folder)
    for path in folder.glob("*.py"):  # the package's own source, which it adds
        path.unlink()
    save_file({"states": states, "tokens": tokens, "first": first, "second": second}, folder / "expected.safetensors")
    return folder


if __name__ == "__main__":
    sys.stdout.write(f"{make()}\n")
