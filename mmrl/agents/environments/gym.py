"""Any Gymnasium environment with image or text observations, for agents that write their actions as text.

Images are the entries of the observation whose Boxes hold one (`mmrl.hub.foreign.image_form`), or the result of
`render`; text is the entries that are Text spaces, and any other that is asked for by name. Actions are names of a
Discrete space, a text, numbers, or the entries of a Dict by name.

MiniGrid's tasks for agents that see images: the grid as an image, the mission as text, actions by name.

    environment: {factory: "mmrl.agents.environments.gym:make", kwargs: {id: MiniGrid-DoorKey-5x5-v0}}

Source: Farama-Foundation/Minigrid minigrid/wrappers.py (image observations), minigrid/core/actions.py (action names).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.environment import FORMATS, Action, Observation, write_answer
from mmrl.errors import UserError
from mmrl.hub.foreign import as_image, image_form

if TYPE_CHECKING:
    from numpy.typing import NDArray


NAMES_TRIED = 200
"""Names of a Discrete space that are written to see whether a format fits."""


class NotExecutableError(ValueError):
    """An action that the environment does not have; the message is for the agent."""


class NamedActions:
    """A Discrete space: each action has a name and no arguments."""

    def __init__(self, space: Any, names: Sequence[str] | None) -> None:
        count, start = int(space.n), int(getattr(space, "start", 0))
        names = [str(start + index) for index in range(count)] if names is None else [str(name) for name in names]
        if len(names) != count or len(set(names)) < count:
            raise UserError(
                f"environment.adapter.action_names has {len(names)} names ({len(set(names))} distinct); the "
                f"environment has {count} actions"
            )
        self._numbers = {name: start + index for index, name in enumerate(names)}
        self.actions: Mapping[str, str] = dict.fromkeys(names, "")
        """Names, with a sentence about the arguments."""

    def read(self, action: Action) -> int:
        """The number of a name; raises NotExecutableError."""
        if action.name not in self._numbers:
            names = ", ".join(list(self._numbers)[:50])
            raise NotExecutableError(f"There is no action {action.name[:60]!r}; the actions are: {names}.")
        if action.arguments:
            raise NotExecutableError(f"The action {action.name} takes no arguments.")
        return self._numbers[action.name]

    def fits(self, format: str) -> bool:
        """Whether every name can be written in a format of actions."""
        return all(_can_write(Action(name), format) for name in list(self._numbers)[:NAMES_TRIED])

    def write(self, value: Any) -> Action:
        """The action that `read` turns into a number."""
        return Action(next(name for name, number in self._numbers.items() if number == int(value)))


class TextAction:
    """A Text space: the argument `text` of any action; without one the action's name."""

    def __init__(self, space: Any) -> None:
        self._space = space
        self.actions: Mapping[str, str] = {}

    def read(self, action: Action) -> str:
        """The text, within the space's characters and lengths; raises NotExecutableError."""
        text = action.arguments.get("text", action.name)
        if set(action.arguments) - {"text"} or not isinstance(text, str):
            raise NotExecutableError("The action is a text, with no arguments next to it.")
        if text not in self._space:
            low, high = self._space.min_length, self._space.max_length
            raise NotExecutableError(f"The text must have {low} to {high} characters, of those that are allowed.")
        return text

    def fits(self, format: str) -> bool:
        """Whether a text can be written in a format of actions; as the name of an action or as its argument it can."""
        return True

    def write(self, value: Any) -> Action:
        """The text as an argument."""
        return Action("type", {"text": str(value)})


class ArgumentActions:
    """A Dict of Discrete, Box and Text spaces: its entries are the action's arguments; a single Box is `value`."""

    def __init__(self, spaces: Mapping[str, Any], single: bool) -> None:
        self._spaces = dict(spaces)
        self._single = single
        for name, space in self._spaces.items():
            if type(space).__name__ not in CONVERTERS:
                raise UserError(
                    f"the action's entry {name!r} is {space!r:.120}; supported action spaces: {', '.join(CONVERTERS)}"
                )
        described = (f"{name}: {_described(space)}" for name, space in self._spaces.items())
        self.actions: Mapping[str, str] = {"act": ", ".join(described)}

    def read(self, action: Action) -> Any:
        """The arguments, each within its space; raises NotExecutableError."""
        if set(self._spaces) != set(action.arguments):
            given = ", ".join(sorted(action.arguments)) or "none"
            raise NotExecutableError(f"The action needs the arguments {', '.join(self._spaces)}; given: {given}.")
        values = {}
        for name, space in self._spaces.items():
            values[name] = CONVERTERS[type(space).__name__](space, action.arguments[name])
            # `contains` as well: a converter checks the form, the space its bounds
            if values[name] is None or not space.contains(values[name]):
                raise NotExecutableError(f"The argument {name} must be {_described(space)}.")
        return values["value"] if self._single else values

    def fits(self, format: str) -> bool:
        """Whether an action format can express an action with these arguments, under any name."""
        # a member of each space in the format's own syntax: some formats have no lists or texts
        arguments = {name: _example(space) for name, space in self._spaces.items()}
        return any(_can_write(Action(name, arguments), format) for name in ("act", SAY, "type"))

    def write(self, value: Any) -> Action:
        """The entries as arguments of an action."""
        entries = {"value": value} if self._single else dict(value)
        # NumPy values have no JSON form
        plain = {name: part.tolist() if hasattr(part, "tolist") else part for name, part in entries.items()}
        return Action("act", plain)


ActionReader: TypeAlias = NamedActions | TextAction | ArgumentActions


def action_reader(space: Any, names: Sequence[str] | None) -> ActionReader:
    """The reader of a space, which is recognised by the name of its class."""
    # by name, as gymnasium is optional and must not be imported here
    kind = type(space).__name__
    if kind == "Discrete":
        return NamedActions(space, names)
    if names is not None:
        raise UserError(f"environment.adapter.action_names is for Discrete actions; this environment's are {kind}")
    if kind == "Text":
        return TextAction(space)
    if kind == "Dict":
        return ArgumentActions(space.spaces, single=False)
    return ArgumentActions({"value": space}, single=True)


def _can_write(action: Action, format: str) -> bool:
    try:
        write_answer([action], format)
    except ValueError:
        return False
    return True


def _example(space: Any) -> Any:
    """A member of a Discrete, Box or Text space as an agent writes it."""
    kind = type(space).__name__
    if kind == "Text":
        return "a" * max(int(space.min_length), 1)
    return int(getattr(space, "start", 0)) if kind == "Discrete" else np.zeros(space.shape).tolist()


def _described(space: Any) -> str:
    kind = type(space).__name__
    if kind == "Discrete":
        start = int(getattr(space, "start", 0))
        return f"a whole number from {start} to {start + int(space.n) - 1}"
    if kind == "Text":
        return f"a text of {space.min_length} to {space.max_length} characters"
    # one limit only if it is the same for all entries
    low, high = (np.unique(side).tolist() for side in (space.low, space.high))
    limits = f" from {low[0]:g} to {high[0]:g}" if len(low) == len(high) == 1 else " within their bounds"
    return f"a number{limits}" if space.shape == () else f"a list of numbers of the shape {space.shape}{limits}"


def _numbers(space: Any, value: Any) -> Any:
    def all_numbers(part: Any) -> bool:
        # bool is an int in Python, but no number of an action
        return all(map(all_numbers, part)) if isinstance(part, (list, tuple)) else type(part) in (int, float)

    if not all_numbers(value):
        return None
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    # a Box of integers takes whole numbers only; the cast below would cut them
    if array.shape != space.shape or (space.dtype.kind in "iu" and (array != np.round(array)).any()):
        return None
    # Bounds are compared before a cast could wrap a number around.
    return array.astype(space.dtype) if ((array >= space.low) & (array <= space.high)).all() else None


CONVERTERS = {
    # np.int64 cannot hold larger ones
    "Discrete": lambda space, value: np.int64(value) if type(value) is int and abs(value) < 2**62 else None,
    "Box": _numbers,
    "Text": lambda space, value: value if isinstance(value, str) else None,
}
"""(space, argument) to a member of the space, or None."""


class GymEnvironment:
    """One Gymnasium environment with the methods of `mmrl.agents.environments.environment.Environment`.

    Args:
        env: gymnasium.Env.
        action_names: names of a Discrete space's actions in order; those of the environment's `metadata` when None, or
            their numbers. With a Dict of numbers and texts the entries' names are the arguments of the action.
        image_keys: entries of a Dict observation that are images, in order; None = all that look like one.
        text_keys: entries of a Dict observation that are shown as text; None = all Text spaces. An entry of another
            space is written as `name: value`.
        render: whether the image is `env.render()`, which needs render_mode="rgb_array"; None = where the observation
            has neither image nor text.
        task_options: whether the task is passed to `env.reset` as its options.
        repeat_text: whether an unchanged text is repeated next to a new image.

    Raises:
        UserError: there is nothing to look at, a key does not exist, or the actions are of another kind.
    """

    def __init__(
        self,
        env: Any,
        *,
        action_names: Sequence[str] | None = None,
        image_keys: Sequence[str] | None = None,
        text_keys: Sequence[str] | None = None,
        render: bool | None = None,
        task_options: bool = True,
        repeat_text: bool = False,
    ) -> None:
        self._env = env
        self._task_options = task_options
        self._repeat_text = repeat_text
        if action_names is None:
            action_names = (getattr(env, "metadata", None) or {}).get("action_names")
        self._reader = action_reader(env.action_space, action_names)
        self.actions = self._reader.actions
        """Names of the actions, with a sentence about their arguments."""
        parts = getattr(env.observation_space, "spaces", None)
        entries = dict(parts) if isinstance(parts, Mapping) else {"": env.observation_space}
        image_keys = _chosen("image_keys", image_keys, entries, image_form)
        self._image_forms = {key: image_form(entries[key]) for key in image_keys}
        self._text_keys = _chosen("text_keys", text_keys, entries, lambda space: type(space).__name__ == "Text")
        # an environment that shows something itself is not rendered in addition
        self._render = not (self._image_forms or self._text_keys) if render is None else render
        if self._render and getattr(env, "render_mode", None) != "rgb_array":
            raise UserError(
                f"{_name(env)} is shown to the agent as it renders itself, but its render_mode is "
                f"{getattr(env, 'render_mode', None)!r}; create it with render_mode='rgb_array'. Its observation is "
                f"{env.observation_space!r:.200}, where an image would be a Box of uint8 (H, W, 3)"
            )
        self._images: tuple[NDArray[np.uint8], ...] = ()
        self._text = ""

    def fitting_formats(self) -> list[str]:
        """Formats in which the environment's actions can be written."""
        return [name for name in FORMATS if self._reader.fits(name)]

    def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """Start an episode; the task is passed as options."""
        # an empty task is no option: some environments refuse options, or take none at all
        options = {"options": dict(task)} if self._task_options and task else {}
        observation, info = self._env.reset(seed=seed, **options)
        # the first text of an episode is always shown
        self._text = ""
        return self._observe(observation), info

    def step(self, action: Action) -> tuple[Observation, Any, bool, bool, Mapping[str, Any]]:
        """Execute an action; an action that the environment does not have changes nothing and uses up the turn."""
        try:
            value = self._reader.read(action)
        except NotExecutableError as error:
            # the agent sees the last images again, since nothing has changed
            return Observation(str(error), self._images), 0.0, False, False, {"action_error": str(error)}
        observation, reward, terminated, truncated, info = self._env.step(value)
        return self._observe(observation), reward, terminated, truncated, info

    def expert(self) -> Action:
        """The action of the environment's expert, from its method `expert_action`; raises UserError without one."""
        expert = getattr(getattr(self._env, "unwrapped", self._env), "expert_action", None)
        if expert is None:
            raise UserError(f"{_name(self._env)} has no method expert_action that returns a member of its action space")
        return self._reader.write(expert())

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _observe(self, observation: Any) -> Observation:
        parts = observation if isinstance(observation, Mapping) else {"": observation}
        images = [as_image(parts[key], form) for key, form in self._image_forms.items()]
        if self._render:
            images.append(as_image(self._env.render()))
        text = "\n".join(_text(key, parts[key]) for key in self._text_keys)
        # an instruction that comes with every image would be read in every turn
        repeated = text == self._text and bool(images) and not self._repeat_text
        self._images = tuple(images)
        self._text = text
        return Observation("" if repeated else text, self._images)


def _chosen(option: str, names: Sequence[str] | None, entries: Mapping[str, Any], fits: Any) -> list[str]:
    """The keys of entries to show: the named ones, or all that fit."""
    if names is None:
        return [name for name, space in entries.items() if fits(space)]
    listing = f"it has: {', '.join(f'{name} ({type(space).__name__})' for name, space in entries.items())}"
    for name in names:
        if name not in entries:
            listing = "it is not a Dict" if list(entries) == [""] else listing
            raise UserError(f"environment.adapter.{option}: the observation has no {name!r}; {listing}")
        if option == "image_keys" and image_form(entries[name]) is None:
            raise UserError(
                f"environment.adapter.{option}: {name!r} is {entries[name]!r:.120}; an image is a Box of uint8 (0 to "
                f"255) or floats (0 to 1) with the shape (H, W, 3) or (3, H, W), or (H, W) for grayscale. {listing}"
            )
    return list(names)


def _text(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    written = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    return f"{key}: {written}" if key else str(written)


def _name(env: Any) -> str:
    return str(getattr(getattr(env, "spec", None), "id", None) or type(env).__name__)


def make(
    id: str, *, full_view: bool = True, tile_size: int = 28, max_steps: int | None = None, direction: bool = False
) -> GymEnvironment:
    """Make one of MiniGrid's environments.

    Args:
        id: registered name, such as `MiniGrid-Empty-5x5-v0`.
        full_view: whether the image shows the whole grid; otherwise the agent's view of 7 x 7 cells.
        tile_size: pixels of a cell.
        max_steps: moves after which an episode is truncated; the environment's own number when None.
        direction: whether the text names the direction that the agent faces, which a full view shows as well.

    Returns:
        The environment.

    Raises:
        UserError: minigrid is not installed, there is no such environment, or a number is out of range.
    """
    try:
        import gymnasium
        from minigrid import wrappers  # registers its environments on import
    except ModuleNotFoundError as error:
        raise UserError(
            f"{id} needs the package {error.name}, which is not installed. Install it with: pip install "
            "'mmrl-suite[minigrid]'"
        ) from None
    known = sorted(name for name in gymnasium.registry if name.startswith(("MiniGrid-", "BabyAI-")))
    if id not in known:
        close = difflib.get_close_matches(id, known, n=3)
        raise UserError(f"MiniGrid has no {id!r}; {'did you mean' if close else 'it has'} {', '.join(close or known)}")
    if not 4 <= tile_size <= 256 or (max_steps is not None and max_steps < 1):
        raise UserError(
            f"tile_size is {tile_size} and max_steps is {max_steps}; tile_size must be 4 to 256, max_steps at least 1"
        )
    options: dict[str, Any] = {} if max_steps is None else {"max_steps": max_steps}
    env: Any = gymnasium.make(id, **options)
    view = wrappers.RGBImgObsWrapper if full_view else wrappers.RGBImgPartialObsWrapper
    names = [action.name for action in env.unwrapped.actions]
    return GymEnvironment(
        view(env, tile_size=tile_size),
        action_names=names,
        image_keys=["image"],
        text_keys=["mission", "direction"] if direction else ["mission"],
        task_options=False,
    )
