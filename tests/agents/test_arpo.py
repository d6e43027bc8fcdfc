"""ARPO: which groups get a stored success, the contents of the buffer, and the switch, correction and resume."""

import contextlib
import dataclasses
import itertools
import json

import pytest
import torch

from mmrl.agents.environments.agent_tasks import TaskSetConfig
from mmrl.agents.environments.environment import ActionConfig
from mmrl.agents.methods import arpo
from mmrl.agents.methods.arpo import (
    ArpoConfig,
    ArpoRecipe,
    ReplayBuffer,
    ReplayConfig,
    inject_successes,
    needs_replay,
    source_metrics,
)
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.agents.rollout.episodes import AgentPayload
from mmrl.agents.rollout.storage import restore_episode, size_of, store_episode
from mmrl.core import Rollouts, get
from mmrl.recipes import RECIPES
from mmrl.training.processes import Streams
from mmrl.training.recipe import Reference, Step, old_in_update
from mmrl.training.run import train
from mmrl.training.trainer import collect_metrics
from mmrl.training.update import update_constants
from tests.agents.runs import run_config
from tests.golden.numbers import load
from tests.rounding import assert_equal_up_to_rounding

pytestmark = pytest.mark.usefixtures("every_answer_acts")


def make_config(folder, model, replay=None, **steps) -> ArpoConfig:
    """Two tasks, both in every step; the corridor gives the share of right steps, so that the bounds decide."""
    config = run_config(
        ArpoConfig,
        folder,
        model,
        steps={"learning_rate": 1e-2} | steps,
        recipe="arpo",
        data=TaskSetConfig(seeds=2),
        conversation=ConversationConfig(system="Walk.", history_images=2),
        actions=ActionConfig(),
        replay=replay or ReplayConfig(threshold=0.0, max_std=10.0, max_mean=10.0),
    )
    config.validate()
    return config


def two_steps(config):
    """Rollouts of two steps of an untrained policy, with all constants of the second update."""
    with contextlib.closing(ArpoRecipe(config)) as recipe:
        first = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks, Streams(0), Step()), Step())
        with torch.no_grad():
            for parameter in recipe.policy.parameters():
                parameter.mul_(1.02)
        later = Step(1, 2)
        second = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks, Streams(0), later), later)
        metrics = collect_metrics(recipe, second, later)
        second = update_constants(recipe, recipe.policy, Reference("none", recipe.policy), second, later)
        second = recipe.objective.compute_advantages(second)
        scores = recipe.scores(recipe.policy, second, frozenset({"logp"}))
        return recipe, first, second, scores.logp.detach(), metrics


def test_an_injected_success_has_the_advantage_of_the_published_rule():
    mask = torch.ones(8, 1)
    rollouts = Rollouts(
        group=torch.zeros(8, dtype=torch.int64),
        mask=mask,
        logp_old=torch.zeros(8, 1),
        reward=torch.tensor([1.0, *[0.0] * 7], dtype=torch.float64),
    )
    found = get("arpo").compute_advantages(rollouts.replace(logp_old=mask.double() - 1)).advantage[:, 0]
    # mean 1/8, sample standard deviation sqrt(1/8)
    assert found[0].item() == pytest.approx(0.875 / (0.125**0.5 + 1e-6), rel=1e-12)
    assert found.tolist() == pytest.approx([2.4749, *[-0.35355] * 7], abs=1e-4)


@pytest.mark.parametrize(
    ("outcomes", "wanted"),
    [
        ([0.0] * 8, True),
        ([0.1] * 8, True),
        ([0.2] * 8, False),
        ([1.0] * 8, False),
        ([0.0, 0.1], False),  # a deviation of 0.05, which is not below the bound
        ([0.0, 0.0, float("nan")], True),
        ([float("nan")], False),
    ],
)
def test_groups_that_hardly_differ_and_earn_little_are_given_a_success(outcomes, wanted):
    assert needs_replay(outcomes) is wanted


def test_injections_and_the_buffer_are_those_of_the_public_code():
    file = load("arpo")
    buffer = ReplayBuffer(ReplayConfig(size=3))
    peer = file.peers[0]
    for step, (task, outcomes) in enumerate(zip(file.inputs["tasks"], file.inputs["outcomes"], strict=True)):
        drawn = buffer.draw(task, step, torch.Generator()) if needs_replay(outcomes) else None
        assert (drawn is not None) is peer["injected"][step]
        for outcome in outcomes:
            if outcome > ReplayConfig().threshold:
                buffer.push(task, {"outcome": outcome}, step)
        assert [record["outcome"] for record in buffer.stored(task)] == peer["stored"][step]


def test_draws_are_uniform_and_of_the_task():
    buffer = ReplayBuffer(ReplayConfig(size=4))
    for number in range(6):
        buffer.push("a", {"number": number}, step=number)
    buffer.push("b", {"number": 9}, step=6)
    generator = torch.Generator().manual_seed(0)
    drawn = [buffer.draw("a", 6, generator) for _ in range(2000)]
    counts = torch.bincount(torch.tensor([record["number"] for record, _ in drawn]), minlength=10).tolist()
    assert counts[:2] == [0, 0]
    assert counts[6:] == [0] * 4
    assert all(440 <= count <= 560 for count in counts[2:6]), "500 each, three standard deviations are 58"
    assert all(age == 6 - record["number"] for record, age in drawn)
    assert buffer.draw("c", 6, generator) is None


def test_what_the_last_draw_of_a_step_is_does_not_depend_on_the_process(monkeypatch):
    """This process has a success of the first draw alone; another one, without a usable task then, of the second."""
    buffer, fresh = ReplayBuffer(ReplayConfig()), [((0, 3), ("a", [{"number": 0}]))]
    monkeypatch.setattr(arpo, "from_all", lambda mine: [mine, 1])
    buffer.push_all(fresh, step=0)
    assert (len(buffer), fresh) == (0, [])
    # nor is the first draw's success stored where the second has none anywhere
    monkeypatch.setattr(arpo, "from_all", lambda mine: [mine])
    buffer.push_all([((0, 3), ("a", [{"number": 0}])), ((1, 3), ("a", []))], step=0)
    assert len(buffer) == 0


def test_old_trajectories_are_not_drawn_and_go():
    buffer = ReplayBuffer(ReplayConfig(max_age=2))
    buffer.push("a", {"number": 0}, step=0)
    buffer.push("a", {"number": 1}, step=3)
    generator = torch.Generator().manual_seed(0)
    assert {buffer.draw("a", 2, generator)[0]["number"] for _ in range(50)} == {0, 1}
    assert {buffer.draw("a", 3, generator)[0]["number"] for _ in range(50)} == {1}
    buffer.expire(3)
    assert (len(buffer), buffer.counts["expired"]) == (1, 1)
    buffer.expire(6)
    assert buffer.draw("a", 6, generator) is None
    assert len(buffer) == 0


def test_a_full_buffer_drops_the_oldest_of_all_tasks():
    buffer = ReplayBuffer(ReplayConfig(memory_mb=1))
    for number in range(5):
        buffer.push("ab"[number % 2], {"number": number, "data": torch.zeros(300_000, dtype=torch.uint8)}, step=number)
    assert [record["number"] for record in buffer.stored("a")] == [2, 4]
    assert [record["number"] for record in buffer.stored("b")] == [3]
    assert buffer.counts["evicted"] == 2
    assert buffer.megabytes <= 1


def test_stored_episodes_are_restored_bit_for_bit_and_are_plain_data(tmp_path, folder):
    recipe, first, _, _, _ = two_steps(make_config(tmp_path, folder))
    episodes = AgentPayload.of(first).episodes
    assert any(episode.trajectory.contexts for episode in episodes)
    for episode in episodes:
        torch.save(store_episode(episode), tmp_path / "episode.pt")
        again = restore_episode(torch.load(tmp_path / "episode.pt", weights_only=True), episode.task)
        for name in ("task", "rewards", "answers", "ending", "success", "finish", "unreadable", "refused", "total"):
            assert getattr(again, name) == getattr(episode, name)
        for name in ("ids", "logp", "turn", "sampled", "turns", "bootstrap_index"):
            assert getattr(again.trajectory, name) == getattr(episode.trajectory, name)
        pairs = [(again.prompt, episode.prompt)]
        pairs += [
            (mine.prompt, its.prompt)
            for kind in ("inserts", "contexts")
            for mine, its in zip(getattr(again.trajectory, kind), getattr(episode.trajectory, kind), strict=True)
            if mine.start == its.start
        ]
        assert len(pairs) == 1 + len(episode.trajectory.inserts) + len(episode.trajectory.contexts)
        for mine, its in pairs:
            for field in dataclasses.fields(mine):
                a, b = getattr(mine, field.name), getattr(its, field.name)
                if field.name == "parts":
                    assert len(a) == len(b)
                elif field.name == "media":
                    assert a.keys() == b.keys()
                    assert all(torch.equal(value, b[name]) for name, value in a.items())
                else:
                    assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name
        assert size_of(store_episode(episode)) < 100_000
    assert len(recipe.replay.buffer) > 0


def test_the_second_step_replays_successes_of_the_first(tmp_path, folder):
    _, first, second, logp, metrics = two_steps(make_config(tmp_path, folder))
    before, now = AgentPayload.of(first), AgentPayload.of(second)
    assert first.extras["replayed"].sum() == 0
    assert second.extras["replayed"].tolist() == [1.0, 0.0, 0.0] * 2
    for group, row in ((0, 0), (1, 3)):
        task = now.episodes[row].task
        known = [e.trajectory.ids for e in before.episodes if e.task.id == task.id and e.total > 0]
        assert now.episodes[row].trajectory.ids in known
        assert all(context.start > 0 for context in now.contexts[row]), "the group's prompt is shared"
        assert float(second.reward[row]) == pytest.approx(now.episodes[row].total)
        assert second.group[row] == group
    assert metrics["replay/injected"] == 2
    assert metrics["replay/age"] == 1
    assert metrics["replay/stored"] == metrics["replay/added"]
    # the first update of a step: fresh and replayed rows begin at a ratio of 1
    assert_equal_up_to_rounding(torch.where(second.mask > 0, second.logp_old, 0.0)[[1, 2, 4, 5]], logp[[1, 2, 4, 5]])


PAIRWISE = {("recompute", "recompute", 1), ("recompute", "sampler", 2), ("behaviour", "recompute", 2)}
PAIRWISE |= {("behaviour", "sampler", 1)}
"""Each value of an option with each of every other one; the other combinations are slow tests."""


@pytest.mark.parametrize(
    ("correction", "source", "minibatches"),
    [
        each if each in PAIRWISE else pytest.param(*each, marks=pytest.mark.slow)
        for each in itertools.product(("recompute", "behaviour"), ("recompute", "sampler"), (1, 2))
    ],
)
def test_old_log_probs_of_replayed_trajectories(tmp_path, folder, correction, source, minibatches):
    replay = ReplayConfig(threshold=0.0, max_std=10.0, max_mean=10.0, correction=correction)
    config = make_config(tmp_path, folder, replay, old_logp=source, minibatches_per_step=minibatches)
    recipe, _, second, logp, _ = two_steps(config)
    used = old_in_update(recipe, second, logp)
    replayed, mask = second.extras["replayed"] > 0, second.mask > 0
    now, old = torch.where(mask, logp, 0.0), torch.where(mask, used.logp_old, 0.0)
    assert_equal_up_to_rounding(old[~replayed], now[~replayed])
    if correction == "recompute":
        assert_equal_up_to_rounding(old[replayed], now[replayed])
    else:
        assert torch.equal(old[replayed], torch.where(mask, second.extras["logp_sampled"], 0.0)[replayed])
        assert not torch.allclose(old[replayed], now[replayed], atol=1e-3), "the policy has moved since"


def test_without_replay_it_is_grpo_over_trajectories(tmp_path, folder):
    _, _, on, _, _ = two_steps(make_config(tmp_path / "on", folder))
    recipe, first, off, _, metrics = two_steps(make_config(tmp_path / "off", folder, ReplayConfig(enabled=False)))
    assert "replayed" not in off.extras
    assert len(recipe.replay.buffer) == 0
    assert not [name for name in metrics if name.startswith("replay/")]
    ids = [[episode.trajectory.ids for episode in AgentPayload.of(rollouts).episodes] for rollouts in (on, off)]
    assert [ids[0][row] for row in (1, 2, 4, 5)] == [ids[1][row] for row in (1, 2, 4, 5)]
    assert ids[0][0] != ids[1][0]
    assert first.num_rows == off.num_rows == 6


def test_a_broken_slot_is_filled_before_a_sound_one(tmp_path, folder):
    _, first, _, _, _ = two_steps(make_config(tmp_path, folder))
    config = ReplayConfig(max_std=10.0, max_mean=10.0)
    buffer = ReplayBuffer(config)
    group = AgentPayload.of(first).episodes[:3]
    buffer.push(group[0].task.id, store_episode(group[2]), step=0)
    broken = dataclasses.replace(group[1], ending="failed")
    groups = [[group[0], broken, group[2]]]
    assert inject_successes(groups, buffer, config, step=4, streams=Streams(0)) == {0: (1, 4)}
    assert groups[0][1].trajectory.ids == group[2].trajectory.ids
    assert groups[0][0] is group[0]
    other = [[group[0], group[1], group[2]]]
    assert inject_successes(other, buffer, config, step=4, streams=Streams(0)) == {0: (0, 4)}


def test_successes_are_stored_in_the_order_of_their_places(tmp_path, folder, monkeypatch, closing):
    """Not in that of the groups of a process, of which those without a result are missing."""
    recipe = closing(ArpoRecipe(make_config(tmp_path, folder, ReplayConfig(threshold=-1.0))))
    run = recipe.run_groups
    monkeypatch.setattr(recipe, "run_groups", lambda *given: run(*given)[1:])
    recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0, [4, 7]), Step())
    assert {place for (_, place), _ in recipe._fresh} == {7}


def test_ratios_of_fresh_and_replayed_tokens_apart():
    rollouts = Rollouts(
        group=torch.zeros(2, dtype=torch.int64),
        mask=torch.tensor([[1.0, 1.0], [1.0, 0.0]]),
        logp_old=torch.tensor([[-1.0, -1.0], [-2.0, 0.0]]),
        reward=torch.zeros(2),
        extras={"replayed": torch.tensor([0.0, 1.0]), "logp_sampled": torch.tensor([[-1.0, -1.0], [-3.0, 0.0]])},
    )
    found = source_metrics(rollouts, torch.tensor([[-1.0, -2.0], [-2.0, 5.0]]))
    values = {name: metric.value for name, metric in found.items()}
    e = torch.e
    assert values == pytest.approx(
        {
            "replay/ratio/fresh": (1 + 1 / e) / 2,
            "replay/log_ratio/fresh": -0.5,
            "replay/kl/fresh": (1 / e) / 2,
            "replay/ratio/replayed": 1.0,
            "replay/log_ratio/replayed": 1.0,
            "replay/kl/replayed": e - 2,
        }
    )
    fresh = source_metrics(rollouts.select(torch.tensor([0])), torch.tensor([[-1.0, -2.0]]))
    assert not [name for name in fresh if name.endswith("replayed")]


@pytest.mark.slow
def test_a_resumed_run_replays_the_same_as_an_uninterrupted_one(tmp_path, folder):
    """The buffer is part of the checkpoint: without it the steps after a resume would have nothing to replay."""
    entry = RECIPES["arpo"]
    whole = train(entry, make_config(tmp_path / "whole", folder))
    train(entry, make_config(tmp_path / "parts", folder, steps=1))
    parts = train(entry, make_config(tmp_path / "parts", folder), resume=True)
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").open()] for run in (whole, parts)]
    assert rows[0][1]["replay/injected"] == rows[1][1]["replay/injected"] == 2
    assert rows[0][1]["replay/kl/replayed"] == rows[1][1]["replay/kl/replayed"] > 0
    weights = [(run / "checkpoints/step-000002/model/model.safetensors").read_bytes() for run in (whole, parts)]
    assert weights[0] == weights[1]
