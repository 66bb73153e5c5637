"""The common part of both training stages: windows of tokens, the schedule, optimizers, and checkpoints.

The windows and the learning rate of a step depend only on the seed and the step's number, so that a run that resumes
from a checkpoint takes the same steps as one without an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.store import write_whole
from forerun.train.optimizer import build_optimizers as optimizers_of

CHECKPOINT_EVERY = 100
RECORD = "training.json"


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama of the family. Heads are 64 wide."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps, windows and learning rates. The last `long_share` of the steps has long windows."""

    steps: int
    batch_tokens: int = 4096
    context: int = 256
    long_context: int = 1024
    long_share: float = 0.2
    warmup: int = 100
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    seed: int = 0

    def context_at(self, step: int) -> int:
        """The length of this step's windows, in tokens."""
        return self.long_context if step >= self.steps * (1 - self.long_share) else self.context

    def rate_at(self, step: int) -> float:
        """The share of the full learning rate: linear warm-up, then linear decay to 0."""
        return min((step + 1) / self.warmup, (self.steps - step) / max(1, self.steps - self.warmup))

    def windows(self, tokens: Tensor, step: int, bos: int) -> Tensor:
        """Rows of `<s>` and `context` consecutive tokens of the stream.  # [rows, context + 1]

        Each length has its own order of places, in which every place is read once before any is read again.
        """
        context = self.context_at(step)
        rows, places = self.batch_tokens // context, (len(tokens) - 1) // context
        first = 0 if context == self.context else int(self.steps * (1 - self.long_share))
        numbers = [(step - first) * rows + row for row in range(rows)]
        starts = []
        for number in numbers:
            epoch, index = divmod(number, places)
            order = torch.Generator().manual_seed(self.seed * 1_000_003 + context * 1_009 + epoch)
            shift = int(torch.randint(0, context, (1,), generator=order))
            place = int(torch.randperm(places, generator=order)[index])
            starts.append(min(place * context + shift, len(tokens) - context))
        body = torch.stack([tokens[start : start + context] for start in starts]).long()
        return torch.cat([torch.full((rows, 1), bos), body], dim=1)


def build_llama(shape: Shape, vocab_size: int, seed: int) -> LlamaForCausalLM:
    """An untrained model with tied embeddings; `<s>` is 0 and `</s>` is 1."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def build_optimizers(model: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the gains."""
    return optimizers_of(dict(model.named_parameters()), schedule.adam_rate, schedule.muon_rate)


@dataclass(slots=True)
class Run:
    """A training run on disk: its models, optimizers, progress and losses."""

    path: Path
    models: dict[str, nn.Module]
    optimizers: dict[str, list[torch.optim.Optimizer]]
    step: int = 0
    seconds: float = 0.0
    losses: dict[str, list[float]] = field(default_factory=dict)

    def load(self) -> None:
        """Resume from the checkpoint, if there is one."""
        if not self.path.exists():
            return
        state: dict[str, Any] = torch.load(self.path, weights_only=True)
        self.step, self.seconds, self.losses = state["step"], state["seconds"], state["losses"]
        for name, model in self.models.items():
            model.load_state_dict(state["models"][name])
            for optimizer, saved in zip(self.optimizers[name], state["optimizers"][name], strict=True):
                optimizer.load_state_dict(saved)

    def save(self) -> None:
        """Replace the checkpoint atomically."""
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
            "models": {name: model.state_dict() for name, model in self.models.items()},
            "optimizers": {name: [o.state_dict() for o in each] for name, each in self.optimizers.items()},
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, lambda part: torch.save(state, part))

    def record(self, name: str, schedule: Schedule) -> Record:
        """The record of a model of this run."""
        return Record(self.step, schedule.batch_tokens, self.seconds, self.losses[name])


@dataclass(frozen=True, slots=True)
class Record:
    """How a model was trained, stored next to its weights: steps, tokens per step, time, and losses."""

    steps: int
    batch_tokens: int
    seconds: float
    losses: Sequence[float]

    @staticmethod
    def read(folder: Path) -> Record:
        """The record in a checkpoint's folder. Raises FileNotFoundError if there is none."""
        return Record(**json.loads((folder / RECORD).read_text("utf-8")))

    def write(self, folder: Path) -> None:
        """Write the record to a checkpoint's folder."""
        rounded = [round(loss, 4) for loss in self.losses]
        (folder / RECORD).write_text(json.dumps(asdict(self) | {"losses": rounded}) + "\n", "utf-8")
