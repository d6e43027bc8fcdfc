"""Build function for configurations: all episodes of a policy or an expert, with the success of each frame."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mmrl.config import from_values
from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.files import replaced
from robotics.data.features import REWARD
from robotics.episodes.collect import inputs_of
from robotics.episodes.dataset_fit import recorded_features
from robotics.episodes.recording import BATCH, CAMERA, FPS, Act, check_missing, record_episodes
from robotics.policies.base.action_policy import ActionPolicy, open_policy
from robotics.policies.base.action_tokens import RowGenerators
from robotics.policies.policy_loading import check_fit
from robotics.rewards.judged_sim import past_success
from robotics.scenes.expert_check import experts_of
from robotics.sim.episodes import EpisodeSpec, RobotObservation, RobotSim
from robotics.sim.interface import interface_of
from robotics.sim.opening import SimConfig, open_sim

if TYPE_CHECKING:
    from numpy.typing import NDArray

"""Column from which LeRobot's reward classifiers learn as well."""


def build_attempts(
    path: str,
    *,
    sim: Mapping[str, Any],
    policy: str = "",
    noise: float = 0.0,
    episodes: int = 50,
    first_layout: int = 0,
    split: str = "train",
    seed: int = 0,
) -> Path:
    """Run a policy, or the simulator's expert, and write all episodes as a LeRobotDataset.

    Episodes go on after their first success, to the horizon, so that some frames show the solved task. `next.reward` is
    1 where it is solved after the action.

    Args:
        path: folder to write.
        sim: options of the simulator, with images.
        policy: folder of a policy in -1..1 or of its run; empty = the simulator's expert.
        noise: standard deviation of noise on the actions, on the scale -1..1.
        episodes: number of episodes per task.
        first_layout: number of the first layout.
        split: of the layouts.
        seed: of the policy's samples and of the noise.
    """
    from robotics.data import EpisodeWriter

    config = from_values(SimConfig, sim, "sim")
    check_config(config, "sim")
    check_missing(Path(path))
    actor = open_policy(policy).eval() if policy else None
    camera = config.camera or CAMERA
    with replaced(Path(path)) as draft, contextlib.closing(open_sim(past_success(config))) as opened:
        if opened.image_size is None:
            raise UserError("sim.image_size is 0, but a success classifier learns from images; set a size")
        features = recorded_features(opened, {camera: opened.image_size})
        features[REWARD] = {"dtype": "float32", "shape": [1], "names": None}
        layouts = range(first_layout, first_layout + episodes)
        specs = [EpisodeSpec(name, text, layout, split) for layout in layouts for name, text in opened.tasks().items()]
        size = opened.capacity or BATCH
        with EpisodeWriter(draft, interface_of(opened).control_hz or FPS, features, config.kind) as writer:
            for start in range(0, len(specs), size):
                some = specs[start : start + size]
                act = _acting(opened, some, actor, noise, [[seed, spec.layout] for spec in some])
                for spec, seen in zip(some, record_episodes(opened, some, act), strict=True):
                    if seen.failed:
                        continue
                    states = np.stack(seen.states) if opened.state_size else None
                    extra = {REWARD: np.array(seen.solved, np.float32)[:, None]}
                    images = seen.images_of([camera])
                    writer.add_episode(states, np.stack(seen.actions), images, spec.instruction, seen.success, extra)
    return Path(path)


def _acting(
    sim: RobotSim, specs: Sequence[EpisodeSpec], policy: ActionPolicy | None, noise: float, seeds: Sequence[list[int]]
) -> Act:
    """A policy that plans again when its chunk is used up, or the expert; with noise."""
    rngs = [np.random.default_rng(seed) for seed in seeds]
    generators = [torch.Generator().manual_seed(int(rng.integers(2**62))) for rng in rngs]
    left: list[list[NDArray[np.float32]]] = [[] for _ in specs]
    if policy is not None:
        check_fit(policy, sim)
    ask = experts_of(sim, specs) if policy is None else None

    def act(seen: RobotObservation) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        rows = seen.rows.tolist()
        new = [row for row in rows if not left[row]]
        if policy is not None and new:
            draws = RowGenerators([generators[row] for row in new])
            with torch.no_grad():
                chunks = policy.act(inputs_of(seen.of(new), specs, policy.device), draws).actions.float().cpu().numpy()
            for row, chunk in zip(new, chunks, strict=True):
                left[row] = list(chunk)
        chosen = np.stack([left[row].pop(0) for row in rows]) if ask is None else np.asarray(ask())
        shift = noise * np.stack([rngs[row].standard_normal(chosen.shape[1]) for row in rows])
        executed = np.clip(chosen + shift, -1, 1).astype(np.float32)
        return executed, executed

    return act
