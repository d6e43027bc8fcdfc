"""Checks whether a dataset fits a simulator: action units, names and order of entries, cameras, and frame rate.

The numbers alone are not enough: metres from -0.06 to 0.03 are also within -1..1. If the simulator's own units are not
-1..1, the units therefore have to be declared, by `demonstrations.units` or by the dataset itself (`info: {units: ...}`
of its feature `action`, as in datasets made here), and are then compared with the numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmrl.errors import UserError
from robotics.data import LeRobotReader
from robotics.data.features import ACTION, STATE, names_of_feature, robot_features
from robotics.policies.base.action_statistics import FARTHEST, ActionRange
from robotics.policies.policy_loading import bounds_of, refuse_differences
from robotics.sim.episodes import RobotSim
from robotics.sim.interface import RobotInterface, as_rate, interface_of

LOGGER = logging.getLogger("mmrl")
UNITS = ("environment", "normalised")
TOLERANCE = 1e-3
"""Fraction of a range by which actions may exceed it, for rounding."""
LITTLE = 0.1
"""Actions that use at most this fraction of a range may be in different units."""


def action_units(info: Mapping[str, Any]) -> tuple[str, ActionRange | None]:
    """Units of the actions that a dataset declares, empty if none, and the bounds that mean -1 and 1."""
    feature = info["features"].get(ACTION, {})
    about = feature.get("info") or {}
    found = about.get("units", feature.get("units", feature.get("unit", "")))
    # LeRobot datasets have a text, a list, or a mapping by entry
    texts = found if isinstance(found, list) else list(found.values()) if isinstance(found, Mapping) else [found]
    low, high = about.get("low"), about.get("high")
    bounds = None
    # the last axis: a replay may have chunks of actions
    if isinstance(low, list) and isinstance(high, list) and [len(low)] == [len(high)] == list(feature["shape"])[-1:]:
        bounds = ActionRange(tuple(map(float, low)), tuple(map(float, high)), bool(about.get("integer", False)))
    return ", ".join(dict.fromkeys(str(text) for text in texts if text)), bounds


def recorded_features(sim: RobotSim, cameras: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Features of a dataset recorded in a simulator, in its -1..1, with the names and units that it reports."""
    known, size = interface_of(sim), sim.action_size
    features = robot_features(known.state or sim.state_size or None, known.actions or size, cameras)
    features[ACTION]["info"] = {"units": "normalised", **(bounds_of(sim) or _plain(size)).as_dict()}
    return features


def dataset_interface(info: Mapping[str, Any], cameras: Sequence[str]) -> RobotInterface:
    """Names and rate of a dataset, and the cameras used from it, the policy's image first."""
    features = info["features"]
    state, actions = (names_of_feature(features[key]) if key in features else None for key in (STATE, ACTION))
    return RobotInterface(state, actions, tuple(cameras) or None, as_rate(info["fps"]))


def check_dataset(
    path: str, info: Mapping[str, Any], used: Sequence[str], sim: RobotSim, accept_other: Collection[str] = ()
) -> None:
    """Reject a dataset whose rate, order of entries or cameras differ from a simulator's.

    Args:
        path: of the dataset, for the message.
        info: content of its `meta/info.json`.
        used: its cameras that the policy sees, in that order.
        sim: the simulator that the policy acts in.
        accept_other: facts that may differ, see `FACTS`.

    Raises:
        UserError: something differs.
    """
    data, theirs = dataset_interface(info, used), interface_of(sim)
    # If no name is shared, both sides just call the same entries differently; a shared name at a different position
    # means a different order.
    state, moves = _comparable(data.state, theirs.state), _comparable(data.actions, theirs.actions)
    known = {name.removeprefix("observation.images.") for name in info["features"]}
    # cameras that the dataset lacks are reported when they are opened, so only the order is compared
    shown = tuple(name if name in known else "" for name in theirs.cameras or ())
    found = replace(data, state=state, actions=moves).differences(replace(theirs, cameras=shown))
    refuse_differences(found, f"the dataset {path}", "the simulator", accept_other)
    if theirs.control_hz is None and data.control_hz:
        LOGGER.warning(
            "the simulator does not report its control rate, so the %g frames per second of %s cannot be compared "
            "with it; set render_fps in the environment's metadata, or sim.options.adapter.control_hz",
            *(data.control_hz, path),
        )


def check_state(path: str, sim: RobotSim, accept_other: Collection[str] = ()) -> None:
    """Reject a dataset whose states have a simulator's entries in a different order; raises UserError."""
    info, theirs = LeRobotReader(path).info, interface_of(sim)
    state = _comparable(dataset_interface(info, ()).state, theirs.state)
    refuse_differences(RobotInterface(state).differences(theirs), f"the dataset {path}", "the simulator", accept_other)


def check_replay(
    path: str, info: Mapping[str, Any], steps: int, sim: RobotSim, accept_other: Collection[str] = ()
) -> None:
    """Reject transitions of another run whose states, control rate or action bounds differ from a simulator's.

    Args:
        path: of the dataset, for the message.
        info: content of its `meta/info.json`.
        steps: control steps of one of its frames.
        sim: the simulator, in which the run acts.
        accept_other: facts that may differ, see `FACTS`.

    Raises:
        UserError: something differs.
    """
    data, theirs = dataset_interface(info, ()), interface_of(sim)
    rate = None if data.control_hz is None else data.control_hz * steps
    found = RobotInterface(_comparable(data.state, theirs.state), control_hz=rate).differences(theirs)
    own, made_with = bounds_of(sim) or _plain(sim.action_size), action_units(info)[1]
    if made_with is not None and not made_with.same_as(own):
        found["action_bounds"] = f"the bounds of an action are {made_with} in {{0}} and {own} in {{1}}"
    refuse_differences(found, f"the replay {path}", "the simulator", accept_other)


def in_simulator_units(
    path: str,
    info: Mapping[str, Any],
    actions: Sequence[NDArray[np.float32]],
    units: str,
    sim: RobotSim,
    option: str = "demonstrations.units",
) -> list[NDArray[np.float32]]:
    """Actions (T, A) of each episode of a dataset in the simulator's -1..1.

    Args:
        path: of the dataset, for messages.
        info: content of its `meta/info.json`.
        actions: as they are in the dataset.
        units: as the user declares them; empty = what the dataset says.
        sim: the simulator, which reports the bounds in the environment's units.
        option: the user's option for `units`, for messages.

    Raises:
        UserError: the units are declared nowhere and matter, declarations contradict each other or the numbers, or the
            numbers fit nothing.
    """
    size = actions[0].shape[1]
    own = bounds_of(sim) or _plain(size)
    said, made_with = action_units(info)
    if units and said in UNITS and said != units:
        raise UserError(f"{option} is {units}, but {path} declares its actions {said} in meta/info.json")
    if units == "normalised" and said and said not in UNITS:
        raise UserError(f"{option} is normalised, but {path} declares its actions in {said}")
    chosen = units or (said if said in UNITS else "")
    if chosen == "normalised" and made_with is not None and not made_with.same_as(own):
        raise UserError(
            f"{path} has actions in -1..1 for the bounds {made_with}, but the simulator has {own}: the same number "
            "means a different command. Record the data in this environment, or convert it to its units"
        )
    plain = own.same_as(_plain(size))
    # float64, since bounds are compared with a small tolerance
    joined = torch.from_numpy(np.concatenate(actions).astype(np.float64))
    as_env, as_scaled = own.to_sim(joined).numpy(), joined.numpy()
    fits = {"environment": _fits(as_env, own, joined.numpy()), "normalised": _overshoot(as_scaled) <= TOLERANCE}
    # with bounds of -1..1 both readings are the same, so nothing has to be declared
    if not chosen and not plain:
        raise UserError(_undeclared(path, said, joined.numpy(), own, fits, option))
    chosen = chosen or "normalised"
    other = "normalised" if chosen == "environment" else "environment"
    scaled = as_env if chosen == "environment" else as_scaled
    if not fits[chosen] and fits[other] and not plain:
        raise UserError(
            f"the actions of {path} are declared as {chosen}, but they range from {_span(joined.numpy())}, which "
            f"fits {'-1..1' if other == 'normalised' else f'the bounds {own} of the environment'} and not "
            f"{'-1..1' if chosen == 'normalised' else f'its bounds {own}'}; set {option}={other}"
        )
    _check_span(path, scaled, joined.numpy(), own, chosen, option)
    if chosen == "normalised" or plain:
        return list(actions)
    converted = np.split(as_env.astype(np.float32), np.cumsum([len(part) for part in actions])[:-1])
    return [np.ascontiguousarray(part) for part in converted]


def _plain(size: int) -> ActionRange:
    return ActionRange((-1.0,) * size, (1.0,) * size)


def _comparable(own: tuple[str, ...] | None, theirs: tuple[str, ...] | None) -> tuple[str, ...] | None:
    return own if own and theirs and set(own) & set(theirs) else None


def _overshoot(scaled: NDArray[np.float64]) -> float:
    return float(np.abs(scaled).max(initial=0.0)) - 1.0


def _fits(scaled: NDArray[np.float64], own: ActionRange, values: NDArray[np.float64]) -> bool:
    """Whether actions lie within the bounds; locked entries have their only value."""
    low, high = np.array(own.low), np.array(own.high)
    locked = low == high
    held = np.allclose(values[:, locked], low[locked], rtol=1e-3, atol=1e-6)
    return bool(held) and _overshoot(scaled[:, ~locked]) <= 2 * TOLERANCE


def _undeclared(
    path: str, said: str, values: NDArray[np.float64], own: ActionRange, fits: Mapping[str, bool], option: str
) -> str:
    both = [
        "the environment's own units" if fits["environment"] else "",
        "-1..1" if fits["normalised"] else "",
    ]
    fitting = " and ".join(filter(None, both)) or "neither"
    units = f" in {said}" if said else ""
    return (
        f"the actions of {path}{units} range from {_span(values)}, and the environment's own are in {own}: the "
        f"numbers fit {fitting}, and the units are not declared. Set {option}=environment for the "
        f"environment's own units (usual for robot recordings), or {option}=normalised for -1..1"
    )


def _check_span(
    path: str, scaled: NDArray[np.float64], values: NDArray[np.float64], own: ActionRange, units: str, option: str
) -> None:
    """Reject actions far outside the range, and warn about actions that are clipped or hardly use it."""
    largest = 1.0 + _overshoot(scaled)
    wide = (
        str(own)
        if units == "environment" or own.same_as(_plain(len(own.low)))
        else f"-1..1, which corresponds to {own}"
    )
    if largest > FARTHEST:
        way = (
            ""
            if units == "environment"
            else f", or set {option}=environment if they are in the environment's own units"
        )
        raise UserError(
            f"the actions of {path} range from {_span(values)}, far outside {wide}: they are in different units. "
            f"Convert them in the dataset{way}"
        )
    if largest > 1.0 + 2 * TOLERANCE:
        share = float((np.abs(scaled) > 1.0 + 2 * TOLERANCE).any(1).mean())
        LOGGER.warning(
            "the demonstrations have actions of %s, outside %s, in %.1f%% of the frames; they are clipped, as in "
            "the simulator",
            *(_span(values), wide, 100 * share),
        )
    spans = np.ptp(scaled, axis=0)
    moving = [entry for entry in np.flatnonzero(spans > 0) if len(np.unique(scaled[:, entry])) > 2]  # no grippers
    if moving and max(float(np.abs(scaled[:, entry]).max()) for entry in moving) < LITTLE:
        LOGGER.warning(
            "the actions of %s range from %s, less than %g%% of %s; they may be in larger units than the simulator's",
            *(path, _span(values), 100 * LITTLE, wide),
        )


def _span(values: NDArray[np.float64]) -> str:
    return f"{values.min():.4g} to {values.max():.4g}"
