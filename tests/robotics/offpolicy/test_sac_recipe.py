"""Recipe robot_sac: whole episodes into the replay, updates by decisions, exact resume, and what it refuses."""

import json
import logging

import numpy as np
import pytest
import torch

from mmrl.cli import main
from mmrl.errors import RunError, UserError
from robotics.data import LeRobotReader
from robotics.episodes.collect import ActingSettings
from robotics.episodes.payload import EpisodeSetConfig
from robotics.methods.ppo import ChunkWeights
from robotics.offpolicy.prior import PriorConfig
from robotics.offpolicy.replay import read_records
from robotics.offpolicy.sac import RobotSacRecipe, step_rewards
from robotics.offpolicy.sac_learner import NonFiniteError, SacSettings
from robotics.offpolicy.transitions import TransitionForm
from robotics.policies.base.action_policy import open_policy
from robotics.policies.policy_loading import ActionPolicyConfig
from robotics.policies.squashed import SquashedActionPolicy
from robotics.sim.opening import SimConfig
from tests.robotics.line_demos import demonstrate
from tests.robotics.line_sim import LineSim
from tests.robotics.offpolicy.line_sac import episode, sac_config, trainer_of, weights_of


def run(folder, steps=4, resume=False, **changes):
    trainer = trainer_of(sac_config(folder, **changes), folder, steps)
    if resume:
        trainer.resume()
    trainer.seen, log = [], trainer.log.step
    trainer.log.step = lambda step, metrics, tokens: trainer.seen.append(dict(metrics)) or log(step, metrics, tokens)
    trainer.run()
    records = np.array(trainer.recipe.replay.index.records)
    trainer.recipe.close()
    return trainer, records


def same(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(tmp_path):
    whole, records = run(tmp_path / "whole", utd=0.7)
    first, _ = run(tmp_path / "parts", steps=2, utd=0.7)
    parts, again = run(tmp_path / "parts", resume=True, utd=0.7)
    assert np.array_equal(records, again)
    assert same(weights_of(whole), weights_of(parts)) == []
    # so does the dataset on disk
    stored = [read_records(tmp_path / name / "replay/dataset", whole.recipe.form) for name in ("whole", "parts")]
    assert np.array_equal(*stored)
    assert whole.updater.learner.updates > 8
    for one, other in zip(whole.seen, first.seen + parts.seen, strict=True):
        kept = [name for name in one if name.startswith(("sac/", "loss/", "replay/", "reward/"))]
        assert "sac/alpha" in kept
        assert [one[name] for name in kept] == [other[name] for name in kept]


def test_a_run_that_forgets_old_transitions_resumes_to_the_bit(tmp_path):
    whole, _ = run(tmp_path / "whole", capacity=20)
    run(tmp_path / "parts", steps=3, capacity=20)
    parts, _ = run(tmp_path / "parts", resume=True, capacity=20)
    assert same(weights_of(whole), weights_of(parts)) == []
    other, _ = run(tmp_path / "other", capacity=10)
    assert same(weights_of(whole), weights_of(other))


@pytest.mark.slow
def test_a_replay_of_50_000_steps_resumes_to_the_bit(tmp_path):
    def with_a_past(folder, steps, resume=False):
        trainer = trainer_of(sac_config(folder), folder, steps)
        if resume:
            trainer.resume()
        else:
            form = trainer.recipe.form
            trainer.recipe.replay.append([episode(1000, seed, form) for seed in range(50)])
        trainer.run()
        return trainer

    whole = with_a_past(tmp_path / "whole", 2)
    with_a_past(tmp_path / "parts", 1)
    parts = with_a_past(tmp_path / "parts", 2, resume=True)
    assert whole.recipe.replay.control_steps > 50_000
    assert np.array_equal(whole.recipe.replay.index.records, parts.recipe.replay.index.records)
    assert same(weights_of(whole), weights_of(parts)) == []


def test_the_replay_has_every_episode_once_with_its_end(tmp_path):
    _, records = run(tmp_path / "run")
    reader = LeRobotReader(tmp_path / "run/replay/dataset")
    assert len(reader) == 8
    ends = np.cumsum([row["length"] for row in reader.episodes]) - 1
    successes = [row["success"] for row in reader.episodes]
    # a success ends an episode; the horizon does not, and its last observation is there
    assert records["terminated"][ends].tolist() == successes
    assert records["terminated"].sum() == sum(successes)
    assert {row["length"] for row in reader.episodes if not row["success"]} <= {LineSim.horizon}


def test_updates_follow_decisions_and_the_warm_up_is_not_made_up_for(tmp_path):
    trainer, records = run(tmp_path / "run", utd=0.5)
    beyond = len(records) - 12
    assert trainer.updater.learner.updates == int(0.5 * beyond)
    assert trainer.updater.optimiser_step == trainer.updater.learner.updates
    assert trainer.updater.moved
    # the warm-up covers the range of actions
    first = records["actions"][:12]
    assert first.min() < -0.5
    assert first.max() > 0.5


def test_actions_are_stored_as_they_were_executed(tmp_path):
    """The chunk that an end cuts short keeps the policy's remaining actions, which the critic reads."""
    encoder = {"encoder": {"width": 32, "layers": 1, "image_size": None}}
    model = ActionPolicyConfig(kind="squashed", chunk=5, options=encoder)
    _, records = run(tmp_path / "run", model=model)
    assert records["actions"].shape[1:] == (5, 1)
    # 12 control steps: 5, 5 and 2
    assert set(records["steps"].tolist()) >= {5}
    cut = records[records["steps"] < 5]
    assert len(cut)
    assert np.all(np.abs(cut["actions"]) > 0)
    assert np.all(cut["rewards"][np.arange(5) >= cut["steps"][:, None]] == 0)
    # the executed ones moved the point
    gained = records["next_state"][:, 0] - records["state"][:, 0]
    executed = np.where(np.arange(5) < records["steps"][:, None], records["actions"][..., 0], 0)
    np.testing.assert_allclose(gained, 0.1 * executed.sum(1), atol=1e-5)


def test_rewards_of_control_steps():
    records = np.zeros(2, TransitionForm(1, 0, 3, 1).dtype)
    records["rewards"] = [[1.0, 3.0, 6.0], [10.0, 15.0, 0.0]]
    records["before"], records["steps"], records["success"] = [0.5, 6.0], [3, 2], [False, True]

    def paid(success=0.0, environment=0.0, potential=0.0):
        return step_rewards(records, ChunkWeights(success, environment, potential))[:, :2].tolist()

    assert paid(success=2.0) == [[0, 0], [0, 2]]
    assert paid(environment=0.5) == [[0.5, 1.5], [5.0, 7.5]]
    assert paid(potential=1.0) == [[0.5, 2.0], [4.0, 5.0]]


def test_the_first_step_of_an_episode_gains_nothing(tmp_path):
    """With 0 as the reward before it, a critic that does not see the time values being where episodes begin."""
    trainer, records = run(tmp_path / "run", steps=2)
    gains = step_rewards(records, ChunkWeights(0.0, 0.0, 1.0))[:, 0]
    starts = np.isclose(records["state"][:, 0], 0, atol=1e-7)
    assert starts.sum() >= 4
    assert (gains[starts] == 0).all()
    # elsewhere, what the step moved towards the goal
    assert 0 < np.abs(gains[~starts]).max() < 0.1
    again = read_records(tmp_path / "run/replay/dataset", trainer.recipe.form)
    assert np.array_equal(again["before"], records["before"])


def test_it_learns_the_line(tmp_path):
    """One second of learning; the untrained policy solves none of the held-out layouts greedily."""
    config = sac_config(tmp_path, batch=64, warmup_steps=60)
    config.trainer.learning_rate, config.sac.gamma, config.sac.temperature.initial = 3e-3, 0.9, 0.1
    config.eval_data = {"held_out": EpisodeSetConfig(tasks=["right"], split="held_out", layouts=10)}
    config.evaluation.videos = 0
    trainer = trainer_of(config, tmp_path, steps=18)
    trainer.run()
    before, after = trainer.log.evaluations
    assert before["success/greedy"] == 0
    assert after["success/greedy"] == 1
    assert isinstance(open_policy(trainer.saver.checkpoints.path(18) / "model"), SquashedActionPolicy)
    trainer.recipe.close()


def test_a_run_that_ends_within_its_warm_up_says_so(tmp_path):
    result = trainer_of(sac_config(tmp_path, warmup_steps=4000), tmp_path, steps=2).run()
    assert "within the 4000 control steps of its warm-up" in result["reason"]


def test_failed_environments_are_counted_and_never_stored(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tests.robotics.line_sim.open_line", lambda config: LineSim(breaks=range(0, 20, 3)))
    with caplog.at_level(logging.WARNING):
        trainer, records = run(tmp_path / "run")
    failed = trainer.recipe.broken["episodes"]
    assert failed
    assert trainer.recipe.replay.episodes == 8 - failed
    assert np.isfinite(records["rewards"]).all()


def test_several_tasks_tell_the_critic_which_one_it_is(tmp_path):
    trainer, _ = run(tmp_path / "run", steps=2)
    recipe = trainer.recipe
    assert list(recipe.tasks) == ["right", "left"]
    found = recipe.critic_states(torch.zeros(2, 2), torch.tensor([0, 1]))
    assert found.tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]
    assert recipe.inputs(torch.zeros(2, 2), torch.tensor([1, 0])).instructions == ("go left", "go right")


def test_prior_data_are_their_share_of_each_batch(tmp_path):
    demos = demonstrate(tmp_path / "demos", episodes=4, failures=[1])
    prior = PriorConfig(path=str(demos), ratio=0.25)
    trainer, _ = run(tmp_path / "run", prior=prior, steps=2)
    assert "sac/q_prior" in trainer.seen[-1]
    recipe = RobotSacRecipe(sac_config(tmp_path / "again", prior=prior))
    recipe.open_replay(tmp_path / "again/replay")
    recipe.replay.append([episode(6, seed, recipe.form) for seed in range(2)])
    batch = recipe.draw(torch.Generator().manual_seed(0))
    assert int(batch.prior.sum()) == 4
    # demonstrations that failed have no last observation, and are left out
    assert len(recipe.prior) == sum(len(e.action) for e in LeRobotReader(demos) if e.success)
    assert int(recipe.prior.records["terminated"].sum()) == 3
    recipe.close()
    replay = PriorConfig(path=str(tmp_path / "run/replay"))
    other, _ = run(tmp_path / "other", prior=replay, steps=2)
    assert len(other.recipe.replay.index) == 0  # closed
    assert "sac/q_prior" in other.seen[-1]


def test_windows_of_demonstrations_repeat_the_last_action(tmp_path):
    demos = demonstrate(tmp_path / "demos", episodes=1)
    model = ActionPolicyConfig(kind="squashed", chunk=4, options={"encoder": {"width": 32, "image_size": None}})
    recipe = RobotSacRecipe(sac_config(tmp_path / "run", prior=PriorConfig(path=str(demos)), model=model))
    recipe.open_replay(tmp_path / "run/replay")
    records, length = recipe.prior.records, len(LeRobotReader(demos).episode(0).action)
    assert records["steps"].tolist() == [4] * (length - 3) + [3, 2, 1]
    assert records["terminated"].tolist() == [False] * (length - 4) + [True] * 4
    assert (records["actions"][-1] == records["actions"][-1, 0]).all()
    np.testing.assert_array_equal(records["next_state"][0], records["state"][4])
    recipe.close()


def test_a_damaged_replay_of_a_checkpoint_is_an_error(tmp_path):
    run(tmp_path / "run", steps=1)
    data = next((tmp_path / "run/checkpoints/step-000001/replay/dataset/data").glob("*/*.parquet"))
    data.write_bytes(data.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"checkpoint .*step-000001 is damaged: replay/dataset/data.*bytes instead of"):
        run(tmp_path / "run", resume=True)


def test_updates_that_are_not_finite_are_skipped_or_stop_the_run(tmp_path, monkeypatch):
    def fails(learner, batch, generator):
        raise NonFiniteError("the loss is nan")

    monkeypatch.setattr("robotics.offpolicy.sac_learner.SacLearner.update", fails)
    with pytest.raises(RunError, match="11 updates have been skipped, more than 10"):
        run(tmp_path / "run")
    config = sac_config(tmp_path / "other")
    config.trainer.on_nonfinite = "stop"
    with pytest.raises(RunError, match=r"step \d: the loss is nan"):
        trainer_of(config, tmp_path / "other").run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sim": SimConfig(kind="tests.robotics.line_sim:open_line")}, "set sim.image_size=0"),
        ({"acting": ActingSettings(n_action_steps=1)}, "set model.chunk to the number of control steps"),
        ({"sac": SacSettings(tau=2.0)}, "tau"),
    ],
)
def test_settings_that_it_cannot_use_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        sac_config(tmp_path, **change)


@pytest.mark.parametrize("name", ["epochs", "weight_decay", "warmup_steps", "mixed_precision"])
def test_options_of_the_trainer_without_effect_are_refused(tmp_path, name):
    config = sac_config(tmp_path)
    setattr(config.trainer, name, {"mixed_precision": "bf16"}.get(name, 2))
    with pytest.raises(ValueError, match=rf"trainer\.{name} is .* no effect in robot_sac"):
        config.validate()


def test_what_does_not_fit_is_refused_before_a_step(tmp_path, monkeypatch):
    model = ActionPolicyConfig(kind="gaussian", chunk=1, options={"encoder": {"width": 32, "image_size": None}})
    with pytest.raises(UserError, match=r"set model\.kind=squashed"):
        RobotSacRecipe(sac_config(tmp_path, model=model))
    config = sac_config(tmp_path)
    config.reward.environment = 1.0
    with pytest.raises(UserError, match="potentials of the state"):
        RobotSacRecipe(config)
    with pytest.raises(UserError, match=r"nowhere/meta/info\.json"):
        RobotSacRecipe(sac_config(tmp_path, prior=PriorConfig(path=str(tmp_path / "nowhere"))))
    monkeypatch.setattr("robotics.offpolicy.sac.PartialState", lambda: type("Two", (), {"num_processes": 2})())
    with pytest.raises(UserError, match="trains in one process, but 2 were started"):
        RobotSacRecipe(sac_config(tmp_path))


def test_the_formula_names_what_was_chosen(tmp_path):
    recipe = RobotSacRecipe(sac_config(tmp_path))
    assert "all of 2 critics" in recipe.describe()
    recipe.close()


def test_the_configuration_of_pendulum_plans_and_trains(tmp_path, capsys):
    config = "configs/robotics/pendulum_sac.yaml"
    assert main(["train", config, f"output_dir={tmp_path}/run", "--dry-run"]) == 0
    assert "moments" in capsys.readouterr().out
    short = ["trainer.steps=2", "warmup_steps=30", "batch=8", "sim.horizon=20", "evaluation.at_start=false"]
    short += ["eval_data.held_out.layouts=1", "tracking.quiet=true", "model.options.encoder.width=32"]
    assert main(["train", config, f"output_dir={tmp_path}/run", *short]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["replay/control_steps"] for row in rows] == [20, 40]
    assert [row["sac/updates"] for row in rows] == [0, 10]
    (evaluation,) = [json.loads(line) for line in (tmp_path / "run/evaluations.jsonl").read_text().splitlines()]
    assert evaluation["episode/return/greedy"] < 0
