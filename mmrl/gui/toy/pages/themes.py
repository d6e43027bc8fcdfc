"""Themes of the generated screens: colours, fonts, shapes and density by split."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    """Colours and shapes of a page."""

    name: str
    background: str
    surface: str
    text: str
    accent: str
    on_accent: str
    border: str
    font: str
    radius_px: int


SANS, LIBERATION, SERIF, MONO = "DejaVu Sans", "Liberation Sans", "Liberation Serif", "DejaVu Sans Mono"

THEMES: dict[str, tuple[Theme, ...]] = {
    "train": (
        Theme("paper", "#f6f6f4", "#ffffff", "#222222", "#1a66cc", "#ffffff", "#c8c8c8", LIBERATION, 4),
        Theme("night", "#1e2126", "#2b3038", "#e8e8e8", "#4f9dff", "#101418", "#495058", SANS, 6),
        Theme("mint", "#eaf5ef", "#ffffff", "#17352a", "#0b8457", "#ffffff", "#a9cdbd", LIBERATION, 12),
        Theme("plain", "#ffffff", "#eeeeee", "#000000", "#444444", "#ffffff", "#888888", SERIF, 0),
        Theme("rose", "#fff2f4", "#ffffff", "#40151d", "#c2274b", "#ffffff", "#e2b1bb", SANS, 8),
    ),
    "test": (
        Theme("slate", "#dfe5ea", "#f7f9fb", "#1c2a36", "#37546d", "#ffffff", "#9fb0bf", SANS, 3),
        Theme("amber", "#2a2118", "#382d22", "#f5e6cf", "#e39b2d", "#20180f", "#6a5640", LIBERATION, 10),
        Theme("terminal", "#0c140c", "#132013", "#9fe89f", "#2fae2f", "#041004", "#2d5a2d", MONO, 0),
        Theme("lilac", "#f3effa", "#ffffff", "#2c2140", "#7446c9", "#ffffff", "#c6b5e4", SERIF, 16),
    ),
}
"""Themes by split."""

DENSITIES: dict[str, tuple[int, int]] = {"compact": (11, 3), "normal": (13, 5), "roomy": (14, 8)}
"""Font size and padding in CSS pixels."""
