"""DigiRL: states and labels of episodes, recorded episodes, filters and loss in the recipe, offline and online."""

import json
import math

import pytest
import torch

from mmrl.agents.environments.experts import run_expert, write_episodes
from mmrl.agents.environments.gym import GymEnvironment
from mmrl.agents.methods.digirl import DigirlConfig, DigirlRecipe, DigirlSettings, kept_steps
from mmrl.agents.methods.digirl_critics import DigirlCriticConfig, LabelledEpisodes, StepCritic, label_episodes
from mmrl.agents.rollout.conversation import Writer
from mmrl.agents.rollout.episodes import AgentPayload, Episode
from mmrl.agents.rollout.storage import read_recorded, write_recorded
from mmrl.agents.toy.grid import GridWorld
from mmrl.core.loss import metric_values
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from mmrl.training.run import train
from mmrl.training.update import count_denominators
from mmrl.vlm.data.prompt import join_prompts
from mmrl.vlm.engine.rows import text_prompt
from tests.agents.runs import run_config
from tests.rounding import assert_equal_up_to_rounding

pytestmark = pytest.mark.usefixtures("every_answer_acts")


def make_config(folder, model, trainer=None, **digirl) -> DigirlConfig:
    critics = {"critic": DigirlCriticConfig(hidden=16, updates=2)} if "method" not in digirl else {}
    settings = DigirlSettings(**{**critics, "batch_episodes": 3} | digirl)
    steps = {"samples_per_task": 2} | (trainer or {})
    config = run_config(DigirlConfig, folder, model, steps=steps, recipe="digirl", digirl=settings)
    config.validate()
    return config


@pytest.fixture
def make_recipe(closing):
    return lambda config: closing(DigirlRecipe(config))


def collect(recipe):
    """Rollouts of one step, and the batch that they are replaced by."""
    with torch.no_grad():
        rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    rollouts = recipe.score(rollouts, Step())
    return rollouts, recipe.advantages(rollouts, make_accelerator(), Step())


def grid_experts(folder, count=4):
    env = GymEnvironment(GridWorld(size=3, min_distance=2))
    write_episodes([run_expert(env, {}, seed, "tag") for seed in range(count)], folder, videos=0)
    return folder


def test_states_are_those_of_the_conversation_read_up_to_the_step(tmp_path, folder, make_recipe):
    recipe = make_recipe(make_config(tmp_path, folder))
    episodes = recipe.run_groups(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    data = label_episodes(recipe.policy, [e for own in episodes for e in own], gamma=0.5, rows=3)
    assert data.state.shape[0] == sum(data.counts) == len(data.reward)
    place = 0
    for number, episode in enumerate(data.episodes):
        steps = episode.trajectory
        for turn in range(steps.turns):
            begin = next(at for at in range(len(steps.ids)) if steps.turn[at] == turn and steps.sampled[at])
            parts, at = [episode.prompt], 0
            for insert in [i for i in steps.inserts if i.start < begin]:
                parts += [text_prompt(torch.tensor(steps.ids[at : insert.start])), insert.prompt]
                at = insert.stop
            with torch.no_grad():
                expected = recipe.policy.encode_prefix([join_prompts(parts)]).last_state[0]
            assert_equal_up_to_rounding(data.state[place], expected)
            place += 1
        assert float(data.total[number]) == pytest.approx(episode.total)


def test_the_state_of_the_text_does_not_see_the_image(tmp_path, folder, make_recipe):
    """The corridors of all seeds have the same text and different images."""
    recipe = make_recipe(make_config(tmp_path, folder))
    episodes = [own[0] for own in recipe.run_groups(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())]
    data = label_episodes(recipe.policy, episodes, gamma=0.5, rows=0)
    assert torch.equal(data.text_state[0], data.text_state[1])
    assert not torch.allclose(data.state[0], data.state[data.counts[0]])


def test_following_states_stay_within_their_episode():
    data = LabelledEpisodes(
        episodes=[Episode(task=None)] * 2,
        text_state=torch.zeros(2, 1),
        state=torch.arange(5.0)[:, None],
        counts=[3, 2],
        reward=torch.tensor([0.0, 0, 1, 0, 0]),
        mc_return=torch.tensor([0.25, 0.5, 1, 0, 0]),
    )
    assert data.next_state.flatten()[data.has_next].tolist() == [1, 2, 4]
    assert data.has_next.tolist() == [True, True, False, True, False]
    assert data.succeeds.tolist() == [1, 1, 1, 0, 0]
    assert data.total.tolist() == [1, 0]


@pytest.mark.parametrize(("form", "rule", "kept"), [
    ("paper", "auto", [False, True, True, False, False]),
    ("paper", "0.2", [True, True, True, False, False]),
    ("code", "auto", [True, True, True, False, False]),
])  # fmt: skip
def test_the_step_filter_of_both_forms(form, rule, kept):
    """All values are 1/2: the paper's advantages are 1/4, 1/2, 1 with H = 3 and 0, 0 with H = 2."""
    data = LabelledEpisodes(
        episodes=[],
        text_state=torch.zeros(2, 1),
        state=torch.zeros(5, 1),
        counts=[3, 2],
        reward=torch.tensor([0.0, 0, 1, 0, 0], dtype=torch.float64),
        mc_return=torch.tensor([0.25, 0.5, 1, 0, 0], dtype=torch.float64),
    )
    critic = StepCritic(1, 2)
    for parameter in critic.parameters():
        torch.nn.init.zeros_(parameter)
    assert kept_steps(data, critic, DigirlSettings(advantage=form, threshold=rule)).tolist() == kept


def test_the_batch_holds_kept_steps_and_its_loss_counts_the_dropped_ones(tmp_path, folder, make_recipe):
    recipe = make_recipe(make_config(tmp_path, folder, quantile=0.0, threshold="0.3", clamp=False))
    _, batch = collect(recipe)
    assert batch.num_rows == batch.num_groups == 3
    kept, all_steps, total = 0, 0, 0.0
    logp = recipe.scores(recipe.policy, batch, frozenset({"logp"})).logp
    for row, episode in enumerate(AgentPayload.of(batch).episodes):
        for turn in range(episode.trajectory.turns):
            own = (batch.turn[row] == turn) & (batch.mask[row] > 0)
            values = set(batch.advantage[row][own].tolist())
            assert values in ({0.0}, {1.0}), "a step is kept or dropped as a whole"
            all_steps += 1
            if values == {1.0}:
                kept, total = kept + 1, total - float(logp[row][own].detach().sum())
    assert 0 < kept < all_steps
    output = recipe.loss(recipe.policy, batch, count_denominators(recipe, batch), Step())
    assert float(output.loss.detach()) == pytest.approx(total / all_steps, rel=1e-4)
    assert math.isfinite(metric_values(output.metrics)["loss/nll"])
    halves = [batch.select_groups(torch.tensor(part)) for part in ([0], [1, 2])]
    parts = [recipe.loss(recipe.policy, part, count_denominators(recipe, batch), Step()).loss for part in halves]
    assert float(sum(parts).detach()) == pytest.approx(float(output.loss.detach()), rel=1e-4)


def test_filtered_cloning_keeps_all_steps_of_the_best_episodes(tmp_path, folder, make_recipe, monkeypatch):
    recipe = make_recipe(make_config(tmp_path, folder, method="filtered_cloning", quantile=0.8))
    monkeypatch.setattr(recipe.policy, "states", None)  # without critics nothing is read
    rollouts, batch = collect(recipe)
    best = max(episode.total for episode in AgentPayload.of(rollouts).episodes)
    assert all(episode.total == pytest.approx(best) for episode in AgentPayload.of(batch).episodes)
    assert torch.equal(batch.advantage, batch.mask)
    assert "digirl/step_loss" not in recipe.noted


def test_while_the_critics_warm_up_nothing_is_trained(tmp_path, folder):
    config = make_config(tmp_path, folder, warmup_steps=1, threshold="-2")
    run_dir = train(RECIPES["digirl"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert "loss/total" not in rows[0]
    assert rows[0]["digirl/step_loss"] > 0
    assert rows[1]["loss/total"] > 0
    assert rows[1]["digirl/stored"] == 2 * rows[0]["digirl/stored"] == 8


def test_recorded_episodes_of_an_expert_are_read_as_the_policy_would_have_lived_them(tmp_path, folder, make_recipe):
    recipe = make_recipe(make_config(tmp_path, folder))
    writer = Writer(recipe.policy, recipe.config.conversation, "Walk.")
    rows = [json.loads(line) for line in (grid_experts(tmp_path / "experts") / "episodes.jsonl").open()]
    episodes = read_recorded(tmp_path / "experts").episodes(recipe.policy, writer)
    assert len(episodes) == len(rows) == 4
    for row, episode in zip(rows, episodes, strict=True):
        assert episode.trajectory.turns == len(row["turns"])
        assert len(episode.trajectory.inserts) == len(row["turns"]) - 1
        assert episode.rewards == [0.0] * (len(row["turns"]) - 1) + [1.0]
        assert episode.success
        assert "Walk." in episode.prompt.text
        assert "image_grid_thw" in episode.prompt.media
        sampled = [t for t, own in zip(episode.trajectory.ids, episode.trajectory.sampled, strict=True) if own]
        assert sampled.count(recipe.policy.eos_ids[0]) == len(row["turns"])


def test_recorded_episodes_that_do_not_fit_are_left_out_never_cut(tmp_path, folder, make_recipe, caplog):
    """The tiny models have 512 positions."""
    recipe = make_recipe(make_config(tmp_path, folder))
    writer = Writer(recipe.policy, recipe.config.conversation, "")
    turns = [{"text": "go on", "answer": "<action>right</action>", "reward": 0.5}]
    rows = [{"task": {"name": "walk"}, "seed": seed, "turns": turns * count} for seed, count in ((1, 2), (2, 100))]
    path = tmp_path / "long/episodes.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (episode,) = read_recorded(path.parent).episodes(recipe.policy, writer)
    assert (episode.task.id, episode.rewards, episode.total) == ("walk/1", [0.5, 0.5], 1.0)
    assert "does not fit in the model's 512 positions" in caplog.text
    path.write_text(json.dumps(rows[1]) + "\n")
    with pytest.raises(UserError, match="none of its 1 episodes fits"):
        read_recorded(path.parent).episodes(recipe.policy, writer)
    path.write_text(json.dumps({"turns": [{"text": "no answer"}], "reward": 1}) + "\n")
    with pytest.raises(UserError, match="each turn must have an answer"):
        read_recorded(path.parent).episodes(recipe.policy, writer)


def test_recorded_episodes_of_a_model_are_read_back(tmp_path, folder, make_recipe):
    recipe = make_recipe(make_config(tmp_path, folder))
    writer = Writer(recipe.policy, recipe.config.conversation, "Walk.")
    episodes = recipe.run_groups(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())[0]
    assert write_recorded(episodes[:1], tmp_path / "own") == write_recorded(episodes[1:], tmp_path / "own") == 1
    again = read_recorded(tmp_path / "own").episodes(recipe.policy, writer)
    assert [e.trajectory.ids for e in again] == [e.trajectory.ids for e in episodes]
    assert [e.trajectory.logp for e in again] == [e.trajectory.logp for e in episodes]
    (tmp_path / "own/episode-000001.pt").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"episode-000001.pt is not a recorded episode"):
        read_recorded(tmp_path / "own")
    with pytest.raises(UserError, match=r"no episodes to learn from: no episodes.jsonl"):
        read_recorded(tmp_path / "nothing")


def test_offline_cloning_of_experts_raises_their_likelihood(tmp_path, folder):
    config = make_config(
        tmp_path,
        folder,
        {"steps": 6, "learning_rate": 3e-3},
        method="filtered_cloning",
        path=str(grid_experts(tmp_path / "experts")),
        offline_steps=6,
    )
    run_dir = train(RECIPES["digirl"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert rows[-1]["loss/nll"] < 0.9 * rows[0]["loss/nll"]
    assert all(row["digirl/stored"] == 4 for row in rows), "no episodes are run"
    assert all(row["digirl/return"] == 1 for row in rows)


def test_options_that_do_not_fit_are_refused(tmp_path, folder):
    with pytest.raises(UserError, match=r"offline_steps is 1, but it has no effect while digirl.path is None"):
        make_config(tmp_path, folder, offline_steps=1)
    for changed in (
        {"warmup_steps": 1},
        {"critic": DigirlCriticConfig(updates=2)},
        {"lam": 0.9},
        {"step_filter": False},
    ):
        with pytest.raises(UserError, match=f"{next(iter(changed))} is .* while digirl.method is 'filtered"):
            make_config(tmp_path, folder, method="filtered_cloning", **changed)
    with pytest.raises(ValueError, match="expected 1/H, or a number"):
        make_config(tmp_path, folder, threshold="most")
    config = make_config(tmp_path, folder)
    config.model.critic.hidden = [8]
    with pytest.raises(UserError, match=r"DigiRL uses digirl\.critic"):
        config.validate()
    config.objective = ObjectiveConfig(preset="grpo")
    with pytest.raises(UserError, match="remove objective"):
        config.validate()


def test_a_batch_that_the_processes_cannot_divide_evenly_is_refused(tmp_path, folder, monkeypatch):
    config = make_config(tmp_path, folder, batch_episodes=4)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    with pytest.raises(UserError, match="batch_episodes is 4; with 3 processes it must be a multiple of 3"):
        DigirlRecipe(config)
