"""Tasks of BrowserGym, such as WebArena, MiniWoB and WorkArena, with its observations and actions.

    environment:
      factory: mmrl.gui.browser.browsergym:BrowserGymEnvironment
      python: browsergym  # made by `mmrl setup browsergym`
    data: {names: [browsergym/miniwob.click-test], seeds: 100}
    actions: {format: text}

A task is the id of a BrowserGym environment as `name`; its other entries are passed to the task. With `format: text`
the response is read as BrowserGym reads it, such as `click('12')`, alone or in its last code block; the formats json,
call and tag also take `click(bid='12')`. `elapsed_time` is left out of observations, so that equal pages are equal.

BrowserGym pins an old playwright, so it runs in its own Python; the browser is the one of `mmrl.gui`, if there is one.

Source: ServiceNow/BrowserGym 0.14.3, core/env.py, core/action/highlevel.py and utils/obs.py of the package browsergym.
"""

from __future__ import annotations

import base64
import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.environment import ACTION_ERROR, Action
from mmrl.errors import UserError
from mmrl.gui.browser.browser import find_chromium
from mmrl.hub.images import ImageError, decode_image

MAX_PAGE_CHARS = 100_000
"""Maximum number of characters of a page's accessibility tree."""
BLOCK = re.compile(r"```(?:[a-z]*\n)?(.*?)```", re.DOTALL)
PREFIX = "browsergym/"


class BrowserGymEnvironment:
    """A task of BrowserGym an episode.

    Args:
        actions: subsets of BrowserGym's actions, such as bid, coord, nav, tab, chat, infeas or webarena; default: those
            of its `HighLevelActionSet`.
        axtree: whether the page is shown as its accessibility tree, with the numbers that actions such as click take.
        visible_only: whether the tree has only the visible elements.
        screenshot: whether the page is shown as an image too, if the model can see images.
        executable: Chromium to run. Default: MMRL_CHROMIUM, else one on the PATH, else the one that playwright
            installs.
        options: further arguments of BrowserGym's `BrowserEnv`, such as slow_mo, viewport or pre_observation_delay.

    Raises:
        UserError: BrowserGym is not installed, there is no such subset of actions, or nothing is shown.
    """

    def __init__(
        self,
        actions: Sequence[str] | None = None,
        axtree: bool = True,
        visible_only: bool = False,
        screenshot: bool = True,
        executable: str = "",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not (axtree or screenshot):
            raise UserError("axtree and screenshot are both false; the agent would see nothing of the page")
        try:
            highlevel = importlib.import_module("browsergym.core.action.highlevel")
        except ModuleNotFoundError as error:
            raise UserError(
                f"BrowserGym needs {error.name}, which is not installed in this Python; run `mmrl setup browsergym` "
                "and set environment.python: browsergym"
            ) from None
        subsets = {} if actions is None else {"subsets": list(actions)}
        try:
            # A thought may contain calls; several in a response are an error, not several actions.
            self._action_set = highlevel.HighLevelActionSet(**subsets, multiaction=False)
        except ValueError as error:
            raise UserError(f"actions: {error}; there are: {', '.join(highlevel.ACTION_SUBSETS)}") from None
        known = self._action_set.action_set
        self.actions: Mapping[str, str] = {name: f"{one.signature}. {one.description}" for name, one in known.items()}
        """Signatures and descriptions of the actions."""
        keys = ("name", "description", "parameters")
        described = self._action_set.to_tool_description(api="openai")
        self.tools = [{"type": "function", "function": {key: tool[key] for key in keys}} for tool in described]
        """The actions as JSON schemas of tools."""
        self._axtree = axtree
        self._visible_only = visible_only
        self._screenshot = screenshot
        self._executable = executable
        self._options = dict(options or {})
        self.show_images = True
        """Whether the model can see images."""
        self._made: tuple[Any, Mapping[str, Any]] | None = None
        """The running environment, and the task that it was made for."""

    def reset(self, task: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Start a task."""
        if not (self._axtree or self.show_images):
            raise UserError("axtree is false and the model sees no images; the agent would see nothing of the page")
        seen, _ = self._env_of(task).reset(seed=seed)
        goal, images = _goal(seen["goal_object"], self.show_images)
        page = self._shown(seen)
        return {"text": f"Goal: {goal}\n{page['text']}", "images": images + page["images"]}

    def step(self, action: Action) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute an action; the page says what was wrong with it."""
        if action.name == SAY:
            written = str(action.arguments.get("text", ""))
            written = next(iter(BLOCK.findall(written)[-1:]), written)
        else:
            written = str(action)
        assert self._made is not None
        seen, reward, terminated, truncated, _ = self._made[0].step(written)
        error = str(seen["last_action_error"])
        return self._shown(seen), float(reward), bool(terminated), bool(truncated), {ACTION_ERROR: error}

    def close(self) -> None:
        """Close the browser."""
        if self._made is not None:
            self._made[0].close()
            self._made = None

    def _env_of(self, task: Mapping[str, Any]) -> Any:
        """The environment of a task, which is kept for the next seed of the same one."""
        if self._made is not None and self._made[1] == task:
            return self._made[0]
        self.close()
        if not isinstance(task.get("name"), str):
            raise UserError("a BrowserGym task needs the id of its environment as name, such as browsergym/openended")
        id = f"{PREFIX}{task['name'].removeprefix(PREFIX)}"
        gymnasium = importlib.import_module("gymnasium")
        _start_playwright(self._executable)
        _register(id, gymnasium.registry)
        more = {key: value for key, value in task.items() if key != "name"}
        options = {**self._options, "action_mapping": self._action_set.to_python_code}
        env = gymnasium.make(id, **options, **({"task_kwargs": more} if more else {}), disable_env_checker=True)
        self._made = (env, dict(task))
        return env

    def _shown(self, seen: Mapping[str, Any]) -> dict[str, Any]:
        """Tabs, the page, and what was wrong with the last action."""
        active = int(seen["active_page_index"][0])
        pages = zip(seen["open_pages_titles"], seen["open_pages_urls"], strict=True)
        lines = ["Tabs:"]
        for number, (title, url) in enumerate(pages):
            lines.append(f"{number}{' (active)' if number == active else ''}: {title}, {url}")
        if self._axtree:
            lines += ["Page:", self._page(seen)]
        if seen["last_action_error"]:
            lines.append(f"Error of the last action: {seen['last_action_error']}")
        images = [seen["screenshot"]] if self._screenshot and self.show_images else []
        return {"text": "\n".join(lines), "images": images}

    def _page(self, seen: Mapping[str, Any]) -> str:
        """The page's accessibility tree as text."""
        obs = importlib.import_module("browsergym.utils.obs")
        text = obs.flatten_axtree_to_str(
            seen["axtree_object"],
            extra_properties=seen["extra_element_properties"],
            filter_visible_only=self._visible_only,
            # newer Chromium repeats each text in nodes of this role
            ignored_roles=[*obs.IGNORED_AXTREE_ROLES, "InlineTextBox"],
        )
        cut = f" ... ({len(text)} characters)" if len(text) > MAX_PAGE_CHARS else ""
        return str(text[:MAX_PAGE_CHARS]) + cut


def _register(id: str, registry: Mapping[str, Any]) -> None:
    """Import the package that registers a task."""
    benchmark = id.removeprefix(PREFIX).partition(".")[0]
    if id not in registry and "." in id:
        try:
            importlib.import_module(f"browsergym.{benchmark}")
        except ModuleNotFoundError as error:
            raise UserError(
                f"{id} needs {error.name}; install browsergym-{benchmark} with the Python of environment.python"
            ) from None
    if id not in registry:
        known = [name for name in registry if name.startswith(PREFIX)]
        near = [name for name in known if name.startswith(f"{PREFIX}{benchmark}.")]
        raise UserError(f"BrowserGym has no task {id!r}; it has: {', '.join((near or known)[:20])}")


@functools.cache
def _start_playwright(executable: str) -> None:
    """Let BrowserGym use a browser of this machine: it has no option for that of its chat window."""
    program = find_chromium(executable)
    if program is None:
        return
    core = importlib.import_module("browsergym.core")
    playwright = importlib.import_module("playwright.sync_api").sync_playwright().start()
    playwright.chromium.launch = functools.partial(playwright.chromium.launch, executable_path=program)
    core._set_global_playwright(playwright)


def _goal(parts: Sequence[Mapping[str, Any]], show_images: bool) -> tuple[str, list[Any]]:
    """Text and images of a goal."""
    texts, images = [], []
    for part in parts:
        if part["type"] == "text":
            texts.append(str(part["text"]))
            continue
        address = part["image_url"]
        address = str(address["url"] if isinstance(address, Mapping) else address)
        content = address.partition(";base64,")[2]
        try:
            if not (content and show_images):
                raise ImageError("it is not part of the task" if show_images else "the model sees no images")
            images.append(decode_image(base64.b64decode(content)))
        except (ImageError, ValueError) as error:
            texts.append(f"[an image that cannot be shown: {error}]")
    return "\n".join(texts), images
