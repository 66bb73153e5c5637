"""Chains of drafters that read states, drawn in one call of the compiled kernels, equal those drawn step by step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun.config import Speculation
from forerun.draft.base import Budget, Committed, Draft
from forerun.draft.model.state_follower import StateFollower
from forerun.kernels.build import NoKernels
from forerun.kernels.library import library
from forerun.llm import LLM
from forerun.models.chains import Chains
from forerun.models.decoder import Outputs
from forerun.models.runner import Read
from forerun.sampling.draws import Draws
from forerun.sampling.params import SamplingParams
from heads.modules import apart
from heads.trained import eagle_of, first_eagle_of
from kit.checkpoints import TARGET
from kit.texts import STARTS

FORMS: dict[str, Callable[[Path], str]] = {
    "eagle-3": lambda folder: f"eagle:{eagle_of(TARGET, folder)}",
    "eagle-3, normed, two layers": lambda folder: (
        f"eagle:{eagle_of(TARGET, folder, norm_before_residual=True, num_hidden_layers=2)}"
    ),
    "eagle-3.1": lambda folder: f"eagle:{eagle_of(TARGET, folder, fc_norm=True, norm_output=True)}",
    "eagle-1": lambda folder: f"eagle:{first_eagle_of(TARGET, folder)}",
    "mtp": lambda folder: f"mtp:{apart(TARGET, folder, 1, 'deepseek')}",
    "mtp, state first": lambda folder: f"mtp:{apart(TARGET, folder, 1, 'mimo')}",
}
Drafts = dict[tuple[int, ...], list[int]]  # draft tokens by the text up to the root


@pytest.fixture(autouse=True)
def compiled() -> None:
    """Skip the tests without compiled kernels, which have this call."""
    try:
        library()
    except NoKernels as error:
        pytest.skip(f"no kernels: {error}")


def watched(draft: str, at_once: bool, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[LLM, Drafts]:
    """An engine, and the drafts that its drafter will make; `at_once` says whether one call may draw entire chains."""
    llm = LLM(str(TARGET), draft, dtype="float32", kernels="native", chunk_tokens=7, **options)
    drafter, found = llm.drafter, dict[tuple[int, ...], list[int]]()
    assert isinstance(drafter, StateFollower)
    drawing, proposing = drafter.runner.draw_chains, drafter.propose

    def draw_chains(*arguments: Any, **more: Any) -> Chains | None:
        chains = drawing(*arguments, **more) if at_once else None
        assert (chains is not None) == at_once
        return chains

    def propose(draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        draft = proposing(draws, budgets, tail)
        for row, chain in zip(draws.rows, draft.tree.tokens.tolist(), strict=True):
            found[tuple(row.tokens)] = [token for token in chain[1:] if token >= 0]
        return draft

    monkeypatch.setattr(drafter.runner, "draw_chains", draw_chains)
    monkeypatch.setattr(drafter, "propose", propose)
    return llm, found


@pytest.mark.short("eagle-3-1.0")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("form", FORMS)
def test_chains_drawn_at_once_are_those_drawn_step_by_step(
    form: str, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rounds of several sequences; a draw that is nearly a tie may end a chain early."""
    draft = FORMS[form](tmp_path / "heads")
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=30) for i in range(len(STARTS))]
    found, answers = [], []
    for at_once in (True, False):
        llm, drafts = watched(draft, at_once, monkeypatch, speculation=Speculation(5), max_num_seqs=3)
        answers.append([result.outputs[0].token_ids for result in llm.generate(list(STARTS), params)])
        llm.drafter.runner.cache.check()
        found.append(drafts)
        llm.close()
    assert answers[0] == answers[1]
    shared = found[0].keys() & found[1].keys()
    assert len(shared) >= 0.98 * len(found[0])
    assert sum(found[0][text] == found[1][text] for text in shared) >= 0.98 * len(shared)
    assert sum(map(len, found[0].values())) > 100


def test_a_chain_drawn_in_one_call_ends_below_min_survival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = FORMS["mtp"](tmp_path / "heads")
    lengths = []
    for min_survival in (0.0, 0.05, 0.6):
        llm, drafts = watched(draft, True, monkeypatch, speculation=Speculation(5), max_num_seqs=1)
        drafter = llm.drafter
        assert isinstance(drafter, StateFollower)
        proposing = drafter.propose

        def priced(
            draws: Draws,
            budgets: Sequence[Budget],
            tail: Committed | None = None,
            min_survival: float = min_survival,
            proposing: Callable[..., Draft] = proposing,
        ) -> Draft:
            draft = proposing(draws, [Budget(b.depth, min_survival=min_survival) for b in budgets], tail)
            assert (draft.survival is not None) == (min_survival > 0)
            return draft

        monkeypatch.setattr(drafter, "propose", priced)
        llm.generate(STARTS[0], SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True))
        lengths.append(sum(map(len, drafts.values())) / len(drafts))
        llm.close()
    assert lengths[0] > lengths[1] > lengths[2]


@pytest.mark.parametrize("form", ["eagle-3", "mtp"])
def test_a_round_reads_new_text_and_draws_in_one_call(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed tokens and the root are read in the call that draws; a prompt in a pass before."""
    llm, drafts = watched(FORMS[form](tmp_path / "heads"), True, monkeypatch, speculation=Speculation(4))
    drafter = llm.drafter
    assert isinstance(drafter, StateFollower)
    reading, drawing, passes, texts = drafter.runner.read, drafter.runner.draw_chains, list[int](), list[int]()

    def read(reads: Sequence[Read], **options: Any) -> Outputs:
        passes.append(sum(len(read.tokens) for read in reads))
        return reading(reads, **options)

    def draw_chains(*arguments: Any, **more: Any) -> Chains | None:
        texts.append(sum(len(text) for text in more["texts"].tokens) if "texts" in more else 0)
        return drawing(*arguments, **more)

    monkeypatch.setattr(drafter.runner, "read", read)
    monkeypatch.setattr(drafter.runner, "draw_chains", draw_chains)
    llm.generate(STARTS[:1], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    assert len(texts) == len(drafts) > 20
    assert len(passes) == texts.count(0) == 1
    assert sum(passes) + sum(texts) == max(map(len, drafts)) - 1  # but for the text's first token
    llm.close()
