"""Merged trees compared with a search through all trees, and a law of merging.

The law: if survival estimates are right, a merged tree of n nodes has at least as many accepted tokens as the n best
nodes of any member. It is shown exactly for made-up laws, and counted on the bundled models.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from draft.rounds import Row, committed
from forerun.draft.base import Budget
from forerun.draft.many.mix import add_node, judged_run, merge, mixed_root
from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.kernels.sampling import find_sampling_kernels
from forerun.llm import LLM
from forerun.models.bundled import BUNDLED
from forerun.models.loading import Blueprint
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.params import SamplingParams
from forerun.tree import HostTree
from kit.unchecked import unchecked
from law.exact import Family, Model, families

Path = tuple[int, ...]
FREE = 99  # children of a node: more than there are tokens
EXACT = 1e-12


def random_tree(rng: random.Random, num: int, vocab: int, member: int, chance: Callable[[Path], float]) -> HostTree:
    """A tree of up to `num` nodes below root 0, each with the survival that `chance` gives its path."""
    tree, paths = mixed_root(0, member), [Path()]
    for _ in range(num):
        parent = rng.randrange(len(paths))
        path = (*paths[parent], rng.randrange(vocab))
        if path not in paths:
            add_node(tree, path[-1], parent, chance(path), member)
            paths.append(path)
    return tree


def at_random(rng: random.Random) -> Callable[[Path], float]:
    return lambda _: rng.choice([0.0, 0.1, 0.25, 0.25, 0.5, 0.9, 1.5, math.nan])


def known(trees: Sequence[HostTree]) -> dict[Path, float]:
    """The largest survival of each path in any tree."""
    best: dict[Path, float] = {}
    for tree in trees:
        for path, survival in zip(tree.paths(), tree.survival, strict=True):
            best[path] = max(best.get(path, 0.0), survival)
    return best


def subtrees(paths: set[Path], num: int) -> Iterator[frozenset[Path]]:
    """All sets of at most `num` paths that contain the parent of each of their paths."""
    for size in range(num + 1):
        for chosen in itertools.combinations(sorted(paths), size):
            if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
                yield frozenset(chosen)


@pytest.mark.parametrize("seed", range(60))
def test_a_merged_tree_has_the_largest_survival_of_all_trees_of_its_paths(seed: int) -> None:
    """Of all trees within the budget that consist of the members' paths, it has the largest sum of survival."""
    rng = random.Random(seed)
    trees = [random_tree(rng, rng.randint(0, 5), 3, member, at_random(rng)) for member in range(rng.randint(1, 3))]
    budget, survives = Budget(rng.randint(1, 4), FREE, rng.randint(1, 6)), known(trees)
    merged = merge(trees, budget)
    paths = merged.paths()
    assert len(set(paths)) == len(paths) <= 1 + budget.nodes
    assert merged.survival == pytest.approx([survives[path] for path in paths], abs=0)
    possible = {path for path in survives if 0 < len(path) <= budget.depth}
    assert set(paths[1:]) <= possible
    most = max(math.fsum(survives[path] for path in chosen) for chosen in subtrees(possible, budget.nodes))
    assert math.fsum(merged.survival[1:]) == pytest.approx(most, abs=1e-9)
    for path, member in zip(paths[1:], merged.drafters[1:], strict=True):
        assert member == next(i for i, tree in enumerate(trees) if path in tree.paths())


@pytest.mark.parametrize("seed", range(40))
def test_budgets_are_kept_and_survival_never_grows(seed: int) -> None:
    rng = random.Random(f"limits {seed}")
    trees = [random_tree(rng, 12, 4, member, at_random(rng)) for member in range(3)]
    budget = Budget(rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 12), min_survival=rng.choice([0.0, 0.2]))
    merged = merge(trees, budget)
    assert len(merged.tokens) <= 1 + budget.nodes
    assert max(len(path) for path in merged.paths()) <= budget.depth
    for node, parent in enumerate(merged.parents[1:], start=1):
        assert parent < node
        assert budget.min_survival <= merged.survival[node] <= merged.survival[parent] <= 1
        assert merged.parents.count(parent) <= budget.width
    assert merged.survival == sorted(merged.survival, reverse=True)


def chance_of(law: Model, root: int) -> Callable[[Path], float]:
    """The probability that the target emits a path after the root."""
    return lambda path: math.prod(float(law((root, *path[:i]))[token]) for i, token in enumerate(path))


def expected_accepted(tree: HostTree, law: Model, root: int, vocab: int, depth: int) -> float:
    """The expected number of accepted tokens, over every string that the target may emit."""
    chance, total = chance_of(law, root), 0.0
    for text in itertools.product(range(vocab), repeat=depth):
        total += chance(text) * judged_run(tree, text)[1]
    return total


def cut_short(trees: Sequence[HostTree], budget: Budget) -> HostTree:
    """The mutant: all of the first member's tree before anything of the second's."""
    merged, paths = mixed_root(0, -1), [Path()]
    for tree in trees:
        for path in tree.paths()[1:]:
            if path not in paths and len(merged.tokens) <= budget.nodes:
                add_node(merged, path[-1], paths.index(path[:-1]), 1.0, 0)
                paths.append(path)
    return merged


def shortfall(family: Family, how: Callable[[Sequence[HostTree], Budget], HostTree], seed: int) -> float:
    """The most by which a member's own n nodes beat the merged n nodes, over all roots and n."""
    rng, worst = random.Random(f"{family.seed} {seed}"), -math.inf
    for root in range(family.vocab):
        trees = [random_tree(rng, 5, family.vocab, member, chance_of(family.p, root)) for member in range(3)]
        for num in (1, 3, 5):
            budget = Budget(3, FREE, num)
            merged = expected_accepted(how(trees, budget), family.p, root, family.vocab, 3)
            for tree in trees:
                alone = expected_accepted(merge([tree], budget), family.p, root, family.vocab, 3)
                worst = max(worst, alone - merged)
    return worst


def test_a_merged_tree_accepts_no_less_than_any_member_alone() -> None:
    """Exactly, if members know the survival of their nodes; another way of merging fails."""
    few = families(6)
    assert max(shortfall(family, merge, 0) for family in few) <= EXACT
    assert max(shortfall(family, cut_short, 0) for family in few) > 0.1


SPEC = "mix[ngram,suffix,model:stdlib-draft]"
CODE = (
    "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\ndef write(path, text):\n    with",
    "class Node:\n    def __init__(self, value, left=None, right=None):\n        self.value = value\n        self.left",
    "import os\nimport sys\nimport unittest\n\n\nclass TestNames(unittest.TestCase):\n    def test_",
)


@pytest.mark.short("0.8")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_on_real_text_a_merged_tree_accepts_no_less_than_any_member_alone(temperature: float) -> None:
    """From the same roots, all along the target's texts; accepted tokens are counted as a verdict would."""
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=60, ignore_eos=True) for i in range(3)]
    answers = LLM("stdlib", dtype="float32").generate(list(CODE), params)
    texts = [[*a.prompt_token_ids, *a.outputs[0].token_ids] for a in answers]
    target = Blueprint.of(str(BUNDLED["stdlib"]), dtype="float32")
    plan = plan_drafter(SPEC, DraftContext(target, target.tokenizer()))
    mix = plan.build(dict.fromkeys(plan.models, 1 << 13), None, target.load(64))
    assert mix is not None
    num, rows, ahead = 4, [], []
    for answer, sampling, text in zip(answers, params, texts, strict=True):
        first = len(answer.prompt_token_ids)
        for end in range(first, len(text) - num, 2):
            rows.append(RowSampling(len(rows), sampling, sampling.seed or 0, 0, text[:end], first))
            ahead.append(text[end : end + num])
    mix.observe(committed([Row(row.seq_id, row.tokens) for row in rows]))
    accepted = []
    for member in range(len(mix.names)):
        width = 2 * len(mix.names[:-1]) if member == len(mix.names) - 1 else 2
        budget = Budget(num, width, num, member)
        with unchecked():
            draws = Draws(rows, target.config.vocab_size, kernels=find_sampling_kernels())
            tree = mix.propose(draws, [budget] * len(rows)).tree
        grown = tree.host()
        assert max(len(host.tokens) for host in grown) <= 1 + num
        accepted.append(sum(judged_run(host, following)[1] for host, following in zip(grown, ahead, strict=True)))
    *alone, merged = accepted
    assert merged >= max(alone) > len(rows) / 4, accepted
