"""Engine: continuous batching; `Engine.round` is one round on one page, from top to bottom.

A round plans, drafts, reads, verifies and accepts, in methods of these names. Errors are handled in `recovery.py`: an
error in a round ends only the request that caused it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from forerun.accept.commit import accept
from forerun.accept.delta import Delta
from forerun.accept.outcome import Outcome, RoundClock, RowOutcome, Stats
from forerun.config import EngineOptions
from forerun.control.controller import Controller, FixedDepth, Load
from forerun.control.measured import MeasuredDepth
from forerun.device import Download
from forerun.draft.base import Budget, Draft, Drafter, begin_next
from forerun.engine.constrained import constrained_tree, forced_chains
from forerun.engine.prefixes import Prefixes
from forerun.engine.reading import RoundRow, TargetPass, Unreported, drawn_tokens, num_resumed, partial_pass, resumable
from forerun.engine.recovery import Recovery
from forerun.engine.scheduler import ChunkSize, RowPlan, Scheduler
from forerun.engine.sequence import ActiveSequences, OnDelta, Sequence, Status
from forerun.guard import attempt
from forerun.kernels.sampling import SamplingKernels
from forerun.models.chains import VerifiedChains
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree
from forerun.verify.rules import Verdict
from forerun.verify.sanitize import sanitize
from forerun.verify.verify import verify

MakeDraws = Callable[..., Draws]  # with the signature of Draws itself
MAX_PENDING_TOKENS = 128  # an idle drafter is told of final tokens in batches of this size
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The rows that a round reads, and which of them sample a token (`drawing`), with their sampling state (`draws`).

    `drafts`: whether this round may draft. `constrained`: whether any request has a grammar.
    """

    rows: Seq[RowPlan]
    drawing: Seq[RowPlan]
    draws: Draws
    drafts: bool
    constrained: bool
    num_prompt_tokens: int  # read without sampling


class Engine:
    """Generates many sequences at once. Not thread-safe: one thread calls `step`, `submit` and `cancel`.

    `num_ids` is the number of real token ids; vocabulary padding is never sampled. `draws` makes each round's sampling
    state (tests and replays replace it). `kernels` speed up sampling on a CPU, with the same results.
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
        self.drafter_name = "" if drafter is None else ", ".join(drafter.names)
        self.controller = controller or MeasuredDepth()  # also without a drafter, which may be set later
        self.options = options or EngineOptions()
        self.num_ids = num_ids
        self.draws = draws
        self.kernels = kernels
        self.prefixes = Prefixes(runner.cache, lambda: self.drafter, self.options.prefix_cache)
        self.scheduler = Scheduler(self.prefixes, self.options.max_num_seqs, ChunkSize.of(self.options, runner))
        self.active = ActiveSequences()
        self.pending, self.drafter_idle = Unreported(), False  # final tokens that the drafter was not told yet
        self.stats = Stats()
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

        `on_delta` is called with each delta of the sequence; `step` returns the same deltas. After an interrupt the
        last delta may come twice, as the same object.
        """
        self.active.add(sequence, on_delta)
        self.scheduler.submit(sequence)

    def cancel(self, request_id: int) -> None:
        """Remove a request's sequences between rounds. Unknown and finished requests are ignored."""
        recovery = self.recovery
        recovered = not recovery.unfinished or recovery.recover() is None
        if samples := self.active.samples_of(request_id):
            recovery.unfinished = True
            for sample in samples:
                sample.status = Status.FINISHED  # if anything below raises, recovering removes it
            if not recovered:
                return
            error = attempt(self.tell_drafter)
            if error is not None:
                self.disable_drafter(error)
            self.leave(samples)
            recovery.unfinished = False

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Run one round; returns a delta for each sequence that sampled tokens. Empty if only prompts were read.

        An error before `active.decided` is assigned leaves the state unchanged. After the assignment the round is
        final; if an interrupt follows, the next step completes it. An error ends only the request that caused it; an
        interrupt of the main thread (Ctrl-C) is raised to the caller.
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

    def round(self, plan: RoundPlan) -> list[Delta]:
        """Run one round; returns a delta for each sequence that sampled tokens."""
        clock = RoundClock(plan.draws.device)
        draft = self.draft(plan)
        clock.mark()
        reading = self.read(plan, draft)
        clock.mark(reading.states.span)
        verdict = verify(draft.tree, reading.node_logits(), plan.draws, self.options.verification, self.runner.judge)
        if (arriving := self.begin_next(plan, reading, verdict)) is not None:
            verdict = replace(verdict, arriving=arriving)
        deltas, rows = self.accept(reading, verdict)
        self.record(plan, draft, rows, clock)
        return deltas

    def plan(self, alone: Sequence | None = None, drafts: bool = True) -> RoundPlan:
        """Choose the sequences to read, or `alone` only. The drafter drops the state of preempted sequences."""
        rows, preempted = self.scheduler.plan(alone)
        assert rows, "unfinished sequences have something to read"
        self.forget(preempted)
        drawing = [row for row in rows if row.draws]
        draws = self.draws(
            [row.sequence.sampling() for row in drawing],
            self.runner.vocab_size,
            rejection=self.options.verification != "coupled",
            num_ids=self.num_ids,
            device=self.runner.device,
            kernels=self.kernels,
        )
        return RoundPlan(rows, drawing, draws, drafts, draws.constrained, sum(row.num_chunk for row in rows))

    def draft(self, plan: RoundPlan) -> Draft:
        """Draft trees for the drawing rows. A row is its root alone where nothing can or should be drafted."""
        roots = [row.sequence.tokens[-1] for row in plan.drawing]
        tree = bare = DraftTree.of_roots(roots)
        draft = Draft(bare)
        if plan.drafts and plan.drawing:
            forced: Seq[Seq[int]] = [()] * len(roots)
            if plan.constrained:
                forced = forced_chains(plan.rows, plan.drawing, self.runner.cache)
            if self.drafter is not None:
                draft, tree = self.guess(self.drafter, plan, draft, forced)
            if plan.constrained:
                tree = constrained_tree(tree, plan.draws, forced)
            if draft.tree is not bare:
                draft = self.with_tree(plan, draft, tree)
        tree = tree.to(tree.tokens.device)  # sets `known`, the host's copy
        return draft if tree is draft.tree else replace(draft, tree=tree)

    def guess(self, drafter: Drafter, plan: RoundPlan, bare: Draft, forced: Seq[Seq[int]]) -> tuple[Draft, DraftTree]:
        """Ask the drafter for draft tokens, beside `forced` ones; returns the draft, and its tree clean and pruned."""
        seq_ids, controller = plan.draws.seq_ids, self.controller
        load = Load(
            seq_ids=seq_ids,
            speculations=[row.sequence.speculation for row in plan.drawing],
            rooms=[guessing_room(row, chain) for row, chain in zip(plan.drawing, forced, strict=True)],
            num_prompt_tokens=plan.num_prompt_tokens,
            num_context=sum(len(row.sequence.tokens) for row in plan.drawing),
        )
        self.drafter_idle = True
        if controller.skips(load):
            return bare, bare.tree
        self.tell_drafter()
        needed = dict(zip(seq_ids, map(len, forced), strict=True))
        counts = [row.num_certain + needed.get(row.sequence.id, 0) for row in plan.rows]
        spare = self.runner.cache.spare([row.sequence.id for row in plan.rows], counts)
        budgets = controller.budgets(load, drafter.outlook(seq_ids), spare)
        if not any(budget.depth for budget in budgets):
            return bare, bare.tree
        self.drafter_idle = False
        draft = drafter.propose(plan.draws, budgets)
        if draft.tree.tokens.shape[1] == 1:
            return bare, bare.tree
        safe = self.sanitized(draft.tree, plan, bare.tree, budgets)
        tree = controller.admit(replace(draft, tree=safe), load)
        return draft, tree if tree is safe else tree.without_law()  # pruned after sampling: `q` no longer holds

    def sanitized(self, tree: DraftTree, plan: RoundPlan, bare: DraftTree, budgets: Seq[Budget]) -> DraftTree:
        """The drafter's tree made valid: with these roots and within its budgets, whatever the drafter returned."""
        rooted = tree if tree.sound else bare if tree.tokens.is_cpu else None
        roots = plan.draws.roots_tokens if rooted is None else rooted.tokens[:, 0]
        return sanitize(tree, roots, budgets, self.runner.vocab_size, self.kernels)

    def with_tree(self, plan: RoundPlan, draft: Draft, tree: DraftTree) -> Draft:
        """The draft with the tree to be verified. States that an early exit has computed stay only if they fit it."""
        num_nodes = [0] * len(plan.drawing)  # read by an early exit
        if draft.resume is not None:
            resumes = resumable(draft, tree, () if self.drafter is None else self.drafter.taps)
            num_nodes = num_resumed(draft) if resumes else num_nodes
            draft = draft if resumes else replace(draft, resume=None)
        if draft.drafter is not None and (more := tree.tokens.shape[1] - draft.drafter.shape[1]):
            draft = replace(draft, drafter=pad(draft.drafter, (0, more), value=-1))  # forced tokens are no drafter's
        rows = zip(plan.draws.seq_ids, num_nodes, strict=True)
        stale = [seq_id for seq_id, num in rows if not num and self.runner.cache.tail(seq_id)]
        if stale:
            self.runner.drop(stale)
        return replace(draft, tree=tree)

    def read(self, plan: RoundPlan, draft: Draft) -> TargetPass:
        """Run the target's pass over prompt chunks, roots and draft tokens of all rows."""
        tree = draft.tree
        hosts = tree.host()
        if draft.drafter is not None:
            hosts = [replace(host, drafters=row) for host, row in zip(hosts, draft.drafter.tolist(), strict=True)]
        tree_of = {row.sequence.id: host for row, host in zip(plan.drawing, hosts, strict=True)}
        rows = RoundRow.of_plans(plan.rows, tree_of)
        taps = self.drafter.taps if self.drafter else ()
        drawn = drawn_tokens(rows, tree.tokens) if tree.unseen else None
        resumed = partial_pass(rows, draft) if draft.resume is not None else None
        states = self.runner.read([row.read() for row in rows], taps, drawn, resumed)
        return TargetPass(rows, states, tree.tokens if tree.unseen else None)

    def begin_next(self, plan: RoundPlan, reading: TargetPass, verdict: Verdict) -> Download | None:
        """Start the next round on a GPU while the host makes this one final: its drafts, or its pass without drafts.

        Returns this verdict's copy to the host, in progress; None if nothing is started.
        """
        more = plan.num_prompt_tokens or plan.constrained or verdict.ranked is not None
        if not self.runner.draws_unseen or more:
            return None
        if self.drafter is None or self.drafter_idle:
            if self.scheduler.waiting or any(row.sequence.room < 2 for row in plan.drawing):
                return None
            return self.runner.read_ahead(plan.draws.seq_ids, verdict.packed, self.drafter.taps if self.drafter else ())
        states = reading.states.tapped
        if reading.drawn is None or states is None:
            return None
        num_drafted = [row.num_nodes - 1 for row in reading.rows]
        chains = VerifiedChains(plan.draws, reading.drawn, num_drafted, verdict.packed, states.rows())
        return begin_next(self.drafter, chains)

    def accept(self, reading: TargetPass, verdict: Verdict) -> tuple[list[Delta], list[RowOutcome]]:
        """Make the verdict final: update the KV cache, the sequences (tokens, stops) and the drafter.

        Everything is computed first; the host waits for the device once. The assignment of `active.decided` makes the
        round final.
        """
        accepted = accept(verdict, [row.tree for row in reading.rows if row.tree], reading.drawn)
        reading.check_drawn(accepted)
        drawing = [row.sequence for row in reading.rows if row.tree]
        # Grammars may raise: they run before any sequence is changed, so that the round then has no effect.
        runs = iter([(run, s.completed_by(run.tokens)) for s, run in zip(drawing, accepted, strict=True)])
        deltas, outcomes, kept, places = [], [], [], []
        logits, num_ids = reading.states.logits, self.num_ids  # padding ids have no log-probabilities
        logits = logits if num_ids in (None, logits.shape[1]) else logits[:, :num_ids]
        for row in reading.rows:
            sequence = row.sequence
            if row.num_scored:
                sequence.score_prompt(row.num_scored, logits[row.first :], self.kernels)
            if row.tree is None:
                kept.append(row)
                continue
            run, completed_by = next(runs)
            delta = sequence.delta(run, logits, row.first_node, self.kernels, completed_by)
            assert delta.outcome is not None, "a committed run has an outcome"
            outcomes.append(delta.outcome)
            deltas.append(delta)
            places.append(len(sequence.tokens))
            kept.append(row.with_accepted(run.nodes[: len(delta.token_ids)]))  # a stop may cut the run short
        self.runner.keep([k.sequence.id for k in kept], [k.path for k in kept])
        self.active.decided = list(zip(places, deltas, strict=True))
        self.active.settle()
        self.report(kept, reading)
        ended = [delta.seq_id for delta in deltas if delta.finish_reason is not None]
        if ended:
            self.tell_drafter()
            self.leave([self.active.sequences[seq_id] for seq_id in ended])
        return deltas, outcomes

    def report(self, kept: Seq[RoundRow], reading: TargetPass) -> None:
        """Count the tokens that were read and report them to the drafter, less often while the drafter is idle."""
        if self.drafter is not None:
            self.pending.add(kept, reading.states.tapped)
        for k in kept:
            k.sequence.num_read += len(k.path)
        if not self.drafter_idle or self.pending.num_tokens >= MAX_PENDING_TOKENS:
            self.tell_drafter()

    def tell_drafter(self) -> None:
        """Report pending tokens to the drafter, including those of sequences that end now."""
        news, self.pending = self.pending, Unreported()
        if self.drafter is not None and news.rows:
            self.drafter.observe(news.committed(self.options.prefix_cache))

    def record(self, plan: RoundPlan, draft: Draft, rows: list[RowOutcome], clock: RoundClock) -> None:
        """Update the statistics; the controller and the chunk size learn from the round's times."""
        draft_s, draft_pass_s, pass_s, verdict_s = clock.times(draft.pass_s)
        usual = bool(rows) and not plan.num_prompt_tokens and not clock.captured
        plain_s = self.controller.plain_s(len(rows)) if usual and self.drafter is not None else None
        counted = self.prefixes.counted() if self.prefixes.num_queried else (0, 0)
        outcome = Outcome(
            rows, plan.num_prompt_tokens, draft_s, pass_s, draft_pass_s, tuple(draft.drafter_s), verdict_s, plain_s,
            *counted, clock.captured,
        )  # fmt: skip
        if self.drafter is not None:
            self.controller.record(outcome)
        self.stats.record(outcome)
        if plan.num_prompt_tokens:
            self.scheduler.chunk.record(outcome)
        if plain_s is not None:
            for row, result in zip(plan.drawing, rows, strict=True):
                row.sequence.pace.add(outcome.round_s, plain_s * result.num_emitted, result.num_emitted)

    def leave(self, sequences: Seq[Sequence]) -> None:
        """Remove sequences and free their memory. It is safe to call this twice."""
        self.forget(sequences)
        self.runner.hand_over([sequence.id for sequence in sequences])
        for sequence in sequences:
            self.prefixes.retire(sequence)
            self.scheduler.finish(sequence)
            self.active.remove(sequence)

    def forget(self, sequences: Seq[Sequence]) -> None:
        """Tell the drafter to drop these sequences. If that raises, drafting is switched off."""
        drafter = self.drafter
        for sequence in sequences:
            self.pending.rows.pop(sequence.id, None)
        if not self.pending.rows:
            self.pending = Unreported()  # states of removed sequences, or of an interrupted pass, are dropped too
        if drafter is not None and sequences:
            error = attempt(lambda: drafter.forget([sequence.id for sequence in sequences]))
            if error is not None:
                self.disable_drafter(error)

    def disable_drafter(self, error: BaseException) -> None:
        """Switch drafting off for good. Requests continue with plain decoding and the same output."""
        if self.drafter is not None:
            log.warning("Drafting is switched off: the drafter %s failed.", self.drafter_name, exc_info=error)
        self.drafter, self.controller, self.drafter_idle = None, FixedDepth(), False


def guessing_room(row: RowPlan, forced: Seq[int]) -> int:
    """The greatest useful draft depth of a row: 0 during prefill, else one less than may still be emitted."""
    sequence = row.sequence
    slow = sequence.constraint is not None and sequence.constraint.slow
    return 0 if row.num_chunk or forced or slow else sequence.room - 1
