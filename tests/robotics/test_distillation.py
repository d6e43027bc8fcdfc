"""Distillation of a robot policy: the teacher's log-probabilities as rewards of decisions."""

import json
import math

import pytest
import torch
from torch.distributions import Categorical, Normal, kl_divergence

from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.training.processes import make_accelerator
from mmrl.training.recipe import Passes, Step
from mmrl.training.run import train
from robotics.methods.distillation import RobotDistilConfig, RobotDistilRecipe, check_divergence, check_teacher
from robotics.policies.policy_loading import ActionPolicyConfig
from tests.robotics.policies.builders import make_flow, make_gaussian, make_inputs, make_small
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
    with pytest.raises(ValueError, match="teacher is not set"):
        distil(tmp_path, teacher=ActionPolicyConfig())
    with pytest.raises(UserError, match=r"teacher\.decisions is 4, but the policy's is 3"):
        check_teacher(make_flow(steps=4), make_flow(steps=3))
    with pytest.raises(UserError, match="teacher is a FlowActionPolicy, but the policy is a GaussianActionPolicy"):
        check_teacher(make_flow(), make_gaussian())


@pytest.mark.parametrize("make", [make_gaussian, make_small])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_exact_divergences_are_those_of_torch(make, beta):
    policy, teacher, batch = make(seed=1), make(seed=2), make_inputs()
    if make is make_gaussian:
        with torch.no_grad():
            teacher.mean.bias.add_(0.3)
            teacher.spread.add_(0.5)
        own, other = (Normal(*_gaussian(model, batch)) for model in (policy, teacher))
    else:
        own, other = (Categorical(logits=model.logits(batch) / 1.5) for model in (policy, teacher))
    expected = kl_divergence(own, other) if beta else kl_divergence(other, own)
    expected = expected.sum(-1) if make is make_gaussian else expected
    found = policy("divergence_from", batch, teacher("distributions", batch, 1.5), beta, 1.5)
    torch.testing.assert_close(found, expected)
    assert (found > 0).all()


def _gaussian(model, batch):
    mean, log_std = model.gaussian(batch, 1.5)
    return mean, log_std.exp()


def test_the_exact_divergence_falls(tmp_path):
    options = {"encoder": {"state_size": 2, "image_size": None, "width": 16, "heads": 2, "layers": 1}}
    policy, teacher = (
        ActionPolicyConfig(kind="gaussian", chunk=2, options=options | {"std": std}) for std in (0.2, 0.5)
    )
    changes = {"eval_data": {}, "trainer": trainer(steps=4, learning_rate=0.05)}
    config = distil(tmp_path, model=policy, teacher=teacher, **changes)
    config.distil.reward, config.distil.divergence, config.tracking.strict = 0.0, 1.0, True
    run = train(find_recipe("robot_distil"), config)
    found = [json.loads(line)["distil/divergence"] for line in (run / "metrics.jsonl").open()]
    assert found[0] > 0.1
    assert found[-1] < 0.8 * found[0]


def test_divergences_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"distil\.beta is 0\.5, but the divergence from a mixture"):
        check_divergence(make_gaussian(), 0.5)
    with pytest.raises(UserError, match="not available for the decisions of a FlowActionPolicy"):
        check_divergence(make_flow(), 1.0)
    check_divergence(make_small(), 0.5)
    config = distil(tmp_path)
    config.distil.reward = 0.0
    with pytest.raises(ValueError, match=r"distil\.reward and distil\.divergence are both 0"):
        config.validate()
