"""Random requests of any kind to random engines: each answer is that of plain decoding, alone, to the bit.

Texts and chats that go on, at any sampling parameters, with stops, grammars and log-probabilities; drafted by any
drafter or by several, in any shape; in any number format, with caches of any size. Tokens, text, log-probabilities and
the end of each answer are compared, and at the end no cache may hold anything.
"""

import gc
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from forerun.cache.paged import PagedCache
from forerun.config import EngineOptions, Speculation
from forerun.control.controller import FixedDepth
from forerun.draft.base import Drafter
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.models.runner import Runner
from forerun.request import ChatOptions, Request
from forerun.sampling.grammar import Grammar
from forerun.sampling.params import SamplingParams
from forerun.shape import StaticTree
from kit.checkpoints import SMALL
from kit.texts import story
from kit.unchecked import unchecked
from law.drafters import DOCUMENTED, DRAFTERS, settled, spelled
from law.fuzz import Bench, bench_of
from law.random_traffic import Traffic
from law.rebuilt import reachable

VOCAB, LONGEST = 512, 512
NUM_REQUESTS = 10
FORMATS = ("float32", "float32", "float32", "bfloat16", "int8", "int4", "float32 by torch")  # others take far longer
SIZES = (560, 700, 1024, 4096)  # of the cache, in tokens: one sequence of the longest fits
MEMBERS = [name for name in DRAFTERS if name not in DOCUMENTED and not name.startswith("mix-")]
CHAT = ChatOptions(
    chat_template="{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
TREES = [
    StaticTree([[0], [1], [0, 0]]),
    StaticTree([[2]]),
    StaticTree([[0], [0, 0], [0, 0, 0]]),
    StaticTree([[0], [1], [3], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
]
GRAMMARS = [
    Grammar.json({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}),
    Grammar.json({"type": "array", "items": {"type": "integer"}, "maxItems": 3}, whitespace=False),
    Grammar.json({"enum": ["once upon a time", "the end", "lily"]}),
    Grammar.json_object(),
    Grammar.regex(r"(once|twice|the (dog|cat)) [a-z ]{3,30}\."),
    Grammar.regex(r".{0,12}"),
    Grammar.regex(r"a{2,60}"),
    Grammar.choice(["yes", "no", "maybe not", "Lily and Tom went to the park"]),
    Grammar.lark('start: "x" | "y" start'),
]
STOPS = ["the", ".", " a", "e", "was a", "Lily", "there was", "\n", "he s"]


def lifted(tokens: list[int], logits: Tensor) -> Tensor:
    """A logits processor whose edits depend on the entire text."""
    return logits.index_add(0, torch.tensor([sum(tokens) % VOCAB]), logits.new_tensor([4.0]))


def random_options(rng: random.Random) -> Iterator[tuple[str, float, Any]]:
    """Sampling parameters: the name, how often it is set, and a value."""
    yield "top_k", 0.12, rng.choice([1, 2, 5, 40, 511, 512, 600])
    yield "top_p", 0.12, rng.choice([0.1, 0.5, 0.9, 0.99, 1e-9])
    yield "min_p", 0.12, rng.choice([0.01, 0.1, 0.5, 1.0])
    yield "repetition_penalty", 0.12, rng.choice([1.1, 1.5, 0.7])
    yield "presence_penalty", 0.12, rng.choice([0.5, -1.0, 2.0])
    yield "frequency_penalty", 0.12, rng.choice([0.5, -1.0, 2.0])
    biases = [5.0, -5.0, -math.inf, 20.0]
    yield "logit_bias", 0.12, {rng.randrange(VOCAB): rng.choice(biases) for _ in range(rng.randint(1, 8))}
    yield "banned_tokens", 0.12, rng.sample(range(VOCAB), rng.randint(1, 60))
    yield "bad_words", 0.12, rng.sample(["the", "was", "Lily", "little girl", "to play", "a"], 2)
    yield "min_tokens", 0.12, rng.randint(1, 40)
    yield "stop", 0.25, rng.sample(STOPS, rng.randint(1, 3))
    yield "stop_token_ids", 0.2, rng.sample(range(250, VOCAB), rng.randint(1, 12))
    yield "include_stop_str_in_output", 0.3, True
    yield "ignore_eos", 0.4, True
    yield "n", 0.2, rng.choice([2, 3])
    yield "logprobs", 0.6, rng.choice([0, 1, 5])
    yield "prompt_logprobs", 0.15, rng.choice([0, 2])
    yield "skip_special_tokens", 0.2, False
    yield "grammar", 0.25, rng.choice(GRAMMARS)
    yield "logits_processors", 0.08, (lifted,)


def random_params(rng: random.Random) -> SamplingParams:
    """Any sampling parameters; max_tokens None in some, which end where the context does."""
    chosen = {name: value for name, share, value in random_options(rng) if rng.random() < share}
    max_tokens = rng.choice([1, 2, 3, 5, 8, 13, 20, 33, 50, 50, 50, None])
    if max_tokens is not None and "min_tokens" in chosen:
        chosen["min_tokens"] = min(chosen["min_tokens"], max_tokens)
    temperature = rng.choice([0.0, 0.0, 0.8, 1.0, 1.0, 1.5, 1e-4, 5.0])
    return SamplingParams(temperature=temperature, seed=rng.getrandbits(64), max_tokens=max_tokens, **chosen)


def random_speculation(rng: random.Random, names: tuple[str, ...]) -> bool | Speculation:
    """Any shape of drafts, in some requests by one member of a mix, in some none."""
    depth = rng.choice([1, 2, 3, 4, 5, 8, 16, 30])
    drafter = rng.choice(names) if len(names) > 1 and rng.random() < 0.15 else None
    shapes: list[bool | Speculation] = [
        False,
        Speculation(drafter=drafter),
        Speculation(depth, rng.choice([1, 3]), drafter=drafter, auto=True),
        Speculation(drafter=drafter, tree=rng.choice(TREES)),
        Speculation(depth, rng.choice([2, 3, 4]), rng.choice([None, 1, 5, 12, 20]), drafter),
        Speculation(depth, drafter=drafter),
    ]
    return rng.choices(shapes, [1, 1, 1, 1, 2, 4])[0]


def random_drafter(rng: random.Random) -> str:
    """One drafter of the list, or some of them together."""
    count = rng.choice([1, 1, 2, 3])
    members = [spelled(name) for name in rng.choices(MEMBERS, k=count)]
    if count > 1:
        return f"mix[{','.join(members)}]"
    return f"cascade[{rng.choice(['ngram', 'suffix'])},model:{SMALL}]" if rng.random() < 0.2 else members[0]


class AnyRequests(Traffic):
    """Requests of any kind to an engine of any size; the caller sets its drafter."""

    names: tuple[str, ...] = ()

    @override
    def prompt(self, tenant: str) -> list[int]:
        """New text, the beginning of an earlier one, an earlier one that goes on, or a chat."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.05:
            return story(rng.choice([200, LONGEST - 8, LONGEST - 2, LONGEST - 1]), rng.randrange(50))
        if kind < 0.4:
            return story(rng.choice([1, 2, 5, 15, 16, 17, 31, 33, 60]), rng.randrange(50))
        if kind < 0.55:
            return self.chat(tenant)
        return super().prompt(tenant)

    def chat(self, tenant: str) -> list[int]:
        """A conversation whose last answer is a part of an earlier text."""
        tokenizer, rng = self.requests.tokenizer, self.rng
        assert tokenizer is not None
        answer = tokenizer.decode(rng.choice(self.past[tenant])[: rng.randint(1, 40)])
        begun = [{"role": "user", "content": "Who is it?"}, {"role": "assistant", "content": answer}]
        messages = [{"role": "system", "content": "Be kind."}, *begun * rng.randrange(3)]
        return tokenizer.encode(CHAT.render(tokenizer, [*messages, {"role": "user", "content": "And then?"}]))[:300]

    @override
    def request(self) -> Request:
        speculation = random_speculation(self.rng, self.names)
        tenant = self.rng.choice("aab")
        return Request.of(self.prompt(tenant), random_params(self.rng), speculation, tenant)

    def set_drafter(self, drafter: Drafter) -> None:
        self.engine.drafter = drafter
        self.names = self.requests.drafter_names = drafter.names

    def assert_empty(self) -> None:
        """Assert that nothing is left of the requests."""
        self.engine.notify_drafter()
        assert not self.engine.runner.tails
        for cache_ in reachable([self.engine]):
            if isinstance(cache_, PagedCache):
                cache_.check()
                assert not cache_.num_rows
                assert cache_.num_free_tokens == cache_.blocks.num_blocks * cache_.blocks.block_size


def built(rng: random.Random, bench: Bench, runner: Runner) -> Drafter:
    """A random drafter with caches of random sizes, which may be too small for it."""
    plan = plan_drafter(random_drafter(rng), DraftContext(bench.target, bench.target.tokenizer()))
    drafter = plan.build(dict.fromkeys(plan.models, rng.choice([64, 300, 700, 2048])), None, runner)
    assert drafter is not None
    return settled(drafter)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 120))])
def test_random_requests_are_answered_as_by_plain_decoding(seed: int) -> None:
    rng = random.Random(seed)
    bench = bench_of("float32" if seed < 2 else rng.choice(FORMATS))
    options = EngineOptions(rng.choice([1, 2, 3, 5, 8]), rng.choice([1, 7, 16, 33, 64, 512]), prefix_cache=seed % 3 > 0)
    traffic = AnyRequests(bench, rng.choice(SIZES), seed, options)
    traffic.set_drafter(built(rng, bench, traffic.engine.runner))
    if rng.random() < 0.3:
        traffic.engine.controller = FixedDepth()
    with unchecked():
        traffic.run(NUM_REQUESTS)
    traffic.assert_empty()
    assert traffic.engine.drafter is not None, "it is not switched off"
    gc.collect()
