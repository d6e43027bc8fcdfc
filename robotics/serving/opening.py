"""The policy of a run, a checkpoint or an exported folder, ready for serving."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from mmrl.config import foreign_run
from mmrl.entries import RecipeEntry
from mmrl.errors import UserError
from mmrl.files import read_json_object
from mmrl.recipes import RECIPES
from mmrl.runs.export import ABOUT_FILE, chosen_checkpoint
from mmrl.training.processes import make_accelerator
from robotics.episodes.collect import ActingSettings, action_scale
from robotics.methods.robot_recipe import RobotParts
from robotics.policies.base.action_policy import ActionPolicy, open_policy
from robotics.policies.base.action_statistics import BEYOND, ActionRange, ActionStatistics
from robotics.policies.base.encoder import Vocabulary
from robotics.policies.base.saved import is_saved_policy
from robotics.policies.policy_card import rendered_size
from robotics.policies.policy_loading import load_action_policy
from robotics.scenes.control import ACTION_STOP
from robotics.serving.observations import ObservationFormat, ServeConfig
from robotics.sim.interface import RobotInterface, read_sizes
from robotics.sim.opening import open_sim

ImageSize = tuple[int | None, int | None] | None
ANY_SIZE: ImageSize = (None, None)
SIM_FIELDS = ("kind", "env", "arm", "camera", "views", "state", "tasks")


@dataclass(frozen=True)
class ServedPolicy:
    """A policy and everything its responses depend on."""

    policy: ActionPolicy  # on its device, in evaluation mode
    format: ObservationFormat  # entries of a message that it reads
    config: ServeConfig  # choice of actions
    scale: ActionStatistics | None = None  # converts actions to the units of the data that it was cloned from
    bounds: ActionRange | None = None  # converts them from -1..1 to the environment's own units
    about: dict[str, Any] = dataclasses.field(default_factory=dict)  # source and training settings, for the metadata
    autocast: Callable[[], Any] = torch.no_grad  # context in which it runs, with the precision of its run

    def unknown_words(self, instruction: str) -> list[str]:
        """Words of an instruction that a policy with its own vocabulary has not learned."""
        vocabulary = getattr(self.policy, "vocabulary", None)
        found = vocabulary.unknown_words(instruction) if isinstance(vocabulary, Vocabulary) else []
        return list(dict.fromkeys(found))

    @classmethod
    def from_policy(
        cls,
        policy: ActionPolicy,
        config: ServeConfig,
        image_size: ImageSize,
        state_size: int | None,
        views: int | None = None,
    ) -> ServedPolicy:
        """Serve a policy from Python.

        Args:
            policy: on the device that it is to run on.
            config: options.
            image_size: (H, W) of its images, None in it for any number; None without images.
            state_size: entries of its state; None without a state.
            views: further cameras; as many as the policy sees when None.

        Raises:
            UserError: the policy was never in a simulator, and its actions may be in other units than -1..1.
        """
        scale = "none" if policy.statistics is None else "bounds_q99"
        cameras = (policy.views or 0) if views is None else views
        known = policy.interface or RobotInterface()
        read = ObservationFormat(image_size, state_size, config, cameras, policy.past, known)
        bounds = policy.robot_bounds if config.action_units == "environment" else None
        statistics = action_scale(policy, ActingSettings(scale=scale))
        if policy.interface is None and policy.action_bounds is None:
            _check_units(policy, statistics)
        return cls(policy.eval(), read, config, statistics, bounds)


def open_served_policy(
    folder: Path, config: ServeConfig, step: int | None = None, allow: Sequence[str] = ()
) -> ServedPolicy:
    """Open a policy, on the GPU if available.

    Args:
        folder: of a run, of which the best (else newest) checkpoint is taken, or of a saved or exported policy.
        config: options.
        step: take the run's checkpoint of this step.
        allow: code outside the suite that a run of somebody else's may name, see `mmrl.trust`.

    Raises:
        UserError: the folder holds no robot policy, or no such checkpoint, or names code that is not allowed.
    """
    if (folder / "config.yaml").is_file():
        with foreign_run(folder / "config.yaml", allow=allow) as (entry, run):
            return _of_run(folder, entry, run, config, step)
    if step is not None:
        raise UserError(f"--step is {step}, but {folder} is not a run folder: config.yaml not found")
    is_export = (folder / ABOUT_FILE).is_file()
    if is_saved_policy(folder):
        policy = open_policy(folder)
        served = ServedPolicy.from_policy(policy, config, *_inputs(policy, ANY_SIZE))
        exported = read_json_object(folder / ABOUT_FILE) if is_export else {}
        about: dict[str, Any] = {"source": str(folder)}
        about |= {name: exported[name] for name in ("recipe", "step") if name in exported}
        return _placed(served, make_accelerator(), about)
    also = f"; the custom module in {ABOUT_FILE} must be served from its run folder" if is_export else ""
    raise UserError(f"{folder} is neither a run folder (config.yaml) nor a robot policy (policy.json){also}")


def _of_run(run_dir: Path, entry: RecipeEntry, run: Any, config: ServeConfig, step: int | None) -> ServedPolicy:
    if not issubclass(type(run), RobotParts):
        folder = RobotParts.__module__.rpartition(".")[0]  # of the recipes that train robots
        kinds = ", ".join(row.name for row in RECIPES.values() if row.target.startswith(f"{folder}."))
        raise UserError(
            f"{run_dir} is a run of the recipe {entry.name}; only policies of these recipes can be served: {kinds}"
        )
    checkpoint = chosen_checkpoint(run_dir, step)
    model = checkpoint / "model"
    if run.trainer.threads:
        torch.set_num_threads(run.trainer.threads)
    if is_saved_policy(model):
        policy = open_policy(model)
        image_size, state_size = _inputs(policy, rendered_size(run, run_dir))
    else:
        policy, image_size, state_size = _users_policy(run, model)
    served = ServedPolicy.from_policy(policy, config, image_size, state_size, len(run.sim.views))
    about = {
        "source": str(checkpoint),
        "recipe": entry.name,
        "n_action_steps": run.acting.n_action_steps or policy.chunk,
        "sim": {name: getattr(run.sim, name) for name in SIM_FIELDS},
        **({"stop": list(ACTION_STOP)} if run.sim.kind == "tabletop" else {}),
    }
    return _placed(served, make_accelerator(run.trainer.mixed_precision), about)


def _check_units(policy: ActionPolicy, statistics: ActionStatistics | None) -> None:
    """Reject a policy whose actions would be clipped to -1..1, although they may be in other units."""
    if not policy.units_known:
        raise UserError(
            "nothing says the units of the policy's actions: its folder has no statistics of them; set action_low and "
            "action_high to the values of its data that are -1 and 1, such as the robot's limits"
        )
    ends = np.zeros(1) if statistics is None else np.stack([statistics.q01, statistics.q99])[:, statistics.mask]
    if np.abs(ends).max(initial=0.0) > BEYOND:
        raise UserError(
            f"the statistics of the policy's actions go from {ends.min():.4g} to {ends.max():.4g}, but only -1..1 can "
            "be served; train it in an environment whose action space is -1..1, and serve that run"
        )


def _users_policy(run: Any, model: Path) -> tuple[ActionPolicy, ImageSize, int | None]:
    """A user's own module, whose sizes are those of the run's simulator."""
    if ":" not in run.model.kind:
        raise UserError(
            f"{model} contains the weights of a custom module, but the run's model.kind is '{run.model.kind}', not a "
            "function that builds it; serve it from Python with robotics.serving.PolicyServer"
        )
    sim = open_sim(run.sim)
    try:
        policy = load_action_policy(dataclasses.replace(run.model, path=str(model)), sim, run.seed)
        return policy, sim.image_size, sim.state_size or None
    finally:
        sim.close()


def _inputs(policy: ActionPolicy, image_size: ImageSize) -> tuple[ImageSize, int | None]:
    """Image and state sizes that a saved policy reads; the given image size where it takes any."""
    sizes = read_sizes(policy)
    return getattr(sizes, "image_size", image_size), getattr(sizes, "state_size", None)


def _placed(served: ServedPolicy, accelerator: Accelerator, about: dict[str, Any]) -> ServedPolicy:
    served.policy.to(accelerator.device)
    return dataclasses.replace(served, about=about, autocast=accelerator.autocast)
