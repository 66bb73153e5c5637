"""Recovery: what happens after a round that raised.

A round that raises without naming a request may have failed on a guess, on the data of one sequence, or for lack of
memory. This file decides who is at fault, and brings the engine back to a state from which it can go on: only the
sequences' tokens are kept, all else is built again from them. None of this runs unless a round has raised.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from forerun.accept.delta import Delta
from forerun.cache.paged import OutOfBlocks
from forerun.config import Speculation
from forerun.device import lacking_operator
from forerun.draft.base import Drafter
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import ActiveSequences, Sequence, Status
from forerun.errors import ForerunError, ModelError, OutOfMemory, RankLost, RequestFailed, RoundFailed
from forerun.guard import attempt
from forerun.models.runner import Runner

MEMORY = (MemoryError, torch.OutOfMemoryError, OutOfBlocks)
CPU_ALLOCATOR = "DefaultCPUAllocator"  # torch's, whose error is a RuntimeError
STRIKES = 3  # errors after which a drafter is no longer asked
PAUSE_S = 0.01  # before an engine without requests tries again to recover
log = logging.getLogger(__name__)


@dataclass(slots=True)
class FaultSearch:
    """The search for the sequence that makes rounds raise, until every suspect is cleared or gone.

    The next rounds read the same sequences without guesses and, if that raises too, one sequence at a time; the one
    with which a round raises again is at fault. A sequence that gains a token is cleared. `error` is the first error.
    `suspects` maps the sequences of the last round that raised to the number of tokens that they had; `cleared` says
    whether any of them has gained one since. `alone`: suspects are read one at a time.
    """

    error: BaseException
    suspects: dict[int, int] = field(default_factory=dict)
    alone: bool = False
    cleared: bool = False

    def suspect(self, sequences: Iterable[Sequence]) -> None:
        """Suspect the sequences of a round that raised."""
        self.suspects = {sequence.id: len(sequence.tokens) for sequence in sequences}

    def clear(self, sequences: Mapping[int, Sequence]) -> bool:
        """Clear suspects that have gained a token or are not in `sequences`; True if none is left."""
        left = {seq_id: count for seq_id, count in self.suspects.items() if seq_id in sequences}
        self.suspects = {seq_id: count for seq_id, count in left.items() if len(sequences[seq_id].tokens) == count}
        self.cleared |= len(self.suspects) < len(left)
        return not self.suspects

    def next(self, sequences: Mapping[int, Sequence]) -> Sequence | None:
        """The suspect to read alone in the next round; None where all sequences are read."""
        return sequences[next(iter(self.suspects))] if self.alone else None


@runtime_checkable
class Recoverable(Protocol):
    """What recovery needs of an engine."""

    runner: Runner
    drafter: Drafter | None
    drafter_name: str
    scheduler: Scheduler
    active: ActiveSequences

    def leave(self, sequences: Seq[Sequence]) -> None: ...

    def forget(self, sequences: Seq[Sequence]) -> None: ...

    def disable_drafter(self, error: BaseException) -> None: ...


class Recovery:
    """The state of an engine between its rounds, and what is done where one of them raised.

    `unfinished`: a round or a cancellation was begun and has not come to its end. `strikes`: errors of the drafter.
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
        """A round has come to its end, and its deltas are told."""
        self.engine.active.decided = None
        self.unfinished = False

    def alone(self) -> Sequence | None:
        """The sequence that the next round reads alone, where one is sought; a search without suspects ends first.

        If rounds without guesses did not raise, drafting was at fault.
        """
        search = self.search
        if search is not None and search.clear(self.sequences):
            self.search = None
            if search.cleared and not search.alone and not isinstance(search.error, (RequestFailed, RankLost)):
                self.count_drafter_error(search.error)
        return None if self.search is None else self.search.next(self.sequences)

    def recover(self) -> BaseException | None:
        """Build the state again, and again if that raises, since it has freed memory by then; the second error."""
        return attempt(self.rebuild) and attempt(self.rebuild)

    def rebuild(self) -> None:
        """Apply what was decided, and have all sequences read again from their tokens."""
        engine = self.engine
        engine.active.settle()
        engine.forget(list(self.sequences.values()))
        engine.runner.clear()
        engine.scheduler.restart(engine.active.restart())
        self.finish_round()

    def continue_after(self, error: BaseException) -> list[Delta]:
        """Go on after a round that raised, even where nothing can be decided about it for lack of memory."""
        deltas: list[Delta] = []
        undecided = attempt(lambda: deltas.extend(self.decide(error)))
        if undecided is not None:
            return [delta for _, delta in self.engine.active.decided or ()] + self.fail_one(undecided)
        self.finish_round()
        return deltas

    def decide(self, error: BaseException) -> list[Delta]:
        """Decide what happens after a round that raised; the deltas that come of it.

        If the error names a request whose own code raised, that request is at fault. If the round is final, the error
        came from the drafter or the controller, which are told about rounds last. For every other error the sequence at
        fault is searched for. Logits that are NaN are such an error too: NaN that one sequence leaves in the cache may
        reach the logits of others.
        """
        engine, decided = self.engine, self.engine.active.decided
        if decided is None and isinstance(error, RequestFailed) and self.names_request(error):
            engine.runner.drop([sequence.id for sequence in engine.scheduler.running])
            return self.undraft_or_fail(error)
        running = list(engine.scheduler.running or self.sequences.values())
        if (unmended := self.recover()) is not None:
            raise unmended
        self.unfinished = True
        if decided is None:
            return self.search_on(error, running)
        self.count_drafter_error(error)
        return [delta for _, delta in decided]

    def names_request(self, failed: RequestFailed) -> bool:
        """Whether the error is that of one request here, and not of the model."""
        return failed.seq_id in self.sequences and not isinstance(failed.__cause__, ModelError)

    def undraft_or_fail(self, failed: RequestFailed) -> list[Delta]:
        """A request whose code raised is continued without guesses, on which it may have raised; otherwise it ends."""
        culprit = self.sequences[failed.seq_id]
        if culprit.speculation.depth > 0:
            culprit.speculation = Speculation(depth=0)
            return []
        return self.fail_request(culprit, failed)

    def search_on(self, error: BaseException, running: Seq[Sequence]) -> list[Delta]:
        """Search for the sequence at fault in the next rounds. A sequence that was read alone is at fault and ends."""
        search = self.search
        if search is None:
            self.search = search = FaultSearch(error, alone=self.engine.drafter is None)
        elif not search.alone:
            search.alone = True
        else:
            culprit = search.next(self.sequences)
            assert culprit is not None, "a search ends with its last suspect"
            return self.fail_request(culprit, failure_of(culprit, error))
        search.suspect(running)
        if isinstance(error, RequestFailed) and error.seq_id in self.sequences:
            self.sequences[error.seq_id].speculation = Speculation(depth=0)  # a guess may have been the reason
        return []

    def count_drafter_error(self, error: BaseException) -> None:
        """Count an error of the drafter, whose state has been dropped. After STRIKES of them it is switched off.

        A ForerunError switches it off at once, since it names a mistake that will not go away.
        """
        self.strikes += 1
        if self.strikes >= STRIKES or isinstance(error, ForerunError):
            self.engine.disable_drafter(error)
        else:
            message = "The drafter %s raised an error; its state was dropped, and it goes on."
            log.warning(message, self.engine.drafter_name, exc_info=error)

    def fail_request(self, culprit: Sequence, failed: RequestFailed) -> list[Delta]:
        """End a request; each of its samples gets a last delta with the error."""
        engine = self.engine
        samples = engine.active.samples_of(culprit.request_id)
        deltas = [sample.failure(failed.told) for sample in samples]
        engine.active.decided = [(len(s.tokens), delta) for s, delta in zip(samples, deltas, strict=True)]
        engine.active.settle()
        engine.runner.cache.wipe(ids := [sample.id for sample in samples])
        engine.runner.release(ids)  # so nothing of it is kept
        engine.leave(samples)
        return deltas

    def fail_one(self, error: BaseException) -> list[Delta]:
        """End one request because recovering raised; the next step tries again, with less to recover.

        It is the suspect that was read alone, or else the longest one, which needs most memory to be read again.
        """
        search, active = self.search, self.engine.active
        suspect = next(iter(search.suspects), None) if search is not None and search.alone else None
        left = [sequence for sequence in self.sequences.values() if sequence.status is not Status.FINISHED]
        culprit = max(left, key=lambda sequence: (sequence.id == suspect, len(sequence.tokens)), default=None)
        if culprit is None:
            time.sleep(PAUSE_S)  # nobody is left: the state has to be built again before a request can be read
            return []
        failed = failure_of(culprit, error).told
        samples = active.samples_of(culprit.request_id)
        return [active.fail(sample, failed) for sample in samples if sample.status is not Status.FINISHED]


def failure_of(culprit: Sequence, error: BaseException) -> RequestFailed:
    """The error to end a request with that was read alone when a round raised."""
    if isinstance(error, RequestFailed):
        return error
    error = lacking_operator(error) or error
    lacking = isinstance(error, MEMORY) or CPU_ALLOCATOR in str(error)
    return (OutOfMemory if lacking else RoundFailed)(culprit.id, error)
