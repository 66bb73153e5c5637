"""prove: runs a workload on a loaded model and reports the result.

This file decides the order of the parts. The caller loads the model and its drafter once; speculation is switched on
and off per request.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.annotations import ProgressCallback
from forerun.config import Speculation
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.prove.equality import prove_equality
from forerun.prove.law import prove_laws
from forerun.prove.report import Environment, ProofReport
from forerun.prove.workload import ProofWorkload
from forerun.request import Prompt, Request


def prove(
    llm: LLM, prompts: Sequence[Prompt], workload: ProofWorkload | None = None, progress: ProgressCallback | None = None
) -> ProofReport:
    """Prove on this model that speculation does not change its output.

    `llm` has a drafter and nothing under way; its verification does not matter, all three are tried. Each prompt is
    text or token ids. Takes as long as the workload asks for; `progress` is told of "equality" and "law". Raises
    InvalidRequest where nothing would be proven.
    """
    workload = workload or ProofWorkload()
    if llm.drafter is None:
        raise InvalidRequest("draft", "there is none, so there is nothing to compare: name a drafter, such as 'ngram'")
    if not prompts:
        raise InvalidRequest("prompts", "there are none: give at least one")
    given = [tuple(llm.requests.prompt_tokens(Request.of(prompt))) for prompt in prompts[: workload.num_prompts]]
    asked = [given[i % len(given)] for i in range(workload.num_prompts)]
    report = progress or (lambda _what, _done: None)
    equality = prove_equality(llm, asked, workload, report)
    laws = prove_laws(llm, given, workload, report)
    return ProofReport(Environment.of(llm), workload, equality, laws)


def largest_shape(workload: ProofWorkload) -> Speculation:
    """The shape to plan an LLM's memory for."""
    return max(workload.shapes, key=lambda shape: shape.depth * shape.width)
