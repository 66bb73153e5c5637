"""Workload: how much is run to prove that speculation changes nothing.

This file decides temperatures, batches, draft shapes and sample sizes, and how the engine's verification and batching
are changed for the duration of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from forerun.config import DEFAULT_DEPTH, Speculation, Verification, require_whole
from forerun.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class ProofWorkload:
    """What `prove` runs; everything in it is a function of these numbers.

    Equality: `num_prompts` requests of `max_tokens` tokens (the prompts given, again from the first where there are
    fewer), at every temperature, in every batch size, drafted in every shape. Law: `num_texts` short texts per rule
    and shape, after `num_openings` of the prompts.
    """

    num_prompts: int = 8
    max_tokens: int = 48
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    batches: tuple[int, ...] = (1, 8)
    shapes: tuple[Speculation, ...] = (Speculation(DEFAULT_DEPTH), Speculation(DEFAULT_DEPTH, 2))
    num_texts: int = 1500
    num_openings: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens", "num_texts", "num_openings"):
            require_whole(name, getattr(self, name), 1)
        require_whole("seed", self.seed, 0)

    def thorough(self) -> ProofWorkload:
        """The same with about ten times the work."""
        return replace(
            self,
            num_prompts=4 * self.num_prompts,
            max_tokens=2 * self.max_tokens,
            num_texts=4 * self.num_texts,
            num_openings=3 * self.num_openings,
        )

    @property
    def laws(self) -> list[tuple[Verification, Speculation]]:
        """The rules whose law is tested, each with the shapes that it judges: `block` judges chains alone."""
        chains = [shape for shape in self.shapes if shape.width == 1]
        return [("token", shape) for shape in self.shapes] + [("block", shape) for shape in chains]


@contextmanager
def engine_as(engine: Engine, verification: Verification, max_num_seqs: int) -> Iterator[None]:
    """The same engine, its model and its drafter, judging and batching like this for a while. It must be idle."""
    assert not engine.has_work, "the rule may not change under a sequence that is being generated"
    options, room = engine.options, engine.scheduler.max_num_seqs
    engine.options, engine.scheduler.max_num_seqs = replace(options, verification=verification), max_num_seqs
    try:
        yield
    finally:
        engine.options, engine.scheduler.max_num_seqs = options, room


def shape_name(shape: Speculation) -> str:
    """A draft shape in words."""
    return f"chain of {shape.depth}" if shape.width == 1 else f"tree of depth {shape.depth}, width {shape.width}"
