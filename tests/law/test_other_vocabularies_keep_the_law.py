"""Guesses of another vocabulary, drawn from the shared part of the drafter's law, keep the target's law exactly.

The target says a, b, ab and ba, the drafter a, b, ab and aab: a text is cut differently by the two, and what the
drafter reads is its own cut of what the target said, guesses behind it.
"""

from fractions import Fraction
from functools import cache

import pytest
import torch
from exact import EVERY, TOLERANCE, Context, Family, Law, chains, deviation, trees

from draft.vocabularies import two_letters
from forerun.draft.vocab.transcript import Transcriber, Transcript
from forerun.draft.vocab.vocabulary import SharedTokens, Vocabulary, shared_ids

FAMILIES = [(Family(seed, 4), Family(1000 + seed, 4, zeros=0.0)) for seed in range(12)]


@cache
def way() -> Transcriber:
    tokenizers = [two_letters(["a", "b", "ab", merged]) for merged in ("ba", "aab")]
    return Transcriber(*(Vocabulary(t, t.num_ids, [t.eos_token_id or 0]) for t in tokenizers))


def letters(vocabulary: Vocabulary) -> list[int]:
    """The ids of the four tokens, in order: what the families call 0, 1, 2 and 3."""
    return sorted(token for spelled, token in vocabulary.ids.items() if spelled.strip(b"ab") == b"")


def own_context(context: Context) -> Context:
    """What the drafter has read where the target has said this."""
    said, own, transcript = letters(way().target), letters(way().drafter), Transcript()
    closed = way().extend(transcript, [said[token] for token in context])
    return tuple(own.index(token) for token in closed + way().ending(transcript))


def shared_law(drafter: Family, context: Context) -> Law:
    """The drafter's law on a, b and ab, renormalised, over the target's tokens."""
    law = drafter.q(own_context(context))
    kept = sum(law[:3], start=Fraction(0))
    return (*(chance / kept for chance in law[:3]), Fraction(0))


def test_cuts_differ() -> None:
    assert own_context((0, 2)) == (3,)
    assert own_context((1, 0, 1)) == (1, 2)
    assert own_context((3, 1)) == (1, 2)
    shared = shared_ids(way().target, way().drafter)
    own = letters(way().drafter)
    assert [shared.get(token) for token in letters(way().target)] == [*own[:3], None]


@pytest.mark.parametrize("rule", EVERY)
def test_chains_and_trees_of_shared_tokens_are_lossless(rule: str) -> None:
    for target, drafter in FAMILIES:

        def q(context: Context, drafter: Family = drafter) -> Law:
            return shared_law(drafter, context)

        drafts = [chains(q, 1), chains(q, 2)]
        if rule == "token":
            drafts.append(trees(q, (-1, -1, 0)))
        for each in drafts:
            assert deviation(EVERY[rule](each, target.p, 4), target.p) < TOLERANCE


def test_the_law_of_the_spread_logits_is_that_law() -> None:
    target, own = way().target, way().drafter
    said, read = letters(target), letters(own)
    shared = SharedTokens.of(target, own, target.num_ids, own.num_ids, torch.device("cpu"))
    only = torch.zeros(own.num_ids, dtype=torch.bool)
    only[read] = True
    for _, drafter in FAMILIES:
        for context in ((), (0,), (0, 2), (3, 1, 2)):
            logits = torch.full((1, own.num_ids), -torch.inf, dtype=torch.float64)
            logits[0, read] = torch.tensor([float(c) for c in drafter.q(own_context(context))]).double().log()
            law = shared.target_logits(logits).softmax(1)[0]
            expected = torch.tensor([float(chance) for chance in shared_law(drafter, context)], dtype=torch.float64)
            assert torch.allclose(law[said], expected, atol=1e-7)
            assert float(law.sum()) == pytest.approx(float(expected.sum()))
