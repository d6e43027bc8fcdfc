"""ORW-CFM-W2 and AC-Flow: weights of images, the critic, and their equality without a critic."""

import copy
import math

import numpy as np
import pytest
import torch

from diffusion.methods.latent_critic import Critic, CriticTrainer, LatentCriticConfig
from diffusion.methods.orw_cfm import WEIGHTS
from mmrl.training.processes import make_accelerator
from mmrl.training.recipe import Step
from tests.diffusion.methods.test_awm import velocities
from tests.diffusion.runs import build, collected, disturb, gradients, make_trainer, run_config, trained

NAN = float("nan")


def without_critic(config):
    """The special case of AC-Flow that equals ORW-CFM-W2."""
    config.critic.enabled = False
    config.shaping.kind = "none"
    config.advantage_bound = 0.0
    config.orw.tau, config.orw.normalize_weights = 0.5, False
    return config


def test_orw_is_ac_flow_without_a_critic_bit_for_bit(tmp_path):
    final = []
    for name in ("orw_cfm_w2", "ac_flow"):
        config = run_config(name, tmp_path)
        config = without_critic(config) if name == "ac_flow" else config
        trainer = make_trainer(config, tmp_path)
        start = trained(trainer.policy)
        trainer.train_step()
        trainer.train_step()
        final.append(trained(trainer.policy))
        assert not torch.equal(final[-1], start)
        trainer.recipe.close()
    assert torch.equal(*final)


@pytest.mark.parametrize("normalised", [False, True])
def test_loss_is_that_of_numpy(normalised, tmp_path):
    config = run_config("orw_cfm_w2", tmp_path)
    config.orw.tau, config.orw.normalize_weights = 3.0, normalised
    config.objective.kl = {"coef": 0.7}
    recipe = build(config)
    rollouts = collected(recipe)
    base, _ = velocities(recipe, rollouts)
    disturb(recipe.policy, 0.2)
    v, error = velocities(recipe, rollouts)
    found, _ = gradients(recipe, rollouts)
    weight = np.exp(3.0 * rollouts.reward.double().numpy())[:, None]
    weight = weight / weight.mean() if normalised else weight
    assert found == pytest.approx((weight * error).mean() + 0.7 * ((v - base) ** 2).mean(), rel=1e-4)


def test_centred_weights_leave_out_rows_without_a_reward(tmp_path):
    config = run_config("orw_cfm_w2", tmp_path)
    config.orw.center, config.orw.tau = True, 1.0
    recipe = build(config)
    rollouts = collected(recipe).replace(reward=torch.tensor([1.0, 3.0, NAN, 2.0, 0.0, 0.0, 0.0, 4.0]))
    found = recipe.advantages(rollouts, make_accelerator(), Step()).advantage[:, 0]
    expected = np.exp([-1.0, 1.0, 0.0, 0.0, -1.0, -1.0, -1.0, 3.0])
    expected[2] = 0.0
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_weights_by_hand():
    advantage = torch.tensor([-2.0, 0.0, 0.5])
    found = {name: weight(advantage, 2.0).tolist() for name, weight in WEIGHTS.items()}
    assert found["linear"] == [0.0, 1.0, 1.5]
    assert found["indicator"] == [0.0, 0.0, 1.0]
    assert found["advantage"] == [-2.0, 0.0, 0.5]
    np.testing.assert_allclose(found["exp"], np.exp([-4.0, 0.0, 1.0]), rtol=1e-6)


def test_sampling_policy_is_refreshed_after_so_many_steps(tmp_path):
    config = run_config("orw_cfm_w2", tmp_path)
    config.orw.refresh_every = 2
    trainer = make_trainer(config, tmp_path)
    start = collected(trainer.recipe).payload.latents
    trainer.train_step()
    assert torch.equal(collected(trainer.recipe).payload.latents, start)
    trainer.train_step()
    assert not torch.equal(collected(trainer.recipe).payload.latents, start)
    trainer.recipe.close()


def test_warm_up_trains_the_critic_and_not_the_policy(tmp_path):
    config = run_config("ac_flow", tmp_path, learning_rate=1e-2)
    config.critic.warmup_updates = 8  # two steps of four
    trainer = make_trainer(config, tmp_path)
    start = trained(trainer.policy)
    for _ in range(2):
        trainer.train_step()
        assert torch.equal(trained(trainer.policy), start)
    assert trainer.recipe.critic.updates == 8
    assert bool((trainer.recipe.critic.critic.head[-1].weight != 0).all())
    trainer.train_step()
    assert not torch.equal(trained(trainer.policy), start)
    trainer.recipe.close()


def test_returns_are_shaped_as_configured(tmp_path):
    config = run_config("ac_flow", tmp_path)
    config.critic.warmup_updates = 0
    recipe = build(config)
    rollouts = collected(recipe)
    accelerator = make_accelerator()
    reward = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 20.0, NAN])
    rollouts = rollouts.replace(reward=reward)
    own = reward[:7].double().numpy()

    def shaped(kind, values=rollouts):
        config.shaping.kind = kind
        return recipe.shaping(values, accelerator).double().numpy()

    np.testing.assert_allclose(shaped("none"), [*own, 0.0])
    config.shaping.low, config.shaping.high = 1.0, 5.0
    np.testing.assert_allclose(shaped("minmax")[:7], ((own - 1) / 4).clip(0, 1), rtol=1e-6)
    recipe.shaping.running = None
    mean, deviation = own.mean(), own.std()
    np.testing.assert_allclose(shaped("running_z"), [*((own - mean) / deviation).clip(-3, 3), 0.0], rtol=1e-5)
    later = rollouts.replace(reward=reward + 10)
    mean = 0.95 * mean + 0.05 * (mean + 10)
    expected = ((own + 10 - mean) / deviation).clip(-3, 3)
    np.testing.assert_allclose(shaped("running_z", later)[:7], expected, rtol=1e-5)
    kept, nothing = recipe.shaping.running, rollouts.replace(reward=torch.full_like(reward, NAN))
    # a filter has kept no group: the step teaches nothing, also not to the steps after it
    assert not shaped("running_z", nothing).any()
    assert recipe.shaping.running == kept
    recipe.shaping.running = None
    np.testing.assert_allclose(shaped("running_z_tanh")[:7], np.tanh((own - own.mean()) / own.std()), rtol=1e-5)
    centred = own - np.repeat([1.5, own[4:].mean()], [4, 3])
    np.testing.assert_allclose(shaped("group_z")[:7], centred / (own.std() + 1e-4), rtol=1e-5)


def test_advantage_is_return_minus_value_within_its_bound(tmp_path):
    config = run_config("ac_flow", tmp_path)
    config.shaping.kind, config.advantage_bound = "none", 0.6
    config.orw.weighting, config.orw.normalize_weights = "advantage", False
    config.critic.warmup_updates = 0
    recipe = build(config)
    torch.nn.init.normal_(recipe.critic.critic.head[-1].weight, generator=torch.Generator().manual_seed(0))
    rollouts = collected(recipe)
    values = recipe.values(rollouts)
    assert float(values.std()) > 0
    found = recipe.advantages(rollouts, make_accelerator(), Step()).advantage
    expected = (rollouts.reward[:, None] - values).clamp(-0.6, 0.6)
    torch.testing.assert_close(found, expected)  # the critic is asked before it learns from the step
    assert not torch.equal(recipe.values(rollouts), values)


def test_critic_starts_at_zero_and_learns_from_the_prompt():
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        critic = Critic(4, 6, 16)
    trainer = CriticTrainer(
        critic, LatentCriticConfig(width=16, learning_rate=1e-2, updates_per_step=150, batch_rows=64)
    )
    latents, sigma = torch.randn(96, 4, 4, 4, generator=generator), torch.rand(96, generator=generator)
    pooled = torch.eye(6)[torch.arange(96) % 2]
    returns = torch.where(torch.arange(96) % 2 == 0, 1.0, -1.0)
    assert trainer.values(latents, sigma, pooled).tolist() == [0.0] * 96
    trainer.train((latents, sigma, pooled), returns, generator, make_accelerator())
    assert trainer.updates == 300  # 96 rows are two updates
    assert float((trainer.values(latents, sigma, pooled) - returns).square().mean()) < 0.05
    shorter = CriticTrainer(critic, LatentCriticConfig(width=16, batch_rows=7))
    torch.testing.assert_close(shorter.values(latents, sigma, pooled), trainer.values(latents, sigma, pooled))


def test_critic_of_videos_learns_which_way_they_go():
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        critic = Critic(2, 6, 16, video=True)
    trainer = CriticTrainer(
        critic, LatentCriticConfig(width=16, learning_rate=1e-2, updates_per_step=60, batch_rows=64)
    )
    start, back = torch.randint(0, 3, (64,), generator=generator), torch.arange(64) % 2 == 0
    videos = torch.zeros(64, 2, 3, 6, 6)
    for frame in range(3):
        videos[torch.arange(64), :, torch.where(back, 2 - frame, frame), 2:4, start + frame] = 1.0
    returns = torch.where(back, -1.0, 1.0)
    trainer.train((videos, torch.full((64,), 0.1), torch.zeros(64, 6)), returns, generator, make_accelerator())
    assert float((trainer.values(videos, torch.full((64,), 0.1), torch.zeros(64, 6)) - returns).square().mean()) < 0.1
    assert critic(torch.zeros(1, 2, 7, 6, 6), torch.ones(1), torch.zeros(1, 6)).shape == (1,)  # of any length


def test_without_a_scored_image_the_critic_is_not_updated():
    trainer = CriticTrainer(Critic(4, 6, 8), LatentCriticConfig(width=8))
    before = copy.deepcopy(trainer.state_dict())
    empty = (torch.zeros(0, 4, 4, 4), torch.zeros(0), torch.zeros(0, 6))
    loss = trainer.train(empty, torch.zeros(0), torch.Generator(), make_accelerator())
    assert math.isnan(loss)
    assert trainer.updates == 0
    assert all(torch.equal(value, before["critic"][name]) for name, value in trainer.critic.state_dict().items())


def test_critic_continues_bit_for_bit_from_its_state():
    generator = torch.Generator().manual_seed(1)
    inputs = (torch.randn(8, 4, 4, 4, generator=generator), torch.rand(8), torch.randn(8, 6, generator=generator))
    returns, found = torch.randn(8, generator=generator), []
    first = CriticTrainer(Critic(4, 6, 8), LatentCriticConfig(width=8))
    first.train(inputs, returns, torch.Generator().manual_seed(2), make_accelerator())
    second = CriticTrainer(Critic(4, 6, 8), LatentCriticConfig(width=8))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for trainer in (first, second):
        trainer.train(inputs, returns, torch.Generator().manual_seed(3), make_accelerator())
        found.append(trainer.values(*inputs))
    assert torch.equal(*found)
    assert first.updates == second.updates == 8


def test_settings_that_mean_nothing_are_refused(tmp_path):
    config = run_config("ac_flow", tmp_path)
    config.orw.center = True
    with pytest.raises(ValueError, match=r"orw\.center only applies to ORW"):
        config.validate()
    config = run_config("ac_flow", tmp_path, samples_per_task=1)
    config.validate()
    config.shaping.kind = "group_z"
    with pytest.raises(ValueError, match="samples_per_task is 1, but the advantage"):
        config.validate()
    config = run_config("orw_cfm_w2", tmp_path, samples_per_task=1)
    config.validate()
    config.orw.center = True
    with pytest.raises(ValueError, match=r"orw\.center compares the images of a prompt"):
        config.validate()
    config = run_config("orw_cfm_w2", tmp_path)
    config.combine = "gdpo"
    with pytest.raises(ValueError, match="this recipe needs the summed reward"):
        config.validate()
    config.combine, config.orw.weighting = "sum", "softmax"
    with pytest.raises(ValueError, match="allowed: exp, linear, indicator, advantage"):
        config.validate()
