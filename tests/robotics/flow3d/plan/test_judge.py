"""Verdicts of the scenes' own criterion on true and on wrong flow."""

import dataclasses

import numpy as np
import pytest

from robotics.flow3d.objects.criteria import CriteriaOutcome
from robotics.flow3d.objects.demonstrations import FlowDemonstrationConfig, demonstrations
from robotics.flow3d.objects.flow_tasks import FLOW_TASKS
from robotics.flow3d.objects.scene import SceneConfig
from robotics.flow3d.plan.judge import CriteriaVerifier, FlowJudge, WeightedVerifierConfig
from robotics.flow3d.plan.result import PlanFacts, Verdict
from robotics.flow3d.rigid_motion import ObjectMotion

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")


def test_the_oracle_accepts_true_flow_of_every_task_and_rejects_that_of_another(closing):
    config = FlowDemonstrationConfig(actors=("nobody",), scene=SceneConfig(width=96, height=96))
    judge = closing(FlowJudge([WeightedVerifierConfig(kind) for kind in ("oracle", "geometric", "always")]))
    clips = {clip.meta["task"]: clip for clip in demonstrations(range(len(FLOW_TASKS)), config)}
    assert set(clips) == set(FLOW_TASKS)
    for task, clip in clips.items():
        stopped = clip.flow.copy()
        stopped[2:] = stopped[1]  # on the way, before anything is done
        right, wrong = judge.judge(clip, np.stack([clip.flow, stopped]))
        assert right["oracle"].ok, task
        assert not wrong["oracle"].ok, task
        assert right["always"].ok
        assert right["oracle"].score == 1.0
        assert 0.0 < wrong["oracle"].score < 1.0
        assert "tolerances" in wrong["oracle"].reason
    # again, so that scenes are rebuilt for the clip that is asked about
    assert all(judge.judge(clip, clip.flow[None])[0]["oracle"].ok for clip in clips.values())
    blank = clips["place_red"]
    empty = np.zeros_like(blank.observation.mask)
    blank = dataclasses.replace(blank, observation=dataclasses.replace(blank.observation, mask=empty))
    verdict = judge.judge(blank, blank.flow[None])[0]["oracle"]
    assert verdict.ok is None
    assert verdict.reason.startswith("no_moving_object")


def test_the_oracles_score_measures_the_distance_to_each_criterion():
    def verdict(**errors):
        facts = PlanFacts(ObjectMotion(np.eye(4)[None], np.zeros((1, 3)), None))
        blank = np.zeros((2, 2, 3), np.uint8)
        return CriteriaVerifier(lambda T: CriteriaOutcome(errors)).verify(blank, blank, "", facts)

    assert verdict(near=0.2, level=0.99) == Verdict(True, 1.0, "all criteria are met")
    assert verdict(near=1.0).ok is False, "an error of one tolerance is one too many"
    two = verdict(near=4.0, level=2.0, upright=0.5)
    assert (two.ok, two.reason) == (False, "near: 4.0 tolerances; level: 2.0 tolerances")
    assert two.score == pytest.approx(1 / 8)
    assert verdict(near=3.0, level=2.0).score > two.score
    assert verdict(released=np.inf).score == 0.0
