"""Record the plans of released models for the table of docs/scale.md: `python scripts/plans.py [MODEL ...]`.

It takes minutes, so `scripts/docs.py` only writes the table from what is recorded here.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.config import load_run
from mmrl.files import write_atomically
from mmrl.recipes import plan_of
from mmrl.training.plan import GB

RECORD = Path(__file__).with_name("plans.json")
GPUS = (1, 8, 64)
COMMON = {"micro_batch": 1, "mixed_precision": "bf16"}
LANGUAGE = {
    "recipe": "vlm",
    "model": {"dtype": "bfloat16", "gradient_checkpointing": True, "lora": {"enabled": True}},
    "data": {"path": "none.jsonl"},
    "rewards": [{"name": "exact"}],
    "sampler": {"max_new_tokens": 1024, "batch_rows": 64},
    "trainer": {**COMMON, "tasks_per_step": 64, "samples_per_task": 8, "micro_batch": 4},
}
FULL = {
    **LANGUAGE,
    "model": {"gradient_checkpointing": True, "freeze_vision": True},
    "trainer": {**LANGUAGE["trainer"], "sharding": "fsdp2", "gathered": "bf16"},  # type: ignore[dict-item]
}
IMAGES = {
    "recipe": "flow_grpo_fast",
    "model": {
        "dtype": "bfloat16",
        "gradient_checkpointing": True,
        "free_text_encoders": True,
        "height": 512,
        "width": 512,
    },
    "data": {"path": "none.jsonl"},
    "eval_data": {"held_out": {"path": "none.jsonl"}},
    "rewards": [{"name": "pickscore"}],
    "heldout_rewards": [{"name": "jpeg_incompressibility"}],
    "sampler": {"batch_rows": 8},
    "trainer": {**COMMON, "tasks_per_step": 64, "samples_per_task": 8},
}
VIDEOS = {
    **IMAGES,
    "model": {**IMAGES["model"], "height": 480, "width": 832, "frames": 33},  # type: ignore[dict-item]
    "sampler": {"batch_rows": 2},
}
ROBOT = {
    "recipe": "robot_grpo",
    "sim": {"kind": "libero", "image_size": 224, "horizon": 220, "workers": 16},
    "model": {"kind": "openvla", "options": {"dtype": "bfloat16", "gradient_checkpointing": True}},
    "eval_data": {"held_out": {"split": "held_out"}},
    "trainer": {**COMMON, "tasks_per_step": 64, "samples_per_task": 8, "learning_rate": 1e-5},
}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": (LANGUAGE, "LoRA"),
    "Qwen/Qwen2.5-VL-7B-Instruct": (LANGUAGE, "LoRA"),
    "Qwen/Qwen3-VL-8B-Instruct": (LANGUAGE, "LoRA"),
    "Qwen/Qwen2.5-VL-3B-Instruct in full": (FULL, "all but vision, FSDP2"),
    "Qwen/Qwen2.5-VL-7B-Instruct in full": (FULL, "all but vision, FSDP2"),
    "Qwen/Qwen3-VL-8B-Instruct in full": (FULL, "all but vision, FSDP2"),
    "stabilityai/stable-diffusion-3.5-medium": (IMAGES, "LoRA, 512 px"),
    "stabilityai/stable-diffusion-3.5-large": (IMAGES, "LoRA, 512 px"),
    "black-forest-labs/FLUX.1-dev": (IMAGES, "LoRA, 512 px"),
    "Qwen/Qwen-Image": (IMAGES, "LoRA, 512 px"),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (VIDEOS, "LoRA, 33 frames of 480 x 832"),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": (VIDEOS, "LoRA, 33 frames of 480 x 832"),
    "openvla/openvla-7b": (ROBOT, "all weights of Llama, bfloat16"),
}
"""A run of each model, whose name begins with the hub id, and what is trained."""


def main(names: Sequence[str]) -> None:
    """Record the plans of some models, of all by default."""
    for name in names or MODELS:
        found = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
        found[name] = recorded(name)
        ordered = {name: found[name] for name in MODELS if name in found}
        write_atomically(RECORD, json.dumps(ordered, indent=1) + "\n")


def recorded(name: str) -> dict[str, Any]:
    """Peak in GB on each number of GPUs; FSDP2 takes more than one."""
    values, trained = MODELS[name]
    numbers = [None if values is FULL and gpus == 1 else gpus for gpus in GPUS]
    key = "model.options.folder" if values is ROBOT else "model.path"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(json.dumps({"output_dir": folder, **values}), encoding="utf-8")  # JSON is YAML
        entry, config = load_run(file, [f"{key}={name.split()[0]}"])
    plan = plan_of(entry)(config)
    return {"trained": trained, "gb": [gpus and round(plan.peak(gpus) / GB, 1) for gpus in numbers]}


if __name__ == "__main__":
    logging.disable()
    main(sys.argv[1:])
