"""A tiny model for the worlds of pictures, whose tokenizer knows their words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmrl.agents.worlds.grid import MISSION, MISSION_WITH_KEY
from mmrl.agents.worlds.layouts import MOVES


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random Qwen model that writes a move of `PictureGrid` in three tokens.

    Args:
        path: model folder to write.
        options: see `mmrl.vlm.tiny.build_tiny_vlm`.

    Returns:
        The folder.
    """
    from mmrl.vlm.tiny import build_tiny_vlm

    answers = [f"<action>{name}</action>" for name in MOVES]
    corpus = [MISSION, MISSION_WITH_KEY, "Walk. Answer with an action.", *answers]
    return build_tiny_vlm(path, corpus=corpus, tokens=("<action>", "</action>", *MOVES), **options)
