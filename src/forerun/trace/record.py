"""Recording: runs one prompt through the engine and records every round.

`WatchedEngine` reads the values that are passed between draft, verify and accept, without changing them; `WatchedDraws`
records the drafter's probabilities. Values that a round does not store (p, coins, chances) are pure functions of its
draws and are computed again. An engine that is not traced runs none of this code.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import replace

from forerun.accept.commit import accept
from forerun.accept.delta import Delta
from forerun.accept.outcome import RowOutcome
from forerun.control.measured import MeasuredDepth
from forerun.draft.base import Draft
from forerun.engine.driver import EngineDriver
from forerun.engine.engine import Engine, RoundPlan
from forerun.engine.sequence import Sequence
from forerun.engine.target_pass import TargetPass
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.request import Request, SpeculationOption
from forerun.sampling.draws import Children, Draws, PathState
from forerun.sampling.params import SamplingParams
from forerun.sampling.transforms import Logits
from forerun.text.detokenize import REPLACEMENT
from forerun.text.tokenizer import Tokenizer
from forerun.trace.values import Emitted, Path, Spell, Trace, TracedRound, explain, verified_values
from forerun.tree import DraftTree, HostTree
from forerun.verify.rules import Verdict


def trace(llm: LLM, prompt: str | Seq[int], params: SamplingParams, speculation: SpeculationOption = None) -> Trace:
    """Generate one answer and return the trace of its rounds. The LLM must be idle.

    Drafts have the depth of `speculation`, even if that is slower than plain decoding. If plain decoding must give the
    same tokens (with coupled verification, or at temperature 0), it is run too, and the tokens are compared.
    """
    if params.n != 1:
        raise InvalidRequest("n", f"{params.n} must be 1: a trace shows one answer.")
    assert not llm.engine.has_work, "a trace needs an idle LLM"
    sequence = llm.requests.sequences(Request.of(prompt, params, speculation))[0]
    watched = WatchedEngine(llm.engine, llm.tokenizer)
    *_, last = EngineDriver(watched).follow([sequence], lambda: None)
    prompt_ids, token_ids = sequence.tokens[: sequence.num_prompt], sequence.tokens[sequence.num_prompt :]
    verification, same = llm.engine.options.verification, None
    if verification == "coupled" or params.greedy:
        plain = llm.generate([prompt_ids], replace(params, seed=sequence.seed), speculation=False)[0]
        same = list(plain.outputs[0].token_ids) == token_ids
    return Trace(
        prompt=prompt if isinstance(prompt, str) else llm.tokenizer.decode(prompt_ids, skip_special_tokens=True),
        prompt_token_ids=prompt_ids,
        text=watched.text,
        token_ids=token_ids,
        seed=sequence.seed,
        temperature=0.0 if params.greedy else params.temperature,
        verification=verification,
        finish_reason=last.finish_reason or "",
        same_as_plain=same,
        rounds=watched.rounds,
    )


class WatchedEngine(Engine):
    """An engine on an LLM's model and drafter that records each round of one sequence."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        super().__init__(
            engine.runner,
            engine.drafter,
            options=engine.options,
            controller=deepcopy(engine.controller),
            num_ids=engine.num_ids,
        )
        if isinstance(self.controller, MeasuredDepth):
            self.controller.times_count = False  # recording takes longer than a round
        self.tokenizer = tokenizer
        self.rounds: list[TracedRound] = []
        self.text = ""
        self.drafted: tuple[RoundPlan, DraftTree] | None = None
        self.choice = ""

    def plan(self, alone: Sequence | None = None, drafts: bool = True) -> RoundPlan:
        """The engine's plan, with draws that record the drafter's probabilities."""
        plan = super().plan(alone, drafts)
        return replace(plan, draws=WatchedDraws.of(plan.draws))

    def draft(self, plan: RoundPlan) -> Draft:
        draft = super().draft(plan)
        draft = replace(draft, tree=replace(draft.tree, known=None))  # the trace needs all values on the host
        self.drafted = plan, draft.tree
        self.choice = self.controller.reason() if isinstance(self.controller, MeasuredDepth) else ""
        return draft

    def accept(self, target: TargetPass, verdict: Verdict) -> tuple[list[Delta], list[RowOutcome]]:
        """The engine's accept step, recorded; its values are computed first, since they depend on the text before."""
        traced = [self.traced_round(target, verdict)] if any(row.tree for row in target.rows) else []
        deltas, rows = super().accept(target, verdict)
        for round_, delta in zip(traced, deltas, strict=True):
            self.text += delta.text
            emitted = round_.emitted[: len(delta.token_ids)]  # the text may have ended within the accepted tokens
            self.rounds.append(replace(round_, emitted=emitted, segments=delta.segments, text=self.text))
        return deltas, rows

    def traced_round(self, target: TargetPass, verdict: Verdict) -> TracedRound:
        """The round from its verdict, before stop conditions and detokenization."""
        assert self.drafted is not None, "a round drafts before it accepts"
        plan, tree = self.drafted
        (row,) = target.rows
        assert row.tree is not None, "a row that draws has a tree"
        assert isinstance(plan.draws, WatchedDraws), "a watched round has watched draws"
        values = verified_values(tree, target.node_logits(), plan.draws, self.options.verification)
        q = plan.draws.q | declared(tree, row.tree, plan.draws.vocab)
        spell = speller(self.tokenizer, list(row.sequence.tokens))
        (run,) = accept(verdict, [row.tree])
        emitted = enumerate(zip(run.nodes, run.tokens, run.origins, strict=True))
        return TracedRound(
            number=len(self.rounds) + 1,
            num_prompt_tokens=row.plan.num_chunk,
            choice=self.choice,
            rule=values.rule,
            guesses=explain(row.tree, values, run.nodes, q, spell),
            emitted=[
                Emitted(token, spell(run.tokens[:i], token), origin, float(values.law[node, token]))
                for i, (node, token, origin) in emitted
            ],
            segments=(),
            text="",
        )


class WatchedDraws(Draws):
    """A round's draws that record `q`, the drafter's probabilities of its draft tokens, by path and token."""

    q: dict[tuple[Path, int], float]

    @classmethod
    def of(cls, draws: Draws) -> WatchedDraws:
        """Draws of the same rows as `draws` that record `q`."""
        watched = cls(
            draws.rows,
            draws.vocab,
            rejection=draws.rejection,
            device=draws.device,
            num_ids=draws.num_ids,
            level=draws.level,
        )
        watched.q = {}
        return watched

    def children(self, logits: Logits, at: PathState, width: int, *, survival: bool = True) -> Children:
        """The drafter's tokens; their probabilities are recorded."""
        children = super().children(logits, at, width, survival=survival)
        law = self.probs(logits, at).nan_to_num(nan=0.0)
        chances = law.gather(1, children.tokens.clamp_min(0))
        for path, tokens, row_chances in zip(
            at.drawn.tolist(), children.tokens.tolist(), chances.tolist(), strict=True
        ):
            above = tuple(token for token in path if token >= 0)
            self.q |= {(above, token): chance for token, chance in zip(tokens, row_chances, strict=True) if token >= 0}
        return children


def declared(tree: DraftTree, host: HostTree, vocab: int) -> dict[tuple[Path, int], float]:
    """The probabilities that the tree declares as `q`, in rejection modes, by path and token."""
    if tree.q is None:
        return {}
    paths, rows = host.paths(), tree.q.row[0, list(host.places)].tolist()
    laws = tree.q.dense(vocab)
    nodes = zip(host.tokens[1:], host.parents[1:], strict=True)
    return {(paths[parent], token): float(laws[rows[parent], token]) for token, parent in nodes if rows[parent] >= 0}


def speller(tokenizer: Tokenizer, before: Seq[int]) -> Spell:
    """A function that returns the text that a token adds after a path; if it adds none, its surface form."""

    def spell(path: Seq[int], token: int) -> str:
        decoder = tokenizer.decoder(skip_special_tokens=False, after=[*before, *path])
        text = decoder.push(token) + decoder.finish()
        return text if text and REPLACEMENT not in text else tokenizer.surface(token) or ""

    return spell
