"""Recipes robot_residual and robot_dsrl: a frozen base plays the warm-up, and its head learns from the replay."""

import json

import numpy as np
import pytest

from mmrl.cli import main
from mmrl.errors import UserError
from robotics.data import LeRobotReader
from robotics.episodes.payload import EpisodeSetConfig
from robotics.offpolicy.prior import PriorConfig
from robotics.offpolicy.replay import NOISE, read_records
from robotics.offpolicy.sac import RobotSacRecipe
from robotics.policies.base.action_policy import open_policy
from robotics.policies.gaussian import GaussianActionPolicy
from robotics.sim.opening import SimConfig
from tests.robotics.offpolicy.line_sac import improving_config, make_base, sac_config, trainer_of, weights_of
from tests.robotics.offpolicy.test_sac_recipe import same


def run(config, folder, steps=4, resume=False):
    trainer = trainer_of(config, folder, steps)
    if resume:
        trainer.resume()
    trainer.run()
    records = np.array(trainer.recipe.replay.index.records)
    trainer.recipe.close()
    return trainer, records


@pytest.mark.parametrize("kind", ["residual", "steered"])
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(tmp_path, kind):
    base = make_base(tmp_path / "base", "flow")
    whole, records = run(improving_config(tmp_path / "whole", base, kind), tmp_path / "whole")
    run(improving_config(tmp_path / "parts", base, kind), tmp_path / "parts", steps=2)
    parts, again = run(improving_config(tmp_path / "parts", base, kind), tmp_path / "parts", resume=True)
    assert np.array_equal(records, again)
    assert same(weights_of(whole), weights_of(parts)) == []
    assert whole.updater.optimiser_step == whole.updater.learner.updates - 3


def test_the_base_plays_the_warm_up_and_the_head_reads_its_actions(tmp_path):
    base = make_base(tmp_path / "base", drift=0.25)
    trainer, records = run(improving_config(tmp_path / "run", base), tmp_path / "run")
    assert trainer.recipe.form.state == 2 + 2
    first = records[records["steps"].cumsum() <= 12]
    np.testing.assert_allclose(first["actions"], 0.25)
    # the base's action, then the state
    np.testing.assert_allclose(records["state"][:, :2], 0.25)
    later = records["actions"][len(first) + 12 :]
    assert 0 < np.abs(later - 0.25).max() <= 0.2 + 1e-6
    # the observation after an episode is there too
    np.testing.assert_allclose(records["next_state"][:, :2], 0.25)


def test_the_replay_of_a_steered_policy_has_actions_and_noise(tmp_path):
    base = make_base(tmp_path / "base", "flow", chunk=3)
    config = improving_config(tmp_path / "run", base, "steered", options={"n_action_steps": 2})
    trainer, records = run(config, tmp_path / "run")
    reader = LeRobotReader(tmp_path / "run/replay/dataset")
    features = reader.info["features"]
    assert (features["action"]["shape"], features[NOISE]["shape"]) == ([2, 1], [3, 1])
    assert records["actions"].shape[1:] == (3, 1)
    stored = read_records(tmp_path / "run/replay/dataset", trainer.recipe.form)
    assert np.array_equal(stored, records)
    # the executed actions, from which the position follows
    moves = np.stack([row for number in range(len(reader)) for row in reader.episode(number).action])
    gained = records["next_state"][:, 0] - records["state"][:, 0]
    executed = np.where(np.arange(2) < records["steps"][:, None], moves.reshape(len(moves), 2), 0)
    np.testing.assert_allclose(gained, 0.1 * executed.sum(1), atol=1e-5)


def test_a_base_that_sees_images_is_improved_through_its_features(tmp_path):
    base = make_base(tmp_path / "base", image_size=(32, 32))
    sim = SimConfig(kind="tests.robotics.line_sim:open_line", image_size=32)
    trainer, records = run(improving_config(tmp_path / "run", base, sim=sim), tmp_path / "run", steps=3)
    assert records["state"].shape[1] == 2 + 2 + 32
    features = records["state"][:, 4:]
    assert features.std(0).min() > 0
    assert isinstance(trainer.recipe.policy.base, GaussianActionPolicy)


def test_a_residual_solves_what_its_base_does_not(tmp_path):
    """The base moves right too slowly to arrive within the horizon."""
    base = make_base(tmp_path / "base", drift=0.15)
    config = improving_config(tmp_path / "run", base, batch=64, warmup_steps=60, options={"xi": 0.8})
    config.trainer.learning_rate, config.sac.gamma, config.sac.actor_after, config.utd = 3e-3, 0.9, 20, 4.0
    config.eval_data = {"held_out": EpisodeSetConfig(tasks=["right"], split="held_out", layouts=10)}
    config.evaluation.videos = 0
    trainer = trainer_of(config, tmp_path / "run", steps=24)
    trainer.run()
    before, after = trainer.log.evaluations
    assert before["success/greedy"] == 0
    assert after["success/greedy"] == 1
    saved = open_policy(trainer.saver.checkpoints.path(24) / "model")
    assert (saved.kind, saved.base.kind) == ("residual", "gaussian")
    trainer.recipe.close()


def test_the_command_trains_and_evaluates(tmp_path, capsys):
    base = make_base(tmp_path / "base", "flow")
    config = tmp_path / "dsrl.yaml"
    config.write_text(
        f"""
recipe: robot_dsrl
output_dir: {tmp_path}/run
sim: {{kind: "tests.robotics.line_sim:open_line", image_size: 0}}
model: {{options: {{base: {base}, encoder: {{width: 32, layers: 1}}}}}}
data: {{tasks: [right], layouts: 20}}
eval_data: {{held_out: {{tasks: [right], split: held_out, layouts: 3}}}}
reward: {{potential: 1.0}}
warmup_steps: 12
batch: 8
utd: 1
trainer: {{steps: 2, threads: 1}}
"""
    )
    assert main(["train", str(config), "--dry-run"]) == 0
    assert "20 tasks" in capsys.readouterr().out
    assert main(["train", str(config), "tracking.quiet=true"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["sac/updates"] > 0
    assert main(["evaluate", f"{tmp_path}/run"]) == 0


def test_what_does_not_fit_is_refused_before_a_step(tmp_path):
    base = make_base(tmp_path / "base")
    with pytest.raises(UserError, match=r"set model\.options\.base to its folder"):
        RobotSacRecipe(improving_config(tmp_path, ""))
    config = improving_config(tmp_path, base)
    config.warmup = "random"
    with pytest.raises(UserError, match="warmup is 'random', but the policy improves a frozen base"):
        RobotSacRecipe(config)
    with pytest.raises(UserError, match="prior data has no actions of the frozen base"):
        RobotSacRecipe(improving_config(tmp_path, base, prior=PriorConfig(path=str(tmp_path))))
    with pytest.raises(UserError, match="warmup is 'base', but the policy has no frozen base"):
        RobotSacRecipe(sac_config(tmp_path, warmup="base"))
