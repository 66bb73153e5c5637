"""Static trees: what a shape is, how it is read from a file, the messages about invalid ones, and who accepts it."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.config import AUTO_DEPTH, Speculation
from forerun.draft.base import NO_DRAFT, Budget
from forerun.errors import ForerunError, InvalidRequest, InvalidTree
from forerun.llm import LLM
from forerun.sampling.params import SamplingParams
from forerun.shape import MOST_RANK, RankPath, StaticTree
from kit.checkpoints import DATA, TARGET
from kit.command import command, refusal
from kit.unchecked import unchecked

SMALL = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]


@st.composite
def path_lists(draw: st.DrawFn) -> list[RankPath]:
    """The paths of any tree, each after its parent."""
    paths: list[RankPath] = []
    for _ in range(draw(st.integers(1, 14))):
        path = (*draw(st.sampled_from([(), *paths])), draw(st.integers(0, 3)))
        if path not in paths:
            paths.append(path)
    return paths


@given(path_lists(), st.randoms(use_true_random=False), st.integers(0, 6))
def test_a_shape_is_the_set_of_its_paths(paths: list[RankPath], rng: random.Random, depth: int) -> None:
    tree, mixed = StaticTree(paths), StaticTree(rng.sample([list(path) for path in paths], len(paths)))
    assert tree == mixed
    assert hash(tree) == hash(mixed)
    assert set(tree.paths) == set(paths)
    assert tree.depth == max(map(len, paths))
    assert tree.width == 1 + max(path[-1] for path in paths)
    assert tree.below.keys() == {(), *paths}
    for path, ranks in tree.below.items():
        assert list(ranks) == sorted(other[-1] for other in paths if other[:-1] == path)
    shallow = [path for path in paths if len(path) <= depth]
    cut = tree.cut(depth)
    assert (cut is None) == (not shallow)
    assert cut is None or set(cut.paths) == set(shallow)
    budget = Budget.of(Speculation(tree=tree), depth)
    if cut is None:
        assert budget == NO_DRAFT
    else:
        assert budget == Budget(cut.depth, cut.width, len(cut.paths), shape=cut)


@given(path_lists(), st.data())
def test_a_path_without_its_parent_is_refused_naming_the_parent(paths: list[RankPath], data: st.DataObject) -> None:
    inner = [path for path in paths if any(other[:-1] == path for other in paths)]
    if not inner:
        return
    gone = data.draw(st.sampled_from(inner))
    with pytest.raises(InvalidTree) as caught:
        StaticTree([path for path in paths if path != gone])
    assert f"add {json.dumps(gone)}" in str(caught.value)


MALFORMED = [
    ("[[0], [1], [0, 0], [1]]", r"\[1\] occurs twice"),
    ("[[0], [2, 0]]", r"\[2, 0\] has no parent: add \[2\]"),
    ("[[0], [0, 1, 0, 3]]", r"\[0, 1, 0, 3\] has no parent: add \[0, 1\]"),
    ("[[0], [-1]]", r"-1 in the path \[-1\] is not a rank"),
    ("[[0], [true]]", "true in the path"),
    ("[[0], [0.0]]", "0.0 in the path"),
    (f"[[0], [{MOST_RANK + 1}]]", f"from 0 to {MOST_RANK}"),
    ('[["0"]]', '"0" in the path'),
    ("[[0], []]", r"\[\] is not a path"),
    ("[0, 1]", "0 is not a path"),
    ('["01"]', '"01" is not a path'),
    ("[]", "no paths"),
    ('{"0": 1}', "is not a list of paths"),
    ('"0"', "is not a list of paths"),
    ("3", "is not a list of paths"),
    ("null", "is not a list of paths"),
    ("[[0], [1]", "not JSON"),
    ("", "not JSON"),
    ("[" * 100_000, "not JSON"),
]


@pytest.mark.parametrize(("text", "problem"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "tree.json"
    path.write_text(text)
    with unchecked(), pytest.raises(InvalidTree, match=problem) as caught:
        StaticTree.load(path)
    assert str(caught.value).startswith(f"speculation.tree: {path}: ")
    assert isinstance(caught.value, ForerunError)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe[[0]]")
    for name, problem in (("none.json", "No such file"), (".", "directory"), ("binary", "UTF-8")):
        with pytest.raises(InvalidTree, match=problem) as caught:
            StaticTree.load(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


def test_a_file_is_read(tmp_path: Path) -> None:
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "tree.json").write_text(json.dumps(SMALL[::-1]), encoding)
        assert StaticTree.load(str(tmp_path / "tree.json")) == StaticTree(SMALL)


def test_a_speculation_takes_its_sizes_from_the_tree() -> None:
    tree = StaticTree(SMALL)
    speculation = Speculation(tree=tree)
    assert (speculation.depth, speculation.width, speculation.nodes) == (3, 2, 5)
    assert Speculation(3, 2, 5, tree=tree) == speculation
    for name, value in (("depth", 2), ("width", 3), ("nodes", 4)):
        with pytest.raises(InvalidRequest, match=f"speculation.{name}: {value} is not the tree's") as caught:
            Speculation(**dict[str, Any]({name: value}), tree=tree)
        assert caught.value.field == f"speculation.{name}"
    with unchecked(), pytest.raises(InvalidRequest, match="use a StaticTree"):
        Speculation(tree=SMALL)  # type: ignore[arg-type]


def test_type_checkers_see_that_a_depth_may_be_auto_and_is_then_a_number() -> None:
    assert get_type_hints(Speculation.__init__)["depth"] == int | Literal["auto"]
    assert get_type_hints(Speculation)["depth"] is int
    assert Speculation("auto") == Speculation() == Speculation(AUTO_DEPTH, auto=True)
    assert Speculation("auto", tree=StaticTree(SMALL)) == Speculation(tree=StaticTree(SMALL))
    assert replace(Speculation("auto"), width=2) == Speculation(width=2)
    for wrong in ("aut", -1, 1.5, True, None):
        with unchecked(), pytest.raises(InvalidRequest, match=r"speculation.depth: .* use auto, or a whole number"):
            Speculation(wrong)  # type: ignore[arg-type]


def test_the_command_line_takes_a_file(tmp_path: Path) -> None:
    """The same tokens, the tree's number of draft tokens per round, and one line for an invalid tree."""
    (tmp_path / "tree.json").write_text(json.dumps(SMALL))
    (tmp_path / "bad.json").write_text("[[0, 0]]")
    models = ["--model", str(TARGET), "--draft", f"model:{DATA / 'stories280k'}"]

    arguments = ["generate", *models, "--seed", "1", "-n", "12", "--ignore-eos", "--json", "Once upon a time"]
    with_tree = [*arguments, "--tree", str(tmp_path / "tree.json")]
    drafted, chain = (json.loads(command(*words).stdout) for words in (with_tree, arguments))
    assert drafted["token_ids"] == chain["token_ids"]
    assert drafted["depth"] == 3
    stats = drafted["stats"]
    assert len(stats["acceptance_at_depth"]) <= 3
    assert stats["num_drafted"] > 3 * (stats["num_rounds"] - 1)  # the last rounds are cut
    assert "add [0]" in refusal(*arguments, "--tree", str(tmp_path / "bad.json"))
    assert "speculation.depth" in refusal(*with_tree, "--depth", "2")


@pytest.mark.parametrize("drafter", ["model", "ngram"])
def test_every_drafter_keeps_within_a_shape(drafter: str) -> None:
    spec = f"model:{DATA / 'stories280k'}" if drafter == "model" else drafter
    plain, llm = LLM(str(TARGET)), LLM(str(TARGET), spec, speculation=Speculation(tree=StaticTree(SMALL)))
    prompt = "Lily and Tom went to the park. Lily and Tom went to the park. Lily"
    params = [SamplingParams(temperature=t, seed=2, max_tokens=20, ignore_eos=True) for t in (0.0, 1.0)]
    answers, expected = ([r.outputs[0].token_ids for r in each.generate([prompt] * 2, params)] for each in (llm, plain))
    assert answers == expected
    stats = llm.stats
    most = 5 if drafter == "model" else 3
    assert 0 < stats.num_drafted <= most * stats.num_rounds
    assert len(stats.acceptance_at_depth) <= 3
