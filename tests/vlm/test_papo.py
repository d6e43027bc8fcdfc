import dataclasses
import math

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.fields import check_fields
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step, make_reference
from mmrl.training.update import count_denominators, update_constants
from mmrl.vlm.methods.papo import (
    PapoConfig,
    PapoRecipe,
    PapoSettings,
    blacken_frames,
    blacken_patches,
    gamma_at,
    perception_terms,
)
from tests.vlm.runs import run_config


def k3(new: float, other: float) -> float:
    return math.exp(other - new) - (other - new) - 1


def test_blackened_patches_lie_on_a_grid_and_have_the_asked_share():
    image = Image.new("RGB", (141, 113), (200, 100, 50))
    masked = np.asarray(blacken_patches(image, 14, 0.6, np.random.default_rng(0)))
    assert masked.shape == (113, 141, 3)
    shares = []
    for top in range(0, 113, 14):
        for left in range(0, 141, 14):
            patch = masked[top : top + 14, left : left + 14]
            black, kept = (patch == 0).all(), (patch == (200, 100, 50)).all()
            assert black or kept
            shares.append(black)
    assert 0.4 < np.mean(shares) < 0.8
    assert (np.asarray(blacken_patches(image, 14, 1.0, np.random.default_rng(0))) == 0).all()
    assert (np.asarray(blacken_patches(image, 14, 0.0, np.random.default_rng(0))) == np.asarray(image)).all()


def test_all_frames_of_a_video_lose_the_same_patches():
    frames = (torch.full((4, 3, 56, 84), 200.0), {"fps": 2.0, "frames_indices": [0, 1, 2, 3]})
    masked, metadata = blacken_frames(frames, 14, 0.6, np.random.default_rng(0))
    assert metadata == frames[1]
    assert (masked == masked[0, 0]).all()
    share = float((masked == 0).float().mean())
    assert 0.4 < share < 0.8
    image = Image.new("RGB", (84, 56), (200, 200, 200))
    alike = np.asarray(blacken_patches(image, 14, 0.6, np.random.default_rng(0)))
    assert np.array_equal(masked[0].permute(1, 2, 0).numpy().astype(np.uint8), alike)


def test_gamma_schedules():
    fixed = PapoSettings(gamma=0.02)
    assert gamma_at(fixed, 7, 10) == 0.02
    annealed = PapoSettings(gamma=0.01, schedule="annealing", gamma_end=0.0, annealing_ratio=0.5)
    assert [gamma_at(annealed, k, 8) for k in (0, 1, 4, 7)] == pytest.approx([0.01, 0.0075, 0.0, 0.0])


def test_perception_terms_by_hand():
    logp = torch.tensor([[-1.0, -0.5], [-2.0, -0.1]])
    masked = torch.tensor([[-1.5, -0.2], [-2.0, -4.0]])
    mask, weight = torch.ones(2, 2), torch.tensor([1.0, 0.0])
    terms = perception_terms(logp, masked, mask, weight, PapoSettings())
    expected = [[k3(-1.0, -1.5), k3(-0.5, -0.2)], [0.0, 0.0]]
    torch.testing.assert_close(terms, torch.tensor(expected))
    paper = perception_terms(logp, masked, mask, weight, PapoSettings(orientation="paper"))
    assert float(paper[0, 0]) == pytest.approx(k3(-1.5, -1.0), rel=1e-5)
    clipped = perception_terms(logp, masked, mask, weight, PapoSettings(term_clip=0.1))
    assert float(clipped.max()) == pytest.approx(0.1)


def test_the_largest_terms_are_picked_before_they_are_clipped():
    logp, masked = torch.zeros(1, 5), -torch.arange(5.0)[None]
    settings = PapoSettings(token_share=0.2, term_clip=0.1)
    terms = perception_terms(logp, masked, torch.ones(1, 5), torch.ones(1), settings)
    assert (terms > 0).sum() == 1  # bounded first, four terms would be equal and all be picked


def test_perception_gradient_is_that_of_the_spec():
    logp = torch.tensor([[-1.0, -0.5, -3.0]], requires_grad=True)
    masked = torch.tensor([[-1.7, -0.2, -1.5]])
    perception_terms(logp, masked, torch.ones(1, 3), torch.ones(1), PapoSettings()).sum().backward()
    torch.testing.assert_close(logp.grad, 1 - torch.exp(masked - logp.detach()))


def test_token_share_keeps_the_largest_terms():
    logp = torch.zeros(1, 10)
    masked = -torch.arange(10.0)[None] / 10
    mask = torch.ones(1, 10)
    mask[0, 9] = 0
    terms = perception_terms(logp, masked, mask, torch.ones(1), PapoSettings(token_share=0.2))
    assert (terms[0, :9] > 0).sum() == 2
    assert bool((terms[0, 7:9] > 0).all())


@pytest.fixture
def papo(tmp_path, tiny_folders):
    def make(**settings) -> PapoRecipe:
        config = run_config(PapoConfig, tmp_path, tiny_folders["qwen2_5_vl"])
        config.papo = dataclasses.replace(PapoSettings(), **settings)
        config.validate()
        return PapoRecipe(config)

    return make


def prepared(recipe: PapoRecipe):
    rollouts = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:3], Streams(0), Step()), Step())
    reference = make_reference(recipe.config.reference, recipe.policy, needed=True)
    rollouts = update_constants(recipe, recipe.policy, reference, rollouts, Step())
    reward = torch.arange(rollouts.num_rows, dtype=torch.float32) % 3
    return recipe.advantages(rollouts.replace(reward=reward), make_accelerator(), Step())


def gradient(recipe: PapoRecipe, rollouts) -> torch.Tensor:
    recipe.policy.zero_grad()
    recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step()).loss.backward()
    return recipe.policy.network.lm_head.weight.grad.clone()


def test_the_gradient_is_linear_in_gamma_and_zero_gamma_is_the_base_objective(papo):
    plain, weak, strong = papo(gamma=0.0), papo(gamma=0.1), papo(gamma=0.5)
    rollouts = prepared(strong)
    base = strong.objective.loss(
        strong.scores(strong.policy, rollouts, frozenset({"logp"})),
        rollouts.replace(logp_old=strong.scores(strong.policy, rollouts, frozenset({"logp"})).logp.detach()),
        strong.objective.denominators(rollouts),
    )
    strong.policy.zero_grad()
    base.loss.backward()
    expected = strong.policy.network.lm_head.weight.grad.clone()
    torch.testing.assert_close(gradient(plain, rollouts), expected)
    pull = gradient(strong, rollouts) - expected
    assert pull.norm() > 0.01 * expected.norm()
    torch.testing.assert_close(
        5 * (gradient(weak, rollouts) - expected), pull, rtol=1e-3, atol=2e-5 * float(expected.abs().max())
    )


def test_loss_is_the_sum_of_its_named_parts(papo):
    recipe = papo(gamma=0.1, entropy_policy=0.03, entropy_masked=0.05, sft_coef=0.01)
    assert "- 0.1 * mean (exp(a_it - l_it) - (a_it - l_it) - 1)" in recipe.describe()
    rollouts = prepared(recipe)
    denominators = count_denominators(recipe, rollouts)
    output = recipe.loss(recipe.policy, rollouts, denominators, Step())
    parts = ["loss/policy", "loss/kl", "loss/perception", "loss/entropy_policy", "loss/entropy_masked", "loss/sft"]
    total = sum(output.metrics[name].value for name in parts)
    assert float(output.loss.detach()) == pytest.approx(total, abs=1e-6)
    entropy = -(rollouts.extras["logp_masked"] * rollouts.mask).sum() / rollouts.mask.sum()
    assert output.metrics["loss/entropy_masked"].value == pytest.approx(0.05 * float(entropy), rel=1e-4)


def test_the_likelihood_is_a_mean_over_the_tokens_of_correct_samples_of_the_whole_step(papo):
    recipe = papo(gamma=0.0, sft_coef=1.0)
    rollouts = prepared(recipe)
    correct = (torch.arange(rollouts.num_rows) % 4 == 0).float()
    rollouts = rollouts.replace(reward_terms=rollouts.reward_terms | {recipe.accuracy_term: correct})
    denominators = count_denominators(recipe, rollouts)
    parts = [recipe.loss(recipe.policy, part, denominators, Step()) for part in rollouts.micro_batches(3)]
    logp = recipe.scores(recipe.policy, rollouts, frozenset({"logp"})).logp.detach()
    tokens = rollouts.mask * correct[:, None]
    expected = -float((logp * tokens).sum() / tokens.sum())
    assert sum(part.metrics["loss/sft"].value for part in parts) == pytest.approx(expected, rel=1e-4)


def test_masked_pass_has_no_gradient_unless_recomputed(papo):
    constant = prepared(papo())
    assert not constant.extras["logp_masked"].requires_grad
    recipe = papo(recompute_masked=True, gamma=0.0, entropy_masked=1.0)
    rollouts = prepared(recipe)
    assert "logp_masked" not in rollouts.extras
    frozen = papo(gamma=0.0, entropy_masked=1.0)
    moving, still = gradient(recipe, rollouts), gradient(frozen, prepared(frozen))
    plain = papo(gamma=0.0)
    torch.testing.assert_close(still, gradient(plain, prepared(plain)))
    recipe.policy.zero_grad()
    logp = recipe.terms[0].masked_scores(recipe.policy, rollouts, frozenset({"logp"})).logp
    (-(logp * rollouts.mask).sum() / rollouts.mask.sum()).backward()
    pull = recipe.policy.network.lm_head.weight.grad
    assert pull.norm() > 0.01 * still.norm()
    torch.testing.assert_close(moving - still, pull, rtol=1e-3, atol=2e-5 * float(moving.abs().max()))


def test_one_masked_image_a_question_and_the_same_tokens(papo):
    recipe = papo()
    rollouts = prepared(recipe)
    masked, original = rollouts.payload.views["masked"], rollouts.payload.prompts
    assert len(masked) == len(original) == 3
    for dark, clear in zip(masked, original, strict=True):
        assert torch.equal(dark.input_ids, clear.input_ids)
        assert not torch.equal(dark.media["pixel_values"], clear.media["pixel_values"])
    again = prepared(papo())
    assert torch.equal(again.payload.views["masked"][0].media["pixel_values"], masked[0].media["pixel_values"])


def test_questions_without_image_weigh_nothing(papo, tmp_path):
    recipe = papo(gamma=1.0)
    recipe.train_tasks = [*recipe.train_tasks[:2], recipe.train_tasks[-1]]
    assert not recipe.train_tasks[-1].images
    rollouts = prepared(recipe)
    assert rollouts.extras["papo_weight"].tolist() == [1.0] * 8 + [0.0] * 4
    assert bool((rollouts.extras["logp_masked"][8:] != 0).any())


def test_entropy_anneals_with_gamma(papo):
    recipe = papo(gamma=0.02, schedule="annealing", annealing_ratio=1.0, entropy_policy=0.1)
    rollouts = prepared(recipe)
    denominators = count_denominators(recipe, rollouts)
    steps = recipe.config.trainer.steps
    first = recipe.loss(recipe.policy, rollouts, denominators, Step(0, steps)).metrics["loss/entropy_policy"].value
    half = (
        recipe.loss(recipe.policy, rollouts, denominators, Step(steps // 2, steps)).metrics["loss/entropy_policy"].value
    )
    assert half == pytest.approx(first / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("key", "value"),
    [("schedule", "x"), ("mask_ratio", 1.5), ("token_share", 0.0), ("patch_size", 0), ("apply", "some")],
)
def test_bad_settings_are_named(key, value):
    with pytest.raises(ValueError, match=f"papo.{key}"):
        check_fields(dataclasses.replace(PapoSettings(), **{key: value}), "papo")
