"""The recipe of the bundled heads: its figures are what they say, and its cards name commands that there are."""

import itertools
from pathlib import Path

import pytest
import typer
from recipes.stdlib.heads import HEADS
from recipes.stdlib.judge import TIMED_DEPTHS, Acceptance, DrafterFigures, figures_table, write_records

from forerun.cli import app
from forerun.draft.auto import RECORD, DrafterRecord
from forerun.models.bundled import BUNDLED_HEADS, FOLDER


def test_tokens_per_round_are_the_expected_length_of_what_is_accepted() -> None:
    rates = (0.5, 0.25, 0.8)
    expected = 0.0
    for accepted in itertools.product((True, False), repeat=3):
        chance = 1.0
        for rate, each in zip(rates, accepted, strict=True):
            chance *= rate if each else 1 - rate
        expected += chance * (1 + sum(itertools.accumulate(accepted, lambda a, b: a and b)))
    found = Acceptance.of(rates, 1.2)
    assert found.tokens_per_round[:2] == (1.5, 1.625)
    assert found.tokens_per_round[1] + 0.5 * 0.25 * 0.8 == pytest.approx(expected)
    assert found.tokens_per_round[2] == 1.2  # counted


def test_the_predicted_speedup_uses_at_most_the_measured_tokens_per_round() -> None:
    rates = {"0.0": Acceptance.of((0.9,) * 4, 4.0), "1.0": Acceptance.of((0.9,) * 4, 1.2)}
    figures = DrafterFigures("suffix", 4, rates, (1.0, 1.1, 1.2, 1.3))
    assert figures.speed_up == 1.2
    assert "\u00d71.20" in figures_table({"suffix": figures})
    assert DrafterFigures("suffix", 4, rates).speed_up is None
    assert len(TIMED_DEPTHS) == 4


def test_there_are_records_as_soon_as_rounds_were_timed(tmp_path: Path) -> None:
    (tmp_path / "target").symlink_to(FOLDER / "stdlib" / "target")
    for name in ("draft", "early-exit"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    rates = {t: Acceptance.of((0.5, 0.5), 1.8) for t in ("0.0", "1.0")}
    untimed = DrafterFigures("model:x", 2, rates)
    write_records({"draft": untimed}, tmp_path)
    assert not (tmp_path / "draft" / RECORD).exists()
    write_records({"draft": untimed, "early-exit": DrafterFigures("early-exit:2:x", 2, rates, (1.25, 1.5))}, tmp_path)
    draft, record = (DrafterRecord.read(tmp_path / name) for name in ("draft", "early-exit"))
    assert draft is not None
    assert draft.speed_up is None
    assert record is not None
    assert (record.drafter, record.argument) == ("early-exit", "2:")
    assert record.speed_up == pytest.approx(1.2)


@pytest.mark.parametrize("name", HEADS)
def test_the_card_has_the_command_of_the_table_and_the_command_has_these_options(name: str) -> None:
    head = HEADS[name]
    assert head.command in (BUNDLED_HEADS[f"stdlib-{name}"] / "README.md").read_text("utf-8")
    known = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    options = {spelling for option in known.params for spelling in option.opts}
    assert {word for word in head.command.split() if word.startswith("--")} <= options
