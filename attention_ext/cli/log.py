"""The log of a run, ``log.jsonl``: one JSON object on each line, whole lines only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .runs import write_text

LOG_FILE = "log.jsonl"


class RunLog:
    """Appends rows to a run's log and remembers all of them.

    Args:
        folder: of the run.
        step: rows of later steps are dropped: a run may go on for a while behind the checkpoint
            from which it is resumed.
    """

    def __init__(self, folder: Path, step: int = 0) -> None:
        path = folder / LOG_FILE
        self.rows = [row for row in read_log(folder) if row["step"] <= step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._path = path

    def add(self, **row: Any) -> None:
        """Appends a row; ``step`` and ``elapsed`` belong to each."""
        self.rows.append(row)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's log, without a last line that was cut off; none without a log."""
    path = folder / LOG_FILE
    rows = []
    for line in path.read_text("utf-8").splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows
