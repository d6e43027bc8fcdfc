"""Recipes that learn from the log-densities of denoising steps."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from diffusion.sampling.latent_sampler import (
    guided,
    make_kernel,
    sample_trajectories,
    text_of,
    times_of,
    trained_window,
)
from diffusion.sampling.steps import FlowSdeStep
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.rewards import RewardConfig
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import make_accelerator
from mmrl.training.recipe import Step
from tests.diffusion.runs import (
    TRAJECTORY_RECIPES,
    assert_finite_differences_agree,
    build,
    collected,
    disturb,
    gradients,
    make_trainer,
    run_config,
)
from tests.rounding import assert_equal_up_to_rounding, assert_same_gradient

WANT = frozenset({"logp"})


def policy_kl(recipe, rollouts):
    """The divergence (B, T) that the loss takes."""
    found = recipe.process.evaluate(recipe.policy, rollouts)
    return recipe.process.kl(found, recipe.start).detach()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TRAJECTORY_RECIPES)
def test_ratio_is_one_before_the_first_update_whatever_the_batches_are(name, dtype, tmp_path):
    config = run_config(name, tmp_path)
    config.model.dtype = dtype
    if hasattr(config, "critic"):
        config.critic.warmup_updates = 0
    recipe = build(config)
    rollouts = collected(recipe)
    assert bool((rollouts.logp_old[rollouts.mask > 0] != 0).all())
    # a product of another size may be summed in another order, which rounding to bfloat16 makes visible
    parts = 1e-6 if dtype == "float32" else 5e-3
    for size, limit in ((0, 1e-6), (3, parts)):
        config.trainer.micro_batch = size
        logp = recipe.scores_in_chunks(recipe.policy, rollouts, WANT).logp
        assert float(((logp - rollouts.logp_old) * rollouts.mask).abs().max()) <= limit
    recipe.policy.train()  # as in the update, where the negative half of guidance has a pass of its own
    logp = recipe.scores(recipe.policy, rollouts, WANT).logp.detach()
    assert float(((logp - rollouts.logp_old) * rollouts.mask).abs().max()) <= 1e-6


@pytest.mark.parametrize("name", ["flow_grpo", "grpo_guard"])
def test_bfloat16_starts_at_a_ratio_of_one_although_images_were_drawn_in_other_batches(name, tmp_path):
    config = run_config(name, tmp_path, micro_batch=1, minibatches_per_step=2)
    config.model.dtype = "bfloat16"
    recipe = build(config)
    rollouts = collected(recipe)
    assert not recipe.keeps_sampled_logp
    for chunk in rollouts.micro_batches(1):
        logp = recipe.scores(recipe.policy, chunk, WANT).logp.detach()
        assert torch.equal(logp * chunk.mask, chunk.logp_old * chunk.mask)
    assert build(run_config(name, tmp_path)).keeps_sampled_logp


def test_decisions_clipped_before_the_first_step_are_warned_of(tmp_path, caplog):
    trainer = make_trainer(run_config("flow_grpo", tmp_path, old_logp="sampler"), tmp_path)
    draw = trainer.recipe.process.draw

    def rounded(*arguments):
        rollouts = draw(*arguments)
        return rollouts.replace(logp_old=rollouts.logp_old + 5e-4)

    trainer.train_step()
    assert trainer.log.warnings.said == {}
    trainer.recipe.process.draw = rounded
    trainer.train_step()
    assert "before the policy had changed" in trainer.log.warnings.said["clipped_at_start"]


def test_ratio_is_one_bit_for_bit_on_bfloat16_weights_where_the_batch_is_the_same(tmp_path):
    """Stored states are exactly those of the log-density, rounding included."""
    config = run_config("flow_grpo", tmp_path)
    config.model.dtype = "bfloat16"
    recipe = build(config)
    rollouts = collected(recipe)
    assert rollouts.payload.states.dtype == torch.bfloat16
    text = text_of(recipe.policy, rollouts.payload.tasks, rollouts.group)
    kernel = make_kernel(config.sampler, times_of(recipe.policy, 4))
    apart = {"together": recipe.process.halves_together}
    velocity_of = guided(recipe.policy, recipe.policy, text, config.sampler.guidance, "", **apart)
    for step in range(rollouts.num_decisions):
        before, after = rollouts.payload.states[:, step], rollouts.payload.states[:, step + 1]
        sigma, sigma_next = rollouts.payload.sigma[:, step], rollouts.payload.sigma_next[:, step]
        with torch.no_grad():
            mean, std = kernel.transition(velocity_of(before, sigma), before, sigma, sigma_next)
        assert torch.equal(kernel.log_prob(after, mean, std), rollouts.logp_old[:, step])


@pytest.mark.parametrize("name", ["flow_grpo", "flow_grpo_fast", "dance_grpo"])
def test_images_do_not_depend_on_the_rows_drawn_together(name, tmp_path):
    images, latents = [], []
    for rows in (64, 3, 1):
        config = run_config(name, tmp_path)
        config.sampler.batch_rows = rows
        payload = collected(build(config)).payload
        images.append(payload.images.astype(int))
        latents.append(payload.latents)
    for other in (1, 2):
        assert_equal_up_to_rounding(latents[other], latents[0], passes=config.sampler.steps)
        assert abs(images[other] - images[0]).max() <= 1


@pytest.mark.parametrize("form", ["exact", "flow_grpo_head", "velocity"])
def test_gradient_does_not_depend_on_the_micro_batch(form, tmp_path):
    config = run_config("flow_grpo", tmp_path)
    config.step.kl_form = form
    config.objective.kl = {"coef": 5.0}
    recipe = build(config)
    rollouts = collected(recipe)
    disturb(recipe.policy)
    whole_loss, whole = gradients(recipe, rollouts)
    for rows in (3, 1):
        loss, parts = gradients(recipe, rollouts, rows)
        # terms of size 1 and of both signs, each rounded to 2^-24
        assert loss == pytest.approx(whole_loss, rel=1e-5, abs=2**-22)
        assert_same_gradient(parts, whole)


def test_divergences_have_closed_forms_and_known_relations(tmp_path):
    config = run_config("flow_grpo", tmp_path)
    recipe = build(config)
    rollouts = collected(recipe)
    assert float(policy_kl(recipe, rollouts).abs().max()) == 0.0
    disturb(recipe.policy)
    found = {}
    for form in ("exact", "flow_grpo_head", "velocity"):
        config.step.kl_form = form
        found[form] = policy_kl(recipe, rollouts).double().numpy()
    s, sigma_next = (getattr(rollouts.payload, name).double().numpy() for name in ("sigma", "sigma_next"))
    dt = s - sigma_next
    grid = times_of(recipe.policy, 4)
    noise = config.sampler.noise_level * np.sqrt(s / (1 - np.where(s >= 1, float(grid[1]), s)))
    np.testing.assert_allclose(found["flow_grpo_head"], found["exact"] * dt, rtol=1e-5)
    # |dt| / 2 (g (1 - s) / (2 s) + 1 / g)^2 |v - v_ref|^2, the paper's form
    weight = dt / 2 * (noise * (1 - s) / (2 * s) + 1 / noise) ** 2
    np.testing.assert_allclose(found["exact"], weight * found["velocity"], rtol=2e-4)
    steps = recipe.process.evaluate(recipe.policy, rollouts)
    base = recipe.start.score(lambda module: recipe.process.evaluate(module, rollouts))
    squares = (steps.velocity.detach() - base.velocity).double().square().flatten(1).mean(1).numpy()
    np.testing.assert_allclose(found["velocity"].flatten(), squares, rtol=1e-5)


def test_loss_is_the_clipped_surrogate_plus_the_divergence(tmp_path):
    config = run_config("flow_grpo", tmp_path)
    config.objective.kl = {"coef": 0.3}
    recipe = build(config)
    rollouts = collected(recipe)
    disturb(recipe.policy, 0.3)
    found, _ = gradients(recipe, rollouts)
    logp = recipe.scores(recipe.policy, rollouts, WANT).logp.detach().double().numpy()
    reward = rollouts.reward.double().numpy().reshape(2, 4)
    advantage = ((reward - reward.mean(1, keepdims=True)) / (reward.std() + 1e-4)).clip(-5, 5).reshape(-1, 1)
    ratio = np.exp(logp - rollouts.logp_old.double().numpy())
    surrogate = np.maximum(-advantage * ratio, -advantage * ratio.clip(1 - 1e-4, 1 + 1e-4)).mean()
    divergence = policy_kl(recipe, rollouts).double().numpy().mean()
    assert found == pytest.approx(surrogate + 0.3 * divergence, rel=1e-4)


def test_guard_ratio_is_that_of_the_means(tmp_path):
    recipe = build(run_config("grpo_guard", tmp_path))
    rollouts = collected(recipe)
    assert rollouts.payload.mean_old is not None
    disturb(recipe.policy)
    with torch.no_grad():
        steps = recipe.process.evaluate(recipe.policy, rollouts)
        ratio = recipe.scores(recipe.policy, rollouts, WANT).logp - rollouts.logp_old
    reached = rollouts.payload.states[:, 1:].flatten(0, 1).double()
    old, new = rollouts.payload.mean_old.flatten(0, 1).double(), steps.mean.double()
    std = steps.std.double()[:, None]
    noise = ((reached - old).flatten(1) / std).numpy()
    moved = (new - old).flatten(1).numpy()
    expected = (noise * moved).mean(1)
    assert float(np.abs(expected).max()) > 1e-3
    np.testing.assert_allclose(ratio.flatten().double().numpy(), expected, atol=5e-6)


def test_a_guard_with_one_update_has_its_old_means_without_a_pass_before_it(tmp_path, monkeypatch):
    config = run_config("grpo_guard", tmp_path, minibatches_per_step=1, old_logp="recompute")
    recipe = build(config)
    calls, evaluate = [], recipe.process.evaluate
    monkeypatch.setattr(recipe.process, "evaluate", lambda *given: calls.append(0) or evaluate(*given))
    rollouts = collected(recipe)
    assert not calls
    assert float(rollouts.advantage.abs().max()) > 0
    _, once = gradients(recipe, rollouts)
    config.trainer.epochs = 2
    rollouts = collected(recipe)
    assert len(calls) == 2  # the update above, and the pass before this one
    _, twice = gradients(recipe, rollouts)
    assert float(once.norm()) > 0
    torch.testing.assert_close(once, twice, rtol=1e-3, atol=1e-4 * float(once.abs().max()))


def test_fast_records_the_window_only_and_follows_the_ode_elsewhere(tmp_path):
    config = run_config("flow_grpo_fast", tmp_path)
    config.sampler.steps, config.sampler.window = 6, 2
    recipe = build(config)
    text = text_of(recipe.policy, recipe.train_tasks[:1], torch.zeros(2, dtype=torch.int64))
    seeds = torch.tensor([[1, 5], [1, 6]])
    grid = times_of(recipe.policy, 6)
    with torch.no_grad():
        run = sample_trajectories(recipe.policy, text, seeds, config.sampler, range(1, 3))
    assert run.states.shape[1] == 3
    assert torch.equal(run.sigma[0], grid[1:3])
    assert torch.equal(run.sigma_next[0], grid[2:4])
    assert torch.equal(run.states[0, 0], run.states[1, 0])  # one start, and no noise before the window
    assert not torch.equal(run.states[0, 1], run.states[1, 1])
    x = run.states[:, 2]
    for sigma, sigma_next in pairwise(grid[3:]):
        with torch.no_grad():
            v = recipe.policy(x, sigma.expand(2), text.expanded())
        x = x + (sigma_next - sigma) * v
    assert_equal_up_to_rounding(run.latents, x, passes=config.sampler.steps)
    places = {trained_window(config.sampler, torch.Generator().manual_seed(seed)).start for seed in range(40)}
    assert places == {0, 1}  # two of the first three steps


def test_dance_trains_a_share_of_the_steps_from_one_start_noise(tmp_path):
    config = run_config("dance_grpo", tmp_path)
    config.sampler.steps = 6
    recipe = build(config)
    rollouts = collected(recipe)
    assert rollouts.mask.sum(1).tolist() == [3.0] * 8  # 60% of five
    assert len({tuple(row) for row in rollouts.mask.tolist()}) > 1
    first = rollouts.payload.states[:, 0].reshape(2, 4, -1)
    assert torch.equal(first, first[:, :1].expand_as(first))
    assert not torch.equal(first[0, 0], first[1, 0])
    second = rollouts.payload.states[:, 1].reshape(2, 4, -1)
    assert not torch.equal(second[:, 0], second[:, 1])
    before = dict(recipe.policy.cost)
    gradients(recipe, rollouts)
    assert recipe.policy.cost["train_rows"] - before["train_rows"] == int(rollouts.mask.sum())


def test_other_recipes_start_every_image_from_its_own_noise(tmp_path):
    first = collected(build(run_config("flow_grpo", tmp_path))).payload.states[:, 0]
    assert len({tuple(row) for row in first.flatten(1).tolist()}) == 8


def test_gradient_of_the_negative_half_can_be_kept(tmp_path):
    found = {}
    for detached in (True, False):
        config = run_config("flow_grpo", tmp_path)
        config.objective.kl = {"coef": 0.0}
        config.step.detach_negative = detached
        recipe = build(config)
        rollouts = collected(recipe)
        disturb(recipe.policy)
        found[detached] = gradients(recipe, rollouts)
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-5)
    assert float((found[True][1] - found[False][1]).norm()) > 0.01 * float(found[True][1].norm())


def test_gradient_agrees_with_finite_differences(tmp_path):
    """Directional derivative of the unclipped loss along its gradient."""
    config = run_config("flow_grpo", tmp_path)
    config.objective = ObjectiveConfig(preset="flow_grpo", clip={"kind": "policy_gradient"}, kl={"coef": 0.5})
    config.step.detach_negative = False
    assert_finite_differences_agree(build(config))


def test_ddpo_compares_with_the_history_of_the_prompt(tmp_path):
    config = run_config("ddpo", tmp_path)
    config.history.size, config.history.min_count = 6, 6
    recipe = build(config)
    rollouts = collected(recipe)
    accelerator = make_accelerator()
    recipe.history.load_state_dict({"rewards": {}})
    first = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 10.0, float("nan")])
    rollouts = rollouts.replace(reward=first)
    advantage = recipe.advantages(rollouts, accelerator, Step()).advantage
    scored = np.array([1, 2, 3, 4, 0, 0, 10])  # four and three rewards of a prompt: those of the step serve
    expected = (scored - scored.mean()) / (scored.std() + 1e-6)
    np.testing.assert_allclose(advantage[:7, 0].numpy(), expected, rtol=1e-5)
    assert advantage[7].tolist() == [0.0] * 3
    assert bool((advantage == advantage[:, :1]).all())
    again = torch.tensor([5.0, 6.0, 7.0, 8.0, 1.0, 2.0, 3.0, 4.0])
    advantage = recipe.advantages(rollouts.replace(reward=again), accelerator, Step()).advantage[:, 0].numpy()
    kept = np.array([[3, 4, 5, 6, 7, 8], [0, 10, 1, 2, 3, 4]])  # the latest six of each
    own = again.numpy().reshape(2, 4)
    expected = (own - kept.mean(1, keepdims=True)) / (kept.std(1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(advantage.reshape(2, 4), expected, rtol=1e-5)


def test_groups_of_equal_reward_are_dropped_without_a_forward_pass(tmp_path):
    config = run_config("flow_grpo", tmp_path, minibatches_per_step=1)
    config.rewards = [RewardConfig(name="tests.diffusion.sampling.test_trajectories:second_prompt_only", isolate=False)]
    trainer = make_trainer(config, tmp_path)
    rollouts, metrics = trainer.collect()
    assert rollouts.payload.prompts == [p for p in rollouts.payload.prompts if "square" not in p]
    assert rollouts.num_groups == 1
    assert metrics["reward/mean"] > 0
    trainer.recipe.close()


def second_prompt_only(prompts, completions, **columns):
    """The same reward for all images of one prompt."""
    return [0.5 if "square" in prompt else index / 8 for index, prompt in enumerate(prompts)]


def test_scores_of_a_step_are_those_of_its_gaussian(tmp_path):
    config = run_config("flow_grpo", tmp_path)
    recipe = build(config)
    rollouts = collected(recipe)
    with torch.no_grad():
        steps = recipe.process.evaluate(recipe.policy, rollouts)
    reached = rollouts.payload.states[:, 1:].flatten(0, 1).double()
    std = steps.std.double()[:, None]
    miss = (reached - steps.mean.double()).flatten(1)
    density = (-(miss**2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)).mean(1)
    np.testing.assert_allclose(steps.logp.numpy(), density.numpy(), rtol=1e-4, atol=1e-5)
    assert isinstance(recipe.process.kernel, FlowSdeStep)
    assert isinstance(recipe.scores(recipe.policy, rollouts, WANT), PolicyOutputs)
