"""One suite for all drafters, alone: a new drafter is one more line in `drafters.py` and gets all of this.

Checked here: trees are clean and within budgets, state depends on the committed text alone, and `forget` removes all
of it. `test_conformance_output.py` checks the engine's output with each drafter.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace as changed
from functools import cache

import pytest
import torch

from draft.rounds import DrafterWithTarget, Row, chunked, committed, draws_of
from forerun.draft.base import Budget, Committed, Draft, Drafter
from forerun.errors import WrongTarget
from forerun.models.decoder import Decoder
from forerun.models.runner import Read, Runner
from forerun.verify.sanitize import sanitize
from kit.assertions import assert_same
from kit.texts import VOCAB, story
from law.drafters import DOCUMENTED, DRAFTERS, DTYPES, EVERY_DTYPE, built, context
from law.rebuilt import size_of, without_past

CACHE_TOKENS = 2048
LONGEST = 1024  # more than any text here: a target must be able to read every text that is drafted for
MODES = [(t, w, r) for t in (0.0, 1.0) for w in (1, 3) for r in (False, True)]  # temperature, width, rejection
SHORT = {("bfloat16", 5, (1.0, 1, True)), ("bfloat16", 1, (0.0, 3, False))}
HISTORIES = [
    pytest.param(d, b, m, marks=[] if d == "float32" or (d, b, m) in SHORT else pytest.mark.full, id=f"{d}-{b}-{m}")
    for d in DTYPES
    for b in (1, 5)
    for m in MODES
]


@cache
def decoder(dtype: str) -> Decoder:
    target = context(dtype).target
    return changed(target, config=changed(target.config, max_positions=LONGEST)).load(0).decoder


@pytest.fixture(params=EVERY_DTYPE)
def dtype(request: pytest.FixtureRequest) -> str:
    """The numbers that the target and its drafters compute in."""
    return request.param


@pytest.fixture(params=DRAFTERS)
def make(request: pytest.FixtureRequest, dtype: str) -> Callable[[], Drafter]:
    """Builds a fresh drafter of one kind, with a target for those that read its cache or states."""
    if request.param in DOCUMENTED:
        return DOCUMENTED[request.param]

    def build() -> Drafter:
        target = Runner.of(decoder(dtype), 2 * CACHE_TOKENS)
        return DrafterWithTarget(target, built(request.param, target, dtype, CACHE_TOKENS))

    return build


def observe(drafter: Drafter, news: Committed) -> None:
    """Observe, with made-up features (a function of the token) for drafters that read the target's states."""
    if drafter.taps:
        table = torch.randn(VOCAB, len(drafter.taps), 64, generator=torch.Generator().manual_seed(0))
        news = changed(news, features=table[torch.tensor(news.tokens, dtype=torch.long)])
    drafter.observe(news)


def any_member(drafter: Drafter, rng: random.Random) -> int:
    """A random member of a mix; 0 for other drafters."""
    return rng.randrange(len(drafter.names)) if len(drafter.names) > 1 else 0


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


def observed_at_once(make: Callable[[], Drafter], rows: Sequence[Row]) -> Drafter:
    drafter = make()
    observe(drafter, committed(rows))
    return drafter


def assert_clean(draft: Draft, rows: Sequence[Row], budgets: Sequence[Budget]) -> None:
    """`sanitize` changes nothing: all invariants and budgets hold, and the declared law is valid."""
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


@pytest.mark.short(
    "ngram-float32-1-(0.0, 1, False)",
    "suffix-float32-5-(1.0, 3, True)",
    "model:stories280k-bfloat16-1-(1.0, 3, False)",
    "early-exit:1-float32-5-(1.0, 3, True)",
    "medusa-float32-5-(1.0, 3, True)",
    "eagle-bfloat16-1-(1.0, 3, False)",
    "block-bfloat16-5-(1.0, 1, True)",
    "mtp-float32-1-(0.0, 1, False)",
    "cascade-of-2-float32-5-(1.0, 1, True)",
    "mix-of-2-bfloat16-1-(1.0, 3, True)",
    "documented-float32-1-(0.0, 1, True)",
)
@pytest.mark.parametrize(("dtype", "batch", "mode"), HISTORIES)
def test_drafts_are_clean_and_depend_on_the_committed_text_alone(
    make: Callable[[], Drafter], batch: int, mode: tuple[float, int, bool]
) -> None:
    """Texts are observed in random pieces; then random rows are drafted, and random paths of the trees accepted."""
    rng = random.Random(f"{batch} {mode}")
    drafter, width = make(), mode[1]
    texts = {seq_id: story(8 + 17 * seq_id, seq_id) for seq_id in range(batch)}
    for news in chunked([Row(s, t) for s, t in texts.items()], seed=batch):
        observe(drafter, news)
    for _ in range(4):
        rows = [Row(s, list(texts[s])) for s in rng.sample(sorted(texts), rng.randint(1, batch))]
        budgets = [Budget(rng.randint(0, 5), width, rng.randint(1, 12), any_member(drafter, rng)) for _ in rows]
        draft = asked(drafter, rows, budgets, mode)
        assert_clean(draft, rows, budgets)
        assert_same(draft, asked(observed_at_once(make, rows), rows, budgets, mode))
        for b, row in enumerate(rows):
            node, children = 0, draft.tree.children()[b].tolist()
            while rng.random() < 0.7 and (below := [c for c in children[node] if c >= 0]):
                node = rng.choice(below)
                texts[row.seq_id].append(int(draft.tree.tokens[b, node]))
            texts[row.seq_id].append(rng.randrange(3, VOCAB))
        news = committed([Row(r.seq_id, texts[r.seq_id]) for r in rows], [len(r.text) - 1 for r in rows])
        observe(drafter, news)


@pytest.mark.short(
    "ngram-float32",
    "suffix-bfloat16",
    "model:stories280k-float32",
    "early-exit:4-bfloat16",
    "eagle-float32",
    "block-bfloat16",
    "mtp-float32",
    "cascade-of-2-float32",
    "mix-of-3-bfloat16",
)
def test_forget_removes_all_state_of_a_sequence(make: Callable[[], Drafter]) -> None:
    rows, others = [Row(s, story(70, s)) for s in range(3)], [Row(s, story(50, 9 + s)) for s in range(3)]
    drafter, budgets = make(), [Budget(4, 2, 8)] * 3
    before = size_of(drafter)
    observe(drafter, committed(rows))
    asked(drafter, rows, budgets)
    assert size_of(drafter) > before
    drafter.forget([0, 1, 2, 1000])
    assert size_of(without_past(drafter)) == before
    assert asked(drafter, rows, budgets).tree.valid.sum() == 3
    observe(drafter, committed(others))
    assert_same(asked(drafter, others, budgets), asked(observed_at_once(make, others), others, budgets))


@pytest.mark.short(
    "ngram-float32",
    "suffix-float32",
    "model:stories280k-bfloat16",
    "model:experts-float32",
    "early-exit:1-bfloat16",
    "early-exit:adapted-float32",
    "medusa-float32",
    "hydra-bfloat16",
    "eagle-float32",
    "block-bfloat16",
    "mtp-of-3-float32",
    "cascade-of-3-bfloat16",
    "mix-of-3-bfloat16",
    "documented:taps-float32",
)
def test_a_tail_counts_as_observed_during_one_proposal_only(make: Callable[[], Drafter]) -> None:
    rows = [Row(s, story(30, s)) for s in range(2)]
    longer = [rows[0], Row(1, rows[1].text + story(30, 7)[20:])]
    drafter = observed_at_once(make, rows)
    if drafter.taps:
        pytest.skip("a tail has features of its own")
    tail = committed(longer[1:], [29])
    for member in range(len(drafter.names)):
        budgets = [Budget(4, 2, 7, member), Budget(3, drafter=member)]
        assert_same(asked(drafter, longer, budgets, tail=tail), asked(observed_at_once(make, longer), longer, budgets))
        assert_same(asked(drafter, rows, budgets), asked(observed_at_once(make, rows), rows, budgets))
    now = [rows[0], Row(1, [*longer[1].text[:33], 9])]  # the target accepted a part of the tail
    observe(drafter, committed(now[1:], [29]))
    assert_same(asked(drafter, now, budgets), asked(observed_at_once(make, now), now, budgets))


@pytest.mark.short(
    "suffix-bfloat16",
    "model:stories280k-float32",
    "early-exit:4-float32",
    "eagle-bfloat16",
    "block:heads-float32",
    "cascade-of-2-bfloat16",
    "mix-of-2-float32",
)
def test_drafts_stay_within_the_outlook_and_unknown_sequences_get_none(make: Callable[[], Drafter]) -> None:
    drafter, rows = make(), [Row(s, story(length, s)) for s, length in enumerate((5, 250, 300, 505, 512, 600))]
    known = rows[1:]
    observe(drafter, committed(known))
    outlook = drafter.outlook([row.seq_id for row in rows])
    assert len(outlook.unread) == len(outlook.limit) == len(rows)
    assert outlook.unread[0] == outlook.limit[0] == 0
    budgets = [Budget(6)] * len(rows)
    draft = asked(drafter, rows, budgets)
    assert_clean(draft, rows, budgets)
    for depth, limit in zip(draft.tree.depths().max(1).values.tolist(), outlook.limit, strict=True):
        assert depth <= limit
    behind = any(member.startswith(("model", "cascade")) for member in drafter.names)  # readers of text may be
    left = drafter.outlook([row.seq_id for row in known]).unread
    assert behind or not any(count for count, limit in list(zip(left, outlook.limit[1:], strict=True))[1:] if limit)


@pytest.mark.parametrize("name", ["early-exit:adapted", "medusa", "eagle", "block", "mtp"])
def test_tokens_without_required_hidden_states_are_refused(name: str) -> None:
    target, text = Runner.of(decoder("float32"), 64), [1, 5, 9]
    drafter = built(name, target, num_tokens=64)
    target.read([Read(0, text[:-1])])
    target.keep([0], [range(2)])
    with pytest.raises(WrongTarget, match="received tokens without them"):
        drafter.observe(committed([Row(0, text)]))
