"""Scores of read texts by Flow-GRPO's text rendering reward, whose reader is replaced by one that knows the texts."""

from types import SimpleNamespace
from typing import Any

from tests.golden.make.flow_grpo import COMMIT
from tests.golden.make.peers import Clone, Made, package

TARGETS = ["Hello World", "OPEN", "New York", "a", "50% off", "Café №7"]
LINES: list[list[list[Any]]] = [
    [],
    [["Hello World", 0.99]],
    [["hello", 0.9], ["WORLD", 0.8]],
    [["WORLD", 0.9], ["Hello", 0.8]],
    [["He11o W0rld", 0.7]],
    [["the shop is 0PEN today", 0.9]],
    [["o p e n", 0.9]],
    [["OPEN", 0.0], ["NEW", 0.9]],
    [["NewY", 0.6], ["ork", 0.6]],
    [["B", 0.5]],
    [["50%", 0.9], ["0ff", 0.9]],
    [["CAFÉ №7", 0.9]],
    [["completely unrelated and much longer than the target", 0.9]],
]
"""What the reader finds in each picture: lines with their confidence."""


def make(path: str) -> Made:
    from Levenshtein import distance
    from PIL import Image

    clone = Clone(path, "yifan123/flow_grpo", COMMIT)
    scorer_class = clone.function("flow_grpo/ocr.py", "OcrScorer", PaddleOCR=Paddle, distance=distance, Image=Image)
    scorer = scorer_class()
    pictures = list(range(len(LINES)))
    scores = {target: scorer(pictures, [f'a sign "{target}"'] * len(LINES)) for target in TARGETS}
    peer = {
        "program": f"{clone.name}, {package('Levenshtein')}",
        "calls": ["flow_grpo/ocr.py:OcrScorer.__call__"],
        "relative": 1e-12,
        "scores": scores,
    }
    return "Flow-GRPO, arXiv 2505.05470, visual text rendering", {"targets": TARGETS, "lines": LINES}, [peer], clone


class Paddle(SimpleNamespace):
    """PaddleOCR that is given the number of a picture and finds the picture's lines."""

    def ocr(self, number: int, cls: bool) -> list[Any]:
        found = [[None, (text, confidence)] for text, confidence in LINES[number]]
        return [found or None]
