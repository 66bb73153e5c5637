"""Proofs on a user's own model that speculation does not change the output: `prove(llm, prompts) -> ProofReport`."""

from forerun.prove.proof import ProofReport, prove
from forerun.prove.workload import ProofWorkload

__all__ = ["ProofReport", "ProofWorkload", "prove"]
