"""A tiny model for the grid worlds, whose tokenizer knows their words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mmrl.agents.worlds.grid import MISSION, MISSION_WITH_KEY
from mmrl.agents.worlds.layouts import MOVES


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random Qwen model that writes a move of `GridWorld` in three tokens; options of build_tiny_vlm."""
    from mmrl.vlm.tiny import build_tiny_vlm

    answers = [f"<action>{name}</action>" for name in MOVES]
    corpus = [MISSION, MISSION_WITH_KEY, "Walk. Answer with an action.", *answers]
    return build_tiny_vlm(path, corpus=corpus, tokens=("<action>", "</action>", *MOVES), **options)
