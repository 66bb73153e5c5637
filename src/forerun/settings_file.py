"""The settings file of `--config`: options of the command line in TOML.

It has one key for each option, with `-` or `_`, and a text, a number, true or false as its value. A command uses the
keys of its own options and ignores those of other commands.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from forerun.did_you_mean import nearest
from forerun.errors import InvalidRequest, UnknownSetting
from forerun.limits import INT64, shown


def read_settings(path: Path, known: Collection[str], others: Collection[str] = ()) -> dict[str, Any]:
    """The values of a file for the options `known`, by their names with underscores.

    `others` are options of other commands. Raises UnknownSetting for any other key, InvalidRequest for a file that
    cannot be read and for a value that is not a text, a number, true or false.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidRequest("config", f"{path} cannot be read ({error.strerror}): name a TOML file") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("config", f"{path} is not TOML in UTF-8: {error}") from error
    names = sorted({*known, *others})
    settings = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in names:
            raise UnknownSetting(str(path), key, nearest(name, names), names)
        if not isinstance(value, str | int | float) or (isinstance(value, int) and abs(value) > INT64):
            raise InvalidRequest("config", f"{path}: {key} is {shown(value)}: use a text, a number, true or false")
        if name in known:
            settings[name] = value if isinstance(value, bool) else str(value)
    return settings


def written_settings(values: Mapping[str, str | int | float | bool], heading: str) -> str:
    """The text of a settings file with these values, after `heading` as a comment."""
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    for name, value in values.items():
        in_toml = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the only difference from JSON
        lines.append(f"{name} = {in_toml}")
    return "\n".join(lines) + "\n"
