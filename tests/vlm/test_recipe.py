import dataclasses
import json
from functools import partialmethod
from pathlib import Path

import pytest
import torch

from mmrl.errors import RunError, UserError
from mmrl.hub.compat import ensure_torchvision
from mmrl.recipes import RECIPES
from mmrl.rewards import RewardConfig
from mmrl.runs.records import read_samples, read_warnings
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Step
from mmrl.training.run import evaluate, train
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.methods.apo import ApoConfig
from mmrl.vlm.methods.papo import PapoConfig
from mmrl.vlm.methods.sft import SftConfig, SftRecipe
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe
from tests.rounding import EPS, assert_equal_up_to_rounding
from tests.vlm.runs import run_config

ROUNDING = 4 * EPS
"""Of e^d - 1 - d at d near 0, in nats."""
CONFIGS = {"vlm": VlmConfig, "papo": PapoConfig, "apo": ApoConfig}


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    policy = load_policy(ModelConfig(path=str(run_dir / f"checkpoints/step-{step:06d}/model")))
    return dict(policy.named_parameters())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_run_leaves_a_whole_folder(tmp_path, tiny_folders, name, family):
    config = run_config(CONFIGS[name], tmp_path, tiny_folders[family])
    run_dir = train(RECIPES[name], config)
    assert json.loads((run_dir / "result.json").read_text())["status"] == "done"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["policy/ratio_mean"] == 1.0
    tags = [json.loads(line)["tag"] for line in (run_dir / "evaluations.jsonl").open()]
    assert tags == ["before", "after"]
    assert (run_dir / "report.html").stat().st_size > 10_000
    assert (run_dir / "config.yaml").read_text().startswith("recipe: test")
    assert (run_dir / "checkpoints/best.json").is_file()


@pytest.mark.slow
def test_supervised_run_learns_its_answers(tmp_path, tiny_folders):
    config = run_config(SftConfig, tmp_path, tiny_folders["qwen2_5_vl"], steps=60, tasks_per_step=6, learning_rate=1e-2)
    config.evaluation.sampler.max_new_tokens = 24
    config.validate()
    run_dir = train(RECIPES["sft"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert rows[-1]["loss/nll"] < 0.3 * rows[0]["loss/nll"]
    assert rows[0]["time/batch"] > 0 == rows[0]["time/rollout"]  # nothing is sampled
    assert {(sample.reward, sample.advantage) for sample in read_samples(run_dir, 60, "train")} == {(None, None)}
    evaluations = [json.loads(line) for line in (run_dir / "evaluations.jsonl").open()]
    assert evaluations[0]["accuracy/greedy"] == 0.0
    assert evaluations[-1]["accuracy/greedy"] >= 1 / 3  # the image decides which of six answers


def test_reloaded_checkpoint_gives_the_same_logits(tmp_path, tiny_folders):
    run_dir = train(RECIPES["vlm"], run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"]))
    ensure_torchvision()
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = run_dir / "checkpoints/step-000002/model"
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    inputs = processor(text=["What is 3 plus 4?"], return_tensors="pt")
    policy = load_policy(ModelConfig(path=str(folder)))
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, policy.network.eval()(**inputs).logits)


@pytest.mark.slow
def test_runs_in_parts_of_a_batch_repeat_and_resume_bit_for_bit(tmp_path, tiny_folders):
    options = {"minibatches_per_step": 3, "epochs": 2, "micro_batch": 5}
    final = []
    for name in ("first", "second", "resumed"):
        config = run_config(PapoConfig, tmp_path / name, tiny_folders["qwen2_5_vl"], steps=3, **options)
        if name == "resumed":
            config.trainer.steps = 2
            train(RECIPES["papo"], config)
            config.trainer.steps = 3
            (tmp_path / name / "run/result.json").unlink()
        final.append(weights(train(RECIPES["papo"], config, resume=name == "resumed"), 3))
    for other in final[1:]:
        assert all(torch.equal(final[0][key], other[key]) for key in final[0])


def test_a_completion_of_trl_is_one_turn_of_the_assistant(tmp_path, tiny_folders):
    config = run_config(SftConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    texts = [task.columns["completion"] for task in SftRecipe(config).train_tasks]
    file = Path(config.data.path)
    rows = [json.loads(line) for line in file.open()]
    turns = [row | {"completion": [{"role": "assistant", "content": row["completion"]}]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in turns))
    assert [task.columns["completion"] for task in SftRecipe(config).train_tasks] == texts
    turns[2]["completion"].append({"role": "user", "content": "Sure?"})
    file.write_text("".join(json.dumps(row) + "\n" for row in turns))
    with pytest.raises(UserError, match=r"q2: column 'completion' has the roles assistant, user"):
        SftRecipe(config)


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        ("", "q2: the answer in column 'completion' is empty"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}], "q2: .* has tool_calls"),
    ],
)
def test_an_answer_without_text_would_teach_to_end_at_once_and_is_refused(tmp_path, tiny_folders, completion, message):
    config = run_config(SftConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    file = Path(config.data.path)
    rows = [json.loads(line) for line in file.open()]
    rows[2]["completion"] = completion
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=message):
        SftRecipe(config)


def test_an_answer_that_does_not_fit_in_the_models_positions_is_skipped_and_counted(tmp_path, tiny_folders):
    config = run_config(SftConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    recipe = SftRecipe(config)
    tasks = list(recipe.train_tasks[:3])
    tasks[1] = dataclasses.replace(tasks[1], columns=tasks[1].columns | {"completion": "1 " * recipe.policy.positions})
    rollouts = recipe.batch(recipe.policy, tasks, Streams(0), Step())
    assert [task.id for task in VlmPayload.of(rollouts).tasks] == ["q0", "q2"]
    assert recipe.skipped == {"long_answer": 1}
    with pytest.raises(NoUsableTasksError, match=r"none of 1 answers could be used.*only room for"):
        recipe.batch(recipe.policy, tasks[1:2], Streams(0), Step())


@pytest.mark.parametrize("action", ["error", "skip"])
def test_a_completion_with_an_image_token_is_a_bad_row(tmp_path, tiny_folders, action):
    config = run_config(SftConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    file = Path(config.data.path)
    file.write_text(file.read_text().replace("<answer>2</answer>", "<answer><|image_pad|></answer>"))
    config.data.on_bad_row = action
    if action == "skip":
        recipe = SftRecipe(config)
        assert [task.id for task in recipe.train_tasks] == ["q0", "q1", "q3", "q4", "q5"]
        assert recipe.skipped == {"media_in_answer": 1}
    else:
        with pytest.raises(UserError, match=r"q2: column 'completion' contains <\|image_pad\|>.*on_bad_row=skip"):
            SftRecipe(config)


@pytest.mark.parametrize("isolate", [False, True])
def test_rewards_that_name_images_get_them(tmp_path, tiny_folders, isolate, closing):
    """TRL's argument: the images of each row, opened; others are not sent them."""
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    seen = RewardConfig(name="tests/vlm/user_reward.py:brightness", isolate=isolate)
    config.rewards = [seen, RewardConfig(name="tests/vlm/user_reward.py:characters", isolate=False)]
    recipe = closing(VlmRecipe(config))
    tasks = [recipe.train_tasks[index] for index in (0, 4, 4, 5)]
    result = recipe.score_texts(tasks, ["1"] * 4, [[1]] * 4, Step())
    first, fourth = (task.load_images()[0].convert("L").getpixel((0, 0)) for task in tasks[:2])
    assert result.terms[seen.name] == [first, fourth, fourth, 0]
    assert first != fourth


def test_micro_batches_change_only_rounding(tmp_path, tiny_folders):
    results = []
    for size in (0, 5):
        config = run_config(VlmConfig, tmp_path / str(size), tiny_folders["qwen2_5_vl"], steps=1, micro_batch=size)
        config.trainer.learning_rate = 1e-4
        results.append(weights(train(RECIPES["vlm"], config), 1))
    for key in results[0]:
        assert_equal_up_to_rounding(results[0][key], results[1][key])


def test_lora_run_trains_the_adapter_only_and_its_reference_is_the_base(tmp_path, tiny_folders):
    config = run_config(PapoConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.model.lora.enabled = True
    run_dir = train(RECIPES["papo"], config)
    assert (run_dir / "checkpoints/step-000002/model/adapter_config.json").is_file()
    assert not (run_dir / "checkpoints/step-000002/reference").exists()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert rows[0]["policy/kl_ref"] < ROUNDING
    assert rows[1]["policy/kl_ref"] > 2 * ROUNDING


def test_a_run_from_an_adapter_compares_with_the_model_at_its_own_start(tmp_path, tiny_folders):
    """Not with the model without any adapter, from which the first run has moved away."""
    first = run_config(SftConfig, tmp_path / "first", tiny_folders["qwen2_5_vl"], learning_rate=3e-2)
    first.model.lora.enabled = True
    adapter = train(RECIPES["sft"], first) / "checkpoints/step-000002/model"
    config = run_config(PapoConfig, tmp_path / "second", adapter)
    config.model.lora.enabled = True
    config.evaluation.at_start = config.evaluation.at_end = False
    run_dir = train(RECIPES["papo"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert rows[0]["policy/kl_ref"] < ROUNDING
    assert rows[1]["policy/kl_ref"] > 2 * ROUNDING
    saved = run_dir / "checkpoints/step-000002/reference/adapter_model.safetensors"
    assert saved.read_bytes() == (adapter / saved.name).read_bytes(), "a resumed run has the same reference"
    config.output_dir, config.reference.kind, config.trainer.steps = str(tmp_path / "base"), "adapter", 1
    row = json.loads((train(RECIPES["papo"], config) / "metrics.jsonl").open().readline())
    assert row["policy/kl_ref"] > 1e-3, "the model without its adapter, where that is asked for"


def test_a_critic_that_learns_alone_is_said_and_a_model_without_weights_refused(tmp_path, tiny_folders, monkeypatch):
    """Weights that are trained but never change are not an error, but nor is the run a success."""
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.objective, config.evaluation.at_start, config.evaluation.at_end = ObjectiveConfig(preset="ppo"), False, False
    load = VlmRecipe.open

    def freeze(recipe, *arguments, frozen, **options):
        load(recipe, *arguments, **options)
        for name, weight in recipe.policy.named_parameters():
            if "value_head" not in name:
                weight.requires_grad_(not frozen)
                weight.register_hook(torch.zeros_like) if weight.requires_grad else None

    monkeypatch.setattr(VlmRecipe, "open", partialmethod(freeze, frozen=True))
    with pytest.raises(UserError, match="no weights to train"):
        train(RECIPES["vlm"], config)
    monkeypatch.setattr(VlmRecipe, "open", partialmethod(freeze, frozen=False))
    config.output_dir, config.trainer.weight_decay = str(tmp_path / "still"), 0.0
    run_dir = train(RECIPES["vlm"], config)
    assert any("no weight of the policy changed in 2 steps" in line for line in read_warnings(run_dir))


def test_critic_objective_runs(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.objective = ObjectiveConfig(preset="ppo")
    config.rewards.append(RewardConfig(name="tests/vlm/user_reward.py:length", isolate=False))
    config.accuracy_reward = "exact"
    run_dir = train(RECIPES["vlm"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert rows[0]["loss/value"] > 0


def test_evaluate_measures_the_best_checkpoint(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    run_dir = train(RECIPES["vlm"], config)
    metrics = evaluate(RECIPES["vlm"], config, run_dir)
    last = json.loads((run_dir / "evaluations.jsonl").read_text().splitlines()[-1])
    assert last["tag"] == "evaluate"
    assert metrics["heldout/accuracy/greedy"] == last["accuracy/greedy"]
    assert metrics["heldout/n"] == 6


def test_unreadable_and_missing_images_are_counted_and_skipped(tmp_path, tiny_folders, caplog):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"], tasks_per_step=6)
    (tmp_path / "data/1.png").write_bytes(b"not an image")
    (tmp_path / "data/2.png").write_bytes(b"")
    run_dir = train(RECIPES["vlm"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert rows[-1]["data/skipped"] > 0
    assert rows[0]["samples/total"] == 4 * 4
    assert "cannot be decoded" in caplog.text
    assert "is empty" in caplog.text


def test_a_step_without_a_usable_question_draws_others(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"], tasks_per_step=1, steps=4)
    for index in (0, 1, 2):
        (tmp_path / f"data/{index}.png").write_bytes(b"not an image")
    run_dir = train(RECIPES["vlm"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert len(rows) == 4
    assert rows[-1]["samples/total"] == 4 * 4
    assert rows[-1]["data/skipped"] > 3  # the evaluation skips the three, and steps met some of them


def test_when_nothing_can_be_read_the_run_fails_with_the_reason(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.model.max_prompt_tokens = 3
    with pytest.raises(RunError, match=r"none of \d+ questions could be used.*max_prompt_tokens is 3"):
        train(RECIPES["vlm"], config)


def test_failing_reward_costs_its_row_and_is_reported(tmp_path, tiny_folders, caplog):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"], tasks_per_step=6)
    config.rewards.append(RewardConfig(name="tests/vlm/user_reward.py:sometimes", isolate=False))
    config.accuracy_reward = "exact"
    run_dir = train(RECIPES["vlm"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert rows[0]["reward/errors"] == 4  # the four samples of the question whose answer is 1
    assert [row["reward/errors/tests.vlm.user_reward.py:sometimes/raised"] for row in rows] == [4, 4]  # of each step
    assert "refused" in caplog.text
    assert "in sometimes" in caplog.text, "the traceback of the user's own function"
    assert "calling.py" not in caplog.text


def test_reward_that_always_fails_stops_the_run(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.rewards.append(RewardConfig(name="tests/vlm/user_reward.py:always", isolate=False))
    config.accuracy_reward = "exact"
    with pytest.raises(RunError, match=r"all rewards failed in the evaluation of heldout: .*RuntimeError: broken"):
        train(RECIPES["vlm"], config)
    config.output_dir, config.evaluation.at_start = str(tmp_path / "other"), False
    with pytest.raises(RunError, match=r"all rewards of this step failed: .*RuntimeError: broken"):
        train(RECIPES["vlm"], config)


def test_math_with_answers_in_words_is_refused_before_the_run(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    path = tmp_path / "data/questions.jsonl"
    rows = [json.loads(line) | {"answer": "a red circle"} for line in path.open()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.rewards = [RewardConfig(name="math")]
    with pytest.raises(
        UserError, match=r"'math' cannot score .* rows, .*the reference answer 'a red circle' cannot be"
    ):
        train(RECIPES["vlm"], config)


def test_folder_of_another_run_is_not_overwritten(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"], steps=1)
    train(RECIPES["vlm"], config)
    with pytest.raises(UserError, match="already contains a run"):
        train(RECIPES["vlm"], config)
    config.output_dir = str(tmp_path / "nothing")
    with pytest.raises(UserError, match="nothing to resume"):
        train(RECIPES["vlm"], config, resume=True)


def test_truncated_checkpoint_is_refused_with_advice(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    run_dir = train(RECIPES["vlm"], config)
    state = run_dir / "checkpoints/step-000002/state.pt"
    state.write_bytes(state.read_bytes()[:100])
    config.trainer.steps = 3
    with pytest.raises(UserError, match=r"state\.pt has 100 bytes instead of \d+; step 1 is intact"):
        train(RECIPES["vlm"], config, resume=True)


def test_group_of_one_needs_another_estimator(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"], samples_per_task=1)
    with pytest.raises(ValueError, match="compares the samples of a group"):
        config.validate()
    config.objective.preset = "reinforce_pp"
    config.validate()


def test_objective_overrides():
    objective = make_objective(
        ObjectiveConfig(preset="dr_grpo", clip={"high": 0.4}, kl={"kind": "k3", "coef": 0.1}), 77
    )
    assert (objective.fixed_length, objective.clip.high, objective.kl_coef) == (77, 0.4, 0.1)
    with pytest.raises(ValueError, match="grpo"):
        make_objective(ObjectiveConfig(preset="grpoo"))


def test_greedy_and_sampled_accuracy_have_intervals(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.evaluation.samples = 3
    recipe = VlmRecipe(config)
    from mmrl.training.processes import make_accelerator

    first = recipe.evaluate(recipe.policy, "heldout", make_accelerator(), Step()).metrics
    again = recipe.evaluate(recipe.policy, "heldout", make_accelerator(), Step()).metrics
    assert first == again
    for mode in ("greedy", "sampled"):
        assert 0 <= first[f"accuracy/{mode}/low"] <= first[f"accuracy/{mode}"] <= first[f"accuracy/{mode}/high"] <= 1


def test_adaptive_kl_moves_its_coefficient_and_survives_a_checkpoint(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"], steps=3)
    config.objective.kl = {"coef": 0.1}
    config.adaptive_kl.target = 1e-6
    config.adaptive_kl.horizon = 24.0
    config.rewards.append(RewardConfig(name="tests/vlm/user_reward.py:characters", isolate=False))
    config.accuracy_reward = "exact"
    config.validate()
    run_dir = train(RECIPES["vlm"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    coefficients = [row["policy/kl_coef"] for row in rows]
    # the first KL is 0: 20% below the target, over 12 samples of a horizon of 24; afterwards it is far above
    assert coefficients == pytest.approx([0.09, 0.099, 0.1089])
    config.trainer.steps = 4
    train(RECIPES["vlm"], config, resume=True)
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["policy/kl_coef"] == pytest.approx(0.11979)
    config.objective.kl = {"coef": 0.0}
    with pytest.raises(ValueError, match="adaptive_kl"):
        config.validate()


@pytest.mark.parametrize("name", ["vlm", "papo"])
def test_tiny_model_learns_the_rewarded_behaviour(tmp_path, tiny_folders, name):
    config = run_config(
        CONFIGS[name], tmp_path, tiny_folders["qwen2_5_vl"], steps=25, samples_per_task=12, learning_rate=5e-3
    )
    config.objective.kl = {"coef": 0.0}
    config.rewards = [RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)]
    config.eval_data = {}
    config.checkpoint.every = 0
    run_dir = train(RECIPES[name], config)
    rewards = [json.loads(line)["reward/mean"] for line in (run_dir / "metrics.jsonl").open()]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


def test_truncated_sampling_reports_the_mass_it_kept(tmp_path, tiny_folders):
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.sampler.top_p = 0.5
    run_dir = train(RECIPES["vlm"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert all(0.5 <= row["response/nucleus_mass"] < 0.9 for row in rows)
