"""Checks of a simulator worker's replies: it runs code of others and may send anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmrl.workers.failures import WorkerFailure, one_line
from mmrl.workers.wire import Message
from mmrl.workers.worker import Request

LARGEST = {"action_size": 1 << 16, "state_size": 1 << 24, "horizon": 1 << 31, "image_size": 1 << 14}


def problem_in_hello(hello: Mapping[str, Any]) -> str:
    """What is wrong with a worker's description of its environment; empty where nothing is."""
    sizes, views, bounds = hello.get("image_size"), hello.get("views", []), hello.get("action_bounds", [])
    if sizes is not None and (not isinstance(sizes, list) or len(sizes) != 2):
        return f"image_size is {sizes!r:.80}; expected two numbers"
    numbers = {name: hello.get(name) for name in ("action_size", "state_size", "horizon")}
    numbers |= {f"image_size[{index}]": size for index, size in enumerate(sizes or ())}
    for name, number in numbers.items():
        least, most = int(name != "state_size"), LARGEST[name.partition("[")[0]]
        if type(number) is not int or not least <= number <= most:
            return f"{name} is {number!r:.80}; expected a whole number from {least} to {most}"
    for name in ("tasks", "layouts", "describe"):
        if not isinstance(hello.get(name), dict):
            return f"{name} is {hello.get(name)!r:.80}; expected a dict"
    if not all(isinstance(text, str) for text in hello["tasks"].values()):
        return f"tasks is {hello['tasks']!r:.80}; expected the instruction of each task"
    if not all(count is None or (type(count) is int and count >= 0) for count in hello["layouts"].values()):
        return f"layouts is {hello['layouts']!r:.80}; expected a number or None for each split"
    if not isinstance(views, list) or not all(isinstance(name, str) for name in views):
        return f"views is {views!r:.80}; expected the names of further cameras"
    if bounds and np.shape(bounds) != (2, hello["action_size"]):
        return f"action_bounds is {bounds!r:.80}; expected two lists of {hello['action_size']} numbers"
    missing = [name for name in ("python", "numpy", "expert") if name not in hello]
    return f"{missing[0]} is missing" if missing else ""


def misshapen(
    request: Request,
    answer: Message,
    state_size: int,
    action_size: int,
    image_size: tuple[int, int] | None,
    frame_size: tuple[int, int] | None,
    views: int = 0,
    past: int = 0,
) -> WorkerFailure | None:
    """What is wrong with the shapes of an answer, if anything: S, A, (H, W) of images and frames, V and P."""
    kind = request.fields["kind"]
    expected: dict[str, tuple[int, ...]] = {}
    if "diverged" in answer.fields:
        return None
    if kind in ("reset", "step_chunk"):
        expected["state"] = (state_size,)
        if views and image_size is not None:
            expected["views"] = (views, *image_size, 3)
    if kind == "expert":
        expected["action"] = (action_size,)
    elif image_size is not None:
        expected["image"] = (*image_size, 3)
    if kind == "step_chunk":
        steps, most = len(answer.arrays.get("rewards", ())), len(request.arrays["actions"])
        expected |= {"flags": (3,), "rewards": (min(max(1, steps), most),)}
        if request.fields["record"]:
            expected["frames"] = (steps, *(frame_size or ()), 3)
    if past and not (kind == "step_chunk" and np.any(answer.arrays.get("flags", ())[1:])):
        seen = ("state", "image", "views") if kind in ("reset", "step_chunk") else ()
        expected |= {f"past_{name}": (past, *expected[name]) for name in seen if name in expected}
    for name, shape in expected.items():
        came = answer.arrays[name].shape if name in answer.arrays else None
        if came != shape:
            return WorkerFailure("raised", f"{name} has the shape {came}; expected {shape}")
    return None


def divergence(answer: Message) -> WorkerFailure | None:
    """Find numbers that are not finite: they would come again from the same layout, so nothing is retried."""
    if "diverged" in answer.fields:
        return WorkerFailure("diverged", one_line(str(answer.fields["diverged"])))
    for name in ("state", "past_state", "rewards", "action"):
        if name in answer.arrays and not np.isfinite(answer.arrays[name]).all():
            return WorkerFailure("diverged", f"{name} is not finite")
    return None
