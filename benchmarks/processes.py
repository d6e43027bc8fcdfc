"""Seconds of a step's stages in one training process and in two, on the cores of this machine.

    python -m benchmarks.processes [--steps 8] [--blocks 3] [--out FILE]

Runs of `mmrl train`, one thread a process, which take turns: PAPO on images of digits, and PPO on the tabletop, whose
rollout is mostly simulation in as many workers as there are cores. The first two steps do not count.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import print_each

ROOT = Path(__file__).parents[1]
WARMING = 2
STAGES = ("rollout", "update", "step")
MODEL = "{hidden: 128, layers: 4, vision_hidden: 64, vision_depth: 2, min_pixels: 3136, max_pixels: 12544}"
RUNS = {
    "papo": [
        *("configs/vlm/digits_papo.yaml", "data.build_options.count=400", "trainer.tasks_per_step=16"),
        *("model.build=mmrl.vlm.toy.digits:build_model", f"model.build_options={MODEL}"),
    ],
    "robot_ppo": [
        "configs/robotics/demo_robot_ppo.yaml",
        "model.path=''",
        "model.chunk=4",
        "trainer.tasks_per_step=32",
    ],
}
OWN = {"papo": {"model.path": "model", "data.path": "train.jsonl"}, "robot_ppo": {}}
"""Options that are paths in the folder of a recipe's runs."""
QUIET = ["eval_data={}", "evaluation.at_start=false", "evaluation.at_end=false", "evaluation.every=0"]
QUIET += ["tracking.quiet=true", "trainer.threads=1"]


def measure(name: str, processes: int, steps: int, folder: Path, block: int) -> dict[str, float]:
    """Median seconds of each stage in a run."""
    run = folder / f"{processes}-{block}"
    paths = [f"{option}={folder / file}" for option, file in OWN[name].items()]
    command = [sys.executable, "-m", "mmrl.cli", "train", *RUNS[name], *QUIET, *paths, f"output_dir={run}"]
    command += [f"trainer.steps={steps + WARMING}", "--processes", str(processes)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").open()][WARMING:]
    return {stage: statistics.median(line[f"time/{stage}"] for line in lines) for stage in STAGES}


def compare(name: str, steps: int, blocks: int) -> dict[str, Any]:
    """Medians over blocks of one process and two, and the speed-up of two processes."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[int, list[dict[str, float]]] = {1: [], 2: []}
        for block in range(blocks):
            for processes, runs in found.items():
                runs.append(measure(name, processes, steps, Path(folder), block))
    medians = {
        n: {stage: statistics.median(run[stage] for run in runs) for stage in STAGES} for n, runs in found.items()
    }
    faster = {stage: medians[1][stage] / medians[2][stage] for stage in STAGES}
    return {"one_s": medians[1], "two_s": medians[2], "faster": faster}


if __name__ == "__main__":
    print_each(compare, RUNS, steps=8, blocks=3)
