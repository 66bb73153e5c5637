"""Proofs on a user's own model that speculation does not change what is said: `prove(llm, prompts) -> Report`."""

from forerun.prove.prompts import FilePrompt, read_prompts
from forerun.prove.proof import prove
from forerun.prove.report import Report
from forerun.prove.workload import Workload

__all__ = ["FilePrompt", "Report", "Workload", "prove", "read_prompts"]
