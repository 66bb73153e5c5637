"""Checkpoints made by the package `speculators`, and what it computes with them; only its own Python can run this.

    python tests/heads/package.py [NAME]...

writes the folders below tests/data/speculators anew: tiny EAGLE-3 and P-EAGLE checkpoints of random weights, saved by
the package (0.9.0), each with `expected.safetensors`: states of a target, tokens, and the package's logits for them.
`logits_of` and `guesses_of` are used by tests as well, where the package is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

DATA = Path(__file__).resolve().parent.parent / "data"
FOLDER = DATA / "speculators"
TARGET = DATA / "stories260k"
HIDDEN, VOCAB, DRAFT_VOCAB, TAPS, LENGTH = 64, 512, 60, (1, 2, 4), 8
LAYER = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {  # by the family of the layer
    "llama": {"norm_before_residual": True, "norm_before_fc": True},
    "qwen3": {"fc_norm": True, "norm_output": True},
    "peagle": {"norm_before_fc": True, "mask_token_id": 7, "num_hidden_layers": 2},
}
ANCHORS, DEPTHS = (2, 4), 4  # where drafts of P-EAGLE begin, and how many guesses they have


def logits_of(model: Any, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a model of the package says behind each place, and behind the next token after each; [places, tokens]."""
    found: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _module, _inputs, output: found.append(output[0].float()))
    documents = torch.zeros(1, len(tokens), dtype=torch.long)
    with torch.no_grad():
        model(states.flatten(1)[None], tokens[None], documents, ttt_steps=2)
    handle.remove()
    return found[0], found[1]


def guesses_of(model: Any, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What a P-EAGLE of the package says behind each place, and of the guesses behind ANCHORS; [anchors, guesses, ids].

    Its pass over drafts that begin at random places is given these.
    """
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core

    found: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _module, _inputs, output: found.append(output[0].float()))
    places = torch.arange(len(tokens))
    anchors = torch.cat([places, torch.tensor(ANCHORS).repeat(DEPTHS - 1)])
    depths = torch.cat([torch.zeros_like(places), torch.arange(1, DEPTHS).repeat_interleave(len(ANCHORS))])
    sampled, core.generate_cod_sample_indices = core.generate_cod_sample_indices, lambda **_: (anchors, depths)
    documents, nothing = torch.zeros(1, len(tokens), dtype=torch.long), torch.zeros(1, len(tokens), HIDDEN)
    wanted = {"verifier_last_hidden_states": nothing, "loss_config": resolve_loss_config("kl_div", "eager")}
    with torch.no_grad():
        model(states.flatten(1)[None], tokens[None], documents, num_depths=DEPTHS, **wanted)
    handle.remove()
    core.generate_cod_sample_indices = sampled
    first, rest = found[0][: len(tokens)], found[0][len(tokens) :].view(DEPTHS - 1, len(ANCHORS), -1).transpose(0, 1)
    return first, torch.cat([first[list(ANCHORS)][:, None], rest], dim=1)


def load(folder: Path) -> Any:
    """A checkpoint as the package loads it, with attention that a CPU computes."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def make(name: str, options: dict[str, Any]) -> None:
    """One of the checkpoints, with weights that are numbers of float16, in which they are stored."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    parallel, family = name == "peagle", Qwen3Config if name == "qwen3" else LlamaConfig
    own = {key: options.pop(key) for key in LAYER if key in options}
    layer = family(**LAYER | own, attn_implementation="eager")
    told = SpeculatorsConfig(
        algorithm="peagle" if parallel else "eagle3",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = (PEagleSpeculatorConfig if parallel else Eagle3SpeculatorConfig)(
        transformer_layer_config=layer,
        speculators_config=told,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=list(TAPS),
        **options,
    )
    model = (PEagleDraftModel if parallel else Eagle3DraftModel)(config).eval()
    dice = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for tensor in model.parameters():
            centre = 1.0 if tensor.dim() == 1 else 0.0
            spread = 0.2 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
            tensor.copy_((centre + spread * torch.randn(tensor.shape, generator=dice)).half())
    ids = torch.randperm(VOCAB, generator=dice)[:DRAFT_VOCAB].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    model.load_vocab_mappings(mask, ids - torch.arange(DRAFT_VOCAB))
    states = torch.randn(LENGTH, len(TAPS), HIDDEN, generator=dice)
    tokens = torch.randint(VOCAB, (LENGTH,), generator=dice)
    first, second = (guesses_of if parallel else logits_of)(model, states, tokens)
    folder = FOLDER / name
    model.half().save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # the package's own source, which it adds
    save_file({"states": states, "tokens": tokens, "first": first, "second": second}, folder / "expected.safetensors")


if __name__ == "__main__":
    for each, chosen in CHECKPOINTS.items():
        if sys.argv[1:] and each not in sys.argv[1:]:
            continue
        make(each, chosen)
        sys.stdout.write(f"{FOLDER / each}\n")
