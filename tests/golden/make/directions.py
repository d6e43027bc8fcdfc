"""The prompt of Directional Preference Alignment, by the code of its README."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.make.peers import Clone, Made


def make(path: str) -> Made:
    clone = Clone(path, "RLHFlow/Directional-Preference-Alignment", "bb193188d05d6a6f53f0e2a2b2b8cddbb97ea6b1")
    degrees, prompts = [-45, -15, 0, 10, 30, 45], []
    text = (Path(path) / "README.md").read_text()
    lines = [line for line in text.splitlines() if re.match(r"(rad|weight_\w+|sys_prompt) *=", line)]
    for degree in degrees:
        names: dict[str, Any] = {"np": np, "degree": degree}
        exec("\n".join(lines), names)
        prompts.append(names["sys_prompt"])
    peer = {"program": clone.name, "calls": ["README.md"], "relative": 1e-15, "prompts": prompts}
    return "Directional Preference Alignment, arXiv 2402.18571", {"degrees": degrees}, [peer], clone
