"""Tools and a reward for the tests of `mmrl.agents.environments.tools`."""

import asyncio
import datetime
import sys

import numpy as np
from PIL import Image


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


def fail(text: str) -> str:
    """
    Fail with a text.

    Args:
        text: what to say.
    """
    raise ValueError(f"no {text}")


def give(kind: str):
    """
    Give something.

    Args:
        kind: what to give.
    """
    circle = {}
    circle["circle"] = circle
    wave = np.zeros((2, 3, 3), np.uint8)
    if kind == "exit":
        sys.exit(2)
    return {
        "date": {"day": datetime.date(2026, 1, 2)},
        "numbers": (np.array([1, 2]), {"half": np.float32(0.5)}),
        "table": np.eye(2),
        "floats": Image.new("F", (3, 2)),
        "album": [Image.new("RGB", (3, 2))] * 65,
        "pictures": [Image.new("RGB", (3, 2)), "a picture", {"n": 1}, wave],
        "generator": (n for n in range(3)),
        "keys": {(1, 2): 3},
        "circle": circle,
        "object": [object()],
        "long": "a" * 19_000 + "b" * 10_000 + "the end",
    }[kind]


def say(text: str) -> str:
    """
    Say something.

    Args:
        text: what to say.
    """
    return text


async def later(text: str) -> str:
    """
    Take a while.

    Args:
        text: what to say.
    """
    await asyncio.sleep(0)
    return f"later {text}"


def reward(task, answer):
    return float(str(task["answer"]) in answer)


def undescribed(a, b):
    return a
