"""From one chunk to the next in evaluations: delays, blending, real-time chunking, and jumps at seams."""

import json

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.training.run import train
from robotics.episodes.collect import ActingSettings, run_episodes
from robotics.episodes.handover import DelaySettings, Handover, action_jumps
from robotics.policies.base.action_policy import ActionChoice
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.flow import FlowActionPolicy, FlowPolicyConfig
from robotics.policies.policy_loading import ActionPolicyConfig
from robotics.sim.episodes import EpisodeSpec
from tests.robotics.line_demos import demonstrate
from tests.robotics.line_sim import LineSim
from tests.robotics.test_cloning import BLIND, clone

EPISODES = [EpisodeSpec("right", "go right", layout) for layout in range(3)]


def numbered(number, size=4):
    """A chunk whose entries say which chunk it is and which entry."""
    return (10 * number + np.arange(size, dtype=np.float32))[None, :, None]


@pytest.mark.parametrize(
    ("delay", "expected"),
    [(0, [[0, 1], [10, 11], [20, 21]]), (1, [[0, 1], [2, 11], [12, 21]]), (2, [[0, 1], [2, 3], [12, 13]])],
)
def test_the_chunk_before_runs_during_the_delay(delay, expected):
    handover = Handover(DelaySettings(delay), taken=2, rows=1)
    executed = [handover.execute(numbered(number), [0]) for number in range(3)]
    assert [part[0, :, 0].tolist() for part in executed] == expected


def test_rows_that_ended_do_not_shift_the_others():
    handover = Handover(DelaySettings(1), taken=2, rows=2)
    handover.execute(np.concatenate([numbered(0), numbered(5)]), [0, 1])
    assert handover.execute(numbered(9), [1])[0, :, 0].tolist() == [52, 91]


def test_real_time_chunking_passes_on_what_is_left():
    handover = Handover(DelaySettings(1, "rtc", 3.0), taken=2, rows=2)
    assert handover.previous([0, 1]) == {}
    handover.execute(np.concatenate([numbered(0), numbered(5)]), [0, 1])
    (given,) = handover.previous([1]).values()
    assert (given.actions[:, :, 0].tolist(), given.delay.tolist(), given.limit) == ([[52, 53]], [1], 3.0)


def test_blending_keeps_the_fixed_actions():
    handover = Handover(DelaySettings(1, "blend"), taken=2, rows=1)
    handover.execute(numbered(0), [0])
    first, second = handover.execute(numbered(1), [0])[0, :, 0]
    assert first == 2
    assert 3 < second < 11


def test_jumps_are_found_at_the_seams():
    # chunks of constant actions: only the seams jump, wherever the delay moves them
    for delay in (0, 1, 2):
        handover = Handover(DelaySettings(delay), taken=2, rows=1)
        parts = [handover.execute(np.full((1, 4, 2), value, np.float32), [0])[0] for value in (0.0, 3.0, 4.0, 9.0)]
        seams, inside = action_jumps([np.concatenate(parts), np.zeros((1, 2))], taken=2, delay=delay)
        np.testing.assert_allclose(seams, np.sqrt(2) * np.array([3, 1, 5])[: 3 if delay < 2 else 2])
        assert not inside.any()
        assert len(seams) + len(inside) == 7


def test_chunks_that_are_too_short_are_refused():
    policy = FlowActionPolicy.build(FlowPolicyConfig(1, 4, hidden=8), ["go"])
    for steps, taken in ((1, 0), (2, 1), (2, 3), (3, 2)):
        with pytest.raises(UserError, match="chunks have 4 control steps"):
            DelaySettings(steps).check(policy, taken)
    with pytest.raises(UserError, match=r"set acting.n_action_steps to 1\.\.3"):
        DelaySettings(0, "rtc").check(policy, 0)
    DelaySettings(2, "rtc").check(policy, 2)
    DelaySettings().check(policy, 0)


class Slow:
    """Moves by the number of the observation; remembers what it was given."""

    chunk, action_size, inpaints = 4, 1, True

    def __init__(self):
        self.given = []

    def act(self, batch, generator, temperature=1.0, greedy=False, previous=None):
        self.given.append(previous)
        actions = torch.full((len(batch), 4, 1), 0.1 * len(self.given))
        return ActionChoice(actions, actions, torch.zeros(len(batch), 1))


def test_episodes_run_with_a_delay():
    settings = ActingSettings(n_action_steps=2)
    plain, late = (
        run_episodes(Slow(), LineSim(), EPISODES, settings, [1, 2, 3], greedy=True, delay=delay)
        for delay in (DelaySettings(), DelaySettings(1))
    )
    np.testing.assert_allclose(plain.actions[0][:6, 0], [0.1, 0.1, 0.2, 0.2, 0.3, 0.3], rtol=1e-6)
    np.testing.assert_allclose(late.actions[0][:6, 0], [0.1, 0.1, 0.1, 0.2, 0.2, 0.3], rtol=1e-6)
    policy = Slow()
    run_episodes(policy, LineSim(), EPISODES, settings, [1, 2, 3], greedy=True, delay=DelaySettings(1, "rtc"))
    assert policy.given[0] is None
    np.testing.assert_allclose(policy.given[1].actions[0, :, 0], [0.1, 0.1], rtol=1e-6)
    policy.inpaints = False
    with pytest.raises(UserError, match="cannot inpaint"):
        run_episodes(policy, LineSim(), EPISODES, settings, [1, 2, 3], delay=DelaySettings(1, "rtc"))


def test_the_first_chunk_of_real_time_chunking_is_the_plain_one():
    config = FlowPolicyConfig(1, 4, hidden=16, encoder=EncoderConfig(**BLIND | {"state_size": 2}))
    policy = FlowActionPolicy.build(config, ["go right"])
    settings = ActingSettings(n_action_steps=2)
    plain, guided = (
        run_episodes(policy, LineSim(), EPISODES, settings, [1, 2, 3], greedy=True, delay=delay)
        for delay in (None, DelaySettings(0, "rtc"))
    )
    for one, other in zip(plain.actions, guided.actions, strict=True):
        assert np.array_equal(one[:2], other[:2])
        assert not np.array_equal(one, other)


def test_an_evaluation_reports_the_jumps(tmp_path):
    options = {"hidden": 16, "encoder": BLIND}
    config = clone(
        tmp_path,
        demonstrate(tmp_path / "demos"),
        model=ActionPolicyConfig(kind="flow", chunk=4, options=options),
        acting=ActingSettings(n_action_steps=2, scale="bounds_q99"),
        trainer={"steps": 1},
    )
    config.evaluation.delay = DelaySettings(1, "rtc")
    run = train(find_recipe("robot_clone"), config)
    last = json.loads((run / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["episode/jump_at_seams/greedy"] > 0
    assert last["episode/jump_inside/greedy"] > 0


def test_an_ensemble_has_no_delay(tmp_path):
    config = clone(tmp_path, tmp_path / "demos")
    config.acting.ensemble = 0.1
    config.evaluation.delay = DelaySettings(1)
    with pytest.raises(ValueError, match=r"acting.ensemble is 0.1.*evaluation.delay"):
        config.validate()
