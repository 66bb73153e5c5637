"""One suite for all drafters: a new drafter is one more line in DRAFTERS and gets all of this.

Alone, a drafter is asked for its manners: clean trees within budgets, state that depends on the committed text alone,
nothing left behind. In the engine, with it and with drafters that break every rule, the output must be that of plain
decoding, token for token.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from dataclasses import replace as changed
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from documented import PAGE, PHRASES, phrase_drafter
from hostile import HOSTILE, Hostile
from torch import Tensor

from draft.rounds import Beside, Row, chunked, committed, draws_of
from draft.vocabularies import byte_level_copy
from forerun.config import Speculation
from forerun.draft.base import Budget, Committed, Draft, Drafter
from forerun.draft.build import DraftContext, plan_drafter
from forerun.draft.cascade import CascadeDrafter
from forerun.draft.lengths import FixedLength
from forerun.draft.model import ModelDrafter
from forerun.draft.suffix_past import Past
from forerun.llm import LLM
from forerun.models.decoder import Decoder
from forerun.models.loading import Blueprint
from forerun.models.runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.shape import StaticTree
from forerun.verify.sanitize import sanitize

DATA = Path(__file__).resolve().parent.parent / "data"
TARGET, SMALL = DATA / "stories260k", DATA / "stories280k"
EXITS = ("early-exit:1", "early-exit:4")
CASCADES = (f"cascade[ngram,model:{SMALL}]", f"cascade[ngram,model:{SMALL},model:{TARGET}]")
MIXES = (f"mix[ngram,model:{SMALL}]", f"mix[suffix,early-exit:1,model:{SMALL}]")
COPIES = TemporaryDirectory()
IN_BYTES = byte_level_copy(SMALL, Path(COPIES.name) / "in bytes")  # nearly all tokens are shared, under other ids
IN_PIECES = byte_level_copy(SMALL, Path(COPIES.name) / "in pieces", dropped=("Ġt", "he", "Ġa"))  # too few are
OTHERS = (f"model:{IN_BYTES}", f"model:{IN_PIECES}")
BUILT_IN = ("ngram", "ngram:2", "suffix", f"model:{SMALL}", f"model:{TARGET}", *EXITS, *CASCADES, *OTHERS, *MIXES)
DRAFTERS = (*BUILT_IN, PAGE.name)
NAMES = (
    *("ngram", "ngram:2", "suffix", "model:stories280k", "model:itself"),
    *(*EXITS, "cascade-of-2", "cascade-of-3", "model:shared", "model:encoded-again"),
    *("mix-of-2", "mix-of-3", PAGE.name),
)

VOCAB = 512
CACHE_TOKENS = 2048
LONGEST = 1024  # more than any text here: a target has read all of a text that it drafts for
MODES = [(t, w, r) for t in (0.0, 1.0) for w in (1, 3) for r in (False, True)]  # temperature, width, rejection


@cache
def context() -> DraftContext:
    target = Blueprint.of(str(TARGET), "float32")
    return DraftContext(target, target.tokenizer(), "float32")


def documented() -> Drafter:
    """The drafter that the documentation builds. It knows phrases of the target's, and pieces of made-up stories."""
    pieces = [story(300, seed)[start : start + 9] for seed in range(4) for start in range(0, 290, 4)]
    return phrase_drafter([context().tokenizer.encode(phrase) for phrase in PHRASES] + pieces)


@cache
def decoder() -> Decoder:
    target = context().target
    return changed(target, config=changed(target.config, max_positions=LONGEST)).load(0).decoder


@pytest.fixture(params=DRAFTERS, ids=NAMES)
def make(request: pytest.FixtureRequest) -> Callable[[], Drafter]:
    """Builds a fresh drafter of one kind."""
    if request.param == PAGE.name:
        return documented
    plan = plan_drafter(request.param, context())

    def build() -> Drafter:
        target = Runner.of(decoder(), 2 * CACHE_TOKENS)
        return Beside(target, settled(plan.build(dict.fromkeys(plan.bytes_per_token, CACHE_TOKENS), None, target)))

    return build


def settled(drafter: Drafter) -> Drafter:
    """With lengths fixed in every cascade: measured ones are another history's, and tell in rejection modes."""
    member = drafter
    while isinstance(member, CascadeDrafter):
        member.lengths, member = FixedLength(2), member.lower
    return drafter


def story(length: int, seed: int) -> list[int]:
    """Text that repeats itself now and then, so that every kind of drafter finds something to say."""
    rng = random.Random(seed)
    text = [1]
    while len(text) < length:
        start = rng.randrange(len(text))
        text += text[start : start + rng.randint(1, 6)] if rng.random() < 0.6 else [rng.randrange(3, VOCAB)]
    return text[:length]


def tell(drafter: Drafter, news: Committed) -> None:
    """Observe, with made-up features (a function of the token) for drafters that read the target's states."""
    if drafter.taps:
        table = torch.randn(VOCAB, len(drafter.taps), 64, generator=torch.Generator().manual_seed(0))
        news = changed(news, features=table[torch.tensor(news.tokens, dtype=torch.long)])
    drafter.observe(news)


def any_arm(drafter: Drafter, rng: random.Random) -> int:
    """The arms of a mix in turn; there is no choice elsewhere."""
    return rng.randrange(len(drafter.arms)) if len(drafter.arms) > 1 else 0


def asked(
    drafter: Drafter,
    rows: Sequence[Row],
    budgets: Sequence[Budget],
    mode: tuple[float, int, bool] = (1.0, 1, False),
    tail: Committed | None = None,
) -> Draft:
    temperature, _, rejection = mode
    draws = draws_of(rows, VOCAB, temperature=temperature, rejection=rejection)
    return drafter.propose(draws, budgets, tail)


def told_at_once(make: Callable[[], Drafter], rows: Sequence[Row]) -> Drafter:
    drafter = make()
    tell(drafter, committed(rows))
    return drafter


def assert_same(found: Draft, expected: Draft) -> None:
    """The same guesses, the same laws, the same confidence."""
    for name in ("tokens", "parents"):
        assert torch.equal(getattr(found.tree, name), getattr(expected.tree, name)), name
    assert (found.survival is None) == (expected.survival is None)
    if found.survival is not None and expected.survival is not None:
        assert torch.equal(found.survival, expected.survival)
    assert (found.tree.q is None) == (expected.tree.q is None)
    if found.tree.q is not None and expected.tree.q is not None:
        assert torch.equal(found.tree.q.row, expected.tree.q.row)
        assert torch.equal(found.tree.q.dense(VOCAB), expected.tree.q.dense(VOCAB))


def reachable(value: object, seen: set[int] | None = None) -> Iterator[object]:
    """A drafter and all that hangs on it."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, Tensor | str | type):
        return
    seen.add(id(value))
    yield value
    parts: Iterator[object] = iter(())
    if isinstance(value, dict):
        parts = iter([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple | set | frozenset):
        parts = iter(value)
    elif is_dataclass(value) or type(value).__module__.startswith("forerun."):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        own = [getattr(value, name) for name in slots if hasattr(value, name)]
        parts = iter([*own, *getattr(value, "__dict__", {}).values()])
    for part in parts:
        yield from reachable(part, seen)


def size_of(drafter: object) -> int:
    """Entries of all containers that can be reached from a drafter: what grows when something is remembered."""
    return sum(len(part) for part in reachable(drafter) if isinstance(part, dict | list | tuple | set | frozenset))


def without_past(drafter: Drafter) -> Drafter:
    """Past answers are kept on purpose, up to a size (tests/draft/test_suffix_past.py); nothing else may be."""
    for past in [part for part in reachable(drafter) if isinstance(part, Past)]:
        past.clear()
    return drafter


def assert_clean(draft: Draft, rows: Sequence[Row], budgets: Sequence[Budget]) -> None:
    """Nothing to sanitize: all invariants hold, all budgets are kept, the law is believed."""
    tree = draft.tree
    roots = torch.tensor([row.text[-1] for row in rows])
    clean = sanitize(tree, roots, budgets, VOCAB)
    nodes = clean.tokens.shape[1]
    assert torch.equal(clean.tokens, tree.tokens[:, :nodes])
    assert torch.equal(clean.parents, tree.parents[:, :nodes])
    assert not tree.valid[:, nodes:].any()
    if tree.q is not None and clean.q is not None:
        assert torch.equal(clean.q.row, tree.q.row[:, :nodes])
    for b, budget in enumerate(budgets):
        assert int(tree.depths()[b].max()) <= budget.depth
        assert int(tree.valid[b].sum()) - 1 <= (budget.nodes if budget.depth else 0)
    if draft.survival is not None:
        above = draft.survival.gather(1, tree.parents.clamp_min(0))
        assert (draft.survival[:, 0] == 1).all()
        assert ((draft.survival >= 0) & (draft.survival <= above))[tree.valid].all()


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("batch", [1, 5])
def test_any_history_gives_clean_trees_that_depend_on_the_text_alone(
    make: Callable[[], Drafter], batch: int, mode: tuple[float, int, bool]
) -> None:
    """Rounds in which random rows are drafted and random parts of the trees come true."""
    rng = random.Random(f"{batch} {mode}")
    drafter, width = make(), mode[1]
    texts = {seq_id: story(8 + 17 * seq_id, seq_id) for seq_id in range(batch)}
    tell(drafter, committed([Row(s, t) for s, t in texts.items()]))
    for _ in range(4):
        rows = [Row(s, list(texts[s])) for s in rng.sample(sorted(texts), rng.randint(1, batch))]
        budgets = [Budget(rng.randint(0, 5), width, rng.randint(5, 12), any_arm(drafter, rng)) for _ in rows]
        draft = asked(drafter, rows, budgets, mode)
        assert_clean(draft, rows, budgets)
        assert_same(draft, asked(told_at_once(make, rows), rows, budgets, mode))
        for b, row in enumerate(rows):
            node, children = 0, draft.tree.children()[b].tolist()
            while rng.random() < 0.7 and (below := [c for c in children[node] if c >= 0]):
                node = rng.choice(below)
                texts[row.seq_id].append(int(draft.tree.tokens[b, node]))
            texts[row.seq_id].append(rng.randrange(3, VOCAB))
        news = committed([Row(r.seq_id, texts[r.seq_id]) for r in rows], [len(r.text) - 1 for r in rows])
        tell(drafter, news)


@pytest.mark.parametrize("seed", range(3))
def test_chunks_do_not_matter(make: Callable[[], Drafter], seed: int) -> None:
    rows = [Row(s, story(20 + 9 * s, s)) for s in range(3)]
    budgets = [Budget(4, 2, 7), Budget(3), Budget(5, 3, 9)]
    drafter = make()
    for news in chunked(rows, seed):
        tell(drafter, news)
    assert_same(asked(drafter, rows, budgets), asked(told_at_once(make, rows), rows, budgets))


def test_forget_leaves_nothing_behind(make: Callable[[], Drafter]) -> None:
    rows, others = [Row(s, story(70, s)) for s in range(3)], [Row(s, story(50, 9 + s)) for s in range(3)]
    drafter, budgets = make(), [Budget(4, 2, 8)] * 3
    before = size_of(drafter)
    tell(drafter, committed(rows))
    asked(drafter, rows, budgets)
    assert size_of(drafter) > before
    drafter.forget([0, 1, 2, 1000])
    assert size_of(without_past(drafter)) == before
    assert asked(drafter, rows, budgets).tree.valid.sum() == 3
    tell(drafter, committed(others))
    assert_same(asked(drafter, others, budgets), asked(told_at_once(make, others), others, budgets))


def test_a_tail_is_as_if_observed_and_forgotten_on_return(make: Callable[[], Drafter]) -> None:
    rows = [Row(s, story(30, s)) for s in range(2)]
    longer = [rows[0], Row(1, rows[1].text + story(30, 7)[20:])]
    drafter = told_at_once(make, rows)
    if drafter.taps:
        pytest.skip("a tail has features of its own")
    tail = committed(longer[1:], [29])
    for arm in range(len(drafter.arms)):
        budgets = [Budget(4, 2, 7, arm), Budget(3, arm=arm)]
        assert_same(asked(drafter, longer, budgets, tail=tail), asked(told_at_once(make, longer), longer, budgets))
        assert_same(asked(drafter, rows, budgets), asked(told_at_once(make, rows), rows, budgets))


def test_outlook_is_kept_and_strangers_get_a_root_alone(make: Callable[[], Drafter]) -> None:
    drafter, rows = make(), [Row(s, story(length, s)) for s, length in enumerate((5, 250, 300, 505, 512, 600))]
    told = rows[1:]
    tell(drafter, committed(told))
    outlook = drafter.outlook([row.seq_id for row in rows])
    assert len(outlook.unread) == len(outlook.limit) == len(rows)
    assert outlook.unread[0] == outlook.limit[0] == 0
    budgets = [Budget(6)] * len(rows)
    draft = asked(drafter, rows, budgets)
    assert_clean(draft, rows, budgets)
    for found, limit in zip(draft.tree.depths().max(1).values.tolist(), outlook.limit, strict=True):
        assert found <= limit
    behind = any(arm.startswith(("model", "cascade")) for arm in drafter.arms)  # readers of text may be
    assert behind or not any(drafter.outlook([row.seq_id for row in told]).unread[1:])


PROMPTS = ("Once upon a time", "Lily and Tom went to the park. Lily and Tom", "The", "One day, a big dog", "She said")
STATIC = Speculation(tree=StaticTree([[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 0]]))
TREES = (Speculation(4), Speculation(3, 2, 8), Speculation(5, 3, 15), STATIC)
NUM_TOKENS = 24


def params(temperature: float, seed: int, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True)


def answers(
    llm: LLM, temperature: float, batch: int, speculation: bool | Speculation = True, num_tokens: int = NUM_TOKENS
) -> list[tuple[int, ...]]:
    """What is generated, prompts and seeds one for each row."""
    each = [params(temperature, seed, num_tokens) for seed in range(batch)]
    return [r.completions[0].token_ids for r in llm.generate(list(PROMPTS[:batch]), each, speculation)]


def drafted(spec: str) -> LLM:
    """The target with a drafter of one kind."""
    return LLM(str(TARGET), documented() if spec == PAGE.name else spec, dtype="float32")


@cache
def plain(temperature: float) -> list[tuple[int, ...]]:
    """Plain decoding, one prompt at a time."""
    llm = LLM(str(TARGET), dtype="float32")
    return [
        llm.generate([prompt], [params(temperature, seed)])[0].completions[0].token_ids
        for seed, prompt in enumerate(PROMPTS)
    ]


@cache
def full_texts(temperature: float) -> list[list[int]]:
    """Prompts and plain answers, joined: what an oracle knows."""
    prompts = [context().tokenizer.encode(prompt) for prompt in PROMPTS]
    return [prompt + list(answer) for prompt, answer in zip(prompts, plain(temperature), strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spec", DRAFTERS, ids=NAMES)
def test_the_output_is_that_of_plain_decoding(spec: str, temperature: float) -> None:
    llm = drafted(spec)
    for speculation in TREES:
        for batch in (1, 5):
            assert answers(llm, temperature, batch, speculation) == plain(temperature)[:batch], (speculation, batch)
    assert llm.stats.num_drafted > 50
    assert llm.stats.num_accepted > 0
    assert size_of(without_past(llm.engine.drafter)) == size_of(drafted(spec).engine.drafter)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", HOSTILE)
def test_no_drafter_changes_the_output(name: str, temperature: float) -> None:
    drafter = Hostile(HOSTILE[name], full_texts(temperature))
    llm = LLM(str(TARGET), drafter, dtype="float32")
    for speculation in (Speculation(4), Speculation(3, 3, 9)):
        assert answers(llm, temperature, 5, speculation, 10) == [a[:10] for a in plain(temperature)]
    assert drafter.num_proposed > 2


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("name", HOSTILE)
def test_under_rejection_rules_greedy_output_is_plain_too(name: str, verification: str) -> None:
    drafter = Hostile(HOSTILE[name], full_texts(0.0))
    llm = LLM(str(TARGET), drafter, dtype="float32", verification=verification)
    assert answers(llm, 0.0, 5, num_tokens=10) == [a[:10] for a in plain(0.0)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_guess_of_an_oracle_is_accepted(temperature: float) -> None:
    llm = LLM(str(TARGET), Hostile(HOSTILE["oracle"], full_texts(temperature)), dtype="float32")
    answers(llm, temperature, 5, Speculation(7))
    assert llm.stats.num_accepted == llm.stats.num_drafted > 0
    rounds_each = 1 + -(-(NUM_TOKENS - 1) // 8)  # the first, with the prompt, is not drafted
    assert llm.stats.num_rounds <= 5 * rounds_each
    wrong = LLM(str(TARGET), Hostile(HOSTILE["always_wrong"], full_texts(temperature)), dtype="float32")
    answers(wrong, temperature, 5, Speculation(7))
    assert wrong.stats.num_accepted == 0 < wrong.stats.num_drafted


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    llm = LLM(str(TARGET), f"model:{TARGET}", dtype="float32")
    for temperature in (0.0, 1.0):
        answers(llm, temperature, 5, Speculation(4))
    assert llm.stats.num_accepted == llm.stats.num_drafted > 0


def test_beyond_the_drafters_context_decoding_goes_on_undrafted() -> None:
    """The drafter has 256 positions, the target 290: guesses end with the one, the text with the other."""
    prompt, to_the_end = story(230, 0), SamplingParams(temperature=1.0, seed=5, max_tokens=None, ignore_eos=True)
    expected = LLM(str(TARGET), dtype="float32", max_len=290).generate(prompt, to_the_end)[0].completions[0]
    llm = LLM(str(TARGET), f"model:{SMALL}", dtype="float32", max_len=290)
    found = llm.generate(prompt, to_the_end, Speculation(4))[0].completions[0]
    assert found.token_ids == expected.token_ids
    assert len(prompt) + len(found.token_ids) == 290
    assert 0 < llm.stats.num_drafted <= 4 * (256 - 230 + 1)


def test_a_drafter_short_of_memory_changes_nothing() -> None:
    small = Blueprint.of(str(SMALL), "float32")
    for num_tokens in (0, 64, 192):
        drafter = ModelDrafter(small.load(num_tokens), VOCAB)
        llm = LLM(str(TARGET), drafter, dtype="float32")
        assert answers(llm, 1.0, 5, Speculation(4, 2, 8)) == plain(1.0)
        assert (llm.stats.num_drafted > 0) == (num_tokens > 0)
        drafter.runner.cache.check()
        assert drafter.runner.cache.num_free_tokens == num_tokens
