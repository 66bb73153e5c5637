"""Recovery: what happens after a round that raised an error.

A round may fail because of a drafter, the data of one sequence, or a lack of memory. This file finds the request at
fault and restores a state from which the engine can continue: only the sequences' tokens are kept, and everything else
is recomputed from them. Nothing here runs unless a round has raised.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from forerun.accept.delta import Delta
from forerun.cache.paged import OutOfBlocks
from forerun.config import Speculation
from forerun.device import lacking_operator
from forerun.draft.base import Drafter
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import ActiveSequences, Sequence, Status
from forerun.errors import ForerunError, ModelError, OutOfMemory, RankLost, RequestFailed, RoundFailed
from forerun.guard import attempt, out_of_memory
from forerun.models.runner import Runner

STRIKES = 3  # errors after which a drafter is switched off
PAUSE_S = 0.01  # between two attempts to recover when no request is left
log = logging.getLogger(__name__)


@dataclass(slots=True)
class FaultSearch:
    """The search for the sequence that makes rounds raise; it ends when every suspect is cleared or removed.

    The next rounds run the same sequences without drafting. If that raises too, they run one sequence at a time
    (`alone`), and the one whose round raises again is at fault. A sequence that gains a token is cleared. `error` is
    the first error. `suspects` maps the sequences of the last failed round to their number of tokens; `cleared`:
    whether any of them has been cleared since.
    """

    error: BaseException
    suspects: dict[int, int] = field(default_factory=dict)
    alone: bool = False
    cleared: bool = False

    def suspect(self, sequences: Iterable[Sequence]) -> None:
        """Suspect the sequences of a round that raised."""
        self.suspects = {sequence.id: len(sequence.tokens) for sequence in sequences}

    def clear(self, sequences: Mapping[int, Sequence]) -> bool:
        """Remove suspects that have gained a token or are not in `sequences`; True if none is left."""
        left = {seq_id: count for seq_id, count in self.suspects.items() if seq_id in sequences}
        self.suspects = {seq_id: count for seq_id, count in left.items() if len(sequences[seq_id].tokens) == count}
        self.cleared |= len(self.suspects) < len(left)
        return not self.suspects

    def next_suspect(self, sequences: Mapping[int, Sequence]) -> Sequence | None:
        """The suspect to run alone in the next round; None if all sequences run together."""
        return sequences[next(iter(self.suspects))] if self.alone else None


@runtime_checkable
class Recoverable(Protocol):
    """The interface of an engine that recovery uses."""

    runner: Runner
    drafter: Drafter | None
    drafter_name: str
    scheduler: Scheduler
    active: ActiveSequences

    def remove(self, sequences: Seq[Sequence]) -> None: ...

    def forget(self, sequences: Seq[Sequence]) -> None: ...

    def disable_drafter(self, error: BaseException) -> None: ...


class Recovery:
    """The state of an engine between rounds, and its handling of errors.

    `unfinished`: a round or a cancellation has started and not completed. `strikes`: number of errors of the drafter.
    """

    def __init__(self, engine: Recoverable) -> None:
        self.engine = engine
        self.unfinished = False
        self.search: FaultSearch | None = None
        self.strikes = 0

    @property
    def sequences(self) -> dict[int, Sequence]:
        """The unfinished sequences, by id."""
        return self.engine.active.sequences

    def finish_round(self) -> None:
        """Mark the round as completed, after its deltas were delivered."""
        self.engine.active.decided = None
        self.unfinished = False

    def next_suspect(self) -> Sequence | None:
        """The suspect to run alone in the next round; None without one. Ends the search if no suspect is left.

        If the rounds without drafting did not raise, the error is counted as the drafter's.
        """
        search = self.search
        if search is not None and search.clear(self.sequences):
            self.search = None
            if search.cleared and not search.alone and not isinstance(search.error, (RequestFailed, RankLost)):
                self.count_drafter_error(search.error)
        return None if self.search is None else self.search.next_suspect(self.sequences)

    def recover(self) -> BaseException | None:
        """Rebuild the state. If that raises, try again, since the first try frees memory; returns the last error."""
        return attempt(self.rebuild) and attempt(self.rebuild)

    def rebuild(self) -> None:
        """Apply the deltas that were decided, drop all caches, and queue all sequences to be prefilled again."""
        engine = self.engine
        engine.active.settle()
        engine.forget(list(self.sequences.values()))
        engine.runner.clear()
        engine.scheduler.restart(engine.active.restart())
        self.finish_round()

    def continue_after(self, error: BaseException) -> list[Delta]:
        """Continue after a round that raised, even if handling the error raises too, for lack of memory."""
        deltas: list[Delta] = []
        second_error = attempt(lambda: deltas.extend(self.handle(error)))
        if second_error is not None:
            return [delta for _, delta in self.engine.active.decided or ()] + self.fail_one(second_error)
        self.finish_round()
        return deltas

    def handle(self, error: BaseException) -> list[Delta]:
        """Handle the error of a round; returns the deltas of this round.

        If the error names a request, because its own code raised, that request is at fault. If the round is final
        already, the error came from the drafter or the controller, which run last. For every other error the sequence
        at fault is searched for. NaN logits are such an error too: NaN that one sequence leaves in the cache may spread
        to the logits of others.
        """
        engine, decided = self.engine, self.engine.active.decided
        if decided is None and isinstance(error, RequestFailed) and self.is_fault_of_request(error):
            engine.runner.drop([sequence.id for sequence in engine.scheduler.running])
            return self.stop_drafting_or_fail(error)
        running = list(engine.scheduler.running or self.sequences.values())
        if (recovery_error := self.recover()) is not None:
            raise recovery_error
        self.unfinished = True
        if decided is None:
            return self.continue_search(error, running)
        self.count_drafter_error(error)
        return [delta for _, delta in decided]

    def is_fault_of_request(self, failed: RequestFailed) -> bool:
        """Whether the error is due to a request of this engine, and not to the model."""
        return failed.seq_id in self.sequences and not isinstance(failed.__cause__, ModelError)

    def stop_drafting_or_fail(self, failed: RequestFailed) -> list[Delta]:
        """Retry the request without drafting, as its code may have raised on a draft token; end it if it had none."""
        culprit = self.sequences[failed.seq_id]
        if culprit.speculation.depth > 0:
            culprit.speculation = Speculation(depth=0)
            return []
        return self.fail_request(culprit, failed)

    def continue_search(self, error: BaseException, running: Seq[Sequence]) -> list[Delta]:
        """Start or continue the search. If the round had one sequence alone, it is at fault, and its request ends."""
        search = self.search
        if search is None:
            self.search = search = FaultSearch(error, alone=self.engine.drafter is None)
        elif not search.alone:
            search.alone = True
        else:
            culprit = search.next_suspect(self.sequences)
            assert culprit is not None, "a search with `alone` has a suspect"
            return self.fail_request(culprit, failure_of(culprit, error))
        search.suspect(running)
        if isinstance(error, RequestFailed) and error.seq_id in self.sequences:
            self.sequences[error.seq_id].speculation = Speculation(depth=0)  # a draft token may have been the reason
        return []

    def count_drafter_error(self, error: BaseException) -> None:
        """Count an error of the drafter, whose state was dropped. After STRIKES errors drafting is switched off.

        A ForerunError switches it off at once, since it would be raised again.
        """
        self.strikes += 1
        if self.strikes >= STRIKES or isinstance(error, ForerunError):
            self.engine.disable_drafter(error)
        else:
            message = "The drafter %s raised an error. Its state was dropped, and drafting continues."
            log.warning(message, self.engine.drafter_name, exc_info=error)

    def fail_request(self, culprit: Sequence, failed: RequestFailed) -> list[Delta]:
        """End a request; each of its samples gets a final delta with the error."""
        engine = self.engine
        samples = engine.active.samples_of(culprit.request_id)
        deltas = [sample.failure(failed.raised_to_client) for sample in samples]
        engine.active.decided = [(len(s.tokens), delta) for s, delta in zip(samples, deltas, strict=True)]
        engine.active.settle()
        engine.runner.cache.wipe(ids := [sample.id for sample in samples])
        engine.runner.release(ids)  # `remove` would put its blocks in the prefix cache
        engine.remove(samples)
        return deltas

    def fail_one(self, error: BaseException) -> list[Delta]:
        """End one request because recovery raised, so that the next step has less to recover when it tries again.

        This is the suspect that ran alone, or else the longest sequence, whose prefill needs the most memory.
        """
        search, active = self.search, self.engine.active
        suspect = next(iter(search.suspects), None) if search is not None and search.alone else None
        left = [sequence for sequence in self.sequences.values() if sequence.status is not Status.FINISHED]
        culprit = max(left, key=lambda sequence: (sequence.id == suspect, len(sequence.tokens)), default=None)
        if culprit is None:
            time.sleep(PAUSE_S)  # no request is left, but the state must be rebuilt before a new one
            return []
        failed = failure_of(culprit, error).raised_to_client
        samples = active.samples_of(culprit.request_id)
        return [active.fail(sample, failed) for sample in samples if sample.status is not Status.FINISHED]


def failure_of(culprit: Sequence, error: BaseException) -> RequestFailed:
    """The error that ends the request at fault."""
    if isinstance(error, RequestFailed):
        return error
    error = lacking_operator(error) or error
    no_memory = isinstance(error, OutOfBlocks) or out_of_memory(error)
    return (OutOfMemory if no_memory else RoundFailed)(culprit.id, error)
