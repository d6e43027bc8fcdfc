"""Any Gymnasium environment with continuous actions as the `RowEnv` of a worker.

Loaded by its path in the environment's own Python, so it needs only Python 3.8 and numpy. It never imports gymnasium:
spaces are recognised by their class names, which gym and gymnasium share.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mmrl.hub import foreign
else:  # `env_service` has loaded it by its path where this package is not installed
    foreign = sys.modules.get("mmrl_foreign") or importlib.import_module("mmrl.hub.foreign")

LAYOUTS = 1 << 30
MOST_WHOLE = 1 << 24
"""Maximum bound of an integer Box: policies act in float32, which represents every integer up to it."""
UNBOUNDED = 1e30
"""Larger bounds count as none; many environments use the largest float32."""


class EnvError(Exception):
    """An environment that cannot be used as requested; the message names the cause and what is allowed."""

    for_user = True


class GymRow:
    """One Gymnasium environment, its observations split into state and image, its actions scaled from -1..1.

    Actions of a Box of integers are rounded to the nearest whole number. An entry whose bounds are equal, such as a
    locked joint, is passed through: it always has its only value, which is 0 on the scale -1..1.

    Args:
        env: gymnasium.Env with a Box of actions. Its `metadata` may have `instruction`, `image_size`, the (H, W) of
            `render`, without which an image is rendered to find out, and `state_names` and `action_names`, the names of
            the entries in their order.
        task: name of its only task; None = the registered id.
        instruction: language instruction; None = the one in the environment's `metadata`.
        state_keys: entries of a Dict observation that make the state, in this order; None = all numbers and vectors,
            without images, maps and texts. Nested Dicts are flattened.
        image_key: entry of a Dict observation that is the image, in any form of `mmrl.hub.foreign.image_form`; None =
            the first one of RGB, else the first of another form but a grey (H, W), else `env.unwrapped.policy_image()`
            (of environments that render something else for people), else `env.render()`. Images that are rendered are
            (H, W, 3) uint8, or grey or with transparency.
        views: additional cameras of the image's size: entries of a Dict observation, or cameras of
            `env.unwrapped.policy_image(camera=name)`. Empty = those of `metadata`.
        size: size in pixels of the square to which images are resized, by averaging areas; None = as drawn.
        fit: how images that are not square are resized: "pad", with black bars on both sides, or "stretch"; see
            `resize`.
        success_key: entry of `info` that reports success, by the end of the first episode at the latest; None =
            `success` or `is_success`; "" = these two, and no success if they are missing.
        success_reward: a control step with at least this reward solves the task, if `info` does not report success.
        horizon: control steps per episode; None = as registered with the id.
        control_hz: control steps per second; None = `render_fps` of the environment's `metadata`.
        layout_options: whether to pass `reset` the options layout, split, and draw (of the domain randomisation, if it
            is not 0) in addition to the seed.
        expert: function from the environment's observation to an action in its units, which is clipped to its bounds;
            in options its name, module:function or file.py:function. None = the row has no method `expert`.
    """

    def __init__(
        self,
        env: Any,
        *,
        task: str | None = None,
        instruction: str | None = None,
        state_keys: Sequence[str] | None = None,
        image_key: str | None = None,
        views: Sequence[str] = (),
        size: int | None = None,
        fit: str = "pad",
        success_key: str | None = None,
        success_reward: float | None = None,
        horizon: int | None = None,
        control_hz: float | None = None,
        layout_options: bool = False,
        expert: Callable[[Any], Any] | None = None,
    ) -> None:
        if fit not in FITS:
            raise EnvError(f"fit is {fit!r}; must be {' or '.join(FITS)}")
        self._fit = fit
        self._camera_size = (0, 0)
        if hasattr(env, "single_action_space"):
            raise EnvError(f"{env} is a vector environment; give one of its environments, of which workers start more")
        spec = getattr(env, "spec", None)
        self._env, self._low, self._high = env, *_bounds(env.action_space)
        self.action_integer = np.dtype(env.action_space.dtype).kind != "f"
        if control_hz is not None and not (np.isfinite(control_hz) and control_hz > 0):
            raise EnvError(f"control_hz is {control_hz}; expected control steps per second, above 0")
        if expert is not None:
            self.expert = partial(self._experts_action, expert)  # its presence shows a worker that there is an expert
        # robosuite's wrappers unwrap to objects that are not Gymnasium environments
        draws = [getattr(owner, "policy_image", None) for owner in (env, getattr(env, "unwrapped", None))]
        self._draw: Any = draws[0] or draws[1]
        self._name = task or getattr(spec, "id", None) or type(getattr(env, "unwrapped", env)).__name__
        self._metadata: Mapping[str, Any] = getattr(env, "metadata", None) or {}
        self.control_hz = self._metadata.get("render_fps") if control_hz is None else float(control_hz)
        self._instruction = str(self._metadata.get("instruction", "")) if instruction is None else instruction
        self._state_keys, self._image_key, self.left_out = _split_keys(env.observation_space, state_keys, image_key)
        parts = getattr(env.observation_space, "spaces", None)
        spaces = parts if isinstance(parts, Mapping) else {"": env.observation_space}
        self._forms = _image_forms(spaces)
        self._success_key = success_key
        self._success_reward = success_reward
        # unless the user has decided, the first episode must show that `info` reports success
        self._success_known = success_key == "" or success_reward is not None
        self._layout_options = layout_options
        self._size = size
        self._elapsed = 0
        self._resets_itself = False
        self.executed: np.ndarray | None = None
        self.discarded = False
        self.image_problem = ""
        self._info: Mapping[str, Any] = {}
        self.horizon = _horizon(horizon, spec)
        self.action_size = int(np.prod(env.action_space.shape))
        self.action_bounds = (self._low, self._high)
        # sizes of state and image are only known from an observation; a worker resets again before it steps
        self._begin(seed=0)
        self.state_size = len(self.state())
        self.state_names = self._state_names(state_keys is None)
        self.action_names = _listed_names(self._metadata, "action_names", self.action_size)
        self.image_size = self._image_size()
        self.views = tuple(views or self._metadata.get("views", ()))
        self._check_views()
        # the name under which a policy stores its camera; the user's key comes first
        self.camera = image_key or str(self._metadata.get("camera") or self._image_key or "")

    def tasks(self) -> Mapping[str, str]:
        """The only task with its instruction."""
        return {self._name: self._instruction}

    def layouts(self) -> Mapping[str, int | None]:
        """Layouts are seeds, those of held_out above those of train."""
        return {"train": LAYOUTS, "held_out": LAYOUTS}

    def reset(self, task: str, layout: int, split: str, seed: int, draw: int | None = 0) -> None:
        """Begin an episode; the seed differs from layout to layout and from split to split."""
        options: dict[str, Any] | None = {"layout": layout, "split": split} if self._layout_options else None
        # draw 0 is the default episode, which an environment without randomisation has too
        if draw != 0:
            if options is None:
                raise EnvError(f"draw is {draw}, which is an option of reset; set the adapter's layout_options")
            options["draw"] = draw
        self._elapsed, self._resets_itself, self.executed, self.discarded = 0, False, None, False
        # no options without layout_options: some environments reject unknown ones, or take none at all
        self._begin(seed=seed, **({} if options is None else {"options": options}))

    def _begin(self, **arguments: Any) -> None:
        found = self._env.reset(**arguments)
        if not isinstance(found, tuple) or len(found) != 2:
            raise EnvError(
                f"reset of {self._name} returned {type(found).__name__}; expected (observation, info) as in Gymnasium, "
                "where `step` returns (observation, reward, terminated, truncated, info)"
            )
        self._observation, info = found
        self._info = info if isinstance(info, Mapping) else {}

    def domain_draw(self) -> Mapping[str, Any]:
        """Domain randomisation as reported in `info`."""
        found = self._info.get("randomization")
        return dict(found) if isinstance(found, Mapping) else {}

    def step(self, action: np.ndarray) -> tuple[float, bool, bool, bool]:
        """Act for one control step with (A,) in -1..1; returns reward, success, terminated and truncated."""
        space = self._env.action_space

        # the inverse of `_scaled`; equal bounds give the only value of a locked entry
        scaled = self._low + (np.asarray(action, np.float64) + 1.0) / 2.0 * (self._high - self._low)
        if self.action_integer:  # a cast alone would cut the fraction off
            scaled = np.rint(scaled)
        # by rounding, 1 may be just beyond the upper bound
        scaled = np.clip(scaled, self._low, self._high)
        self._observation, given, terminated, truncated, info = self._env.step(
            scaled.reshape(space.shape).astype(space.dtype)
        )
        self.executed, self.discarded = self._persons_action(info), bool(np.any(info.get("rerecord_episode", False)))
        reward = foreign.as_number(given, "the reward")
        success = self._success(reward, info)
        self._elapsed += 1
        # environments return NumPy flags, 0 and 1, or something that is no flag at all
        terminated, truncated = foreign.as_flag(terminated, "terminated"), foreign.as_flag(truncated, "truncated")
        last = next((info[key] for key in LAST_KEYS if info.get(key) is not None), None)
        if last is not None and (terminated or truncated):
            # it has begun the next episode, whose first observation is not the end of this one
            self._observation, self._resets_itself = last, True
        # raised at the end of the first episode, before a run counts every episode as a failure
        if not self._success_known and (terminated or truncated or self._elapsed >= self.horizon):
            if self._success_key:
                raise EnvError(f"info has no {self._success_key!r}; it has: {', '.join(sorted(info))}")
            raise EnvError(
                f"{self._name}: an episode has ended, but info does not report success; it has: "
                f"{', '.join(sorted(info)) or 'nothing'}. Set success_key to the entry that reports success, or "
                "success_reward to the reward of a control step that means success; use success_key='' if only the "
                "reward should count"
            )
        return reward, success, terminated, truncated

    def _experts_action(self, expert: Callable[[Any], Any]) -> np.ndarray:
        """(A,) in -1..1."""
        return self._scaled(expert(self._observation), "the expert's")

    def _persons_action(self, info: Mapping[str, Any]) -> np.ndarray | None:
        """(A,) in -1..1 of a person who acted instead of the policy, as wrappers of SERL and gym-hil report it."""
        acted = info.get("is_intervention")
        if acted is not None and not np.any(acted):
            return None
        given = next((info[key] for key in PERSON_KEYS if info.get(key) is not None), None)
        if acted is None and info.get(PERSON_KEYS[0]) is None:
            return None
        if given is None:
            raise EnvError(f"info says is_intervention, but has no action of the person: {' or '.join(PERSON_KEYS)}")
        return self._scaled(given, "a person's")

    def _scaled(self, given: Any, whose: str) -> np.ndarray:
        """(A,) in -1..1 of an action in the environment's units."""
        try:
            action = np.ravel(np.asarray(given, np.float64))
        except (TypeError, ValueError):
            raise EnvError(f"{whose} action is {given!r}; expected {len(self._low)} numbers") from None
        if action.shape != self._low.shape or not np.isfinite(action).all():
            raise EnvError(f"{whose} action is {action}; expected {len(self._low)} finite numbers")
        if self.action_integer:
            action = np.rint(action)
        width = self._high - self._low
        # a locked joint has no scale; its only value is 0 by convention
        locked = width == 0
        scaled = (action - self._low) / np.where(locked, 1.0, width) * 2.0 - 1.0
        return np.where(locked, 0.0, np.clip(scaled, -1.0, 1.0))

    def _state_names(self, whole: bool) -> list[str] | None:
        """Names of the entries of the state: those of `metadata`, if it is whole, else by the keys of a Dict."""
        listed = _listed_names(self._metadata, "state_names", self.state_size) if whole else None
        if listed is not None or self._state_keys is None:
            return listed
        return [name for key in self._state_keys for name in _leaf_names(key, self._observation[key])]

    def state(self) -> np.ndarray:
        """(S,) float32, the entries of the state one after the other."""
        parts = [self._observation[key] for key in self._state_keys] if self._state_keys is not None else []
        # a plain Box is the state, unless the whole observation is an image
        if self._state_keys is None and self._image_key is None:
            parts = [self._observation]
        return np.concatenate([np.zeros(0), *_leaves(parts)]).astype(np.float32)

    def render(self) -> np.ndarray:
        """(H, W, 3) image of the observation, or of `render`."""
        return self._resized(self._raw_image())

    def render_views(self) -> np.ndarray:
        """(V, H, W, 3) images of the additional cameras."""
        return np.stack([self._resized(self._raw_view(name)) for name in self.views])

    def _resized(self, image: np.ndarray) -> np.ndarray:
        if self._size is None or image.shape[:2] == (self._size, self._size):
            return image
        return resize(image, self._size, self._fit)

    @property
    def shadow_lights(self) -> int:
        """Number of lights that cast shadows in the MuJoCo scene that the environment renders; 0 if unknown."""
        model: Any = getattr(getattr(self._env, "unwrapped", self._env), "model", None)
        own = self._image_key is not None or self._draw is not None  # not known how these are drawn
        if own or type(model).__name__ != "MjModel" or not model.vis.quality.shadowsize:
            return 0
        return int(np.sum(model.light_castshadow & model.light_active))

    @property
    def fitted_camera(self) -> Mapping[str, Any]:
        """(H, W) of a camera that is not square, the size its image is resized to, and how; empty if it is square."""
        height, width = self._camera_size
        if self._size is None or height == width:
            return {}
        return {"camera_size": [height, width], "size": self._size, "fit": self._fit}

    def _raw_view(self, name: str) -> np.ndarray:
        if name in self._forms:
            return foreign.as_image(self._observation[name], self._forms[name])
        return foreign.as_image(self._draw(camera=name))

    def _check_views(self) -> None:
        if not self.views:
            return
        # an environment may draw its own camera only
        draws = self._draw is not None and "camera" in inspect.signature(self._draw).parameters
        others = [name for name in self._forms if name != self._image_key]
        for name in self.views:
            if not draws and name not in others:
                raise EnvError(
                    f"{self._name} has no additional camera {name!r}. Apart from the policy's image, its observation "
                    f"has the images {', '.join(others) or 'none'}, and it has no method policy_image(camera)"
                )
            try:
                shape = self._resized(self._raw_view(name)).shape
            except Exception as error:
                raise EnvError(f"{self._name} cannot render the camera {name!r}: {error}") from error
            if self.image_size is not None and shape != (*self.image_size, 3):
                raise EnvError(
                    f"the camera {name!r} of {self._name} has images of the shape {shape}; expected "
                    f"{(*self.image_size, 3)}, the shape of the policy's image; set a size to which all images are "
                    "resized"
                )

    def _raw_image(self) -> np.ndarray:
        if self._image_key is not None:
            seen = self._observation[self._image_key] if self._image_key else self._observation
            return foreign.as_image(seen, self._forms[self._image_key])
        if self._resets_itself:
            raise EnvError(f"{self._name} resets itself, so it cannot render the end of an episode; turn that off")
        return foreign.as_image((self._draw or self._env.render)())

    def describe(self) -> Mapping[str, Any]:
        """Id, versions, and suite and control rate from `metadata`."""
        spec = getattr(self._env, "spec", None)
        return {
            **({"suite": self._metadata["suite"]} if "suite" in self._metadata else {}),
            "versions": _versions(self._env),
            "environment": getattr(spec, "id", type(self._env).__name__),
            "render_fps": self._metadata.get("render_fps"),
            "state_keys": list(self._state_keys) if self._state_keys is not None else None,
            "image_key": self._image_key,
            **({"image_fit": self._fit} if self.fitted_camera else {}),
            **({"views": list(self.views)} if self.views else {}),
        }

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _image_size(self) -> tuple[int, int] | None:
        # drawing an image to measure it would need a renderer that the run may never use
        declared = self._metadata.get("image_size")
        if declared is not None and self._image_key is None:
            self._camera_size = int(declared[0]), int(declared[1])
            return self._camera_size if self._size is None else (self._size, self._size)
        # rendering in another mode opens a window or returns text
        if self._image_key is None and getattr(self._env, "render_mode", None) != "rgb_array":
            return None
        try:
            drawn = self._raw_image()
            self._camera_size = drawn.shape[0], drawn.shape[1]
            height, width = self._resized(drawn).shape[:2]
        except foreign.MalformedError as error:
            source = f"the entry {self._image_key!r} of its observation" if self._image_key else "what it shows"
            self.image_problem = f"{self._name}: {source} cannot be used: {error}"
            # of `render`, which a policy of states does not need
            if self._image_key is None:
                return None
            raise EnvError(self.image_problem) from None
        return int(height), int(width)

    def _success(self, reward: float, info: Mapping[str, Any]) -> bool:
        # the user's reward overrides what `info` says
        if self._success_reward is not None:
            return reward >= self._success_reward
        keys = (self._success_key,) if self._success_key else SUCCESS_KEYS
        # an entry may be present and None, which says nothing
        found = [foreign.as_flag(info[key], f"info[{key!r}]") for key in keys if info.get(key) is not None]
        self._success_known = self._success_known or bool(found)
        return any(found)


FITS: tuple[str, ...] = ("pad", "stretch")


def resize(image: np.ndarray, size: int, fit: str = "pad") -> np.ndarray:
    """Resize an image (H, W, C) uint8 to a square; each pixel is the mean of the area that it covers.

    "pad" keeps the proportions and adds black bars on both sides, as openpi's `resize_with_pad` does; "stretch" does
    not keep them, like OpenVLA's processor.
    """
    height, width = image.shape[:2]
    longest = max(height, width)
    rows, columns = (size, size) if fit == "stretch" else (height * size // longest, width * size // longest)
    # at least one pixel: a very long image would otherwise vanish
    part = _averaged(image, max(rows, 1), max(columns, 1))
    if part.shape[:2] == (size, size):
        return part
    square = np.zeros((size, size, image.shape[2]), np.uint8)
    # an odd remainder goes to the bottom and right
    top, left = (size - part.shape[0]) // 2, (size - part.shape[1]) // 2
    square[top : top + part.shape[0], left : left + part.shape[1]] = part
    return square


def _averaged(image: np.ndarray, height: int, width: int) -> np.ndarray:
    # one axis after the other: an average over areas is separable
    rows = np.tensordot(_shares(image.shape[0], height), image, 1)
    both = np.tensordot(_shares(image.shape[1], width), rows, (1, 1))
    return np.rint(both).astype(np.uint8).transpose(1, 0, 2)


def _shares(given: int, wanted: int) -> np.ndarray:
    """(wanted, given) fraction of each given pixel in each wanted one."""
    edges = np.linspace(0.0, given, wanted + 1)
    cells = np.arange(given)
    overlap = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    # a wanted pixel is the mean of the given ones that it overlaps, weighted by the overlap
    covered = np.clip(overlap, 0.0, None)
    return covered / covered.sum(1, keepdims=True)


def _leaves(parts: Sequence[Any]) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    for part in parts:
        # sorted keys: the order of a Dict must not depend on how the environment built it
        found += _leaves([part[key] for key in sorted(part)]) if isinstance(part, Mapping) else [np.ravel(part)]
    return found


def _leaf_names(name: str, part: Any) -> list[str]:
    """Names of the entries of a part of the observation, in the order of `_leaves`."""
    if isinstance(part, Mapping):
        return [leaf for key in sorted(part) for leaf in _leaf_names(f"{name}.{key}", part[key])]
    size = int(np.size(part))
    return [name] if size == 1 else [f"{name}[{entry}]" for entry in range(size)]


def _listed_names(about: Mapping[str, Any], entry: str, size: int) -> list[str] | None:
    names = about.get(entry)
    if names is None:
        return None
    if isinstance(names, str) or len(names) != size or len(set(map(str, names))) != size:
        raise EnvError(f"metadata[{entry!r}] is {names!r}; expected {size} different names, one per entry")
    return [str(name) for name in names]


def _bounds(space: Any) -> tuple[np.ndarray, np.ndarray]:
    if type(space).__name__ != "Box":
        raise EnvError(
            f"the action space is {space}; only a Box of continuous actions is supported. Wrap the environment so "
            "that its action space is a Box; for discrete actions, this can be one preference per action, of which "
            "the largest is chosen"
        )
    # float64: bounds of float32 Boxes are scaled without further rounding
    low, high = np.ravel(space.low).astype(np.float64), np.ravel(space.high).astype(np.float64)
    whole = np.dtype(space.dtype).kind != "f"
    bounded = np.maximum(np.abs(low), np.abs(high)) < UNBOUNDED
    for side in ("bounded_below", "bounded_above"):  # an unbounded Box of integers has its dtype's limits as bounds
        bounded &= np.ravel(getattr(space, side, np.ones(space.shape, bool)))
    if not bounded.all():
        entry = int(np.flatnonzero(~bounded)[0])
        raise EnvError(
            f"the action space is {space}; every entry needs finite bounds to be scaled from -1..1, but entry "
            f"{entry} has {low[entry]:g} to {high[entry]:g}. Set the Box to the robot's own limits, for instance "
            "with a wrapper"
        )
    if whole and max(np.abs(low).max(), np.abs(high).max()) > MOST_WHOLE:
        raise EnvError(
            f"the action space is {space}, with integers beyond {MOST_WHOLE}, which float32 (used by policies) "
            "cannot represent exactly; wrap the environment so that its action space is a Box of floats"
        )
    if (low > high).any():
        entry = int(np.flatnonzero(low > high)[0])
        raise EnvError(
            f"the action space is {space}; entry {entry} has a low of {low[entry]:g} above its high of {high[entry]:g}"
        )
    return low, high


def _image_forms(spaces: Mapping[str, Any]) -> dict[str, Any]:
    """The form of each entry that holds an image, those of RGB first."""
    forms = {key: foreign.image_form(space) for key, space in spaces.items()}
    # RGB first, because the first image becomes the policy's camera
    rgb = [key for key, form in forms.items() if form == foreign.ImageForm() and spaces[key].shape[-1] == 3]
    return {key: forms[key] for key in [*rgb, *forms] if forms[key] is not None}


def _has_channels(space: Any) -> bool:
    """Whether a space surely holds an image; a grey (H, W) may be a table of numbers."""
    return len(getattr(space, "shape", None) or ()) == 3 and foreign.image_form(space) is not None


def _split_keys(
    space: Any, state_keys: Sequence[str] | None, image_key: str | None
) -> tuple[list[str] | None, str | None, dict[str, str]]:
    """Keys of state and image, "" if the whole observation is an image, and the spaces of entries that are neither."""
    if type(space).__name__ != "Dict":
        if state_keys is not None or image_key is not None:
            raise EnvError(f"observations are {space}; state_keys and image_key only apply to a Dict")
        stacked = not _has_channels(space) and len(space.shape or ()) > 2 and np.dtype(space.dtype) == np.uint8
        if stacked or not _is_numeric(space):
            single = "one image, " if stacked else ""
            raise EnvError(
                f"observations are {space}; expected {single}a Box or another array of numbers, or a Dict of them. "
                "Wrap the environment so that each part is an entry of a Dict"
            )
        return None, "" if _has_channels(space) else None, {}
    parts = space.spaces
    for key in [*(state_keys or ()), *([image_key] if image_key else ())]:
        if key not in parts:
            raise EnvError(f"observations have no {key!r}; they have: {', '.join(parts)}")
    # by their own shape only, since a grey image cannot be told from a table
    images = [key for key in _image_forms(parts) if _has_channels(parts[key])]
    if image_key and image_key not in _image_forms(parts):
        raise EnvError(
            f"image_key {image_key!r} is {parts[image_key]}; an image is a Box of uint8, 0 to 255, or of floats, 0 "
            "to 1, of the shape (H, W, 3) or (3, H, W), or (H, W) for grey images. Available: "
            f"{', '.join(images) or 'none'}"
        )
    # the user's choice may be grey; the automatic one never is, as a grey image may be a table
    image = image_key or (images[0] if images else None)
    # by default entries with two or more dimensions are images or maps, not state; nested ones too
    flat = [
        key
        for key, part in parts.items()
        if _is_numeric(part) and all(len(leaf.shape or ()) < 2 for leaf in _inner_spaces(part))
    ]
    chosen = list(state_keys) if state_keys is not None else flat
    neither = [key for key in parts if key not in flat and not _has_channels(parts[key])]
    nested = [key for key, part in parts.items() if part.shape is None]
    for key in chosen if state_keys is not None else nested:
        if any(_has_channels(leaf) for leaf in _inner_spaces(parts[key])):
            raise EnvError(
                f"the entry {key!r} of the state contains an image; exclude it with state_keys, or wrap the "
                "environment so that the image is a separate entry"
            )
    return chosen, image, {} if state_keys is not None else {key: str(parts[key]) for key in neither if key != image}


def _is_numeric(space: Any) -> bool:
    # Text spaces have a string dtype, Sequence and Graph spaces have none
    return all(np.dtype(leaf.dtype or str).kind in "biuf" for leaf in _inner_spaces(space))


def _versions(env: Any) -> dict[str, str]:
    """Versions of the environment's own package and of those that simulate for it, as far as they are installed."""
    own = type(getattr(env, "unwrapped", env)).__module__.partition(".")[0]
    found = {}
    for name in (own, "gymnasium", "gym", "mujoco"):
        # only what has been imported: a version of something unused would say nothing
        if name in sys.modules:
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(name)
    return found


def _inner_spaces(space: Any) -> list[Any]:
    if type(space).__name__ != "Dict":
        return [space]
    return [leaf for part in space.spaces.values() for leaf in _inner_spaces(part)]


def _horizon(asked: int | None, spec: Any) -> int:
    horizon = asked if asked is not None else getattr(spec, "max_episode_steps", None)
    if horizon is None or horizon < 1:
        raise EnvError(f"horizon is {horizon}, and the environment does not set one; set sim.horizon to at least 1")
    return int(horizon)


SUCCESS_KEYS = ("success", "is_success")
LAST_KEYS = ("final_obs", "final_observation", "terminal_observation")
"""Entries of `info` in which environments that reset themselves report the last observation."""
PERSON_KEYS = ("intervene_action", "teleop_action", "action_intervention")
"""Entries of `info` in which a wrapper reports the action of a person: SERL's, only if the person acted, LeRobot's and
that of gym-hil up to 0.1.9, with `is_intervention`."""
