"""Engine: the round, draft → verify → accept, over a batch of sequences.

This file decides the order: the scheduler chooses which sequences are read, the controller how far to draft, the
drafter what to guess, `verify` which guesses are accepted, and `accept` what is final. Rows join and leave between
rounds. It also decides what happens when a round raises: no sequence loses a token, the request at fault fails by name,
the others go on, and a drafter that keeps failing is switched off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from forerun.accept.commit import accept, host_trees
from forerun.accept.outcome import Outcome, RowOutcome, Stats
from forerun.config import EngineOptions, Speculation
from forerun.control.controller import Controller, FixedDepth
from forerun.control.measured import MeasuredDepth
from forerun.draft.base import Draft, Drafter
from forerun.engine.chunk import ChunkSize
from forerun.engine.clock import RoundClock
from forerun.engine.constrained import arms_of, completions, constrained_tree, forced_chains
from forerun.engine.delta import Delta, delta_of, score_prompt
from forerun.engine.inquiry import Inquiry, failure_of, to_be_ended
from forerun.engine.prefixes import Prefixes
from forerun.engine.proposal import Round, propose
from forerun.engine.reading import CommittedPart, Part, Reading, begun_parts, begun_rows, drawn_tokens, resumable
from forerun.engine.roster import Hear, Roster
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Sequence, Status
from forerun.errors import ForerunError, ModelError, RequestFailed
from forerun.guard import attempt
from forerun.kernels.sampling import SamplingKernels
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree
from forerun.verify.rules import Verdict
from forerun.verify.sanitize import sanitize
from forerun.verify.verify import verify

MakeDraws = Callable[..., Draws]  # with the signature of Draws itself
STRIKES = 3  # errors after which a drafter is no longer asked
PAUSE_S = 0.01  # before an engine without requests tries again to recover
log = logging.getLogger(__name__)


class Engine:
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
        self.runner = runner
        self.drafter = drafter
        self.options = options or EngineOptions()
        self.controller = controller or MeasuredDepth()
        self.num_ids = num_ids
        self.draws = draws
        self.kernels = kernels
        self.prefixes = Prefixes(runner.cache, lambda: self.drafter, self.options.prefix_cache)
        self.scheduler = Scheduler(self.prefixes, self.options.max_num_seqs, ChunkSize.of(self.options, runner))
        self.roster = Roster()
        self.torn = False  # whether a round or a cancellation was begun and has not come to its end
        self.inquiry: Inquiry | None = None
        self.strikes = 0
        self.drafter_name = "" if drafter is None else ", ".join(drafter.arms)
        self.stats = Stats()

    @property
    def sequences(self) -> dict[int, Sequence]:
        """The unfinished sequences, by id."""
        return self.roster.sequences

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.sequences)

    def submit(self, sequence: Sequence, hear: Hear | None = None) -> None:
        """Queue a sequence; its id must be new.

        `hear` is called with each of its deltas, which `step` returns too. After an interrupt the last delta may come
        twice, as the same object.
        """
        self.roster.add(sequence, hear)
        self.scheduler.submit(sequence)

    def cancel(self, request_id: int) -> None:
        """Take a request's sequences out between rounds. Unknown and finished requests are ignored."""
        mended = not self.torn or self.recover() is None
        if samples := self.roster.samples_of(request_id):
            self.torn = True
            for sample in samples:
                sample.status = Status.FINISHED  # if anything below raises, `mend` removes it
            if not mended:
                return
            self.leave(samples)
            self.torn = False

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """One round: what each sequence that drew tokens gained. Empty while only prompts are read.

        A round that raises before `roster.decided` is assigned has no effect. After that it is final, and the next
        step completes it if an interrupt comes between. An error ends only the request at fault (`answer_for`); an
        interrupt of the main thread (Ctrl-C) goes through to the caller.
        """
        if self.torn and (error := self.recover()) is not None:
            return self.surrender(error)
        if not self.sequences:
            return []
        self.torn = True
        if self.inquiry is not None:
            self.conclude(self.inquiry)
        deltas: list[Delta] = []
        error = attempt(lambda: deltas.extend(self.round(self.plan())))
        if error is not None:
            return self.outlive(error)
        self.roster.decided = None
        self.torn = False
        return deltas

    def outlive(self, error: BaseException) -> list[Delta]:
        """Go on after a round that raised, even where nothing can be decided about it for lack of memory."""
        deltas: list[Delta] = []
        undecided = attempt(lambda: deltas.extend(self.answer_for(error)))
        if undecided is not None:
            return [delta for _, delta in self.roster.decided or ()] + self.surrender(undecided)
        self.roster.decided = None
        self.torn = False
        return deltas

    def answer_for(self, error: BaseException) -> list[Delta]:
        """Decide what happens after a round that raised; the deltas that come of it.

        If the error names a request whose own code raised, that request is blamed. If the round is final, the error
        came from the drafter or the controller, which are told about rounds last. For every other error an inquiry
        searches for the sequence at fault. Logits that are NaN are such an error too: NaN that one sequence leaves in
        the cache may reach the logits of others.
        """
        decided = self.roster.decided
        if decided is None and isinstance(error, RequestFailed) and self.is_own(error):
            self.runner.drop([sequence.id for sequence in self.scheduler.running])
            return self.blame(error)
        running = list(self.scheduler.running or self.sequences.values())
        if (unmended := self.recover()) is not None:
            raise unmended
        self.torn = True
        if decided is None:
            return self.inquire(error, running)
        self.distrust(error)
        return [delta for _, delta in decided]

    def is_own(self, failed: RequestFailed) -> bool:
        """Whether the error is that of one request here, and not of the model."""
        return failed.seq_id in self.sequences and not isinstance(failed.__cause__, ModelError)

    def blame(self, failed: RequestFailed) -> list[Delta]:
        """A request whose code raised is continued without guesses, on which it may have raised; otherwise it ends."""
        culprit = self.sequences[failed.seq_id]
        if culprit.speculation.depth > 0:
            culprit.speculation = Speculation(depth=0)
            return []
        return self.give_up(culprit, failed)

    def inquire(self, error: BaseException, running: Seq[Sequence]) -> list[Delta]:
        """Search for the sequence at fault in the next rounds. A sequence that was read alone is at fault and ends."""
        inquiry = self.inquiry
        if inquiry is None:
            self.inquiry = inquiry = Inquiry(error, alone=self.drafter is None)
        elif not inquiry.alone:
            inquiry.alone = True
        else:
            culprit = inquiry.next(self.sequences)
            assert culprit is not None, "an inquiry ends with its last suspect"
            return self.give_up(culprit, failure_of(culprit, error))
        inquiry.suspect(running)
        if isinstance(error, RequestFailed) and error.seq_id in self.sequences:
            self.sequences[error.seq_id].speculation = Speculation(depth=0)  # a guess may have been the reason
        return []

    def conclude(self, inquiry: Inquiry) -> None:
        """End an inquiry without suspects. If rounds without guesses did not raise, drafting was at fault."""
        if inquiry.clear(self.sequences):
            self.inquiry = None
            if inquiry.cleared and not inquiry.alone and not isinstance(inquiry.error, RequestFailed):
                self.distrust(inquiry.error)

    def distrust(self, error: BaseException) -> None:
        """Count an error of the drafter, whose state has been dropped. After STRIKES of them it is switched off.

        A ForerunError switches it off at once, since it names a mistake that will not go away.
        """
        self.strikes += 1
        if self.strikes >= STRIKES or isinstance(error, ForerunError):
            self.dismiss(error)
        else:
            told = "The drafter %s raised an error; its state was dropped, and it goes on."
            log.warning(told, self.drafter_name, exc_info=error)

    def dismiss(self, error: BaseException) -> None:
        """Switch drafting off for good. Requests go on without it, slower and no less exact."""
        if self.drafter is not None:
            log.warning("Drafting is switched off: the drafter %s failed.", self.drafter_name, exc_info=error)
        self.drafter, self.controller = None, FixedDepth()

    def give_up(self, culprit: Sequence, failed: RequestFailed) -> list[Delta]:
        """End a request; each of its samples gets a last delta with the error."""
        samples = self.roster.samples_of(culprit.request_id)
        deltas = [Delta.failure(sample, failed.told) for sample in samples]
        self.roster.decided = [(len(s.tokens), delta) for s, delta in zip(samples, deltas, strict=True)]
        self.roster.settle()
        self.runner.cache.wipe(ids := [sample.id for sample in samples])
        self.runner.release(ids)  # so nothing of it is kept
        self.leave(samples)
        return deltas

    def recover(self) -> BaseException | None:
        """Mend, and again if that raises, since it has freed memory by then; what the second attempt raised."""
        return attempt(self.mend) and attempt(self.mend)

    def surrender(self, error: BaseException) -> list[Delta]:
        """End one request because recovering raised; the next step tries again, with less to recover."""
        culprit = to_be_ended(self.sequences.values(), self.inquiry)
        if culprit is None:
            time.sleep(PAUSE_S)  # nobody is left: what is there has to be mended before a request can be read
            return []
        failed = failure_of(culprit, error).told
        samples = self.roster.samples_of(culprit.request_id)
        return [self.roster.fail(sample, failed) for sample in samples if sample.status is not Status.FINISHED]

    def mend(self) -> None:
        """Recover from a round that did not come to its end: apply what was decided, and read all sequences again.

        Only the sequences' tokens are kept. Caches, stop checkers and the drafter's state are built again from them.
        """
        self.roster.settle()
        self.forget(list(self.sequences.values()))
        self.runner.clear()
        self.scheduler.restart(self.roster.restart())
        self.roster.decided = None
        self.torn = False

    def round(self, plan: Round) -> list[Delta]:
        """The three verbs, in their order."""
        clock = RoundClock(plan.draws.device)
        draft = self.draft(plan)  # draft
        clock.drafted()
        reading = self.read(plan, draft)  # one target pass
        clock.passed()
        verdict = verify(draft.tree, reading.node_logits(), plan.draws, self.options.verification)  # verify
        deltas, rows = self.accept(reading, verdict)  # accept: the one synchronisation
        times, captured = clock.times(draft), clock.captured
        usual = bool(rows) and not plan.num_prompt_tokens and not captured
        plain_s = self.controller.plain_s(len(rows)) if usual else None
        outcome = Outcome(rows, plan.num_prompt_tokens, *times, plain_s, *self.prefixes.counted(), captured)
        self.controller.record(outcome)
        self.stats.record(outcome)
        self.scheduler.chunk.record(outcome)
        if plain_s is not None:
            for row, told in zip(plan.drawing, rows, strict=True):
                row.sequence.pace.add(outcome.round_s, plain_s * told.num_emitted, told.num_emitted)
        return deltas

    def plan(self) -> Round:
        """Which sequences are read in this round. Preempted sequences are forgotten by the drafter too."""
        alone = None if self.inquiry is None else self.inquiry.next(self.sequences)
        rows, preempted = self.scheduler.plan(alone)
        assert rows, "unfinished sequences have something to read"
        self.forget(preempted)
        drawing = [row for row in rows if row.draws]
        draws = self.draws(
            [row.sequence.sampling() for row in drawing],
            self.runner.decoder.config.vocab_size,
            rejection=self.options.verification != "coupled",
            num_ids=self.num_ids,
            device=self.runner.cache.keys.device,
            kernels=self.kernels,
        )
        return Round(rows, drawing, draws)

    def draft(self, plan: Round) -> Draft:
        """Guesses for the drawing rows, on the device; their roots alone where none are wanted or affordable."""
        draft, tree = self.guess(plan)
        tree = tree.to(plan.draws.device)
        return draft if tree is draft.tree else replace(draft, tree=tree)

    def guess(self, plan: Round) -> tuple[Draft, DraftTree]:
        """What the drafter gave, and what of its tree is judged: on the host as long as the drafter works there."""
        nothing = Draft.none([row.sequence.tokens[-1] for row in plan.drawing])
        if self.inquiry is not None or not plan.drawing:
            return nothing, nothing.tree
        drafter, cache = self.drafter, self.runner.cache
        forced = forced_chains(plan.rows, plan.drawing, cache)
        proposal = None if drafter is None else propose(drafter, self.controller, cache, plan, forced)
        if drafter is None or proposal is None:
            return nothing, constrained_tree(nothing.tree, plan.draws, forced)
        proposed, vocab = proposal.draft, self.runner.decoder.config.vocab_size
        roots = nothing.tree.tokens[:, 0] if proposed.tree.tokens.is_cpu else plan.draws.roots_tokens
        safe = sanitize(proposed.tree, roots, proposal.budgets, vocab, self.kernels)
        draft = replace(proposed, tree=safe)
        tree = self.controller.admit(draft, proposal.load)
        tree = tree if tree is safe else tree.without_law()  # pruned after drawing: it has another law
        tree = constrained_tree(tree, plan.draws, forced)
        if draft.resume is not None and not resumable(proposed, tree, drafter.taps):
            draft = replace(draft, resume=None)
        draft = replace(draft, arm=arms_of(draft.arm, tree))
        begun = begun_rows(proposed) if draft.resume is not None else ()
        seq_ids = plan.draws.seq_ids
        left = [seq_id for row, seq_id in enumerate(seq_ids) if row not in begun and self.runner.cache.tail(seq_id)]
        if left:
            self.runner.drop(left)  # what a drafter may have read there
        return draft, tree

    def read(self, plan: Round, draft: Draft) -> Reading:
        """The target's pass: prompt chunks, roots and guesses side by side."""
        tree = draft.tree
        tree_of = {row.sequence.id: host for row, host in zip(plan.drawing, host_trees(tree, draft.arm), strict=True)}
        parts = [Part.of(row, tree_of.get(row.sequence.id)) for row in plan.rows]
        taps = self.drafter.taps if self.drafter else ()
        unseen = tree.known is not None and tree.known.tokens is None
        drawn = drawn_tokens(parts, tree.tokens) if unseen else None
        begun = begun_parts(parts, draft) if draft.resume is not None else None
        states = self.runner.read([part.read() for part in parts], taps, drawn, begun)
        return Reading(parts, states, tree.tokens if unseen else None)

    def accept(self, reading: Reading, verdict: Verdict) -> tuple[list[Delta], list[RowOutcome]]:
        """Make the verdict final: K and V to the cache, tokens and stops to the sequences, the news to the drafter.

        Everything is computed first. The assignment of `roster.decided` makes the round final.
        """
        accepted = accept(verdict, [part.tree for part in reading.parts if part.tree], reading.drawn)
        reading.check_drawn(accepted)
        drawing = [part.row.sequence for part in reading.parts if part.tree]
        runs = iter(zip(accepted, completions(drawing, accepted), strict=True))
        deltas, outcomes, kept, places = [], [], [], []
        logits = reading.states.logits[:, : self.num_ids]  # padding ids have no log-probabilities
        for part, first in zip(reading.parts, reading.first_rows(), strict=True):
            sequence = part.row.sequence
            if part.num_scored:
                score_prompt(sequence, part, logits[first:], self.kernels)
            if part.tree is None:
                kept.append(CommittedPart(part, []))
                continue
            run, completed_by = next(runs)
            delta = delta_of(sequence, run, logits, first + part.num_scored, self.kernels, completed_by)
            assert delta.outcome is not None, "a committed run has an outcome"
            outcomes.append(delta.outcome)
            deltas.append(delta)
            places.append(len(sequence.tokens))
            kept.append(CommittedPart(part, run.nodes[: len(delta.token_ids)]))  # an end may cut a run short
        self.runner.keep([k.sequence.id for k in kept], [k.path for k in kept])
        self.roster.decided = list(zip(places, deltas, strict=True))
        self.roster.settle()
        self.inform(kept, reading)
        self.leave([self.sequences[delta.seq_id] for delta in deltas if delta.finish_reason is not None])
        return deltas, outcomes

    def inform(self, kept: Seq[CommittedPart], reading: Reading) -> None:
        """Record what was read, and tell the drafter, also about sequences that end in this round."""
        for k in kept:
            k.sequence.num_read += len(k.path)
        if self.drafter is not None and kept:
            self.drafter.observe(reading.committed(kept, [self.prefixes.salt(k.sequence) for k in kept]))

    def leave(self, sequences: Seq[Sequence]) -> None:
        """Take sequences out of the engine and free their memory; it may be repeated."""
        self.forget(sequences)
        self.runner.hand_over([sequence.id for sequence in sequences])
        for sequence in sequences:
            self.prefixes.retire(sequence)
            self.scheduler.finish(sequence)
            self.roster.remove(sequence)

    def forget(self, sequences: Seq[Sequence]) -> None:
        """Tell the drafter to drop these sequences. A drafter that cannot is switched off."""
        drafter = self.drafter
        if drafter is not None and sequences:
            error = attempt(lambda: drafter.forget([sequence.id for sequence in sequences]))
            if error is not None:
                self.dismiss(error)
