"""A trace is true: numbers agree with other code, verdicts with their rule, and tokens with plain decoding.

p and q are compared with transformers' forward pass on each draft token's path; acceptance probabilities are
computed again from those distributions.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from forerun.accept.commit import Origin
from forerun.config import Speculation
from forerun.draft.base import Budget, Committed, Draft
from forerun.draft.model.model import ModelDrafter
from forerun.engine import calibration
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from forerun.trace.record import trace
from forerun.trace.values import Trace, TracedRound
from forerun.tree import DraftLaw, DraftTree
from kit.checkpoints import SMALL, TARGET
from kit.drafters import Stateless
from kit.tracing import CASES, CHAIN, MODEL, PROMPT, TOP_K, TREE, Case, cases, llm_of, params_with, traces


@cache
def transformers_model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def law(folder: Path, tokens: tuple[int, ...], temperature: float) -> np.ndarray:
    """The next token's distribution by transformers, under this file's sampling parameters."""
    with torch.no_grad():
        logits = transformers_model(folder)(torch.tensor([tokens])).logits[0, -1].double().numpy()
    if temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    scaled = logits / temperature
    scaled[scaled < np.sort(scaled)[-TOP_K]] = -np.inf
    weights = np.exp(scaled - scaled.max())
    return weights / weights.sum()


def with_texts(traced: Trace) -> list[tuple[TracedRound, tuple[int, ...]]]:
    """Every round, and the token ids before it."""
    texts_before = accumulate(
        (tuple(e.token_id for e in r.emitted) for r in traced.rounds), initial=tuple(traced.prompt_token_ids)
    )
    return list(zip(traced.rounds, texts_before, strict=False))


def path(round_: TracedRound, node: int) -> tuple[int, ...]:
    """The tokens from below the root down to a node."""
    if node == 0:
        return ()
    draft_token = round_.guesses[node - 1]
    return (*path(round_, draft_token.parent), draft_token.token_id)


def accepted_path(round_: TracedRound) -> list[int]:
    """The accepted nodes from the root on."""
    return [0, *(draft_token.node for draft_token in round_.guesses if draft_token.verdict == "accepted")]


@pytest.mark.short("model-coupled-3x2-0.8", "ngram-token-4x1-0.4")
@cases
def test_p_and_q_are_the_models_probabilities_along_the_path(case: Case) -> None:
    temperature, judged = case[3], 0
    for traced in traces(case):
        for round_, before in with_texts(traced):
            for draft_token in round_.guesses:
                above = before + path(round_, draft_token.parent)
                assert draft_token.p == pytest.approx(law(TARGET, above, temperature)[draft_token.token_id], abs=1e-4)
                if case[0] == MODEL:
                    assert draft_token.q == pytest.approx(
                        law(SMALL, above, temperature)[draft_token.token_id], abs=1e-4
                    )
                else:
                    assert draft_token.q is None
                judged += 1
            for node, emitted in zip(accepted_path(round_), round_.emitted, strict=False):
                above = before + path(round_, node)
                assert emitted.p == pytest.approx(law(TARGET, above, temperature)[emitted.token_id], abs=1e-4)
    assert (judged > 0) == (case[0] is not None)


@pytest.mark.short("model-coupled-4x1-1.0", "model-token-3x2-1.0", "model-block-7x1-0.8")
@cases
def test_verdicts_follow_from_the_numbers_by_their_rule(case: Case) -> None:
    rules = {"token": by_coin, "block": by_block, "follow": by_match}
    for traced in traces(case):
        assert [r.number for r in traced.rounds] == list(range(1, len(traced.rounds) + 1))
        for round_, before in with_texts(traced):
            assert round_.rule == expected_rule(case, round_)
            assert accepted_path(round_) == rules[round_.rule](round_, before, case[3])
            check_verdicts(round_)


def expected_rule(case: Case, round_: TracedRound) -> str:
    """Draft tokens without a declared distribution are matched in every mode; a tree is not verified as a block."""
    draft, verification, speculation, temperature = case
    chosen = temperature == 0 and speculation.width == 1  # a greedy chain is not sampled: it declares no distribution
    if verification == "coupled" or draft != MODEL or not round_.guesses or chosen:
        return "follow"
    return "token" if speculation.width > 1 else verification


def by_match(round_: TracedRound, before: tuple[int, ...], temperature: float) -> list[int]:
    """Down from the root along the draft tokens that are the target's draws."""
    kept, going = [0], True
    while going:
        below = [g for g in round_.children(kept[-1]) if g.token_id == g.drawn_id]
        going = bool(below)
        kept += [g.node for g in below]
        assert len(below) <= 1
    return kept


def by_coin(round_: TracedRound, before: tuple[int, ...], temperature: float) -> list[int]:
    """Down from the root; siblings in turn, each against what the siblings rejected before it have left of p and q."""
    kept = [0]
    while True:
        above = before + path(round_, kept[-1])
        p, q = law(TARGET, above, temperature).copy(), law(SMALL, above, temperature).copy()
        for draft_token in round_.children(kept[-1]):
            assert draft_token.coin is not None
            x = draft_token.token_id
            assert draft_token.chance == pytest.approx(min(1, p[x] / q[x]), abs=2e-3)
            if draft_token.coin * q[x] < p[x]:
                kept.append(draft_token.node)
                break
            p = np.maximum(p - q, 0)
            p, q[x] = p / p.sum(), 0
            q = q / q.sum() if q.sum() > 0 else q
        else:
            return kept


def by_block(round_: TracedRound, before: tuple[int, ...], temperature: float) -> list[int]:
    """The deepest draft token whose coin is at most h, with all before it (2403.10444, algorithm 2)."""
    w, deepest = 1.0, 0
    for draft_token in round_.guesses:
        above, x = before + path(round_, draft_token.parent), draft_token.token_id
        w = min(1.0, w * law(TARGET, above, temperature)[x] / law(SMALL, above, temperature)[x])
        behind = (*above, x)
        rest = np.maximum(w * law(TARGET, behind, temperature) - law(SMALL, behind, temperature), 0).sum()
        h = w if draft_token.node == len(round_.guesses) else 1.0 if rest + 1 - w <= 0 else rest / (rest + 1 - w)
        assert draft_token.chance == pytest.approx(h, abs=2e-3)
        assert draft_token.coin is not None
        deepest = draft_token.node if draft_token.coin <= h else deepest
    return list(range(deepest + 1))


def test_the_cases_hold_every_kind_of_verdict_and_token() -> None:
    rounds = [(round_.rule, round_) for case in CASES for traced in traces(case) for round_ in traced.rounds]
    verdicts = {(rule, draft_token.verdict) for rule, round_ in rounds for draft_token in round_.guesses}
    assert verdicts >= {
        (rule, verdict) for rule in ("follow", "token") for verdict in ("accepted", "rejected", "not judged")
    }
    assert verdicts >= {("block", "accepted"), ("block", "rejected")}
    assert any("saved later" in draft_token.reason for _, round_ in rounds for draft_token in round_.guesses)
    assert {token.origin for _, round_ in rounds for token in round_.emitted} == set(Origin)


def check_verdicts(round_: TracedRound) -> None:
    """A draft token has a verdict where its turn came; the reason names what decided."""
    kept = accepted_path(round_)
    for draft_token in round_.guesses:
        sibling_accepted_before = any(
            g.node in kept and g.node < draft_token.node for g in round_.children(draft_token.parent)
        )
        if draft_token.node in kept:
            continue
        in_turn = round_.rule == "block" or (
            draft_token.parent in kept and not (round_.rule == "token" and sibling_accepted_before)
        )
        assert draft_token.verdict == ("rejected" if in_turn else "not judged")
        if not in_turn:
            above = round_.guesses[draft_token.parent - 1].reason if draft_token.parent not in kept else ""
            behind = "after a rejected token" if "not verified" not in above else above.removeprefix("not verified: ")
            behind = "on another branch" if behind == "another was accepted" else behind
            assert draft_token.reason == "not verified: " + (
                behind if draft_token.parent not in kept else "another was accepted"
            )
    for draft_token in round_.guesses:
        if draft_token.verdict != "not judged":
            decided = draft_token.coin if round_.rule != "follow" else None
            assert ("the target sampled" if decided is None else f"coin {decided:.3f}") in draft_token.reason


@pytest.mark.short("model-coupled-4x1-1.0", "model-token-4x1-0.0")
@cases
def test_the_emitted_tokens_are_the_answer_and_those_of_plain_decoding_where_promised(case: Case) -> None:
    draft, verification, speculation, temperature = case
    for traced in traces(case):
        params = params_with(temperature, traced.seed)
        answer = llm_of(draft, verification).generate(PROMPT, params, speculation=speculation)[0].outputs[0]
        emitted = [token for round_ in traced.rounds for token in round_.emitted]
        assert [token.token_id for token in emitted] == list(traced.token_ids) == list(answer.token_ids)
        assert [token.origin for token in emitted] == list(answer.origins)
        assert traced.text == traced.rounds[-1].text == answer.text
        assert "".join(s.text for round_ in traced.rounds for s in round_.segments) == answer.text
        assert traced.finish_reason == answer.finish_reason == "length"
        if verification == "coupled" or temperature == 0:
            assert traced.same_as_plain is True
            assert answer.token_ids == llm_of(None).generate(PROMPT, params)[0].outputs[0].token_ids
        else:
            assert traced.same_as_plain is None
        for round_, before in with_texts(traced):
            following = round_.emitted[-1]
            if round_.rule == "follow" and following.origin is Origin.RECOVERED:
                stop = [0, *(g.node for g in round_.guesses if g.verdict == "accepted")][-1]
                assert {g.drawn_id for g in round_.children(stop)} == {following.token_id}
            assert len(before) == len(traced.prompt_token_ids) + sum(
                len(r.emitted) for r in traced.rounds[: round_.number - 1]
            )


def test_a_difference_from_plain_decoding_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(TARGET), MODEL, dtype="float32", max_num_seqs=1)
    honest = llm.generate

    def other_seed(prompts: object, params: SamplingParams, **others: object) -> object:
        return honest(prompts, replace(params, seed=1 + (params.seed or 0)), **others)  # type: ignore[arg-type]

    monkeypatch.setattr(llm, "generate", other_seed)
    assert trace(llm, PROMPT, params_with(1.0, 3)).same_as_plain is False


def test_tracing_leaves_the_llm_as_it_was() -> None:
    llm = llm_of(MODEL)
    engine, before = llm.engine, llm.generate(PROMPT, params_with(1.0, 9), speculation=CHAIN)[0]
    trace(llm, PROMPT, params_with(1.0, 9), CHAIN)
    assert llm.engine is engine
    assert not engine.has_work
    assert engine.runner.cache.num_rows == 0
    assert isinstance(llm.drafter, ModelDrafter)
    assert not llm.drafter.sequences
    assert llm.generate(PROMPT, params_with(1.0, 9), speculation=CHAIN)[0] == before


def test_a_stop_token_within_an_accepted_run_ends_the_trace_there() -> None:
    llm = llm_of(MODEL)
    params = params_with(0.0, 0, max_tokens=40)
    free = trace(llm, PROMPT, params, CHAIN)
    seen: set[int] = set()
    for round_ in free.rounds:
        first = round_.emitted[0].token_id
        if round_.num_accepted >= 2 and first not in seen:
            break
        seen |= {token.token_id for token in round_.emitted}
    else:
        pytest.fail("no round accepts two draft tokens of which the first is new")
    cut = trace(llm, PROMPT, replace(params, stop_token_ids=(first,)), CHAIN)
    assert cut.finish_reason == "stop"
    assert cut.same_as_plain is True
    assert [token.token_id for token in cut.rounds[-1].emitted] == [first]
    assert cut.rounds[-1].num_accepted >= 2
    assert cut.rounds[:-1] == free.rounds[: len(cut.rounds) - 1]


@pytest.mark.parametrize("speculation", [CHAIN, TREE])
def test_the_end_token_is_in_the_trace_and_not_in_the_text(speculation: Speculation) -> None:
    llm = llm_of(MODEL)
    end = llm.requests.eos_ids[0]
    traced = trace(
        llm, PROMPT, SamplingParams(temperature=1.0, seed=4, max_tokens=60, logit_bias={end: 20.0}), speculation
    )
    assert traced.finish_reason == "stop"
    assert traced.same_as_plain is True
    assert traced.rounds[-1].emitted[-1].token_id == end
    assert traced.rounds[-1].emitted[-1].text == llm.tokenizer.surface(end)
    assert llm.tokenizer.surface(end) not in traced.text


@pytest.mark.parametrize("prompt", ["Once", [1], PROMPT * 4])
def test_prompts_of_any_length_are_read_before_anything_is_drafted(prompt: str | Sequence[int]) -> None:
    llm = LLM(str(TARGET), MODEL, dtype="float32", max_num_seqs=1, chunk_tokens=16)
    traced = trace(llm, prompt, params_with(1.0, 5), CHAIN)
    first, *others = traced.rounds
    assert first.num_prompt_tokens == (len(traced.prompt_token_ids) - 1) % 16
    assert all(round_.num_prompt_tokens == 0 for round_ in others)
    if first.num_prompt_tokens:
        assert not first.guesses
    assert any(round_.guesses for round_ in others)
    assert traced.same_as_plain is True


@pytest.mark.parametrize("speculation", [CHAIN, TREE])
def test_p_includes_every_logits_transform_to_the_bit(speculation: Speculation) -> None:
    banned = 400
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_p": 0.02}
    params = params_with(0.9, 6, banned_tokens=(banned,), max_tokens=24, **penalties)
    drafted, plain = (trace(llm_of(draft), PROMPT, params, speculation) for draft in (MODEL, None))
    traced = [[(token.token_id, token.p) for r in t.rounds for token in r.emitted] for t in (drafted, plain)]
    assert traced[0] == traced[1]
    assert sum(round_.num_accepted for round_ in drafted.rounds) > 4
    assert all(draft_token.token_id != banned for round_ in drafted.rounds for draft_token in round_.guesses)
    assert all(
        draft_token.q is not None and draft_token.q > 0 for round_ in drafted.rounds for draft_token in round_.guesses
    )


class Declaring(Stateless):
    """Drafts single tokens from one fixed distribution and declares it with the tree."""

    ids, probs = (300, 310, 320), (0.5, 0.3, 0.2)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        place = len(draws.rows[0].tokens) % 3
        law_of_it = DraftLaw(torch.tensor([[0, -1]]), torch.tensor([self.probs]), torch.tensor([self.ids]))
        return Draft(DraftTree.chains(draws.roots_tokens, torch.tensor([[self.ids[place]]]), law_of_it))


def test_a_distribution_declared_with_the_tree_is_the_q_of_the_trace() -> None:
    llm = LLM(str(TARGET), Declaring(), dtype="float32", verification="token", max_num_seqs=1)
    traced = trace(llm, PROMPT, params_with(1.0, 7), Speculation(1))
    draft_tokens = [draft_token for round_ in traced.rounds for draft_token in round_.guesses]
    assert len({draft_token.token_id for draft_token in draft_tokens}) == 3
    for draft_token in draft_tokens:
        assert draft_token.q == pytest.approx(
            dict(zip(Declaring.ids, Declaring.probs, strict=True))[draft_token.token_id]
        )
        assert draft_token.chance == pytest.approx(min(1, draft_token.p / draft_token.q), rel=1e-4)


def test_a_trace_of_several_answers_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="n: 2 must be 1"):
        trace(llm_of(None), PROMPT, params_with(1.0, 0, n=2))


def test_an_error_of_the_requests_logits_processor_is_raised() -> None:
    def broken(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(llm_of(MODEL), PROMPT, params_with(1.0, 0, logits_processors=(broken,)))
    assert not llm_of(MODEL).engine.sequences


def test_the_controllers_choice_is_in_the_trace_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every round whose depth is chosen, and for none whose depth is given."""
    monkeypatch.setattr(calibration, "LIMIT_S", 1e6)
    llm = LLM(str(TARGET), f"model:{SMALL}", dtype="float32", max_num_seqs=1)
    params = SamplingParams(temperature=0, seed=1, max_tokens=24)
    traced, fixed = trace(llm, PROMPT, params, Speculation()), trace(llm, PROMPT, params, Speculation(4))
    assert traced.token_ids == fixed.token_ids
    assert {round_.choice for round_ in fixed.rounds} == {""}
    for round_ in traced.rounds:
        depth = max((draft_token.depth for draft_token in round_.guesses), default=0)
        assert "a plain round takes" in round_.choice
        assert round_.choice.startswith(f"depth {depth}" if depth else "plain")
