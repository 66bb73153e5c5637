"""The records of a benchmark that can be stopped: JSON lines in a file that several runs share, only ever appended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class RunFile:
    """The records of one run; `run` identifies the settings that records of one run share."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.run = path, run

    def add(self, **record: Any) -> None:
        """Append one line. It begins with a line break, which ends the incomplete line of a killed run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({"run": self.run} | record) + "\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """The run's records, in order; incomplete lines of killed runs are skipped."""
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else ():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if record["run"] == self.run:
                yield record
