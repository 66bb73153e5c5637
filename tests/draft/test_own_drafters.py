"""An object that is no drafter is refused, with what it lacks; a drafter whose trees are malformed is named once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch

from forerun import LLM, SamplingParams
from forerun.config import Speculation
from forerun.draft.base import Budget, Committed, Draft
from forerun.draft.many.mix import MixDrafter
from forerun.draft.plan import check_drafter
from forerun.errors import UnknownDrafter
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree
from kit.checkpoints import TARGET
from kit.drafters import Stateless
from kit.unchecked import unchecked


class Resting(Stateless):
    """Never drafts."""

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        return Draft(DraftTree.bare(draws.roots_tokens))


class Tapping(Resting):
    """A drafter that reads states, and works without those of adopted tokens."""

    taps = (0, 5, -1)

    def adoptable(self, text: Sequence[int], most: int, salt: object) -> int:
        return 0


def of(kind: type[Resting], **parts: object) -> Any:
    """A drafter with some attributes replaced."""
    return type(kind.__name__, (kind,), parts)()


@pytest.mark.parametrize(
    ("drafter", "problem"),
    [
        (5, "5 is neither a specification, such as 'ngram', nor a Drafter: it has no taps"),
        (Resting, r"is a class: pass an instance, as in Resting\(\)"),
        (of(Resting, names="mine"), "its names, 'mine', must be a tuple of strings"),
        (of(Resting, names=()), r"its names, \(\), must be a tuple of strings"),
        (of(Resting, taps="all"), "its taps, 'all', must be a tuple of numbers from -1 to 5"),
        (of(Tapping, taps=(6,)), r"its taps, \(6,\), must be a tuple of numbers from -1 to 5"),
        (of(Tapping, taps=(-2,)), r"its taps, \(-2,\), must be a tuple of numbers from -1 to 5"),
        (of(Resting, taps=(0,)), "with taps it needs the method adoptable; one that returns 0 is enough"),
    ],
)
def test_an_object_that_is_no_drafter_is_refused_with_what_it_lacks(drafter: Any, problem: str) -> None:
    with unchecked(), pytest.raises(UnknownDrafter, match=problem):
        LLM(str(TARGET), drafter)


def chain_of(draws: Draws, num_rows: int = 0, dtype: torch.dtype = torch.int64) -> DraftTree:
    """A chain of one draft token per row, and `num_rows` rows too many."""
    roots = [row.tokens[-1] for row in draws.rows] + [0] * num_rows
    tokens = torch.tensor([[root, 5] for root in roots], dtype=dtype)
    return DraftTree(tokens, torch.tensor([[-1, 0]] * len(roots), dtype=dtype), depth=1, width=1)


def flat(tree: DraftTree) -> DraftTree:
    """The tree with tensors of one dimension."""
    return replace(tree, tokens=tree.tokens[0], parents=tree.parents[0])


def drafted_by(propose: Callable[[Draws], Any], in_mix: bool) -> LLM:
    """An LLM that has generated six tokens with a drafter that returns these values, alone or as a member of a mix."""
    drafter = of(Resting, names=("mine",), propose=lambda self, draws, budgets, tail=None: propose(draws))
    with unchecked():
        draft = MixDrafter([drafter, Resting()], ["mine", "other"]) if in_mix else drafter
        llm = LLM(str(TARGET), draft, dtype="float32", speculation=Speculation(1, drafter="mine"))
        llm.generate("Once", SamplingParams(max_tokens=6, ignore_eos=True))
    return llm


@pytest.mark.parametrize("in_mix", [False, True])
@pytest.mark.parametrize(
    ("malformed", "is_malformed"),
    [
        (chain_of, False),
        (partial(chain_of, num_rows=1), True),
        (partial(chain_of, dtype=torch.int32), True),
        (lambda draws: flat(chain_of(draws)), True),
    ],
)
def test_a_malformed_tree_is_dropped_with_one_warning(
    malformed: Callable[[Draws], DraftTree], is_malformed: bool, in_mix: bool, caplog: pytest.LogCaptureFixture
) -> None:
    llm = drafted_by(lambda draws: Draft(malformed(draws)), in_mix)
    assert (llm.stats.num_drafted == 0) == is_malformed
    warnings = [record.getMessage() for record in caplog.records if "was dropped" in record.getMessage()]
    assert len(warnings) == is_malformed
    assert all("tokens and parents of its DraftTree must be int64" in each for each in warnings)


@pytest.mark.drafter_raises
@pytest.mark.parametrize("wrap", [lambda tree: tree, lambda _: None, lambda tree: Draft(cast(DraftTree, [tree]))])
@pytest.mark.parametrize("in_mix", [False, True])
def test_what_is_no_draft_is_named_once_with_the_fix(
    wrap: Callable[[DraftTree], Any], in_mix: bool, caplog: pytest.LogCaptureFixture
) -> None:
    drafted_by(lambda draws: wrap(chain_of(draws)), in_mix)
    (warning,) = [record for record in caplog.records if record.exc_info]
    assert "switched off" in warning.getMessage()
    assert warning.exc_info is not None
    message = str(warning.exc_info[1])
    assert message.startswith("propose of the drafter mine returned ")
    assert message.endswith("return Draft(tree), where tree is a DraftTree.")


@pytest.mark.parametrize("drafter", [Resting(), Tapping(), of(Resting, names=["a", "b"]), of(Tapping, taps=[5])])
def test_drafters_are_accepted(drafter: Any) -> None:
    check_drafter(drafter, num_layers=5)
