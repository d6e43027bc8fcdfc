"""Run folders for the tests of `mmrl watch`."""

import json
import os
import socket


def append(path, *records, end="\n"):
    """Add records to a JSON Lines file as a run does; `end` cuts the last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "\n".join(json.dumps(record) for record in records)
    with path.open("a", encoding="utf-8") as file:
        file.write(lines + end)


def make_run(folder, steps=3, total=10, status=None, **numbers):
    """A run with so many steps, a second apart."""
    rows = [
        {"step": step, "time": 1000.0 + step, "reward/mean": step / total, **numbers} for step in range(1, steps + 1)
    ]
    append(folder / "metrics.jsonl", *rows)
    (folder / "config.yaml").write_text(f"trainer:\n  steps: {total}\nseed: {steps}\n")
    if status:
        (folder / "result.json").write_text(json.dumps({"status": status}))
    return folder


def lock(folder, process=None, host=None):
    """Mark a run as one that a process works on."""
    text = f"process {process or os.getpid()} on {host or socket.gethostname()} (since 2026-01-01 00:00:00)\n"
    (folder / "run.lock").write_text(text)
