"""Stage 4: the results for the model card: held-out loss, acceptance of each pair, and whether greedy text loops.

Everything is measured with the rounded weights that ship, and on the target's own continuations of held-out code,
because drafters have to predict such texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import LlamaForCausalLM

from forerun import LLM, SamplingParams
from forerun.train.objective import LawPair

NUM_PROMPTS, NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 24, 96, 128
NGRAM = 8


@dataclass(frozen=True, slots=True)
class PairFigures:
    """How well `draft` predicts `target`: the mean of sum min(p, q) at temperature 1, and equal argmaxes at 0."""

    target: str
    draft: str
    acceptance: float
    greedy_agreement: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The measured figures of the card. Losses are in nats per token, for windows of 256 and of 1,024 tokens."""

    parameters: Mapping[str, int]
    loss: Mapping[str, float]
    loss_long: Mapping[str, float]
    pairs: Sequence[PairFigures]
    distinct_ngrams: Mapping[float, float]  # by temperature: the share of 8-grams that did not occur before


def measure(folders: Mapping[str, Path], held_out: Tensor, bos: int, pairs: Sequence[tuple[str, str]]) -> Figures:
    """The figures of checkpoints by name; "target" writes the texts. `held_out` is a 1-D stream of tokens."""
    models = {name: LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32) for name, folder in folders.items()}
    texts = {temperature: write(folders["target"], held_out, temperature, bos) for temperature in (0.0, 1.0)}
    return Figures(
        parameters={name: sum(p.numel() for p in model.parameters()) for name, model in models.items()},
        loss={name: held_out_loss(model, held_out, 256, bos) for name, model in models.items()},
        loss_long={name: held_out_loss(model, held_out, 1024, bos) for name, model in models.items()},
        pairs=[compare(target, draft, models, texts) for target, draft in pairs],
        distinct_ngrams={temperature: distinct(rows) for temperature, rows in texts.items()},
    )


@torch.inference_mode()
def held_out_loss(model: nn.Module, tokens: Tensor, context: int, bos: int) -> float:
    """Cross-entropy of every held-out token once, in windows of `context` that begin with `<s>`."""
    total = 0.0
    for part in tokens.split(context):
        window = torch.cat([torch.tensor([bos]), part])
        logits = model(window[None, :-1]).logits[0]
        total += float(F.cross_entropy(logits, window[1:], reduction="sum"))
    return total / len(tokens)


def write(target: Path, held_out: Tensor, temperature: float, bos: int) -> Tensor:
    """The target's continuations of held-out prompts, prompts included.  # [NUM_PROMPTS, tokens]"""
    stride = (len(held_out) - NUM_PROMPT_TOKENS) // NUM_PROMPTS
    prompts = [[bos, *held_out[i * stride : i * stride + NUM_PROMPT_TOKENS].tolist()] for i in range(NUM_PROMPTS)]
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
        for i in range(NUM_PROMPTS)
    ]
    results = LLM(str(target), max_num_seqs=NUM_PROMPTS, max_model_len=512).generate(prompts, params)
    return torch.tensor([[*r.prompt_token_ids, *r.outputs[0].token_ids] for r in results])


@torch.inference_mode()
def compare(target: str, draft: str, models: Mapping[str, nn.Module], texts: Mapping[float, Tensor]) -> PairFigures:
    """Acceptance over all generated positions of the sampled texts, and agreement over those of greedy texts."""

    def continued(name: str, temperature: float) -> Tensor:
        logits: Tensor = models[name](texts[temperature][:, :-1]).logits
        return logits[:, NUM_PROMPT_TOKENS:].flatten(0, 1)  # from the first sampled token on, since <s> comes first

    agree = continued(target, 0.0).argmax(-1) == continued(draft, 0.0).argmax(-1)
    following = texts[1.0][:, 1 + NUM_PROMPT_TOKENS :].flatten()
    laws = LawPair(continued(target, 1.0).log_softmax(-1), continued(draft, 1.0).log_softmax(-1), following)
    return PairFigures(target, draft, float(laws.overlap.mean()), float(agree.float().mean()))


def distinct(rows: Tensor) -> float:
    """The share of each continuation's 8-grams that did not occur in it before."""
    new = rows[:, -NUM_NEW_TOKENS:].tolist()
    grams = [[tuple(row[i : i + NGRAM]) for i in range(len(row) - NGRAM + 1)] for row in new]
    return sum(len(set(each)) for each in grams) / sum(len(each) for each in grams)
