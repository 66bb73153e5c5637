"""What an engine measures before its first request is cached, leaves no text behind, and changes no token."""

import itertools
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from forerun import LLM, SamplingParams, Speculation
from forerun.accept import outcome
from forerun.accept.outcome import MIN_GAIN_TOKENS
from forerun.control.kept_costs import as_json, from_json
from forerun.control.measured import MeasuredDepth
from forerun.draft.many import mix
from forerun.draft.model import follower
from forerun.draft.text.ngram import NgramDrafter
from forerun.draft.text.suffix import SuffixDrafter
from forerun.engine import calibration
from forerun.engine.engine import Engine
from forerun.models.runner import Read, Runner
from forerun.request import Request
from kit.assertions import assert_empty
from kit.checkpoints import SMALL, TARGET

TOKEN_S = 1e-4  # per token, of the clock of `made_clock`
PROMPTS = ["Once upon a time", "One day, a little girl", "The cat"]
DRAFTS = [
    "ngram",
    "suffix",
    f"model:{SMALL}",
    f"mix[ngram,model:{SMALL}]",
    "early-exit:2",
    f"cascade[ngram,model:{SMALL}]",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "forerun" / "times"


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the time limit, so that everything is measured on slow machines, too."""
    monkeypatch.setattr(calibration, "LIMIT_S", 1e6)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sequences in every round of any engine."""
    noted: list[int] = []
    step = Engine.step

    def watched(engine: Engine) -> object:
        noted.append(len(engine.sequences))
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    return noted


@pytest.fixture
def made_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by TOKEN_S for every token that a model reads, and not otherwise."""
    now_s, plain_read = [0.0], Runner.read

    def reading(own: Runner, reads: Sequence[Read], *rest: object, **more: object) -> object:
        now_s[0] += TOKEN_S * sum(len(read.tokens) for read in reads)
        return plain_read(own, reads, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "read", reading)
    for module in (follower, mix, outcome):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))


def started(draft: str, **options: object) -> LLM:
    return LLM(str(TARGET), draft, dtype="float32", use_tqdm_on_load=False, **options)  # type: ignore[arg-type]


def controller_of(llm: LLM) -> MeasuredDepth:
    assert isinstance(llm.engine.controller, MeasuredDepth)
    return llm.engine.controller


@pytest.mark.short("model:*")
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_first_start_measures_and_the_next_one_reads_the_file(draft: str, steps: list[int]) -> None:
    """Every drafter is measured at batch size 1 and at the largest; the engine holds no state of it."""
    first = started(draft)
    assert len(steps) > 20
    assert set(steps) == {1, 8, 16}
    assert_empty(first)
    assert (first.stats.num_passes, first.stats.gain) == (0, None)
    known = controller_of(first)
    assert {kind.rows for kind in known.costs.kinds} == {1, 4, 5}
    assert all(cost.expect(size) > 0 for cost in known.costs.kinds.values() for size in cost.sizes)
    assert known.drafters.names == (list(first.drafter_names) if len(first.drafter_names) > 1 else [""])
    assert [each.batch for each in first.forecasts] == [1, 8, 16]
    steps.clear()
    again = started(draft)
    assert steps == []
    assert as_json(controller_of(again)) == json.loads(json.dumps(as_json(known)))
    assert again.forecasts == first.forecasts


@pytest.mark.short("options1", "options3")
@pytest.mark.parametrize(
    "options", [{"threads": 1}, {"max_num_seqs": 2}, {"verification": "token"}, {"quantize": "int8"}]
)
def test_other_settings_are_measured_separately(options: dict[str, object], steps: list[int]) -> None:
    started("ngram", threads=2)
    steps.clear()
    started("ngram", **({"threads": 2} | options))
    assert steps


def test_without_drafts_or_with_a_fixed_depth_nothing_is_measured(steps: list[int]) -> None:
    for llm in (
        LLM(str(TARGET), dtype="float32"),
        started("ngram", speculation=4),
        started("ngram", speculation=False),
        LLM(str(TARGET), NgramDrafter(), dtype="float32"),
        started("ngram", controller=MeasuredDepth()),
    ):
        assert steps == []
        assert llm.forecasts == ()


def test_seeds_and_tokens_are_those_of_an_engine_that_measured_nothing(steps: list[int]) -> None:
    """Requests without a seed get one by their number; sample prompts must not use up numbers."""
    params = SamplingParams(temperature=1.0, max_tokens=20, n=2)
    expected = started("ngram", seed=7, speculation=4).generate(PROMPTS, params)
    measured = started("ngram", seed=7).generate(PROMPTS, params)
    read = started("ngram", seed=7).generate(PROMPTS, params)
    assert steps
    assert expected == measured == read
    assert [each.request_id for each in expected] == [each.request_id for each in measured]


@pytest.mark.short("model:*")
@pytest.mark.parametrize(("draft", "readers"), [(f"model:{SMALL}", 1), (f"mix[ngram,model:{SMALL}]", 1), ("ngram", 0)])
@pytest.mark.usefixtures("made_clock")
def test_the_prefill_time_of_drafters_is_measured_and_cached(draft: str, readers: int) -> None:
    """For drafters that read the text themselves; the times are cached for the next start."""
    first, again = (controller_of(started(draft)) for _ in range(2))
    measured = [record.reading_s for record in first.drafters.all]
    assert sum(each == pytest.approx(TOKEN_S, rel=0.1) for each in measured) == readers
    assert sum(each == 0 for each in measured) == len(measured) - readers
    assert [record.reading_s for record in again.drafters.all] == measured


def test_sample_prompts_are_not_stored_as_past_answers(tmp_path: Path) -> None:
    """Neither in memory nor in the user's file of past answers."""
    path = tmp_path / "past.jsonl"
    llm = started(f"suffix:{path}")
    assert isinstance(llm.drafter, SuffixDrafter)
    assert len(llm.drafter.past.answers) == 0
    assert not path.exists() or len(path.read_text().splitlines()) <= 1
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, seed=1))
    assert len(llm.drafter.past.answers) == 1


@pytest.mark.parametrize("text", ["{", '{"version": 1, "names": [""], "passes": [], "arms": []}'])
def test_a_damaged_file_is_replaced_by_a_new_measurement(text: str, folder: Path, steps: list[int]) -> None:
    started("ngram")
    (path,) = folder.glob("rounds-*.json")
    path.write_text(text)
    steps.clear()
    started("ngram")
    assert steps
    assert json.loads(path.read_text())["passes"]


def corrupted(found: object, rng_value: object) -> list[object]:
    """Copies of a JSON value, in each of which one value is replaced."""
    if isinstance(found, dict):
        return [
            {**found, key: changed}
            for key, value in found.items()
            for changed in [rng_value, *corrupted(value, rng_value)]
        ]
    if isinstance(found, list):
        return [
            [*found[:i], changed, *found[i + 1 :]]
            for i, value in enumerate(found[:3])
            for changed in [rng_value, *corrupted(value, rng_value)]
        ]
    return []


@pytest.fixture(scope="module")
def measured() -> str:
    """The measurements of a start, as JSON."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "keep", lambda *_: None)
        patch.setattr(calibration, "read_kept", lambda *_: None)
        patch.setattr(calibration, "LIMIT_S", 1e6)  # the fixture above is of a test, not of the module
        return json.dumps(as_json(controller_of(started("ngram"))))


@pytest.mark.parametrize("value", [None, -1.0, float("nan"), float("inf"), 1e308, 10**400, "x", [], {}, True])
def test_any_changed_value_in_the_file_is_refused_or_harmless(value: object, measured: str) -> None:
    """A file with one value changed gives a controller with finite estimates, or none."""
    assert from_json(json.loads(measured), ("ngram",)).costs.kinds
    for found in corrupted(json.loads(measured), value):
        try:
            controller = from_json(found, ("ngram",))
        except (ValueError, TypeError, LookupError, AttributeError):
            continue
        for cost in controller.costs.kinds.values():
            assert all(0 <= cost.expect(size) < float("inf") for size in (1, 7, 300))
        assert all(0 <= record.cost_s(4, 2) < float("inf") for record in controller.drafters.all)


def test_calibration_ends_within_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no time nothing is measured, and the engine works; with little time, batch size 1 comes first."""
    monkeypatch.setattr(calibration, "LIMIT_S", 0.0)
    llm = started("ngram")
    assert llm.forecasts == ()
    assert llm.generate(PROMPTS, SamplingParams(max_tokens=4, seed=1)) == LLM(str(TARGET), dtype="float32").generate(
        PROMPTS, SamplingParams(max_tokens=4, seed=1)
    )
    step, now_s = Engine.step, [0.0]

    def slowly(engine: Engine) -> object:
        now_s[0] += 0.02
        return step(engine)

    monkeypatch.setattr(Engine, "step", slowly)
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr(calibration, "LIMIT_S", 0.4)
    llm = started("ngram")
    assert now_s[0] <= 0.5
    assert {kind.rows for kind in controller_of(llm).costs.kinds} == {1}


def test_a_failing_calibration_does_not_prevent_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Sequence[int]:
        raise OSError("no")

    monkeypatch.setattr(calibration, "samples", fails)
    llm = started("ngram")
    assert llm.forecasts == ()
    assert_empty(llm)
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=4, seed=1))[0].outputs[0].token_ids


@pytest.mark.parametrize("max_model_len", [4, 9, 30])
def test_calibration_works_with_short_contexts(max_model_len: int) -> None:
    llm = started(f"model:{SMALL}", max_model_len=max_model_len)
    assert_empty(llm)
    (answer,) = llm.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True, seed=1))
    assert len(answer.outputs[0].token_ids) == 2


def test_the_expected_gain_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="forerun"):
        llm = started(f"model:{SMALL}")
    lines = [record.getMessage() for record in caplog.records if "expected" in record.getMessage()]
    assert len(lines) == 1
    is_faster = any(each.depth for each in llm.forecasts)
    assert ("at batch 1" in lines[0]) if is_faster else ("not expected to save time" in lines[0])


@pytest.mark.usefixtures("made_clock")
def test_results_and_stats_report_the_gain() -> None:
    """Without a measurement, and for requests that asked for no speculation, it is unknown."""
    params = SamplingParams(temperature=0.7, max_tokens=200, seed=3, ignore_eos=True)
    llm = started(f"model:{SMALL}")
    (plain,) = llm.generate(PROMPTS[0], params, speculation=False)
    assert (plain.metrics.gain, llm.stats.gain) == (None, None)
    (drafted,) = llm.generate(PROMPTS[0], params, speculation=Speculation(4))
    assert drafted.metrics.gain is not None
    assert 0.1 < drafted.metrics.gain < 10
    assert llm.stats.gain == pytest.approx(drafted.metrics.gain)
    llm.generate(PROMPTS, params, speculation=Speculation(2))
    assert llm.stats.gain != pytest.approx(drafted.metrics.gain)
    both = llm.ask([Request.of(PROMPTS[0], params, asked) for asked in (False, 4)])
    for delta in llm.deltas(both.sequences):
        both.add(delta)
    beside, asking = (answer.metrics.gain for answer in both.outputs())
    assert beside is None
    assert asking is not None
    (unknown,) = started("ngram", speculation=4).generate(PROMPTS[0], params)
    assert unknown.metrics.gain is None


@pytest.mark.usefixtures("made_clock")
def test_rounds_without_a_draft_are_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are plain rounds, and so take as long as one, whatever was expected of one."""
    llm = started(f"model:{SMALL}")
    monkeypatch.setattr(MeasuredDepth, "skips", lambda *_: True)
    monkeypatch.setattr(MeasuredDepth, "plain_s", lambda *_: 2 * TOKEN_S)
    (answer,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.7, max_tokens=40, seed=3, ignore_eos=True))
    assert answer.metrics.num_drafted == 0
    assert answer.metrics.gain == pytest.approx(1.0)
    assert llm.stats.gain == pytest.approx(1.0)


def test_no_gain_is_reported_for_a_few_tokens() -> None:
    """The first rounds are slow because caches are cold, and would be reported as a loss."""
    params = SamplingParams(temperature=0.7, max_tokens=MIN_GAIN_TOKENS // 2, seed=3, ignore_eos=True)
    llm = started(f"model:{SMALL}")
    (answer,) = llm.generate(PROMPTS[0], params)
    assert answer.metrics.pace.plain_s > 0
    assert (answer.metrics.gain, llm.stats.gain) == (None, None)
    for _ in range(3):
        llm.generate(PROMPTS[0], params)
    assert llm.stats.gain is not None


@pytest.mark.parametrize(
    ("template", "asks"),
    [
        ("{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}Answer:", True),
        ("{{ raise_exception('no') }}", False),
        ("{{ 'word ' * 200 }}{{ messages[0].content }}", False),  # too long for a calibration
        (None, False),
    ],
)
def test_a_model_with_a_chat_template_is_calibrated_on_questions(
    tmp_path: Path, template: str | None, asks: bool
) -> None:
    folder = tmp_path / "chat"
    shutil.copytree(TARGET, folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    llm = LLM(str(folder), max_model_len=512)
    sequences = itertools.islice(calibration.samples(llm.requests, SamplingParams()), len(calibration.QUESTIONS))
    prompts = [llm.tokenizer.decode(sequence.tokens) for sequence in sequences]
    assert [question in prompt for question, prompt in zip(calibration.QUESTIONS, prompts, strict=True)] == [asks] * 8
    assert all(prompt.endswith("Answer:") for prompt in prompts) == asks
