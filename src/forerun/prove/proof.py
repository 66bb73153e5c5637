"""`prove`: runs a workload on a loaded model, and reports what was proven, what was not, and on which machine.

The model and its drafter are loaded once; speculation is switched on and off per request. A report contains no times or
other values that vary between runs, so that the same seed gives the same report.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from forerun import __version__
from forerun.annotations import ProgressCallback
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.prove.chi_square import LEVEL
from forerun.prove.equality import Equality, prove_equality
from forerun.prove.law import LawResult, choose_openings, prove_laws
from forerun.prove.workload import ProofWorkload
from forerun.report import json_object
from forerun.request import Prompt, Request


@dataclass(frozen=True, slots=True)
class Environment:
    """The model, machine and versions of a proof. Equal fingerprints give equal tokens."""

    model: str
    draft: str
    fingerprint: str
    dtype: str
    device: str
    kernels: str
    forerun: str
    torch: str
    python: str

    @classmethod
    def of(cls, llm: LLM) -> Environment:
        """The environment of a loaded model."""
        return cls(
            model=llm.name,
            draft=llm.draft_name,
            fingerprint=llm.fingerprint,
            dtype=llm.format,
            device=llm.engine.runner.device.type,
            kernels=llm.kernels,
            forerun=__version__,
            torch=torch.__version__,
            python=platform.python_version(),
        )


@dataclass(frozen=True, slots=True)
class ProofReport:
    """The results of all tests. `holds` only if every test passed."""

    place: Environment
    workload: ProofWorkload
    equality: Equality
    laws: tuple[LawResult, ...]

    @property
    def holds(self) -> bool:
        """Whether every test passed."""
        return self.equality.same_tokens and self.equality.same_logits and all(law.holds for law in self.laws)

    @property
    def proven(self) -> list[str]:
        """What this run proves, as phrases."""
        sentences, e = [], self.equality
        if e.same_tokens:
            same = "the same tokens and log-probabilities" if not e.differences else "the same tokens up to rounding"
            sentences.append(f"coupled verification gave {same} as plain decoding, for all requests of this test")
        if e.same_logits and e.exact_backend:
            sentences.append("the target's logits do not depend on chunking and batching, for two of the texts")
        for rule in dict.fromkeys(law.verification for law in self.laws):
            laws = [law for law in self.laws if law.verification == rule]
            if all(law.holds and law.num_drafted for law in laws):
                least = max(law.smallest_bias for law in laws)
                sentences.append(
                    f"{rule} verification samples from the target's distribution: probabilities that differ by "
                    f"{least:.0%} or more would be detected in 95 of 100 runs"
                )
        return sentences

    @property
    def not_proven(self) -> list[str]:
        """What this run does not prove, as phrases."""
        phrases = [
            "other prompts, lengths, sampling parameters, batch sizes and draft shapes: --thorough tests more of them",
            "other machines, versions, weights and number formats: the fingerprint identifies those of this run",
            "token and block verification after the first tokens of a text, and smaller biases, which need more texts",
        ]
        rules = dict.fromkeys(law.verification for law in self.laws if not law.num_drafted)
        return phrases + [f"{rule} verification: no tokens were drafted in one of its tests" for rule in rules]

    def as_object(self) -> dict[str, Any]:
        """The report as JSON, with null for non-finite numbers."""
        values = json_object(
            holds=self.holds, level=LEVEL, **asdict(self), proven=self.proven, not_proven=self.not_proven
        )
        values["equality"] |= {"same_tokens": self.equality.same_tokens, "same_logits": self.equality.same_logits}
        for entry, law in zip(values["laws"], self.laws, strict=True):
            entry["holds"] = law.holds
        return values


def prove(
    llm: LLM, prompts: Sequence[Prompt], workload: ProofWorkload | None = None, progress: ProgressCallback | None = None
) -> ProofReport:
    """Prove on this model that speculation does not change its output.

    `llm` has a drafter and no open requests; all three kinds of verification are tested. Each prompt is text or token
    ids. `progress` is called with "equality" and "distribution". Raises InvalidRequest if nothing would be proven.
    """
    workload = workload or ProofWorkload()
    if llm.drafter is None:
        raise InvalidRequest(
            "draft", "it is missing, and without a drafter nothing can be compared: name one, such as 'ngram'"
        )
    if not prompts:
        raise InvalidRequest("prompts", "the list is empty: give at least one prompt")
    prompt_ids = [tuple(llm.requests.prompt_tokens(Request.of(prompt))) for prompt in prompts[: workload.num_prompts]]
    repeated = [prompt_ids[i % len(prompt_ids)] for i in range(workload.num_prompts)]
    report = progress or (lambda _what, _done: None)
    openings = choose_openings(llm, prompt_ids, workload)  # first, since it raises if the tests would be too small
    equality = prove_equality(llm, repeated, workload, report)
    laws = prove_laws(llm, openings, workload, report)
    return ProofReport(Environment.of(llm), workload, equality, laws)
