"""Episodes in a browser page, with Gymnasium's interface: common base of the task pages and MiniWoB++.

The reward is 0 until the episode ends and then the page's own verdict in [0, 1]; no clock enters it. An action that
cannot be executed is reported and costs a step. When the browser fails, the step returns `truncated` with
`info["env_error"]`: the episode has no result, and the next `reset` starts another browser.
"""

from __future__ import annotations

import abc
import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces

from mmrl.agents.environments.environment import Action, Observation
from mmrl.agents.environments.videos import MARKS
from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice
from mmrl.gui.browser.actions import (
    ACTIONS,
    MOBILE_ACTIONS,
    ActionError,
    ActionKind,
    PageCommand,
    Viewpoint,
    execute_command,
    read_action,
)
from mmrl.gui.browser.browser import Browser, BrowserFailure, BrowserSettings, process_browser
from mmrl.gui.browser.page import Element, GuardedPage, read_elements
from mmrl.gui.grounding.coords import CoordinateSpace, Point, Resize, coordinate_space
from mmrl.hub.images import resize_image

if TYPE_CHECKING:
    from numpy.typing import NDArray

SettingsT = TypeVar("SettingsT")
RESET_ATTEMPTS = 3
CHARACTERS = "".join(chr(code) for code in range(32, 0x250)) + "\n\t–—‘’“”•…€"
MAX_INSTRUCTION_CHARS = 4000


@dataclass(frozen=True)
class PageEnvSettings:
    """Size of the page and limits of an episode."""

    width_px: int = bounded(320, at_least=40, at_most=4096)
    """Screenshot width in pixels."""
    height_px: int = bounded(240, at_least=40, at_most=4096)
    """Screenshot height in pixels."""
    scale: float = bounded(1.0, at_least=0.5, at_most=4)
    """Screenshot pixels per CSS pixel."""
    space: CoordinateSpace = choice(CoordinateSpace.ABS_ORIGINAL, tuple(CoordinateSpace))
    """Meaning of the numbers in the agent's points."""
    resize: Resize | None = None
    """Resize applied to the screenshot for the model. Default: none."""
    max_steps: int = bounded(15, at_least=1)
    """Number of actions after which the episode is truncated."""
    partial_credit: bool = False
    """Reward a partly solved episode with the solved fraction instead of 0."""
    end_when_solved: bool = True
    """Whether the episode ends as soon as it is solved; otherwise the agent has to take the action finish."""
    mobile: bool = False
    """Whether the agent also has the actions of a phone (long_press, swipe, open_app, press_home, press_back), and no
    right button."""
    browser: BrowserSettings = field(default_factory=BrowserSettings)
    """Settings of the browser, among them `allow_hosts`."""

    def __post_init__(self) -> None:
        # a user's factory passes `environment.kwargs` on, in which nested options are plain dictionaries
        for name, hint in typing.get_type_hints(PageEnvSettings).items():
            if isinstance(value := getattr(self, name), Mapping):
                object.__setattr__(self, name, _value(hint, value, f"environment.{name}"))

    def validate(self) -> None:
        """Check rules between fields, and the hosts; raises UserError."""
        self.browser.validate()
        if self.space == CoordinateSpace.ABS_RESIZED and self.resize is None:
            raise UserError(
                "the coordinate space abs_resized needs `resize`, the size at which the model sees the image"
            )


@dataclass(frozen=True)
class PageVerdict:
    """The page's report on an episode."""

    reward: float
    """Reward in [0, 1] if the episode ends now."""
    success: bool
    done: bool
    """Whether the page accepts no more actions."""
    info: Mapping[str, Any] = field(default_factory=dict)


class ActionSpace(spaces.Space[dict[str, Any]]):
    """Actions as {"name": ..., "arguments": {...}}."""

    def __init__(self, viewpoint: Viewpoint, actions: Mapping[str, ActionKind], seed: int | None = None) -> None:
        super().__init__(None, None, seed)
        self._viewpoint = viewpoint
        self._actions = actions

    def sample(self, mask: Any = None, probability: Any = None) -> dict[str, Any]:
        """A random click in eight of ten cases, otherwise a wait or a scroll."""
        draw = self.np_random.random()
        if draw > 0.9:
            return {"name": "wait", "arguments": {}}
        if draw > 0.8:
            return {"name": "scroll", "arguments": {"direction": "down" if self.np_random.random() < 0.5 else "up"}}
        width, height = self._viewpoint.image_wh
        point = self.np_random.uniform(0, width), self.np_random.uniform(0, height)
        return {"name": "click", "arguments": {"point": list(self._viewpoint.from_image(point))}}

    def contains(self, x: Any) -> bool:
        """Whether it is an executable action."""
        try:
            read_action(x["name"], x["arguments"], self._viewpoint, self._actions)
        except (ActionError, KeyError, TypeError):
            return False
        return True


class PageEnv(gymnasium.Env[dict[str, Any], Any], abc.ABC):
    """An environment whose episodes run in a page: HTML, files, or a site of an allowed host.

    A subclass loads the page in `begin` and judges it in `verdict`; `make_task` may complete or check the task.

        class Counter(PageEnv):
            def begin(self, page, task, seed):
                page.load_html("<button onclick='this.textContent++'>0</button>")
                return "Click three times."

            def verdict(self, page):
                page.settle()
                clicks = page.evaluate("() => Number(document.querySelector('button').textContent)")
                return PageVerdict(float(clicks == 3), clicks == 3, done=clicks > 3)

    Cookies and storage of sites are new in every episode; what a server keeps is the subclass's to reset, in `begin`.

    Args:
        settings: what the agent sees and can do, and how long it may act.
        browser: a running browser; None uses that of the process.
    """

    def __init__(self, settings: PageEnvSettings | None = None, browser: Browser | None = None) -> None:
        settings = settings or PageEnvSettings()
        check_config(settings, "environment")
        if browser is not None and not {*settings.browser.allow_hosts} <= {*browser.settings.allow_hosts}:
            raise UserError(
                f"the environment allows the hosts {', '.join(settings.browser.allow_hosts)}, but its browser was "
                f"started with {', '.join(browser.settings.allow_hosts) or 'none'}"
            )
        self.settings = settings
        self._kinds = MOBILE_ACTIONS if settings.mobile else ACTIONS
        # the viewport is in CSS pixels; the screenshot may differ by a pixel from the requested size
        self._css_wh = round(settings.width_px / settings.scale), round(settings.height_px / settings.scale)
        image_wh = round(self._css_wh[0] * settings.scale), round(self._css_wh[1] * settings.scale)
        model_wh = settings.resize.model_wh(image_wh) if settings.resize else None
        # model_wh only with a resize: without one, the agent's image is the screenshot
        self.viewpoint = Viewpoint(settings.space, image_wh, model_wh, settings.scale)
        width, height = model_wh or image_wh
        self.action_space = ActionSpace(self.viewpoint, self._kinds)
        self.observation_space = spaces.Dict(
            image=spaces.Box(0, 255, (height, width, 3), np.uint8),
            instruction=spaces.Text(MAX_INSTRUCTION_CHARS, min_length=0, charset=CHARACTERS),
            step=spaces.Discrete(settings.max_steps + 1),
        )
        self.metadata = {"render_modes": ["rgb_array"]}
        self.render_mode = "rgb_array"
        self._browser, self._page = browser, None  # type: Browser | None, GuardedPage | None
        self._broken = self._over = True
        self._steps = 0
        self._instruction = ""
        self.answer = ""
        """Answer with which the agent ended the episode, for `verdict`; empty without one."""
        self._image: NDArray[np.uint8] = np.zeros((image_wh[1], image_wh[0], 3), np.uint8)

    @property
    def actions(self) -> Mapping[str, str]:
        """The actions with a sentence each."""
        return {name: kind.summary for name, kind in self._kinds.items()}

    @property
    def page(self) -> GuardedPage:
        """The page of the running episode."""
        if self._page is None:
            raise UserError("there is no episode; call reset() first")
        return self._page

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode.

        Args:
            seed: of the episode.
            options: the task: its name or a mapping, directly or as the entry `task`.

        Returns:
            Observation with image (H, W, 3) uint8, instruction and step; info with the completed task and elements.
        """
        super().reset(seed=seed)
        number = int(self.np_random.integers(2**31)) if seed is None else seed
        # checked before the browser is asked for a page
        task = self.make_task(_task_of(options), number)
        self.answer = ""
        # a failed browser costs a retry, not the episode: nothing has been acted yet
        for attempt in range(RESET_ATTEMPTS):
            try:
                self._instruction = self.begin(self._ready_page(), task, number)
                self._image = self.page.screenshot()
                elements = [_plain(element) for element in self.elements()]
                break
            except BrowserFailure:
                self._broken = True
                if attempt == RESET_ATTEMPTS - 1:
                    raise
        self._steps = 0
        self._over = False
        return self._observation(), {**self._facts(), "task": task, "elements": elements}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute an `Action`, or a mapping with name and arguments."""
        if self._over:
            raise UserError("the episode has ended; call reset()")
        self._steps += 1
        try:
            return self._execute(*name_and_arguments(action))
        except BrowserFailure as failure:
            self._broken = self._over = True
            info = {**self._facts(), "action_error": None, "env_error": str(failure)}
            return self._observation(), 0.0, False, True, info

    def elements(self) -> list[Element]:
        """Current controls of the page, with boxes in pixels of the screenshot."""
        return read_elements(self.page)

    def render(self) -> Any:
        """The last screenshot, (H, W, 3) uint8, as it was before any resize."""
        return self._image

    def close(self) -> None:
        """Close the page; the browser keeps running for other environments of the process."""
        if self._page is not None:
            self._page.close()
        self._page = None
        self._broken = True
        self._over = True

    def make_task(self, options: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """The complete task, as plain data; called before the browser is asked for a page.

        Args:
            options: the task as given to `reset`.
            seed: of the episode.

        Returns:
            The task for `begin`; by default the options, with the seed of the episode unless they have one.
        """
        return {"seed": seed, **options}

    @abc.abstractmethod
    def begin(self, page: GuardedPage, task: Mapping[str, Any], seed: int) -> str:
        """Load the page of a task (`load_html`, `load_file` or `load_url`) and return the instruction.

        Args:
            page: an empty page; after a failure of the browser, this is called again with another one.
            task: result of `make_task`.
            seed: of the episode.
        """

    @abc.abstractmethod
    def verdict(self, page: GuardedPage) -> PageVerdict:
        """Let the page settle after an action and judge it, which may depend on `self.answer`."""

    def _execute(
        self, name: str, arguments: Mapping[str, Any]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        code = message = None
        # an action that cannot be read still waits: the page may change by itself
        command = PageCommand("wait")
        try:
            command = read_action(name, arguments, self.viewpoint, self._kinds)
            # before it is executed: `verdict` may judge the answer
            self.answer = command.text if command.name in ("finish", "fail") else ""
            execute_command(command, self.page)
        except ActionError as error:
            code, message = error.code, str(error)
        if self.page.allow_hosts:
            # an action may have opened another page, which has no answers before it is there
            self.page.settle()
        # also after a refused action: pages with timers go on
        verdict = self.verdict(self.page)
        self._image = self.page.screenshot()
        solved = verdict.success and self.settings.end_when_solved
        terminated = verdict.done or solved or command.name in ("finish", "fail")
        truncated = not terminated and self._steps >= self.settings.max_steps
        self._over = terminated or truncated
        # paid once, at the end; giving up is never paid
        reward = verdict.reward if self._over and command.name != "fail" else 0.0
        info = {**self._facts(), **verdict.info, "success": verdict.success and command.name != "fail"}
        info |= {"answer": self.answer} if self.answer else {}
        info |= {MARKS: [self._seen_point(point) for point in command.points]}
        info |= {"action_error": code, "action_message": message, "events": self.page.take_events()}
        info |= {"blocked_requests": self.page.blocked.total()}
        return self._observation(), reward, terminated, truncated, info

    def _seen_point(self, point: Point) -> Point:
        """A point of the screenshot in pixels of the image that the agent saw."""
        (width, height), seen = self.viewpoint.image_wh, self.viewpoint.model_wh or self.viewpoint.image_wh
        return point[0] * seen[0] / width, point[1] * seen[1] / height

    def _ready_page(self) -> GuardedPage:
        """A page in a running browser; a new one if the last one failed or is too old."""
        browser = self._browser
        if browser is None:
            browser = self._browser = process_browser(self.settings.browser)
        if not browser.is_alive() or (self._broken and self._page is not None):
            browser.restart()
        elif browser.is_old():
            browser.restart(after_failure=False)
        if self._page is not None and self._page.allow_hosts:
            # cookies and storage of the last episode would stay
            self._page.close()
            self._page = None
        if self._page is None or not self._page.is_open():
            self._page = GuardedPage(browser, *self._css_wh, scale=self.settings.scale)
        self._broken = False
        return self._page

    def _observation(self) -> dict[str, Any]:
        image, model_wh = self._image, self.viewpoint.model_wh
        if model_wh is not None:
            from PIL import Image

            image = np.asarray(resize_image(Image.fromarray(image), model_wh))
        return {"image": image, "instruction": self._instruction, "step": self._steps}

    def _facts(self) -> dict[str, Any]:
        restarts = 0 if self._browser is None else self._browser.restarts
        return {"wh": self.viewpoint.image_wh, "model_wh": self.viewpoint.model_wh, "browser_restarts": restarts}


class WebAgentEnv:
    """A page environment with the methods of `mmrl.agents.environments.environment.Environment`.

    The first observation's text is the instruction; later ones hold errors of an action, and what the page tried and
    was refused. A browser that fails raises, so that the episode has no result.
    """

    def __init__(self, env: PageEnv) -> None:
        self.env = env

    @property
    def actions(self) -> Mapping[str, str]:
        """The actions with a sentence each."""
        return self.env.actions

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed, options={"task": dict(task)})
        return Observation(observation["instruction"], (observation["image"],)), info

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, Mapping[str, Any]]:
        """Execute an action; raises BrowserFailure if the browser failed."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if "env_error" in info:
            raise BrowserFailure(info["env_error"])
        texts = [text for text in (info["action_message"], *info["events"]) if text]
        return Observation("\n".join(texts), (observation["image"],)), reward, terminated, truncated, info

    def close(self) -> None:
        """Close the page."""
        self.env.close()


def register_environments(entry_point: str, ids: Mapping[str, Mapping[str, Any]]) -> None:
    """Register environments (id to keyword arguments) with Gymnasium; they truncate episodes themselves."""
    for name, arguments in ids.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point=entry_point, kwargs=dict(arguments))


def settings_from(kind: type[SettingsT], values: Mapping[str, Any], where: str = "environment.kwargs") -> SettingsT:
    """Build settings from plain data; raises UserError for an unknown entry."""
    names = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    unknown = [name for name in values if name not in names]
    if unknown:
        raise UserError(f"{where} has no entry {unknown[0]!r}; it has: {', '.join(names)}")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _task_of(options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    task = (options or {}).get("task", options or {})
    if isinstance(task, str):
        return {"name": task}
    if not isinstance(task, Mapping):
        raise UserError(
            f"the task is a {type(task).__name__}; expected its name, or a mapping such as {{'name': 'login'}}"
        )
    return task


def name_and_arguments(action: Any) -> tuple[str, Mapping[str, Any]]:
    """Name and arguments of an `Action`, or of a mapping with both."""
    if isinstance(action, Action):
        return action.name, action.arguments
    if isinstance(action, Mapping) and isinstance(action.get("name"), str):
        arguments = action.get("arguments", {})
        return action["name"], arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
    raise UserError(f"an action must be an Action or a mapping with name and arguments; got {action!r:.120}")


def _plain(element: Element) -> dict[str, Any]:
    kept = ("key", "role", "tag", "name", "text", "hidden", "icon_only")
    return {**{name: getattr(element, name) for name in kept}, "box": list(element.box)}


def _value(hint: Any, value: Any, where: str) -> Any:
    if hint is CoordinateSpace:
        return coordinate_space(value)
    if isinstance(value, Mapping):
        part: Any = next(
            (option for option in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(option)), None
        )
        return value if part is None else settings_from(part, value, where)
    return tuple(value) if isinstance(value, list) else value
