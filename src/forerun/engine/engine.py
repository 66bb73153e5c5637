"""Engine: requests come and go, and rounds follow one another; one that raises ends the request at fault alone."""

from __future__ import annotations

import torch

from forerun.accept.delta import Delta
from forerun.config import EngineOptions
from forerun.control.controller import Controller
from forerun.draft.base import Drafter
from forerun.engine.recovery import Recovery
from forerun.engine.round import MakeDraws, Rounds
from forerun.engine.sequence import OnDelta, Sequence, Status
from forerun.guard import attempt
from forerun.kernels.sampling import SamplingKernels
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws


class Engine(Rounds):
    """Generates many sequences at once. Not thread-safe: one thread steps it, submits and cancels.

    `num_ids` is the number of real token ids; a padded vocabulary's further ones are never emitted. `draws` makes each
    round's sampling: Draws, or something that draws in its place. `kernels` make a round on a CPU
    faster, not different.
    """

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter | None = None,
        *,
        options: EngineOptions | None = None,
        controller: Controller | None = None,
        num_ids: int | None = None,
        draws: MakeDraws = Draws,
        kernels: SamplingKernels | None = None,
    ) -> None:
        super().__init__(runner, drafter, controller, options or EngineOptions(), num_ids, draws, kernels)
        self.recovery = Recovery(self)

    @property
    def sequences(self) -> dict[int, Sequence]:
        """The unfinished sequences, by id."""
        return self.active.sequences

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.sequences)

    def submit(self, sequence: Sequence, on_delta: OnDelta | None = None) -> None:
        """Queue a sequence; its id must be new.

        `on_delta` is called with each of its deltas, which `step` returns too. After an interrupt the last delta may
        come twice, as the same object.
        """
        self.active.add(sequence, on_delta)
        self.scheduler.submit(sequence)

    def cancel(self, request_id: int) -> None:
        """Take a request's sequences out between rounds. Unknown and finished requests are ignored."""
        recovery = self.recovery
        recovered = not recovery.unfinished or recovery.recover() is None
        if samples := self.active.samples_of(request_id):
            recovery.unfinished = True
            for sample in samples:
                sample.status = Status.FINISHED  # if anything below raises, recovering removes it
            if not recovered:
                return
            self.leave(samples)
            recovery.unfinished = False

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """One round: what each sequence that drew tokens gained. Empty while only prompts are read.

        A round that raises before `active.decided` is assigned has no effect. After that it is final, and the next
        step completes it if an interrupt comes between. An error ends only the request at fault; an interrupt of the
        main thread (Ctrl-C) goes through to the caller.
        """
        recovery = self.recovery
        if recovery.unfinished and (error := recovery.recover()) is not None:
            return recovery.fail_one(error)
        if not self.sequences:
            return []
        recovery.unfinished = True
        alone = None if recovery.search is None else recovery.alone()
        deltas: list[Delta] = []
        error = attempt(lambda: deltas.extend(self.round(self.plan(alone, drafts=recovery.search is None))))
        if error is not None:
            return recovery.continue_after(error)
        self.active.decided = None
        recovery.unfinished = False
        return deltas
