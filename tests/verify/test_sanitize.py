"""sanitize: any input gives a valid tree, a clean one is unchanged, and q stays only where it is valid."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from forerun.models.chains import Chains
from forerun.sampling.draws import Draws
from forerun.tree import DraftLaw, DraftTree, HostTree
from forerun.verify.rules import token_law
from forerun.verify.sanitize import sanitize

VOCAB = 5


@dataclass(frozen=True)
class Limit:
    depth: int
    width: int
    nodes: int


def loose(batch: int) -> list[Limit]:
    return [Limit(9, 9, 99)] * batch


def hostile(tree: DraftTree, **fields: Any) -> DraftTree:
    """A copy with these fields, past all checks of types and shapes."""
    bad = object.__new__(DraftTree)
    for name in ("tokens", "parents", "depth", "width", "q", "known"):
        object.__setattr__(bad, name, fields.get(name, getattr(tree, name)))
    return bad


@st.composite
def drafts(draw: st.DrawFn) -> tuple[DraftTree, Tensor, list[Limit]]:
    """Any integers for tokens, parents and q rows, any floats for q, any bounds; roots that are mostly right."""
    batch, nodes, laws = draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.integers(1, 3))

    def matrix(low: int, high: int) -> Tensor:
        row = st.lists(st.integers(low, high), min_size=nodes, max_size=nodes)
        return torch.tensor(draw(st.lists(row, min_size=batch, max_size=batch)))

    tokens, parents = matrix(-2, VOCAB + 1), matrix(-2, nodes)
    number = st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0, float("nan"), float("inf")])
    probs = torch.tensor(draw(st.lists(st.lists(number, min_size=2, max_size=2), min_size=laws, max_size=laws)))
    pair = st.lists(st.integers(-1, VOCAB), min_size=2, max_size=2)
    ids = torch.tensor(draw(st.lists(pair, min_size=laws, max_size=laws)))
    q = DraftLaw(matrix(-2, laws + 1), probs, ids) if draw(st.booleans()) else None
    roots = tokens[:, 0].clamp(0, VOCAB - 1)
    limits = [Limit(draw(st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 6))) for _ in range(batch)]
    return DraftTree(tokens, parents, draw(st.integers(-1, 6)), draw(st.integers(-1, 4)), q), roots, limits


def by_hand(tree: DraftTree, row: int, root: int, limit: Limit) -> tuple[list[int], list[int]]:
    """The (tokens, parents) that may stay, decided node by node."""
    tokens, parents = [root, *tree.tokens[row, 1:].tolist()], tree.parents[row].tolist()
    level: dict[int, int] = {0: 0}
    seen: set[tuple[int, int]] = set()
    siblings = [0] * len(tokens)
    for node in range(1, len(tokens)):
        token, above = tokens[node], parents[node]
        if (
            not (0 <= token < VOCAB and 0 <= above < node)
            or (above > 0 and tokens[above] < 0)
            or (above, token) in seen
        ):
            continue
        seen.add((above, token))
        siblings[above] += 1
        fits = siblings[above] <= min(limit.width, max(tree.width, 1))
        if fits and above in level and level[above] < min(limit.depth, tree.depth) and len(level) <= limit.nodes:
            level[node] = level[above] + 1
    kept = [node in level for node in range(len(tokens))]
    return (
        [token if keep else -1 for token, keep in zip(tokens, kept, strict=True)],
        [above if keep and node else -1 for node, (above, keep) in enumerate(zip(parents, kept, strict=True))],
    )


@settings(max_examples=300, deadline=None)
@given(drafts())
def test_any_draft_becomes_a_valid_tree_within_limits(draft: tuple[DraftTree, Tensor, list[Limit]]) -> None:
    tree, roots, limits = draft
    clean = sanitize(tree, roots, limits, VOCAB)
    columns = clean.tokens.shape[1]
    assert columns <= 1 + max(limit.nodes if limit.depth else 0 for limit in limits)
    for b, limit in enumerate(limits):
        tokens, parents = by_hand(tree, b, int(roots[b]), limit)
        assert clean.tokens[b].tolist() == tokens[:columns]
        assert clean.parents[b].tolist() == parents[:columns]
    for parents in clean.parents.tolist():
        assert all(parents.count(node) <= clean.width for node in range(columns))
    assert int(clean.depths().max()) <= clean.depth
    assert 0 <= clean.depth < max(columns, 1)
    assert_law_is_readable(clean)


def assert_law_is_readable(clean: DraftTree) -> None:
    """Assert that every law that nodes refer to is one, and that the token rule accepts the tree."""
    rows = torch.where(clean.valid, clean.valid.flatten().long().cumsum(0).view_as(clean.tokens) - 1, 0)
    law = token_law(clean, torch.full((int(clean.valid.sum()), VOCAB), 1 / VOCAB), rows)
    assert ((law.accept >= 0) & (law.accept <= 1)).all()
    assert torch.allclose(law.after.sum(1), torch.ones(len(law.after)), atol=1e-4)
    if clean.q is None:
        return
    dense = clean.q.dense(VOCAB)
    for b, i in clean.valid.nonzero().tolist():
        source = int(clean.q.row[b, i])
        assert -1 <= source < len(dense)
        if source >= 0 and (clean.parents[b] == i).any():
            assert (dense[source] >= 0).all()
            assert abs(float(dense[source].sum()) - 1) < 2e-3


def example() -> DraftTree:
    """A wide tree, a chain with padding in its middle, a bare root; laws with reduced support."""
    return DraftTree(
        tokens=torch.tensor([[0, 1, 2, 1, 4], [3, 2, -1, 0, -1], [1, -1, -1, -1, -1]]),
        parents=torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, -1, 1, -1], [-1, -1, -1, -1, -1]]),
        depth=2,
        width=2,
        q=DraftLaw(
            torch.tensor([[0, 1, -1, -1, -1], [1, 0, -1, -1, -1], [-1] * 5]),
            torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.25, 0.25]]),
            ids=torch.tensor([[1, 2, 0], [4, 1, 2]]),
        ),
    )


ROOTS = torch.tensor([0, 3, 1])


def test_a_clean_draft_passes_unchanged() -> None:
    tree = example()
    limits = [Limit(2, 2, 4), Limit(2, 1, 2), Limit(0, 1, 0)]
    clean = sanitize(tree, ROOTS, limits, VOCAB)
    assert torch.equal(clean.tokens, tree.tokens)
    assert torch.equal(clean.parents, tree.parents)
    assert (clean.depth, clean.width) == (tree.depth, tree.width)
    assert clean.q is not None
    assert tree.q is not None
    assert torch.equal(clean.q.row, tree.q.row)
    assert torch.equal(clean.q.dense(VOCAB), tree.q.dense(VOCAB))


def keeps_q(tree: DraftTree, limits: list[Limit] | None = None, roots: Tensor = ROOTS) -> list[bool]:
    """For each sequence, whether its q is kept."""
    clean = sanitize(tree, roots, limits or loose(3), VOCAB)
    assert clean.q is not None
    return (clean.q.row >= 0).any(1).tolist()


def changed(name: str, b: int, i: int, value: int) -> DraftTree:
    tree = example()
    tensor = getattr(tree, name).clone()
    tensor[b, i] = value
    return replace(tree, **{name: tensor})


@pytest.mark.parametrize(
    ("name", "i", "value"),
    [
        ("tokens", 3, VOCAB),
        ("tokens", 3, -2),
        ("tokens", 2, 1),
        ("parents", 3, 3),
        ("parents", 3, -1),
        ("tokens", 0, 4),
    ],
    ids=["out of range", "negative", "repeated sibling", "its own parent", "no parent", "a wrong root"],
)
def test_a_rule_violation_removes_the_q_of_its_sequence_only(name: str, i: int, value: int) -> None:
    """The other sequences keep theirs."""
    assert keeps_q(example()) == [True, True, False]
    assert keeps_q(changed(name, 0, i, value)) == [False, True, False]


def test_a_child_of_padding_removes_q() -> None:
    assert keeps_q(changed("parents", 1, 3, 2)) == [True, False, False]


@pytest.mark.parametrize(
    ("width", "limits", "stays"),
    [
        (2, [Limit(1, 9, 99)] * 3, True),
        (2, [Limit(9, 1, 99)] * 3, True),
        (1, [Limit(9, 1, 1)] * 3, True),
        (2, [Limit(9, 9, 3), Limit(9, 9, 9), Limit(9, 9, 9)], False),
        (2, [Limit(9, 9, 3)] * 3, False),
    ],
    ids=["depth", "width", "a chain's number", "a tree's number", "that of all trees"],
)
def test_q_stays_if_a_limit_known_before_the_draw_cuts_the_tree(width: int, limits: list[Limit], stays: bool) -> None:
    """The order of a tree's nodes may depend on what was drawn, so cutting by number removes q."""
    assert keeps_q(replace(example(), width=width), limits)[0] == stays


@pytest.mark.parametrize("bad", [float("nan"), -0.25, 0.5, float("inf"), "negative, with a sum of 1"])
def test_a_row_that_is_no_law_removes_q(bad: float | str) -> None:
    tree = example()
    assert tree.q is not None
    probs = tree.q.probs.clone()
    probs[0, 0] = -0.25 if isinstance(bad, str) else bad
    if isinstance(bad, str):
        probs[0, 1] = 1.25 - float(probs[0, 2:].sum())
    assert keeps_q(replace(tree, q=replace(tree.q, probs=probs))) == [False, False, False]
    alone = replace(tree.q, probs=probs, row=torch.tensor([[1, 1, -1, -1, -1], [1, 0, -1, -1, -1], [-1] * 5]))
    assert keeps_q(replace(tree, q=alone)) == [True, False, False]


@pytest.mark.parametrize("ids", [[1, 1, 0], [VOCAB, 2, 0], [-1, 2, 0]])
def test_repeated_or_unknown_ids_and_rows_remove_q(ids: list[int]) -> None:
    q = example().q
    assert q is not None
    assert keeps_q(replace(example(), q=replace(q, ids=torch.tensor([ids, [4, 1, 2]])))) == [False, False, False]
    row = q.row.clone()
    row[1, 0] = 2
    assert keeps_q(replace(example(), q=replace(q, row=row))) == [True, False, False], "a row that does not exist"
    row = q.row.clone()
    row[0, 3:] = torch.tensor([2, -2])
    unread = replace(example(), q=replace(q, row=row))
    assert keeps_q(unread) == [True, True, False], "of nodes without children"
    assert_law_is_readable(sanitize(unread, ROOTS, loose(3), VOCAB))


def unreadable_laws() -> list[DraftLaw]:
    row = torch.zeros(3, 5, dtype=torch.int64)
    laws = []
    for fields in (
        (row[:2], torch.ones(1, VOCAB), None),
        (row[:, :3], torch.ones(1, VOCAB), None),
        (row.float(), torch.ones(1, VOCAB), None),
        (row, torch.ones(1, VOCAB - 1), None),
        (row, torch.ones(VOCAB), None),
        (row, torch.ones(1, VOCAB, dtype=torch.int64), None),
        (row, torch.ones(0, VOCAB), None),
        (row, torch.ones(1, 3), torch.zeros(1, 2, dtype=torch.int64)),
        (row, torch.ones(1, 3), torch.zeros(1, 3)),
    ):
        law = object.__new__(DraftLaw)
        for name, value in zip(("row", "probs", "ids"), fields, strict=True):
            object.__setattr__(law, name, value)
        laws.append(law)
    return laws


@pytest.mark.parametrize("law", unreadable_laws())
def test_a_law_of_the_wrong_shape_or_dtype_is_dropped(law: DraftLaw) -> None:
    clean = sanitize(hostile(example(), q=law), ROOTS, loose(3), VOCAB)
    assert clean.q is None
    assert torch.equal(clean.tokens, example().tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": example().tokens.float()},
        {"parents": example().parents.int()},
        {"tokens": example().tokens[:2], "parents": example().parents[:2]},
        {"tokens": example().tokens[:, :3]},
        {"tokens": example().tokens[0], "parents": example().parents[0]},
        {"tokens": example().tokens[:, :0], "parents": example().parents[:, :0]},
        {"depth": 0},
        {"depth": -3},
    ],
    ids=["float", "other integers", "batch", "shapes", "one row", "no columns", "depth 0", "negative depth"],
)
def test_tensors_that_are_no_tree_leave_the_roots_only(fields: dict[str, Any]) -> None:
    clean = sanitize(hostile(example(), **fields), ROOTS, loose(3), VOCAB)
    assert clean.tokens.tolist() == [[0], [3], [1]]
    assert clean.depth == 0
    assert clean.q is None


def test_chains_drawn_by_a_runner_are_checked_only_if_changed() -> None:
    nodes = torch.tensor([[[5, 6, 7], [8, 9, -1]], [[-1, 0, 1], [-1, 0, -1]]])
    chains = Chains([HostTree.unseen(2), HostTree.unseen(1)], {}, nodes=nodes)
    roots, limits = nodes[0, :, 0], [Limit(2, 1, 2)] * 2
    drawn = chains.tree(Draws([], 16))
    assert sanitize(drawn, roots, limits, 16) is drawn
    changed = replace(drawn, tokens=torch.where(drawn.tokens == 6, 99, drawn.tokens))
    assert not changed.sound
    assert sanitize(changed, roots, limits, 16).tokens.tolist() == [[5, -1, -1], [8, 9, -1]]
    assert sanitize(drawn, roots, limits, 16) is drawn


def test_chains_that_only_a_device_knows_are_cut_to_each_limit_like_others() -> None:
    tree = DraftTree.chains(torch.tensor([0, 3]), torch.tensor([[1, 2, 4, 0], [2, 1, 0, -1]]))
    unseen = replace(tree, known=[HostTree.unseen(4), HostTree.unseen(3)])
    for depths, nodes in itertools.product(itertools.product((0, 2, 4), repeat=2), repeat=2):
        limits = [Limit(depth, 1, number) for depth, number in zip(depths, nodes, strict=True)]
        expected, found = (sanitize(each, tree.tokens[:, 0], limits, VOCAB) for each in (tree, unseen))
        columns = found.tokens.shape[1]
        assert found.tokens.tolist() == expected.tokens[:, :columns].tolist()
        assert not (expected.tokens[:, columns:] >= 0).any()
        lengths = [len(known.tokens) for known in found.known] if found.known else [1, 1]
        assert lengths == (expected.tokens >= 0).sum(1).tolist()


def test_what_the_host_lays_out_as_a_chain_stays_one() -> None:
    """A node that would hang above one that is not in the vocabulary is removed, with a law too."""
    tokens, parents = torch.tensor([[0, 1, 99, 2]]), torch.tensor([[-1, 0, 1, 1]])
    law = DraftLaw(torch.tensor([[0, -1, -1, -1]]), torch.full((1, VOCAB), 1 / VOCAB))
    tree = DraftTree(tokens, parents, depth=3, width=1, q=law, known=[HostTree.unseen(3)])
    assert sanitize(tree, tokens[:, 0], loose(1), VOCAB).tokens.tolist() == [[0, 1, -1, -1]]


def test_each_sequence_has_its_own_width() -> None:
    clean = sanitize(example(), ROOTS, [Limit(9, 1, 9), Limit(9, 2, 9), Limit(9, 1, 9)], VOCAB)
    assert clean.tokens.tolist() == [[0, 1, -1, 1, -1], *example().tokens.tolist()[1:]]
    assert (clean.width, clean.widths) == (2, [1, 2, 1])


def test_columns_beyond_every_limit_are_cut_off() -> None:
    """A very long draft must not reach code of quadratic cost."""
    parents = torch.arange(-1, 99_999)[None]
    tree = DraftTree(torch.ones(1, 100_000, dtype=torch.int64), parents, depth=99_999)
    clean = sanitize(tree, torch.tensor([1]), [Limit(3, 1, 3)], VOCAB)
    assert clean.tokens.tolist() == [[1, 1, 1, 1]]
    assert clean.depth == 3


def test_nothing_reads_a_tensor_on_the_host() -> None:
    with FakeTensorMode():
        nothing = torch.zeros(2, 4, dtype=torch.int64)
        law = DraftLaw(nothing, torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64))
        tree = DraftTree(nothing, nothing, depth=2, width=2, q=law)
        assert sanitize(tree, nothing[:, 0], loose(2), VOCAB).tokens.shape == (2, 4)
