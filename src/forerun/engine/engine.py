"""Engine: speculative decoding with continuous batching.

`Engine.round` is one round: draft, run the target, verify, accept. The methods below it are these steps, in this order.
An error in a round ends only the request that caused it (`recovery.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from weakref import proxy

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
from forerun.engine.recovery import Recovery
from forerun.engine.scheduler import ChunkSize, RowPlan, Scheduler
from forerun.engine.sequence import ActiveSequences, OnDelta, Sequence, Status
from forerun.engine.target_pass import PendingTokens, RoundRow, TargetPass, partial_pass, reused_nodes, unseen_tokens
from forerun.guard import attempt
from forerun.kernels.sampling import SamplingKernels
from forerun.models.chains import VerifiedChains
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree
from forerun.verify.rules import Verdict
from forerun.verify.sanitize import sanitize, well_formed
from forerun.verify.verify import verify

MakeDraws = Callable[..., Draws]  # with the signature of Draws itself
MALFORMED = (
    "A draft of %s was dropped: tokens and parents of its DraftTree must be int64 tensors on one device and of one "
    "shape, with a row for each row of draws. Other such drafts are dropped without a message."
)
MAX_PENDING_TOKENS = 128  # a paused drafter receives accepted tokens in batches of this size
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """The sequences of a round (`rows`), those that sample a token (`drawing`), and their sampling state (`draws`).

    A sequence in the middle of its prefill samples no token. `drafts`: whether this round may draft. `constrained`:
    whether any request has a grammar.
    """

    rows: Seq[RowPlan]
    drawing: Seq[RowPlan]
    draws: Draws
    drafts: bool
    constrained: bool
    num_prompt_tokens: int  # prefilled in this round


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
        weak = proxy(self)  # without a reference cycle the weights are freed with the last reference to the engine
        self.prefixes = Prefixes(runner.cache, lambda: weak.drafter, self.options.prefix_cache)
        self.scheduler = Scheduler(self.prefixes, self.options.max_num_seqs, ChunkSize.of(self.options, runner))
        self.active = ActiveSequences()
        self.pending = PendingTokens()  # accepted tokens that the drafter has not received yet
        self.drafter_paused = False  # whether the last decision was not to draft
        self.malformed = False  # whether a draft was dropped for its form, which is logged once
        self.stats = Stats()
        self.recovery = Recovery(weak)

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

        `on_delta` is called with each delta of the sequence, which `step` also returns. After an interrupt the last
        delta may be delivered twice, as the same object.
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
                sample.status = Status.FINISHED  # if anything below raises, recovery removes the sample
            if not recovered:
                return
            error = attempt(self.notify_drafter)
            if error is not None:
                self.disable_drafter(error)
            self.remove(samples)
            recovery.unfinished = False

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """Run one round; returns a delta for each sequence that sampled tokens. Empty if the round was prefill only.

        An error before `active.decided` is assigned leaves all sequences unchanged. After the assignment the round is
        final; if an interrupt follows, the next step completes it. An error ends only the request that caused it; an
        interrupt of the main thread (Ctrl-C) is raised to the caller.
        """
        recovery = self.recovery
        if recovery.unfinished and (error := recovery.recover()) is not None:
            return recovery.fail_one(error)
        if not self.sequences:
            return []
        recovery.unfinished = True
        alone = None if recovery.search is None else recovery.next_suspect()
        deltas: list[Delta] = []
        error = attempt(lambda: deltas.extend(self.round(self.plan(alone, drafts=recovery.search is None))))
        if error is not None:
            return recovery.continue_after(error)
        self.active.decided = None
        recovery.unfinished = False
        return deltas

    def round(self, plan: RoundPlan) -> list[Delta]:
        """Draft, run the target, verify, accept. Returns a delta for each sequence that sampled tokens."""
        clock = RoundClock(plan.draws.device)
        draft = self.draft(plan)
        clock.mark()
        target = self.run_target(plan, draft)
        clock.mark(target.states.span)
        verdict = verify(draft.tree, target.node_logits(), plan.draws, self.options.verification, self.runner.judge)
        if (download := self.begin_next(plan, target, verdict)) is not None:
            verdict = replace(verdict, download=download)
        deltas, rows = self.accept(target, verdict)
        self.record(plan, draft, rows, clock)
        return deltas

    def plan(self, alone: Sequence | None = None, drafts: bool = True) -> RoundPlan:
        """Choose the sequences of the next round, or `alone` only. The drafter drops the state of preempted ones."""
        rows, preempted = self.scheduler.plan(alone)
        assert rows, "every unfinished sequence has at least one token to read"
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
        """Draft a tree for each sequence that samples; the tree is its root alone if nothing can or should be drafted.

        Tokens that a grammar forces (it allows no other) are drafted without the drafter.
        """
        roots = [row.sequence.tokens[-1] for row in plan.drawing]
        tree = bare = DraftTree.of_roots(roots)
        draft = Draft(bare)
        if plan.drafts and plan.drawing:
            forced: Seq[Seq[int]] = [()] * len(roots)
            if plan.constrained:
                forced = forced_chains(plan.rows, plan.drawing, self.runner.cache)
            if self.drafter is not None:
                draft, tree = self.propose(self.drafter, plan, draft, forced)
            if plan.constrained:
                tree = constrained_tree(tree, plan.draws, forced)
            if draft.tree is not bare:
                draft = self.with_tree(plan, draft, tree)
        tree = tree.to(tree.tokens.device)  # sets `known`, the host's copy
        return draft if tree is draft.tree else replace(draft, tree=tree)

    def propose(self, drafter: Drafter, plan: RoundPlan, bare: Draft, forced: Seq[Seq[int]]) -> tuple[Draft, DraftTree]:
        """The draft within the controller's budgets, and its sanitized, pruned tree; `bare` if nothing is drafted."""
        seq_ids, controller = plan.draws.seq_ids, self.controller
        load = Load(
            seq_ids=seq_ids,
            speculations=[row.sequence.speculation for row in plan.drawing],
            rooms=[row.max_draft_depth(chain) for row, chain in zip(plan.drawing, forced, strict=True)],
            num_prompt_tokens=plan.num_prompt_tokens,
            num_context=sum(len(row.sequence.tokens) for row in plan.drawing),
        )
        self.drafter_paused = True
        if controller.skips(load):
            return bare, bare.tree
        self.notify_drafter()
        num_forced = dict(zip(seq_ids, map(len, forced), strict=True))
        counts = [row.num_certain + num_forced.get(row.sequence.id, 0) for row in plan.rows]
        spare = self.runner.cache.spare([row.sequence.id for row in plan.rows], counts)
        budgets = controller.budgets(load, drafter.outlook(seq_ids), spare)
        if not any(budget.depth for budget in budgets):
            return bare, bare.tree
        self.drafter_paused = False
        draft = Draft.of(drafter, drafter.propose(plan.draws, budgets))
        if draft.tree.tokens.shape[1:] == (1,):  # not sanitized yet: it may have one dimension
            return bare, bare.tree
        safe = self.sanitized(draft.tree, plan, bare.tree, budgets)
        tree = controller.admit(replace(draft, tree=safe), load)
        return draft, tree if tree is safe else tree.without_law()  # pruned after sampling: `q` no longer holds

    def sanitized(self, tree: DraftTree, plan: RoundPlan, bare: DraftTree, budgets: Seq[Budget]) -> DraftTree:
        """The valid part of the drafter's tree: it starts at this round's roots and is within its budgets."""
        has_roots = tree.sound or tree.tokens.is_cpu
        roots = (tree if tree.sound else bare).tokens[:, 0] if has_roots else plan.draws.roots_tokens
        safe = sanitize(tree, roots, budgets, self.runner.vocab_size, self.kernels)
        if safe.depth == 0 and not (self.malformed or well_formed(tree, roots)):
            self.malformed = True
            log.warning(MALFORMED, self.drafter_name)
        return safe

    def with_tree(self, plan: RoundPlan, draft: Draft, tree: DraftTree) -> Draft:
        """The draft with the tree that is verified.

        An early exit has run draft tokens through the target's lower layers. Their states are reused if the tree is
        still the one that was drafted; else they are dropped from the KV cache.
        """
        num_reused = reused_nodes(draft, tree, () if self.drafter is None else self.drafter.taps)
        if draft.resume is not None and not any(num_reused):
            draft = replace(draft, resume=None)
        if draft.drafter is not None and (num_added := tree.tokens.shape[1] - draft.drafter.shape[1]):
            draft = replace(draft, drafter=pad(draft.drafter, (0, num_added), value=-1))  # forced tokens: no drafter
        rows = zip(plan.draws.seq_ids, num_reused, strict=True)
        stale = [seq_id for seq_id, num in rows if not num and self.runner.cache.tail(seq_id)]
        if stale:
            self.runner.drop(stale)
        return replace(draft, tree=tree)

    def run_target(self, plan: RoundPlan, draft: Draft) -> TargetPass:
        """Run one forward pass of the target over the prompt chunks, roots and draft tokens of all sequences."""
        tree = draft.tree
        hosts = tree.host()
        if draft.drafter is not None:
            hosts = [replace(host, drafters=row) for host, row in zip(hosts, draft.drafter.tolist(), strict=True)]
        tree_of = {row.sequence.id: host for row, host in zip(plan.drawing, hosts, strict=True)}
        rows = RoundRow.of_plans(plan.rows, tree_of)
        taps = self.drafter.taps if self.drafter else ()
        unseen = unseen_tokens(rows, tree.tokens) if tree.unseen else None
        resumed = partial_pass(rows, draft) if draft.resume is not None else None
        states = self.runner.read([row.read() for row in rows], taps, unseen, resumed)
        return TargetPass(rows, states, tree.tokens if tree.unseen else None)

    def begin_next(self, plan: RoundPlan, target: TargetPass, verdict: Verdict) -> Download | None:
        """On a GPU, start the next round's drafting while the host accepts this round; or its pass, without drafts.

        Returns the copy of the verdict to the host, in progress; None if nothing is started.
        """
        needs_host = plan.num_prompt_tokens or plan.constrained or verdict.ranked is not None
        if not self.runner.draws_unseen or needs_host:
            return None
        if self.drafter is None or self.drafter_paused:
            if self.scheduler.waiting or any(row.sequence.room < 2 for row in plan.drawing):
                return None
            taps = self.drafter.taps if self.drafter else ()
            return self.runner.read_ahead(plan.draws.seq_ids, verdict.packed, taps)
        states = target.states.tapped
        if target.drawn is None or states is None:
            return None
        num_drafted = [row.num_nodes - 1 for row in target.rows]
        chains = VerifiedChains(plan.draws, target.drawn, num_drafted, verdict.packed, states.rows())
        return begin_next(self.drafter, chains)

    def accept(self, target: TargetPass, verdict: Verdict) -> tuple[list[Delta], list[RowOutcome]]:
        """Make the verdict final: update the KV cache, the sequences (tokens, stops) and the drafter.

        Everything is computed first; the host waits for the device once. The assignment of `active.decided` makes the
        round final.
        """
        accepted = accept(verdict, [row.tree for row in target.rows if row.tree], target.drawn)
        target.check_drawn(accepted)
        drawing = [row.sequence for row in target.rows if row.tree]
        # Grammars may raise: they run before any sequence is changed, so that the round then has no effect.
        runs = iter([(run, s.completed_by(run.tokens)) for s, run in zip(drawing, accepted, strict=True)])
        deltas, outcomes, final_rows, places = [], [], [], []
        logits, num_ids = target.states.logits, self.num_ids  # padding ids have no log-probabilities
        logits = logits if num_ids in (None, logits.shape[1]) else logits[:, :num_ids]
        for row in target.rows:
            sequence = row.sequence
            if row.num_scored:
                sequence.score_prompt(row.num_scored, logits[row.first :], self.kernels)
            if row.tree is None:
                final_rows.append(row)
                continue
            run, completed_by = next(runs)
            delta = sequence.delta(run, logits, row.first_node, self.kernels, completed_by)
            assert delta.outcome is not None, "an accepted run has an outcome"
            outcomes.append(delta.outcome)
            deltas.append(delta)
            places.append(len(sequence.tokens))
            kept = run.nodes[: len(delta.token_ids)]  # a stop may cut the run short
            final_rows.append(row._replace(accepted=kept))
        self.runner.keep([row.sequence.id for row in final_rows], [row.path for row in final_rows])
        self.active.decided = list(zip(places, deltas, strict=True))
        self.active.settle()
        self.commit_read(final_rows, target)
        finished = [delta.seq_id for delta in deltas if delta.finish_reason is not None]
        if finished:
            self.notify_drafter()
            self.remove([self.active.sequences[seq_id] for seq_id in finished])
        return deltas, outcomes

    def commit_read(self, rows: Seq[RoundRow], target: TargetPass) -> None:
        """Count the final tokens as read, and pass them to the drafter: at once, or in batches while it is paused."""
        if self.drafter is not None:
            self.pending.add(rows, target.states.tapped)
        for row in rows:
            row.sequence.num_read += len(row.path)
        if not self.drafter_paused or self.pending.num_tokens >= MAX_PENDING_TOKENS:
            self.notify_drafter()

    def notify_drafter(self) -> None:
        """Pass all pending tokens to the drafter."""
        pending, self.pending = self.pending, PendingTokens()
        if self.drafter is not None and pending.rows:
            self.drafter.observe(pending.committed(self.options.prefix_cache))

    def record(self, plan: RoundPlan, draft: Draft, rows: list[RowOutcome], clock: RoundClock) -> None:
        """Update the statistics; the controller and the chunk size learn from the round's times."""
        draft_s, draft_pass_s, pass_s, verdict_s = clock.times(draft.pass_s)
        is_typical = self.drafter is not None and not plan.num_prompt_tokens and not clock.captured
        asked = [i for i, row in enumerate(plan.drawing) if is_typical and row.sequence.speculation.depth > 0]
        expected_s = self.controller.plain_s(len(rows)) if asked else None  # without speculation there is no gain
        counted = self.prefixes.counted() if self.prefixes.num_queried else (0, 0)
        outcome = Outcome(
            rows, plan.num_prompt_tokens, draft_s, pass_s, draft_pass_s, tuple(draft.drafter_s), verdict_s, expected_s,
            *counted, clock.captured,
        )  # fmt: skip
        if self.drafter is not None:
            self.controller.record(outcome)
        self.stats.record(outcome)
        if plan.num_prompt_tokens:
            self.scheduler.chunk.record(outcome)
        if (plain_s := outcome.plain_s) is not None:
            for i in asked:
                plan.drawing[i].sequence.pace.add(outcome.round_s, plain_s * rows[i].num_emitted, rows[i].num_emitted)

    def remove(self, sequences: Seq[Sequence]) -> None:
        """Remove sequences and free their memory. It is safe to call this twice."""
        self.forget(sequences)
        self.runner.hand_over([sequence.id for sequence in sequences])
        for sequence in sequences:
            self.prefixes.retire(sequence)
            self.scheduler.finish(sequence)
            self.active.remove(sequence)

    def forget(self, sequences: Seq[Sequence]) -> None:
        """Have the drafter drop its state of these sequences. If that raises, drafting is switched off."""
        drafter = self.drafter
        for sequence in sequences:
            self.pending.rows.pop(sequence.id, None)
        if not self.pending.rows:
            self.pending = PendingTokens()  # drops states of removed sequences or of an interrupted pass, too
        if drafter is not None and sequences:
            error = attempt(lambda: drafter.forget([sequence.id for sequence in sequences]))
            if error is not None:
                self.disable_drafter(error)

    def disable_drafter(self, error: BaseException) -> None:
        """Switch drafting off for good. Requests continue with plain decoding and the same output."""
        if self.drafter is not None:
            log.warning("Drafting is switched off: the drafter %s failed.", self.drafter_name, exc_info=error)
        self.drafter, self.controller, self.drafter_paused = None, FixedDepth(), False
