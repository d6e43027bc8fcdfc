"""The prompt for a vision-language model that verifies a plan, and the parser of its answer."""

from __future__ import annotations

from typing import Any

from robotics.flow3d.asking import read_json
from robotics.flow3d.check.verdict import Verdict

# The prompt is our own; the paper publishes none.
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
"""Characters quoted of an unusable answer."""


def read_verdict(answer: str) -> Verdict:
    """Parse a model's answer strictly; an unusable one is a rejection."""
    fields: Any
    try:
        fields = read_json(answer)
        problem = _problem(fields)
    except ValueError:
        fields, problem = {}, "no JSON"
    if problem:
        return Verdict(False, 0.0, f"unusable answer ({problem}): {answer.strip()[:SHOWN]!r}")
    ok, confidence = fields["matches_task"], float(fields["confidence"])
    reason = fields["object_moved"] if ok else fields["what_is_wrong"] or fields["object_moved"]
    return Verdict(ok, confidence if ok else 1.0 - confidence, reason or "no reason given")


def _problem(fields: object) -> str:
    if not isinstance(fields, dict):
        return "no JSON object"
    for key, kind in (("object_moved", str), ("matches_task", bool), ("what_is_wrong", str)):
        if not isinstance(fields.get(key), kind):
            return f"{key} is {fields.get(key)!r}"
    confidence = fields.get("confidence")
    if isinstance(confidence, bool) or not isinstance(confidence, int | float) or not 0 <= confidence <= 1:
        return f"confidence is {confidence!r}"
    return ""
