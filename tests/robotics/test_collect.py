import numpy as np
import pytest
import torch

from mmrl.errors import RunError
from mmrl.fields import check_config
from robotics.episodes.collect import ActingSettings, replay_episode, run_episodes
from robotics.episodes.payload import EpisodePayload
from robotics.policies.base.action_tokens import draw_rows
from robotics.policies.module import ModuleAdapter
from robotics.sim.episodes import EpisodeSpec
from tests.robotics.line_policies import GaussianWalker
from tests.robotics.line_sim import LineSim


def specs(count, task="right", split="train"):
    return [EpisodeSpec(task, f"go {task}", layout, split) for layout in range(count)]


def run(sim, episodes, bias=0.5, chunk=3, seed=0, **options):
    policy = ModuleAdapter(ChunkWalker(chunk, bias), 1, chunk, decisions=chunk)
    settings = options.pop("settings", ActingSettings())
    found = run_episodes(policy, sim, episodes, settings, torch.Generator().manual_seed(seed), **options)
    return policy, found


class ChunkWalker(GaussianWalker):
    """K independent steps from one state, with a log-probability each."""

    def __init__(self, chunk, bias):
        super().__init__(bias)
        self.chunk = chunk

    def act(self, obs, generator, temperature=1.0, greedy=False):
        mean = self.net(obs["state"])[:, None].expand(-1, self.chunk, 1)
        noise = torch.zeros(mean.shape) if greedy else draw_rows(torch.randn, mean.shape, generator)
        actions = mean + self.log_std.exp() * temperature * noise
        return actions, self.log_probs(obs, actions, temperature)

    def log_probs(self, obs, actions, temperature=1.0):
        mean = self.net(obs["state"])[:, None]
        return torch.distributions.Normal(mean, self.log_std.exp() * temperature).log_prob(actions)[..., 0]


def test_episodes_are_returned_in_order_with_executed_actions():
    sim = LineSim()
    _, found = run(sim, specs(6))
    payload = found.payload
    assert payload.steps.shape[0] == 6
    for row, spec in enumerate(specs(6)):
        place = 0.0
        for step, action in enumerate(found.actions[row][:, 0]):
            place += 0.1 * float(np.clip(action, -1, 1))
            if step % 3 == 2 and step + 1 < len(found.actions[row]):
                assert payload.states[row, step // 3 + 1, 0] == pytest.approx(place, abs=1e-5)
        assert payload.last_state[row, 0] == pytest.approx(place, abs=1e-5)
        assert len(found.actions[row]) == payload.lengths[row] <= sim.horizon
        reached = abs(place - float(payload.last_state[row, 1])) < 0.1
        assert bool(payload.success[row]) == reached
        assert payload.episodes[row] == spec


def test_an_episode_does_not_depend_on_those_that_run_beside_it():
    episodes, seeds = specs(4), [11, 12, 13, 14]
    policy = ModuleAdapter(ChunkWalker(3, 0.5), 1, 3, decisions=3)
    together = run_episodes(policy, LineSim(), episodes, ActingSettings(), seeds)
    assert len(set(together.payload.lengths.tolist())) > 1
    for row in (3, 1):
        alone = run_episodes(policy, LineSim(), [episodes[row]], ActingSettings(), [seeds[row]])
        np.testing.assert_allclose(alone.actions[0], together.actions[row], atol=1e-6)


def test_log_probabilities_are_those_of_the_policy():
    policy, found = run(LineSim(), specs(5), settings=ActingSettings(temperature=1.3))
    payload = found.payload
    for row in range(5):
        for chunk in range(payload.steps.shape[1]):
            if payload.steps[row, chunk] == 0:
                assert not found.logp[row, chunk].any()
                continue
            observed = {"state": payload.states[row, chunk][None]}
            again = policy.module.log_probs(observed, payload.decisions[row, chunk].reshape(1, 3, 1), 1.3)
            torch.testing.assert_close(found.logp[row, chunk], again[0].detach(), rtol=1e-6, atol=1e-6)


def test_waves_of_a_small_simulator_hold_all_episodes():
    sim = LineSim(capacity=4)
    _, found = run(sim, specs(10))
    assert sim.resets == 3
    assert [episode.layout for episode in found.payload.episodes] == list(range(10))
    goals = found.payload.last_state[:, 1]
    _, whole = run(LineSim(), specs(10))
    torch.testing.assert_close(goals, whole.payload.last_state[:, 1])


def test_broken_rows_are_marked_and_others_continue():
    sim = LineSim(breaks=[2], never_starts=[4])
    _, found = run(sim, specs(6), bias=-1.0)
    assert found.payload.failed.tolist() == [False, False, True, False, True, False]
    assert found.payload.reasons[2] == "it broke"
    assert found.payload.reasons[4] == "would not start"
    assert not bool(found.payload.success[2])
    assert found.payload.lengths[4] == 0


def test_nothing_starts():
    _, found = run(LineSim(never_starts=range(3)), specs(3))
    assert found.payload.failed.all()
    assert found.logp.shape[0] == 3


def test_greedy_takes_no_draw_and_execute_looks_more_often():
    sim = LineSim()
    _, one = run(sim, specs(3), greedy=True, seed=1)
    _, other = run(sim, specs(3), greedy=True, seed=2)
    for a, b in zip(one.actions, other.actions, strict=True):
        np.testing.assert_array_equal(a, b)
    _, often = run(sim, specs(3), greedy=True, settings=ActingSettings(n_action_steps=1))
    assert int((often.payload.steps == 1).sum()) == int(often.payload.lengths.sum())


def test_temporal_ensemble_looks_at_every_step():
    _, found = run(LineSim(), specs(3), greedy=True, settings=ActingSettings(ensemble=0.1))
    assert set(found.payload.steps[found.payload.steps > 0].tolist()) == {1}


def test_replay_is_the_same_episode_with_images():
    sim = LineSim()
    _, found = run(sim, specs(4), bias=2.0)
    for row in range(4):
        frames, success = replay_episode(sim, specs(4)[row], found.actions[row])
        assert success == bool(found.payload.success[row])
        assert len(frames) == found.payload.lengths[row] + 1


def test_a_replay_is_cut_into_chunks_and_a_failed_one_gives_no_video():
    sim = LineSim()
    _, found = run(sim, specs(2), bias=0.0)
    asked, step_chunk = [], sim.step_chunk
    sim.step_chunk = lambda actions, record: asked.append(actions.shape[1]) or step_chunk(actions, record)
    frames, success = replay_episode(sim, specs(2)[0], found.actions[0], chunk=5)
    assert max(asked) <= 5
    assert sum(asked) == len(found.actions[0])
    assert success == bool(found.payload.success[0])
    assert len(frames) == len(found.actions[0]) + 1
    still = np.zeros((12, 1), np.float32)
    for broken, reason in (({"breaks": [0]}, "it broke"), ({"never_starts": [0]}, "would not start")):
        with pytest.raises(RunError, match=f"the environment failed: {reason}"):
            replay_episode(LineSim(**broken), specs(1)[0], still)


def test_a_video_has_every_rendered_step_at_its_index():
    _, drawn = run(LineSim(), specs(2), record=True)
    _, plain = run(LineSim(), specs(2))
    for row in range(2):
        assert len(drawn.payload.frames_of(row)) == int(drawn.payload.lengths[row]) + 1
        taken = int((plain.payload.steps[row] > 0).sum())
        assert len(plain.payload.frames_of(row)) == taken + 1
        np.testing.assert_array_equal(drawn.payload.frames_of(row)[-1], plain.payload.frames_of(row)[-1])
        assert plain.payload.path(row).shape == (taken + 1, 2)


def test_payload_selects_and_joins():
    _, one = run(LineSim(), specs(3), bias=3.0)
    _, two = run(LineSim(), specs(2), bias=-3.0)
    joined = EpisodePayload.concat([one.payload, two.payload])
    assert joined.steps.shape[0] == 5
    assert len(joined.episodes) == 5
    part = joined.select(torch.tensor([4, 0]), torch.tensor([4, 0]))
    torch.testing.assert_close(part.last_state, torch.stack([two.payload.last_state[1], one.payload.last_state[0]]))
    assert [episode.layout for episode in part.episodes] == [1, 0]
    np.testing.assert_array_equal(part.frames_of(1), one.payload.frames_of(0))


def test_mismatched_payload_is_refused():
    _, found = run(LineSim(), specs(2))
    with pytest.raises(ValueError, match="success has 3 entries; there are 2 rows in 2 groups"):
        EpisodePayload(**{**vars(found.payload), "success": torch.zeros(3, dtype=torch.bool)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ActingSettings(n_action_steps=-1), "acting.n_action_steps"),
        (ActingSettings(temperature=0), "acting.temperature"),
        (ActingSettings(ensemble=-1), "acting.ensemble"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        check_config(settings, "acting")
