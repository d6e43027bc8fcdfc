"""Rows that cannot be judged, questions that cannot be shown, mixed precision."""

import dataclasses
import json
import math

import pytest
import torch

from mmrl.errors import RunError
from mmrl.rewards import RewardConfig
from mmrl.training.evaluation import Trial
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step, make_reference
from mmrl.training.update import count_denominators, update_constants
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.methods.apo import ApoConfig, ApoRecipe, difficulty, length_multipliers
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe
from tests.vlm.builders import draw, make_task
from tests.vlm.runs import run_config

NAN = float("nan")


def test_unjudged_samples_count_neither_as_right_nor_as_wrong():
    group = torch.tensor([0, 0, 0, 1, 1])
    correct = torch.tensor([1.0, NAN, 0.0, NAN, NAN])
    assert difficulty(correct, group).tolist() == [0.5] * 3 + [1.0] * 2
    lengths = torch.tensor([10, 90, 30, 5, 60])
    found = length_multipliers(lengths, correct, group, base=1.05)
    assert found[[0, 1, 3, 4]].tolist() == [1.0] * 4
    assert float(found[2]) == pytest.approx(2 - 1.05**-20, rel=1e-5)


def test_apo_leaves_unscored_rows_out_of_their_group(tmp_path, tiny_folders):
    config = run_config(ApoConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    recipe = ApoRecipe(config)
    rollouts = draw(recipe.policy, [make_task("a", "Sum?"), make_task("b", "1")], group=4)
    exact = torch.tensor([1.0, 0.0, NAN, 0.0, 1.0, 0.0, 0.0, 0.0])
    reward = exact.clone()
    reward[3] = NAN  # another term failed
    rollouts = rollouts.replace(reward=reward, reward_terms={"format": exact * 0, "exact": exact})
    rollouts = recipe.advantages(rollouts, make_accelerator(), Step())
    assert recipe.noted["apo/difficulty_mean"].value == (0.5 + 0.75) / 2
    weight = rollouts.extras["kl_weight"]
    assert float(weight[0]) == pytest.approx(1 - math.exp(-math.e * 0.5), rel=1e-5)
    assert weight[[1, 2, 3]].tolist() == [1.0] * 3
    assert all(bool(torch.isfinite(value).all()) for value in rollouts.extras.values())
    assert bool(torch.isfinite(rollouts.advantage).all())


def test_answers_of_an_evaluation_do_not_depend_on_the_questions_beside_them(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.evaluation.greedy, config.evaluation.samples = False, 2
    recipe = VlmRecipe(config)
    measure = recipe.answers(recipe.policy, "heldout", Step())
    trials = [Trial(index, 0, task) for index, task in enumerate(recipe.eval_tasks["heldout"])]
    together, alone = measure.run(trials[:4], 0), [measure.run([trial], 0)[0] for trial in trials[:4]]
    assert len({row["response"] for row in together}) == 4
    assert [row["response"] for row in alone] == [row["response"] for row in together]


def test_evaluation_continues_after_a_batch_without_a_usable_question(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.evaluation.batch_tasks = 5
    (tmp_path / "data/4.png").write_bytes(b"not an image")
    recipe = VlmRecipe(config)
    recipe.eval_tasks = {"heldout": [*recipe.train_tasks[:4], recipe.train_tasks[5], recipe.train_tasks[4]]}
    metrics = recipe.evaluate(recipe.policy, "heldout", make_accelerator(), Step()).metrics
    assert (metrics["n"], metrics["skipped"]) == (5, 1)
    recipe.eval_tasks = {"heldout": [recipe.train_tasks[4]]}
    with pytest.raises(RunError, match=r"none of 1 questions could be used.*cannot be decoded"):
        recipe.evaluate(recipe.policy, "heldout", make_accelerator(), Step())


def test_heads_keep_their_precision_under_autocast(tiny_folders):
    policy = load_policy(ModelConfig(path=str(tiny_folders["qwen2_5_vl"])), value_head=True)
    torch.nn.init.normal_(policy.value_head.weight, generator=torch.Generator().manual_seed(0))
    rollouts = draw(policy, [make_task("a", "Sum?")])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scores = policy(rollouts, outputs=frozenset({"logp", "values"}))
    assert scores.values.dtype == torch.float32
    states = torch.randn(3, policy.network.lm_head.in_features, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = policy.next_logp(states, 1.0)
        with torch.autocast("cpu", torch.bfloat16):
            found = policy.next_logp(states, 1.0)
    # the products are in the run's precision, the sums over the vocabulary in float32
    real = expected.isfinite()
    assert torch.equal(found.isfinite(), real)
    torch.testing.assert_close(found[real], expected[real], atol=0.1, rtol=0)


def test_filter_on_a_reward_that_does_not_exist_is_a_configuration_error(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.objective.filter = {"kind": "resample", "key": "accuracy"}
    with pytest.raises(ValueError, match=r"objective\.filter\.key is 'accuracy'; allowed: reward, format, exact"):
        config.validate()
    config.objective.filter["key"] = "exact"
    config.validate()


def test_another_aggregation_needs_no_fixed_length():
    objective = make_objective(ObjectiveConfig(preset="dr_grpo", aggregation={"kind": "token_mean"}), 77)
    assert (objective.aggregation.kind, objective.fixed_length) == ("token_mean", None)
    assert make_objective(ObjectiveConfig(preset="dr_grpo"), 77).fixed_length == 77


def test_rewards_get_tokens_state_and_the_form_of_the_data(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    path = tmp_path / "data/questions.jsonl"
    rows = [json.loads(line) for line in path.open()]
    turns = [{"role": "user", "content": "What is 3 plus 4?"}]
    chat = [{"id": row["id"], "prompt": turns, "answer": row["answer"]} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in chat))
    config.rewards = [RewardConfig(name="tests.vlm.test_recipe_edges:spy", isolate=False)]
    recipe = VlmRecipe(config)
    SEEN.clear()
    step = Step(1, 2)
    drawn = recipe.rollout(recipe.policy, recipe.train_tasks[:3], Streams(0), step)
    rollouts = recipe.score(drawn, step)
    (seen,) = SEEN
    assert seen["prompts"] == [turns] * 12
    assert [reply[0]["role"] for reply in seen["completions"]] == ["assistant"] * 12
    lengths = rollouts.mask.sum(1).int().tolist()
    assert [len(ids) for ids in seen["completion_ids"]] == seen["completion_lengths"] == lengths
    assert seen["completion_ids"][0] == rollouts.payload.response_ids[0, : lengths[0]].tolist()
    state = seen["trainer_state"]
    assert (state.global_step, state.max_steps, state.epoch) == (1, 2, 3 / 6)


SEEN = []


def spy(prompts, completions, **columns):
    SEEN.append({"prompts": prompts, "completions": completions, **columns})
    return [1.0] * len(completions)


def test_masked_truncated_responses_stay_in_their_group_and_leave_the_loss(tmp_path, tiny_folders):
    gradients = {}
    for masked in (False, True):
        config = run_config(VlmConfig, tmp_path / str(masked), tiny_folders["qwen2_5_vl"])
        config.mask_truncated_completions = masked
        recipe = VlmRecipe(config)
        rollouts = draw(recipe.policy, [make_task("a", "Sum?"), make_task("b", "1")], group=4)
        finish = ["length", "stop", "stop", "length"] + ["length"] * 4
        payload = dataclasses.replace(rollouts.payload, finish=finish)
        rollouts = rollouts.replace(payload=payload, reward=torch.arange(8.0))
        reference = make_reference(config.reference, recipe.policy, needed=True)
        scored = recipe.advantages(
            update_constants(recipe, recipe.policy, reference, rollouts, Step()), make_accelerator(), Step()
        )
        if not masked:  # as if the truncated rows had never had a token to train
            kept = torch.tensor([float(reason != "length") for reason in finish])[:, None]
            scored = scored.replace(mask=scored.mask * kept, advantage=scored.advantage * kept)
        assert scored.advantage[1, 0] == pytest.approx((1 - 1.5) / (torch.arange(4.0).std() + 1e-6))
        recipe.loss(recipe.policy, scored, count_denominators(recipe, scored), Step()).loss.backward()
        gradients[masked] = recipe.policy.network.lm_head.weight.grad
    torch.testing.assert_close(gradients[True], gradients[False])
    assert gradients[True].abs().sum() > 0
