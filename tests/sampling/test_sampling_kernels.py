"""The compiled parts of a round give what the tensor code gives that defines them, to the bit, or say they cannot."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from logits import SHAPES, logits_of
from torch import Tensor

from forerun.kernels.sampling import UNDECIDED, UNKNOWN, RowLaws, SamplingKernels
from forerun.sampling.draws import Draws, PathState, RowSampling
from forerun.sampling.noise import Purpose, absorb, gumbel
from forerun.sampling.params import GREEDY_BELOW, SamplingParams
from forerun.tree import DraftTree
from forerun.verify.rules import follow
from forerun.verify.sanitize import sanitize
from forerun.verify.verify import verify
from kit.compiled import LEVELS, compiled_for

TEMPERATURES = [0.0, GREEDY_BELOW / 2, 1.0, 0.7, 1e-3, 50.0]


@pytest.fixture(scope="module", params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> SamplingKernels:
    """The library as compiled for a processor that can do less than this one, perhaps."""
    return SamplingKernels(compiled_for(request.param))


def rows_of(temperatures: list[float], seed: int, length: int = 3) -> list[RowSampling]:
    return [
        RowSampling(i, SamplingParams(temperature=t), seed + i, 0, [*range(length + i)], 1)
        for i, t in enumerate(temperatures)
    ]


def places(draws: Draws, rows: list[int], positions: list[int]) -> PathState:
    row = torch.tensor(rows)
    return PathState(row, row.new_empty(len(rows), 0), torch.tensor(positions))


def paths_to(draws: Draws, rows: list[int], positions: list[int]) -> list[list[int]]:
    """Guesses, any, that lead to these positions: where temperature is all there is, they do not count."""
    return [[0] * (at - draws.root_places[row] - 1) for row, at in zip(rows, positions, strict=True)]


def laws_of(draws: Draws) -> RowLaws:
    assert draws.row_laws is not None
    return draws.row_laws


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 40), st.integers(1, 4))
def test_children_too_close_to_call_are_left_to_torch(
    kernels: SamplingKernels, seed: int, steps: int, rank: int
) -> None:
    """Whichever neighbours are some units in the last place apart, the last child and the first that is none too."""
    vocab, width, draws = 100, 4, Draws(rows_of([1.0], seed), 100, kernels=kernels)
    noise = gumbel(absorb(draws.row_keys(Purpose.COUPLED), torch.tensor([9])), vocab)
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed % 1000))
    logits = -noise - 5.0
    for i, token in enumerate(order[: width + 2].tolist()):
        logits[0, token] = 5.0 - i - noise[0, token]
    first, second = order[rank - 1], order[rank]
    logits[0, second] = logits[0, first] + noise[0, first] - noise[0, second]
    for _ in range(steps):
        logits[0, second] = torch.nextafter(logits[0, second], torch.tensor(math.inf))
    assert kernels.offer(logits, [0], [[0] * 6], laws_of(draws), width).undecided == [0]
    both = torch.cat([logits, logits.roll(1, 1)])
    found = draws.offer(both, [0, 0], [[1] * 6] * 2, width)
    expected = Draws(draws.rows, vocab).children(both, places(draws, [0, 0], [9, 9]), width)
    assert [list(tokens) for tokens in found.tokens] == expected.tokens.tolist()


@pytest.mark.short("*-0.7", "*-0.0")
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_offers_are_nearly_always_certain(kernels: SamplingKernels, temperature: float) -> None:
    draws, undecided = Draws(rows_of([temperature], 11), 4099, kernels=kernels), 0
    for block in range(10):
        logits, paths = logits_of("steep", 100, 4099, block), [[0] * (100 * block + i) for i in range(100)]
        undecided += len(kernels.offer(logits, [0] * 100, paths, laws_of(draws), 4).undecided)
    assert undecided <= (0 if temperature < 1e-2 else 10)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 40), st.sampled_from([16, 100, 1024]))
def test_scores_too_close_to_call_are_left_to_torch(
    kernels: SamplingKernels, seed: int, steps: int, vocab: int
) -> None:
    """Two scores apart by some units in the last place: what is not certain is said not to be, and then is torch's."""
    draws = Draws(rows_of([1.0], seed), vocab, kernels=kernels)
    noise = gumbel(absorb(draws.row_keys(Purpose.COUPLED), torch.tensor([9])), vocab)
    logits = -noise - 5.0
    first, second = seed % vocab, (seed // vocab + 1 + seed % vocab) % vocab
    logits[0, first] += 5.0
    logits[0, second] = logits[0, first] + noise[0, first] - noise[0, second]
    for _ in range(steps):
        logits[0, second] = torch.nextafter(logits[0, second], torch.tensor(math.inf))
    paths = paths_to(draws, [0], [9])
    found = kernels.choose(logits, [0], paths, laws_of(draws))
    assert list(found) == [-1] or first == second
    expected = (logits + noise).argmax(1).tolist()
    assert list(draws.guess(logits, [0], paths)) == expected == draws.draw(logits, places(draws, [0], [9])).tolist()


@pytest.mark.short("*-steep-3", "*-tied-3", "*-NaN-64", "*-nothing-1")
@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_threads_share_the_ids_of_a_large_vocabulary(kernels: SamplingKernels, shape: str, threads: int) -> None:
    """One node, some nodes, and a verdict whose first guess is right: as torch draws, whoever looked at which ids."""
    vocab, rows = 2**17 + 37, rows_of([1.0, 0.0], 3)
    own, other = (Draws(rows, vocab, kernels=k) for k in (kernels, None))
    logits, before = logits_of(shape, 4, vocab, 5), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for at in ([0], [1], [0, 0, 1, 1]):
            expected = other.draw(logits[: len(at)], places(other, at, [9] * len(at))).tolist()
            found = own.guess(logits[: len(at)], at, paths_to(own, at, [9] * len(at)))
            assert all(a == b for a, b in zip(found, expected, strict=True) if b >= 0)
        for row in rows:
            own, other = (Draws([row], vocab, kernels=k) for k in (kernels, None))
            (first,) = other.draw(logits[:1], other.roots()).tolist()
            tree = DraftTree.of_texts([[row.tokens[-1], first, 7, 8]])
            assert torch.equal(
                verify(tree, logits, own, "coupled").packed, verify(tree, logits, other, "coupled").packed
            )
    finally:
        torch.set_num_threads(before)


def test_draws_behind_a_rejection_are_not_made(kernels: SamplingKernels) -> None:
    """Where only torch could say what follows a guess, nobody asks unless the guess is right."""
    draws = Draws(rows_of([0.0], 0), 16, kernels=kernels)
    laws, logits = laws_of(draws), torch.full((3, 16), math.nan)
    logits[0] = torch.arange(16) == 3
    right, wrong = (DraftTree.of_texts([[2, guess, 5]]) for guess in (3, 4))
    drawn = array("q", [UNKNOWN] * 3)
    verdict = kernels.judge(wrong.tokens, wrong.parents, logits, laws, 2, drawn)
    assert verdict is not None
    assert verdict.tolist() == [[0, 3, 0, -1, -1]]
    assert list(drawn) == [3, UNKNOWN, UNKNOWN]
    assert kernels.judge(right.tokens, right.parents, logits, laws, 2, drawn) is None
    assert list(drawn) == [3, UNDECIDED, UNKNOWN]
    drawn[1] = 7  # which somebody else has drawn
    verdict = kernels.judge(right.tokens, right.parents, logits, laws, 2, drawn)
    assert verdict is not None
    assert verdict.tolist() == [[1, 7, 0, 1, -1]]


def test_equal_logits_go_to_the_lowest_id_of_a_greedy_row(kernels: SamplingKernels) -> None:
    draws = Draws(rows_of([0.0], 0), 100, kernels=kernels)
    for ids in ([3, 40], [40, 41], [99, 15], [16, 0, 32]):
        logits = torch.zeros(1, 100)
        logits[0, ids] = 1.0
        assert list(kernels.choose(logits, [0], [[1, 2]], laws_of(draws))) == [min(ids)]


def test_other_number_formats_and_noise_are_torchs(kernels: SamplingKernels) -> None:
    """What is drawn in float64, and a drafter's own noise; logits in half precision are drawn from as float32."""
    logits, asked = torch.randn(1, 50), []

    class Asked(SamplingKernels):
        def choose(self, *arguments: Any) -> array[int]:
            asked.append(arguments)
            return super().choose(*arguments)

    spy = Asked(kernels.lib)
    Draws(rows_of([1.0], 0), 50, kernels=spy).guess(logits.double(), [0], [[1]])
    Draws(rows_of([1.0], 0), 50, kernels=spy, rejection=True).guess(logits, [0], [[1]])
    assert not asked
    found = Draws(rows_of([1.0], 0), 50, kernels=spy).guess(logits.bfloat16(), [0], [[1]])
    assert len(asked) == 1
    assert list(found) == list(Draws(rows_of([1.0], 0), 50).guess(logits.bfloat16(), [0], [[1]]))


@dataclass(frozen=True)
class Limit:
    depth: int
    width: int
    nodes: int


@st.composite
def trees(draw: st.DrawFn, *, wild: bool = False) -> DraftTree:
    """Trees with padding anywhere; wild ones break any of the rules, tamely enough to be right now and then."""
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    tokens, parents, depths = [], [], []
    for _ in range(batch):
        row, above, depth = [draw(st.integers(0, 4))], [-1], [0]
        for i in range(1, nodes):
            candidates = [j for j in range(i) if row[j] >= 0]
            parent = draw(st.sampled_from([*candidates, -1]))
            taken = {row[j] for j in range(i) if above[j] == parent}
            token = draw(st.integers(0, 5))
            if wild and draw(st.integers(0, 5)) == 0:
                parent, token = draw(st.integers(-2, nodes)), draw(st.integers(-2, 7))
            elif parent < 0 or token in taken:
                parent, token = -1, -1
            row.append(token)
            above.append(parent)
            depth.append(depth[parent] + 1 if 0 <= parent < i else 0)
        tokens.append(row)
        parents.append(above)
        depths.append(max(depth))
    return DraftTree(torch.tensor(tokens), torch.tensor(parents), max(depths), nodes)


@settings(max_examples=200, deadline=None)
@given(trees(), st.integers(0, 2**30))
def test_verdicts_are_those_of_follow(kernels: SamplingKernels, tree: DraftTree, seed: int) -> None:
    """Whatever the nodes drew; nothing is drawn where that is known."""
    drawn = torch.randint(0, 6, tree.tokens.shape, generator=torch.Generator().manual_seed(seed))
    logits = torch.full((int(tree.valid.sum()), 6), math.nan)
    laws = laws_of(Draws(rows_of([1.0] * len(tree.tokens), seed), 6, kernels=kernels))
    verdict = kernels.judge(tree.tokens, tree.parents, logits, laws, tree.depth, array("q", drawn.flatten().tolist()))
    assert verdict is not None
    assert torch.equal(verdict, follow(tree, torch.where(tree.valid, drawn, -1)).packed)


@settings(max_examples=400, deadline=None)
@given(trees(wild=True), st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=3, max_size=3), st.booleans())
def test_a_draft_is_clean_where_nothing_would_be_done(
    kernels: SamplingKernels, tree: DraftTree, bounds: list[tuple[int, int, int]], loose: bool
) -> None:
    """With kernels and without the same tree comes out, and clean ones are recognised."""
    limits = [Limit(9, 9, 9) if loose else Limit(*bound) for bound in bounds][: len(tree.tokens)]
    roots = tree.tokens[:, 0].contiguous()
    with_kernels, without = (sanitize(tree, roots, limits, 6, k) for k in (kernels, None))
    assert torch.equal(with_kernels.tokens, without.tokens)
    assert torch.equal(with_kernels.parents, without.parents)
    assert (with_kernels.depth, with_kernels.width) == (without.depth, without.width)
    same = without.depth > 0 and torch.equal(without.tokens, tree.tokens) and torch.equal(without.parents, tree.parents)
    assert (with_kernels.tokens is tree.tokens) == same
    assert with_kernels.host() == replace(with_kernels, known=None).host()


def test_a_draft_with_wrong_roots_or_a_law_is_not_passed_unseen(kernels: SamplingKernels) -> None:
    tree = DraftTree.chains(torch.tensor([3]), torch.tensor([[1, 2]]))
    assert sanitize(tree, torch.tensor([3]), [Limit(9, 9, 9)], 6, kernels).tokens is tree.tokens
    changed = sanitize(tree, torch.tensor([4]), [Limit(9, 9, 9)], 6, kernels)
    assert changed.tokens.tolist() == [[4, 1, 2]]


def test_noise_is_computed_closely(kernels: SamplingKernels) -> None:
    """Of two tokens whose true scores are further apart than the slack, the better is found without torch."""
    draws = Draws(rows_of([1.0], 5), 16, kernels=kernels)
    for position in range(3, 400):
        noise = gumbel(absorb(draws.row_keys(Purpose.COUPLED), torch.tensor([position])), 16)
        logits: Tensor = -noise
        best = position % 16
        logits[0, best] += 2e-4
        assert list(kernels.choose(logits, [0], paths_to(draws, [0], [position]), laws_of(draws))) == [best]
