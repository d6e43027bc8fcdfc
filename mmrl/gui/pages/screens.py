"""Screens drawn by Chromium from generated pages, with true boxes and instructions.

    with WebScreens(split="train") as screens:
        for sample in screens.samples(100, seed=0):
            sample.image, sample.instruction, sample.target

Equal settings and seeds give equal pixels on one machine; another browser or other fonts draw other ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mmrl.fields import bounded, check_config, choice
from mmrl.gui.browser import Browser, BrowserFailure, BrowserSettings
from mmrl.gui.elements import Element, read_elements
from mmrl.gui.guarded_page import GuardedPage
from mmrl.gui.pages.composer import SPLITS, PageModel, compose, render
from mmrl.gui.pages.instructions import Instruction, instructions_for
from mmrl.gui.pages.vocabulary import LANGUAGES, functions
from mmrl.gui.plain_settings import settings_from
from mmrl.gui.samples import AnyOf, GroundingSample

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Screen", "ScreenSettings", "WebScreens", "build_screens"]

ATTEMPTS = 3


@dataclass(frozen=True)
class ScreenSettings:
    """What the screens look like."""

    split: str = choice("train", SPLITS)
    """train; layouts: words of train on templates and themes of test; test: nothing that train has."""
    width_px: int = bounded(448, at_least=160, at_most=4096)
    """Columns of the picture."""
    height_px: int = bounded(336, at_least=120, at_most=4096)
    """Rows of the picture."""
    scales: tuple[float, ...] = bounded((1.0, 0.875, 1.4), at_least=0.5, at_most=4)
    """Device pixels of a CSS pixel; one is drawn for each page."""
    languages: tuple[str, ...] = choice(LANGUAGES, LANGUAGES)
    """Of labels and instructions; one is drawn for each page."""
    per_screen: int = bounded(3, at_least=1)
    """Most instructions of a screen, of different controls."""
    all_boxes: bool = False
    """Keep instructions that several controls fulfil, with all of them as the target; they are left out otherwise."""


@dataclass(frozen=True)
class Screen:
    """A picture and what is on it."""

    seed: int
    picture: NDArray[np.uint8]
    """(H, W, 3) RGB."""
    page: PageModel
    scale: float
    elements: tuple[Element, ...]
    """Also those that are not visible."""
    instructions: tuple[Instruction, ...]


class WebScreens:
    """Draws screens in a browser of its own, which `close` ends.

    Args:
        settings: what they look like.
        browser: how the browser runs, or one that runs already.
        new_documents: a new document for each page, which gives the same pictures and takes longer; for benchmarks.

    Raises:
        UserError: a setting is out of bounds, or playwright or a browser is missing.
    """

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
        self._pages: dict[float, GuardedPage] = {}

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
        """The screen of a seed.

        Raises:
            BrowserFailure: the browser failed three times in a row.
        """
        for attempt in range(ATTEMPTS):
            try:
                return self._draw(seed)
            except BrowserFailure:
                if attempt == ATTEMPTS - 1:
                    raise
                self._restart(after_failure=True)
        raise AssertionError("unreachable")

    def samples(self, count: int, seed: int = 0) -> Iterator[GroundingSample]:
        """Samples for grounding, one after the other.

        Args:
            count: how many.
            seed: first part of the seeds of the screens; equal ones give equal samples.

        Yields:
            Samples with pictures as PIL images; `meta` has id, kind, group (text or icon), role, name, language,
            layout, theme, scale, split and seed.
        """
        given, number = 0, 0
        while given < count:
            screen = self.screen(screen_seed(seed, number))
            number += 1
            for sample in self.samples_of(screen)[: count - given]:
                given += 1
                yield sample

    def samples_of(self, screen: Screen) -> list[GroundingSample]:
        """Instructions of a screen as samples, of different controls and as many kinds as there are."""
        from PIL import Image

        draw = random.Random(f"samples/{screen.seed}")
        image = Image.fromarray(screen.picture)
        chosen = _chosen(list(screen.instructions), self.settings.per_screen, draw)
        return [self._sample(screen, image, instruction) for instruction in chosen]

    def _sample(self, screen: Screen, image: Any, instruction: Instruction) -> GroundingSample:
        first, boxes = instruction.targets[0], tuple(target.box for target in instruction.targets)
        height, width = screen.picture.shape[:2]
        meta = {
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
        target = boxes[0] if len(boxes) == 1 else AnyOf(boxes)
        return GroundingSample(image, (width, height), instruction.text, target, meta=meta)

    def _draw(self, seed: int) -> Screen:
        settings = self.settings
        draw = random.Random(f"{settings.split}/{seed}")
        scale = draw.choice(settings.scales)
        language = draw.choice(settings.languages)
        model = compose(draw, settings.split, round(settings.width_px / scale), language)
        page = self._page(scale)
        page.load_html(render(model), new_document=self._new_documents)
        elements = tuple(read_elements(page))
        words = SPLITS[settings.split][1]
        known = dict(functions(words, language))
        found = instructions_for(elements, known, language, words, draw, all_boxes=settings.all_boxes)
        return Screen(seed, page.screenshot(), model, scale, elements, tuple(found))

    def _page(self, scale: float) -> GuardedPage:
        if self.browser.pages >= self.browser.settings.pages_per_start:
            self._restart(after_failure=False)
        if scale not in self._pages:
            size = round(self.settings.width_px / scale), round(self.settings.height_px / scale)
            self._pages[scale] = GuardedPage(self.browser, *size, scale=scale)
        return self._pages[scale]

    def _restart(self, after_failure: bool) -> None:
        self._pages.clear()
        self.browser.restart(after_failure)


def build_screens(path: str | Path, *, count: int = 1000, seed: int = 0, **settings: Any) -> Path:
    """Write samples as JSON lines with PNG images beside them, to be read as any data set of screens.

    Args:
        path: .jsonl file.
        count: samples.
        seed: of the screens.
        settings: fields of `ScreenSettings` as plain data.

    Returns:
        The file.

    Raises:
        UserError: there is no such setting, or playwright or a browser is missing.
    """
    from mmrl.gui.tables import write_samples

    with WebScreens(settings_from(ScreenSettings, settings, "screens")) as screens:
        return write_samples(path, screens.samples(count, seed))


def screen_seed(seed: int, number: int) -> int:
    """Seed of a screen in a series: series of different seeds share none."""
    return (seed << 32) + number


def _chosen(found: list[Instruction], count: int, draw: random.Random) -> list[Instruction]:
    """Instructions of different controls, the kinds in turn."""
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
