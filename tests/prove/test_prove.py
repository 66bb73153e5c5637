"""`prove` as a library: its report on an exact engine, the report's form, and that the seed determines all of it."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from forerun import InvalidRequest, Speculation
from forerun.llm import LLM
from forerun.models.decoder import Decoder
from forerun.prove import ProofReport, ProofWorkload, law, prove
from forerun.prove.show import verdict
from forerun.sampling.params import SamplingParams
from kit.checkpoints import TARGET
from kit.unchecked import unchecked
from prove.tiny import tiny_llm

WORKLOAD = ProofWorkload(
    num_prompts=2, max_tokens=12, temperatures=(0.0, 1.0), shapes=(Speculation(3), Speculation(3, 2)), num_texts=250
)
PROMPTS = ["a d f", "b b c h"]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def report(llm: LLM) -> ProofReport:
    with unchecked():
        return prove(llm, PROMPTS, WORKLOAD)


def test_the_proof_holds_for_an_exact_engine(report: ProofReport) -> None:
    assert report.holds
    e = report.equality
    assert (e.num_runs, e.num_requests, e.differences) == (8, 2, ())
    assert 0 < e.num_accepted < e.num_drafted
    assert [(law.verification, law.shape.width) for law in report.laws] == [("token", 1), ("token", 2), ("block", 1)]
    assert all(law.num_texts == 250 and law.num_drafted > 250 for law in report.laws)
    assert all(law.freedom >= law.num_cells - 1 > 0 for law in report.laws)
    assert len(report.proven) == 4


def test_unequal_logits_are_reported_even_if_all_tokens_are_equal(
    llm: LLM, report: ProofReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linear layer that adds something by the number of its rows, too little to change a token here."""
    whole = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: whole(self, hidden) + 1e-6 * len(hidden))
    with unchecked():
        found = prove(llm, PROMPTS, replace(WORKLOAD, num_prompts=1, shapes=(Speculation(3),)))
    assert found.equality.rounding_noise > 0
    assert not found.equality.same_logits
    assert not found.holds
    luck = replace(report, equality=replace(report.equality, rounding_noise=1e-6))
    assert "depend on chunking or batching" in verdict(luck).plain
    assert "speculation changed nothing" in verdict(report).plain


def test_the_report_is_json_and_names_what_it_holds_for(llm: LLM, report: ProofReport) -> None:
    as_object = report.as_object()
    assert json.loads(json.dumps(as_object, allow_nan=False)) == as_object
    assert as_object["holds"] is True
    assert as_object["place"]["fingerprint"] == llm.fingerprint
    assert as_object["place"]["dtype"] == "float32"
    assert set(as_object) == {"holds", "level", "place", "workload", "equality", "laws", "proven", "not_proven"}
    assert set(as_object["equality"]) == {
        "num_runs",
        "num_requests",
        "num_tokens",
        "num_drafted",
        "num_accepted",
        "exact_backend",
        "rounding_noise",
        "differences",
        "same_tokens",
        "same_logits",
    }
    assert {"verification", "shape", "statistic", "freedom", "p_value", "adjusted_p", "holds"} <= set(
        as_object["laws"][0]
    )
    assert as_object["workload"]["seed"] == 0


@pytest.mark.full
def test_the_seed_determines_the_whole_report(llm: LLM, report: ProofReport) -> None:
    with unchecked():
        assert prove(llm, PROMPTS, WORKLOAD).as_object() == report.as_object()


def test_the_engine_is_left_as_it_was(llm: LLM, report: ProofReport) -> None:
    assert llm.engine.options.verification == "coupled"
    assert llm.engine.scheduler.max_num_seqs == llm.engine.options.max_num_seqs
    assert llm.engine.runner.cache.num_rows == 0


@pytest.mark.full
def test_progress_is_reported(llm: LLM) -> None:
    progress: list[tuple[str, float]] = []
    small = ProofWorkload(num_prompts=1, max_tokens=8, temperatures=(1.0,), batches=(1,), num_texts=200)
    with unchecked():
        prove(llm, PROMPTS, small, lambda what, done: progress.append((what, done)))
    for what in ("equality", "distribution"):
        shares = [done for name, done in progress if name == what]
        assert shares == sorted(shares)
        assert shares[-1] == 1


def test_a_single_text_of_probability_zero_rejects_the_law(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (opening,), texts = law.choose_openings(llm, [(2, 5)], replace(WORKLOAD, num_openings=1)), []
    other = next(token for token in range(2, 12) if token != opening.token)

    def generate(*_: Any, **__: Any) -> Any:
        outputs = [SimpleNamespace(token_ids=text) for text in texts]
        return [SimpleNamespace(outputs=outputs)]

    monkeypatch.setattr(llm, "generate", generate)
    for text, chance in opening.cells.chances.items():
        texts += [(opening.token, *text)] * round(250 * chance)
    expected = law.prove_law(llm, "token", Speculation(3), opening, [], lambda *_: None)
    texts[-1] = (other, *texts[-1][1:])
    found = law.prove_law(llm, "token", Speculation(3), opening, [], lambda *_: None)
    assert (expected.num_impossible, found.num_impossible) == (0, 1)
    assert found.p_value == 0.0 < expected.p_value


def test_an_empty_workload_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="draft: it is missing"):
        prove(LLM(str(TARGET)), ["Once"])
    with pytest.raises(InvalidRequest, match="prompts: the list is empty"):
        prove(llm, [])
    with pytest.raises(InvalidRequest, match="draft: it drafted no tokens"):
        prove(llm, PROMPTS, ProofWorkload(max_tokens=1))
    few = ProofWorkload(num_prompts=1, max_tokens=8, temperatures=(1.0,), batches=(1,), num_texts=20)
    done: list[str] = []
    with pytest.raises(InvalidRequest, match="num_texts: of 20 texts"), unchecked():
        prove(llm, PROMPTS, few, lambda what, _: done.append(what))
    assert not done, "it is refused before the tests that take minutes"
    with pytest.raises(InvalidRequest, match="num_texts: 0"):
        ProofWorkload(num_texts=0)


@pytest.mark.full
def test_many_texts_are_drawn_by_several_requests(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, report: ProofReport
) -> None:
    """A request has a most number of samples; texts of different requests share no noise."""
    asked: list[SamplingParams] = []
    real = llm.generate

    def generate(prompts: Any, params: Any, **more: Any) -> Any:
        asked.extend(one for one in params if one.n > 1)
        return real(prompts, params, **more)

    monkeypatch.setattr(law, "MOST_SAMPLES", 100)
    monkeypatch.setattr(llm, "generate", generate)
    with unchecked():
        found = prove(llm, PROMPTS, replace(WORKLOAD, num_prompts=1, shapes=(Speculation(3),)))
    assert found.holds
    assert all(each.num_texts == 250 for each in found.laws)
    assert [one.n for one in asked] == [100, 100, 50] * len(found.laws)
    assert len({one.seed for one in asked}) == len(asked)
    assert ProofWorkload().num_texts > SamplingParams(n=1024).n, "the default needs more than one request may ask for"
