"""The plan of a drafter before it is loaded: the memory that it needs, and how to build it.

Each drafter's file makes the plan of its own specification; `forerun/drafters.py` has the table of them. Memory is
planned between planning and building, so planning loads no weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

from forerun.annotations import ProgressCallback
from forerun.cache.plan import ModelMemory
from forerun.draft.base import Drafter, Judge, StateDrafter
from forerun.draft.spec import DraftSpec
from forerun.errors import UnknownDrafter
from forerun.limits import shown
from forerun.models.loading import Blueprint
from forerun.models.runner import Runner
from forerun.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DraftContext:
    """The target that drafters are planned for, and its tokenizer. `taken` are the names of caches that are in use."""

    target: Blueprint
    tokenizer: Tokenizer
    progress: ProgressCallback | None = None
    taken: Collection[str] = ()

    def unused(self, name: str) -> str:
        """The name, numbered if it is taken, because one checkpoint may be used twice."""
        return free_name(name, self.taken)


CacheTokens = Mapping[str, int]
Build = Callable[[CacheTokens, ProgressCallback | None, Runner], Drafter | None]
BuildJudge = Callable[[CacheTokens, ProgressCallback | None, Runner], Judge]


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A drafter that was found and checked but not loaded, with the numbers that the memory plan needs.

    `models` has an entry for every model that it loads, by the name of the model's KV cache. `build` loads them, given
    how many tokens each of these caches may hold, a progress callback, and the loaded target, whose weights and cache
    the drafter may share and whose positions limit the text: it then works only in engines on that runner. A cache of 0
    tokens gives a drafter that never drafts. `fingerprint` identifies its weights; empty without weights. `build_judge`
    loads it as one that can judge others in a cascade; None if it cannot. `remembered_bytes` is the host memory that it
    wants for past texts, by name; `build` gets the granted size together with the tokens. `num_members` is the number
    of drafters that may share one tree.
    """

    models: Mapping[str, ModelMemory]
    build: Build
    fingerprint: Callable[[], str] = str
    build_judge: BuildJudge | None = None
    remembered_bytes: Mapping[str, int] = field(default_factory=dict)
    num_members: int = 1


PlanMember = Callable[[DraftSpec, DraftContext], DraftPlan]


def member_plans(spec: DraftSpec, context: DraftContext, plan: PlanMember) -> list[DraftPlan]:
    """The plans of this drafter's members, with distinct cache names."""
    plans: list[DraftPlan] = []
    for member in spec.members:
        plans.append(plan(member, context))
        context = replace(context, taken=(*context.taken, *plans[-1].models, *plans[-1].remembered_bytes))
    return plans


def joined_plans(plans: Sequence[DraftPlan], build: Build) -> DraftPlan:
    """The joint plan of several drafters."""
    return DraftPlan(
        models={name: model for plan in plans for name, model in plan.models.items()},
        build=build,
        fingerprint=lambda: " ".join(filter(None, (plan.fingerprint() for plan in plans))),
        remembered_bytes={name: most for plan in plans for name, most in plan.remembered_bytes.items()},
    )


def free_name(name: str, taken: Collection[str]) -> str:
    """The name, with a number if it is taken."""
    numbered = (f"{name} ({i})" for i in itertools.count(2))
    return name if name not in taken else next(each for each in numbered if each not in taken)


def check_drafter(drafter: Drafter, num_layers: int) -> None:
    """Raise UnknownDrafter for an object that is no drafter for a target of so many layers."""
    lacking = [part for part in vars(Drafter) if not (part.startswith("_") or hasattr(drafter, part))]
    if lacking:
        problem = f"nor a Drafter: it has no {lacking[0]}"
    elif isinstance(drafter, type):
        problem = f"but a class: give an object of it, as in {drafter.__name__}()"
    elif not (is_sequence(drafter.names, str) and drafter.names):
        problem = f"nor a Drafter: its names, {shown(drafter.names)}, must be a tuple of strings, such as ('phrases',)"
    elif not (is_sequence(drafter.taps, int) and all(-1 <= tap <= num_layers for tap in drafter.taps)):
        problem = f"nor a Drafter: its taps, {shown(drafter.taps)}, must be a tuple of numbers from -1 to {num_layers}"
    elif drafter.taps and not isinstance(drafter, StateDrafter):
        problem = "nor a Drafter: with taps it needs the method adoptable; one that returns 0 is enough"
    else:
        return
    raise UnknownDrafter(f"draft: {shown(drafter)} is neither a specification, such as 'ngram', {problem}.")


def is_sequence(value: object, kind: type) -> bool:
    """Whether the value is a tuple or a list of such items."""
    return isinstance(value, tuple | list) and all(isinstance(each, kind) for each in value)


def refuse_members(spec: DraftSpec) -> None:
    """Raise UnknownDrafter if the specification has members: for drafters that are not made of others."""
    if spec.members:
        refuse(spec, f"it takes no list of drafters; write {spec.name} alone")


def refuse(spec: DraftSpec, fix: str) -> NoReturn:
    """Raise UnknownDrafter for a drafter's argument, with the form that it should have."""
    raise UnknownDrafter(f"drafter {str(spec)!r}: {fix}")
