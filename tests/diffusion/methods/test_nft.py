"""DiffusionNFT: the two-sided loss, its old policy and the reward probabilities."""

import numpy as np
import pytest
import torch

from diffusion.methods.nft import ADVANTAGE_MODES
from diffusion.sampling.latent_sampler import row_noise
from tests.diffusion.methods.test_awm import velocities
from tests.diffusion.runs import build, collected, disturb, gradients, make_trainer, run_config, trained


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_loss_is_that_of_numpy(beta, tmp_path):
    config = run_config("diffusion_nft", tmp_path)
    config.nft.beta = beta
    config.objective.kl = {"coef": 0.3}
    recipe = build(config)
    rollouts = collected(recipe)
    base, _ = velocities(recipe, rollouts)
    disturb(recipe.policy, 0.2, seed=1)
    recipe.old.copy_()
    old, _ = velocities(recipe, rollouts)
    disturb(recipe.policy, 0.2, seed=2)
    new, _ = velocities(recipe, rollouts)
    found, _ = gradients(recipe, rollouts)
    payload = rollouts.payload
    noise = row_noise(payload.noise_seed, 3, tuple(payload.latents.shape[1:])).double().numpy()
    sigma, clean = payload.sigma.double().numpy()[..., None, None, None], payload.latents.double().numpy()[:, None]
    noisy = (1 - sigma) * clean + sigma * noise
    r = (rollouts.advantage.double().numpy() / 5).clip(-1, 1) / 2 + 0.5
    sides = []
    for mixed in (beta * new + (1 - beta) * old, (1 + beta) * old - beta * new):
        miss = noisy - sigma * mixed - clean
        sides.append((miss**2).mean((2, 3, 4)) / np.abs(miss).mean((2, 3, 4)).clip(1e-5))
    policy = (5 / beta * (r * sides[0] + (1 - r) * sides[1])).mean()
    expected = policy + 0.3 * ((new - base) ** 2).mean()
    assert found == pytest.approx(expected, rel=1e-4)


def test_images_are_drawn_with_the_old_policy_which_then_follows(tmp_path, closing):
    config = run_config("diffusion_nft", tmp_path)
    trainer = make_trainer(config, tmp_path)
    recipe = closing(trainer.recipe)
    start = collected(recipe).payload.latents
    disturb(trainer.policy, 0.3)
    assert torch.equal(collected(recipe).payload.latents, start)
    trainer.train_step()
    old = torch.cat([value.flatten() for value in recipe.old.state_dict().values()])
    assert torch.equal(old, trained(trainer.policy))  # the schedule starts with a copy
    assert not torch.equal(collected(recipe).payload.latents, start)


def test_advantage_modes():
    advantage = torch.tensor([[-2.0, 0.0, 0.5]])
    found = {name: mode(advantage).tolist()[0] for name, mode in ADVANTAGE_MODES.items()}
    assert found == {
        "all": [-2.0, 0.0, 0.5],
        "positive_only": [0.0, 0.0, 0.5],
        "negative_only": [-2.0, 0.0, 0.0],
        "one_only": [0.0, 0.0, 1.0],
        "binary": [-1.0, 0.0, 1.0],
    }


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("beta", 0.0, "must be positive"),
        ("old_schedule", 5, "allowed: 0, 1, 2, 3, 4"),
        ("clip", 0.1, "it has no effect while nft.loss is 'two_sided'"),
        ("temperature", 0.5, "it has no effect while nft.loss is 'two_sided'"),
        ("moving_reference", True, "it has no effect while nft.loss is 'two_sided'"),
        ("distance", "cross_entropy", "it has no effect while nft.loss is 'two_sided'"),
        ("kl_floor", 1.0, r"nft\.kl_floor is 1; must be at most objective\.kl\.coef=0\.0001"),
        ("advantage_mode", "x", "allowed: all"),
    ],
)
def test_settings_out_of_range_are_refused(key, value, message, tmp_path):
    config = run_config("diffusion_nft", tmp_path)
    setattr(config.nft, key, value)
    with pytest.raises(ValueError, match=message):
        config.validate()


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("group_preference", {}),
        pytest.param("group_preference", {"moving_reference": True}, marks=pytest.mark.slow),
        pytest.param("centred_reward", {"kl_floor": 1e-4}, marks=pytest.mark.slow),
        pytest.param("centred_reward", {"distance": "cross_entropy", "temperature": 0.3}, marks=pytest.mark.slow),
    ],
)
def test_groups_are_compared_whatever_the_micro_batch(loss, options, tmp_path):
    weights = []
    for micro_batch in (0, 3):
        config = run_config("diffusion_nft", tmp_path / str(micro_batch), micro_batch=micro_batch)
        config.nft.loss, config.nft.beta, config.nft.sampling_schedule = loss, 2.0, 0
        config.objective.kl = {"coef": 1e-3}
        for name, value in options.items():
            setattr(config.nft, name, value)
        config.validate()
        trainer = make_trainer(config, tmp_path / str(micro_batch))
        start = trained(trainer.policy).clone()
        for _ in range(2):  # in the second step policy, old policy and start model differ
            trainer.train_step()
        moved = trained(trainer.policy) - start
        assert moved.any()
        drawing = torch.cat([value.flatten() for value in trainer.recipe.drawing.state_dict().values()])
        assert torch.equal(drawing, trained(trainer.policy))
        weights.append(moved)
        trainer.recipe.close()
    torch.testing.assert_close(*weights, rtol=1e-2, atol=2e-5)
