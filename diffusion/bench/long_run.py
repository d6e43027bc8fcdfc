"""The run of the diffusion benchmark `long-run`: AWM on a tiny Stable Diffusion 3 of the digits' sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmrl.bench.harness import BenchOptions
from mmrl.bench.long_run import LongRun, compare_long_run


def long_run(options: BenchOptions) -> dict[str, Any]:
    """Run the comparison of this room."""
    return compare_long_run(images_run(quick=options.quick, model=options.model), options)


def images_run(*, quick: bool, model: Path | None = None) -> LongRun:
    """AWM of a pipeline folder or of random weights, rewarded for the size of the compressed picture."""
    tasks, samples = (2, 2) if quick else (5, 2)
    random = {"path": "{folder}/digits-pipeline", "build": "diffusion.digits:build_pipeline", "max_sequence_length": 1}
    return LongRun(
        {
            "recipe": "awm",
            "model": random if model is None else {"path": str(model)},
            "data": {"path": "{folder}/digits-prompts.jsonl", "build": "diffusion.digits:build_prompts"},
            "rewards": [{"name": "jpeg_incompressibility"}],
            "heldout_rewards": [{"name": "jpeg_compressibility"}],
            "trainer": {"tasks_per_step": tasks, "samples_per_task": samples, "learning_rate": 3e-4},
        },
        notes=(f"{tasks} prompts x {samples} pictures; all tensors of all steps have the same sizes",),
    )
