"""The rules' closed forms, their independence of batch and packing, and that they are pure."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from forerun.tree import DraftLaw, DraftTree
from forerun.verify.rules import AcceptLaw, block_law, follow, token_law, walk

BOTH = pytest.mark.parametrize("rule", [token_law, block_law])
VOCAB = 5


def laws(rows: int, seed: int, vocab: int = VOCAB, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random laws, some with zeros."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, vocab, generator=generator, dtype=dtype) ** 3
    weights[:, 1:] *= torch.rand(rows, vocab - 1, generator=generator) > 0.2
    return weights / weights.sum(1, keepdim=True)


def all_chains(q: Tensor, depth: int) -> tuple[DraftTree, Tensor, Tensor]:
    """Every chain of tokens from context-free laws q[step]: (tree, probability of each chain, row)."""
    vocab = q.shape[1]
    draft_tokens = torch.cartesian_prod(*[torch.arange(vocab)] * depth).view(-1, depth)
    chance = torch.stack([q[step, draft_tokens[:, step]] for step in range(depth)]).prod(0)
    steps = torch.tensor([[*range(depth), -1]]).expand(len(draft_tokens), -1)
    tree = DraftTree.chains(
        torch.zeros(len(draft_tokens), dtype=torch.int64), draft_tokens, q=DraftLaw(steps, q[:depth])
    )
    row = torch.arange(len(draft_tokens) * (depth + 1)).view(-1, depth + 1)
    return tree, chance, row


def survival(law: AcceptLaw) -> Tensor:
    """P(at least n draft tokens accepted) for n = 1.. of every chain."""
    chance = law.accept[:, 1:]
    if not law.last_success:
        return chance.cumprod(1)
    return 1 - (1 - chance).flip(1).cumprod(1).flip(1)


@pytest.mark.parametrize("seed", range(20))
def test_block_equals_token_for_one_draft_token(seed: int) -> None:
    p, q = laws(2, seed), laws(1, seed + 100)
    tree, _, row = all_chains(q, 1)
    p = p.repeat(len(row), 1)
    by_token, by_block = token_law(tree, p, row), block_law(tree, p, row)
    torch.testing.assert_close(by_token.accept, by_block.accept)
    used = by_token.accept[:, 1] < 1  # elsewhere the walk never stops at the root
    torch.testing.assert_close(by_token.after[row[used, 0]], by_block.after[row[used, 0]])


@pytest.mark.parametrize("seed", range(10))
def test_expected_tokens_of_the_token_rule_on_independent_positions(seed: int) -> None:
    """1 + a + .. + a^k = (1 - a^(k+1)) / (1 - a), with a the overlap."""
    p, q = laws(1, seed), laws(1, seed + 100)
    overlap = torch.minimum(p[0], q[0]).sum().item()
    for depth in (1, 2, 3):
        tree, chance, row = all_chains(q.expand(depth, -1), depth)
        law = token_law(tree, p.expand(row.numel(), -1), row)
        tokens = 1 + (chance[:, None] * survival(law)).sum().item()
        assert math.isclose(tokens, (1 - overlap ** (depth + 1)) / (1 - overlap), rel_tol=1e-10)


@pytest.mark.parametrize("seed", range(20))
def test_block_accepts_at_least_as_much_as_token_and_at_most_the_overlap_of_strings(seed: int) -> None:
    """At every depth; no lossless rule accepts a string with more mass than min(p, q) of the string."""
    depth = 3
    p, q = laws(depth + 1, seed), laws(depth, seed + 100)
    tree, chance, row = all_chains(q, depth)
    packed = p.repeat(len(row), 1)
    by_token = (chance[:, None] * survival(token_law(tree, packed, row))).sum(0)
    by_block = (chance[:, None] * survival(block_law(tree, packed, row))).sum(0)
    assert (by_block >= by_token - 1e-12).all()
    for length in range(1, depth + 1):
        strings, mass, _ = all_chains(q[:length], length)
        target_mass = torch.stack([p[step, strings.tokens[:, step + 1]] for step in range(length)]).prod(0)
        assert by_block[length - 1] <= torch.minimum(mass, target_mass).sum() + 1e-12


@pytest.mark.parametrize("seed", range(10))
def test_block_accepts_the_same_lengths_as_token_for_deterministic_drafts(seed: int) -> None:
    tree, _, row = all_chains(laws(3, seed), 3)
    p = laws(4, seed).repeat(len(row), 1)
    chosen = tree.without_law()
    torch.testing.assert_close(survival(token_law(chosen, p, row)), survival(block_law(chosen, p, row)))


def forest(seed: int, dtype: torch.dtype) -> tuple[DraftTree, Tensor, Tensor]:
    """Four trees: width 3, a chain, a bare root, and one with chosen siblings below drawn ones."""
    parents = torch.tensor([[-1, 0, 0, 0, 1], [-1, 0, 1, 2, -1], [-1, -1, -1, -1, -1], [-1, 0, 0, 1, 1]])
    tokens = torch.tensor([[0, 1, 2, 3, 1], [0, 4, 4, 1, -1], [3, -1, -1, -1, -1], [2, 2, 0, 3, 1]])
    q_row = torch.tensor([[0, 1, -1, -1, -1], [2, 0, 1, -1, -1], [-1] * 5, [2, -1, -1, -1, -1]])
    row = torch.tensor([[0, 1, 2, 3, 4], [5, 6, 7, 8, 0], [9, 0, 0, 0, 0], [10, 11, 12, 13, 14]])
    q = DraftLaw(q_row, laws(3, seed + 50, dtype=dtype))
    return DraftTree(tokens, parents, depth=3, width=3, q=q), laws(15, seed, dtype=dtype), row


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_does_not_depend_on_its_batch_mates(dtype: torch.dtype) -> None:
    tree, p, row = forest(3, dtype)
    together = token_law(tree, p, row)
    for b in range(4):
        assert tree.q is not None
        alone = replace(
            tree,
            tokens=tree.tokens[b : b + 1],
            parents=tree.parents[b : b + 1],
            q=replace(tree.q, row=tree.q.row[b : b + 1]),
        )
        mine = row[b][tree.valid[b]]
        local = torch.where(tree.valid[b], row[b] - row[b, 0], 0)[None]
        law = token_law(alone, p[mine], local)
        assert torch.equal(law.accept[0], together.accept[b])
        assert torch.equal(law.after, together.after[mine])


def test_packed_rows_may_be_in_any_order_and_unused() -> None:
    tree, p, row = forest(4, torch.float64)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:15]
    spread = torch.full((20, VOCAB), 1 / VOCAB, dtype=p.dtype).index_copy(0, order, p)
    packed, scattered = token_law(tree, p, row), token_law(tree, spread, order[row])
    assert torch.equal(packed.accept, scattered.accept)
    assert torch.equal(packed.after, scattered.after[order])


def test_block_refuses_a_tree() -> None:
    tree, p, row = forest(6, torch.float64)
    with pytest.raises(AssertionError, match="judges chains, not a tree of width 3"):
        block_law(tree, p, row)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_follow_and_walk_take_the_path_of_a_plain_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree, p, row = forest(seed, torch.float64)
    drawn = torch.randint(0, VOCAB, tree.tokens.shape, generator=generator)
    uniform = torch.rand(tree.tokens.shape, generator=generator, dtype=torch.float64)
    law = token_law(tree, p, row)
    verdict, walked = follow(tree, drawn), walk(tree, law, uniform)
    children = tree.children().tolist()
    for b in range(4):

        def descend(take, b: int = b) -> list[int]:
            path = [0]
            while (found := [c for c in children[b][path[-1]] if c >= 0 and take(path[-1], c)]) and found:
                path.append(found[0])
            return path

        path = descend(lambda node, child, b=b: tree.tokens[b, child] == drawn[b, node])
        assert verdict.path[b].tolist() == path + [-1] * (4 - len(path))
        assert verdict.length[b] == len(path) - 1
        assert verdict.next_token[b] == drawn[b, path[-1]]
        path = descend(lambda _, child, b=b: uniform[b, child] < law.accept[b, child])
        assert walked.path[b].tolist() == path + [-1] * (4 - len(path))
        assert walked.length[b] == len(path) - 1
        assert walked.node[b] == path[-1]


def test_block_accepts_up_to_the_deepest_success() -> None:
    tree = DraftTree.chains(torch.tensor([0] * 4), torch.tensor([[1, 2, 3]] * 4))
    law = AcceptLaw(torch.full((4, 4), 0.5), torch.ones(16, 1), torch.arange(16).view(4, 4), last_success=True)
    uniform = torch.tensor([[0, 0.9, 0.9, 0.1], [0, 0.1, 0.9, 0.9], [0, 0.9, 0.9, 0.9], [0.0, 0.9, 0.1, 0.9]])
    assert walk(tree, law, uniform).length.tolist() == [3, 1, 0, 2]
    assert walk(tree, replace(law, last_success=False), uniform).length.tolist() == [0, 1, 0, 0]


def test_nothing_reads_a_tensor_on_the_host() -> None:
    """Under FakeTensorMode tensors have no values: .item(), a branch on data or a data-dependent shape would raise."""
    with FakeTensorMode():
        tree = DraftTree(
            torch.zeros(2, 4, dtype=torch.int64),
            torch.zeros(2, 4, dtype=torch.int64),
            depth=2,
            width=2,
            q=DraftLaw(torch.zeros(2, 4, dtype=torch.int64), torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64)),
        )
        p, row = torch.zeros(8, VOCAB), torch.zeros(2, 4, dtype=torch.int64)
        assert follow(tree, row).path.shape == (2, 3)
        assert walk(tree, token_law(tree, p, row), torch.zeros(2, 4)).path.shape == (2, 3)
        chain = replace(tree, width=1)
        assert walk(chain, block_law(chain, p, row), torch.zeros(2, 4)).node.shape == (2,)
