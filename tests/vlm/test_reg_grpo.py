import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.errors import ConfigError, UserError
from mmrl.fields import check_config
from mmrl.recipes import RECIPES
from mmrl.rewards import RewardConfig, RewardResult
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.rollers import Unit, rolled, sampled
from mmrl.training.run import train
from mmrl.training.trainer import Trainer, collect_metrics
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import VlmTask, load_videos
from mmrl.vlm.methods.augmentation import (
    AugmentationSettings,
    AugmentedTask,
    augment_task,
    noisy_frames,
    noisy_image,
    partial_trace,
    reasoning_of,
    rewrite_question,
)
from mmrl.vlm.methods.reg_grpo import RegGrpoConfig, RegGrpoRecipe
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe
from tests.vlm.builders import make_task
from tests.vlm.runs import run_config
from tests.vlm.test_recipe import weights

LETTERS = RewardConfig(name="tests/vlm/user_reward.py:letters", isolate=False)


def make_config(folder, model, **options):
    """A run whose rewards differ between responses; options of the trainer, those with a dot of the augmentation."""
    own = {key.removeprefix("augmentation."): options.pop(key) for key in list(options) if "." in key}
    config = run_config(RegGrpoConfig, folder, model, **options)
    config.augmentation = AugmentationSettings(**own)
    config.rewards, config.eval_data, config.recipe = [LETTERS], {}, "reg_grpo"
    check_config(config, "")
    return config


@pytest.fixture
def make_recipe(tmp_path, tiny_folders, closing):
    return lambda **options: closing(RegGrpoRecipe(make_config(tmp_path, tiny_folders["qwen2_5_vl"], **options)))


def seeded(number=0):
    return torch.Generator().manual_seed(number)


def set_difficulty(recipe, **means):
    """Rewards that make the window's mean 0.5 and the questions' own means these."""
    (stage,) = recipe.stages
    stage.tracker.recent, stage.tracker.means = [0.5], means


def test_lengths_of_hints_and_strength_of_noise_by_hand():
    settings = AugmentationSettings(hint_scale=2.0, hint_max=0.5, noise_scale=0.5, noise_max=0.3)
    assert [settings.hint_fraction(d) for d in (-1.0, 0.0, 0.125, 0.25, 1.0)] == [0.0, 0.0, 0.25, 0.5, 0.5]
    assert [settings.noise_sigma(d) for d in (1.0, 0.0, -0.25, -1.0)] == [0.0, 0.0, 0.125, 0.3]


@pytest.mark.parametrize("sigma", [0.05, 0.2])
def test_noise_has_its_deviation_and_repeats(sigma):
    grey = Image.new("RGB", (80, 60), (128, 128, 128))
    first, second = (noisy_image(grey, sigma, np.random.default_rng(3)) for _ in range(2))
    assert first.tobytes() == second.tobytes()
    deviation = (np.asarray(first).astype(float) - 128).std() / 255
    assert deviation == pytest.approx(sigma, rel=0.1)  # 14,400 draws; 0.2 is cut off at 2.5 deviations
    frames = (torch.full((4, 3, 40, 40), 128.0), {"fps": 2.0})
    noisy, metadata = noisy_frames(frames, sigma, np.random.default_rng(3))
    assert metadata == frames[1]
    assert float((noisy - 128).std()) / 255 == pytest.approx(sigma, rel=0.1)
    assert not torch.equal(noisy[0], noisy[1])
    assert float(frames[0].std()) == 0.0
    assert 0 <= float(noisy.min()) <= float(noisy.max()) <= 255


def test_a_noisy_question_is_always_shown_alike():
    task = augment_task(make_task("a", "Sum?", [(56, 56), (56, 56)]), noise_sigma=0.1, noise_seed=5)
    plain, shown, again = VlmTask.load_images(task), task.load_images(), task.load_images()
    assert [image.tobytes() for image in shown] == [image.tobytes() for image in again]
    assert all(image.tobytes() != other.tobytes() for image, other in zip(shown, plain, strict=True))
    difference = [np.asarray(a).astype(int) - np.asarray(b) for a, b in zip(shown, plain, strict=True)]
    assert not np.array_equal(*difference)  # each image has noise of its own
    assert augment_task(task, noise_sigma=0.0).load_images()[0].tobytes() == plain[0].tobytes()


def test_questions_are_rewritten_where_their_text_stands():
    task = make_task("a", "Is {answer} in {1}?", [(56, 56)])
    (turn,) = rewrite_question(task, "Hint: {answer}. {question}", answer="7{question}")
    text = "Hint: 7{question}. Is {answer} in {1}?"
    assert turn["content"] == [{"type": "image"}, {"type": "text", "text": text}]
    assert task.messages[0]["content"][1]["text"] == "Is {answer} in {1}?"
    turns = [{"role": "system", "content": [{"type": "text", "text": "S"}]}, {"role": "user", "content": []}]
    assert rewrite_question(VlmTask("b", turns), "{question}!") == [
        turns[0],
        {"role": "user", "content": [{"type": "text", "text": "!"}]},
    ]


@pytest.mark.parametrize(
    ("text", "inside"),
    [("<think>3 4</think><answer>7", "3 4"), ("a <think>3", "3"), ("3 4</think>", "3 4"), ("no marks", "no marks")],
)
def test_the_reasoning_of_a_response(text, inside):
    assert reasoning_of(text, "<think>", "</think>") == inside


def test_part_of_a_trace_is_rounded_up_to_tokens(policies):
    tokenizer = policies["qwen2_5_vl"].processor.tokenizer
    ids = tokenizer.encode("3 and 4", add_special_tokens=False)
    for fraction, count in ((1e-6, 1), (1 / len(ids), 1), (1.0, len(ids))):
        assert partial_trace("3 and 4", fraction, tokenizer) == tokenizer.decode(ids[:count])
    assert partial_trace("", 0.5, tokenizer) == ""


def test_hard_questions_get_hints_and_easy_ones_noise(make_recipe):
    recipe = make_recipe(**{"augmentation.hint_max": 1.0})
    set_difficulty(recipe, q0=-5.0, q1=0.9, q2=0.5)
    recipe.score_texts = lambda tasks, texts, tokens, step: RewardResult([float(len(text)) for text in texts], {})
    asked = recipe.stages[0].before(recipe.policy, recipe.train_tasks[:4], Streams(0), Step())
    hinted, noised, usual, new = asked
    assert isinstance(hinted, AugmentedTask)
    assert hinted.hint_fraction == 1.0
    (text,) = [item["text"] for item in hinted.messages[0]["content"] if item["type"] == "text"]
    assert text.startswith("What is 3 plus 4? Hint: ")
    assert len(text) > len("What is 3 plus 4? Hint: ")
    assert noised.noise_sigma == pytest.approx(0.2)
    assert noised.messages == recipe.train_tasks[1].messages
    assert usual is recipe.train_tasks[2]
    assert new is recipe.train_tasks[3]
    assert recipe.extra_samples == 4


def test_the_hint_is_of_the_best_trace_and_only_where_it_helps(make_recipe):
    recipe = make_recipe(**{"augmentation.hint_place": "answer", "augmentation.hint_max": 1.0})
    texts, rewards = ["<think>3</think>", "<think>3 and 4</think>", "x"], [0.2, 0.9, float("nan")]
    assert recipe.stages[0]._best_start(recipe.policy, texts, rewards, 0.5, 1.0) == "3 and 4"
    assert recipe.stages[0]._best_start(recipe.policy, texts, rewards, 0.9, 1.0) == ""
    assert recipe.stages[0]._best_start(recipe.policy, texts, [float("nan")] * 3, 0.0, 1.0) == ""
    task = recipe.stages[0]._hinted(recipe.train_tasks[0], "3 and", 0.5)
    assert task.answer_start == "<think>3 and"
    prompt, plain = (recipe.policy.encode(one) for one in (task, recipe.train_tasks[0]))
    assert prompt.text == plain.text + "<think>3 and"
    assert torch.equal(prompt.input_ids[: len(plain)], plain.input_ids)


def test_rewards_see_the_given_start_of_an_answer(make_recipe):
    recipe = make_recipe()
    task = augment_task(recipe.train_tasks[0], given_start="123")
    (plain,), (whole,) = (
        recipe.score_texts([one], ["de"], [[1]], Step()).total for one in (recipe.train_tasks[0], task)
    )
    (expected,) = recipe.score_texts([recipe.train_tasks[0]], ["123de"], [[1]], Step()).total
    assert whole == expected
    assert whole != plain


def test_training_is_on_the_question_as_it_was_asked(make_recipe):
    """The prompt of a group, with hint and noise, is computed once; the evaluation uses neither."""
    recipe = make_recipe(**{"augmentation.hint_scale": 0.0})
    set_difficulty(recipe, q0=0.9)
    rollouts = sampled(recipe, Unit(recipe.train_tasks[:2], Streams(0), Step()), make_accelerator()).rollouts
    payload = VlmPayload.of(rollouts)
    assert len(payload.prompts) == 2
    plain = [recipe.policy.encode(task) for task in recipe.train_tasks[:2]]
    assert not torch.equal(payload.prompts[0].media["pixel_values"], plain[0].media["pixel_values"])
    assert torch.equal(payload.prompts[1].media["pixel_values"], plain[1].media["pixel_values"])
    (stage,) = recipe.stages
    stage.on_step_end(Step())
    metrics = collect_metrics(recipe, rollouts, Step())
    assert metrics["augment/noised"] == 0.5
    assert metrics["augment/sigma_mean"] == pytest.approx(0.2)
    assert stage.tracker.means["q0"] == pytest.approx(float(rollouts.reward[:4].mean()))
    assert len(stage.tracker.recent) == 1 + 8


def test_probes_measure_a_question_before_it_is_asked(make_recipe):
    recipe = make_recipe(**{"augmentation.measure": "probe", "augmentation.probe_samples": 3})
    (stage,) = recipe.stages
    stage.tracker.recent = [-1000.0]  # whatever is answered, it is easy
    asked = recipe.stages[0].before(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    assert all(isinstance(task, AugmentedTask) and task.noise_sigma == 0.3 for task in asked)
    assert recipe.extra_samples == 6
    sampled(recipe, Unit(recipe.train_tasks[:2], Streams(0), Step()), make_accelerator())
    stage.on_step_end(Step())
    assert len(stage.tracker.recent) == 1 + 12  # two probes of two questions, and none of the noised groups


def test_without_scales_the_run_is_that_of_the_vlm_recipe(make_recipe, tmp_path, tiny_folders, closing):
    recipe = make_recipe(**{"augmentation.hint_scale": 0.0, "augmentation.noise_scale": 0.0})
    config = run_config(VlmConfig, tmp_path, tiny_folders["qwen2_5_vl"])
    config.rewards, config.eval_data = [LETTERS], {}
    plain = closing(VlmRecipe(config))
    set_difficulty(recipe, q0=-5.0, q1=5.0)
    ids = [
        VlmPayload.of(rolled(one, Unit(one.train_tasks[:3], Streams(1), Step()), make_accelerator())).response_ids
        for one in (recipe, plain)
    ]
    assert torch.equal(*ids)


@pytest.mark.slow
def test_runs_resume_bit_for_bit_and_count_their_traces(tmp_path, tiny_folders):
    options = {"steps": 4, "epochs": 2, "tasks_per_step": 3, "augmentation.hint_place": "answer"}
    final = []
    for name in ("whole", "parts"):
        config = make_config(tmp_path / name, tiny_folders["qwen2_5_vl"], **options)
        if name == "parts":
            config.trainer.steps = 3  # in the middle of the second epoch, with difficulties known
            train(RECIPES["reg_grpo"], config)
            config.trainer.steps = 4
            (tmp_path / name / "run/result.json").unlink()
        run_dir = train(RECIPES["reg_grpo"], config, resume=name == "parts")
        final.append((weights(run_dir, 4), [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]))
    (first, rows), (second, others) = final
    assert all(torch.equal(first[key], second[key]) for key in first)
    names = [name for name in rows[-1] if name.startswith("augment/")]
    assert [[row[name] for name in names] for row in rows] == [[row[name] for name in names] for row in others]
    assert rows[0]["augment/hinted"] == rows[0]["augment/noised"] == 0.0
    assert rows[3]["augment/hinted"] + rows[3]["augment/noised"] > 0
    traces = sum(row["augment/traces"] for row in rows)
    assert traces > 0
    assert rows[-1]["samples/total"] == 4 * 3 * 4 + traces


def test_groups_stay_whole_whatever_the_micro_batch(tmp_path, tiny_folders, make_recipe):
    recipe = make_recipe(steps=1, micro_batch=2, epochs=2)
    seen = []
    loss = recipe.loss
    recipe.loss = lambda policy, part, *rest: seen.append(part.num_rows) or loss(policy, part, *rest)
    trainer = Trainer(recipe, recipe.config, tmp_path / "whole", make_accelerator(), None)
    trainer.run()
    assert seen == [4] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer_template": "{question}"}, r"augmentation\.answer_template is .* must contain \{answer\}"),
        ({"hint_template": "{question} Hint:"}, r"augmentation\.hint_template .* must contain \{hint\}"),
        ({"think_end": ""}, r"augmentation\.think_end is empty"),
        ({"hint_max": 1.5}, r"augmentation\.hint_max is 1\.5"),
        ({"noise_max": 0.0}, r"augmentation\.noise_max is 0\.0"),
        ({"measure": "first"}, r"augmentation\.measure is 'first'; allowed: history, probe"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        check_config(AugmentationSettings(**options), "augmentation")


def test_hints_need_answers(tmp_path, tiny_folders):
    config = make_config(tmp_path, tiny_folders["qwen2_5_vl"])
    file = Path(config.data.path)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [{"prompt": row["problem"], "images": row["images"], "id": row["id"]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    with pytest.raises(UserError, match=r"q0 has no answer.*augmentation\.hint_scale=0"):
        RegGrpoRecipe(config)


def test_a_run_without_repeated_questions_warns(make_recipe, caplog):
    make_recipe(steps=2, tasks_per_step=3)
    assert "measure: probe" in caplog.text
    caplog.clear()
    make_recipe(steps=3, tasks_per_step=3)
    assert "measure: probe" not in caplog.text


def test_noise_on_the_frames_of_a_video(tmp_path):
    pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")
    from tests.hub.numbered_clips import even_times, write_clip
    from tests.vlm.builders import video_task

    grey = np.full((12, 56, 56, 3), 128, np.uint8)
    clip = write_clip(tmp_path / "a.mp4", even_times(12), frame=grey.__getitem__)
    task = video_task("v", "Sum?", clip)
    noisy = augment_task(task, noise_sigma=0.1, noise_seed=1)
    ((plain, times),), ((shown, other),), ((again, _),) = (load_videos(one, 14) for one in (task, noisy, noisy))
    assert times == other
    assert torch.equal(shown, again)
    assert float((shown - plain).std()) / 255 == pytest.approx(0.1, rel=0.1)
