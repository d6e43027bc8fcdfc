"""Multimodal and embodied reinforcement learning on one policy-optimisation core.

    from mmrl import train

    run = train("grpo", model="smollm2", data=rows, reward=score, eval_data=held_out, steps=40)

Other packages are imported by name, such as `mmrl.core`; importing this one loads none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmrl.api.comparing import compare as compare
    from mmrl.api.result import Run as Run
    from mmrl.api.training import evaluate as evaluate
    from mmrl.api.training import train as train

_HOMES = {
    "Run": "mmrl.api.result",
    "compare": "mmrl.api.comparing",
    "evaluate": "mmrl.api.training",
    "train": "mmrl.api.training",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mmrl' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
