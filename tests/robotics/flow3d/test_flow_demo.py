"""The 3D flow demo in small: the chain of its parts, not their results."""

from pathlib import Path

import pytest

from mmrl.config import load_run
from mmrl.training import run as stages
from robotics.toy import flow_demo as demo

ROOT = Path(__file__).parents[3]
SMALL = {
    "flow3d_traj_dit.yaml": [
        "data.build_options={scenes: 6, held_out_scenes: 3, image_size: 48, actors: [nobody]}",
        *("model.body={width: 16, heads: 2}", "model.condition={width: 16, heads: 2, channels: 8, keypoints: 2}"),
        *("trainer.steps=2", "trainer.tasks_per_step=4", "evaluation.samples=1", "evaluation.every=0"),
        *("tracking.quiet=true", "tracking.tensorboard=false"),
    ],
    "demo_flow_eval.yaml": [
        "eval_data.unseen_arm={tasks: [place_red], episodes: 1, image_size: 48}",
        "loop.planner.samples=1",
    ],
}


@pytest.fixture
def small(monkeypatch):
    pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[flow3d]'")
    pytest.importorskip("mink", reason="needs pip install 'mmrl-suite[flow3d]'")
    monkeypatch.chdir(ROOT)
    finish = lambda config, folder, given=(): stages.finish_run(config, folder, [*SMALL[config.name], *given])  # noqa: E731
    monkeypatch.setattr(demo, "finish_run", finish)
    monkeypatch.setattr(demo, "load_run", lambda config, given: load_run(config, [*SMALL[config.name], *given]))


def test_the_whole_chain_runs_and_a_second_call_repeats_nothing(tmp_path, small, monkeypatch):
    lines = demo.run(tmp_path / "demo")
    assert lines[0].startswith("predicted flow of 7 held-out clips: ADE ")
    assert lines[1].startswith("other instructions for the same images are followed in ")
    assert lines[2] == "success of the ur5e, not shown in any clip (95% interval)"
    assert [line.split()[0] for line in lines[3:5]] == ["place", "all"]
    assert lines[4].endswith("of 1")
    videos = list((tmp_path / "demo" / "closed_loop" / "videos").glob("*.mp4"))
    assert len(videos) == 1
    for part in ("clips", "world_model/report.html", "closed_loop/report.html"):
        assert (tmp_path / "demo" / part).exists()
    monkeypatch.setattr(stages, "train", lambda *given, **options: pytest.fail("the world model was trained again"))
    monkeypatch.setattr(demo, "evaluate", lambda *given: pytest.fail("the arm was let loose again"))
    again = demo.run(tmp_path / "demo")
    assert again == lines
