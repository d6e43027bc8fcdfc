"""Screens of MiniWoB++ pages that one click solves, as grounding questions, and a tiny model that reads them.

The boxes are those of the elements that the page rewards; with `check` each is clicked once, and a sample is kept only
where the page gives its full reward.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.gui.browser.miniwob import MiniWobEnv, MiniWobSettings
from mmrl.gui.grounding.answers import answer_text, answer_tokens
from mmrl.gui.grounding.coords import Box, CoordinateSpace
from mmrl.gui.grounding.samples import AnyOf, GroundingSample, write_samples

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
PAGES = {
    "click-test-2": ("#area button", "e => e.textContent"),
    "click-color": ("#area .color", "e => e.dataset.color"),
    "click-dialog-2": (".ui-dialog button", "e => e.textContent.trim().replace('Close', 'x')"),
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
    """Draw screens, the pages in turn.

    Args:
        count: number of samples.
        seed: of the series; series of different seeds share no screen.
        pages: names in `PAGES`.
        check: click each box, and leave out what the page does not reward.
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
    env = MiniWobEnv(MiniWobSettings(tasks=tuple(pages)))
    drawn = number = 0
    earlier: dict[str, GroundingSample] = {}
    while drawn < count:
        name, page_seed = pages[number % len(pages)], (seed << 24) + number
        number += 1
        sample = _sample(env, name, page_seed, check, most_answers, listings)
        if sample is None:
            continue
        other = earlier.get(name)
        earlier[name] = sample
        if swapped:
            if other is None:
                continue
            sample = replace(sample, image=other.image)
        drawn += 1
        yield sample
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
        *(f'Click the button in the dialog box labeled "{name}".' for name in ("x", "OK", "Cancel")),
        *(f'Click on a "{kind}" widget.' for kind in KINDS),
        "Focus into the 1st 2nd 3rd input textbox.",
    )
    labels = ["ONE", "TWO", *COLOURS, "x", "OK", "Cancel", *KINDS, "1st", "2nd", "3rd"]
    corpus = [*(list(asked) * 10), LIST, answer_text([(1, 2)], CoordinateSpace.REL1000, ["label"])]
    return build_tiny(path, corpus=corpus, tokens=answer_tokens(labels), **({"vocab_size": 1400} | options))


def _sample(
    env: MiniWobEnv, name: str, seed: int, check: bool, most_answers: int, listings: float
) -> GroundingSample | None:
    """The sample of a page, or None where it has no right candidate, or the page does not reward it."""
    from PIL import Image

    observation, _ = env.reset(seed=seed, options={"task": {"name": name, "seed": seed}})
    found = [(Box(*box), label, right) for box, label, right in env.page.evaluate(CANDIDATES, list(PAGES[name]))]
    boxes = [box for box, _, right in found if right]
    if not boxes or (check and not env.step({"name": "click", "arguments": {"point": boxes[0].center}})[4]["success"]):
        return None
    meta: dict[str, Any] = {"id": f"{name}-{seed}", "kind": name, "seed": seed}
    instruction = observation["instruction"]
    if most_answers:
        draw = random.Random(f"worked/{seed}")
        if draw.random() < listings:
            # by name, so that a model learns to find a place by its name, which is what questions ask for
            instruction, named = LIST, sorted(found, key=lambda candidate: str(candidate[1]))
        else:
            draw.shuffle(found)
            found.sort(key=lambda candidate: not candidate[2])
            named = [found[0], *(one for one in found if not one[2])][: draw.randint(1, most_answers)]
        meta |= {"labels": [label for _, label, _ in named], "answers": [list(box.center) for box, _, _ in named]}
    image = observation["image"]
    target = boxes[0] if len(boxes) == 1 else AnyOf(tuple(boxes))
    return GroundingSample(Image.fromarray(image), (image.shape[1], image.shape[0]), instruction, target, meta=meta)
