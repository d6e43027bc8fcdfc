"""Rollouts from inside reference answers (DR-PO), and samples of another temperature (AEPO, HAPO)."""

import pytest
import torch

from mmrl.contrib.language.adaptive_temperature import (
    AdaptiveSettings,
    AdaptiveTemperatureConfig,
    AdaptiveTemperatureRecipe,
    tempered,
)
from mmrl.contrib.language.arbitrary_entropy import (
    TEMPERED,
    ArbitraryEntropyConfig,
    ArbitraryEntropyRecipe,
    EntropySettings,
)
from mmrl.contrib.language.dataset_reset import DatasetResetConfig, DatasetResetRecipe, ResetSettings
from mmrl.contrib.rows.adaptive import HapoClip
from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.rewards import RewardConfig
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.rollers import Unit, rolled
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.methods.augmentation import AugmentedTask
from tests.contracts.domains import run
from tests.vlm.runs import run_config, without_images

LETTERS = RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)


@pytest.fixture
def opened(tmp_path, tiny_folders, closing):
    def make(recipe, config_class, **parts):
        config = run_config(config_class, tmp_path, tiny_folders["qwen2_5_vl"], tasks_per_step=4)
        config.eval_data, config.rewards = {}, [LETTERS]
        for name, part in parts.items():
            setattr(config, name, part)
        check_config(config, "")
        return closing(recipe(config))

    return make


def reset(opened, **settings):
    objective = ObjectiveConfig(preset="scaffolded")
    return opened(DatasetResetRecipe, DatasetResetConfig, reset=ResetSettings(**settings), objective=objective)


def entropy(opened, **settings):
    part = EntropySettings(**{"share": 0.5} | settings)
    return opened(ArbitraryEntropyRecipe, ArbitraryEntropyConfig, steering=part)


def test_answers_begin_with_a_part_of_the_reference_that_is_not_trained(opened, monkeypatch):
    recipe = reset(opened)
    rows = rolled(recipe, Unit(recipe.train_tasks[:4], Streams(0), Step()), make_accelerator())
    payload, seen = VlmPayload.of(rows), {}
    score = recipe.rewards.score
    monkeypatch.setattr(recipe.rewards, "score", lambda *given: seen.update(replies=given[1]) or score(*given))
    recipe.score(rows, Step())
    started = [isinstance(task, AugmentedTask) for task in payload.tasks]
    assert sum(started) >= 3, "of four, one may draw no token"
    for group, (task, prompt) in enumerate(zip(payload.tasks, payload.prompts, strict=True)):
        start = task.answer_start
        assert task.columns["completion"].startswith(start)
        assert len(start) < len(task.columns["completion"])
        assert prompt.text.endswith(start)
        for row in torch.nonzero(rows.group == group).flatten().tolist():
            assert seen["replies"][row].startswith(start), "rewards see the whole answer"
            assert int(rows.mask[row].sum()) <= 6, "the loss sees what was sampled"
    assert recipe.stages[0].metrics(rows, Step())["reset/share"].value == sum(started) / 4


def test_starts_are_spread_over_the_reference_and_left_out_by_probability(opened):
    recipe = reset(opened, probability=0.5)
    task = recipe.train_tasks[0]
    tokens = len(recipe.policy.processor.tokenizer.encode(task.columns["completion"], add_special_tokens=False))
    found = [recipe.stages[0].started(recipe.policy, task, 0.4, place / tokens) for place in range(tokens)]
    assert found[0] is task
    assert [round(each.hint_fraction * tokens) for each in found[1:]] == list(range(1, tokens))
    assert recipe.stages[0].started(recipe.policy, task, 0.5, 0.9) is task
    with pytest.raises(UserError, match="has no text in column 'worked'"):
        reset(opened, reference_key="worked")


@pytest.mark.parametrize(("measured", "temperature"), [(0.2, 1.2), (0.5, 1.2), (0.7, 0.8)])
def test_the_entropy_chooses_the_temperature_of_further_samples(opened, measured, temperature):
    recipe = entropy(opened)
    recipe.on_step_end(Step(), {"policy/entropy": measured})
    rows = recipe.rollout(recipe.policy, recipe.train_tasks[:4], Streams(0), Step())
    further = rows.extras["source"] == TEMPERED
    assert rows.num_groups == 4
    assert further.tolist() == ([False] * 4 + [True] * 4) * 2 + [False] * 8
    alone = rows.select(further)
    with torch.no_grad():
        at, plain = (recipe.policy(alone, temperature=t).logp for t in (temperature, 1.0))
    torch.testing.assert_close(at, alone.logp_old * alone.mask, atol=1e-4, rtol=1e-3)
    assert float((at - plain).abs().max()) > 1e-2
    assert recipe.rollout_state([]) == {"value": measured}


@pytest.mark.parametrize("replace_first", [False, True])
def test_good_further_samples_are_learned_and_the_others_left_out(opened, replace_first):
    recipe = entropy(opened, rows=3, weight=0.5, replace_first=replace_first)
    rows = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:4], Streams(0), Step()), Step())
    own, further = [0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0]
    reward = torch.tensor([*own, *further, *own, *further, *own, *own])
    found = recipe.advantages(rows.replace(reward=reward), make_accelerator(), Step())
    count = (found.mask.sum(1) > 0).tolist()
    assert count[4:8] + count[12:16] == [True, True, False, False, True, False, False, False], "three at most"
    assert found.advantage[4:8, 0].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert count[:4] == [not (replace_first and row < 3) for row in range(4)]
    assert all(count[8:12] + count[16:])
    plain = torch.tensor([0.0, 1.0, 0.0, 1.0]) - 0.5
    torch.testing.assert_close(found.advantage[16:20, 0], plain / plain.std(), atol=1e-5, rtol=1e-4)
    recipe.last.value = 9.0
    cold = recipe.advantages(rows.replace(reward=reward), make_accelerator(), Step())
    left = (cold.mask.sum(1) > 0).tolist()
    assert sum(left[4:8] + left[12:16]) == 1, "half as many while the entropy is above the target"


def test_old_log_probabilities_of_the_sampler_are_refused(opened):
    recipe = entropy(opened)
    recipe.config.trainer.old_logp = "sampler"
    with pytest.raises(ValueError, match="sampled and scored at different temperatures"):
        recipe.config.validate()


def adaptive(opened, **settings):
    part = AdaptiveSettings(**settings)
    objective = ObjectiveConfig(preset="hapo")
    return opened(AdaptiveTemperatureRecipe, AdaptiveTemperatureConfig, adaptive=part, objective=objective)


def test_uncertain_tokens_are_drawn_hotter_and_certain_ones_colder():
    clip, even = HapoClip(), torch.zeros(1, 4)
    logp = torch.cat([even, torch.tensor([[4.0, 0.0, -1.0, -float("inf")]])]).log_softmax(-1)
    entropy = torch.special.entr(logp.exp()).sum(-1)
    scale = clip.scale_of(torch.tensor([[0.5 * float(entropy[1]), 0.7, 0.8, float(entropy[0])]]), torch.ones(1, 4))
    found = tempered(logp + 0.0, clip, scale, 0.5).exp()
    torch.testing.assert_close(found[0], logp[0].exp())
    assert float(found[1, 0]) > float(logp[1, 0].exp()), "colder: the likeliest token gains"
    assert float(found[1, 3]) == 0.0
    hot = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).log_softmax(-1)
    assert float(tempered(hot, clip, scale, 0.5).exp().max()) < float(hot.exp().max())
    assert tempered(logp, clip, None, 0.5) is logp, "no step before"


def test_recorded_log_probabilities_are_those_of_the_policy(opened):
    recipe = adaptive(opened, tau=0.5)
    first = recipe.rollout(recipe.policy, recipe.train_tasks[:4], Streams(0), Step())
    entropy = torch.rand(first.mask.shape, generator=torch.Generator().manual_seed(0)) + 3.0
    recipe.advantages(first.replace(reward=torch.arange(16.0), entropy=entropy), make_accelerator(), Step())
    assert recipe.scale.numbers is not None
    state = recipe.rollout_state([])
    second = recipe.rollout(recipe.policy, recipe.train_tasks[:4], Streams(0), Step(1, 2))
    assert not torch.equal(first.payload.response_ids, second.payload.response_ids), "drawn from another distribution"
    with torch.no_grad():
        plain = recipe.policy(second, temperature=1.0).logp
    torch.testing.assert_close(plain, second.logp_old * second.mask, atol=1e-4, rtol=1e-3)
    recipe.load_rollout_state(None)
    again = recipe.rollout(recipe.policy, recipe.train_tasks[:4], Streams(0), Step(1, 2))
    assert torch.equal(first.payload.response_ids, again.payload.response_ids)
    recipe.load_rollout_state(state)
    worker = recipe.rollout(recipe.policy, recipe.train_tasks[:4], Streams(0), Step(1, 2))
    assert torch.equal(second.payload.response_ids, worker.payload.response_ids)


def test_a_clip_without_entropies_is_refused(opened):
    recipe = adaptive(opened)
    recipe.config.objective.clip = {"kind": "ppo_clip"}
    with pytest.raises(ValueError, match=r"objective\.clip is 'ppo_clip', but the temperature follows the entropies"):
        recipe.config.validate()


@pytest.mark.slow
def test_positive_samples_of_a_hotter_policy_leave_it_with_more_entropy(tmp_path, language_model):
    found = {}
    for name, wanted in (("hot", 9.0), ("cold", 0.0)):
        config = run_config(ArbitraryEntropyConfig, tmp_path / name, language_model, tasks_per_step=6)
        without_images(tmp_path / name / "data" / "questions.jsonl")
        config.recipe, config.eval_data, config.rewards = "arbitrary_entropy", {}, [LETTERS]
        config.trainer.samples_per_task, config.trainer.learning_rate = 16, 4e-3
        config.steering = EntropySettings(entropy=wanted, hot=2.0, cold=0.5, share=0.5, weight=3.0)
        check_config(config, "")
        found[name] = run(config, tmp_path / name / "run", steps=20)[0].recipe.last.value
    assert found["hot"] > found["cold"] + 0.02, found
