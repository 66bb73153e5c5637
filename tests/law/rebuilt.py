"""Whether a drafter's drafts and state equal those that it has after observing the committed tokens at once."""

from collections.abc import Iterator
from dataclasses import is_dataclass

from torch import Tensor

from forerun.cache.prefix import PrefixStore
from forerun.draft.base import Drafter
from forerun.draft.text.suffix_past import PastAnswers


def reachable(value: object, seen: set[int] | None = None) -> Iterator[object]:
    """A drafter and all objects that can be reached from it."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, Tensor | str | type):
        return
    seen.add(id(value))
    yield value
    parts: Iterator[object] = iter(())
    if isinstance(value, dict):
        parts = iter([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple | set | frozenset):
        parts = iter(value)
    elif is_dataclass(value) or type(value).__module__.startswith("forerun."):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        in_slots = [getattr(value, name) for name in slots if hasattr(value, name)]
        parts = iter([*in_slots, *getattr(value, "__dict__", {}).values()])
    for part in parts:
        yield from reachable(part, seen)


def size_of(drafter: object) -> int:
    """Entries of all containers that can be reached from a drafter: what grows when something is remembered."""
    return sum(len(part) for part in reachable(drafter) if isinstance(part, dict | list | tuple | set | frozenset))


def without_past(drafter: Drafter) -> Drafter:
    """Past answers and blocks are kept on purpose, up to a size (test_suffix_past, test_prefix); nothing else is."""
    for past in [part for part in reachable(drafter) if isinstance(part, PastAnswers | PrefixStore)]:
        past.clear()
    return drafter
