"""Block drafters made by the package `speculators`, and what it computes with them; only its own Python can run this.

    python tests/heads/package_block.py

writes dflash, dspark and dflash2 below tests/data/speculators anew, as `package.py` does for EAGLE-3. Beside each stand
states of a target, tokens, and what the package's drafter says in the blocks that begin at two of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from heads.package import DRAFT_VOCAB, FOLDER, HIDDEN, LAYER, TARGET, VOCAB

TAPS, LENGTH, BLOCK, ANCHORS = (1, 4), 12, 4, (3, 7)
SPARK = {"sample_from_anchor": True, "markov_rank": 8}
CHECKPOINTS: dict[str, dict[str, Any]] = {  # by type
    "dflash": {"draft_vocab_size": DRAFT_VOCAB, "layers": 2},
    "dspark": {"draft_vocab_size": DRAFT_VOCAB, "layers": 1, **SPARK},
    "dflash2": {
        "draft_vocab_size": VOCAB,
        "layers": 1,
        "selector_rank": 8,
        "selector_top_k": 6,
        "conv_kernel_size": 1,
        "conv_group_size": HIDDEN,
    },
}


def said(model: Any, states: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """The logits of a model of the package in the blocks, behind the true tokens; [anchors, places, tokens].

    Of a dflash2 they are those of the candidates, and -inf elsewhere; of a dspark there is the `confidence` too.
    """
    allowed = torch.zeros(1, len(tokens)).index_fill_(1, torch.tensor(ANCHORS), 1)
    nothing = torch.zeros(1, len(tokens), HIDDEN)
    documents = torch.zeros(1, len(tokens), dtype=torch.long)
    with torch.no_grad():
        hidden, logits, _, _, places = model._backbone_forward(
            states.flatten(1)[None], tokens[None], allowed, nothing, documents, max_anchors=len(ANCHORS)
        )
        hidden, logits = (t.view(len(ANCHORS), BLOCK, -1) for t in (hidden, logits))
        before = tokens[places].view(len(ANCHORS), BLOCK)
        if not model.config.sample_from_anchor:
            before = torch.cat([before[:, :1], before[:, :-1]], dim=1)
        if getattr(model, "candidate_selector", None) is not None:
            chosen, scores = model.candidate_selector.select(logits, hidden, before)
            return {"logits": torch.full_like(logits, -torch.inf).scatter(-1, chosen, scores)}
        if getattr(model, "markov_head", None) is None:
            return {"logits": logits}
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
        read = torch.cat([hidden, model.markov_head.prev_embeddings(before)], dim=-1)
        return {"logits": logits, "confidence": model.confidence_head(read).sigmoid()}


def make(kind: str, layers: int, **options: Any) -> None:
    """One of the checkpoints, with weights that are numbers of float16, in which they are stored."""
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    layer = Qwen3Config(**{**LAYER, "num_hidden_layers": layers}, attn_implementation="eager")
    told = SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    config = SpeculatorModelConfig.registry[kind](
        transformer_layer_config=layer,
        speculators_config=told,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=list(TAPS),
        mask_token_id=7,
        **options,
    )
    model = SpeculatorModel.registry[kind](config).eval()
    dice, embedding = torch.Generator().manual_seed(len(kind)), load_file(TARGET / "model.safetensors")
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "_conv." in name:
                continue
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            spread = 0.2 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
            tensor.copy_((centre + spread * torch.randn(tensor.shape, generator=dice)).half())
        model.embed_tokens.weight.copy_(embedding["model.embed_tokens.weight"])
        if not model.use_draft_vocab:
            model.lm_head.weight.copy_(embedding["model.embed_tokens.weight"])
    if model.use_draft_vocab:
        ids = torch.randperm(VOCAB, generator=dice)[:DRAFT_VOCAB].sort().values
        mask = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
        model.load_vocab_mappings(mask, ids - torch.arange(DRAFT_VOCAB))
    states = torch.randn(LENGTH, len(TAPS), HIDDEN, generator=dice)
    tokens = torch.randint(VOCAB, (LENGTH,), generator=dice)
    found = said(model, states, tokens)
    folder = FOLDER / kind
    model.half().save_pretrained(folder)
    for path in folder.glob("*.py"):  # the package's own source, which it adds
        path.unlink()
    save_file({"states": states, "tokens": tokens, **found}, folder / "expected.safetensors")


if __name__ == "__main__":
    for each, chosen in CHECKPOINTS.items():
        make(each, **chosen)
        sys.stdout.write(f"{FOLDER / each}\n")
