import math

import pytest
import torch

from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step, make_reference
from mmrl.training.update import count_denominators, update_constants
from mmrl.vlm.methods.apo import DADS_SHAPES, ApoConfig, ApoRecipe, difficulty, kl_weights, length_multipliers
from tests.vlm.runs import run_config

GROUP = torch.tensor([0, 0, 0, 0, 1, 1])
CORRECT = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])


def test_difficulty_is_the_share_of_wrong_samples():
    assert difficulty(CORRECT, GROUP).tolist() == [0.5] * 4 + [1.0] * 2


@pytest.mark.parametrize(("d", "weight"), [(0.125, 0.907), (0.5, 0.743), (0.75, 0.493), (0.875, 0.288)])
def test_dads_weights_of_positives(d, weight):
    found = kl_weights(torch.tensor([1.0]), torch.tensor([d]), DADS_SHAPES["one_minus_exp"])
    assert float(found) == pytest.approx(weight, abs=5e-4)


def test_dads_leaves_negatives_and_degenerate_groups_alone():
    advantage = torch.tensor([1.0, -1.0, 0.0, 1.0, 1.0])
    hardness = torch.tensor([0.5, 0.5, 0.5, 0.0, 1.0])
    found = kl_weights(advantage, hardness, DADS_SHAPES["one_minus_exp"])
    assert found[1:].tolist() == [1.0] * 4
    assert float(found[0]) == pytest.approx(1 - math.exp(-math.e / 2), rel=1e-6)


def test_stcr_multiplies_long_wrong_samples_only():
    lengths = torch.tensor([10, 30, 12, 14, 50, 60])
    found = length_multipliers(lengths, CORRECT, GROUP, base=1.05)
    mean_correct = (10 + 14) / 2
    assert float(found[1]) == pytest.approx(1 + 1 - 1.05 ** -(30 - mean_correct), rel=1e-5)
    assert found[[0, 2, 3, 4, 5]].tolist() == [1.0] * 5  # correct, as long as the mean, correct, unsolved group


def test_published_base_is_almost_inert():
    lengths = torch.tensor([100, 1100, 100, 100, 0, 0])
    assert float(length_multipliers(lengths, CORRECT, GROUP, 1.00001)[1]) == pytest.approx(1.00995, abs=1e-5)
    assert length_multipliers(lengths, CORRECT, GROUP, 1.0).tolist() == [1.0] * 6


def test_recipe_weights_the_kl_of_positive_samples(tmp_path, tiny_folders):
    config = run_config(ApoConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.validate()
    recipe = ApoRecipe(config)
    rollouts = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step()), Step())
    reference = make_reference(config.reference, recipe.policy, needed=True)
    correct = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0])
    terms = {"format": correct * 0, "exact": correct}
    rollouts = update_constants(
        recipe, recipe.policy, reference, rollouts.replace(reward=correct, reward_terms=terms), Step()
    )
    # a reference that differs, so that the KL term is not zero
    rollouts = recipe.advantages(rollouts.replace(logp_ref=rollouts.logp_ref - 0.5), make_accelerator(), Step())
    assert float(rollouts.extras["kl_weight"][0]) == pytest.approx(1 - math.exp(-math.e * 0.25), rel=1e-5)
    assert rollouts.extras["kl_weight"][1:4].tolist() == [1.0] * 3
    denominators = count_denominators(recipe, rollouts)
    weighted = recipe.loss(recipe.policy, rollouts, denominators, Step()).loss
    plain = recipe.loss(recipe.policy, rollouts.replace(extras={}), denominators, Step()).loss
    k3 = math.exp(-0.5) + 0.5 - 1
    expected = 1e-3 * k3 * float((1 - rollouts.extras["kl_weight"]).mean())
    assert float((plain - weighted).detach()) == pytest.approx(expected, rel=2e-2)


def test_configurations_without_kl_or_group_std_are_refused(tmp_path, tiny_folders):
    config = run_config(ApoConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.objective.kl = {"coef": 0.0}
    with pytest.raises(ValueError, match=r"apo\.dads"):
        config.validate()
    config.apo.dads = "off"
    config.validate()
    config.objective.advantage = {"kind": "group_mean"}
    with pytest.raises(ValueError, match="group_mean_std"):
        config.validate()
    config.apo.stcr_base = 0.5
    with pytest.raises(ValueError, match="stcr_base"):
        config.validate()
