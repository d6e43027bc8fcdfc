"""The run of the vlm benchmark `long-run`: GRPO on images of one to three digits, answers of many lengths.

The model is random, so an answer ends by chance: its length is geometric, up to the limit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmrl.bench.harness import BenchOptions
from mmrl.bench.long_run import LongRun, compare_long_run


def long_run(options: BenchOptions) -> dict[str, Any]:
    """Run the comparison of this room."""
    return compare_long_run(answers_run(quick=options.quick, model=options.model), options)


def answers_run(*, quick: bool, model: Path | None = None) -> LongRun:
    """GRPO with a frozen reference, of a model folder or of random weights; `quick` draws four short answers a step."""
    tasks, samples, tokens = (2, 2, 8) if quick else (8, 8, 64)
    sizes = {"hidden": 64, "layers": 2, "vision_hidden": 64, "vision_depth": 1, "min_pixels": 3136, "max_pixels": 25088}
    random = {"path": "{folder}/digits-model", "build": "mmrl.vlm.digits:build_model", "build_options": sizes}
    return LongRun(
        {
            "recipe": "vlm",
            "model": random if model is None else {"path": str(model)},
            "data": {
                "path": "{folder}/digits/questions.jsonl",
                "build": "mmrl.vlm.digits:build_questions",
                "build_options": {"count": 64, "hint_share": 0.5},
            },
            "rewards": [
                {"name": "checksum", "function": "mmrl.vlm.bench.workload:checksum_reward", "isolate": False},
            ],
            "accuracy_reward": "checksum",
            "sampler": {"max_new_tokens": tokens},
            "objective": {"preset": "grpo", "kl": {"coef": 0.02}},
            "trainer": {"tasks_per_step": tasks, "samples_per_task": samples, "learning_rate": 1e-5},
        },
        notes=(
            f"{tasks} questions x {samples} answers of 1 to {tokens} tokens, pictures of 1 to 3 digits, "
            "one update a step",
        ),
    )
