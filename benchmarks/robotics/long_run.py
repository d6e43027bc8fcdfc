"""The run of the sim benchmark `long-run`: GRPO of a small policy on `reach`, whose episodes end at success.

It starts from a short behaviour cloning, which the benchmark trains the first time, so that some episodes succeed and
episodes differ in length.
"""

from __future__ import annotations

from typing import Any

from benchmarks.harness import BenchOptions
from benchmarks.long_run import LongRun, compare_long_run


def long_run(options: BenchOptions) -> dict[str, Any]:
    """Run the comparison of this room."""
    return compare_long_run(episodes_run(quick=options.quick), options)


def episodes_run(*, quick: bool) -> LongRun:
    """GRPO with success as the reward; `quick` plays four short episodes a step."""
    tasks, samples, horizon = (2, 2, 8) if quick else (6, 6, 24)
    cloning, demonstrations, batch = (2, 2, 4) if quick else (100, 24, 64)
    sim = {"kind": "tabletop", "tasks": ["reach"], "horizon": horizon}
    model = {"kind": "small", "chunk": 4, "options": {"encoder": {"layers": 1}}}
    clone = {
        "recipe": "robot_clone",
        "sim": sim,
        "model": model,
        "demonstrations": {
            "path": "{folder}/reach-demos",
            "build": "robotics.toy.tabletop_demos:build_demonstrations",
            "build_options": {"tasks": ["reach"], "episodes": demonstrations, "noise": 0.3},
        },
        "evaluation": {"at_start": False, "at_end": False},
        "trainer": {"steps": cloning, "tasks_per_step": batch, "learning_rate": 1e-3},
    }
    return LongRun(
        {
            "recipe": "robot_grpo",
            "sim": sim,
            "model": {"path": f"{{folder}}/reach-clone/checkpoints/step-{cloning:06d}/model"},
            "data": {"tasks": ["reach"], "layouts": 400},
            "acting": {"temperature": 0.5},
            "trainer": {"tasks_per_step": tasks, "samples_per_task": samples, "learning_rate": 1e-4},
        },
        prepare={"reach-clone": clone},
        notes=(
            f"{tasks} initial states x {samples} episodes of at most {horizon} control steps, pictures of 64 pixels, "
            "one update a step",
        ),
    )
