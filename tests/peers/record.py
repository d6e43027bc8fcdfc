"""The recorded comparison with other trainers, as a table."""

import json
from pathlib import Path
from typing import Any

from mmrl.cli.listings import markdown_table

RECORD = Path(__file__).with_name("record.json")


def read_record() -> dict[str, Any]:
    """What the last `make test-peers` found."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def table(record: dict[str, Any]) -> str:
    """A line for each row, a column for each package: how far they are apart, or by which convention they differ."""
    packages = [program.split()[0] for program in record["programs"]]

    def cell(peers: dict[str, Any], package: str) -> str:
        found = peers.get(package)
        if found is None:
            return ""
        return found.get("differs") or (f"{found['apart']:.0e}" if found["apart"] else "equal")

    lines = [(f"`{name}`", *(cell(peers, package) for package in packages)) for name, peers in record["rows"].items()]
    return markdown_table(("objective", *record["programs"]), lines)
