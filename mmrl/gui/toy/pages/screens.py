"""Screens drawn by Chromium from generated pages, with exact boxes and instructions.

    with WebScreens(split="train") as screens:
        for sample in screens.samples(100, seed=0):
            sample.image, sample.instruction, sample.target

Equal settings and seeds give equal pixels on one machine with one browser and its fonts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice, only_with
from mmrl.gui.browser.browser import Browser, BrowserFailure, BrowserSettings
from mmrl.gui.browser.page import Element, GuardedPage, read_elements
from mmrl.gui.browser.page_env import settings_from
from mmrl.gui.grounding.coords import Box, Size
from mmrl.gui.grounding.samples import AnyOf, GroundingSample
from mmrl.gui.toy.pages.composer import SPLITS, PageModel, compose, render
from mmrl.gui.toy.pages.instructions import KINDS, LISTING, Instruction, instructions_for, listing_for
from mmrl.gui.toy.pages.launcher import LauncherPage, LauncherSettings, LauncherSheet, compose_launcher
from mmrl.gui.toy.pages.vocabulary import LANGUAGES, Function, functions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


SHEET_WH = (1024, 768)
"""Home screens are drawn together, as many as fit in a window of this many pixels."""


@dataclass(frozen=True)
class ScreenSettings:
    """Appearance and instructions of screens."""

    split: str = choice("train", SPLITS)
    """train; layouts: training words on test templates and themes; test: shares nothing with train."""
    layout: str = choice("", ("", "launcher"))
    """launcher: home screens with tiles without text. Default: the templates of the split."""
    launcher: LauncherSettings = only_with(field(default_factory=LauncherSettings), layout="launcher")
    """Contents of home screens."""
    width_px: int = bounded(448, at_least=64, at_most=4096)
    """Image width in pixels; at least 160 for the templates of the splits."""
    height_px: int = bounded(336, at_least=64, at_most=4096)
    """Image height in pixels; at least 120 for the templates of the splits."""
    scales: tuple[float, ...] = bounded((1.0, 0.875, 1.4), at_least=0.5, at_most=4)
    """Device pixels per CSS pixel; one value is chosen per page."""
    languages: tuple[str, ...] = choice(LANGUAGES, LANGUAGES)
    """Languages of labels and instructions; one is chosen per page."""
    per_screen: int = bounded(3, at_least=1)
    """Maximum number of instructions per screen, each for a different control."""
    kinds: tuple[str, ...] = choice(KINDS, KINDS)
    """Kinds of instructions."""
    all_boxes: bool = False
    """Keep ambiguous instructions, with all boxes as the target; otherwise they are omitted."""
    worked: WorkedSettings | None = None
    """Add worked answers for supervised runs, in the columns `answers` (pixels) and `labels` (names). {} adds only the
    correct answer; null adds none."""

    def validate(self) -> None:
        """Reject options without effect, or without any instruction; raises UserError."""
        if self.layout == "launcher":
            for scale in self.scales:
                self.launcher.grid(self.page_wh(scale))
            if set(self.kinds) == {"relation"}:
                raise UserError("screens.kinds is only relation, which launcher tiles do not support; add name")
        elif self.width_px < 160 or self.height_px < 120:
            size = f"{self.width_px} x {self.height_px}"
            raise UserError(
                f"screens of {size} pixels are only possible with layout=launcher; other layouts need at least 160 x "
                "120"
            )

    def page_wh(self, scale: float) -> Size:
        """(width, height) of a page in CSS pixels."""
        return round(self.width_px / scale), round(self.height_px / scale)

    @property
    def sheet(self) -> tuple[int, int]:
        """Columns and rows of screens that share a window; pixels stay unchanged only at an integer scale."""
        if self.layout != "launcher" or len(self.scales) > 1 or not float(self.scales[0]).is_integer():
            return 1, 1
        return max(1, SHEET_WH[0] // self.width_px), max(1, SHEET_WH[1] // self.height_px)


@dataclass(frozen=True)
class WorkedSettings:
    """Options of worked answers."""

    listings: float = bounded(0.0, at_least=0, at_most=1)
    """Fraction of the rows that ask for all controls."""
    most_answers: int = bounded(1, at_least=1)
    """Maximum number of controls in an answer; those after the first are random. A model must know answers with several
    points before AEPO can explore with them."""
    mistaken: float = bounded(0.0, at_least=0, at_most=1)
    """Fraction of the instructions by function whose first answer is a different control of the function's family (or
    any other control if none is visible). This gives a confidently wrong starting model, as in AEPO's confidence
    trap."""


def worked_targets(
    instruction: Instruction,
    elements: Sequence[Element],
    functions: dict[str, Function],
    settings: WorkedSettings,
    draw: random.Random,
) -> list[Element]:
    """The controls listed in the worked answer to an instruction."""
    targets = list(instruction.targets)
    if instruction.kind == LISTING or len(targets) > 1:
        return targets
    others = [item for item in elements if item.visible and item.name and item is not targets[0]]
    draw.shuffle(others)
    if instruction.kind == "function" and others and draw.random() < settings.mistaken:
        others.sort(key=lambda item: _family(item, functions) != _family(targets[0], functions))
        targets = [others.pop(0)]
        draw.shuffle(others)
    return targets + others[: draw.randint(1, settings.most_answers) - 1]


def _family(element: Element, functions: dict[str, Function]) -> str | None:
    function = functions.get(element.data.get("function", ""))
    return function.family if function else None


ATTEMPTS = 3
MOST_EMPTY = 200
"""Stop after this many consecutive screens without an instruction."""


@dataclass(frozen=True)
class Screen:
    """A screenshot and its contents."""

    seed: int
    image: NDArray[np.uint8]
    """(H, W, 3) RGB."""
    page: PageModel | LauncherPage
    scale: float
    elements: tuple[Element, ...]
    """Includes invisible ones."""
    instructions: tuple[Instruction, ...]


class WebScreens:
    """Draws screens in a given browser, or in its own, which `close` closes."""

    def __init__(
        self,
        settings: ScreenSettings | None = None,
        browser: BrowserSettings | Browser | None = None,
        new_documents: bool = False,
    ) -> None:
        self._new_documents = new_documents
        self.settings = settings or ScreenSettings()
        check_config(self.settings, "screens")
        self._own = not isinstance(browser, Browser)
        self.browser = browser if isinstance(browser, Browser) else Browser(browser)
        self._pages: dict[tuple[Size, float], GuardedPage] = {}

    def __enter__(self) -> WebScreens:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the pages, and the browser if it is its own."""
        for page in self._pages.values():
            page.close()
        self._pages.clear()
        if self._own:
            self.browser.close()

    def screen(self, seed: int) -> Screen:
        """The screen of a seed."""
        return self.screens([seed])[0]

    def screens(self, seeds: Sequence[int]) -> list[Screen]:
        """The screens of some seeds; home screens with the same integer scale share a window, which is much faster."""
        size = math.prod(self.settings.sheet)
        return [
            screen
            for start in range(0, len(seeds), size)
            for screen in self._draw_with_retries(seeds[start : start + size])
        ]

    def samples(self, count: int, seed: int = 0) -> Iterator[GroundingSample]:
        """Grounding samples of a series of screens."""
        given, number, last = 0, 0, 0
        size = math.prod(self.settings.sheet)
        while given < count:
            seeds = [screen_seed(seed, number + offset) for offset in range(min(size, count - given))]
            for screen in self.screens(seeds):
                number += 1
                for sample in self.samples_of(screen)[: count - given]:
                    given, last = given + 1, number
                    yield sample
            if number - last > MOST_EMPTY:
                raise UserError(
                    f"{number - last} screens in a row have no instruction of kind {', '.join(self.settings.kinds)}"
                )

    def samples_of(self, screen: Screen) -> list[GroundingSample]:
        """Instructions of a screen as samples, of different controls and as many kinds as possible.

        With `listings` a screen has either these or the one instruction that asks for all controls.
        """
        from PIL import Image

        settings = self.settings
        image = Image.fromarray(screen.image)
        draw = random.Random(f"samples/{screen.seed}")
        language, words = screen.page.language, SPLITS[settings.split][1]
        if random.Random(f"listing/{screen.seed}").random() < self._listing_screens:
            listing = listing_for(screen.elements, language, words, draw)
            return [self._sample(screen, image, listing)] if listing.targets else []
        chosen = _chosen(list(screen.instructions), settings.per_screen, draw)
        return [self._sample(screen, image, instruction) for instruction in chosen]

    @property
    def _listing_screens(self) -> float:
        """Fraction of screens with a listing, one row each, that gives the configured fraction of rows."""
        share, rows = self.settings.worked.listings if self.settings.worked else 0.0, self.settings.per_screen
        return share * rows / (1 - share + share * rows)

    def _sample(self, screen: Screen, image: Any, instruction: Instruction) -> GroundingSample:
        first, boxes = instruction.targets[0], tuple(target.box for target in instruction.targets)
        height, width = screen.image.shape[:2]
        meta: dict[str, Any] = {
            "id": f"{self.settings.split}-{screen.seed}-{first.data.get('function') or first.name}-{instruction.kind}",
            "kind": instruction.kind,
            "group": "icon" if first.icon_only else "text",
            "role": first.role,
            "name": first.name,
            "language": screen.page.language,
            "layout": screen.page.layout,
            "theme": screen.page.theme.name,
            "scale": screen.scale,
            "split": self.settings.split,
            "seed": screen.seed,
        }
        if self.settings.worked is not None:
            known = dict(functions(SPLITS[self.settings.split][1], screen.page.language))
            draw = random.Random(f"worked/{meta['id']}")
            named = worked_targets(instruction, screen.elements, known, self.settings.worked, draw)
            meta |= {"answers": [list(item.box.center) for item in named], "labels": [item.name for item in named]}
        if instruction.kind == LISTING:
            meta["name"] = ""
        target = boxes[0] if len(boxes) == 1 else AnyOf(boxes)
        return GroundingSample(image, (width, height), instruction.text, target, meta=meta)

    def _draw_with_retries(self, seeds: Sequence[int]) -> list[Screen]:
        for attempt in range(ATTEMPTS):
            try:
                return self._draw_home(seeds) if self.settings.layout else [self._draw(seed) for seed in seeds]
            except BrowserFailure:
                if attempt == ATTEMPTS - 1:
                    raise
                self._restart(after_failure=True)
        raise AssertionError("unreachable")

    def _draw(self, seed: int) -> Screen:
        settings = self.settings
        draw = random.Random(f"{settings.split}/{seed}")
        scale = draw.choice(settings.scales)
        language = draw.choice(settings.languages)
        model = compose(draw, settings.split, settings.page_wh(scale)[0], language)
        page = self._page(settings.page_wh(scale), scale)
        page.load_html(render(model), new_document=self._new_documents)
        elements = tuple(read_elements(page))
        return Screen(seed, page.screenshot(), model, scale, elements, self._instructions(elements, language, draw))

    def _draw_home(self, seeds: Sequence[int]) -> list[Screen]:
        """Home screens in one window, each cropped from its screenshot."""
        settings = self.settings
        draws = [random.Random(f"launcher/{settings.split}/{seed}") for seed in seeds]
        scale = draws[0].choice(settings.scales)  # several share a window only where there is one scale
        for draw in draws[1:]:
            draw.choice(settings.scales)
        width, height = settings.page_wh(scale)
        themes, words = SPLITS[settings.split]
        pages = tuple(
            compose_launcher(draw, themes, words, (width, height), draw.choice(settings.languages), settings.launcher)
            for draw in draws
        )
        columns, rows = settings.sheet if len(seeds) > 1 else (1, 1)
        sheet = LauncherSheet(pages, columns)
        window = self._page((columns * width, rows * height), scale)
        window.load_html(render(sheet), new_document=self._new_documents)
        found, screenshot = read_elements(window), window.screenshot()
        screens = []
        for number, (seed, page, draw) in enumerate(zip(seeds, pages, draws, strict=True)):
            left, top = (round(edge * scale) for edge in sheet.corner(number))
            elements = tuple(_in_own_window(item, left, top) for item in found if item.data["screen"] == str(number))
            own = screenshot[top : top + round(height * scale), left : left + round(width * scale)]
            instructions = self._instructions(elements, page.language, draw)
            screens.append(Screen(seed, own, page, scale, elements, instructions))
        return screens

    def _instructions(self, elements: Sequence[Element], language: str, draw: random.Random) -> tuple[Instruction, ...]:
        words, settings = SPLITS[self.settings.split][1], self.settings
        known = dict(functions(words, language))
        found = instructions_for(elements, known, language, words, draw, all_boxes=settings.all_boxes)
        return tuple(item for item in found if item.kind in settings.kinds)

    def _page(self, page_wh: Size, scale: float) -> GuardedPage:
        if self.browser.pages >= self.browser.settings.pages_per_start:
            self._restart(after_failure=False)
        if (page_wh, scale) not in self._pages:
            self._pages[page_wh, scale] = GuardedPage(self.browser, *page_wh, scale=scale)
        return self._pages[page_wh, scale]

    def _restart(self, after_failure: bool) -> None:
        self._pages.clear()
        self.browser.restart(after_failure)


def build_screens(path: str | Path, *, count: int = 1000, seed: int = 0, **settings: Any) -> Path:
    """Write a dataset of screens as JSON lines with PNG images; the settings are those of `ScreenSettings`."""
    from mmrl.gui.grounding.samples import write_samples

    with WebScreens(settings_from(ScreenSettings, settings, "screens")) as screens:
        return write_samples(path, screens.samples(count, seed))


def screen_seed(seed: int, number: int) -> int:
    """Seed of a screen in a series; series of different seeds share no screen."""
    return (seed << 32) + number


def _in_own_window(element: Element, left: float, top: float) -> Element:
    """An element relative to its own home screen."""
    x1, y1, x2, y2 = element.box
    data = {name: value for name, value in element.data.items() if name != "screen"}
    return replace(element, box=Box(x1 - left, y1 - top, x2 - left, y2 - top), data=data)


def _chosen(found: list[Instruction], count: int, draw: random.Random) -> list[Instruction]:
    """Choose instructions of different controls, cycling through the kinds."""
    draw.shuffle(found)
    chosen: list[Instruction] = []
    used: set[int] = set()
    kinds = draw.sample(sorted({item.kind for item in found}), len({item.kind for item in found}))
    for turn in range(count * max(1, len(kinds))):
        kind = kinds[turn % len(kinds)] if kinds else ""
        for item in found:
            if item.kind == kind and not used & {id(target) for target in item.targets}:
                chosen.append(item)
                used |= {id(target) for target in item.targets}
                break
    return chosen[:count]
