"""Base classes for drafters that tests define."""

from collections.abc import Sequence

from typing_extensions import override

from forerun.draft.base import Committed, Outlook
from forerun.draft.many.cascade import MeasuredLengths


class Stateless:
    """A drafter without state whose outlook allows any depth; subclasses add `propose`."""

    taps: tuple[int, ...] = ()
    names: tuple[str, ...] = ("stateless",)

    def observe(self, committed: Committed) -> None: ...

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return Outlook([0] * len(seq_ids), [99] * len(seq_ids))

    def forget(self, seq_ids: Sequence[int]) -> None: ...


class FixedLength(MeasuredLengths):
    """A fixed draft length in a cascade, so that drafts depend on the text alone in rejection modes, too."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    @override
    def best(self, seq_ids: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        return [min(self.length, each) for each in most]
