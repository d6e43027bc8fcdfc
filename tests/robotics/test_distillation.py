"""Distillation of a robot policy: the teacher's log-probabilities as rewards of decisions."""

from __future__ import annotations

import json
import math

import pytest
import torch

from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.training.processes import make_accelerator
from mmrl.training.recipe import Passes, Step
from mmrl.training.run import train
from robotics.methods.distillation import RobotDistilConfig, RobotDistilRecipe, check_teacher
from robotics.policies.loading import ActionPolicyConfig
from tests.robotics.policies.builders import make_flow, make_gaussian
from tests.robotics.test_robot_recipes import collected, grpo, trainer

TEACHER = ActionPolicyConfig(kind="tests.robotics.line_policies:make_walker", chunk=1, options={"bias": 0.6})


def distil(tmp_path, **changes):
    return grpo(tmp_path, RobotDistilConfig, "robot_distil", **({"teacher": TEACHER} | changes))


@pytest.mark.parametrize(("reward", "task"), [(1.0, 0.0), (0.5, 2.0)])
def test_advantages_are_the_log_ratio_of_teacher_and_policy(tmp_path, reward, task):
    config = distil(tmp_path)
    config.distil.reward, config.distil.task = reward, task
    recipe = RobotDistilRecipe(config)
    rollouts = collected(recipe)
    (term,) = recipe.terms
    rollouts = term.prepare(Passes(recipe.policy, recipe.scores_in_chunks), rollouts, Step())
    found = recipe.advantages(rollouts, make_accelerator(), Step()).advantage
    plain = recipe.objective.compute_advantages(rollouts).advantage
    actions, variance = rollouts.payload.decisions.flatten(1), math.exp(-1)  # both are Gaussians of constant mean
    gap = ((actions - 0.1).square() - (actions - 0.6).square()) / (2 * variance)
    mask = rollouts.mask > 0
    torch.testing.assert_close(found[mask], (task * plain + reward * gap)[mask], rtol=1e-4, atol=1e-5)
    assert not found[~mask].any()


def test_the_policy_comes_nearer_to_its_teacher(tmp_path):
    config = distil(tmp_path, trainer=trainer(steps=6, learning_rate=0.05), eval_data={})
    run = train(find_recipe("robot_distil"), config)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    gaps = [row["distil/kl_sampled"] for row in rows]
    assert gaps[0] == pytest.approx(0.5**2 / (2 * math.exp(-1)), abs=0.15)
    assert gaps[-1] < 0.3 * gaps[0]


def test_a_teacher_of_another_form_is_refused(tmp_path):
    with pytest.raises(ValueError, match="teacher names no policy"):
        distil(tmp_path, teacher=ActionPolicyConfig())
    with pytest.raises(UserError, match=r"teacher\.decisions is 4, the policy's 3"):
        check_teacher(make_flow(steps=4), make_flow(steps=3))
    with pytest.raises(UserError, match="teacher is a FlowActionPolicy, the policy a GaussianActionPolicy"):
        check_teacher(make_flow(), make_gaussian())
