"""Log-probabilities as clients read them: ranks of alternatives, and tokens with equal texts."""

from itertools import permutations

from forerun.sampling.logprobs import TokenLogprobs
from forerun.serve.logprob_text import TokenTexts, highest_by_text, prompt_entries
from forerun.text.tokenizer import Tokenizer
from kit.checkpoints import TARGET


def test_alternatives_of_a_prompt_token_have_ranks_from_one_and_the_token_its_own() -> None:
    texts = TokenTexts(Tokenizer.load(TARGET))
    rare, likely = (
        TokenLogprobs(405, -9.0, 70, (407, 403), (-0.5, -1.5)),
        TokenLogprobs(403, -1.5, 2, (407, 403), (-0.5, -1.5)),
    )
    first, *rest = prompt_entries([rare, likely], texts)
    assert first is None
    ranks = [{token: (each["rank"], each["logprob"]) for token, each in entry.items()} for entry in rest if entry]
    assert ranks == [{"407": (1, -0.5), "403": (2, -1.5), "405": (70, -9.0)}, {"407": (1, -0.5), "403": (2, -1.5)}]


def test_of_tokens_with_equal_texts_the_highest_counts_in_any_order() -> None:
    for pairs in permutations([("a", -2.0), ("a", -1.0), ("b", -3.0), ("a", -4.0)]):
        assert highest_by_text(pairs) == {"a": -1.0, "b": -3.0}
