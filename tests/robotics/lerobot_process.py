"""Runs the test modules that need lerobot in its interpreter."""

import os
import subprocess
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def run_peer(python, module, *arguments):
    """Run a module of the tests as a program, offline."""
    command = [python, "-m", module.__name__, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
