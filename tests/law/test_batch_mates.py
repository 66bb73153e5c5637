"""In every verification mode a request's tokens do not depend on the other requests in the batch, drafted or not."""

import random
from functools import cache
from typing import Any, cast

import pytest

from forerun.config import Speculation
from forerun.llm import LLM
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from kit.checkpoints import SMALL, TARGET

SPECULATIONS: list[bool | int | Speculation] = [False, False, 1, 3, Speculation(3, 2), Speculation(2, 3, 4)]


@cache
def loaded(verification: str) -> LLM:
    target, draft = str(TARGET), f"model:{SMALL}"
    mode = cast(Any, verification)
    return LLM(target, draft, dtype="float32", max_model_len=96, verification=mode)


def requests(seed: int) -> list[Request]:
    """Requests of all kinds: undrafted, chains, trees; plain, filtered and greedy."""
    found = []
    for i, speculation in enumerate(SPECULATIONS * 2):
        kind: dict[str, Any] = [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"temperature": 1.4}][(i + i // 6) % 4]
        params = SamplingParams(**{"seed": seed + i, "max_tokens": 6 + i, "ignore_eos": True} | kind)
        found.append(Request.of([1, 403, 300 + i], params, speculation))
    return found


def answers(llm: LLM, asked: list[Request]) -> list[tuple[int, ...]]:
    """The tokens of each request, all of them in one batch."""
    sequences = [sequence for request in asked for sequence in llm.requests.sequences(request)]
    for _ in llm.deltas(sequences):
        pass
    return [tuple(sequence.tokens) for sequence in sequences]


@pytest.mark.short("coupled")
@pytest.mark.parametrize("verification", ["coupled", "token", "block"])
def test_batch_mates_change_no_token(verification: str) -> None:
    llm, rng, asked = loaded(verification), random.Random(5), requests(3)
    alone = [answers(llm, [request])[0] for request in asked]
    for _ in range(6):
        rows = rng.sample(range(len(asked)), rng.randint(2, len(asked)))
        assert answers(llm, [asked[row] for row in rows]) == [alone[row] for row in rows]
