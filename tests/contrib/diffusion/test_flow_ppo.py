"""Flow-PPO: advantages of denoising steps from a critic of the latents, and the policy gradient with them."""

import numpy as np
import pytest
import torch

from diffusion.sampling.latent_sampler import text_of
from mmrl.core.blocks.credit import Gae, SeparateCritic
from mmrl.training.objectives import ObjectiveConfig, check_objective, make_objective
from mmrl.training.processes import make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.update import update_constants
from tests.diffusion.runs import (
    assert_finite_differences_agree,
    build,
    collected,
    disturb,
    gradients,
    make_trainer,
    run_config,
    trained,
)

NAN = float("nan")
WANT = frozenset({"logp"})


def ppo(folder, lam=0.95, **trainer):
    """Rewards as they are and a critic that counts from the first step on."""
    config = run_config("flow_ppo", folder, **trainer)
    config.shaping.kind, config.critic.warmup_updates = "none", 0
    config.objective.advantage = {"kind": "gae", "gamma": 1.0, "lam": lam}
    return config


def opinionated(recipe):
    """Give the critic values that differ from state to state."""
    weight = recipe.critic.critic.head[-1].weight
    torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(0))  # below the bound of advantages
    return recipe


def scored(recipe, rewards):
    """Rollouts with these rewards, the values of the critic and advantages."""
    rollouts = collected(recipe).replace(reward=torch.tensor(rewards))
    rollouts = update_constants(recipe, recipe.policy, recipe.start, rollouts, Step())
    return recipe.advantages(rollouts, make_accelerator(), Step())


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_advantages_by_hand(lam, tmp_path):
    recipe = opinionated(build(ppo(tmp_path, lam)))
    reward = [1.0, 0.5, NAN, 0.0, 2.0, 1.0, 0.0, 0.0]
    rollouts = scored(recipe, reward)
    values = rollouts.values.double().numpy()
    assert np.abs(np.diff(values)).max() > 0.05
    after = np.concatenate([values[:, 1:], np.nan_to_num(np.array(reward))[:, None]], 1)
    deltas, expected, carry = after - values, np.zeros((8, 3)), np.zeros(8)
    for step in (2, 1, 0):
        carry = deltas[:, step] + lam * carry
        expected[:, step] = carry
    expected[2] = 0.0
    np.testing.assert_allclose(rollouts.advantage.numpy(), expected, atol=1e-5)
    if lam == 0.0:  # differences add up to what was unexpected at the start
        kept = [row for row in range(8) if row != 2]
        found = rollouts.advantage.double().numpy().sum(1)[kept]
        np.testing.assert_allclose(found, (np.array(reward) - values[:, 0])[kept], atol=1e-5)
    assert rollouts.reward.isnan().tolist() == [row == 2 for row in range(8)]


def test_critic_is_asked_before_it_learns_and_of_the_states_before_the_steps(tmp_path):
    recipe = opinionated(build(ppo(tmp_path)))
    rollouts = collected(recipe)
    payload = rollouts.payload
    recipe = opinionated(build(ppo(tmp_path)))
    pooled = text_of(recipe.policy, payload.tasks, rollouts.group.repeat_interleave(3)).expanded()["pooled"]
    expected = recipe.critic.values(payload.states[:, :3].flatten(0, 1), payload.sigma.flatten(), pooled)
    torch.testing.assert_close(rollouts.values.flatten(), expected, rtol=1e-4, atol=1e-5)


def test_loss_is_the_clipped_surrogate_of_the_steps_plus_the_divergence(tmp_path):
    config = ppo(tmp_path)
    config.objective.kl = {"coef": 0.3}
    recipe = opinionated(build(config))
    rollouts = collected(recipe)
    disturb(recipe.policy, 0.3)
    found, _ = gradients(recipe, rollouts)
    logp = recipe.scores(recipe.policy, rollouts, WANT).logp.detach().double().numpy()
    advantage = rollouts.advantage.double().numpy()
    ratio = np.exp(logp - rollouts.logp_old.double().numpy())
    surrogate = np.maximum(-advantage * ratio, -advantage * ratio.clip(1 - 1e-4, 1 + 1e-4)).mean()
    steps = recipe.process.evaluate(recipe.policy, rollouts)
    divergence = float(recipe.process.kl(steps, recipe.start).detach().mean())
    assert found == pytest.approx(surrogate + 0.3 * divergence, rel=1e-4)


def test_gradient_agrees_with_finite_differences(tmp_path):
    config = ppo(tmp_path)
    config.objective.clip, config.objective.kl = {"kind": "policy_gradient"}, {"coef": 0.5}
    config.step.detach_negative = False
    assert_finite_differences_agree(opinionated(build(config)))


def test_warm_up_trains_the_critic_alone_and_one_image_a_prompt_is_enough(tmp_path):
    config = ppo(tmp_path, samples_per_task=1, learning_rate=1e-2)
    config.critic.warmup_updates = 8  # two steps of four
    config.validate()
    trainer = make_trainer(config, tmp_path)
    start = trained(trainer.policy)
    for _ in range(2):
        trainer.train_step()
        assert torch.equal(trained(trainer.policy), start)
    assert trainer.recipe.critic.updates == 8
    trainer.train_step()
    assert not torch.equal(trained(trainer.policy), start)
    trainer.recipe.close()


def test_what_cannot_be_is_refused(tmp_path):
    def refused(match, change):
        config = ppo(tmp_path)
        change(config)
        with pytest.raises(ValueError, match=match):
            config.validate()

    refused("shaping.kind is 'group_z'", lambda c: setattr(c.shaping, "kind", "group_z"))
    refused("critic.enabled is false", lambda c: setattr(c.critic, "enabled", False))
    refused("without noise has no log-density", lambda c: setattr(c.sampler, "noise_level", 0.0))
    refused("combine is 'gdpo'", lambda c: setattr(c, "combine", "gdpo"))
    groups = ObjectiveConfig(preset="flow_grpo")
    refused(
        "'group_mean_global_std', which does not use the critic; use gae", lambda c: setattr(c, "objective", groups)
    )
    head = {"kind": "squared_error"}
    refused("must be of kind 'separate'", lambda c: setattr(c.objective, "value", head))


def test_objective_with_a_separate_critic_has_no_value_term_and_is_refused_elsewhere():
    objective = make_objective(ObjectiveConfig(preset="ppo", kl={"kind": "none"}, value={"kind": "separate"}))
    assert (objective.advantage, objective.value) == (Gae(1.0, 0.95), SeparateCritic())
    assert "V_it" not in objective.describe()
    assert not objective.regularised
    with pytest.raises(ValueError, match=r"objective\.value is 'separate', which needs a critic with its own"):
        check_objective(objective, ("values",))
