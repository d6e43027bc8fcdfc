"""The run of the gui benchmark `long-run`: multi-turn episodes with an image a turn, in a grid without a browser.

It starts from a short cloning of an expert that errs, which the benchmark trains the first time: episodes end at the
goal, so they have between one and the most turns.
"""

from __future__ import annotations

from typing import Any

from mmrl.bench.harness import BenchOptions
from mmrl.bench.long_run import LongRun, compare_long_run


def long_run(options: BenchOptions) -> dict[str, Any]:
    """Run the comparison of this room."""
    return compare_long_run(turns_run(quick=options.quick), options)


def turns_run(*, quick: bool) -> LongRun:
    """GRPO over episodes; `quick` plays four of two turns a step."""
    tasks, samples, turns, cloning, batch = (2, 2, 2, 2, 2) if quick else (4, 8, 5, 30, 16)
    common: dict[str, Any] = {
        "environment": {
            "factory": "mmrl.agents.worlds.grid:GridWorld",
            "kwargs": {"size": 3, "max_steps": turns},
            "adapter": {"task_options": False},
            "workers": 2,
        },
        "conversation": {"system": "Walk. Answer with an action."},
        "actions": {"format": "tag", "on_parse_error": "noop"},
        "episode": {"max_turns": turns},
        "data": {"seeds": 4000},
        "sampler": {"max_new_tokens": 5},
    }
    build = {"family": "qwen3_vl", "patch_size": 14, "hidden": 64, "layers": 2, "vision_hidden": 64, "vision_depth": 1}
    clone = common | {
        "recipe": "agent_clone",
        "model": {
            "path": "{folder}/grid-model",
            "build": "mmrl.agents.worlds.models:build_model",
            "build_options": build | {"min_pixels": 3136, "max_pixels": 50176},
        },
        "random_actions": 0.5,
        "evaluation": {"at_start": False, "at_end": False},
        "trainer": {"steps": cloning, "tasks_per_step": batch, "samples_per_task": 1, "learning_rate": 3e-3},
    }
    return LongRun(
        common
        | {
            "recipe": "agent",
            "model": {"path": f"{{folder}}/grid-clone/checkpoints/step-{cloning:06d}/model"},
            "trainer": {"tasks_per_step": tasks, "samples_per_task": samples, "learning_rate": 1e-5},
        },
        prepare={"grid-clone": clone},
        notes=(f"{tasks} grids x {samples} episodes of 1 to {turns} turns with a picture each, one update a step",),
    )
