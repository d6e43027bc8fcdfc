"""pi-StepNFT: steps of a flow policy ranked against the policy before the update."""

import json

import pytest
import torch

from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.recipe import Passes, Step
from mmrl.training.run import train
from robotics.episodes.payload import EpisodeSetConfig
from robotics.methods.grpo import RobotGrpoRecipe
from robotics.policies.policy_loading import ActionPolicyConfig
from tests.contracts.option_runs import TINY_ENCODER
from tests.robotics.policies.builders import draw, make_flow, make_inputs
from tests.robotics.test_robot_recipes import collected, grpo, trainer


def ranked(tmp_path, **options):
    encoder = {**TINY_ENCODER, "image_size": None}
    model = ActionPolicyConfig(kind="flow", chunk=2, options={"steps": 3, "hidden": 32, "encoder": encoder, **options})
    config = grpo(tmp_path, model=model, objective=ObjectiveConfig(preset="step_nft"), eval_data={})
    config.trainer = trainer(steps=2, minibatches_per_step=2, learning_rate=1e-3)
    return config


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_divergence_is_that_of_gaussians(reduction):
    policy, other, batch = make_flow(logp_reduction=reduction), make_flow(seed=1), make_inputs()
    chain = draw(policy).decisions
    means, old = policy.means(batch, chain), other.means(batch, chain)
    found = policy.divergence(batch, chain, old, 1.3)
    times = policy.sigmas.double()
    for step in range(3):
        now = times[step]
        spread = 1.3 * 0.5 * (now / (1 - torch.minimum(now, times[1])) / 3).sqrt()
        sides = [torch.distributions.Normal(mean[:, step].double(), spread) for mean in (means, old)]
        expected = getattr(torch.distributions.kl_divergence(*sides), reduction)(1)
        torch.testing.assert_close(found[:, step].double(), expected, rtol=1e-4, atol=1e-6)


def test_the_log_ratio_and_the_divergence_are_the_noise_along_the_move(tmp_path):
    recipe = RobotGrpoRecipe(ranked(tmp_path))
    rollouts = recipe.terms[0].prepare(Passes(recipe.policy, recipe.scores_in_chunks), collected(recipe), Step())
    want = frozenset({"logp", "kl_old"})
    start = recipe.scores(recipe.policy, rollouts, want)
    assert float(start.kl_old.detach().abs().max()) < 1e-6
    with torch.no_grad():
        for weight in recipe.policy.velocity.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    moved = recipe.scores(recipe.policy, rollouts, want)
    recipe.terms[0].prepare(Passes(recipe.policy, recipe.scores_in_chunks), rollouts, Step())
    back = recipe.scores(recipe.policy, rollouts, want)
    mask = rollouts.mask > 0
    assert float(moved.kl_old[mask].detach().min()) > 0
    assert float(back.kl_old.detach().abs().max()) < 1e-6
    torch.testing.assert_close(back.logp, moved.logp)


def test_a_run_ranks_its_steps(tmp_path):
    run = train(find_recipe("robot_grpo"), ranked(tmp_path))
    text = (run / "metrics.jsonl").read_text()
    assert text.count("policy/divergence_old") == 2


def test_learned_noise_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"only available for model\.kind flow with noise: fixed"):
        RobotGrpoRecipe(ranked(tmp_path, noise="learned"))


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "options"), [("step_nft", {}), ("", {"noise": "learned"})])
def test_a_flow_policy_learns_to_go_right(tmp_path, objective, options):
    config = ranked(tmp_path, **options)
    config.objective = ObjectiveConfig(preset=objective) if objective else grpo(tmp_path).objective
    config.trainer = trainer(steps=20, samples_per_task=8, minibatches_per_step=2, learning_rate=1e-3)
    config.eval_data = {"held_out": EpisodeSetConfig(tasks=["right"], split="held_out", layouts=60)}
    config.evaluation.greedy, config.evaluation.samples = False, 1
    result = json.loads((train(find_recipe("robot_grpo"), config) / "result.json").read_text())
    assert result["first_evaluation"]["held_out"]["success/sampled"] < 0.6
    assert result["last_evaluation"]["held_out"]["success/sampled"] > 0.8
