"""The files that a tuning leaves in its folder: what was found, the settings that follow from it, and a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from forerun.commands.destination import Destination
from forerun.settings_file import written_settings
from forerun.tune.html import html_page
from forerun.tune.report import TuneReport

JSON, SETTINGS, PAGE = "tune.json", "forerun.toml", "tune.html"


def write_files(report: TuneReport, folder: Path) -> Sequence[Path]:
    """Write them all, each as a whole; their paths. There are no settings where nothing was measured."""
    contents = {JSON: json.dumps(report.as_object(), indent=1) + "\n", PAGE: html_page(report)}
    if report.pick is not None:
        contents[SETTINGS] = settings_of(report)
    for name, content in contents.items():
        Destination("out", folder / name).write(content)
    return [folder / name for name in contents]


def settings_of(report: TuneReport) -> str:
    """The settings file: the model as it was given, and what was fastest at the first batch size and temperature."""
    pick = report.pick
    assert pick is not None, "something was measured"
    values = {"model": report.about["model"]["given_as"], **report.model_options}
    at = f"at batch {pick.batch}, temperature {pick.temperature:g}"
    if pick.draft is None:
        return written_settings(
            values, f"Written by forerun tune: plain decoding was fastest {at}.\n--config FILE reads it."
        )
    values |= {"draft": pick.draft, "depth": pick.shown_depth, "verification": "coupled"}
    said = (
        f"Written by forerun tune: {pick.speed_up:.2f} times as fast as plain decoding {at}.\n--config FILE reads it."
    )
    return written_settings(values, said)
