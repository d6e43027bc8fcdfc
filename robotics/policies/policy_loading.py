"""Loading policies: from a saved folder, newly built for a simulator, or from a custom module."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from torch import nn

from mmrl.errors import UserError
from mmrl.fields import bounded, by_kind, choice, rare
from mmrl.files import expanded
from mmrl.rewards.reward_loading import call_function
from mmrl.runs.export import model_folder
from robotics.policies.base.action_policy import CONTRIB_POLICIES, SAVED_POLICIES, ActionPolicy, open_policy
from robotics.policies.base.action_statistics import ActionRange
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.base.saved import make_config, read_config
from robotics.policies.lerobot.lerobot_server import LeRobotServerConfig
from robotics.policies.module import ModuleAdapter
from robotics.sim.episodes import RobotSim, views_of
from robotics.sim.interface import FACTS, interface_of, read_sizes, seen_part, size_hint

LOGGER = logging.getLogger("mmrl")
Options = TypeVar("Options")
Served = TypeVar("Served", bound=LeRobotServerConfig)

OPTIONS = {
    "small": "robotics.policies.small:SmallVlaConfig",
    "gaussian": "robotics.policies.gaussian:GaussianPolicyConfig",
    "squashed": "robotics.policies.squashed:SquashedPolicyConfig",
    "residual": "robotics.policies.improved:ResidualPolicyConfig",
    "steered": "robotics.policies.improved:SteeredPolicyConfig",
    "flow": "robotics.policies.flow:FlowPolicyConfig",
    "vlm": "robotics.policies.vlm:VlmActionConfig",
    "lerobot": "robotics.policies.lerobot.gaussian:LeRobotPolicyConfig",
    "lerobot_flow": "robotics.policies.lerobot.flow:LeRobotFlowConfig",
    "openvla": "robotics.policies.openvla.openvla_folder:OpenVlaConfig",
    **{kind: options for kind, (_, options) in CONTRIB_POLICIES.items()},
}
"""Options dataclass of each kind of policy."""
OWN_UNITS = (
    "set model.options.action_box=true if these are the environment's own units; otherwise set "
    "model.options.action_low and action_high, to [-1, ...] and [1, ...] for -1..1"
)
RESCALED = (
    "wrap the environment so that its action space is a Box of -1..1 with the same meaning as in the policy's data; "
    "for normalised data, gymnasium.wrappers.RescaleAction does this"
)
ONE_CAMERA = ("small", "gaussian", "squashed", "flow", "vlm", *CONTRIB_POLICIES)


@dataclass
class ActionPolicyConfig:
    """The policy to train."""

    path: str = ""
    """Folder of a saved policy, or a run folder, e.g. of a cloning run (uses its best checkpoint). Default: a new
    policy."""
    kind: str = choice("small", lambda: OPTIONS, or_function=True)
    """Kind of a new policy: small, gaussian, squashed or mixture (for robot_sac), residual or steered (a frozen policy
    with a head, for robot_residual and robot_dsrl), flow, beso (imitation only), vlm, lerobot (a frozen LeRobot policy
    with a learned correction), lerobot_flow (LeRobot's SmolVLA, pi0 or pi0.5 with a trainable action expert), openvla
    (an OpenVLA-OFT folder, with action tokens or an action head), or module:function that returns an ActionPolicy or a
    module with act and log_probs. With a path, only a custom function has an effect: it builds the module whose weights
    are loaded."""
    chunk: int = bounded(8, at_least=1)
    """K, control steps that a new policy predicts at once; for openvla, the number it was trained with. Saved policies,
    LeRobot's and those with a frozen base keep their own."""
    options: dict[str, Any] = by_kind(
        lambda: {kind: _imported(spec) for kind, spec in OPTIONS.items()}, without=("action_size", "chunk")
    )
    """Further options of a new policy, or arguments of the custom function. With a path, only `vlm`: changes to the
    saved model's settings, such as dtype, attention or gradient_checkpointing."""
    accept_other: list[str] = rare(choice([], FACTS))
    """Properties of a saved policy or of demonstrations that may differ from the simulator's: names or order of state
    or actions, cameras, control_hz, action_bounds; the policy then learns the simulator's."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        if self.path and set(self.options) - {"vlm"} and ":" not in self.kind:
            raise ValueError(
                "model.options has no effect with model.path, except for vlm; a saved policy keeps its own options"
            )


def load_action_policy(config: ActionPolicyConfig, sim: RobotSim, seed: int) -> ActionPolicy:
    """Open or build a policy.

    Args:
        config: the policy to load or build.
        sim: determines the sizes and the vocabulary of the instructions.
        seed: seed of new weights.

    Returns:
        The policy on the CPU.

    Raises:
        UserError: the folder does not exist, an option is unknown, or the simulator has more cameras than the policy
            supports.
    """
    if config.path:
        # a run folder becomes the folder of its best checkpoint
        config = dataclasses.replace(config, path=model_folder(config.path))
    if ":" in config.kind:
        policy = _users_policy(config, sim)
        if config.path:
            policy.load_weights(expanded(config.path))
        return policy
    if config.path:
        return _saved(config)
    if config.kind in ONE_CAMERA and views_of(sim):  # before a large model is loaded
        raise _one_camera(f"a policy of model.kind {config.kind}", views_of(sim))
    return POLICIES[config.kind](config, sim, seed)


def _saved(config: ActionPolicyConfig) -> ActionPolicy:
    """A saved policy, with the changes to its model's settings."""
    changes = dict(config.options.get("vlm", {}))
    if not changes:
        return open_policy(config.path)
    entries = read_config(expanded(config.path))
    if entries.get("kind") != "vlm":
        raise UserError(
            f"model.options.vlm is given, but {config.path} contains a policy of kind {entries.get('kind')!r}"
        )
    from robotics.policies.vlm import VlmActionPolicy

    return VlmActionPolicy.from_pretrained(config.path, model_settings(entries.get("model", {}), changes))


def _encoded(config: ActionPolicyConfig, sim: RobotSim, seed: int) -> ActionPolicy:
    """A policy with the observation encoder: sizes from the simulator, overridden by the user's options."""
    policy_class = _imported(SAVED_POLICIES[config.kind])
    # 0 entries mean that there is no state
    sizes = {"image_size": sim.image_size, "state_size": sim.state_size or None} | config.options.get("encoder", {})
    options = {**config.options, "encoder": _options(EncoderConfig, sizes, "model.options.encoder")}
    made = _options(policy_class.config_class, options, action_size=sim.action_size, chunk=config.chunk)
    policy: ActionPolicy = policy_class.build(made, sim.tasks().values(), seed)
    return policy


def _improved(config: ActionPolicyConfig, sim: RobotSim, seed: int) -> ActionPolicy:
    """A new head on a saved policy."""
    policy_class = _imported(SAVED_POLICIES[config.kind])
    sizes = {"image_size": None, "state_size": sim.state_size} | config.options.get("encoder", {})
    options = {**config.options, "encoder": _options(EncoderConfig, sizes, "model.options.encoder")}
    made = _options(policy_class.config_class, options, action_size=sim.action_size, chunk=config.chunk)
    if not made.base:
        raise UserError(
            f"model.kind {config.kind} improves a saved policy; set model.options.base to its folder or its run"
        )
    base = open_policy(made.base)
    check_fit(base, sim, config.accept_other)
    improved: ActionPolicy = policy_class.improve(base, made, sim.state_size, sim.tasks().values(), seed)
    return improved


def _vlm(config: ActionPolicyConfig, sim: RobotSim, seed: int) -> ActionPolicy:
    from robotics.policies.vlm import VlmActionConfig, VlmActionPolicy

    options = {"seed": seed, **config.options}
    vlm = options.pop("vlm", {})
    head = _options(VlmActionConfig, options, action_size=sim.action_size, chunk=config.chunk)
    return VlmActionPolicy.from_model(model_settings(vlm), head)


def _lerobot(config: ActionPolicyConfig, sim: RobotSim, seed: int) -> ActionPolicy:
    from robotics.policies.lerobot.gaussian import LeRobotPolicy, LeRobotPolicyConfig

    return LeRobotPolicy(_served(LeRobotPolicyConfig, config, sim), seed)


def _lerobot_flow(config: ActionPolicyConfig, sim: RobotSim, seed: int) -> ActionPolicy:
    from robotics.policies.lerobot.flow import LeRobotFlowConfig, LeRobotFlowPolicy

    return LeRobotFlowPolicy(_served(LeRobotFlowConfig, config, sim))


def _served(kind: type[Served], config: ActionPolicyConfig, sim: RobotSim) -> Served:
    """Options of a served policy; with `action_box`, the bounds are those of the environment's own actions."""
    options = _options(kind, config.options)
    if not options.action_box:
        if not (options.action_low or options.action_high):
            _need_units(sim, f"{options.folder} outputs actions in the units of its data", OWN_UNITS)
        return options
    bounds = getattr(sim, "action_bounds", None)
    if bounds is None:
        raise UserError(
            "model.options.action_box is true, but the simulator does not report the bounds of its own actions, as "
            "sim.kind gymnasium does; set model.options.action_low and action_high"
        )
    low, high = (list(bound) for bound in bounds)
    # resolved to numbers, so that the saved policy needs no simulator
    return _options(kind, {**config.options, "action_box": False, "action_low": low, "action_high": high})


def _need_units(sim: RobotSim, what: str, way: str) -> None:
    """Reject an external policy with undeclared action units if the simulator's own units are not -1..1."""
    own = bounds_of(sim)
    if own is not None and not own.same_as(ActionRange((-1.0,) * len(own.low), (1.0,) * len(own.low))):
        raise UserError(f"{what}, but the environment's own are in {own}; {way}")


def _options(kind: type[Options], given: dict[str, Any], where: str = "model.options", **own: int) -> Options:
    """A policy's configuration from the user's options, plus `own` entries, which the user must not set."""
    allowed = sorted({entry.name for entry in dataclasses.fields(kind)} - set(own))  # type: ignore[arg-type]
    if unknown := sorted(set(given) - set(allowed)):
        raise UserError(f"{where} has {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    return make_config(kind, {**given, **own}, where)


def _openvla(config: ActionPolicyConfig, sim: RobotSim, seed: int) -> ActionPolicy:
    from robotics.policies.openvla.openvla_folder import HEAD, OpenVlaConfig, find_part
    from robotics.policies.openvla.regression import OpenVlaRegressionPolicy
    from robotics.policies.openvla.tokens import OpenVlaPolicy

    settings = _options(OpenVlaConfig, config.options, chunk=config.chunk)
    _need_units(
        sim, f"{settings.folder} outputs actions in the units of its data, which are assumed to be -1..1", RESCALED
    )
    # both kinds share one folder layout; the file of the head tells them apart
    has_head = find_part(expanded(settings.folder), HEAD) is not None
    return (OpenVlaRegressionPolicy if has_head else OpenVlaPolicy)(settings)


def _users_policy(config: ActionPolicyConfig, sim: RobotSim) -> ActionPolicy:
    made = call_function(config.kind, config.options, what="model.kind")
    if isinstance(made, ActionPolicy):
        return made
    if isinstance(made, nn.Module):
        return ModuleAdapter(made, sim.action_size, config.chunk, getattr(made, "decisions", 1))
    raise UserError(f"model.kind {config.kind} returned a {type(made).__name__}; expected an nn.Module")


def model_settings(*entries: dict[str, Any]) -> Any:
    """A `ModelConfig` from plain entries, checked like a file's; later entries replace earlier ones."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from mmrl.config import escaped
    from mmrl.vlm.model.model_config import ModelConfig

    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), *map(escaped, entries)))
    except OmegaConfBaseException as error:
        raise UserError(f"model.options.vlm: {' '.join(str(error).split())}") from error


def _imported(spec: str) -> Any:
    module, name = spec.split(":")
    return getattr(import_module(module), name)


def check_fit(policy: ActionPolicy, sim: RobotSim, accept_other: Collection[str] = ()) -> None:
    """Check that a policy's inputs and actions match a simulator, except for properties that may differ."""
    _check_cameras(policy, sim)
    if policy.action_size != sim.action_size:
        raise UserError(
            f"the policy's actions have {policy.action_size} entries, but the simulator's have {sim.action_size}"
        )
    sizes = read_sizes(policy)
    image_size, state_size = getattr(sizes, "image_size", None), getattr(sizes, "state_size", None)
    rendered = None if sim.image_size is None else tuple(sim.image_size)
    if image_size is not None and tuple(image_size) != rendered:
        raise UserError(
            f"the policy expects images of {tuple(image_size)} pixels, but the simulator renders {rendered}; "
            f"{size_hint(tuple(image_size))}"
        )
    fits = getattr(policy, "image_fit", None), getattr(sim, "image_fit", None)
    # policies without a processor of images take them as they come
    if None not in fits and fits[0] != fits[1]:
        raise UserError(
            f"the camera is not square; the policy's own processor uses '{fits[0]}' for non-square images, but the "
            f"simulator uses '{fits[1]}'. Set sim.options.adapter {{fit: {fits[0]}}}, or {{size: null}} to keep the "
            "camera's own size"
        )
    if state_size is not None and state_size != sim.state_size:
        raise UserError(f"the policy reads {state_size} state entries, but the simulator has {sim.state_size}")
    check_interface(policy, sim, accept_other)
    blind = [] if policy.interface is None else policy.interface.unnamed_in(interface_of(sim))
    if blind:
        LOGGER.warning(
            "the simulator does not report its %s, so it cannot be compared with what the policy was trained with",
            ", ".join(blind),
        )


def check_interface(policy: ActionPolicy, sim: RobotSim, accept_other: Collection[str] = ()) -> None:
    """Check that a policy was trained with the same order, cameras, rate and units as a simulator.

    Raises:
        UserError: a property differs that is not in `accept_other`.
    """
    sizes = policy.action_size
    theirs = seen_part(interface_of(sim), policy)
    found = {} if policy.interface is None else policy.interface.differences(theirs)
    # a simulator without reported bounds takes -1..1
    bounds = bounds_of(sim) or ActionRange((-1.0,) * sizes, (1.0,) * sizes)
    # a policy that says nothing about its units is not compared
    if policy.interface is not None or policy.action_bounds is not None:
        own = policy.action_bounds or ActionRange((-1.0,) * sizes, (1.0,) * sizes)
        if not own.same_as(bounds):
            found["action_bounds"] = f"the bounds of an action are {own} in {{0}} and {bounds} in {{1}}"
    refuse_differences(found, "what the policy was trained with", "the simulator", accept_other)


def refuse_differences(found: Mapping[str, str], first: str, second: str, accept_other: Collection[str]) -> None:
    """Reject differences between two sides, except for the accepted ones; raises UserError."""
    wrong = {name: text.format(first, second) for name, text in found.items() if name not in accept_other}
    if wrong:
        names = ", ".join([*accept_other, *wrong])
        raise UserError(
            f"{'; '.join(wrong.values())}. Make both agree, or accept the difference with model.accept_other=[{names}]"
        )
    for text in found.values():
        LOGGER.warning("accepted: %s", text.format(first, second))


def bounds_of(sim: RobotSim) -> ActionRange | None:
    """The values in a simulator's own units that correspond to -1 and 1; None if they are -1 and 1."""
    bounds = getattr(sim, "action_bounds", None)
    if bounds is None:
        return None
    low, high = (tuple(float(value) for value in bound) for bound in bounds)
    return ActionRange(low, high, bool(getattr(sim, "action_integer", False)))


def _check_cameras(policy: ActionPolicy, sim: RobotSim) -> None:
    """Reject a simulator with different cameras: a policy that ignores a camera would only appear to use it."""
    views = views_of(sim)
    if policy.views is None or policy.views == len(views):
        return
    if not policy.views:
        raise _one_camera(f"this {type(policy).__name__}", views)
    names = f": {', '.join(policy.cameras)}" if policy.cameras else ""
    raise UserError(
        f"the policy sees {policy.views + 1} cameras{names}; the simulator observes its camera and sim.views "
        f"[{', '.join(views)}]. set sim.views to the simulator's cameras for all but the first, {policy.views} of "
        "them, in that order"
    )


def _one_camera(what: str, views: tuple[str, ...]) -> UserError:
    return UserError(
        f"the simulator observes its camera and sim.views [{', '.join(views)}], but {what} uses at most one camera; "
        "leave sim.views empty, or use a policy with several cameras, see 'Several cameras' in "
        "docs/robot_policies.md (a custom class sets `views`)"
    )


POLICIES: dict[str, Callable[[ActionPolicyConfig, RobotSim, int], ActionPolicy]] = {
    "small": _encoded,
    "gaussian": _encoded,
    "squashed": _encoded,
    "residual": _improved,
    "steered": _improved,
    "flow": _encoded,
    "vlm": _vlm,
    "lerobot": _lerobot,
    "lerobot_flow": _lerobot_flow,
    "openvla": _openvla,
    **dict.fromkeys(CONTRIB_POLICIES, _encoded),
}
