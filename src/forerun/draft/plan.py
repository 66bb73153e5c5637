"""The plan of a drafter before it is loaded: the memory that it needs, and how to build it.

Each drafter's file has the function that plans its specification; `forerun/drafters.py` has the table of these
functions. Planning loads no weights, because the engine divides the memory after planning and before building.
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
    """The target that drafters are planned for, and its tokenizer. `taken` are the cache names already in use."""

    target: Blueprint
    tokenizer: Tokenizer
    progress: ProgressCallback | None = None
    taken: Collection[str] = ()

    def unused(self, name: str) -> str:
        """The name, numbered if it is taken: one checkpoint may be used twice."""
        return free_name(name, self.taken)


CacheTokens = Mapping[str, int]
Build = Callable[[CacheTokens, ProgressCallback | None, Runner], Drafter | None]
BuildJudge = Callable[[CacheTokens, ProgressCallback | None, Runner], Judge]


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A drafter that was found and checked but not loaded, with the numbers that the memory plan needs.

    `models` has an entry for each model that the drafter loads, by the name of the model's KV cache. `build` loads the
    models, given the capacity of each of these caches in tokens, a progress callback, and the loaded target. A drafter
    may share the target's weights and cache, and then works only in engines on that runner. With a cache of 0 tokens it
    never drafts. `build_judge` builds the drafter as a judge for a cascade; None if it cannot judge. `fingerprint`
    identifies the weights; it is empty without weights.

    `remembered_bytes` is the host memory requested for past answers, by name; `build` gets the granted sizes in the
    mapping of cache capacities. `num_members` is the number of drafters whose trees may be merged.
    """

    models: Mapping[str, ModelMemory]
    build: Build
    fingerprint: Callable[[], str] = str
    build_judge: BuildJudge | None = None
    remembered_bytes: Mapping[str, int] = field(default_factory=dict)
    num_members: int = 1


PlanMember = Callable[[DraftSpec, DraftContext], DraftPlan]


def member_plans(spec: DraftSpec, context: DraftContext, plan: PlanMember) -> list[DraftPlan]:
    """The plans of the specification's members, with distinct cache names."""
    plans: list[DraftPlan] = []
    for member in spec.members:
        plans.append(plan(member, context))
        context = replace(context, taken=(*context.taken, *plans[-1].models, *plans[-1].remembered_bytes))
    return plans


def joined_plans(plans: Sequence[DraftPlan], build: Build) -> DraftPlan:
    """The plan of a drafter made of these, with the memory of all and the given `build`."""
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
    """Raise UnknownDrafter for an object that is not a drafter for a target of `num_layers` layers."""
    if isinstance(drafter, type):
        problem = f"is a class: pass an instance, as in {drafter.__name__}()"
    elif problem := problem_of(drafter, num_layers):
        problem = f"is neither a specification, such as 'ngram', nor a Drafter: {problem}"
    else:
        return
    raise UnknownDrafter(f"draft: {shown(drafter)} {problem}.")


def problem_of(drafter: Drafter, num_layers: int) -> str:
    """Why an object is not a drafter for a target of `num_layers` layers; empty if it is one."""
    missing = [name for name in vars(Drafter) if not (name.startswith("_") or hasattr(drafter, name))]
    if missing:
        return f"it has no {', '.join(missing)}"
    if not (is_sequence(drafter.names, str) and drafter.names):
        return f"its names, {shown(drafter.names)}, must be a tuple of strings, such as ('phrases',)"
    if not (is_sequence(drafter.taps, int) and all(-1 <= tap <= num_layers for tap in drafter.taps)):
        return f"its taps, {shown(drafter.taps)}, must be a tuple of numbers from -1 to {num_layers}"
    if drafter.taps and not isinstance(drafter, StateDrafter):
        return "with taps it needs the method adoptable; one that returns 0 is enough"
    return ""


def is_sequence(value: object, kind: type) -> bool:
    """Whether the value is a tuple or a list of items of this kind."""
    return isinstance(value, tuple | list) and all(isinstance(each, kind) for each in value)


def refuse_members(spec: DraftSpec) -> None:
    """Raise UnknownDrafter if the specification has members; for drafters that are not made of others."""
    if spec.members:
        refuse(spec, f"it takes no list of drafters; write {spec.name} alone")


def refuse(spec: DraftSpec, fix: str) -> NoReturn:
    """Raise UnknownDrafter for this specification, with the fix."""
    raise UnknownDrafter(f"drafter {str(spec)!r}: {fix}")
