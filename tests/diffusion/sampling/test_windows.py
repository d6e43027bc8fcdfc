"""Windows of trained steps: one a prompt, moving over training, and the mask of steps that have moved too far."""

from itertools import pairwise

import pytest
import torch

from diffusion.sampling.latent_sampler import times_of
from diffusion.sampling.steps import gaussian_kl
from diffusion.sampling.trajectories import DiffusionPayload
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from tests.diffusion.runs import build, collected, disturb, gradients, run_config
from tests.rounding import assert_equal_up_to_rounding, assert_same_gradient

WANT = frozenset({"logp", "kl_old"})


def windowed(tmp_path, name="flow_grpo", **sampler):
    config = run_config(name, tmp_path)
    for key, value in ({"steps": 6, "window": 2} | sampler).items():
        setattr(config.sampler, key, value)
    config.validate()
    return build(config)


def test_each_prompt_has_its_window(tmp_path):
    recipe = windowed(tmp_path, window_schedule="random_per_task", window_high=6)
    grid = times_of(recipe.policy, 6)
    tasks = [recipe.train_tasks[number % 3] for number in range(6)]
    with torch.no_grad():
        rollouts = recipe.rollout(recipe.policy, tasks, Streams(0), Step())
        alone = recipe.rollout(recipe.policy, tasks[3:], Streams(0).select([3, 4, 5]), Step())
        found = recipe.scores(recipe.policy, rollouts, frozenset({"logp"}))
    payload = DiffusionPayload.of(rollouts)
    starts = [int((grid == sigma).nonzero()) for sigma in payload.sigma[:, 0]]
    assert len(set(starts)) > 2
    for row, start in enumerate(starts):
        assert starts[row] == starts[row // 4 * 4]
        assert torch.equal(payload.sigma[row], grid[start : start + 2])
        assert torch.equal(payload.sigma_next[row], grid[start + 1 : start + 3])
    assert_equal_up_to_rounding(found.logp, rollouts.logp_old)
    assert_equal_up_to_rounding(DiffusionPayload.of(alone).latents, payload.latents[12:])
    assert torch.equal(DiffusionPayload.of(alone).sigma, payload.sigma[12:])


def test_a_window_moves_with_the_step_of_the_run(tmp_path):
    moves = {"window_schedule": "progressive", "window_every": 2, "window_stride": 3}
    recipe = windowed(tmp_path, "mix_grpo", steps=8, **moves)
    grid = times_of(recipe.policy, 8)
    starts = []
    for number in range(9):
        with torch.no_grad():
            rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:1], Streams(number), Step(number, 9))
        starts.append(int((grid == rollouts.payload.sigma[0, 0]).nonzero()))
    assert starts == [0, 0, 3, 3, 0, 0, 3, 3, 0]  # two places of 2 steps before the last of 8


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"window": 0, "window_schedule": "decay"}, "window_schedule is decay, but sampler.window is 0"),
        ({"window": 2, "window_every": 5}, "window_every is 5, but sampler.window_schedule 'random' draws"),
        ({"window": 2, "window_schedule": "slow"}, "window_schedule"),
    ],
)
def test_options_without_effect_are_refused(changes, culprit, tmp_path):
    with pytest.raises(ValueError, match=culprit):
        windowed(tmp_path, **changes)


def test_steps_that_have_moved_too_far_are_left_out(tmp_path):
    config = run_config("flow_dppo", tmp_path)
    config.sampler.steps, config.sampler.window = 6, 2
    recipe = build(config)
    rollouts = collected(recipe)
    with torch.no_grad():
        start = recipe.scores(recipe.policy, rollouts, WANT)
        assert float(start.kl_old.abs().max()) < 1e-10
        disturb(recipe.policy)
        moved = recipe.scores(recipe.policy, rollouts, WANT)
        steps = recipe.process.evaluate(recipe.policy, rollouts)
    old = DiffusionPayload.of(rollouts).mean_old.flatten(0, 1)
    assert_equal_up_to_rounding(moved.kl_old.flatten(), gaussian_kl(steps.mean, old, steps.std))
    middle = float(moved.kl_old.median())
    push = (moved.logp - rollouts.logp_old) * rollouts.advantage
    dropped = (moved.kl_old >= middle) & (push > 0)
    assert dropped.any()
    assert not dropped.all()
    recipe.objective = recipe.objective.override({"clip": {"limit": middle}})
    _, masked = gradients(recipe, rollouts)
    kept = rollouts.replace(mask=rollouts.mask * ~dropped)
    share = float(kept.mask.sum() / rollouts.mask.sum())
    recipe.objective = recipe.objective.override({"clip": {"kind": "unclipped"}})
    _, expected = gradients(recipe, kept)
    assert_same_gradient(masked, share * expected)


def test_other_methods_do_not_score_the_divergence(tmp_path):
    config = run_config("awm", tmp_path)
    config.objective = ObjectiveConfig(preset="flow_dppo")
    with pytest.raises(ValueError, match=r"objective.clip is 'divergence_mask', which needs the exact divergence"):
        config.validate()


def test_equal_steps_weigh_by_the_inverse_of_the_gradient(tmp_path):
    recipe = windowed(tmp_path, window_schedule="random_per_task", window_high=5)
    plain = collected(recipe)
    recipe.config.step_weight = "equal"
    weighed = recipe.advantages(plain, make_accelerator(), Step())
    payload = DiffusionPayload.of(plain)
    scale = recipe.process.kernel.gradient_scale(payload.sigma.flatten(), payload.sigma_next.flatten())
    assert len(set(scale.tolist())) > 1
    weight = (1 / scale) / (1 / scale).mean()
    torch.testing.assert_close(weighed.advantage, plain.advantage * weight.view_as(payload.sigma))
    assert plain.advantage.any()


def test_equal_steps_need_a_density(tmp_path):
    config = run_config("flow_grpo_fast", tmp_path)
    config.step_weight = "equal"
    with pytest.raises(ValueError, match=r"step_weight is equal, but sampler\.kernel 'cps'"):
        config.validate()


def test_noise_weighs_by_the_deviation_of_each_step(tmp_path):
    recipe = windowed(tmp_path, window_schedule="random_per_task", window_high=5)
    plain = collected(recipe)
    recipe.config.step_weight = "noise"
    weighed = recipe.advantages(plain, make_accelerator(), Step())
    payload, second = DiffusionPayload.of(plain), recipe.process.kernel.sigma_max
    start, step = payload.sigma, payload.sigma - payload.sigma_next
    deviation = (start / (1 - start.where(start < 1, second)) * step).sqrt()  # the noise level is a common factor
    assert len(deviation.unique()) > 1
    torch.testing.assert_close(weighed.advantage, plain.advantage * deviation / deviation.mean())


def test_images_of_a_branch_part_at_its_step_alone(tmp_path):
    recipe = windowed(tmp_path, window=1, window_schedule="random_per_task", window_high=5, same_noise=True)
    payload = DiffusionPayload.of(collected(recipe))
    before, after = payload.states.unflatten(0, (-1, 4)).unbind(2)
    assert torch.equal(before, before[:, :1].expand_as(before))
    assert all(not torch.equal(one, other) for group in after for one, other in pairwise(group))
