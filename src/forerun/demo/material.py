"""The material of the demo: prompts, and a pair of models, as trained or widened to a realistic ratio of costs.

This file decides the sizes of the models and where the prompts come from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from forerun.annotations import ProgressCallback
from forerun.draft.spec import parse_spec
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.models.bundled import BUNDLED, BUNDLED_NAMES, DRAFT, TARGET
from forerun.models.config import amount
from forerun.models.loading import Blueprint
from forerun.models.widen import Wider, cached_widened

TARGET_PARAMETERS, DRAFT_PARAMETERS = 500_000_000, 21_000_000


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A beginning of code, the file it is from, and what guesses how it goes on: "model" or "ngram"."""

    path: str
    drafter: str
    text: str


def load_prompts() -> Sequence[DemoPrompt]:
    """The demo's prompts, from files of the standard library that no bundled model was trained on."""
    text = resources.files("forerun").joinpath("bundled/stdlib/prompts.json").read_text(encoding="utf-8")
    return [DemoPrompt(**prompt) for prompt in json.loads(text)["prompts"]]


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft model, by folder or bundled name."""

    target: str = TARGET
    draft: str = DRAFT

    @classmethod
    def widened(cls, progress: ProgressCallback | None = None) -> Pair:
        """The bundled pair widened, made at first use: the same texts at the costs of larger models."""
        return cls(widen(TARGET, TARGET_PARAMETERS, progress), widen(DRAFT, DRAFT_PARAMETERS, progress))

    @property
    def title(self) -> str:
        """The name of the pair, which says if a model is widened."""
        return f"target {title(self.target)}, draft {title(self.draft)}"

    def load(self, depth: int, progress: ProgressCallback | None = None) -> LLM:
        """Both models, ready to guess `depth` tokens per round."""
        draft = f"model:{self.draft}"  # both sides of a race read their prompts, so nothing is kept
        return LLM(self.target, draft, speculation=depth, max_num_seqs=1, prefix_cache=False, progress=progress)


def widen(name: str, num_parameters: int, progress: ProgressCallback | None) -> str:
    """The folder of a bundled model at another size."""
    wider = Wider.of(Blueprint.of(name).config, num_parameters)
    return str(cached_widened(name, wider, progress))


def widened_pair(target: str, draft: str, progress: ProgressCallback | None) -> tuple[str, str]:
    """The folder of a bundled target and the drafter to it at the demo's sizes; a drafter without a model stays.

    Raises InvalidRequest for models that are not bundled.
    """
    spec = parse_spec(draft)
    if target not in BUNDLED or spec.argument not in (None, *BUNDLED):
        raise InvalidRequest("widen", f"{target} drafted by {draft} is not of the bundled models {BUNDLED_NAMES}.")
    if spec.argument is not None:
        draft = f"{spec.name}:{widen(spec.argument, DRAFT_PARAMETERS, progress)}"
    return widen(target, TARGET_PARAMETERS, progress), draft


def title(model: str) -> str:
    """A checkpoint's name and size."""
    plan = Blueprint.of(model)
    return plan.config.widened or f"{plan.name} ({amount(plan.num_bytes // plan.dtype.itemsize)} parameters)"
