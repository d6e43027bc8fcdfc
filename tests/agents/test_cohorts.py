"""Cohorts wait for their own environments only, and what they compute does not depend on how long these take."""

import contextlib
import itertools
import math

import pytest
import torch

from mmrl.agents import agent_recipe
from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe, choose_episodes
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.environment import ActionConfig
from mmrl.agents.methods.clone import AgentCloneConfig
from mmrl.agents.rollout.cohorts import split_cohorts
from mmrl.agents.rollout.episodes import AgentPayload, Episode, EpisodeConfig
from mmrl.agents.rollout.runner import EpisodeRunner
from mmrl.errors import UserError
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.trainer import collect_metrics
from tests.agents.runs import run_config
from tests.agents.slow_pool import SlowPool
from tests.rounding import assert_equal_up_to_rounding

pytestmark = pytest.mark.usefixtures("every_answer_acts")


class Play:
    """Episodes of two tasks with made-up seconds of their environments."""

    def __init__(self, monkeypatch, config, seed, dynamic=False, **slow):
        self.batches, self.patches, pools = [], [], []

        def open_pool(*given):
            pools.append(SlowPool(*given, seed=seed, **slow))
            return pools[-1]

        answers = EpisodeRunner._answers

        def noted(runner, running, turns, greedy):
            self.batches.append(
                sorted((slot.generator.initial_seed(), slot.episode.trajectory.turns) for slot in running.values())
            )
            return answers(runner, running, turns, greedy)

        with monkeypatch.context() as patched, contextlib.ExitStack() as opened:
            patched.setattr(agent_recipe, "EnvPool", open_pool)
            patched.setattr(EpisodeRunner, "_answers", noted)
            recipe = opened.enter_context(contextlib.closing(AgentRecipe(config)))
            if dynamic:
                config.episode.batching = "dynamic"
            tower = recipe.policy.network.model.visual
            hook = tower.register_forward_hook(lambda _, inputs, output: self.patches.append(len(inputs[0])))
            self.rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
            hook.remove()
            with torch.no_grad():
                self.logp = recipe.scores(recipe.policy, self.rollouts, frozenset({"logp"})).logp
            self.reward = recipe.score(self.rollouts, Step()).reward
            self.metrics = collect_metrics(recipe, self.rollouts, Step())
        (self.pool,) = pools
        self.episodes = AgentPayload.of(self.rollouts).episodes
        self.ids = [episode.trajectory.ids for episode in self.episodes]


def make_config(tmp_path, folder, cohort, workers=6, samples=3, spare=0, **kwargs):
    config = run_config(
        AgentConfig,
        tmp_path,
        folder,
        kwargs={"length": 4} | kwargs,
        workers=workers,
        steps={"samples_per_task": samples},
        episode=EpisodeConfig(cohort=cohort, spare=spare),
    )
    config.validate()
    return config


@pytest.mark.parametrize(("cohort", "workers"), [(1, 4), (2, 4)])
def test_a_run_repeats_bit_for_bit_however_long_environments_take(tmp_path, folder, monkeypatch, cohort, workers):

    def seconds(slow):
        # the other half of the rows is slow, so that cohorts come in another order
        return lambda row, number, generator: generator.uniform(0.1, 1.0) + 1.0 * ((row < 2) == slow)

    config = make_config(tmp_path, folder, cohort, workers)
    one, other = (Play(monkeypatch, config, seed, seconds=seconds(bool(seed))) for seed in (0, 1))
    assert one.pool.now != other.pool.now
    assert one.ids == other.ids
    for name in ("logp_old", "mask"):
        assert torch.equal(getattr(one.rollouts, name), getattr(other.rollouts, name))
    assert torch.equal(one.reward, other.reward)
    # of every pass, not only of the numbers, which may agree by luck
    assert sorted(one.batches) == sorted(other.batches)
    assert max(map(len, one.batches)) == cohort
    assert sorted(one.patches) == sorted(other.patches)
    assert torch.equal(one.logp, other.logp)
    assert_equal_up_to_rounding(one.logp, one.rollouts.logp_old)


def test_cohorts_change_no_token_and_keep_groups_together(tmp_path, folder, monkeypatch):
    whole, *parts = (Play(monkeypatch, make_config(tmp_path, folder, cohort), 0) for cohort in (None, 6, 2, 1))
    assert all(part.ids == whole.ids for part in parts)
    assert torch.equal(parts[0].rollouts.logp_old, whole.rollouts.logp_old), "one cohort of all rows"
    assert (max(map(len, whole.batches)), max(map(len, parts[2].batches))) == (6, 1)
    for part in parts:
        assert_equal_up_to_rounding(part.rollouts.logp_old, whole.rollouts.logp_old)
        assert not any(AgentPayload.of(part.rollouts).contexts), "the group's episodes begin with one prompt"


def test_an_episode_waits_for_its_own_environment_only(tmp_path, folder, monkeypatch):

    def seconds(row, number, generator):
        return 2.0 if number == row % 4 else 0.1

    alone, pairs, together = (
        Play(monkeypatch, make_config(tmp_path, folder, cohort), 0, seconds=seconds).pool for cohort in (1, 2, None)
    )
    assert [pool.now for pool in (alone, pairs, together)] == pytest.approx([2.3, 4.2, 8.0])
    assert max(together.alone.values()) == pytest.approx(2.3)


def test_a_hung_environment_holds_up_no_other_episode(tmp_path, folder, monkeypatch):
    """The first action takes longer than all the others together."""
    first = iter([100.0])
    config = make_config(tmp_path, folder, 1, workers=8, samples=4)
    play = Play(monkeypatch, config, 0, seconds=lambda row, number, generator: next(first, 1.0))
    assert play.pool.now == 103.0
    last = [batch for batch in play.batches if batch[0][0] == play.batches[0][0][0]]
    assert play.batches[-3:] == last[1:], "its later turns come after those of all others"


def test_dynamic_batches_follow_the_environments_and_keep_the_streams(tmp_path, folder, monkeypatch):
    config = make_config(tmp_path, folder, None)

    def seconds(row, number, generator):
        return generator.choice((1.0, 2.0))

    one, other = (Play(monkeypatch, config, seed, dynamic=True, seconds=seconds) for seed in (0, 1))
    assert sorted(one.batches) != sorted(other.batches)
    assert sorted(itertools.chain(*one.batches)) == sorted(itertools.chain(*other.batches))
    assert max(map(len, one.batches)) > 1
    assert one.ids == other.ids
    assert_equal_up_to_rounding(one.rollouts.logp_old, other.rollouts.logp_old)
    assert one.pool.now == pytest.approx(max(one.pool.alone.values()))


def test_lost_episodes_are_replaced_by_index_and_not_by_speed(tmp_path, folder, monkeypatch):
    plain, spare, later = (
        Play(monkeypatch, make_config(tmp_path, folder, 1, samples=4, spare=count, raise_at=2), seed)
        for count, seed in ((0, 0), (4, 0), (4, 1))
    )
    lost = [episode.ending == "failed" for episode in plain.episodes]
    assert 0 < sum(lost) < len(lost)
    assert torch.isfinite(spare.reward).sum() > torch.isfinite(plain.reward).sum()
    assert spare.ids == later.ids, "whichever ended first"
    for start in (0, 4):
        kept = [ids for ids, gone in zip(plain.ids[start : start + 4], lost[start:], strict=False) if not gone]
        assert spare.ids[start : start + len(kept)] == kept
    assert spare.metrics["sim/dropped"] >= sum(lost)
    assert spare.metrics["episode/turns"] == pytest.approx(
        sum(e.trajectory.turns for e in spare.episodes if e.has_result) / sum(e.has_result for e in spare.episodes)
    )


def test_spare_episodes_leave_the_lengths_as_they_are(tmp_path, folder, monkeypatch):
    """Short episodes end first, and still the same ones are kept."""
    plain, spare = (
        Play(monkeypatch, make_config(tmp_path, folder, 1, workers=12, samples=3, spare=count, early=True), 0)
        for count in (0, 3)
    )
    lengths = [[episode.trajectory.turns for episode in play.episodes] for play in (plain, spare)]
    assert lengths[0] == lengths[1]
    assert len(set(lengths[0])) > 1
    assert plain.ids == spare.ids


def test_episodes_are_chosen_in_order():
    def chosen(endings, count):
        group = [Episode(AgentTask("t"), ending=ending) for ending in endings]
        return [group.index(episode) for episode in choose_episodes(group, count)]

    Episode.__eq__ = object.__eq__
    try:
        assert chosen(["truncated", "failed", "terminated", "terminated"], 3) == [0, 2, 3]
        assert chosen(["overflow", "terminated", "terminated"], 2) == [0, 1]
        assert chosen(["failed", "failed", "terminated"], 2) == [0, 2]
    finally:
        del Episode.__eq__


@pytest.mark.parametrize(
    ("count", "rows", "cohort", "expected"),
    [
        (5, 3, None, [([0, 1, 2, 3, 4], 3)]),
        (5, 3, 3, [([0, 1, 2, 3, 4], 3)]),
        (3, 2, 1, [([0], 1), ([1], 1), ([2], 1)]),
        (7, 4, 2, [([0, 1, 4, 5], 2), ([2, 3, 6], 2)]),
        (7, 5, 2, [([0, 1, 5, 6], 2), ([2, 3], 2), ([4], 1)]),
        (2, 6, 2, [([0, 1], 2)]),
    ],
)
def test_episodes_of_cohorts(count, rows, cohort, expected):
    assert split_cohorts(count, rows, cohort) == expected


def test_workers_that_die_lose_only_their_own_episode(tmp_path, folder):
    """Real processes that end in the middle of an episode, in cohorts and all together."""

    def play(cohort):
        config = make_config(tmp_path / str(cohort), folder, cohort, workers=3, samples=4, fail_at=2)
        with contextlib.closing(AgentRecipe(config)) as recipe:
            rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
            return AgentPayload.of(rollouts).episodes, recipe.score(rollouts, Step()).reward, dict(recipe.pool.counts)

    found = {cohort: play(cohort) for cohort in (None, 1)}
    episodes, reward, counts = found[1]
    lost = [episode.ending == "failed" for episode in episodes]
    assert 0 < sum(lost) < len(episodes) == 8
    assert counts["crashed"] == counts["dropped"] == sum(lost)
    assert [math.isnan(value) for value in reward.tolist()] == lost, "never 0"
    for one, other in zip(episodes, found[None][0], strict=True):
        assert (one.ending, one.trajectory.ids, one.rewards) == (other.ending, other.trajectory.ids, other.rewards)


def test_the_idle_share_is_logged(tmp_path, folder, monkeypatch):
    metrics = Play(monkeypatch, make_config(tmp_path, folder, 2), 0).metrics
    assert 0 < metrics["sampler/idle"] < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cohort": 7}, r"episode.cohort is 7, but only environment.workers = 6"),
        ({"cohort": 2, "isolate": False}, r"environment.isolate: false environments run one after another"),
        ({"batching": "dynamic"}, r"needs sampler.engine: vllm"),
    ],
)
def test_cohorts_that_cannot_help_are_refused(tmp_path, folder, changes, message):
    config = make_config(tmp_path, folder, None)
    config.environment.isolate = changes.pop("isolate", True)
    for name, value in changes.items():
        setattr(config.episode, name, value)
    with pytest.raises(ValueError, match=message):
        config.validate()


def test_recipes_without_groups_of_their_own_refuse_spare_episodes(tmp_path, folder):
    clone = run_config(AgentCloneConfig, tmp_path, folder, episode=EpisodeConfig(spare=1))
    clone.actions = ActionConfig(format="tag")
    with pytest.raises(ValueError, match=r"remove episode.spare"):
        clone.validate()

    class Pairs(AgentRecipe):
        def draw_groups(self, policy, tasks, streams):
            raise NotImplementedError

    with pytest.raises(UserError, match=r"chooses the episodes of its groups itself; remove episode.spare"):
        Pairs(make_config(tmp_path, folder, None, spare=1))
