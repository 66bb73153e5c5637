"""The power of the proof: planted faults are found, and none is reported of an exact engine.

Faults in the law are looked for on table models with the real draws, rules and cells; faults in tokens with the
engine on random Llamas of 12 tokens. A few runs always, 100 of each as a long proof.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from forerun.config import Speculation, Verification
from forerun.llm import LLM
from forerun.prove.chi_square import LEVEL
from forerun.prove.equality import Equality, prove_equality
from forerun.prove.law import TOP_K, choose_openings, prove_laws
from forerun.prove.workload import ProofWorkload
from forerun.sampling.params import SamplingParams
from kit.unchecked import unchecked
from prove.mutants import LAW_MUTANTS, TOKEN_MUTANTS, LawMutant, planted
from prove.tables import Pair, texts
from prove.tiny import tiny_llm

NUM_TESTS = 3  # of a default workload: the level is shared among so many
PARAMS = SamplingParams(top_k=TOP_K)
WORKLOAD = ProofWorkload(
    num_prompts=4, max_tokens=16, temperatures=(0.0, 1.0), batches=(1, 4), shapes=(Speculation(3), Speculation(3, 2))
)


def ignore(what: str, done: float) -> None:
    """No bar."""


def p_value(
    pair: Pair, rule: Verification, num_texts: int, depth: int, seed: int, mutant: LawMutant | None = None
) -> float:
    cells = pair.cells(PARAMS, num_texts)
    spoil = {"spoil": mutant.spoil} if mutant else {}
    with unchecked():
        outputs = texts(pair, rule, PARAMS, num_texts, cells.num_tokens, depth, seed, **spoil)
    assert not any(cells.excludes(text) for text in outputs)
    return cells.test(outputs).p_value


def rejections(name: str, seeds: range) -> int:
    mutant = LAW_MUTANTS[name]
    with pytest.MonkeyPatch.context() as patch:
        mutant.plant(patch)
        found = [p_value(mutant.pair, mutant.rule, mutant.num_texts, mutant.depth, s, mutant) for s in seeds]
    return sum(p < LEVEL / NUM_TESTS for p in found)


ONE, HUNDRED = (range(1, 2), 1), pytest.param(range(100, 200), 95, marks=pytest.mark.full)
runs = pytest.mark.parametrize(("seeds", "least"), [ONE, HUNDRED], ids=["one", "hundred"])


@pytest.mark.short("one-first failure*", "one-coins*", "one-unlikely*token", "one-q mis*block")
@pytest.mark.parametrize("name", LAW_MUTANTS)
@runs
def test_a_wrong_distribution_is_rejected(name: str, seeds: range, least: int) -> None:
    """In 95 of 100 runs."""
    assert rejections(name, seeds) >= least


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_right_distribution_is_not_rejected(rule: Verification) -> None:
    assert p_value(Pair.random(0), rule, 1500, 3, seed=1) > LEVEL


@pytest.mark.full
def test_right_distributions_are_rejected_in_at_most_1_of_100_runs() -> None:
    """A run makes the tests of a default workload and is rejected if its least p-value is."""
    rejected = 0
    for seed in range(100):
        tests: list[tuple[Verification, int]] = [("token", 3), ("token", 1), ("block", 3)]
        pair = Pair.random(seed)
        found = [p_value(pair, rule, 1500, depth, 3 * seed + i) for i, (rule, depth) in enumerate(tests)]
        rejected += min(found) < LEVEL / NUM_TESTS
    assert rejected <= 1


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return tiny_llm(folder)


def equality(llm: LLM, seed: int, workload: ProofWorkload = WORKLOAD) -> Equality:
    prompts = [tuple(2 + (seed + 3 * i + j * j) % 10 for j in range(2 + i)) for i in range(workload.num_prompts)]
    with unchecked():
        return prove_equality(llm, prompts, replace(workload, seed=1000 * seed), ignore)


def wrong_runs(llm: LLM, name: str, seeds: range) -> int:
    with pytest.MonkeyPatch.context() as patch:
        planted(name, patch)
        return sum(not equality(llm, seed).same_tokens for seed in seeds)


@pytest.mark.short("one-a wrong token", "one-a skipped*", "one-a stale*")
@pytest.mark.parametrize("name", TOKEN_MUTANTS)
@runs
def test_wrong_tokens_are_found(llm: LLM, name: str, seeds: range, least: int) -> None:
    assert wrong_runs(llm, name, seeds) >= least


def test_right_tokens_are_not_reported_as_wrong(llm: LLM) -> None:
    found = equality(llm, 1)
    assert found.differences == ()
    assert found.rounding_noise == 0
    assert found.num_accepted > 20


@pytest.mark.full
def test_right_tokens_are_never_reported_as_wrong_in_100_runs(llm: LLM) -> None:
    assert all(equality(llm, seed).differences == () for seed in range(100))


STRONG = ["first failure stops block", "coins reuse the draft's noise"]


@pytest.mark.short("first failure stops block")
@pytest.mark.parametrize("name", [None, *STRONG])
def test_mutants_are_found_through_the_engine(llm: LLM, name: str | None) -> None:
    """The same faults, found in the engine's outputs."""
    workload = ProofWorkload(num_texts=250, shapes=(Speculation(3),))
    with pytest.MonkeyPatch.context() as patch, unchecked():
        if name is not None:
            planted(name, patch)
        openings = choose_openings(llm, [(2, 5, 7), (3, 3, 4, 9)], workload)
        laws = prove_laws(llm, openings, workload, ignore)
    broken = {law.verification for law in laws if not law.holds}
    assert broken == (set() if name is None else broken | {LAW_MUTANTS[name].rule})
    assert all(law.num_accepted > 100 for law in laws)
