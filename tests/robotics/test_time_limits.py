"""Episodes that a time limit cut off, from the environment to the advantages, against Stable-Baselines3."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import Reference, Step
from mmrl.training.update import update_constants
from robotics.episodes.collect import ActingSettings, run_episodes
from robotics.episodes.payload import EpisodePayload, EpisodeSetConfig
from robotics.methods.grpo import RobotGrpoConfig
from robotics.methods.ppo import ChunkRewardConfig, RobotPpoConfig, RobotPpoRecipe
from robotics.policies.policy_loading import ActionPolicyConfig, load_action_policy
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig
from tests.golden.numbers import assert_agrees, load
from tests.robotics.limit_envs import golden_episodes
from tests.robotics.test_robot_recipes import grpo, trainer

ENVS = Path(__file__).with_name("limit_envs.py")


class ReadValue(torch.nn.Module):
    """A critic whose value is the first entry of the state."""

    def __init__(self):
        super().__init__()
        self.fitted = torch.ones(())

    def forward(self, inputs):
        assert not inputs[..., 1].any(), "what follows a cut does not depend on the time"
        return inputs[..., 0]


def limited(tmp_path, env, count, advantage, **changes):
    settings = {
        "model": ActionPolicyConfig(kind="gaussian", chunk=1),
        "data": EpisodeSetConfig(layouts=count),
        "eval_data": {},
        "reward": ChunkRewardConfig(environment=1.0),
        "objective": ObjectiveConfig(preset="ppo", advantage=advantage, kl={"coef": 0.0}),
        "trainer": trainer(tasks_per_step=count, samples_per_task=1),
    }
    config = grpo(tmp_path, RobotPpoConfig, "robot_ppo", **(settings | changes))
    config.sim = SimConfig(kind="gymnasium", env=f"{ENVS}:{env}", horizon=40, image_size=0, workers=2)
    config.validate()
    return RobotPpoRecipe(config)


def collected(recipe, count):
    with torch.no_grad():
        rollouts = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:count], Streams(0), Step()), Step())
    return update_constants(recipe, recipe.policy, Reference("none", recipe.policy), rollouts, Step())


@pytest.mark.parametrize("kind", ["gae", "gae_turn"])
def test_advantages_of_cut_off_episodes_are_those_of_stable_baselines3(tmp_path, kind):
    file, episodes = load("time_limits"), golden_episodes()
    gamma, lam = file.inputs["gamma"], file.inputs["lam"]
    advantage = {"kind": kind, "gamma": gamma, "lam": lam, "truncation": "bootstrap"}
    recipe = limited(tmp_path, "Replay", len(episodes), advantage)
    recipe.policy.critic = ReadValue()
    try:
        rollouts = collected(recipe, len(episodes))
    finally:
        recipe.close()
    found = np.zeros_like(file.peers[0]["advantages"])
    each = recipe.objective.advantage(rollouts)
    for row, group in enumerate(rollouts.group.tolist()):
        episode = episodes[EpisodePayload.of(rollouts).episodes[group].layout]
        steps, env = np.array(episode["places"]).T
        found[steps, env] = each[row][rollouts.mask[row] > 0]
    assert_agrees(found, file.peers[0], "advantages")
    truncated = [episode["how"] == "truncated" for episode in episodes]
    assert sorted(rollouts.extras["truncated"].tolist()) == sorted(map(float, truncated))
    assert sum(truncated) == 6


def test_a_limit_that_the_critic_cannot_know_is_named_where_it_counts_as_an_end(tmp_path, caplog):
    for treatment in ("terminate", "bootstrap"):
        caplog.clear()
        recipe = limited(tmp_path / treatment, "Watchdog", 6, {"kind": "gae_turn", "truncation": treatment})
        with caplog.at_level(logging.WARNING, logger="mmrl"):
            rollouts = collected(recipe, 6)
        recipe.close()
        assert rollouts.extras["truncated"].all()
        assert ("cut off after" in caplog.text) == (treatment == "terminate")
        if treatment == "bootstrap":
            assert (rollouts.extras["bootstrap_value"] != 0).all()


def test_the_full_state_at_the_end_is_that_of_the_table(tmp_path):
    with TabletopBatch(("reach",), settings=BatchSettings(image_size=None, horizon=4), workers=1) as sim:
        policy = load_action_policy(ActionPolicyConfig(kind="gaussian", chunk=2), sim, 0)
        specs = [EpisodeSpec("reach", "", layout) for layout in (0, 1)]
        payload = run_episodes(policy, sim, specs, ActingSettings(), torch.Generator().manual_seed(0)).payload
        assert payload.truncated.tolist() == (~payload.terminated).tolist() == [True, True]
        assert torch.equal(payload.last_full_state, torch.from_numpy(sim._full))
        assert not torch.equal(payload.last_full_state, payload.full_states[:, -1])


def critic(kind, truncation):
    return ObjectiveConfig(preset=kind, advantage={"kind": "gae_turn", "truncation": truncation})


def test_group_relative_recipes_and_the_control_refuse_the_option(tmp_path):
    alone = ObjectiveConfig(preset="grpo", advantage={"truncation": "bootstrap"})
    with pytest.raises(ValueError, match="truncation"):
        grpo(tmp_path, RobotGrpoConfig, objective=alone)
    with pytest.raises(ValueError, match=r"gae_turn.*needs a critic"):
        grpo(tmp_path, RobotGrpoConfig, objective=critic("grpo", "bootstrap"))
    with pytest.raises(ValueError, match=r"shuffle_success .*truncation is 'mask'"):
        grpo(tmp_path, RobotPpoConfig, "robot_ppo", shuffle_success=True, objective=critic("ppo", "mask"))


def test_every_treatment_values_a_cut_otherwise(tmp_path):
    found = {}
    for treatment in ("terminate", "bootstrap", "mask", "repeat"):
        recipe = limited(tmp_path / treatment, "Replay", 4, {"kind": "gae_turn", "truncation": treatment})
        rollouts = collected(recipe, 4)
        recipe.close()
        found[treatment] = recipe.objective.advantage(rollouts).flatten()
    assert len({tuple(each.tolist()) for each in found.values()}) == 4
