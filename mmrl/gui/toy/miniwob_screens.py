"""Screens of MiniWoB++ pages that one click solves, as grounding questions, and a tiny model that reads them.

The boxes are those of the elements that the page rewards; with `check` each is clicked once, and a sample is kept only
where the page gives its full reward.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.gui.browser.miniwob import MiniWobEnv, MiniWobSettings
from mmrl.gui.grounding.answers import answer_text, answer_tokens
from mmrl.gui.grounding.coords import Box, CoordinateSpace
from mmrl.gui.grounding.samples import AnyOf, GroundingSample, write_samples

WIDTH_PX, HEIGHT_PX = 160, 210
COLUMNS = 10
COLOURS = (
    *("red", "blue", "olive", "lime", "black", "white", "grey", "purple", "orange", "yellow", "cyan", "pink"),
    "magenta",
)
KINDS = ("radio", "checkbox", "text", "textarea", "button")
CANDIDATES = """([all, name]) => {
  const said = document.getElementById('query').textContent;
  const box = element => {
    const { left, top, right, bottom } = element.getBoundingClientRect();
    return [Math.max(left, 0), Math.max(top, 0), Math.min(right, innerWidth), Math.min(bottom, innerHeight)];
  };
  const reached = element => {
    const [x1, y1, x2, y2] = box(element), top = document.elementFromPoint((x1 + x2) / 2, (y1 + y2) / 2);
    return x2 - x1 > 2 && y2 - y1 > 2 && top && (element.contains(top) || top.contains(element));
  };
  const known = core.getUtterance(), named = eval(name);
  const words = (typeof known === 'string' ? known : said).split(/[\\s".]+/);
  return [...document.querySelectorAll(all)].filter(reached)
    .map((element, number) => [box(element), named(element, number), words.includes(named(element, number))]);
}"""
SHEET = """([seeds, all, name, columns, width, height]) => {
  document.querySelectorAll('.tile').forEach(tile => tile.remove());
  const wrap = document.getElementById('wrap'), sheet = document.createDocumentFragment();
  const screens = seeds.map((seed, number) => {
    Math.seedrandom(seed);
    core.startEpisodeReal();
    const known = core.getUtterance(), found = (CANDIDATES)([all, name]), tile = wrap.cloneNode(true);
    const left = width * ((number + 1) % columns), top = height * Math.floor((number + 1) / columns);
    tile.classList.add('tile');
    tile.style.cssText += `position: absolute; overflow: hidden; left: ${left}px; top: ${top}px;`
      + `width: ${width}px; height: ${height}px`;
    sheet.append(tile);
    return [typeof known === 'string' ? known : known.utterance, found];
  });
  document.body.append(sheet);  // at the end: a page searches and clears the whole document for its next episode
  return screens;
}""".replace("CANDIDATES", CANDIDATES)
PAGES = {
    "click-test-2": ("#area button", "e => e.textContent"),
    "click-color": ("#area .color", "e => e.dataset.color"),
    "click-widget": ("#area [data-type]", "e => e.dataset.type"),
    "focus-text-2": ("#area input", "(e, n) => ['1st', '2nd', '3rd'][n]"),
}
"""Candidates of each page, and their names; an instruction holds that of the correct one as a word."""
LIST = "everything"
"""The question whose worked answer names every candidate with its place."""


def pointing_samples(
    count: int,
    *,
    seed: int = 0,
    pages: Sequence[str] = tuple(PAGES),
    check: bool = True,
    most_answers: int = 0,
    listings: float = 0.0,
    swapped: bool = False,
) -> Iterator[GroundingSample]:
    """Draw screens, one page after the other.

    Args:
        count: number of samples.
        seed: of the series; series of different seeds share no screen.
        pages: names in `PAGES`.
        check: click each box, and leave out what the page does not reward; takes about twenty times as long.
        most_answers: add worked answers, as the columns `answers` and `labels`: the right point and those of other
            candidates, one to this many in all; 0 = none.
        listings: fraction of worked answers that name every candidate instead, to the question `LIST`.
        swapped: show another screen of the page than the one that the question is about, as a control.

    Raises:
        UserError: an unknown page.
    """
    unknown = [name for name in pages if name not in PAGES]
    if unknown:
        raise UserError(f"there are no pointing screens for {unknown[0]!r}; available: {', '.join(PAGES)}")
    tiles = 1 if check else COLUMNS
    env = MiniWobEnv(MiniWobSettings(tasks=tuple(pages), width_px=tiles * WIDTH_PX, height_px=tiles * HEIGHT_PX))
    for place, name in enumerate(pages):
        quota = count // len(pages) + (place < count % len(pages))
        drawn = (_loaded if check else _tiled)(env, name, itertools.count(seed << 24))
        screens = (screen for screen in drawn if screen.boxes)
        if check:
            screens = (screen for screen in screens if _is_rewarded(env, screen))
        if swapped:
            screens = (replace(now, image=earlier.image) for earlier, now in itertools.pairwise(screens))
        for screen in itertools.islice(screens, quota):
            yield screen.sample(most_answers, listings)
    env.close()


def build_pointing(path: str | Path, *, count: int = 1000, seed: int = 0, **options: Any) -> Path:
    """Write `pointing_samples` as JSON lines, with PNG images next to them."""
    return write_samples(path, pointing_samples(count, seed=seed, **options))


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random model whose tokenizer has the words of these pages; `options` are those of `build_tiny`."""
    from mmrl.vlm.toy.tiny_generic import build_tiny

    asked = (
        "Click button ONE. TWO.",
        *(f"Click on the {colour} colored box." for colour in COLOURS),
        *(f'Click on a "{kind}" widget.' for kind in KINDS),
        "Focus into the 1st 2nd 3rd input textbox.",
    )
    labels = ["ONE", "TWO", *COLOURS, *KINDS, "1st", "2nd", "3rd"]
    corpus = [*(list(asked) * 10), LIST, answer_text([(1, 2)], CoordinateSpace.REL1000, ["label"])]
    return build_tiny(path, corpus=corpus, tokens=answer_tokens(labels), **({"vocab_size": 1400} | options))


@dataclass(frozen=True)
class _Screen:
    """A screen of a page: its candidates are (box, name, whether it is correct)."""

    name: str
    seed: int
    instruction: str
    candidates: list[tuple[Box, Any, bool]]
    image: Any

    @property
    def boxes(self) -> tuple[Box, ...]:
        return tuple(box for box, _, correct in self.candidates if correct)

    def sample(self, most_answers: int, listings: float) -> GroundingSample:
        from PIL import Image

        meta: dict[str, Any] = {"id": f"{self.name}-{self.seed}", "kind": self.name, "seed": self.seed}
        instruction = self.instruction
        if most_answers:
            draw, found = random.Random(f"worked/{self.seed}"), list(self.candidates)
            if draw.random() < listings:
                # by name, so that a model learns to find a place by its name, which is what questions ask for
                instruction, named = LIST, sorted(found, key=lambda candidate: str(candidate[1]))
            else:
                draw.shuffle(found)
                found.sort(key=lambda candidate: not candidate[2])
                named = [found[0], *(one for one in found if not one[2])][: draw.randint(1, most_answers)]
            meta |= {"labels": [label for _, label, _ in named], "answers": [list(box.center) for box, _, _ in named]}
        target = self.boxes[0] if len(self.boxes) == 1 else AnyOf(self.boxes)
        return GroundingSample(Image.fromarray(self.image), (WIDTH_PX, HEIGHT_PX), instruction, target, meta=meta)


def _loaded(env: MiniWobEnv, name: str, seeds: Iterator[int]) -> Iterator[_Screen]:
    """Screens of a page that is loaded for each."""
    for seed in seeds:
        observation, _ = env.reset(seed=seed, options={"task": {"name": name, "seed": seed}})
        found = env.page.evaluate(CANDIDATES, list(PAGES[name]))
        yield _Screen(name, seed, observation["instruction"], _candidates(found), observation["image"])


def _tiled(env: MiniWobEnv, name: str, seeds: Iterator[int]) -> Iterator[_Screen]:
    """The same screens as copies side by side in one large page, many times as fast."""
    env.reset(seed=0, options={"task": {"name": name}})
    while True:
        # the episode itself is in the first place
        batch = list(itertools.islice(seeds, COLUMNS**2 - 1))
        sheet = [list(map(str, batch)), *PAGES[name], COLUMNS, WIDTH_PX, HEIGHT_PX]
        told, image = env.page.evaluate(SHEET, sheet), env.page.screenshot()
        for place, (seed, (instruction, found)) in enumerate(zip(batch, told, strict=True), start=1):
            top, left = place // COLUMNS * HEIGHT_PX, place % COLUMNS * WIDTH_PX
            tile = image[top : top + HEIGHT_PX, left : left + WIDTH_PX]
            yield _Screen(name, seed, instruction, _candidates(found), tile)


def _is_rewarded(env: MiniWobEnv, screen: _Screen) -> bool:
    """Whether the page gives its full reward for a click into the first correct box."""
    click = {"name": "click", "arguments": {"point": screen.boxes[0].center}}
    return bool(env.step(click)[4]["success"])


def _candidates(found: list[Any]) -> list[tuple[Box, Any, bool]]:
    return [(Box(*box), label, correct) for box, label, correct in found]
