"""Properties of every image recipe: failing rewards, latents that overflow, advantages, records, bad input."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

import diffusion.matching.velocity
import diffusion.sampling.trajectories
from mmrl.cli import main
from mmrl.config import load_run
from mmrl.core.rollouts import Rollouts
from mmrl.errors import RunError, UserError
from mmrl.rewards import RewardConfig
from mmrl.runs.run_log import batch_metrics
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.trainer import collect_metrics
from tests.diffusion.runs import (
    build,
    collected,
    gradients,
    make_trainer,
    run_config,
    tiny_model,
    trained,
    with_function,
    write_prompts,
)

NAN = float("nan")
CONFIG = """
recipe: {recipe}
output_dir: {folder}/run
model: {{path: {model}, max_sequence_length: 1, lora: {{rank: 4, alpha: 8}}}}
data: {{path: {folder}/prompts.txt}}
eval_data: {{held_out: {{path: {folder}/prompts.txt}}}}
rewards: [{{name: caption_colour}}]
heldout_rewards: [{{name: jpeg_incompressibility}}]
sampler: {{steps: 4, eval_steps: 2}}
trainer: {{steps: 1, tasks_per_step: 2, samples_per_task: 2}}
evaluation: {{at_start: false, samples: 1}}
tracking: {{quiet: true, tensorboard: false, strict: true}}
"""


def written(folder, recipe="flow_grpo"):
    """A valid configuration file."""
    write_prompts(folder / "prompts.txt")
    path = folder / "run.yaml"
    path.write_text(CONFIG.format(recipe=recipe, folder=folder, model=tiny_model()))
    return path


def red(prompts, completions, **columns):
    return [float(image[..., 0].mean()) / 255 for image in completions]


def nan_for_third(prompts, completions, **columns):
    return [NAN if index == 2 else value for index, value in enumerate(red(prompts, completions))]


def raises_for_third(prompts, completions, **columns):
    if len(completions) > 1:
        raise ValueError("rows one at a time")
    raises_for_third.calls += 1
    if raises_for_third.calls == 3:
        raise RuntimeError("the third image is odd")
    return red(prompts, completions)


raises_for_third.calls = 0


def too_few(prompts, completions, **columns):
    return red(prompts, completions)[:-1] if len(completions) > 1 else red(prompts, completions)


def always_raises(prompts, completions, **columns):
    raise RuntimeError("no reward today")


def failures(recipe, rollouts):
    """Failed rows of the step by "term/kind"."""
    metrics, start = collect_metrics(recipe, rollouts, Step()), "reward/errors/"
    return {name.removeprefix(start): value for name, value in metrics.items() if name.startswith(start)}


@pytest.mark.parametrize("name", ["flow_grpo", "awm", "diffusion_nft", "orw_cfm_w2"])
def test_failed_rows_leave_the_gradient_of_the_others_as_it_is(name, tmp_path):
    config = run_config(name, tmp_path)
    config.objective.kl = {"coef": 0.5}
    recipe = build(config)
    with_function(recipe, {"caption_colour": nan_for_third, "jpeg_incompressibility": red})
    rollouts = collected(recipe)
    assert rollouts.reward.isnan().tolist() == [index == 2 for index in range(8)]
    assert failures(recipe, rollouts) == {"caption_colour/nan": 1.0}
    assert failures(recipe, rollouts) == {"caption_colour/nan": 0.0}, "of the step, not so far"
    assert float(rollouts.advantage[2].abs().max()) == 0.0
    loss, gradient = gradients(recipe, rollouts)
    others = rollouts.select(torch.tensor([0, 1, 3, 4, 5, 6, 7]))
    own = recipe.advantages(others, make_accelerator(), Step())
    torch.testing.assert_close(own.advantage, others.advantage)
    expected_loss, expected = gradients(recipe, own)
    assert math.isfinite(loss)
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-7)
    assert float((gradient - expected).norm()) <= 1e-5 * float(expected.norm())


def test_a_reward_that_raises_costs_its_own_row_and_one_that_returns_too_few_all(tmp_path):
    raises_for_third.calls = 0
    recipe = build(run_config("awm", tmp_path))
    with_function(recipe, {"caption_colour": raises_for_third, "jpeg_incompressibility": red})
    rollouts = collected(recipe)
    assert int(rollouts.reward.isnan().sum()) == 1
    assert failures(recipe, rollouts) == {"caption_colour/raised": 1.0}
    with_function(recipe, {"caption_colour": too_few, "jpeg_incompressibility": red})
    with pytest.raises(RunError, match="returned 7 values for 8 rows"):
        collected(recipe)


def test_a_judge_that_fails_costs_no_row(tmp_path):
    recipe = build(run_config("awm", tmp_path))
    with_function(recipe, {"caption_colour": red, "jpeg_incompressibility": nan_for_third})
    rollouts = collected(recipe)
    assert not bool(rollouts.reward.isnan().any())
    assert bool(rollouts.reward_terms["jpeg_incompressibility"].isnan()[2])
    assert failures(recipe, rollouts) == {"jpeg_incompressibility/nan": 1.0}


def test_all_rewards_failing_ends_the_run_with_their_reasons(tmp_path, caplog):
    recipe = build(run_config("awm", tmp_path))
    with_function(recipe, {"caption_colour": always_raises, "jpeg_incompressibility": red})
    found = recipe.evaluate(recipe.policy, next(iter(recipe.eval_tasks)), make_accelerator(), Step())
    assert "all rewards failed in the evaluation of" in found.failure
    assert "no reward today" in found.failure
    assert "no reward today" in caplog.text
    with pytest.raises(RunError, match=r"all rewards of this step failed.*no reward today"):
        collected(recipe)


@pytest.mark.parametrize("value", [float("inf"), NAN])
@pytest.mark.parametrize("name", ["flow_grpo", "grpo_guard", "awm", "ac_flow"])
def test_latents_that_overflow_are_counted_and_have_no_gradient(name, value, tmp_path, monkeypatch, closing):
    spoil(monkeypatch, value, rows=[5])
    config = run_config(name, tmp_path)
    if name == "ac_flow":
        config.critic.warmup_updates = 0
    trainer = make_trainer(config, tmp_path)
    recipe = closing(trainer.recipe)
    rollouts = collected(recipe)
    assert rollouts.payload.finite == [index != 5 for index in range(8)]
    assert rollouts.reward.isnan().tolist() == [index == 5 for index in range(8)]
    assert failures(recipe, rollouts) == {"latents/overflow": 1.0}
    assert recipe.records(rollouts, 8)[5].finish == "overflow"
    loss, gradient = gradients(recipe, rollouts)
    assert math.isfinite(loss)
    assert bool(gradient.isfinite().all())
    before = trained(trainer.policy)
    trainer.train_step()
    after = trained(trainer.policy)
    assert bool(after.isfinite().all())
    assert not torch.equal(after, before)
    assert trainer.updater.skipped == 0


def test_only_overflow_ends_the_run(tmp_path, monkeypatch):
    spoil(monkeypatch, float("inf"), rows=list(range(8)))
    with pytest.raises(RunError, match=r"all rewards of this step failed: latents/overflow"):
        collected(build(run_config("flow_grpo", tmp_path)))


def spoil(monkeypatch, value, rows):
    """Make some rows of every rollout overflow."""
    real_runs, real_latents = (
        diffusion.sampling.trajectories.sample_trajectories,
        diffusion.matching.velocity.sample_latents,
    )

    def runs(*arguments, **options):
        run = real_runs(*arguments, **options)
        for tensor in (run.latents, run.states[:, -1], run.logp, *([] if run.mean is None else [run.mean[:, -1]])):
            tensor[rows] = value
        return run

    def latents(*arguments, **options):
        drawn = real_latents(*arguments, **options)
        drawn[rows] = value
        return drawn

    monkeypatch.setattr(diffusion.sampling.trajectories, "sample_trajectories", runs)
    monkeypatch.setattr(diffusion.matching.velocity, "sample_latents", latents)


def scored(group, rewards, **terms):
    rows = len(group)
    return Rollouts(
        group=torch.tensor(group),
        mask=torch.ones(rows, 2),
        logp_old=torch.zeros(rows, 2),
        reward=torch.tensor(rewards),
        reward_terms={name: torch.tensor(values) for name, values in terms.items()},
    )


def test_gdpo_normalises_the_sum_of_the_advantages_of_each_reward(tmp_path):
    config = run_config("flow_grpo", tmp_path)
    config.rewards = [
        RewardConfig(name="caption_colour", weight=2.0),
        RewardConfig(name="caption_position", weight=0.5),
    ]
    config.combine = "gdpo"
    config.validate()
    recipe = build(config)
    first, second = [0.0, 1.0, 2.0, 4.0, 7.0, 5.0], [10.0, 30.0, NAN, 5.0, 5.0, NAN]
    # row 2: the second reward does not apply; row 5: it failed, so that the row counts nowhere
    total = [5.0, 17.0, 4.0, 10.5, 16.5, NAN]
    rollouts = scored([0, 0, 0, 1, 1, 1], total, caption_colour=first, caption_position=second)
    found = recipe.advantages(rollouts, make_accelerator(), Step()).advantage
    own = np.array(first[:5])
    one = (own - [1, 1, 1, 5.5, 5.5]) / (own.std() + 1e-4)
    spread = np.array([10, 30, 5, 5]).std() + 1e-4
    other = np.array([-10, 10, 0, 0, 0]) / spread
    summed = 2.0 * one + 0.5 * other
    expected = [*((summed - summed.mean()) / (summed.std(ddof=1) + 1e-4)), 0.0]
    np.testing.assert_allclose(found.numpy(), np.repeat(np.array(expected)[:, None], 2, 1), rtol=1e-5, atol=1e-7)


def test_gdpo_with_a_reward_that_applies_nowhere_is_the_other_alone(tmp_path):
    config = run_config("flow_grpo", tmp_path)
    config.rewards = [RewardConfig(name="caption_colour"), RewardConfig(name="caption_position")]
    config.combine = "gdpo"
    recipe = build(config)
    rollouts = scored([0, 0, 0], [1.0, 2.0, 6.0], caption_colour=[1.0, 2.0, 6.0], caption_position=[NAN] * 3)
    found = recipe.advantages(rollouts, make_accelerator(), Step()).advantage
    alone = recipe.estimate(rollouts, make_accelerator(), Step()).advantage
    torch.testing.assert_close(found, alone / (alone[:, 0].std() + 1e-4))
    assert bool(found.isfinite().all())


def opposed(config):
    """Rewards whose weighted sum is 1 for every image, as in r and 2 (1 - r) with the weights 1 and 0.5."""
    config.rewards = [RewardConfig(name="caption_colour"), RewardConfig(name="caption_position", weight=0.5)]
    config.combine, config.objective.filter = "gdpo", {"kind": "drop"}
    first = [0.10, 0.12, 0.09, 0.13, 0.11, 0.08, 0.14, 0.10]
    second = [2 * (1 - one) for one in first]
    return scored([0] * 4 + [1] * 4, [1.0] * 8, caption_colour=first, caption_position=second)


def test_under_gdpo_a_group_is_kept_whose_rewards_differ_though_their_sum_does_not(tmp_path):
    config = run_config("flow_grpo", tmp_path)
    rollouts = opposed(config)
    config.validate()
    recipe = build(config)
    assert recipe.compared == ("caption_colour", "caption_position")
    assert recipe.objective.filter.kept(rollouts, recipe.compared).all()
    assert batch_metrics([rollouts], recipe.compared)["reward/zero_variance_groups"] == 0
    # the terms are of opposite order, and their own deviations take away their sizes: 1 - 0.5 of each
    assert recipe.advantages(rollouts, make_accelerator(), Step()).advantage.abs().min() > 0


def test_a_run_under_gdpo_takes_optimiser_steps_where_sums_are_equal(tmp_path, monkeypatch):
    config = run_config("flow_grpo", tmp_path, minibatches_per_step=1)
    rollouts = opposed(config)
    trainer = make_trainer(config, tmp_path)

    def score(drawn, step):
        rows = torch.arange(drawn.num_rows) % 8
        terms = {name: values[rows] for name, values in rollouts.reward_terms.items()}
        return drawn.replace(reward=rollouts.reward[rows], reward_terms=terms)

    monkeypatch.setattr(trainer.recipe, "score", score)
    trainer.train_step()
    assert trainer.updater.optimiser_step == 1
    trainer.recipe.close()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"filter": {"kind": "drop", "low": 0.1}}, r"objective\.filter\.low and high bound the mean of the summed"),
        ({"order": {"kind": "category_bandit", "field": "caption"}}, "order 'category_bandit' uses the summed reward"),
        ({"advantage": {"kind": "smooth_std"}}, "advantage 'smooth_std' only remembers the summed reward"),
    ],
)
def test_parts_that_read_the_sum_are_refused_under_gdpo(tmp_path, part, message):
    config = run_config("flow_grpo", tmp_path)
    config.combine = "gdpo"
    config.objective = dataclasses.replace(config.objective, **part)
    with pytest.raises(ValueError, match=f"combine is 'gdpo', but {message}"):
        config.validate()
    config.combine = "sum"
    config.validate()


def test_a_filter_of_one_reward_is_not_refused_under_gdpo(tmp_path):
    config = run_config("flow_grpo", tmp_path)
    config.combine, term = "gdpo", config.rewards[0].name
    config.objective.filter = {"kind": "drop", "key": term, "low": 0.1}
    config.validate()


def test_the_bound_of_awm_holds_for_the_sum_of_several_rewards(tmp_path):
    config = run_config("awm", tmp_path)
    config.rewards = [RewardConfig(name=name, weight=3.0) for name in ("caption_colour", "caption_position")]
    config.combine = "gdpo"
    recipe = build(config)
    one = [0.0] * 63 + [1.0]  # the last image is far above all others in both rewards
    rollouts = scored([0] * 64, [6 * x for x in one], caption_colour=one, caption_position=one)
    found = recipe.advantages(rollouts, make_accelerator(), Step()).advantage
    assert float(found.abs().max()) == 1.0


def test_columns_of_rows_without_an_image_are_still_known(tmp_path):
    """A reward that needs a column does not find it missing because only failed rows had it."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a red circle", "wish": 1}\n{"prompt": "a blue square"}\n')
    config = run_config("awm", tmp_path)
    config.data.path = str(tmp_path / "prompts.jsonl")
    recipe = build(config)
    with_function(recipe, {"caption_colour": needs_wish, "jpeg_incompressibility": red})
    tasks = [*recipe.train_tasks]
    images = np.zeros((2, 32, 32, 3), np.uint8)
    result = recipe.score_images(tasks, images, [False, True])
    assert [value == value for value in result.total] == [False, True]
    assert recipe.score_images(tasks, images, [False, False]).errors == {"latents/overflow": 2}


def test_columns_with_the_names_of_arguments_are_passed_under_others(tmp_path, caplog):
    row = {"prompt": "a red circle", "completions": "the data's", "trainer_state": 1, "wish": 1}
    (tmp_path / "prompts.jsonl").write_text((json.dumps(row) + "\n") * 2)
    config = run_config("awm", tmp_path)
    config.data.path = str(tmp_path / "prompts.jsonl")
    recipe = build(config)
    seen = []

    def mine(prompts, completions, **columns):
        seen.append(columns)
        return [1.0] * len(completions)

    with_function(recipe, {"caption_colour": mine, "jpeg_incompressibility": mine})
    result = recipe.score_images([*recipe.train_tasks], np.zeros((2, 32, 32, 3), np.uint8), [True, True])
    assert result.errors == {}
    assert seen[0]["data_completions"] == ["the data's"] * 2
    assert "data: rewards get the column 'completions' as 'data_completions'" in caplog.text


def needs_wish(prompts, completions, wish):
    return [1.0] * len(completions)


def test_records_show_whole_groups_with_their_images(tmp_path):
    recipe = build(run_config("flow_grpo", tmp_path))
    rollouts = collected(recipe)
    records = recipe.records(rollouts, 5)
    assert [record.prompt for record in records] == [rollouts.payload.prompts[0]] * 4 + [rollouts.payload.prompts[1]]
    assert np.array_equal(np.asarray(records[2].outputs[0]), rollouts.payload.images[2])
    assert set(records[0].terms) == {"caption_colour", "jpeg_incompressibility"}
    assert records[0].reward == records[0].terms["caption_colour"]  # the judge has no weight
    assert records[0].advantage == pytest.approx(float(rollouts.advantage[0, 0]))
    assert records[0].finish == "image"


def test_prompts_that_cannot_be_used_are_counted(tmp_path, caplog, closing):
    path = written(tmp_path)
    long = "red " * 40
    write_prompts(tmp_path / "prompts.txt", ["a red circle", "", f"  {long}", "a blue square", "   "])
    recipe = closing(build(load_run(path)[1]))
    assert [task.prompt for task in recipe.train_tasks] == ["a red circle", "a blue square"]
    assert recipe.skipped == {"empty": 2, "too_long": 1}
    assert collect_metrics(recipe, collected(recipe), Step())["data/skipped"] == 3.0
    assert "line 2" in caplog.text


def test_bad_prompts_can_be_errors(tmp_path, capsys):
    path = written(tmp_path)
    write_prompts(tmp_path / "prompts.txt", ["a red circle", "red " * 40])
    assert main(["train", str(path), "data.on_bad_row=error"]) == 2
    message = capsys.readouterr().err
    assert "prompts.txt line 2" in message
    assert "would drop" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.path=no/such.txt"], "data: file not found: no/such.txt"),
        (["eval_data.held_out.path=no/such.txt"], "eval_data.held_out: file not found: no/such.txt"),
        (["data.on_bad_row=ignore"], "allowed: error, skip"),
        (["sampler.kernel=flow_ode"], "did you mean 'flow_sde'? allowed: flow_sde, dance_sde, cps"),
        (["sampler.noise_level=0"], "sampler.noise_level is 0"),
        (["sampler.kernel=cps", "sampler.noise_level=1.5"], "must be at most 1 for cps"),
        (["sampler.steps=1"], "sampler.steps is 1; at least 2 are needed"),
        (["sampler.window=3", "sampler.window_low=2"], "sampler.window_low is 2"),
        (["sampler.window=2", "sampler.window_high=5"], "sampler.window_high is 5"),
        (["sampler.eval_guidance=-1"], "sampler.eval_guidance is -1"),
        (["sampler.solver=heun"], "allowed: euler, sa_solver, dpm"),
        (["step.kl_form=k3"], "allowed: exact, flow_grpo_head, velocity"),
        (["heldout_rewards=[]"], "heldout_rewards is empty"),
        (["rewards=[]"], "rewards is empty"),
        (["heldout_rewards=[{name: caption_colour}]"], "caption_colour is in both rewards and heldout_rewards"),
        (["rewards=[{name: caption_color}]"], "did you mean"),
        (["rewards=[{name: caption_colour, options: {tint: 3}}]"], "tint"),
        (["evaluation.greedy=true"], "evaluation.greedy and evaluation.temperature do not apply to images"),
        (["combine=mean"], "allowed: sum, gdpo"),
        (
            ["objective.filter.kind=drop", "objective.filter.key=brightness"],
            "objective.filter.key is 'brightness'; allowed: reward, caption_colour",
        ),
        (["eval_ema.decay=1.0"], "eval_ema.decay is 1.0"),
        (["trainer.samples_per_task=1"], "samples_per_task is 1, but the advantage 'group_mean_global_std'"),
        (["objective.preset=ppo"], "which needs a critic"),
        (["objective.preset=grpo"], "objective.kl is 'k3', which needs log-probabilities of the decisions"),
        (["model.dtype=float8"], "model.dtype is 'float8'"),
        (["model.path=no/such/folder"], "no/such/folder"),
    ],
)
def test_bad_options_are_one_clear_line_and_exit_code_2(overrides, message, tmp_path, capsys):
    assert main(["train", str(written(tmp_path)), *overrides]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize(
    ("recipe", "key", "value"),
    [
        ("flow_grpo", "sampler.solver", "dpm"),
        ("flow_grpo", "sampler.window_low", 1),
        ("flow_grpo_fast", "sampler.fraction", 0.5),
        ("ddpo", "objective.advantage", {"kind": "group_mean"}),
        ("ddpo", "objective.scaling", {"whiten": "rows"}),
        ("ddpo", "objective.order", {"kind": "category_bandit", "field": "id"}),
        ("awm", "sampler.window", 2),
        ("diffusion_nft", "sampler.kernel", "cps"),
        ("diffusion_nft", "objective.clip", {"high": 0.9}),
        ("orw_cfm_w2", "objective.advantage", {"kind": "group_mean"}),
        ("orw_cfm_w2", "objective.kl", {"coef": 1.0, "importance": True}),
        ("ac_flow", "objective.scaling", {"clip": 1.0}),
        ("awm", "timesteps.shift", 2.0),
        ("diffusion_nft", "timesteps.shift", 2.0),
    ],
)
def test_options_without_an_effect_are_refused(recipe, key, value, tmp_path):
    config = run_config(recipe, tmp_path)
    part, name = key.split(".")
    setattr(getattr(config, part), name, value)
    with pytest.raises(ValueError, match=rf"{key}.*; leave it out"):
        config.validate()


@pytest.mark.parametrize("recipe", ["ddpo", "orw_cfm_w2", "ac_flow"])
def test_an_order_that_would_learn_nothing_is_refused(recipe, tmp_path):
    config = run_config(recipe, tmp_path)
    config.objective.preset = "sec"
    with pytest.raises(
        ValueError, match=r"objective\.order is 'category_bandit', but this method has no per-task scores"
    ):
        config.validate()


def test_guard_refuses_uncorrectable_clashes(tmp_path):
    path = written(tmp_path, "grpo_guard")
    with pytest.raises(UserError, match="has no scale to correct"):
        load_run(path, ["sampler.kernel=cps"])


def test_recomputed_old_log_densities_are_those_of_the_sampler(tmp_path):
    found = {}
    for source in ("sampler", "recompute"):
        config = run_config("flow_grpo", tmp_path, old_logp=source, minibatches_per_step=2)
        found[source] = collected(build(config)).logp_old
    torch.testing.assert_close(found["recompute"], found["sampler"], rtol=0, atol=1e-6)


def test_objective_and_filter_are_read_from_the_run(tmp_path):
    config = run_config("ddpo", tmp_path)
    chosen = {"kind": "drop", "key": "caption_colour"}
    config.objective = ObjectiveConfig(preset="ddpo", clip={"low": 0.3}, filter=chosen)
    config.validate()
    assert build(config).objective.clip.low == 0.3


@pytest.mark.parametrize(
    ("recipe", "changes", "culprit"),
    [
        ("flow_grpo", ["sampler.kernel=cps", "sampler.fraction=1.0"], "fraction is 1.0, which trains the last of 4"),
        ("flow_grpo", ["sampler.kernel=cps", "sampler.window=2", "sampler.window_high=4"], "window_high is 4"),
        ("flow_grpo", ["sampler.kernel=cps", "sampler.window=2", "sampler.window_low=2"], "trains the last of 4 steps"),
        ("awm", ["sampler.same_noise=true", "sampler.solver=euler"], "solver 'euler' .* would be identical"),
        ("awm", ["sampler.same_noise=true", "sampler.noise_level=0"], "solver 'sa_solver' .* would be identical"),
    ],
)
def test_samplers_that_leave_nothing_to_learn_are_refused(recipe, changes, culprit, tmp_path):
    with pytest.raises(UserError, match=culprit):
        load_run(written(tmp_path, recipe), changes)


def test_the_same_samplers_with_noise_are_accepted(tmp_path):
    load_run(written(tmp_path), ["sampler.fraction=1.0"])
    load_run(written(tmp_path), ["sampler.kernel=cps", "sampler.window=2", "sampler.window_high=3"])
    load_run(written(tmp_path, "awm"), ["sampler.same_noise=true"])


@pytest.mark.parametrize(
    ("name", "solver", "variety"),
    [("flow_grpo", "euler", "more noise"), ("awm", "euler", ""), ("awm", "sa_solver", "more noise")],
)
def test_warnings_of_equal_images_name_what_the_sampler_has(name, solver, variety, tmp_path):
    config = run_config(name, tmp_path)
    config.sampler.solver = solver
    trainer = make_trainer(config, tmp_path)
    assert trainer.log.warnings.variety[: len("more noise")] == variety
    trainer.recipe.close()
