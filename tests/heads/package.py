"""Checkpoints made by the package `speculators`, and what it computes with them; only its own Python can run this.

    python tests/heads/package.py [NAME]...

writes the folders in tests/data/speculators again: tiny checkpoints of random weights, saved by the package (0.9.0),
each with `expected.safetensors`: states of a target, tokens, and the package's outputs for them. Tests use `load` and
`outputs_of`, too, if the package is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DATA = Path(__file__).resolve().parent.parent / "data"
FOLDER, TARGET = DATA / "speculators", DATA / "stories260k"
HIDDEN, VOCAB, DRAFT_VOCAB = 64, 512, 60
LAYER: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
}  # fmt: skip
TAPS, BLOCK_TAPS, BLOCK = (1, 2, 4), (1, 4), 4
EAGLE = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": list(TAPS)}
BLOCKS = {"block_size": BLOCK, "aux_hidden_state_layer_ids": list(BLOCK_TAPS), "mask_token_id": 7}
SPARK = {"sample_from_anchor": True, "markov_rank": 8}
SELECTOR = {"selector_rank": 8, "selector_top_k": 6, "conv_kernel_size": 1, "conv_group_size": HIDDEN}
CHECKPOINTS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {  # the type, fields of the layers, and others
    "llama": ("eagle3", {}, EAGLE | {"norm_before_residual": True, "norm_before_fc": True}),
    "qwen3": ("eagle3", {}, EAGLE | {"fc_norm": True, "norm_output": True}),
    "peagle": ("peagle", {"num_hidden_layers": 2}, EAGLE | {"norm_before_fc": True, "mask_token_id": 7}),
    "dflash": ("dflash", {"num_hidden_layers": 2}, BLOCKS | {"draft_vocab_size": DRAFT_VOCAB}),
    "dspark": ("dspark", {}, BLOCKS | SPARK | {"draft_vocab_size": DRAFT_VOCAB}),
    "dflash2": ("dflash2", {}, BLOCKS | SELECTOR | {"draft_vocab_size": VOCAB}),
    "mtp": ("mtp", {"num_hidden_layers": 5}, {}),
}
ANCHORS, DEPTHS = (2, 4), 4  # where drafts of P-EAGLE begin, and the number of their tokens
BLOCK_ANCHORS, STEPS = (3, 7), 2  # where blocks begin, and how often a module is read
PLACES = 8 - STEPS - 1  # positions that have a token further on for every step of a module
NUM_DRAFTED = {"eagle3": 4, "peagle": 4, "mtp": STEPS}  # else a block
SHAPES = {"eagle3": (8, len(TAPS), HIDDEN), "peagle": (8, len(TAPS), HIDDEN), "mtp": (8, HIDDEN)}  # of states
OF_BLOCKS = (12, len(BLOCK_TAPS), HIDDEN)


def outputs_of(model: Any, states: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """The outputs of a model of the package for these tokens and states: `first` and `second` logits, or `logits`.

    For EAGLE-3 they are those after each position and after the next token; for P-EAGLE the second ones are those of
    the draft tokens after ANCHORS, [anchors, draft tokens, vocab]; for a module they are those of each step.
    """
    kind = model.config.speculators_model_type
    with torch.no_grad():
        if kind == "mtp":
            first, second = (each[0].float() for each in model(tokens[None], states[None])[0])
        elif kind == "peagle":
            first, second = parallel_logits(model, states, tokens)
        elif kind == "eagle3":
            first, second = logits_of_calls(model, states, tokens, ttt_steps=2)
        else:
            return blocks_of(model, states, tokens)
    return {"first": first, "second": second}


def logits_of_calls(model: Any, states: Tensor, tokens: Tensor, **options: Any) -> list[Tensor]:
    """The logits of each call of the head in a training pass of the package."""
    found: list[Tensor] = []
    handle = model.lm_head.register_forward_hook(lambda _module, _inputs, output: found.append(output[0].float()))
    model(states.flatten(1)[None], tokens[None], torch.zeros(1, len(tokens), dtype=torch.long), **options)
    handle.remove()
    return found


def parallel_logits(model: Any, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of a P-EAGLE, whose training pass gets ANCHORS in place of random positions."""
    from speculators.losses import resolve_loss_config
    from speculators.models.peagle import core

    places = torch.arange(len(tokens))
    anchors = torch.cat([places, torch.tensor(ANCHORS).repeat(DEPTHS - 1)])
    depths = torch.cat([torch.zeros_like(places), torch.arange(1, DEPTHS).repeat_interleave(len(ANCHORS))])
    sampled, core.generate_cod_sample_indices = core.generate_cod_sample_indices, lambda **_: (anchors, depths)
    nothing, loss = torch.zeros(1, len(tokens), HIDDEN), resolve_loss_config("kl_div", "eager")
    options = {"num_depths": DEPTHS, "verifier_last_hidden_states": nothing, "loss_config": loss}
    found = logits_of_calls(model, states, tokens, **options)
    core.generate_cod_sample_indices = sampled
    first, rest = found[0][: len(tokens)], found[0][len(tokens) :].view(DEPTHS - 1, len(ANCHORS), -1).transpose(0, 1)
    return first, torch.cat([first[list(ANCHORS)][:, None], rest], dim=1)


def blocks_of(model: Any, states: Tensor, tokens: Tensor) -> dict[str, Tensor]:
    """The logits in the blocks after the true tokens: [anchors, positions, vocab].

    For a dflash2 they are those of the candidates, and -inf elsewhere; for a dspark there is `confidence`, too.
    """
    anchors = len(BLOCK_ANCHORS)
    allowed = torch.zeros(1, len(tokens)).index_fill_(1, torch.tensor(BLOCK_ANCHORS), 1)
    nothing, documents = torch.zeros(1, len(tokens), HIDDEN), torch.zeros(1, len(tokens), dtype=torch.long)
    hidden, logits, _, _, places = model._backbone_forward(
        states.flatten(1)[None], tokens[None], allowed, nothing, documents, max_anchors=anchors
    )
    hidden, logits = (t.view(anchors, BLOCK, -1) for t in (hidden, logits))
    before = tokens[places].view(anchors, BLOCK)
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


def load(folder: Path) -> Any:
    """A checkpoint as the package loads it, with attention that runs on a CPU."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    is_module = config.speculators_model_type == "mtp"
    if is_module:
        config.speculators_config.proposal_methods[0].speculative_tokens = STEPS
        config.speculators_config.verifier.name_or_path = None
    model = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    if is_module:
        give_tables(model, head=True)
    return model


def give_tables(model: Any, head: bool) -> None:
    """Give a model the target's embedding, which its folder need not hold, and its head."""
    table = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    with torch.no_grad():
        for own in (model.embed_tokens.weight, *((model.lm_head.weight,) if head else ())):
            own.copy_(table)


def make(name: str) -> Path:
    """Write one of the checkpoints; its weights are rounded to float16, the format in which they are stored."""
    from speculators import SpeculatorModel, SpeculatorModelConfig
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    kind, layers, options = CHECKPOINTS[name]
    family = LlamaConfig if name in ("llama", "peagle") else Qwen3Config
    speculators_config = SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_DRAFTED.get(kind, BLOCK - 1))],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    layer = family(**{**LAYER, **layers, "attn_implementation": "eager"})
    config = SpeculatorModelConfig.registry[kind](
        transformer_layer_config=layer, speculators_config=speculators_config, **options
    )
    model = SpeculatorModel.registry[kind](config).eval()
    dice = torch.Generator().manual_seed(5 if kind == "mtp" else len(name))
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if "_conv." not in key:
                centre = 1.0 if tensor.dim() == 1 and not key.endswith("bias") else 0.0
                spread = 0.2 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5
                tensor.copy_((centre + spread * torch.randn(tensor.shape, generator=dice)).half())
    some_tokens = options.get("draft_vocab_size", VOCAB) < VOCAB
    if kind not in ("eagle3", "peagle"):
        give_tables(model, head=not some_tokens)
    if kind == "mtp":
        del model.verifier_lm_head  # as the package does once it has read the tables of a target
    if some_tokens:
        ids = torch.randperm(VOCAB, generator=dice)[:DRAFT_VOCAB].sort().values
        mask = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
        model.load_vocab_mappings(mask, ids - torch.arange(DRAFT_VOCAB))
    states = torch.randn(SHAPES.get(kind, OF_BLOCKS), generator=dice)
    tokens = torch.randint(VOCAB, states.shape[:1], generator=dice)
    found, folder = outputs_of(model, states, tokens), FOLDER / name
    model.half().save_pretrained(folder)
    for path in folder.glob("*.py"):  # the package's own source, which it adds
        path.unlink()
    save_file({"states": states, "tokens": tokens, **found}, folder / "expected.safetensors")
    return folder


if __name__ == "__main__":
    for each in sys.argv[1:] or CHECKPOINTS:
        sys.stdout.write(f"{make(each)}\n")
