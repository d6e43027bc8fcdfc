"""Somebody inside the environment who replaces the policy's actions, as wrappers of SERL and gym-hil do."""

from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.data import LeRobotReader
from robotics.episodes.collect import ActingSettings
from robotics.interventions.overseers import InsideOverseer, OverseerConfig, open_overseer
from robotics.interventions.record import InterventionRecord
from robotics.interventions.watched import run_watched
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig, open_sim
from tests.robotics.interventions.scripted import AlwaysPolicy, ExpertLine

pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'")
ENVS = Path(__file__).parents[1] / "own_envs.py"
TASK = EpisodeSpec("Helped", "slide", 1)


def helped():
    adapter = {"task": "Helped"}
    return SimConfig(
        "gymnasium", env=f"{ENVS}:Helped", image_size=0, horizon=6, workers=1, options={"adapter": adapter}
    )


def test_actions_that_the_environment_replaced_are_recorded_as_executed(tmp_path):
    sim, overseer = open_sim(helped()), open_overseer(OverseerConfig(kind="environment"))
    policy = AlwaysPolicy(0.0)
    with InterventionRecord(tmp_path / "data", sim) as record:
        (episode,) = run_watched(policy, sim, [TASK], overseer, ActingSettings(), [0])
        record.add(episode)
    # whoever helps in other episodes, such as those of an evaluation, would make them look like the policy's
    sim.reset([TASK])
    sim.step_chunk(np.zeros((1, 2, 1)))
    with pytest.raises(UserError, match="a person's action was executed instead of the policy's"):
        sim.step_chunk(np.zeros((1, 1, 1)))
    # the policy's 0 is 10 cm, in bounds of -10 to 30; 25 cm are 0.75
    assert episode.by_person == [False, False, True, False]
    np.testing.assert_allclose(np.ravel(episode.actions), [0, 0, 0.75, 0])
    assert [float(state[0]) for state in episode.states] == [0, 10, 20, 45]
    assert episode.success
    assert episode.starts == 1
    kept = LeRobotReader(tmp_path / "data").episode(0)
    assert kept.extra["intervention"].ravel().tolist() == episode.by_person
    np.testing.assert_allclose(kept.action.ravel(), [0, 0, 0.75, 0])


def gym_hil(**options):
    adapter = {"task": "Helped", "success_reward": 1.0}
    options = {"adapter": adapter, **options}
    return open_sim(SimConfig("gymnasium", env=f"{ENVS}:GymHil", image_size=0, horizon=6, workers=1, options=options))


@pytest.mark.parametrize("key", ["teleop_action", "action_intervention"])
def test_gym_hil_reports_every_action_and_says_whose_it_is(key):
    sim = gym_hil(key=key)
    (episode,) = run_watched(AlwaysPolicy(0.0), sim, [TASK], InsideOverseer(), ActingSettings(), [0])
    assert episode.by_person == [False, False, True, False]
    np.testing.assert_allclose(np.ravel(episode.actions), [0, 0, 0.75, 0])
    assert episode.success


def test_an_episode_that_the_person_discards_is_not_recorded(tmp_path):
    sim = gym_hil(rerecords=True)
    with InterventionRecord(tmp_path / "data", sim) as record:
        (episode,) = run_watched(AlwaysPolicy(0.0), sim, [TASK], InsideOverseer(), ActingSettings(), [0])
        record.add(episode)
    assert episode.failed
    (line,) = record.attempts
    assert (line["episode_index"], line["reason"]) == (
        None,
        "discarded: a person inside the environment discarded the episode (rerecord_episode)",
    )
    # the environment's process goes on
    (episode,) = run_watched(AlwaysPolicy(-0.5), sim, [TASK], InsideOverseer(), ActingSettings(), [0])
    assert not episode.failed
    assert not sim.counts["restarted"]


def test_without_that_overseer_a_replaced_action_ends_the_run():
    sim = open_sim(helped())
    sim.reset([TASK])
    sim.step_chunk(np.zeros((1, 2, 1)))
    with pytest.raises(UserError, match=r"a person's action was executed instead of .*overseer\.kind=environment"):
        sim.step_chunk(np.zeros((1, 1, 1)))


def test_a_simulator_that_cannot_report_it_is_refused():
    with pytest.raises(UserError, match=r"overseer.kind is environment, which needs sim.kind=gymnasium"):
        InsideOverseer().begin(ExpertLine(), [], [])
