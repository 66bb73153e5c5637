"""A drafter that is widened with its target drafts the same as before, for every kind and way of widening."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from forerun.config import Speculation
from forerun.draft.auto import RECORD, DrafterRecord, resolve_auto
from forerun.draft.spec import parse_spec
from forerun.errors import InvalidRequest
from forerun.heads import widen as module
from forerun.heads.blueprint import WideDrafter, widened_tap
from forerun.heads.widen import widen_drafter
from forerun.llm import LLM
from forerun.models.loading import Blueprint
from forerun.models.widen import Plan, Wider, widen
from forerun.sampling.params import SamplingParams
from heads.adapters import adapter_of
from heads.references import FORMS, Form
from heads.trained import eagle_of
from kit.checkpoints import TARGET
from kit.texts import STARTS

WAYS = {"exact": Wider(256, 7), "by no power of 4": Wider(128, 5, heads=8)}
SAME = ("medusa", "hydra", "eagle-3", "mtp", "dspark", "adapter")
P_EAGLE = {"num_hidden_layers": 2, "mask_token_id": 0}


def made(form: Form, folder: Path) -> str:
    return form.spelled.format(form.make(folder))


MAKERS: dict[str, Callable[[Path], str]] = {
    **{form: partial(made, FORMS[form]) for form in SAME},
    "p-eagle": lambda folder: f"eagle:{eagle_of(TARGET, folder, **P_EAGLE)}",
    "early-exit": lambda folder: f"early-exit:2:{adapter_of(TARGET, folder, 2, range(3, 5))}",
}
SHORT = {
    ("medusa", "exact"),
    ("hydra", "by no power of 4"),
    ("eagle-3", "exact"),
    ("p-eagle", "exact"),
    ("mtp", "exact"),
    ("dspark", "by no power of 4"),
    ("early-exit", "exact"),
}
PARAMS = [SamplingParams(temperature=t, seed=7, max_tokens=40, ignore_eos=True) for t in (0.0, 1.0)]


def counts(model: Path, draft: str, shape: Speculation) -> tuple[list[tuple[int, ...]], int, list[int]]:
    """Answers, the number of draft tokens, and the accepted ones at each depth."""
    llm = LLM(str(model), draft, dtype="float32", speculation=shape)
    answers = [r.outputs[0].token_ids for params in PARAMS for r in llm.generate(list(STARTS[:3]), params)]
    return answers, llm.stats.num_drafted, list(llm.stats.accepted_at_depth)


@pytest.fixture(scope="module")
def wide_targets(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    place = tmp_path_factory.mktemp("wide")

    def make(way: str) -> Path:
        return widen(str(TARGET), place / way.replace(" ", "-"), WAYS[way])

    return make


CASES = [
    pytest.param(kind, way, marks=[] if (kind, way) in SHORT else pytest.mark.full) for kind in MAKERS for way in WAYS
]


@pytest.mark.short("eagle-3-by no power of 4")
@pytest.mark.parametrize(("kind", "way"), CASES)
def test_a_widened_drafter_drafts_the_same_as_its_source(
    kind: str, way: str, wide_targets: Callable[[str], Path], tmp_path: Path
) -> None:
    draft, wide = MAKERS[kind](tmp_path / "narrow"), wide_targets(way)
    spec = widen_drafter(draft, str(TARGET), wide, WAYS[way])
    assert widen_drafter(draft, str(TARGET), wide, WAYS[way]) == spec
    shape = Speculation(3, 2, 6)
    narrow_counts, wide_counts = counts(TARGET, draft, shape), counts(wide, str(spec), shape)
    assert wide_counts == narrow_counts
    assert sum(wide_counts[2]) > 0
    made = Blueprint.of(str(wide)).config.hidden
    tensors = load_file(wide / spec.name / "model.safetensors")
    assert max(max(tensor.shape) for tensor in tensors.values()) >= made
    shutil.rmtree(wide / spec.name)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["hydra", "eagle-3", "early-exit", "dspark", "mtp"])
def test_a_wrong_widening_is_noticed(
    kind: str, wide_targets: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each kind, an output that leaks into channels that must stay 0 is noticed."""
    draft, wide = MAKERS[kind](tmp_path / "narrow"), wide_targets("exact")
    plain = module.planned

    def leaking(draft: str, source: str, wider: Wider, seed: int) -> tuple[Plan, WideDrafter]:
        plan, found = plain(draft, source, wider, seed)
        return plan, replace(found, writers=())

    monkeypatch.setattr(module, "planned", leaking)
    spec = widen_drafter(draft, str(TARGET), wide, WAYS["exact"])
    shape = Speculation(3)
    assert counts(wide, str(spec), shape)[1:] != counts(TARGET, draft, shape)[1:]
    shutil.rmtree(wide / spec.name)


def test_the_record_is_copied_without_times_and_auto_finds_it(
    wide_targets: Callable[[str], Path], tmp_path: Path
) -> None:
    draft, wide = MAKERS["early-exit"](tmp_path / "narrow"), wide_targets("exact")
    own = Blueprint.of(str(TARGET)).weights_digest()
    record = DrafterRecord("early-exit", "2:", own, 1.0, (0.6,), (1.6, 1.9), 1.3)
    (tmp_path / "narrow" / RECORD).write_text(record.text())
    spec = widen_drafter(draft, str(TARGET), wide, WAYS["exact"])
    target = Blueprint.of(str(wide))
    real = widened_tap(Plan.of(str(TARGET), WAYS["exact"], 0), 2)
    assert str(spec) == f"early-exit:{real}:{wide / 'early-exit'}"
    expected = replace(record, argument=f"{real}:", target=target.weights_digest(), speed_up=None)
    assert DrafterRecord.read(wide / "early-exit") == expected
    assert resolve_auto(parse_spec("auto"), target) == spec
    shutil.rmtree(wide / "early-exit")


def test_drafters_that_cannot_be_widened_are_refused(wide_targets: Callable[[str], Path], tmp_path: Path) -> None:
    wide, way = wide_targets("exact"), WAYS["exact"]
    for draft in ("suffix", f"model:{TARGET}", "medusa"):
        with pytest.raises(InvalidRequest, match=r"reads no states of the target: widen one of .*eagle, block"):
            widen_drafter(draft, str(TARGET), wide, way)
    with pytest.raises(InvalidRequest, match="no weights of its own"):
        widen_drafter("early-exit:2", str(TARGET), wide, way)
    draft = MAKERS["medusa"](tmp_path / "narrow")
    (wide / "medusa").mkdir()
    with pytest.raises(InvalidRequest, match="exists and is not this drafter"):
        widen_drafter(draft, str(TARGET), wide, way)
    (wide / "medusa").rmdir()
