"""The records of a benchmark that can be stopped: JSON lines in a file that several runs share, only ever appended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class RunFile:
    """The records of one run; `run` names what must be equal for records to belong together."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run

    def add(self, **record: Any) -> None:
        """One line, at once. It begins with a line break, which ends the half line of a run that was killed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({"run": self.run} | record) + "\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """The run's records, in order; the half line of a run that was killed is none."""
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else ():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if record["run"] == self.run:
                yield record
