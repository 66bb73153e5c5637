"""Nobody's request hurts another's: hostile requests beside honest ones, in one AsyncLLM.

Four tasks send requests whose numbers, types, prompts and processors are drawn from a table of values that break
engines. Eight honest requests run beside them over and over. None of these may fail, change a token or hang, and every
hostile one must be answered or refused by an error of forerun's own. `make test` does so for seconds;
`FORERUN_FUZZ_S=600 python -m pytest tests/test_hostile_requests.py` does so for ten minutes.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from forerun import LLM, AsyncLLM, SamplingParams, Speculation
from forerun.errors import ForerunError
from unchecked import unchecked

SECONDS = float(os.environ.get("FORERUN_FUZZ_S", "4"))
PATIENCE_S = 120  # an answer that takes longer hangs
NUM_HOSTILE = 4
EDGES = [0, 1, -1, 2**31, -(2**31), 2**63, -(2**63), 2**63 - 1, 2**63 - 3, 2**64, 2**70, 10**400, 7, 512]
FLOATS = [1e308, -1e308, 3.4e38, 1e39, 1e-38, 5e-324, 1e-5, 0.5, math.nan, math.inf, -math.inf]
TYPES = [None, True, "0", b"0", [], {}, [1], (5,), 1j, Decimal("0.5"), np.float32(0.3), np.int64(3), torch.tensor(1.0)]
MAPPINGS = [{5: value} for value in (1.0, math.inf, -math.inf, 3.4e38, 10**400, "x")] + [{2**63: 1.0}, {-1: 1.0}]
TEXTS = ["", "the", ["a"] * 65, "\ud800", ["x" * 5000], [2**63], [511], [-1]]
MILD = [0, 1, 2, 7, 0.5, 0.9]
VALUES = [*EDGES, *FLOATS, *TYPES, *MAPPINGS, *TEXTS]
PROMPTS: list[Any] = [
    "Once",
    [1, 2, 3],
    [2**63],
    [-1],
    [511],
    [],
    "\ud800",
    np.array([1, 2]),
    None,
    5,
    {"prompt": None},
]
PROMPTS += ["x" * 200_000, [1] * 5000, b"Once", [True], [math.nan], {"prompts": "Once"}]


def raising(error: type[BaseException]) -> Any:
    """A logits processor that raises from the third token on."""

    def process(tokens: Any, logits: Tensor) -> Tensor:
        if len(tokens) > 7:
            raise error("a processor of a hostile request")
        return logits

    return process


PROCESSORS = [
    *map(raising, (ValueError, RuntimeError, SystemExit, asyncio.CancelledError, GeneratorExit)),
    lambda _, logits: logits * math.nan,
    lambda _, logits: logits + math.inf,
    lambda _, logits: logits[:3],
    lambda _, logits: None,
    lambda _, logits: logits.fill_(-math.inf),
]
FIELDS = sorted(set(SamplingParams.__slots__) - {"logits_processors"})


@dataclass
class Tally:
    """What came of all requests; `faults` says what must not have come."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    recent: list[object] = field(default_factory=list)


def honest_requests() -> list[SamplingParams]:
    """Parameters of eight honest requests, each kind of sampling among them."""
    kinds = [{"temperature": 0.0}, {}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 20}, {"repetition_penalty": 1.2}]
    kinds += [{"min_p": 0.05}, {"temperature": 1.5}, {"min_tokens": 9, "logprobs": 2}]
    return [SamplingParams(seed=i, max_tokens=20, **kind) for i, kind in enumerate(kinds)]


async def ask_honestly(llm: AsyncLLM, params: SamplingParams, plain: tuple[int, ...], end: float, tally: Tally) -> None:
    """The same request again and again, compared with its plain answer each time."""
    while time.monotonic() < end:
        try:
            answer = await asyncio.wait_for(llm.generate("Once upon a time", params), PATIENCE_S)
        except BaseException as error:
            tally.faults.append(f"an honest request got {error!r} beside {tally.recent[-NUM_HOSTILE:]}")
            return
        tally.counts["honest"] += 1
        if answer.outputs[0].token_ids != plain:
            tally.faults.append(f"an honest answer changed beside {tally.recent[-NUM_HOSTILE:]}")


def drawn(dice: random.Random, names: list[str], counts: tuple[int, ...]) -> dict[str, Any]:
    """Some of the fields of these names, with values of the table."""
    chosen = dice.sample(names, dice.choice(counts))
    return {name: dice.choice(MILD if dice.random() < 0.5 else VALUES) for name in chosen}


async def ask_hostilely(llm: AsyncLLM, dice: random.Random, end: float, tally: Tally) -> None:
    """Requests with one to three fields of the table, cancelled now and then."""
    while time.monotonic() < end:
        fields: dict[str, Any] = {
            name: dice.choice(VALUES) for name in dice.sample(FIELDS, dice.choice((1, 1, 1, 2, 3)))
        }
        fields.setdefault("max_tokens", 8)
        if dice.random() < 0.2:
            fields["logits_processors"] = [dice.choice(PROCESSORS)]
        shape = {
            name: dice.choice(VALUES) for name in dice.sample(("depth", "width", "nodes"), dice.choice((0, 0, 1, 3)))
        }
        prompt = dice.choice(PROMPTS) if dice.random() < 0.3 else "Once"
        tally.recent[:] = [*tally.recent[-20:], (fields, shape, repr(prompt)[:40])]
        try:
            wish = Speculation(**shape) if dice.random() < 0.9 else dice.choice(VALUES)
            request = llm.generate(prompt, SamplingParams(**fields), speculation=wish)
            await asyncio.wait_for(request, 0.02 if dice.random() < 0.1 else 1.0)
            tally.counts["answered"] += 1
        except TimeoutError:
            tally.counts["cancelled"] += 1  # long answers are cut short here, as users do who go away
        except ForerunError:
            tally.counts["refused"] += 1
        except BaseException as error:
            if not (fields.get("logits_processors") and "hostile request" in str(error)):  # its own error is its own
                tally.faults.append(f"{error!r} for {tally.recent[-1]}")
            tally.counts["own error"] += 1
        await asyncio.sleep(0)


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_hostile_requests_change_nothing_for_honest_ones(target_dir: Path, draft_dir: Path, draft: str) -> None:
    spec = "ngram" if draft == "ngram" else f"model:{draft_dir}"
    llm, params = LLM(str(target_dir), spec, dtype="float32", max_model_len=256), honest_requests()
    plain = [llm.generate("Once upon a time", each, speculation=False)[0].outputs[0].token_ids for each in params]
    tally, dice = Tally(), random.Random(0)

    async def run() -> None:
        end = time.monotonic() + SECONDS / 2
        async with AsyncLLM(llm) as front:
            honest = [ask_honestly(front, *pair, end, tally) for pair in zip(params, plain, strict=True)]
            await asyncio.gather(*honest, *(ask_hostilely(front, dice, end, tally) for _ in range(NUM_HOSTILE)))

    with unchecked():  # wrong types are meant to reach forerun's own checks
        asyncio.run(run())
    print(dict(tally.counts))
    assert tally.faults == []
    assert tally.counts["honest"] >= len(params)
    assert tally.counts["refused"] > 10
