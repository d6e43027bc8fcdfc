"""Options of generated screens and their instructions."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, only_with
from mmrl.gui.grounding.coords import Size
from mmrl.gui.toy.pages.composer import SPLITS
from mmrl.gui.toy.pages.instructions import KINDS
from mmrl.gui.toy.pages.launcher import LauncherSettings
from mmrl.gui.toy.pages.vocabulary import LANGUAGES
from mmrl.gui.toy.pages.worked import WorkedSettings

SHEET_WH = (1024, 768)
"""Home screens are drawn together, as many as fit into a window of this many pixels."""


@dataclass(frozen=True)
class ScreenSettings:
    """Appearance and instructions of screens."""

    split: str = choice("train", SPLITS)
    """train; layouts: words of train on templates and themes of test; test: shares nothing with train."""
    layout: str = choice("", ("", "launcher"))
    """launcher: home screens of tiles without text; empty: the templates of the split."""
    launcher: LauncherSettings = only_with(field(default_factory=LauncherSettings), layout="launcher")
    """Contents of home screens."""
    width_px: int = bounded(448, at_least=64, at_most=4096)
    """Columns of the image; 160 or more for the templates of the splits."""
    height_px: int = bounded(336, at_least=64, at_most=4096)
    """Rows of the image; 120 or more for the templates of the splits."""
    scales: tuple[float, ...] = bounded((1.0, 0.875, 1.4), at_least=0.5, at_most=4)
    """Device pixels of a CSS pixel; one is chosen for each page."""
    languages: tuple[str, ...] = choice(LANGUAGES, LANGUAGES)
    """Languages of labels and instructions; one is chosen for each page."""
    per_screen: int = bounded(3, at_least=1)
    """Maximum number of instructions per screen, each for a different control."""
    kinds: tuple[str, ...] = choice(KINDS, KINDS)
    """Kinds of instructions."""
    all_boxes: bool = False
    """Keep ambiguous instructions, with all boxes as the target; they are omitted otherwise."""
    worked: WorkedSettings | None = None
    """Add worked answers for supervised runs, as the columns `answers` (pixels) and `labels` (names); {} is the right
    answer alone. Empty: none."""

    def validate(self) -> None:
        """Refuse options without effect or without instructions; raises UserError."""
        if self.layout == "launcher":
            for scale in self.scales:
                self.launcher.grid(self.page_wh(scale))
            if set(self.kinds) == {"relation"}:
                raise UserError("screens.kinds is relation only, and the tiles of the launcher have none; add name")
        elif self.width_px < 160 or self.height_px < 120:
            size = f"{self.width_px} x {self.height_px}"
            raise UserError(f"screens of {size} pixels are for layout=launcher; other layouts need at least 160 x 120")

    def page_wh(self, scale: float) -> Size:
        """(width, height) of a page in CSS pixels."""
        return round(self.width_px / scale), round(self.height_px / scale)

    @property
    def sheet(self) -> tuple[int, int]:
        """Columns and rows of screens that share a window, which leaves pixels unchanged only at an integer scale."""
        if self.layout != "launcher" or len(self.scales) > 1 or not float(self.scales[0]).is_integer():
            return 1, 1
        return max(1, SHEET_WH[0] // self.width_px), max(1, SHEET_WH[1] // self.height_px)
