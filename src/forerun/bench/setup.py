"""The set-up of a benchmark: it loads models for the texts at hand, and makes a key of all that affects the result.

This file decides for which context length and how many sequences memory is planned. All sequences of a batch must fit
at once, because a batch that waited for room would not have the size that the report names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun import __version__
from forerun.annotations import ProgressCallback
from forerun.bench.material import Passage, Workload, check_lengths, workload_of
from forerun.bench.plan import CHOSEN, Selection
from forerun.bench.run import Stage
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.errors import NotEnoughMemory
from forerun.llm import LLM
from forerun.machine import Machine, sources_digest
from forerun.models.loading import Blueprint
from forerun.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Models:
    """What is measured, as an LLM takes it."""

    target: ModelSpec
    draft: str
    threads: int | None = None

    def draft_fingerprint(self) -> str:
        """What tells the drafter's weights apart from others."""
        target = Blueprint.of(self.target)
        context = DraftContext(target, target.tokenizer())
        return plan_drafter(self.draft, context).fingerprint()

    def load(self, max_model_len: int, selection: Selection, progress: ProgressCallback | None = None) -> LLM:
        """Both models, with room for every batch of the selection. Raises NotEnoughMemory where there is none."""
        batch = max(selection.batches)
        llm = LLM(
            self.target,
            self.draft,
            speculation=selection.wish(CHOSEN if CHOSEN in selection.depths else max(selection.depths)),
            max_model_len=max_model_len,
            max_num_seqs=batch,
            prefix_cache=False,  # the same prompts are read again and again, and are to cost the same each time
            threads=self.threads,
            progress=progress,
        )
        if llm.plan.num_sequences_speculative < batch:
            room = "; ".join(llm.plan.lines())
            raise NotEnoughMemory(f"batch {batch} does not fit: lower --batch, --depth or --max-tokens ({room})")
        return llm


def set_up(
    models: Models,
    passages: Mapping[str, Sequence[Passage]],
    selection: Selection,
    progress: ProgressCallback | None = None,
) -> Stage:
    """The texts as tokens, checked, and the models loaded for them."""
    target = Blueprint.of(models.target, progress)
    tokenizer = target.tokenizer()
    workloads: dict[str, Workload] = {}
    for name, texts in passages.items():
        workloads[name] = workload_of(name, texts, selection.num_prompts, tokenizer)
        check_lengths(workloads[name], selection.num_tokens, target.config.max_positions)
    longest = max(workload.longest(selection.num_tokens) for workload in workloads.values())
    llm = models.load(longest, selection, progress)
    return Stage(llm, workloads, selection.num_tokens, selection.seed, wish=selection.wish)


def about(models: Models, stage: Stage, selection: Selection) -> dict[str, Any]:
    """Everything that decides the result."""
    return {
        "forerun": __version__,
        "sources": sources_digest(),
        "models": {
            "target": stage.llm.name,
            "draft": stage.llm.draft_name,
            "format": stage.llm.format,
            "kernels": stage.llm.kernels,
            "kernels_measured": stage.llm.measured,
            "fingerprint": stage.llm.fingerprint,
            "draft_fingerprint": models.draft_fingerprint(),
        },
        "settings": asdict(selection),
        "machine": asdict(Machine.here()),
        "workloads": {
            name: {"replayed": w.replayed, "num_prompts": len(w.items), "digest": w.digest()}
            for name, w in stage.workloads.items()
        },
    }
