"""What most drafters of tests are but for their guesses."""

from collections.abc import Sequence

from forerun.draft.base import Committed, Outlook
from forerun.draft.many.cascade import MeasuredLengths


class Stateless:
    """Keeps nothing of what it is told, and has room for any guess."""

    taps: tuple[int, ...] = ()
    names: tuple[str, ...] = ("stateless",)

    def observe(self, committed: Committed) -> None: ...

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return Outlook([0] * len(seq_ids), [99] * len(seq_ids))

    def forget(self, seq_ids: Sequence[int]) -> None: ...


class FixedLength(MeasuredLengths):
    """Always as many guesses for the judge of a cascade: drafts then follow from the text in rejection modes, too."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def best(self, seq_ids: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        return [min(self.length, each) for each in most]
