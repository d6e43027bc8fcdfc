"""What a worker of a simulator says, checked on arrival: it runs code of others and may say anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmrl.workers.failures import WorkerFailure, one_line
from mmrl.workers.wire import Message
from mmrl.workers.worker import Request

LARGEST = {"action_size": 1 << 16, "state_size": 1 << 24, "horizon": 1 << 31, "image_size": 1 << 14}


def problem_in_hello(hello: Mapping[str, Any]) -> str:
    """What is wrong with what a worker says of its environment; empty where nothing is."""
    sizes = hello.get("image_size")
    numbers = {name: hello.get(name) for name in ("action_size", "state_size", "horizon")}
    numbers |= {f"image_size[{place}]": size for place, size in enumerate(sizes if isinstance(sizes, list) else ())}
    for name, number in numbers.items():
        least, most = int(name != "state_size"), LARGEST[name.partition("[")[0]]
        if type(number) is not int or not least <= number <= most:
            return f"{name} is {number!r:.80}; expected a whole number from {least} to {most}"
    if sizes is not None and (not isinstance(sizes, list) or len(sizes) != 2):
        return f"image_size is {sizes!r:.80}; expected two numbers"
    named = {name: hello.get(name) for name in ("tasks", "layouts", "describe")}
    for name, value in named.items():
        if not isinstance(value, dict):
            return f"{name} is {value!r:.80}; expected a dict"
    if not all(isinstance(text, str) for text in hello["tasks"].values()):
        return f"tasks is {hello['tasks']!r:.80}; expected the instruction of each task"
    if not all(count is None or (type(count) is int and count >= 0) for count in hello["layouts"].values()):
        return f"layouts is {hello['layouts']!r:.80}; expected a number or None for each split"
    views = hello.get("views", [])
    if not isinstance(views, list) or not all(isinstance(name, str) for name in views):
        return f"views is {views!r:.80}; expected the names of further cameras"
    bounds = hello.get("action_bounds", [])
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
    """Find out what is wrong with the arrays of an answer.

    Args:
        request: that it answers.
        answer: of the worker.
        state_size: S.
        action_size: A.
        image_size: (H, W) of the image that the answer has to hold; None where it need not.
        frame_size: (H, W) of recorded frames.
        views: V, images of further cameras that an observation has to hold.
        past: P, control steps before that the observation of an episode that goes on has to hold as well.
    """
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
    """Numbers that are not finite come again from the same layout, so its process is kept and nothing is retried."""
    if "diverged" in answer.fields:
        return WorkerFailure("diverged", one_line(str(answer.fields["diverged"])))
    for name in ("state", "past_state", "rewards", "action"):
        if name in answer.arrays and not np.isfinite(answer.arrays[name]).all():
            return WorkerFailure("diverged", f"{name} is not finite")
    return None
