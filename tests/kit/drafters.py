"""What most drafters of tests are but for their guesses."""

from collections.abc import Sequence

from forerun.draft.base import Committed, Outlook


class Stateless:
    """Keeps nothing of what it is told, and has room for any guess."""

    taps: tuple[int, ...] = ()
    names: tuple[str, ...] = ("stateless",)

    def observe(self, news: Committed) -> None: ...

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return Outlook([0] * len(seq_ids), [99] * len(seq_ids))

    def forget(self, seq_ids: Sequence[int]) -> None: ...
