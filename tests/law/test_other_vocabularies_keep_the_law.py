"""Draft tokens of another vocabulary, drawn from the shared part of the drafter's law, keep the target's law exactly.

The target's vocabulary is a, b, ab and ba, the drafter's a, b, ab and aab. So the two tokenize a text differently, and
the drafter reads its own tokenization of the target's text, followed by draft tokens.
"""

from fractions import Fraction
from functools import cache

import pytest
import torch

from draft.vocabularies import two_letters
from forerun.draft.vocab.transcript import Transcriber, Transcript
from forerun.draft.vocab.vocabulary import SharedTokens, Vocabulary, shared_ids
from law.exact import EVERY, TOLERANCE, Context, Family, Law, chains, deviation, trees

FAMILIES = [(Family(seed, 4), Family(1000 + seed, 4, zeros=0.0)) for seed in range(12)]


@cache
def transcriber() -> Transcriber:
    tokenizers = [two_letters(["a", "b", "ab", merged]) for merged in ("ba", "aab")]
    return Transcriber(*(Vocabulary(t, t.num_ids, [t.eos_token_id or 0]) for t in tokenizers))


def letters(vocabulary: Vocabulary) -> list[int]:
    """The ids of the four tokens, in order: what the families call 0, 1, 2 and 3."""
    return sorted(token for spelled, token in vocabulary.ids.items() if spelled.strip(b"ab") == b"")


def drafter_context(context: Context) -> Context:
    """The drafter's context where the target's is `context`."""
    target_ids, drafter_ids, transcript = letters(transcriber().target), letters(transcriber().drafter), Transcript()
    closed = transcriber().extend(transcript, [target_ids[token] for token in context])
    return tuple(drafter_ids.index(token) for token in closed + transcriber().ending(transcript))


def shared_law(drafter: Family, context: Context) -> Law:
    """The drafter's law on a, b and ab, renormalised, over the target's tokens."""
    law = drafter.q(drafter_context(context))
    kept = sum(law[:3], start=Fraction(0))
    return (*(chance / kept for chance in law[:3]), Fraction(0))


def test_target_and_drafter_tokenize_the_same_text_differently() -> None:
    assert drafter_context((0, 2)) == (3,)
    assert drafter_context((1, 0, 1)) == (1, 2)
    assert drafter_context((3, 1)) == (1, 2)
    shared = shared_ids(transcriber().target, transcriber().drafter)
    drafter_ids = letters(transcriber().drafter)
    assert [shared.get(token) for token in letters(transcriber().target)] == [*drafter_ids[:3], None]


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


def test_logits_mapped_to_the_targets_vocabulary_give_the_shared_law() -> None:
    target, other = transcriber().target, transcriber().drafter
    target_ids, drafter_ids = letters(target), letters(other)
    shared = SharedTokens.of(target, other, target.num_ids, other.num_ids, torch.device("cpu"))
    for _, drafter in FAMILIES:
        for context in ((), (0,), (0, 2), (3, 1, 2)):
            logits = torch.full((1, other.num_ids), -torch.inf, dtype=torch.float64)
            logits[0, drafter_ids] = (
                torch.tensor([float(c) for c in drafter.q(drafter_context(context))]).double().log()
            )
            law = shared.target_logits(logits).softmax(1)[0]
            expected = torch.tensor([float(chance) for chance in shared_law(drafter, context)], dtype=torch.float64)
            assert torch.allclose(law[target_ids], expected, atol=1e-7)
            assert float(law.sum()) == pytest.approx(float(expected.sum()))
