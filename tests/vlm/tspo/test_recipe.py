"""A TSPO run: rewards, decisions, evaluation, the exported agent."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.errors import ConfigError, UserError
from mmrl.recipes import RECIPES
from mmrl.report.export import export_run
from mmrl.runs.records import read_samples
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.run import train
from mmrl.vlm.data.dataset import DataConfig
from mmrl.vlm.data.task import VideoOptions
from mmrl.vlm.tspo.answerers import OracleAnswerer
from mmrl.vlm.tspo.frame_policy import TspoPayload
from mmrl.vlm.tspo.picking import LOGPROBS, load_frame_picker
from mmrl.vlm.tspo.tspo_config import PickConfig, objective_of
from mmrl.vlm.tspo.tspo_recipe import INSIDE, OUTSIDE, TspoRecipe, needle_recall, pick_strip
from tests.vlm.tspo.builders import FRAMES, data_folder, needle_config


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return TspoRecipe(needle_config(tmp_path_factory.mktemp("run")))


def drawn(recipe, seed=0):
    tasks = recipe.train_tasks[:2]
    with torch.no_grad():
        return recipe.score(recipe.rollout(recipe.policy, tasks, Streams(seed), Step()), Step())


def test_picks_are_decisions_and_rewards_follow_the_needle(recipe):
    rollouts = drawn(recipe)
    payload = TspoPayload.of(rollouts)
    assert rollouts.mask.shape == (8, 6)
    for row, group in enumerate(rollouts.group.tolist()):
        picks = payload.picks[row].tolist()
        assert len(set(picks)) == 6
        inside = sum(bool(payload.tasks[group].needle[pick]) for pick in picks)
        assert float(rollouts.reward_terms["locating"][row]) == pytest.approx(inside / 6)
        assert float(rollouts.reward_terms["accuracy"][row]) == float(inside >= 2)
        assert float(rollouts.reward[row]) == pytest.approx(inside / 6 + float(inside >= 2))


@pytest.mark.parametrize("form", LOGPROBS)
def test_scores_repeat_the_log_probabilities_of_the_draw_in_every_cut(form, tmp_path):
    recipe = TspoRecipe(needle_config(tmp_path, picks=PickConfig(count=5, logprob=form)))
    rollouts = drawn(recipe)
    names = frozenset({"logp"})
    whole = recipe.scores(recipe.policy, rollouts, names).logp
    torch.testing.assert_close(whole, rollouts.logp_old, rtol=1e-4, atol=1e-4)
    parts = torch.cat([recipe.scores(recipe.policy, part, names).logp for part in rollouts.micro_batches(3)])
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
    assert objective_of(recipe.config).ratio.kind == ("token" if form == "mean_marginal" else "sequence_product")


def test_a_step_makes_better_draws_likelier(tmp_path):
    config = needle_config(tmp_path, picks=PickConfig(count=6))
    config.trainer.steps, config.trainer.tasks_per_step, config.trainer.samples_per_task = 12, 4, 16
    config.checkpoint.every = 0
    before = drawn(TspoRecipe(config)).reward_terms["locating"].mean()
    config.eval_data = {"same": config.data}
    run_dir = train(RECIPES["tspo"], config)
    after = TspoRecipe(
        replace(config, agent=replace(config.agent, path=str(run_dir / "checkpoints/step-000012/model")))
    )
    assert drawn(after).reward_terms["locating"].mean() > before + 0.1
    (strip, *_) = read_samples(run_dir, 12, "eval")[0].outputs
    assert (strip.width // 84) * (strip.height // 84) >= 6


def test_a_row_of_type_general_gets_half_the_picks_and_a_constant(recipe):
    task = replace(recipe.train_tasks[0], specific=False)
    with torch.no_grad():
        rollouts = recipe.score(recipe.rollout(recipe.policy, [task], Streams(0), Step()), Step())
    assert rollouts.mask.shape == (4, 3)
    assert rollouts.reward_terms["locating"].tolist() == [1.0] * 4


def test_a_video_with_fewer_frames_than_picks_gives_all_of_them(tmp_path, caplog):
    config = needle_config(tmp_path, picks=PickConfig(count=40))
    with caplog.at_level(logging.WARNING, "mmrl"):
        recipe = TspoRecipe(config)
    assert "4 of 4 training videos have no more candidate frames than picks" in caplog.text
    rollouts = drawn(recipe)
    assert rollouts.mask.shape == (8, FRAMES)
    assert sorted(TspoPayload.of(rollouts).picks[0].tolist()) == list(range(FRAMES))


def test_the_temperature_falls_with_the_steps(recipe):
    assert recipe.temperature(0) == 0.5
    assert recipe.temperature(1) == pytest.approx(0.45)


def test_the_oracle_wants_enough_of_the_needle(recipe):
    task = recipe.train_tasks[0]
    inside, outside = np.flatnonzero(task.needle).tolist(), np.flatnonzero(~task.needle).tolist()
    answers = OracleAnswerer(2).answer([task, task], [inside[:1] + outside[:3], inside[:2]])
    assert answers.correct == [0.0, 1.0]
    assert answers.texts == ["?", task.answer]
    with pytest.raises(UserError, match="has no needle"):
        OracleAnswerer(2).check([replace(task, needle=np.zeros(FRAMES, bool))], "data")


def test_the_exported_agent_picks_frames_of_a_file(tmp_path):
    config = needle_config(tmp_path)
    config.trainer.steps = 1
    run_dir = train(RECIPES["tspo"], config)
    call = export_run(RECIPES["tspo"], config, run_dir, tmp_path / "agent")
    assert call.startswith("mmrl.vlm.tspo.picking.load_frame_picker(")
    names = sorted(path.name for path in (tmp_path / "agent").iterdir())
    assert names == ["README.md", "agent.json", "agent.safetensors", "export.json"]
    picker = load_frame_picker(tmp_path / "agent")
    own = load_frame_picker(run_dir).agent.state_dict()
    assert all(torch.equal(own[name], weight) for name, weight in picker.agent.state_dict().items())
    (video,) = (data_folder() / "needles").glob("00000.mp4")
    frames = picker.pick(video, "What follows the red flash?", count=4)
    assert len(frames.images) == 4
    assert frames.numbers == sorted(frames.numbers)
    assert frames.seconds == [float(number) for number in frames.numbers]
    assert len(picker.pick(video, "What?", method="bin-max").numbers) == 6
    with pytest.raises(UserError, match="available: topk, bin-max"):
        picker.pick(video, "What?", method="best")
    (tmp_path / "agent/agent.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="does not contain this agent's weights"):
        load_frame_picker(tmp_path / "agent")


def test_needle_recall_is_a_share_of_the_attainable_frames():
    needle = np.array([False, True, True, True, False])
    assert needle_recall(needle, [0, 1]) == 0.5
    assert needle_recall(needle, [1, 2]) == 1.0
    assert needle_recall(needle, [0, 1, 2, 4]) == pytest.approx(2 / 3)
    assert math.isnan(needle_recall(np.zeros(3, bool), [0]))


def test_the_strip_marks_needle_and_picks():
    frames = [Image.new("RGB", (56, 56), (0, 0, 255))] * 3
    needle = np.zeros(40, bool)
    needle[10:20] = True
    strip = np.asarray(pick_strip(frames, [12, 15, 30], needle, [float(i) for i in range(40)]))
    assert tuple(strip[12, 4 + int(14 * (strip.shape[1] - 8) / 40)]) == INSIDE
    assert tuple(strip[28, 10]) == INSIDE
    assert tuple(strip[28, 2 * 84 + 10]) == OUTSIDE


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("picks", PickConfig(final_temperature=0.1), "the temperature must decrease"),
        ("accuracy_weight", -1.0, "accuracy_weight is -1"),
        ("picks", PickConfig(logprob="sum"), "allowed: mean_marginal"),
        ("picks", PickConfig(count=0), "at least 1"),
        ("data", DataConfig(path="a.jsonl", video=VideoOptions(fps=1.0)), "data.video is set"),
        ("eval_data", {"b": DataConfig(path="b.jsonl", video=VideoOptions(max_pixels=99))}, "data.video is set"),
        ("eval_data", {"b": DataConfig(path="b.jsonl", system_prompt="Look.")}, "oracle, which reads no prompt"),
    ],
)
def test_settings_that_do_not_fit_are_refused(key, value, message, tmp_path):
    with pytest.raises((ConfigError, ValueError), match=message):
        needle_config(tmp_path, **{key: value}).validate()


def test_answerers_are_checked_before_anything_is_loaded(tmp_path):
    config = needle_config(tmp_path, accuracy_weight=0.0, locating_weight=0.0)
    with pytest.raises(ValueError, match="every reward would be"):
        config.validate()
    config = needle_config(tmp_path)
    config.answerer.train = True
    with pytest.raises(ValueError, match=r"it has no effect while answerer\.kind is 'oracle'"):
        config.validate()
    config.answerer.kind = "vlm"
    with pytest.raises(ValueError, match=r"answerer.model.path is empty"):
        config.validate()
