"""Closed loop: episodes, metrics of runs, and `mmrl evaluate`."""

import json

import numpy as np
import pytest

from mmrl.comparison.verify import verify
from mmrl.config import load_run
from mmrl.errors import ConfigError, UserError
from mmrl.runs.statistics import wilson_interval
from mmrl.training.run import evaluate
from robotics.flow3d.geometry import apply_pose, inverse_pose, lift, project

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[flow3d]'")
pytest.importorskip("mink", reason="needs pip install 'mmrl-suite[flow3d]'")

from robotics.flow3d.closed_loop.flow_episodes import (  # noqa: E402
    FlowEpisodesConfig,
    LoopConfig,
    TrueFlow,
    list_episodes,
)
from robotics.flow3d.closed_loop.measure import evaluate_flow, loop_metrics, loop_table  # noqa: E402
from robotics.flow3d.closed_loop.runner import FlowEpisodeRunner  # noqa: E402
from robotics.flow3d.objects.demonstrator import Demonstrator  # noqa: E402
from robotics.flow3d.objects.flow_tasks import FLOW_TASKS  # noqa: E402
from robotics.flow3d.plan.judge import VerifierConfig  # noqa: E402

PLACE = FlowEpisodesConfig(tasks=["place_red"], arms=["free_gripper"], episodes=1, image_size=64)


class Listens:
    """Moves points straight to the instructed goal, or, if `deaf`, always to the same position."""

    def __init__(self, goals, deaf_to=None):
        self.goals, self.deaf_to = goals, deaf_to

    def predict(self, observation, points, samples=1, seed=0):
        goal = np.array(self.goals[self.deaf_to or observation.instruction])
        start = apply_pose(observation.T_world_cam, lift(points, observation.K).reshape(-1, 3))
        shares = np.linspace(0, 1, 6)[1:, None, None]
        ways = start + shares * (goal - start.mean(0)) + np.sin(np.pi * shares) * np.array([0, 0, 0.1])
        uvz = project(apply_pose(inverse_pose(observation.T_world_cam), ways), observation.K).reshape(5, *points.shape)
        return np.repeat(np.concatenate([uvz, np.ones((*uvz.shape[:-1], 1))], -1)[None], samples, axis=0)


def goals_of(episode):
    with FlowEpisodeRunner(LoopConfig(), TrueFlow) as runner:
        scene = runner.scene(episode)
        mask = scene.object_mask()
        uv = np.argwhere(mask)[:, ::-1] + 0.5
        return Demonstrator(scene).goals(np.concatenate([uv, scene.true_depth()[mask][:, None]], -1))


def test_episodes_are_paired_over_arms_and_hold_out_the_requested_parts():
    config = FlowEpisodesConfig(tasks=["pour", "open_red"], arms=["panda", "gen3"], episodes=3, objects="held_out")
    found = list_episodes(config)
    assert len(found) == 12
    assert [(each.scene.task, each.scene.actor) for each in found[:4]] == [
        ("pour", "panda"),
        ("open_red", "panda"),
        ("pour", "gen3"),
        ("open_red", "gen3"),
    ]
    assert all(FLOW_TASKS[each.scene.task].shapes[each.scene.shape].held_out for each in found)
    assert {each.scene.shape for each in found if each.scene.task == "pour"} == {"jug", "square_cup"}
    numbers = {arm: [each.number for each in found if each.scene.actor == arm] for arm in config.arms}
    assert numbers["panda"] == numbers["gen3"] == [0, 0, 1, 1, 2, 2]
    assert len({each.id for each in found}) == 12
    with pytest.raises(ConfigError, match=r"arms is \['sawyer'\]; allowed: panda"):
        list_episodes(FlowEpisodesConfig(arms=["sawyer"]))


def test_true_flow_does_the_task_and_has_no_error():
    metrics, (row,) = evaluate_flow(TrueFlow, list_episodes(PLACE))
    assert row["success"], (row["failure"], row["detail"], row["failed_criteria"])
    assert not row["failed"]
    assert row["ade_cm"] == pytest.approx(0, abs=1e-6)
    assert [each["meets"] for each in row["tries"]] == [True]
    assert row["swaps"] == []
    assert metrics["success/closed_loop"] == metrics["success/of_families"] == 1
    assert metrics["verifier/precision"] == metrics["verifier/recall"] == 1


OWN_ARM = """
import dataclasses
from robotics.flow3d.objects.scene import FLOW_ARMS

def mine():
    return dataclasses.replace(FLOW_ARMS["gen3"], name="mine")

def clawless():
    return dataclasses.replace(FLOW_ARMS["gen3"], gripper="claw")

def nowhere():
    return dataclasses.replace(FLOW_ARMS["gen3"], file="/no/arm.xml")

def none():
    return "gen3"
"""


@pytest.mark.slow
def test_an_arm_of_ones_own_does_the_task(tmp_path):
    (tmp_path / "arms.py").write_text(OWN_ARM)
    arm = f"{tmp_path}/arms.py:mine"
    episodes = list_episodes(FlowEpisodesConfig(tasks=["open_red"], arms=[arm, "gen3"], episodes=1))
    assert [episode.id.split("/")[1] for episode in episodes] == ["mine", "gen3"]
    metrics, rows = evaluate_flow(TrueFlow, episodes)
    assert [(row["arm"], row["success"]) for row in rows] == [("mine", True), ("gen3", True)]
    assert metrics["success/closed_loop/arm=mine"] == 1


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ("clawless", r"the arm gen3 .*'claw'"),
        ("nowhere", "the arm gen3 cannot be read from /no/arm.xml"),
        ("none", "arms.py:none returned a str; expected an ArmModel"),
        ("nothing", "has no 'nothing'"),
        ("mine mine", "with the names mine, mine; list each arm once"),
    ],
)
def test_an_own_arm_that_cannot_work_is_named(tmp_path, functions, message):
    (tmp_path / "arms.py").write_text(OWN_ARM)
    arms = [f"{tmp_path}/arms.py:{function}" for function in functions.split()]
    with pytest.raises(UserError if len(arms) == 1 else ValueError, match=message):
        list_episodes(FlowEpisodesConfig(tasks=["open_red"], arms=arms))


@pytest.mark.parametrize(("deaf", "followed"), [(False, [True, True]), (True, [False, False])])
def test_the_language_swap_shows_whether_a_model_follows_instructions(deaf, followed):
    (episode,) = list_episodes(PLACE)
    text = FLOW_TASKS["place_red"].instruction
    settings = LoopConfig(verifier=VerifierConfig(kind="oracle"))
    metrics, (row,) = evaluate_flow(Listens(goals_of(episode), text if deaf else None), [episode], settings)
    assert row["swaps"] == followed
    assert metrics["accuracy/language_swap"] == float(not deaf)
    assert row["tries"][0]["ok"] is True
    assert 0 < row["ade_cm"] < 20


def test_an_unreachable_plan_is_a_named_failure_and_a_broken_episode_is_counted_separately():
    class Far:
        def predict(self, observation, points, samples=1, seed=0):
            raise OSError("no weights")

    def breaks(robot):
        raise RuntimeError("out of memory")

    episodes = list_episodes(PLACE)
    metrics, (row,) = evaluate_flow(Far(), episodes, LoopConfig(language_swap=False))
    assert (row["failed"], row["success"], row["failure"]) == (False, False, "model_failed")
    assert metrics["plan/ended/model_failed"] == 1
    assert metrics["success/closed_loop"] == 0
    metrics, (row,) = evaluate_flow(breaks, episodes)
    assert row["failed"]
    assert row["reason"] == "RuntimeError: out of memory"
    assert metrics["episode/failed/closed_loop"] == 1
    assert np.isnan(metrics["success/closed_loop"])
    assert "1 error" in loop_table([row])


def made(success, *, task="pour", arm="panda", tries=(), failed=False, failure="", swaps=()):
    known = {"failed": failed, "success": success, "failure": failure, "failed_criteria": ["tilted"], "reason": ""}
    about = {"task": task, "family": FLOW_TASKS[task].family, "arm": arm, "shape": "mug", "layouts": "held_out"}
    flow = {"ade_cm": 2.0 if success else None, "fde_cm": 3.0, "rotation_deg": 5.0, "swaps": list(swaps)}
    judged = [{"ok": ok, "meets": meets} for ok, meets in tries]
    return {**known, **about, **flow, "colours": "train", "background": "train", "tries": judged}


def test_metrics_by_hand():
    rows = [
        made(True, tries=[(True, True)], swaps=[True, True]),
        made(False, tries=[(False, True), (True, False)], failure="unreachable", swaps=[False, True]),
        made(True, task="open_red", tries=[(True, True), (None, True)]),
        made(False, task="open_red", arm="ur5e", tries=[(False, False)]),
        made(False, failed=True),
    ]
    found = loop_metrics(rows)
    assert found["success/closed_loop"] == 0.5
    assert found["success/closed_loop/low"] == pytest.approx(0.15004, abs=1e-4)  # Wilson, 2 of 4
    assert found["success/closed_loop/arm=panda"] == pytest.approx(2 / 3)
    assert found["success/closed_loop/family=drawer"] == 0.5
    assert found["success/of_families"] == 0.5
    assert found["verifier/precision"] == pytest.approx(2 / 3)
    assert found["verifier/recall"] == pytest.approx(2 / 3)
    assert found["accuracy/language_swap"] == 0.75
    assert found["accuracy/language_swap/low"] == wilson_interval(1.5, 2)[0]  # of two episodes, not of four answers
    assert found["flow/ade_cm"] == 2
    assert found["plan/tries"] == 1.5
    assert found["plan/ended/unreachable"] == 1
    assert found["episode/failed/closed_loop"] == 1
    assert "success/closed_loop/shape=mug" not in found  # all have it
    lines = loop_table(rows).splitlines()
    assert lines[1].split()[:3] == ["pour", "panda", "1/2"]
    assert lines[-1].split()[:2] == ["all", "2/4"]


def test_mmrl_evaluate_writes_videos_and_a_report_and_runs_no_episode_twice(tmp_path, monkeypatch):
    overrides = [
        f"output_dir={tmp_path / 'eval'}",
        "model.path=truth",
        "eval_data={arms: {arms: [free_gripper], tasks: [place_red], episodes: 1, image_size: 48}}",
        *(f"eval_data.{name}={{tasks: [place_red], arms: [free_gripper], episodes: 1}}" for name in ("objects",)),
        "evaluation.videos=1",
    ]
    entry, config = load_run("configs/robotics/flow3d_eval.yaml", overrides)
    del config.eval_data["background"], config.eval_data["objects"]
    found = evaluate(entry, config)
    assert found["arms/success/closed_loop"] == 1
    folder, lines = tmp_path / "eval", []
    assert "<html" in (folder / "report.html").read_text(encoding="utf-8")
    (video,) = (folder / "videos").glob("step-000000-arms-place_red-free_gripper-*.mp4")
    assert video.stat().st_size > 10_000
    cloud = folder / "clouds" / f"{video.stem}.html"
    assert cloud.is_file()
    assert f'href="clouds/{cloud.name}"' in (folder / "report.html").read_text(encoding="utf-8")
    (episodes,) = (folder / "episodes").glob("arms-*.jsonl")
    assert json.loads(episodes.read_text())["video"] == f"videos/{video.name}"
    assert verify(folder, lines.append, 1, (), ()) == 0
    assert lines[-1] == "1 of 1 rows are the same: --row 1"
    monkeypatch.setattr(FlowEpisodeRunner, "run", lambda *arguments: pytest.fail("an episode ran again"))
    assert evaluate(entry, config) == found


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.path=''", "model.path is empty"),
        ("loop.verifier.kind=vlm", "verifier.path is empty"),
        ("loop.grasps=[suction]", "allowed: primitive, antipodal"),
        ("evaluation.greedy=true", "have no effect on flow"),
        ("eval_data.arms.arms=[sawyer]", r"arms is \['sawyer'\]"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(override, said):
    with pytest.raises((ConfigError, UserError), match=said):
        load_run("configs/robotics/flow3d_eval.yaml", ["model.path=truth", override])
