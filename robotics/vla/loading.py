"""Loading policies: from a saved folder, new for a simulator, or from a user's own module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from mmrl.errors import UserError
from mmrl.fields import bounded, by_kind, check_config, choice
from robotics.sim.episodes import RobotSim, views_of
from robotics.vla.module_adapter import ModuleAdapter
from robotics.vla.policy import ActionPolicy, open_policy

if TYPE_CHECKING:
    from robotics.vla.lerobot_server import LeRobotServerConfig

Served = TypeVar("Served", bound="LeRobotServerConfig")


def _option_classes() -> dict[str, type[Any]]:
    from robotics.vla.flow_policy import FlowPolicyConfig
    from robotics.vla.gaussian_policy import GaussianPolicyConfig
    from robotics.vla.lerobot_flow import LeRobotFlowConfig
    from robotics.vla.lerobot_policy import LeRobotPolicyConfig
    from robotics.vla.openvla_folder import OpenVlaConfig
    from robotics.vla.small import SmallVlaConfig
    from robotics.vla.vlm_policy import VlmActionConfig

    own = {"small": SmallVlaConfig, "gaussian": GaussianPolicyConfig, "flow": FlowPolicyConfig, "vlm": VlmActionConfig}
    return {**own, "lerobot": LeRobotPolicyConfig, "lerobot_flow": LeRobotFlowConfig, "openvla": OpenVlaConfig}


@dataclass
class ActionPolicyConfig:
    """Which policy is trained."""

    path: str = ""
    """Folder of a saved policy, such as the checkpoint of a cloning run; empty = a new one."""
    kind: str = choice("small", lambda: POLICIES, or_function=True)
    """Kind of a new policy: small, gaussian, flow, vlm, lerobot (a frozen one of LeRobot's with a learned correction),
    lerobot_flow (LeRobot's SmolVLA or pi0, whose action expert learns), openvla (a folder of OpenVLA-OFT, with action
    tokens or an action head), or module:function that returns an ActionPolicy or a module with act and log_probs. With
    a path it matters only for a user's function, which builds the module whose weights are loaded."""
    chunk: int = bounded(8, at_least=1)
    """K, control steps that a new policy predicts at once, for openvla as it learned them; a saved policy and LeRobot's
    keep their own."""
    options: dict[str, Any] = by_kind(_option_classes, without=("action_size", "chunk"))
    """Further options of a new policy's configuration, or arguments of the user's function. With a path only `vlm`:
    changes to the saved model's settings, such as dtype, attention or gradient_checkpointing."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        if self.path and set(self.options) - {"vlm"} and ":" not in self.kind:
            raise ValueError("model.options have no effect with model.path, except vlm; a saved policy keeps its own")


def load_action_policy(config: ActionPolicyConfig, sim: RobotSim, seed: int) -> ActionPolicy:
    """Open or build a policy.

    Args:
        config: which one.
        sim: determines sizes and the words of the instructions.
        seed: for new weights.

    Returns:
        The policy on the CPU.

    Raises:
        UserError: no such folder, an unknown option, or a kind that sees fewer cameras than the simulator has.
    """
    if ":" in config.kind:
        policy = _users_policy(config, sim)
        if config.path:
            policy.load_weights(Path(config.path))
    elif config.path:
        policy = _saved(config)
    else:
        if config.kind in ONE_CAMERA and views_of(sim):  # before a large model is loaded
            raise _one_camera(f"a policy of model.kind {config.kind}", views_of(sim))
        policy = POLICIES[config.kind](config, sim, sim.tasks().values(), seed)
    return policy


def _saved(config: ActionPolicyConfig) -> ActionPolicy:
    """A saved policy, with the changes to its model's settings."""
    from robotics.vla.saved import read_config

    changes = dict(config.options.get("vlm", {}))
    if not changes:
        return open_policy(config.path)
    entries = read_config(Path(config.path))
    if entries.get("kind") != "vlm":
        raise UserError(f"model.options.vlm is given, but {config.path} holds a policy of kind {entries.get('kind')!r}")
    from mmrl.vlm.model_config import ModelConfig
    from robotics.vla.vlm_policy import VlmActionPolicy

    return VlmActionPolicy.from_pretrained(config.path, _nested(ModelConfig, entries.get("model", {}), changes))


def _small(config: ActionPolicyConfig, sim: RobotSim, texts: Iterable[str], seed: int) -> ActionPolicy:
    from robotics.vla.small import SmallVlaConfig, SmallVlaPolicy

    return SmallVlaPolicy.build(SmallVlaConfig(**_sizes(SmallVlaConfig, config, sim)), texts, seed)


def _gaussian(config: ActionPolicyConfig, sim: RobotSim, texts: Iterable[str], seed: int) -> ActionPolicy:
    from robotics.vla.gaussian_policy import GaussianActionPolicy, GaussianPolicyConfig

    return GaussianActionPolicy.build(GaussianPolicyConfig(**_sizes(GaussianPolicyConfig, config, sim)), texts, seed)


def _flow(config: ActionPolicyConfig, sim: RobotSim, texts: Iterable[str], seed: int) -> ActionPolicy:
    from robotics.vla.flow_policy import FlowActionPolicy, FlowPolicyConfig

    return FlowActionPolicy.build(FlowPolicyConfig(**_sizes(FlowPolicyConfig, config, sim)), texts, seed)


def _vlm(config: ActionPolicyConfig, sim: RobotSim, texts: Iterable[str], seed: int) -> ActionPolicy:
    from mmrl.vlm.model_config import ModelConfig
    from robotics.vla.vlm_policy import VlmActionConfig, VlmActionPolicy

    options = dict(config.options)
    vlm = dict(options.pop("vlm", {}))
    _check_known("model.options", options, VlmActionConfig)
    model = _nested(ModelConfig, vlm)
    head = {"action_size": sim.action_size, "chunk": config.chunk, "seed": seed, **options}
    return VlmActionPolicy.from_model(model, VlmActionConfig(**head))


def _lerobot(config: ActionPolicyConfig, sim: RobotSim, texts: Iterable[str], seed: int) -> ActionPolicy:
    from robotics.vla.lerobot_policy import LeRobotPolicy, LeRobotPolicyConfig

    _check_known("model.options", config.options, LeRobotPolicyConfig)
    return LeRobotPolicy(_with_bounds(LeRobotPolicyConfig(**config.options), sim), seed)


def _lerobot_flow(config: ActionPolicyConfig, sim: RobotSim, texts: Iterable[str], seed: int) -> ActionPolicy:
    from robotics.vla.lerobot_flow import LeRobotFlowConfig, LeRobotFlowPolicy

    _check_known("model.options", config.options, LeRobotFlowConfig)
    return LeRobotFlowPolicy(_with_bounds(LeRobotFlowConfig(**config.options), sim))


def _with_bounds(options: Served, sim: RobotSim) -> Served:
    """The checked options, with the bounds of the environment's own actions where `action_box` asks for them."""
    _check(options)
    if not options.action_box:
        return options
    bounds = getattr(sim, "action_bounds", None)
    if bounds is None:
        raise UserError(
            "model.options.action_box is true, but the simulator does not tell the bounds of its own actions, as "
            "sim.kind gymnasium does; give model.options.action_low and action_high"
        )
    found = dataclasses.replace(options, action_box=False, action_low=list(bounds[0]), action_high=list(bounds[1]))
    _check(found)
    return found


def _check(options: LeRobotServerConfig) -> None:
    try:
        check_config(options)
    except ValueError as error:
        raise UserError(f"model.options: {error}") from error


def _openvla(config: ActionPolicyConfig, sim: RobotSim, texts: Iterable[str], seed: int) -> ActionPolicy:
    from robotics.vla.openvla_folder import OpenVlaConfig
    from robotics.vla.openvla_parts import has_action_head
    from robotics.vla.openvla_policy import OpenVlaPolicy
    from robotics.vla.openvla_regression import OpenVlaRegressionPolicy

    _check_known("model.options", config.options, OpenVlaConfig)
    settings = OpenVlaConfig(chunk=config.chunk, **config.options)
    return (OpenVlaRegressionPolicy if has_action_head(settings.folder) else OpenVlaPolicy)(settings)


def _nested(kind: type[Any], *entries: dict[str, Any]) -> Any:
    """A configuration from plain entries, checked like a file's; later entries replace earlier ones."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), *entries))
    except OmegaConfBaseException as error:
        raise UserError(f"model.options.vlm: {' '.join(str(error).split())}") from error


def _sizes(kind: type[Any], config: ActionPolicyConfig, sim: RobotSim) -> dict[str, Any]:
    """Fields of a policy's configuration: those of the simulator, then the user's."""
    from robotics.vla.encoder import EncoderConfig

    options = dict(config.options)
    encoder = dict(options.pop("encoder", {}))
    _check_known("model.options", options, kind)
    _check_known("model.options.encoder", encoder, EncoderConfig)
    fitted: dict[str, Any] = {"image_size": sim.image_size, "state_size": sim.state_size or None} | encoder
    return {"action_size": sim.action_size, "chunk": config.chunk, **options, "encoder": EncoderConfig(**fitted)}


def _check_known(where: str, given: dict[str, Any], kind: type[Any]) -> None:
    known = {entry.name for entry in dataclasses.fields(kind)} - {"action_size", "chunk"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise UserError(f"{where} has {', '.join(unknown)}; allowed: {', '.join(sorted(known))}")


def _users_policy(config: ActionPolicyConfig, sim: RobotSim) -> ActionPolicy:
    from mmrl.rewards.loading import load_function

    made = load_function(config.kind, what="model.kind")(**config.options)
    if isinstance(made, ActionPolicy):
        return made
    if isinstance(made, nn.Module):
        return ModuleAdapter(made, sim.action_size, config.chunk, getattr(made, "decisions", 1))
    raise UserError(f"model.kind {config.kind} returned a {type(made).__name__}; expected an nn.Module")


def check_fit(policy: ActionPolicy, sim: RobotSim) -> None:
    """Check that a policy's inputs and actions are those of a simulator."""
    _check_cameras(policy, sim)
    if policy.action_size != sim.action_size:
        raise UserError(
            f"the policy's actions have {policy.action_size} entries, those of the simulator {sim.action_size}"
        )
    encoder = getattr(getattr(policy, "config", None), "encoder", None)
    if encoder is None:
        return
    rendered = None if sim.image_size is None else tuple(sim.image_size)
    expected = getattr(encoder, "image_size", None)
    if expected is not None and tuple(expected) != rendered:
        raise UserError(f"the policy expects images of {tuple(expected)} pixels, the simulator renders {rendered}")
    if encoder.state_size is not None and encoder.state_size != sim.state_size:
        raise UserError(f"the policy reads {encoder.state_size} state entries, the simulator has {sim.state_size}")


def _check_cameras(policy: ActionPolicy, sim: RobotSim) -> None:
    """A policy that ignored a camera would only look as if it saw it."""
    views = views_of(sim)
    if policy.views is None or policy.views == len(views):
        return
    if not policy.views:
        raise _one_camera(f"this {type(policy).__name__}", views)
    names = f": {', '.join(policy.cameras)}" if policy.cameras else ""
    raise UserError(
        f"the policy sees {policy.views + 1} cameras{names}; the simulator observes its camera and sim.views "
        f"[{', '.join(views)}]. sim.views names the simulator's cameras for those after the first, {policy.views} of "
        "them, in that order"
    )


def _one_camera(what: str, views: tuple[str, ...]) -> UserError:
    return UserError(
        f"the simulator observes its camera and sim.views [{', '.join(views)}], but {what} sees one camera at most; "
        "leave sim.views empty, or take a policy of several cameras, see 'Several cameras' in docs/robotics.md (a "
        "class of your own sets `views`)"
    )


ONE_CAMERA = ("small", "gaussian", "flow", "vlm")

POLICIES: dict[str, Callable[[ActionPolicyConfig, RobotSim, Iterable[str], int], ActionPolicy]] = {
    "small": _small,
    "gaussian": _gaussian,
    "flow": _flow,
    "vlm": _vlm,
    "lerobot": _lerobot,
    "lerobot_flow": _lerobot_flow,
    "openvla": _openvla,
}
