"""Grammars with speculation: the answer is that of plain decoding under the same grammar; the law is the masked one.

With every drafter, chains and trees, in batches with rows without a grammar; under every rule of verification; with
preemption. Forced tokens are drafted without a drafter. Every complete answer matches its grammar.
"""

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle, islice
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from forerun.accept.outcome import Outcome
from forerun.config import Speculation, Verification
from forerun.engine.constrained import constrained_tree
from forerun.errors import InvalidGrammar, InvalidRequest, RequestFailed
from forerun.llm import LLM
from forerun.output import RequestOutput
from forerun.sampling.constraint import Allowed, Constraint
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.grammar import Grammar
from forerun.sampling.params import SamplingParams
from kit.checkpoints import TARGET
from kit.laws import chi_square
from kit.texts import PROMPTS, story
from kit.unchecked import unchecked
from law.drafters import DRAFTERS, as_draft, built
from law.equality import Asked, decode, decode_plain
from law.fuzz import Bench
from law.hostile import HOSTILE, Hostile
from law.sampler import drafted, emitted, judged_round, transitions

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
STORY = r"(Once|One day),? (a|the) ([a-z]{1,8} ){2,4}(was|went)[^.\n]{0,20}\."
GRAMMARS = (
    Grammar.json(SCHEMA, whitespace=False),
    None,
    Grammar.regex(STORY),
    Grammar.choice(["Lily", "Lily and Tom", "Tom", "the dog said yes"]),
    Grammar.json(SCHEMA),
)
TEMPERATURES = (1.0, 0.0, 1.0, 0.8)
BATCHES = ((Speculation(3), 1), (Speculation(4, 2, 9), 1), (Speculation(4), 8), (Speculation(4, 3, 9), 8), (True, 8))
LENGTH = 40


def asked(batch: int, length: int = LENGTH) -> list[SamplingParams]:
    """Grammars, temperatures and seeds, one for each row."""
    return [
        SamplingParams(temperature=t, seed=seed, max_tokens=length, grammar=grammar, logprobs=2)
        for seed, grammar, t in zip(range(batch), cycle(GRAMMARS), cycle(TEMPERATURES), strict=False)
    ]


def answers(llm: LLM, batch: int, speculation: bool | Speculation, length: int = LENGTH) -> list[RequestOutput]:
    with unchecked():
        return llm.generate(list(islice(cycle(PROMPTS), batch)), asked(batch, length), speculation=speculation)


def compared(results: Sequence[RequestOutput]) -> list[object]:
    return [(o.token_ids, o.finish_reason, o.logprobs) for result in results for o in result.outputs]


@cache
def plain() -> list[RequestOutput]:
    return answers(LLM(str(TARGET), dtype="float32"), 10, False)


def matches(grammar: Grammar | None, text: str) -> bool:
    """Whether the text matches, by implementations that are independent of llguidance."""
    if grammar is None:
        return True
    if grammar.kind == "json":
        return jsonschema.Draft202012Validator(json.loads(grammar.text)).is_valid(json.loads(text))
    pattern = grammar.text.removeprefix("start: ")
    return re.fullmatch(pattern, text) is not None if grammar.kind == "regex" else f'"{text}"' in pattern.split(" | ")


def test_complete_answers_match_their_grammar() -> None:
    whole = 0
    long = answers(LLM(str(TARGET), "ngram", dtype="float32"), 20, True, 120)
    for params, result in zip(asked(20, 120), long, strict=True):
        (output,) = result.outputs
        if output.finish_reason == "stop":
            assert matches(params.grammar, output.text), output.text
            whole += params.grammar is not None
    assert whole >= 12


@pytest.mark.short("suffix", "model:stories280k")
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_output_is_that_of_plain_decoding(name: str) -> None:
    """Log-probabilities too, which are those of the allowed tokens."""
    llm = LLM(str(TARGET), as_draft(name), dtype="float32")
    for speculation, batch in BATCHES:
        assert compared(answers(llm, batch, speculation)) == compared(plain()[:batch]), (speculation, batch)
    assert llm.stats.num_accepted > 0
    assert not llm.engine.recovery.strikes, "no round failed"


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("name", ["ngram", "model:stories280k", "medusa", "cascade-of-2"])
@pytest.mark.short("ngram-token", "model:stories280k-block")
def test_greedy_output_under_rejection_rules_is_that_of_plain_decoding(name: str, verification: Verification) -> None:
    llm = LLM(str(TARGET), as_draft(name), dtype="float32", verification=verification)
    params = [SamplingParams(temperature=0, max_tokens=LENGTH, grammar=grammar) for grammar in GRAMMARS]
    expected = llm.generate(list(PROMPTS), params, speculation=False)
    for speculation in (Speculation(4), Speculation(4, 3, 9)):
        found = llm.generate(list(PROMPTS), params, speculation=speculation)
        assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in expected]


@pytest.mark.short("oracle", "always_wrong", "twins", "ids_out_of_range", "law_of_inf")
@pytest.mark.parametrize("name", HOSTILE)
def test_no_hostile_drafter_changes_the_output(name: str) -> None:
    texts = [[*r.prompt_token_ids, *r.outputs[0].token_ids] for r in plain()]
    llm = LLM(str(TARGET), Hostile(HOSTILE[name], texts), dtype="float32")
    for speculation in (Speculation(4), Speculation(3, 3, 9)):
        assert compared(answers(llm, 5, speculation)) == compared(plain()[:5])


CROWD = [
    Asked(story(length, seed), params)
    for (seed, length), params in zip(enumerate((40, 1, 9, 30, 3, 22, 12, 5)), asked(8), strict=True)
]


@pytest.mark.full
@pytest.mark.parametrize("name", ["suffix", "model:stories280k"])
def test_chunks_and_preemption_change_no_output(name: str) -> None:
    bench = Bench.of()
    expected = decode_plain(bench, CROWD)
    for speculation in (Speculation(3), Speculation(3, 2, 8)):
        got = decode(
            bench,
            CROWD,
            speculation,
            lambda target: built(name, target, "float32", 256),
            num_tokens=192,
            chunk_tokens=29,
        )
        assert got.answers == expected
        assert got.num_preempted > 0


def test_forced_tokens_are_drafted_without_a_drafter_and_all_accepted() -> None:
    llm = LLM(str(TARGET), dtype="float32")
    form = Grammar.regex(r'\{"the name of the boy": "(Tom|Tim)", "the name of the dog": "(Max|Spot)"\}')
    params = SamplingParams(temperature=1.0, seed=1, grammar=form)
    drafted_, plain_ = (llm.generate("x", params, speculation=s)[0] for s in (True, False))
    assert drafted_.outputs[0].token_ids == plain_.outputs[0].token_ids
    assert json.loads(drafted_.outputs[0].text)["the name of the boy"] in ("Tom", "Tim")
    assert plain_.metrics.num_rounds == len(plain_.outputs[0].token_ids)
    assert drafted_.metrics.num_rounds < plain_.metrics.num_rounds / 2
    assert drafted_.metrics.num_forced > 10
    assert drafted_.metrics.num_accepted == drafted_.metrics.num_drafted == 0, "forced tokens do not count as drafted"
    assert plain_.metrics.num_drafted == plain_.metrics.num_forced == 0
    counts = drafted_.metrics
    assert counts.tokens_per_round == (counts.num_forced + counts.num_rounds) / counts.num_rounds


def test_draft_tokens_that_a_grammar_forbids_count_as_rejected() -> None:
    """Letters are drafted for an answer of digits: none is read by the target, all count as drafted and rejected."""
    texts = [[*r.prompt_token_ids, *r.outputs[0].token_ids] for r in plain()]
    params = SamplingParams(temperature=1.0, seed=2, grammar=Grammar.regex("[0-9]{12}"))
    llm = LLM(str(TARGET), Hostile(HOSTILE["always_wrong"], texts), dtype="float32")
    passes: list[Outcome] = []
    honest = llm.engine.controller.record
    llm.engine.controller.record = lambda outcome: passes.append(outcome) or honest(outcome)  # type: ignore[method-assign]
    (found,) = llm.generate("x", params, speculation=Speculation(4))
    assert found.metrics.num_drafted > found.metrics.num_accepted == 0
    assert found.metrics.offered_at_depth[0] > 0
    assert found.metrics.acceptance_rate == 0
    rows = [row for outcome in passes for row in outcome.rows]
    assert sum(row.num_cut for row in rows) == found.metrics.num_drafted
    assert {row.num_read for row in rows} == {1}


def test_forced_tokens_may_be_deeper_than_the_draft_of_another_row() -> None:
    llm = LLM(str(TARGET), "mix[ngram,suffix]", dtype="float32")
    form = Grammar.regex(r'\{"the name of the boy": "(Tom|Tim)", "the name of the dog": "(Max|Spot)"\}')
    params = [SamplingParams(temperature=0, grammar=form), SamplingParams(temperature=0, max_tokens=60)]
    prompts = ["x", f"{2 * 'Once upon a time there was a girl. '}Once upon"]
    expected = llm.generate(prompts, params, speculation=False)
    found = llm.generate(prompts, params, speculation=Speculation(2, drafter="ngram"))
    assert compared(found) == compared(expected)
    assert not llm.engine.recovery.strikes, "no round failed"
    assert found[1].metrics.num_drafted > 0
    (a, time) = llm.tokenizer.encode_inside(" a time")
    other = SamplingParams(grammar=Grammar.regex(" a (time|dog) [xyz]"), logit_bias={a: 50, time: 50})
    (cut,) = llm.generate(prompts[1], other, speculation=Speculation(2, drafter="ngram"))
    assert cut.metrics.num_drafted == 2
    assert (cut.metrics.accepted_at_depth, cut.metrics.offered_at_depth) == ([1, 0], [1, 1])
    assert sum(each.num_drafted for each in cut.metrics.drafters.values()) == 2


def test_a_grammar_error_in_a_round_fails_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error may come after a round's last token, when other rows of the round are already checked."""
    llm = LLM(str(TARGET), "ngram", dtype="float32")
    expected = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    asked_of, num_asked = Constraint.completed_by, itertools.count(1)

    def completed_by(constraint: Constraint, tokens: Sequence[int]) -> int | None:
        if next(num_asked) == 4:
            raise RequestFailed(constraint.seq_id) from InvalidGrammar("it takes too much work.")
        return asked_of(constraint, tokens)

    monkeypatch.setattr(Constraint, "completed_by", completed_by)
    other = llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=12))
    text = next(other).text
    with pytest.raises(InvalidGrammar):
        list(llm.stream("x", SamplingParams(grammar=Grammar.regex("[a-z ]{30}")), speculation=False))
    assert text + "".join(delta.text for delta in other) == expected
    assert not llm.engine.recovery.strikes, "the drafter is not blamed"


def test_an_answer_ends_with_the_token_that_completes_its_grammar() -> None:
    llm = LLM(str(TARGET), "ngram", dtype="float32")
    whole = Grammar.choice(["Tom went."])
    for options in ({}, {"min_tokens": 30}, {"ignore_eos": True}, {"n": 3}, {"banned_tokens": [2]}):
        result = llm.generate("x", SamplingParams(grammar=whole, **options))[0]
        assert [(o.text, o.finish_reason, o.stop_reason) for o in result.outputs] == [("Tom went.", "stop", None)] * (
            options.get("n", 1)
        )
    cut: list[tuple[dict[str, Any], str | None, str]] = [
        ({"max_tokens": 2}, None, "length"),
        ({"stop": "we"}, "Tom ", "stop"),
    ]
    for ends, text, reason in cut:
        output = llm.generate("x", SamplingParams(grammar=whole, **ends))[0].outputs[0]
        assert output.finish_reason == reason
        assert output.text == (text or output.text)
        assert "Tom went.".startswith(output.text)
    open_ended = SamplingParams(grammar=Grammar.regex("[a-z ]*"), min_tokens=20, max_tokens=200, seed=0)
    assert len(llm.generate("x", open_ended)[0].outputs[0].token_ids) >= 20


def test_a_request_that_bans_every_token_its_grammar_allows_fails_alone() -> None:
    llm = LLM(str(TARGET), "ngram", dtype="float32")
    t = llm.tokenizer.encode_inside("T")[0]
    every_t = [i for i in range(512) if (llm.tokenizer.decode([i]) or " ").startswith("T")]
    assert t in every_t
    streams = [
        llm.stream("x", SamplingParams(grammar=Grammar.choice(["Tom", "Tim"]), banned_tokens=every_t)),
        llm.stream("x", SamplingParams(max_tokens=20, seed=1)),
    ]
    with pytest.raises(InvalidRequest, match=r"the request excludes every token after \d tokens of the answer"):
        list(streams[0])
    assert sum(len(delta.token_ids) for delta in streams[1]) > 0


VOCAB, COUNT, ROOT = 6, 12_000, 1


class Table(Constraint):
    """A grammar that is a table of what may follow each token, so that its law can be computed."""

    def __init__(self, allowed: Tensor) -> None:
        self.ends, words = frozenset[int](), np.packbits(allowed.numpy(), axis=1, bitorder="little")
        self.places = [Allowed(np.frombuffer(row.tobytes().ljust(4, b"\0"), np.uint32)) for row in words]

    @override
    def suffix(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[-1:])

    @override
    def after(self, behind: tuple[int, ...]) -> Allowed:
        return self.places[behind[-1]]


def random_table() -> tuple[Tensor, Tensor, Tensor]:
    """The logits of a target and of a model with another law, and the tokens that a grammar allows after each token."""
    generator = torch.Generator().manual_seed(3)
    target, model = (2 * torch.randn(VOCAB, VOCAB, generator=generator) for _ in range(2))
    allowed = torch.rand(VOCAB, VOCAB, generator=generator) < 0.5
    allowed[torch.arange(VOCAB), (torch.arange(VOCAB) + 1) % VOCAB] = True
    return target, model, allowed


def constrained_rows(table: Table, seed: int) -> list[RowSampling]:
    return [RowSampling(i, SamplingParams(), seed * COUNT + i, 0, [0, ROOT], 2, constraint=table) for i in range(COUNT)]


def assert_masked_law(text: Tensor, target: Tensor, allowed: Tensor) -> None:
    """The transitions of each position are distributed as the softmax of the allowed logits."""
    law = target.masked_fill(~allowed, -torch.inf).double().softmax(1)
    for position in range(3):
        counts = transitions(text, ROOT, position, VOCAB)
        assert not counts[~allowed].any()
        assert chi_square(counts, law * counts.sum(1, keepdim=True)) > 1e-4


@pytest.mark.short("2-token")
@pytest.mark.parametrize("rule", ["coupled", "token", "block"])
@pytest.mark.parametrize("width", [1, 2])
def test_every_rule_emits_the_masked_law(rule: Verification, width: int) -> None:
    """Transitions within rounds against the softmax of the allowed logits, for a drafter with another law."""
    target, model, allowed = random_table()
    with unchecked():
        draws = Draws(constrained_rows(Table(allowed), 77), VOCAB, rejection=rule != "coupled")
        tree = drafted(draws, model, 3, width)
        text = emitted(tree, judged_round(draws, tree, target, rule))
    assert (text >= 0).sum() > 1.5 * COUNT
    assert_masked_law(text, target, allowed)
    wrong = target.double().softmax(1)
    before = transitions(text, ROOT, 0, VOCAB)[ROOT]
    assert (before - wrong[ROOT] * COUNT).abs().max() > 10 * COUNT**0.5, "the mask matters here"


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_drafter_that_ignores_the_grammar_keeps_the_masked_law(rule: Verification) -> None:
    """It declares the law that it drew from. If its forbidden tokens were removed, the others would count too much."""
    target, model, allowed = random_table()
    rows = constrained_rows(Table(allowed), 79)
    with unchecked():
        draws = Draws(rows, VOCAB, rejection=True)
        free = Draws([replace(row, constraint=None) for row in rows], VOCAB, rejection=True)
        tree = drafted(free, model, 3)
        assert not allowed[ROOT, tree.tokens[:, 1]].all()
        tree = constrained_tree(tree, draws, [[]] * COUNT)
        text = emitted(tree, judged_round(draws, tree, target, rule))
    assert_masked_law(text, target, allowed)


@pytest.mark.short("block")
@pytest.mark.parametrize("rule", ["token", "block"])
def test_draft_tokens_past_a_completed_text_do_not_bias_the_tokens_before(rule: Verification) -> None:
    """No token may follow one that completes the text. Whether a row has such draft tokens depends on what was drawn,
    so it must be verified by the same rule as other rows."""
    generator = torch.Generator().manual_seed(4)
    target, model = (2 * torch.randn(VOCAB, VOCAB, generator=generator) for _ in range(2))
    table = Table(torch.ones(VOCAB, VOCAB, dtype=torch.bool))
    table.places[VOCAB - 1] = Allowed(complete=True)
    target[ROOT], model[ROOT] = 0, torch.tensor([0.0] * (VOCAB - 1) + [1.6])
    with unchecked():
        draws = Draws(constrained_rows(table, 78), VOCAB, rejection=True)
        tree = constrained_tree(drafted(draws, model, 2), draws, [[]] * COUNT)
        text = emitted(tree, judged_round(draws, tree, target, rule))
    counts = transitions(text, ROOT, 0, VOCAB)
    assert chi_square(counts, target.double().softmax(1) * counts.sum(1, keepdim=True)) > 1e-4
