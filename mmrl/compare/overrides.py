"""Values of an experiment file as the command line takes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def dotted_overrides(values: Mapping[str, Any], output_dir: Path, prefix: str = "") -> list[str]:
    """Command-line form of nested values."""
    found = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found += dotted_overrides(value, output_dir, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}={_yaml_value(value, output_dir)}")
    return found


def effective_overrides(overrides: Sequence[str]) -> list[str]:
    """Overrides without those that a later one of the same key takes back, in the order in which they count."""
    last: dict[str, str] = {}
    for text in overrides:
        key = text.partition("=")[0]
        last.pop(key, None)
        last[key] = text
    return list(last.values())


def _yaml_value(value: Any, output_dir: Path) -> str:
    from omegaconf import OmegaConf

    if isinstance(value, str):
        text = value.replace("{output_dir}", str(output_dir))
        try:
            plain = OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text}"])) == {"x": text}
        except Exception:
            plain = False  # not YAML at all; quoting makes it a text
        return text if plain else json.dumps(text, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(_yaml_value(item, output_dir) for item in value) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
