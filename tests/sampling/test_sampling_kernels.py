"""The compiled parts of a round give the bits of the tensor code that defines them, or leave the work to it.

They draw from every law, and leave a draw to torch only rarely.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typing_extensions import override

from forerun.kernels.sampling import UNDECIDED, UNKNOWN, RowLaws, SamplingKernels
from forerun.sampling.draws import Draws, PathState, RowSampling
from forerun.sampling.noise import Purpose, absorb, gumbel
from forerun.sampling.params import SamplingParams
from forerun.sampling.transforms import masks_of
from forerun.tree import DraftTree
from forerun.verify.sanitize import sanitize
from forerun.verify.verify import verify
from kit.compiled import LEVELS, compiled_for
from kit.reading import threads
from kit.rows import FEW, odd, rows_of
from kit.unchecked import unchecked
from sampling.logits import SHAPES, logits_of

NUM_TEXTS = 3


@pytest.fixture(scope="module", params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> SamplingKernels:
    """The library compiled for one of the instruction sets."""
    return SamplingKernels(compiled_for(request.param))


class Unsure(SamplingKernels):
    """Kernels with a large margin, so that torch decides many draws."""

    slack = 2.0**-4


def states(draws: Draws, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> PathState:
    """The nodes after these paths, as torch's code takes them."""
    longest = max(map(len, paths))
    padded = [[*path, *[-1] * (longest - len(path))] for path in paths]
    drawn = torch.tensor(padded, dtype=torch.long).view(len(paths), longest)
    row = torch.tensor(rows)
    return PathState(row, drawn, draws.root_positions[row] + 1 + (drawn >= 0).sum(1))


def row_of(seed: int, temperature: float = 1.0) -> list[RowSampling]:
    """One row with a temperature and no other parameter."""
    return [RowSampling(0, SamplingParams(temperature=temperature), seed, 0, [0, 1, 2], 1)]


def drafted(draws: Draws, logits: Tensor, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> list[int]:
    """The token that a drafter of chains gets at each of these nodes."""
    return [token for (token,) in draws.offer(logits, rows, paths, 1, survival=False).tokens]


def laws_of(draws: Draws) -> RowLaws:
    assert draws.row_laws is not None
    return draws.row_laws


ORDINARY: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 50, "repetition_penalty": 1.1},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.1},
)


@dataclass(frozen=True)
class Limit:
    depth: int
    width: int
    nodes: int


@st.composite
def trees(draw: st.DrawFn, *, wild: bool = False) -> DraftTree:
    """Trees with padding anywhere; `wild` ones may break any of the rules, seldom enough to be valid sometimes."""
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


@pytest.mark.short("native-True")
@pytest.mark.parametrize("sure", [True, False])
@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SHAPES), st.sampled_from([1, 16, 17, 50, 1024, 4096, 17_001]), st.integers(0, 2**40))
def test_draws_are_those_of_torch(kernels: SamplingKernels, sure: bool, shape: str, vocab: int, seed: int) -> None:
    """One and several children, for random rows after random paths, and logits of every kind."""
    rng, used = random.Random(seed), kernels if sure else Unsure(kernels.lib)
    rows, num_ids = rows_of(rng, vocab, NUM_TEXTS, processors=True), max(1, vocab - rng.randrange(3))
    compiled, other = (Draws(rows, vocab, num_ids=num_ids, kernels=k) for k in (used, None))
    at = [rng.randrange(NUM_TEXTS) for _ in range(6)]
    paths = [[rng.randrange(min(vocab, FEW)) for _ in range(rng.randrange(4))] for _ in at]
    logits, nodes = logits_of(shape, 6, vocab, seed % 1000), states(other, at, paths)
    expected = other.children(logits, nodes, 1, survival=False).tokens[:, 0].tolist()
    assert compiled.row_laws is not None
    masks = masks_of(rows, list(zip(at, paths, strict=True)), vocab) if compiled.row_laws.constrained else None
    found = used.choose(logits, at, paths, compiled.row_laws, masks)
    assert all(token in (-1, drawn) for token, drawn in zip(found, expected, strict=True))
    assert drafted(compiled, logits, at, paths) == expected
    drawn = other.draw(logits, nodes).tolist()
    assert all(token in (-1, drawn) for token, drawn in zip(found, drawn, strict=True))
    width = rng.randint(1, 5)
    children, offered = other.children(logits, nodes, width), compiled.offer(logits, at, paths, width)
    assert [list(tokens) for tokens in offered.tokens] == children.tokens.tolist()
    assert children.survival is not None
    rejecting, plain = (Draws(rows, vocab, num_ids=num_ids, kernels=k, rejection=True) for k in (used, None))
    alone, drawn_from = plain.children(logits, nodes, width), rejecting.offer(logits, at, paths, width)
    assert [list(tokens) for tokens in drawn_from.tokens] == alone.tokens.tolist()
    assert drawn_from.law is not None
    assert torch.equal(drawn_from.law.nan_to_num(), alone.law.nan_to_num())
    # Tokens that may be outside of a nucleus count as inside, which are many with a large margin.
    torch.testing.assert_close(
        torch.tensor(offered.survival), children.survival, rtol=2e-2 if sure else 1.0, atol=1e-2 if sure else 1.0
    )


@pytest.mark.short("*-False")
@pytest.mark.parametrize("sure", [True, False])
@settings(max_examples=200, deadline=None)
@given(trees(), st.integers(0, 2**40))
def test_verdicts_are_those_of_torch(kernels: SamplingKernels, sure: bool, tree: DraftTree, seed: int) -> None:
    """For random trees over so few ids that draft tokens are often accepted, with the counts of each node's path.

    Also in a round inside another one of a rejection mode, which has noise of its own.
    """
    rng, used = random.Random(seed), kernels if sure else Unsure(kernels.lib)
    rows = rows_of(rng, 6, len(tree.tokens), processors=True)
    logits = 3 * torch.randn(int(tree.valid.sum()), 6, generator=torch.Generator().manual_seed(seed % 1000))
    for inside in (False, True):
        outer = [Draws(rows, 6, rejection=inside, kernels=k) for k in (used, None)]
        draws = [each.within(range(len(rows)), [[1]] * len(rows)) if inside else each for each in outer]
        found = [verify(tree, logits, each, "block" if inside else "coupled").packed for each in draws]
        assert torch.equal(*found)


@pytest.mark.short("*-False-6", "*-True-17000")
@pytest.mark.parametrize("vocab", [6, 40, 17_000])
@pytest.mark.parametrize("quantised", [False, True])
def test_at_the_edge_of_a_nucleus_decisions_are_those_of_torch(
    kernels: SamplingKernels, vocab: int, quantised: bool
) -> None:
    """With `top_p` at or next to torch's cumulated sums, the kernels' decisions are right, and they decide most draws.

    Kernels without a margin decide some of them wrongly.
    """

    class Rash(SamplingKernels):
        slack = 0.0

    wrong = decided = 0
    num_seeds = 60 if vocab < 1000 else 15
    for seed in range(num_seeds):
        rng = random.Random(seed)
        logits = logits_of("flat", 1, vocab, seed) * (2.0 if vocab < 1000 else 4.0)
        logits = (logits * 4).round() / 4 if quantised else logits
        mass = logits.softmax(1).sort(descending=True).values.cumsum(1)[0]
        edge = mass[rng.randrange(min(vocab - 1, 2000))]
        top_p = min(float(torch.nextafter(edge, torch.tensor(rng.choice([0.0, edge.item(), 2.0])))), 1 - 2.0**-24)
        rows = [RowSampling(0, SamplingParams(top_p=top_p), seed, 0, [1], 1)]
        paths = [[0] * i for i in range(40)]
        expected = Draws(rows, vocab).children(
            logits.expand(40, -1), states(Draws(rows, vocab), [0] * 40, paths), 1, survival=False
        )
        for used in (kernels, Rash(kernels.lib)):
            laws = Draws(rows, vocab, kernels=used).row_laws
            assert laws is not None
            found = used.choose(logits.expand(40, -1).contiguous(), [0] * 40, paths, laws)
            differ = sum(a not in (-1, b) for a, b in zip(found, expected.tokens[:, 0].tolist(), strict=True))
            if used is kernels:
                assert differ == 0
                decided += 40 - list(found).count(-1)
            wrong += differ
    assert decided > num_seeds * 40 // 2
    assert wrong > 0 or vocab > 6  # sums of many terms have a margin besides the slack


@pytest.mark.short("*-steep-3", "*-tied-3", "*-NaN-64", "*-nothing-1")
@pytest.mark.parametrize("num_threads", [1, 3, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_draws_of_a_large_vocabulary_split_over_threads_are_those_of_torch(
    kernels: SamplingKernels, shape: str, num_threads: int
) -> None:
    """Rows in a batch and alone, and verdicts with an accepted token, equal torch's for any number of threads."""
    vocab, every = 2**17 + 37, (*ORDINARY[:4], ORDINARY[-1] | {"logit_bias": {2**17: 1.0}})
    texts = [list(range(i, 3000 + i, 7)) for i in range(len(every))]
    rows = [RowSampling(i, SamplingParams(**p), 7, 0, texts[i], 9, (2,)) for i, p in enumerate(every)]
    logits = logits_of(shape, len(rows), vocab, 5)
    with threads(num_threads):
        compiled, other = (Draws(rows, vocab, kernels=k) for k in (kernels, None))
        expected = other.children(logits, other.roots(), 1, survival=False).tokens[:, 0].tolist()
        assert drafted(compiled, logits, range(len(rows)), [[]] * len(rows)) == expected
        for i, row in enumerate(rows):
            one, other = (Draws([row], vocab, kernels=k) for k in (kernels, None))
            assert drafted(one, logits[i : i + 1], [0], [[]]) == expected[i : i + 1]
            tree = DraftTree.of_texts([[row.tokens[-1], max(expected[i], 0), 7, 8]])
            found, right = (verify(tree, logits[:4], draws, "coupled").packed for draws in (one, other))
            assert torch.equal(found, right)


@pytest.mark.short("*-params0-4099", "*-params3-4099", "*-params5-4099")
@pytest.mark.parametrize("vocab", [4099, pytest.param(151_936, marks=pytest.mark.full)])
@pytest.mark.parametrize("params", ORDINARY)
def test_kernels_decide_nearly_all_draws(kernels: SamplingKernels, params: dict[str, Any], vocab: int) -> None:
    """Otherwise they would save no time: for laws like a language model's they decide nearly all draws, and rightly."""
    undecided, left, num_blocks = 0, 0, 20 if vocab < 10_000 else 4
    for block in range(num_blocks):
        rows = [RowSampling(0, SamplingParams(**params), block, 0, list(range(300)), 9)]
        compiled, other = (Draws(rows, vocab, kernels=k) for k in (kernels, None))
        logits, paths = logits_of("steep", 50, vocab, block), [[i] * (i % 4) for i in range(50)]
        with unchecked():
            expected = other.children(logits, states(other, [0] * 50, paths), 1, survival=False).tokens[:, 0].tolist()
        assert compiled.row_laws is not None
        found = list(kernels.choose(logits, [0] * 50, paths, compiled.row_laws))
        assert all(token in (-1, drawn) for token, drawn in zip(found, expected, strict=True))
        undecided += found.count(-1)
        left += len(kernels.offer(logits, [0] * 50, paths, compiled.row_laws, 4).undecided)
    assert max(undecided, left) <= num_blocks * 50 // 100


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 40), st.integers(0, 3), st.sampled_from([16, 100, 1024]))
def test_scores_too_close_to_call_are_left_to_torch(
    kernels: SamplingKernels, seed: int, steps: int, rank: int, vocab: int
) -> None:
    """Two scores a few units in the last place apart: the best two, a child and the next, or two others."""
    draws, width, paths = Draws(row_of(seed), vocab, kernels=kernels), 4, [[0] * 6]
    noise = gumbel(absorb(draws.row_keys(Purpose.COUPLED), torch.tensor([9])), vocab)
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed % 1000))
    logits = -noise - 5.0
    for i, token in enumerate(order[: width + 2].tolist()):
        logits[0, token] = 5.0 - i - noise[0, token]
    first, second = order[rank], order[rank + 1]
    logits[0, second] = logits[0, first] + noise[0, first] - noise[0, second]
    for _ in range(steps):
        logits[0, second] = torch.nextafter(logits[0, second], torch.tensor(math.inf))
    assert list(kernels.choose(logits, [0], paths, laws_of(draws))) == [-1] or rank > 0
    assert drafted(draws, logits, [0], paths) == (logits + noise).argmax(1).tolist()
    assert kernels.offer(logits, [0], paths, laws_of(draws), width).undecided == [0]
    both, plain = torch.cat([logits, logits.roll(1, 1)]), Draws(draws.rows, vocab)
    found = draws.offer(both, [0, 0], paths * 2, width)
    expected = plain.children(both, states(plain, [0, 0], paths * 2), width)
    assert [list(tokens) for tokens in found.tokens] == expected.tokens.tolist()


def test_no_draw_is_made_after_a_rejection(kernels: SamplingKernels) -> None:
    """If only torch could draw at a node, it is not called unless the draft token is accepted."""
    draws = Draws(row_of(0, 0.0), 16, kernels=kernels)
    laws, logits = laws_of(draws), torch.full((3, 16), math.nan)
    logits[0] = torch.arange(16) == 3
    right, wrong = (DraftTree.of_texts([[2, token, 5]]) for token in (3, 4))
    drawn = array("q", [UNKNOWN] * 3)
    verdict = kernels.judge(wrong.tokens, wrong.parents, logits, laws, 2, drawn)
    assert verdict is not None
    assert verdict.tolist() == [[0, 3, 0, -1, -1]]
    assert list(drawn) == [3, UNKNOWN, UNKNOWN]
    assert kernels.judge(right.tokens, right.parents, logits, laws, 2, drawn) is None
    assert list(drawn) == [3, UNDECIDED, UNKNOWN]
    drawn[1] = 7  # drawn elsewhere
    verdict = kernels.judge(right.tokens, right.parents, logits, laws, 2, drawn)
    assert verdict is not None
    assert verdict.tolist() == [[1, 7, 0, 1, -1]]


def test_float64_and_draft_noise_are_left_to_torch(kernels: SamplingKernels) -> None:
    """Torch draws in float64 and with a drafter's noise; for half-precision logits the kernels draw in float32."""
    logits, asked = torch.randn(1, 50), []

    class Asked(SamplingKernels):
        @override
        def choose(self, *arguments: Any) -> array[int]:
            asked.append(arguments)
            return super().choose(*arguments)

    spy = Asked(kernels.lib)
    drafted(Draws(row_of(0), 50, kernels=spy), logits.double(), [0], [[1]])
    drafted(Draws(row_of(0), 50, kernels=spy, rejection=True), logits, [0], [[1]])
    assert not asked
    found = drafted(Draws(row_of(0), 50, kernels=spy), logits.bfloat16(), [0], [[1]])
    assert len(asked) == 1
    assert found == drafted(Draws(row_of(0), 50), logits.bfloat16(), [0], [[1]])


def test_torch_draws_only_for_requests_with_logits_processors(
    kernels: SamplingKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch computes the nodes of the request with a processor only, and in a verdict those of its accepted path."""
    seen: list[int] = []
    edit = "forerun.sampling.transforms.Transforms.edit"
    real = Draws(rows_of(random.Random(0), 50, 1), 50).transforms.__class__.edit

    def watched(self: Any, logits: Tensor, at: PathState, **options: bool) -> Tensor:
        seen.extend(self.rows[i].seq_id for i in at.row.tolist())
        return real(self, logits, at, **options)

    monkeypatch.setattr(edit, watched)
    mates: list[dict[str, Any]] = [{"top_k": 5}, {"logits_processors": [odd]}, {"repetition_penalty": 1.3}]
    rows = [RowSampling(i, SamplingParams(**p), 3, 0, [1, 4, 6], 1) for i, p in enumerate(mates)]
    logits = 3 * torch.randn(12, 50, generator=torch.Generator().manual_seed(0))
    draws = Draws(rows, 50, kernels=kernels)
    drafted(draws, logits[:4], [0, 1, 2, 1], [[], [], [3], [5]])
    assert seen == [1, 1]
    seen.clear()
    draws.offer(logits[:4], [0, 1, 2, 1], [[], [], [3], [5]], 3)
    assert seen == [1, 1]
    seen.clear()
    tree = DraftTree.of_texts([[6, 1, 2, 3]] * 3)
    verdict = verify(tree, logits, draws, "coupled").packed
    assert seen == [1] * (1 + int(verdict[1, 0]))
    assert torch.equal(verdict, verify(tree, logits, Draws(rows, 50), "coupled").packed)


@pytest.mark.short("native")
@settings(max_examples=400, deadline=None)
@given(
    trees(wild=True),
    st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=3, max_size=3),
    st.booleans(),
    st.sampled_from([0, 0, 0, 1]),
)
def test_kernels_sanitize_as_torch_does_and_recognise_clean_drafts(
    kernels: SamplingKernels, tree: DraftTree, bounds: list[tuple[int, int, int]], loose: bool, wrong: int
) -> None:
    """The result is the same with kernels and without, and clean trees are recognised."""
    limits = [Limit(9, 9, 9) if loose else Limit(*bound) for bound in bounds][: len(tree.tokens)]
    roots = tree.tokens[:, 0] + wrong
    with_kernels, without = (sanitize(tree, roots, limits, 6, k) for k in (kernels, None))
    assert torch.equal(with_kernels.tokens, without.tokens)
    assert torch.equal(with_kernels.parents, without.parents)
    assert (with_kernels.depth, with_kernels.width) == (without.depth, without.width)
    same = without.depth > 0 and torch.equal(without.tokens, tree.tokens) and torch.equal(without.parents, tree.parents)
    assert (with_kernels.tokens is tree.tokens) == same
    assert with_kernels.host() == replace(with_kernels, known=None).host()
