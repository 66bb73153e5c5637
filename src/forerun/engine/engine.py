"""Engine: the round, draft → verify → accept, over a batch of sequences.

This file decides only the order: the scheduler chooses which sequences are read, the controller how far to draft, the
drafter what to guess, `verify` which guesses are accepted, and `accept` what is final. Rows join and leave between
rounds. Prompts and text are handled by the front doors (`llm.py`, `async_llm.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from forerun.accept.commit import accept, host_trees
from forerun.accept.outcome import Outcome, RowOutcome, Stats
from forerun.config import EngineOptions, Speculation
from forerun.draft.base import Committed, Draft, Drafter
from forerun.engine.controller import Controller, FixedDepth, Load
from forerun.engine.delta import Delta, commit, score_prompt
from forerun.engine.reading import CommittedPart, Part, Reading, begun_parts, begun_rows, drawn_tokens, resumable
from forerun.engine.scheduler import RowPlan, Scheduler
from forerun.engine.sequence import Sequence
from forerun.errors import RequestFailed
from forerun.kernels.sampling import SamplingKernels
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree, HostView
from forerun.verify.rules import Verdict
from forerun.verify.sanitize import sanitize
from forerun.verify.verify import verify

MakeDraws = Callable[..., Draws]  # with the signature of Draws itself


@dataclass(frozen=True, slots=True)
class Round:
    """One round's plan: all rows that are read, and those of them that draw a token, with their randomness."""

    rows: Seq[RowPlan]
    drawing: Seq[RowPlan]
    draws: Draws

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens read without being drawn from."""
        return sum(row.num_chunk for row in self.rows)


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
        self.controller = controller or FixedDepth()
        self.num_ids = num_ids
        self.draws = draws
        self.kernels = kernels
        self.scheduler = Scheduler(runner.cache, self.options.max_num_seqs, self.options.chunk_tokens)
        self.sequences: dict[int, Sequence] = {}
        self.samples: dict[int, dict[int, Sequence]] = {}  # the same by request
        self.stats = Stats()

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.sequences)

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; its id must be new and larger than all before it."""
        self.sequences[sequence.id] = sequence
        self.samples.setdefault(sequence.request_id, {})[sequence.id] = sequence
        self.scheduler.submit(sequence)

    def cancel(self, request_id: int) -> None:
        """Take a request's sequences out between rounds. Unknown and finished requests are ignored."""
        self.leave(list(self.samples.get(request_id, {}).values()))

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        """One round: what each sequence that drew tokens gained. Empty while only prompts are read.

        A round that fails is as if it had not been. Where a request's own code failed, no other request is hurt.
        """
        plan = self.plan()
        if not plan.rows:
            return []
        try:
            return self.round(plan)
        except RequestFailed as failed:
            self.runner.drop([row.sequence.id for row in plan.rows])
            return self.blame(failed)
        except BaseException:
            self.runner.drop([row.sequence.id for row in plan.rows])
            raise

    def blame(self, failed: RequestFailed) -> list[Delta]:
        """A request whose code failed goes on without guesses, on which it may have failed; or else it leaves."""
        culprit = self.sequences[failed.seq_id]
        if culprit.speculation.depth > 0:
            culprit.speculation = Speculation(depth=0)
            return []
        samples = list(self.samples[culprit.request_id].values())
        self.leave(samples)
        return [Delta.failure(sample, failed.__cause__ or failed) for sample in samples]

    def round(self, plan: Round) -> list[Delta]:
        """The three verbs, in their order."""
        started = time.perf_counter()
        draft = self.draft(plan)  # draft
        drafted = time.perf_counter()
        reading = self.read(plan, draft)  # one target pass
        passed = time.perf_counter()
        verdict = verify(draft.tree, reading.node_logits(), plan.draws, self.options.verification)  # verify
        deltas, rows = self.accept(reading, verdict)  # accept: the one synchronisation
        outcome = Outcome(
            rows, plan.num_prompt_tokens, drafted - started, passed - drafted, draft.pass_s, tuple(draft.arm_s)
        )
        self.controller.record(outcome)
        self.stats.record(outcome)
        return deltas

    def plan(self) -> Round:
        """Which sequences are read in this round. Preempted sequences are forgotten by the drafter too."""
        rows, preempted = self.scheduler.plan()
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
        last = [row.sequence.tokens[-1] for row in plan.drawing]
        if self.drafter is None or not plan.drawing:
            return none_drafted(last)
        seq_ids = [row.sequence.id for row in plan.drawing]
        load = Load(
            seq_ids=seq_ids,
            wishes=[row.sequence.speculation for row in plan.drawing],
            rooms=[0 if row.num_chunk else row.sequence.room - 1 for row in plan.drawing],
            num_prompt_tokens=plan.num_prompt_tokens,
        )
        spare = self.runner.cache.spare([r.sequence.id for r in plan.rows], [r.num_certain for r in plan.rows])
        budgets = self.controller.budgets(load, self.drafter.outlook(seq_ids), spare)
        if not any(budget.depth for budget in budgets):
            return none_drafted(last)
        drafted = self.drafter.propose(plan.draws, budgets)
        roots = torch.tensor(last, dtype=torch.long) if drafted.tree.tokens.is_cpu else plan.draws.roots_tokens
        safe = sanitize(drafted.tree, roots, budgets, self.runner.decoder.config.vocab_size, self.kernels)
        draft = replace(drafted, tree=safe)
        tree = self.controller.admit(draft, load)
        if draft.resume is not None and not resumable(drafted, tree, self.drafter.taps):
            draft = replace(draft, resume=None)
        begun = begun_rows(drafted) if draft.resume is not None else ()
        left = [seq_id for row, seq_id in enumerate(seq_ids) if row not in begun and self.runner.cache.tail(seq_id)]
        if left:
            self.runner.drop(left)  # what a drafter may have read there
        return draft, tree if tree is safe else tree.without_law()  # pruned after drawing: it has another law

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
        """Make the verdict final: tokens and stops to the sequences, K and V to the cache, the news to the drafter."""
        accepted = accept(verdict, [part.tree for part in reading.parts if part.tree], reading.drawn)
        reading.check_drawn(accepted)
        runs = iter(accepted)
        deltas, outcomes, kept = [], [], []
        logits = reading.states.logits[:, : self.num_ids]  # padding ids have no log-probabilities
        for part, first in zip(reading.parts, reading.first_rows(), strict=True):
            sequence = part.row.sequence
            if part.num_scored:
                score_prompt(sequence, part, logits[first:])
            if part.tree is None:
                kept.append(CommittedPart(part, []))
                continue
            run = next(runs)
            delta = commit(sequence, run, logits, first + part.num_scored)
            assert delta.outcome is not None, "a committed run has an outcome"
            outcomes.append(delta.outcome)
            deltas.append(delta)
            kept.append(CommittedPart(part, run.nodes[: len(delta.token_ids)]))  # an end may cut a run short
        ended = [self.sequences[d.seq_id] for d in deltas if d.finish_reason is not None]
        self.keep(kept, reading)
        if ended:
            self.leave(ended)
        return deltas, outcomes

    def keep(self, kept: Seq[CommittedPart], reading: Reading) -> None:
        """Keep the accepted paths in the cache and tell the drafter what was read; of those, too, that end here."""
        self.runner.keep([k.sequence.id for k in kept], [k.path for k in kept])
        tokens: list[int] = []
        offsets = [0]
        for k in kept:
            first = k.sequence.num_read
            k.sequence.num_read += len(k.path)
            tokens += k.sequence.tokens[first : k.sequence.num_read]
            offsets.append(len(tokens))
        if self.drafter is not None and kept:
            self.drafter.observe(
                Committed(
                    seq_ids=[k.sequence.id for k in kept],
                    tokens=tokens,
                    offsets=offsets,
                    roots=[k.sequence.tokens[k.sequence.num_read] for k in kept],
                    features=reading.features(kept),
                    tenants=[k.sequence.tenant for k in kept],
                    num_prompts=[k.sequence.num_prompt for k in kept],
                )
            )

    def leave(self, sequences: Seq[Sequence]) -> None:
        """Take sequences out of the engine and free what was held for them."""
        for sequence in sequences:
            self.scheduler.finish(sequence)
            del self.sequences[sequence.id]
            samples = self.samples[sequence.request_id]
            del samples[sequence.id]
            if not samples:
                del self.samples[sequence.request_id]
        self.runner.release([s.id for s in sequences])
        self.forget(sequences)

    def forget(self, sequences: Seq[Sequence]) -> None:
        """Tell the drafter to drop these sequences."""
        if self.drafter is not None and sequences:
            self.drafter.forget([s.id for s in sequences])


def none_drafted(roots: Seq[int]) -> tuple[Draft, DraftTree]:
    """A draft of roots alone."""
    known = HostView([[0]] * len(roots), [[-1]] * len(roots), [[root] for root in roots])
    draft = Draft(replace(DraftTree.bare(torch.tensor(roots, dtype=torch.long)), known=known))
    return draft, draft.tree
