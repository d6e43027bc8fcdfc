"""The pages of MiniWoB++ as environments, without selenium and without a server.

The reward is the page's raw one, in [-1, 1], without the usual discount by wall-clock time. Timers of the pages run by
the clock: animations of jQuery are switched off, and `wait` waits; the pages in `RESTLESS` move by themselves, so that
equal actions may have other results. Importing this module registers mmrl/MiniWob-v0 with Gymnasium.

Source: Farama-Foundation/miniwob-plusplus miniwob/html/core/core.js and miniwob/selenium_instance.py.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.gui.browser.browser import Browser, BrowserFailure
from mmrl.gui.browser.page import GuardedPage
from mmrl.gui.browser.page_env import (
    PageEnv,
    PageEnvSettings,
    PageVerdict,
    WebAgentEnv,
    name_and_arguments,
    register_environments,
    settings_from,
)

ONE_CLICK = (
    "click-button",
    "click-color",
    "click-dialog-2",
    "click-link",
    "click-shape",
    "click-tab",
    "click-tab-2-easy",
    "click-test",
    "click-test-2",
    "click-widget",
    "count-shape",
    "count-sides",
    "email-inbox-delete",
    "email-inbox-important",
    "focus-text",
    "focus-text-2",
    "grid-coordinate",
    "identify-shape",
    "unicode-test",
)
"""Tasks solved by one click on the right element."""
RESTLESS = (
    "chase-circle",
    "click-pie",
    "drag-items",
    "drag-items-grid",
    "drag-sort-numbers",
    "stock-market",
    "use-slider",
)
"""Tasks whose pages are not repeatable bit for bit; moving-items and simon-says depend on the clock as well."""
TASK_FIELDS = ("name", "seed")
FULL_REWARD = 1.0
"""Raw reward of a solved task; some pages give less for a partial solution, such as 0.1 for the wrong card."""
BEGIN = """async seed => {
  const style = document.createElement('style');
  style.textContent = '#reward-display, #click-canvas { display: none !important; }';  // the last reward, the clicks
  document.head.append(style);
  Math.seedrandom(seed);
  core.setDataMode('train');
  core.EPISODE_MAX_TIME = 1e9;  // above 2^31 ms the timer would fire at once
  if (window.jQuery) jQuery.fx.off = true;
  core.startEpisodeReal();
  for (let turn = 0; !WOB_TASK_READY && turn < 200; turn += 1) await new Promise(done => setTimeout(done, 25));
  // images shown for the first time are still read from files while the page is drawn without them
  const shown = [...document.querySelectorAll('*')].map(element => getComputedStyle(element).backgroundImage);
  const files = new Set(shown.flatMap(image => [...image.matchAll(/url\\("(.+?)"\\)/g)].map(match => match[1])));
  const loaded = [...files].map(file => Object.assign(new Image(), { src: file }));
  await Promise.all([...document.images, ...loaded].map(image => image.decode().catch(() => null)));
  scrollTo(0, 0);  // a dialog that takes the focus may have scrolled the page
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  const said = core.getUtterance();
  return { ready: WOB_TASK_READY, instruction: typeof said === 'string' ? said : said.utterance };
}"""
REPORT = """async () => {
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  return { done: WOB_DONE_GLOBAL, reward: WOB_RAW_REWARD_GLOBAL, reason: WOB_REWARD_REASON };
}"""


@dataclass(frozen=True)
class MiniWobSettings(PageEnvSettings):
    """Choice of pages, their size, and limits of an episode."""

    width_px: int = bounded(160, at_least=160, at_most=4096)
    """Screenshot width in pixels; the pages are designed for 160."""
    height_px: int = bounded(210, at_least=210, at_most=4096)
    """Screenshot height in pixels; the pages are designed for 210, of which 50 show the yellow instruction."""
    tasks: tuple[str, ...] = ONE_CLICK
    """Pages to draw from if a reset does not name one; see `miniwob_names`."""
    wait_s: float = bounded(0.5, at_least=0, at_most=10)
    """Duration of the action wait in seconds, for pages that respond late."""

    def validate(self) -> None:
        """Check the names of the pages; raises UserError."""
        super().validate()
        if self.partial_credit:
            raise UserError("MiniWoB++ pages give their own raw reward, so partial_credit has no effect there")
        if not self.tasks:
            raise UserError("tasks is empty; list MiniWoB++ pages, or remove it")
        for name in self.tasks:
            page_file(name)


class MiniWobEnv(PageEnv):
    """Pages of MiniWoB++.

    A task is {"name", "seed"}; missing entries are drawn from the seed of the episode.
    """

    settings: MiniWobSettings

    def __init__(self, settings: MiniWobSettings | None = None, browser: Browser | None = None) -> None:
        super().__init__(settings or MiniWobSettings(), browser)

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute an action; wait takes `wait_s` seconds unless the action specifies a duration."""
        name, arguments = name_and_arguments(action)
        if name == "wait" and "seconds" not in arguments:
            time.sleep(self.settings.wait_s)
        return super().step(action)

    def make_task(self, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
        unknown = [str(key) for key in options if key not in TASK_FIELDS]
        if unknown:
            raise UserError(f"a task has no entry {unknown[0]!r}; it may have {', '.join(TASK_FIELDS)}")
        # by the seed of the episode: a reset without a name is repeatable too
        name = options.get("name") or Random(f"task/{seed}").choice(self.settings.tasks)
        page_file(name)
        # a seed in the options wins over the episode's
        return {"seed": seed, **options, "name": name}

    def begin(self, page: GuardedPage, task: Mapping[str, Any], seed: int) -> str:
        # A fresh document: what an agent did to the last one (scroll, selection, open dialogs) would stay otherwise.
        page.load_file(page_file(task["name"]), miniwob_folder().parent)
        started = page.evaluate(BEGIN, str(task["seed"]))
        # what the page tried while loading is not the effect of an action
        page.take_events()
        if not started["ready"]:
            raise BrowserFailure(f"the page {task['name']} was not ready within 5 seconds")
        return str(started["instruction"])

    def verdict(self, page: GuardedPage) -> PageVerdict:
        report = page.evaluate(REPORT)
        done, reward = bool(report["done"]), float(report["reward"])
        info = {"raw_reward": reward, "reason": report["reason"]}
        # a raw reward before the end of the episode does not count
        return PageVerdict(reward if done else 0.0, done and reward >= FULL_REWARD, done, info)


def miniwob_names() -> list[str]:
    """Names of the pages."""
    return sorted(path.stem for path in miniwob_folder().glob("*.html"))


def miniwob_tasks(**settings: Any) -> WebAgentEnv:
    """Pages of MiniWoB++ for agents: `environment.factory: mmrl.gui.browser.miniwob:miniwob_tasks`."""
    return WebAgentEnv(MiniWobEnv(settings_from(MiniWobSettings, settings)))


def make_miniwob(render_mode: str | None = None, **settings: Any) -> MiniWobEnv:
    """A `MiniWobEnv` for `gymnasium.make`; arguments are fields of `MiniWobSettings` as plain data."""
    return MiniWobEnv(settings_from(MiniWobSettings, settings, "gymnasium.make"))


def page_file(name: str) -> Path:
    """The HTML file of a page; raises UserError if there is none."""
    path = miniwob_folder() / f"{name}.html"
    if "/" in str(name) or not path.is_file():
        raise UserError(f"MiniWoB++ has no page {name!r}; it has: {', '.join(miniwob_names())}")
    return path


def miniwob_folder() -> Path:
    """The folder of the pages; raises UserError if the package is missing."""
    spec = importlib.util.find_spec("miniwob")
    places = list(spec.submodule_search_locations or []) if spec else []
    if not places:
        raise UserError("MiniWoB++ pages need the package miniwob: pip install 'mmrl-suite[miniwob]'")
    return Path(places[0]) / "html" / "miniwob"


register_environments("mmrl.gui.browser.miniwob:make_miniwob", {"mmrl/MiniWob-v0": {}})
