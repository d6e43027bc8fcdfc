"""The question that a vision-language model is asked about a plan, and how its answer is read.

The wording is our own; the paper publishes none.
"""

from __future__ import annotations

from typing import Any

from robotics.flow3d.asking import read_json
from robotics.flow3d.check.verdict import Verdict

SYSTEM = (
    "You check the plan of a robot before it moves. The first image shows the scene as it is. The second image is a "
    "drawing of the scene after the plan, from the same camera: only the object that the robot handles was moved, "
    "and the drawing may have small holes and blurred spots."
)
QUESTION = (
    "Task: {instruction}\n"
    "Does the second image show this task completed? Answer with one JSON object and nothing else: "
    '{{"object_moved": "which object moved, and where to", "matches_task": true or false, '
    '"confidence": a number from 0 to 1, "what_is_wrong": "empty if nothing"}}'
)
SHOWN = 160
"""Characters of an unusable answer that a verdict quotes."""


def question(instruction: str) -> str:
    """What is asked after the two pictures."""
    return QUESTION.format(instruction=instruction)


def read_verdict(answer: str) -> Verdict:
    """Read a model's answer strictly."""
    text = answer.strip()
    try:
        said: Any = read_json(answer)
    except ValueError:
        return _unusable("no JSON", text)
    problem = _problem(said)
    if problem:
        return _unusable(problem, text)
    ok, confidence = said["matches_task"], float(said["confidence"])
    reason = said["object_moved"] if ok else said["what_is_wrong"] or said["object_moved"]
    return Verdict(ok, confidence if ok else 1.0 - confidence, reason or "no reason given")


def _problem(said: object) -> str:
    if not isinstance(said, dict):
        return "no JSON object"
    for key, kind in (("object_moved", str), ("matches_task", bool), ("what_is_wrong", str)):
        if not isinstance(said.get(key), kind):
            return f"{key} is {said.get(key)!r}"
    confidence = said.get("confidence")
    if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 <= confidence <= 1:
        return f"confidence is {confidence!r}"
    return ""


def _unusable(problem: str, text: str) -> Verdict:
    return Verdict(False, 0.0, f"unusable answer ({problem}): {text[:SHOWN]!r}")
