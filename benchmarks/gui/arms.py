"""The arms of `python -m benchmarks gui`; each runs in its own process, which starts and ends a browser."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.measure import Stopwatch, repeat
from mmrl.gui.browser.browser import Browser
from mmrl.workers.family import descendants


def pages_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """Draw screens: the same seeds each time."""
    from mmrl.gui.toy.pages.screens import ScreenSettings, WebScreens

    settings = ScreenSettings(width_px=arm["width_px"], height_px=arm["height_px"], scales=(1.0,))
    with _browser() as browser:
        screens = WebScreens(settings, browser, new_documents=arm["new_document"])

        def once(watch: Stopwatch) -> None:
            for seed in range(arm["pages"]):
                screens.samples_of(screens.screen(seed))

        measured = repeat(once, arm["repetitions"], cpu_clock=_cpu_seconds)
        screens.close()
    return measured | {"counts": {"pages": arm["pages"]}}


def tasks_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """Play episodes of the experts."""
    from mmrl.agents.environments.experts import run_expert
    from mmrl.gui.toy.tasks.catalogue import TASKS
    from mmrl.gui.toy.web_env import WebTaskAgentEnv, WebTaskEnv

    steps = 0
    with _browser() as browser:
        agent = WebTaskAgentEnv(WebTaskEnv(browser=browser))

        def once(watch: Stopwatch) -> None:
            nonlocal steps
            steps = 0
            for seed, name in zip(range(arm["episodes"]), list(TASKS) * arm["episodes"], strict=False):
                steps += len(run_expert(agent, {"name": name}, seed).turns)

        measured = repeat(once, arm["repetitions"], cpu_clock=_cpu_seconds)
        agent.close()
    return measured | {"counts": {"episodes": arm["episodes"], "steps": steps}}


def miniwob_arm(arm: dict[str, Any]) -> dict[str, Any]:
    """Play episodes of one click, on the only button."""
    from mmrl.gui.browser.miniwob import MiniWobEnv

    with _browser() as browser:
        env = MiniWobEnv(browser=browser)

        def once(watch: Stopwatch) -> None:
            for seed in range(arm["episodes"]):
                _, info = env.reset(seed=seed, options={"task": "click-test"})
                x1, y1, x2, y2 = next(element["box"] for element in info["elements"] if element["tag"] == "button")
                env.step({"name": "click", "arguments": {"x": (x1 + x2) / 2, "y": (y1 + y2) / 2}})

        measured = repeat(once, arm["repetitions"], cpu_clock=_cpu_seconds)
        env.close()
    return measured | {"counts": {"episodes": arm["episodes"], "steps": arm["episodes"]}}


@contextlib.contextmanager
def _browser() -> Iterator[Browser]:
    browser = Browser()
    try:
        yield browser
    finally:
        browser.close()


def _cpu_seconds() -> float:
    """CPU seconds so far of this process and of those below it; NaN where the system does not report them."""
    if sys.platform != "linux":
        return float("nan")
    total = time.process_time()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has just ended
            total += time.clock_gettime((~pid << 3) | 2)  # its clock, as clock_getcpuclockid(3) makes the number
    return total
