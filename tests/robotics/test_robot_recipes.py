"""GRPO, SRPO and evaluation on a point on a line: the loop from episodes to updates, without physics."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mmrl.errors import RunError, UserError
from mmrl.recipes import find_recipe
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.run import evaluate, train
from mmrl.training.settings import CheckpointConfig, TrackingConfig, TrainerConfig
from mmrl.training.trainer import collect_metrics
from mmrl.training.update import count_denominators
from robotics.episodes.collect import ActingSettings
from robotics.episodes.episode_evaluation import RobotEvaluationConfig
from robotics.episodes.payload import EpisodeSetConfig
from robotics.methods.grpo import RobotGrpoConfig, RobotGrpoRecipe
from robotics.methods.latents import LatentConfig
from robotics.methods.srpo import SrpoConfig, SrpoRecipe
from robotics.policies.policy_loading import ActionPolicyConfig
from robotics.sim.episodes import ChunkResult
from robotics.sim.opening import SimConfig
from tests.contracts.options import with_changes
from tests.robotics.line_sim import LineSim

SAMPLED = RobotEvaluationConfig(greedy=False, samples=1)
SCALE = {"mean": [0.0, 0.0], "std": [0.3, 0.3]}


def trainer(**changes):
    settings = {"steps": 3, "tasks_per_step": 4, "samples_per_task": 6, "learning_rate": 0.02, "threads": 1}
    return TrainerConfig(**(settings | changes))


def grpo(tmp_path, kind=RobotGrpoConfig, name="robot_grpo", **changes):
    options = changes.pop("sim", {})
    settings = {
        "recipe": name,
        "output_dir": str(tmp_path / "run"),
        "sim": SimConfig(kind="tests.robotics.line_sim:open_line", options=options),
        "model": ActionPolicyConfig(kind="tests.robotics.line_policies:make_walker", chunk=1, options={"bias": 0.1}),
        "data": EpisodeSetConfig(tasks=["right"], layouts=20),
        "eval_data": {"held_out": EpisodeSetConfig(tasks=["right"], split="held_out", layouts=8)},
        "trainer": trainer(),
        "tracking": TrackingConfig(quiet=True, tensorboard=False),
        "checkpoint": CheckpointConfig(every=1, keep=5),
    }
    config = kind(**(settings | changes))
    config.evaluation.videos = 0
    config.validate()
    return config


def srpo(tmp_path, **changes):
    latent = LatentConfig(kind="state", frames="chunk", options=SCALE)
    return grpo(tmp_path, SrpoConfig, "srpo", **({"latent": latent} | changes))


def collected(recipe, tasks=4, seed=0):
    with torch.no_grad():
        rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:tasks], Streams(seed), Step())
    return recipe.score(rollouts, Step())


@pytest.mark.parametrize("level", ["token", "chunk"])
def test_ratio_is_one_before_the_first_update(tmp_path, level):
    recipe = RobotGrpoRecipe(grpo(tmp_path, logp_level=level, acting=ActingSettings(temperature=1.4)))
    rollouts = collected(recipe)
    scores = recipe.scores(recipe.policy, rollouts, frozenset({"logp"}))
    kept = rollouts.mask > 0
    assert kept.any()
    torch.testing.assert_close(scores.logp[kept].detach(), rollouts.logp_old[kept], rtol=1e-6, atol=1e-6)


def test_success_is_also_reported_by_task(tmp_path):
    config = grpo(
        tmp_path, data=EpisodeSetConfig(tasks=["right", "left"], layouts=20), trainer=trainer(tasks_per_step=6)
    )
    recipe = RobotGrpoRecipe(config)
    rollouts = collected(recipe, tasks=6)
    success = rollouts.payload.success.reshape(6, -1).float().mean(1)  # tasks take turns
    found = collect_metrics(recipe, rollouts, Step())
    assert found["episode/success/right"] == pytest.approx(float(success[0::2].mean()))
    assert found["episode/success/left"] == pytest.approx(float(success[1::2].mean()))
    assert found["episode/success"] == pytest.approx(float(success.mean()))
    assert math.isnan(collect_metrics(recipe, rollouts, Step())["episode/success/left"])  # counted once


def test_mask_counts_control_steps_that_were_carried_out(tmp_path):
    recipe = RobotGrpoRecipe(grpo(tmp_path))
    rollouts = collected(recipe)
    torch.testing.assert_close(rollouts.mask.sum(1).long(), rollouts.payload.lengths)
    assert rollouts.group.tolist() == [group for group in range(4) for _ in range(6)]


def test_micro_batches_change_nothing(tmp_path):
    gradients = []
    for micro in (0, 6, 2):
        recipe = RobotGrpoRecipe(grpo(tmp_path, trainer=trainer(micro_batch=micro)))
        rollouts = recipe.advantages(collected(recipe), make_accelerator(), Step())
        denominators = count_denominators(recipe, rollouts)
        for chunk in rollouts.micro_batches(micro or rollouts.num_rows):
            recipe.loss(recipe.policy, chunk, denominators, Step()).loss.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in recipe.policy.parameters()]))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-7)


def test_loss_is_the_mean_of_episode_means(tmp_path):
    recipe = RobotGrpoRecipe(grpo(tmp_path))
    rollouts = recipe.advantages(collected(recipe), make_accelerator(), Step())
    loss = recipe.loss(recipe.policy, rollouts, count_denominators(recipe, rollouts), Step()).loss
    per_episode = []
    for row in range(rollouts.num_rows):
        count = int(rollouts.mask[row].sum())
        per_episode.append(-float(rollouts.advantage[row, :count].sum()) / count)
    assert float(loss.detach()) == pytest.approx(np.mean(per_episode), abs=1e-6)


def test_sparse_reward_and_potential(tmp_path):
    sparse = collected(RobotGrpoRecipe(grpo(tmp_path)))
    found = collected(RobotGrpoRecipe(grpo(tmp_path, reward="potential")))
    torch.testing.assert_close(sparse.reward, sparse.payload.success.float())
    gap = (found.payload.last_state[:, 0] - found.payload.last_state[:, 1]).abs()
    assert found.payload.success.any()
    torch.testing.assert_close(found.reward, 1 / (1 + gap), rtol=1e-5, atol=1e-5)  # the simulator's own scale
    assert set(found.reward_terms) == {"success", "potential"}
    with pytest.raises(UserError, match=r"reward is return; use potential: .* potentials of the state"):
        RobotGrpoRecipe(grpo(tmp_path, reward="return"))


@pytest.mark.parametrize(("change", "warned"), [(0.0, 1), (-1.0, 0)])
def test_success_that_earns_less_than_going_on_is_said_once(tmp_path, caplog, change, warned):
    class Paying(LineSim):
        potential_rewards = False

        def step_chunk(self, actions, record=()):
            result = super().step_chunk(actions, record)
            result.rewards[:] += change
            return result

    config = grpo(tmp_path, reward="return")
    recipe = RobotGrpoRecipe(config, sim=Paying())
    for _ in range(3):
        success = collected(recipe).payload.success
        assert 0 < success.sum() < len(success)
    said = [record.getMessage() for record in caplog.records if "learns to avoid success" in record.getMessage()]
    assert len(said) == warned


def test_chunks_weigh_as_much_as_their_time(tmp_path, monkeypatch):
    config = grpo(tmp_path, objective=ObjectiveConfig(preset="srpo", weight={"kind": "duration"}))
    clock = iter(range(10**6))
    readings = ((number // 2) ** 2 if number % 2 else 0 for number in clock)  # the n-th chunk takes n^2 seconds
    monkeypatch.setattr("robotics.episodes.collect.time", SimpleNamespace(perf_counter=lambda: float(next(readings))))
    recipe = RobotGrpoRecipe(config)
    rollouts = collected(recipe)
    seconds = rollouts.payload.seconds
    each = rollouts.mask.shape[1] // seconds.shape[1]
    assert torch.equal(rollouts.extras["duration"], seconds.repeat_interleave(each, 1))
    weight = recipe.advantages(rollouts, make_accelerator(), Step()).extras["weight"]
    mean = (rollouts.extras["duration"] * rollouts.mask).sum() / rollouts.mask.sum()
    torch.testing.assert_close(weight, rollouts.extras["duration"] / mean)
    assert len(weight[rollouts.mask > 0].unique()) > 1
    assert collected(RobotGrpoRecipe(grpo(tmp_path))).payload.seconds is None


def test_broken_environment_takes_its_group_out(tmp_path):
    recipe = RobotGrpoRecipe(grpo(tmp_path, sim={"breaks": [1]}))
    rollouts = collected(recipe)
    broken = torch.isnan(rollouts.reward)
    own = torch.tensor([recipe.train_tasks[group].layout == 1 for group in rollouts.group.tolist()])
    assert bool((broken == own).all())
    metrics = collect_metrics(recipe, rollouts, Step())
    assert metrics["sim/episodes_failed"] >= 1
    assert metrics["sim/raised"] >= 1
    advantages = recipe.advantages(rollouts, make_accelerator(), Step()).advantage
    assert not advantages[own].any()


def test_failure_counts_survive_an_interruption(tmp_path):
    recipe = RobotGrpoRecipe(grpo(tmp_path, sim={"breaks": [1]}))
    first = collect_metrics(recipe, collected(recipe), Step())["sim/episodes_failed"]
    assert first >= 1
    again = RobotGrpoRecipe(grpo(tmp_path, sim={"breaks": [1]}))
    again.load_state_dict(recipe.state_dict())
    both = [collect_metrics(found, collected(found, seed=1), Step()) for found in (recipe, again)]
    assert both[0]["sim/episodes_failed"] == both[1]["sim/episodes_failed"] > first
    assert both[0]["sim/raised"] == both[1]["sim/raised"] > first


def test_run_without_a_whole_group_stops_with_the_reason(tmp_path):
    config = grpo(tmp_path, sim={"never_starts": list(range(20))}, eval_data={})
    with pytest.raises(RunError, match="would not start"):
        train(find_recipe("robot_grpo"), config)


def test_draw_without_a_whole_group_is_repeated_with_other_tasks(tmp_path):
    config = grpo(tmp_path, sim={"never_starts": list(range(0, 20, 2))}, eval_data={})
    config.trainer.tasks_per_step = 1
    run_dir = train(find_recipe("robot_grpo"), config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["reward/errors"] for row in rows] == [0, 0, 0]
    assert rows[-1]["sim/episodes_failed"] > 0


def test_grpo_learns(tmp_path):
    config = grpo(tmp_path, trainer=trainer(steps=25, samples_per_task=8, minibatches_per_step=2))
    run_dir = train(find_recipe("robot_grpo"), config)
    result = json.loads((run_dir / "result.json").read_text())
    before, after = result["first_evaluation"]["held_out"], result["last_evaluation"]["held_out"]
    assert before["success/greedy"] == 0.0
    assert after["success/greedy"] >= 0.8


def test_srpo_ranks_failures_by_the_end_of_their_path(tmp_path):
    recipe = SrpoRecipe(srpo(tmp_path, trainer=trainer(samples_per_task=16)))
    rollouts = collected(recipe)
    success = rollouts.payload.success
    assert success.any()
    assert not success.all()
    assert bool((rollouts.reward[success] == 1).all())
    failures = rollouts.reward[~success]
    assert 0 < float(failures.min()) < float(failures.max()) < 0.6
    assert float(failures.max()) == pytest.approx(0.595984, abs=1e-5)
    metrics = collect_metrics(recipe, rollouts, Step())
    assert metrics["srpo/tasks_without_reference"] == 0
    assert metrics["srpo/invalid_latents"] == 0
    assert metrics["srpo/agreement"] > 0.75  # of few failures; the environment's own reward is the nearness, too


def test_srpo_without_any_success_gives_nothing(tmp_path):
    model = ActionPolicyConfig(kind="tests.robotics.line_policies:make_walker", chunk=1, options={"bias": -5.0})
    recipe = SrpoRecipe(srpo(tmp_path, model=model))
    rollouts = collected(recipe)
    assert not rollouts.payload.success.any()
    assert not rollouts.reward.any()
    metrics = collect_metrics(recipe, rollouts, Step())
    assert metrics["srpo/tasks_without_reference"] == 1
    assert math.isnan(metrics["srpo/agreement"])


def test_srpo_references_are_shared_by_a_task_and_advantages_by_a_start(tmp_path):
    recipe = SrpoRecipe(srpo(tmp_path, trainer=trainer(samples_per_task=16)))
    rollouts = collected(recipe)
    failed = rollouts.reward[~rollouts.payload.success]
    # one normalisation over all four starts: exactly one failure has the largest reward and one the smallest
    assert int((failed == failed.max()).sum()) == 1
    estimated = recipe.advantages(rollouts, make_accelerator(), Step())
    for group in range(4):
        rows = rollouts.group == group
        own = rollouts.reward[rows]
        expected = (own - own.mean()) / (own.std() + 1e-6) if own.max() > own.min() else torch.zeros_like(own)
        torch.testing.assert_close(estimated.advantage[rows, 0], expected, rtol=1e-5, atol=1e-5)


def test_kl_to_the_start_policy(tmp_path):
    recipe = RobotGrpoRecipe(grpo(tmp_path, objective=ObjectiveConfig(preset="srpo", kl={"kind": "k3", "coef": 0.1})))
    assert recipe.objective.needs_reference
    run_dir = train(find_recipe("robot_grpo"), recipe.config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert rows[-1]["policy/kl_ref"] > 0


def test_evaluation_continues_where_it_stopped(tmp_path, monkeypatch):
    config = grpo(tmp_path)
    config.evaluation.batch_tasks = 3
    entry = find_recipe("robot_grpo")
    first = evaluate(entry, config)
    files = sorted((tmp_path / "run" / "episodes").glob("*.jsonl"))
    assert len(files) == 1
    lines = files[0].read_text().splitlines()
    assert [json.loads(line)["layout"] for line in lines] == list(range(8))
    files[0].write_text("".join(line + "\n" for line in lines[:3]))
    import robotics.episodes.episode_evaluation as evaluation

    ran = []
    run_episodes = evaluation.run_episodes
    monkeypatch.setattr(evaluation, "run_episodes", lambda *a, **k: ran.append(len(a[2])) or run_episodes(*a, **k))
    assert evaluate(entry, config) == pytest.approx(first, nan_ok=True)
    assert sum(ran) == 5
    protocol = json.loads(files[0].with_suffix(".protocol.json").read_text())
    assert protocol["simulator"] == {"simulator": "line", "horizon": 12}


def test_episodes_whose_environment_broke_down_are_tried_again(tmp_path, monkeypatch, caplog):
    import robotics.episodes.episode_evaluation as evaluation

    entry, config = find_recipe("robot_grpo"), grpo(tmp_path, sim={"never_starts": [1, 5]})
    config.evaluation.batch_tasks = 2
    caplog.set_level("INFO", "mmrl")
    assert evaluate(entry, config)["held_out/episode/failed/greedy"] == 2
    assert "were read from" not in caplog.text
    tried, run_episodes = [], evaluation.run_episodes

    def well(policy, sim, episodes, *rest, **options):
        tried.extend(episode.layout for episode in episodes)
        sim.never_starts = set()
        return run_episodes(policy, sim, episodes, *rest, **options)

    monkeypatch.setattr(evaluation, "run_episodes", well)
    assert evaluate(entry, config)["held_out/episode/failed/greedy"] == 0
    assert tried == [0, 1, 4, 5]  # whole batches, as without the failures
    assert "4 of 8 episodes were read from" in caplog.text
    files = list((tmp_path / "run" / "episodes").glob("*.jsonl"))
    assert len(files) == 1
    assert [json.loads(line)["index"] for line in files[0].open()] == list(range(8))


def test_what_other_processes_wrote_is_not_run_again(tmp_path, monkeypatch):
    import robotics.episodes.episode_evaluation as evaluation

    entry, config = find_recipe("robot_grpo"), grpo(tmp_path)
    config.evaluation.batch_tasks = 2
    whole = evaluate(entry, config)
    file = next((tmp_path / "run" / "episodes").glob("*.jsonl"))
    lines = file.read_text().splitlines(keepends=True)
    file.unlink()
    for rank in range(2):
        file.with_name(f"{file.stem}.part-{rank:03d}.jsonl").write_text("".join(lines[rank:6:2]))
    ran, run_episodes = [], evaluation.run_episodes
    monkeypatch.setattr(evaluation, "run_episodes", lambda *a, **k: ran.extend(a[2]) or run_episodes(*a, **k))
    assert evaluate(entry, config) == pytest.approx(whole, nan_ok=True)
    assert [episode.layout for episode in ran] == [6, 7]
    assert [path.name for path in file.parent.glob("*.jsonl")] == [file.name]
    assert file.read_text().splitlines(keepends=True) == lines


@pytest.mark.parametrize(
    "change", [{"evaluation.temperature": 0.3}, {"acting.n_action_steps": 1}, {"evaluation.max_tasks": 5}, {"seed": 7}]
)
def test_another_protocol_has_its_own_file(tmp_path, change):
    def measured(changes):
        config = grpo(tmp_path)
        config.evaluation.greedy, config.evaluation.samples = False, 1
        config.acting = ActingSettings(ensemble=0.0)
        evaluate(find_recipe("robot_grpo"), with_changes(config, changes))
        return len(list((tmp_path / "run" / "episodes").glob("*.jsonl")))

    assert measured({}) == 1
    assert measured({}) == 1
    assert measured(change) == (1 if "acting.n_action_steps" in change else 2)  # the chunk is 1 anyway


def test_a_changed_environment_is_measured_again(tmp_path):
    source = (
        "from tests.robotics.line_sim import LineSim\n\n\n"
        "def make(config):\n    sim = LineSim()\n    sim.horizon = 12\n    return sim\n"
    )
    (tmp_path / "own_line.py").write_text(source)
    entry, config = find_recipe("robot_grpo"), grpo(tmp_path)
    config.sim = SimConfig(kind=f"{tmp_path}/own_line.py:make")
    evaluate(entry, config)
    (tmp_path / "own_line.py").write_text(source.replace("make(config)", "make(config, *more)"))
    evaluate(entry, config)
    assert len(list((tmp_path / "run" / "episodes").glob("*.jsonl"))) == 2


def test_an_episode_ended_by_the_environment_is_distinguished_from_the_horizon(tmp_path):
    class Falling(LineSim):
        def step_chunk(self, actions, record=()):
            result = super().step_chunk(actions, record)
            fell = np.isin(result.rows, [0]) & ~result.success
            self.live = self.live[~np.isin(self.live, result.rows[fell])]
            return ChunkResult(**{**vars(result), "terminated": result.terminated | fell})

    model = ActionPolicyConfig(kind="tests.robotics.line_policies:make_walker", chunk=1, options={"bias": -5.0})
    recipe = RobotGrpoRecipe(grpo(tmp_path, model=model), sim=Falling())
    recipe.evaluate(recipe.policy, "held_out", make_accelerator(), Step())
    lines = [json.loads(line) for line in next((tmp_path / "run" / "episodes").glob("*.jsonl")).open()]
    assert [line["ending"] for line in lines] == ["terminated"] + ["horizon"] * 7
    assert [line["steps"] for line in lines] == [1] + [12] * 7
    records = recipe.records(collected(recipe), 2)
    assert [record.finish for record in records] == ["terminated", "horizon"]


def test_the_metrics_are_of_all_episodes_of_a_step(tmp_path):
    recipe = RobotGrpoRecipe(grpo(tmp_path))
    first, second = collected(recipe), collected(recipe, seed=1)
    both = torch.cat([first.payload.success, second.payload.success]).float()
    lengths = torch.cat([first.payload.lengths, second.payload.lengths]).float()
    metrics = collect_metrics(recipe, second.select_groups(torch.tensor([0])), Step())  # what a filter left of it
    assert metrics["episode/success"] == pytest.approx(float(both.mean()))
    assert metrics["episode/steps"] == pytest.approx(float(lengths.mean()))
    third = collected(recipe, seed=2)
    assert collect_metrics(recipe, third, Step())["episode/success"] == pytest.approx(
        float(third.payload.success.float().mean())
    )


def test_other_weights_never_share_a_file(tmp_path):
    entry = find_recipe("robot_grpo")
    evaluate(entry, grpo(tmp_path))
    other = ActionPolicyConfig(kind="tests.robotics.line_policies:make_walker", chunk=1, options={"bias": 1.0})
    evaluate(entry, grpo(tmp_path, model=other))
    assert len(list((tmp_path / "run" / "episodes").glob("*.jsonl"))) == 2


def test_evaluation_reports_tasks_intervals_and_videos(tmp_path):
    config = grpo(tmp_path, eval_data={"held_out": EpisodeSetConfig(split="held_out", layouts=6)})
    config.model = ActionPolicyConfig(kind="tests.robotics.line_policies:make_walker", chunk=1, options={"bias": 1.0})
    config.evaluation.videos, config.evaluation.samples = 1, 2
    metrics = evaluate(find_recipe("robot_grpo"), config)
    assert metrics["held_out/success/greedy/right"] == 1.0
    assert metrics["held_out/success/greedy/left"] == 0.0
    assert metrics["held_out/success/greedy"] == 0.5
    assert metrics["held_out/success/greedy/low"] == pytest.approx(0.2538, abs=1e-3)  # Wilson, 6 of 12
    assert 0.0 < metrics["held_out/success/sampled"] < 1.0
    assert metrics["held_out/n"] == 12
    videos = sorted(path.name for path in (tmp_path / "run" / "videos").glob("*.mp4"))
    assert len(videos) == 2
    assert "failure-left" in videos[0]
    assert "success-right" in videos[1]


def test_broken_environments_do_not_count_as_failures_of_the_policy(tmp_path):
    config = grpo(tmp_path, sim={"never_starts": [0, 1]})
    config.model = ActionPolicyConfig(kind="tests.robotics.line_policies:make_walker", chunk=1, options={"bias": 1.0})
    metrics = evaluate(find_recipe("robot_grpo"), config)
    assert metrics["held_out/success/greedy"] == 1.0
    assert metrics["held_out/episode/failed/greedy"] == 2
    assert not math.isnan(metrics["held_out/episode/steps_to_success/greedy"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": "shaped"}, "reward is 'shaped'; allowed: sparse, return, potential"),
        ({"objective": ObjectiveConfig(preset="ppo")}, "needs a critic"),
        ({"objective": ObjectiveConfig(preset="srpo", kl={"kind": "full", "coef": 0.1})}, "use k1, k2, k3"),
        ({"logp_level": "episode"}, "logp_level is 'episode'; allowed: token, chunk"),
        ({"trainer": trainer(samples_per_task=1)}, "samples_per_task is 1, but the advantage 'group_mean_std'"),
        (
            {"acting": ActingSettings(ensemble=0.1), "evaluation": SAMPLED},
            "ensemble is 0.1, which only applies to greedy",
        ),
        ({"data": EpisodeSetConfig(layouts=0)}, "layouts is 0"),
        ({"data": EpisodeSetConfig(split="test")}, "split is 'test'; allowed: train, held_out, all"),
        (
            {"model": ActionPolicyConfig(kind="huge")},
            "model.kind is 'huge'; allowed: small, gaussian, squashed",
        ),
        ({"sim": SimConfig(kind="isaac")}, "sim.kind is 'isaac'; allowed: tabletop, gymnasium, libero, metaworld"),
        ({"sim": SimConfig(kind="gymnasium")}, "sim.env is ''"),
    ],
)
def test_bad_settings(tmp_path, changes, message):
    sim = changes.pop("sim", None)
    config = grpo(tmp_path)
    for name, value in changes.items():
        setattr(config, name, value)
    if sim is not None:
        config.sim = sim
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        config.validate()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (EpisodeSetConfig(split="held_out", layouts=8, first=493), "first=493 and layouts=8 exceed the 500 layouts"),
        (EpisodeSetConfig(split="all"), "unknown split all; this simulator has: train, held_out"),
        (EpisodeSetConfig(tasks=["fly"]), "unknown task fly; this simulator has: right, left"),
    ],
)
def test_initial_states_that_the_simulator_lacks_are_refused_at_the_start(tmp_path, data, message):
    for changes in ({"data": data}, {"eval_data": {"held_out": data}}):
        with pytest.raises(UserError, match=message):
            RobotGrpoRecipe(grpo(tmp_path, **changes))
