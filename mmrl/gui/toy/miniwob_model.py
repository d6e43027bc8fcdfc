"""A tiny language model that reads pages of MiniWoB++ as lists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mmrl.gui.browser.miniwob import miniwob_folder

ACTS = ("button", "checkbox", "radio", "choose", "generic", "listitem", "scroll", "tab", "type")
LISTS = re.compile(r"ui_utils\.(?:PEOPLE_NAMES|COUNTRIES|lorem_words) ?= ?\[(.*?)\]", re.DOTALL)
PHRASES = (
    "Click on the link ",
    "Click button ONE, then click button TWO.",
    "Switch between the tabs to find and click on the link ",
    "Expand the sections below, to find and click on the link ",
    "Select ",
    " and click Submit.",
    " from the list and click Submit.",
    "Enter the username ",
    " and the password ",
    " into the text fields and press login.",
    "Enter an item that starts with ",
    " and ends with ",
    "Scroll the textarea to the ",
    " of the text hit submit.",
)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random model that writes the number of a line in three or four tokens.

    Args:
        path: folder to write.
        options: of `build_tiny_generic`.
    """
    from mmrl.vlm.toy.tiny_generic import build_tiny_generic

    text = (miniwob_folder().parent / "common" / "ui_utils.js").read_text(encoding="utf-8")
    words = [word for found in LISTS.findall(text) for word in re.findall(r"[\"']([^\"']+)[\"']", found)]
    lines = [f"\n{number} {act} " for number in (1, 10) for act in ACTS]
    parts = ["There is no line ", " into 1 Tags: ", "Tab #1", "Section #1", "Submit", "Login", *lines]
    tokens = ("<action>", "</action>", " on", " off", "*", *PHRASES, *(f"{act} " for act in ACTS))
    return build_tiny_generic(path, corpus=[*PHRASES, *parts, *LETTERS, *words], tokens=tokens, **options)
