"""The robot demo in small: the chain of its stages, not their results."""

from pathlib import Path

import pytest

from mmrl.training import run as stages
from robotics.toy import robot_demo as demo

ROOT = Path(__file__).parents[2]
SCENE = ["sim.tasks=[reach]", "sim.image_size=32", "sim.horizon=8", "sim.workers=1", "tracking.quiet=true"]
EVALUATION = ["eval_data.held_out.tasks=[reach]", "eval_data.held_out.layouts=2", "evaluation.videos=1"]
LAST = ["evaluation.video_size=48", "evaluation.every=1"]
SMALL = {
    "demo_robot_clone.yaml": [
        "demonstrations.build_options.tasks=[reach]",
        "demonstrations.build_options.episodes=3",
        "demonstrations.build_options.image_size=32",
        "model.options.encoder={width: 32, heads: 2, layers: 1, channels: 8, keypoints: 4}",
        "trainer.steps=4",
        "trainer.tasks_per_step=8",
    ],
    "demo_robot_ppo.yaml": [
        "data.tasks=[reach]",
        "trainer.steps=2",
        "trainer.tasks_per_step=4",
        "trainer.minibatches_per_step=1",
    ],
}


@pytest.fixture
def small(monkeypatch):
    """The demonstration's configurations with overrides that shrink them."""
    pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
    monkeypatch.chdir(ROOT)

    def finish(config, run_dir, overrides=()):
        return stages.finish_run(config, run_dir, [*SCENE, *SMALL[config.name], *overrides, *EVALUATION, *LAST])

    monkeypatch.setattr(demo, "finish_run", finish)
    # the one at the end is enough
    monkeypatch.setattr("mmrl.report.page.write_report", lambda run_dir: None)


def written(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.suffix != ".html"}


def test_the_whole_chain_runs_and_a_second_call_repeats_nothing(tmp_path, small, backend, monkeypatch):
    lines = demo.run(tmp_path / "demo")
    assert lines[0] == "success on 2 held-out initial states (95% interval)"
    names = ("after cloning", "after cloning", "after PPO", "after PPO")
    for line, name, task in zip(lines[1:5], names, ("all", "reach") * 2, strict=True):
        assert line.split(name)[1].split()[0] == task
        assert "greedy" in line
        assert "sampled" in line
        assert "% (" in line
    videos = sorted((tmp_path / "demo" / "ppo" / "videos").glob("*.mp4"))
    assert videos
    assert lines[5].endswith(f"({len(videos)} files)")
    report = Path(lines[6].removeprefix("report: "))
    assert "<html" in report.read_text(encoding="utf-8")
    for part in ("demonstrations", "clone", "ppo"):
        assert (tmp_path / "demo" / part).is_dir()
    before = written(tmp_path / "demo")
    monkeypatch.setattr(stages, "train", lambda *arguments, **options: pytest.fail("a finished stage ran again"))
    again = demo.run(tmp_path / "demo")
    assert again[:5] == lines[:5]
    assert written(tmp_path / "demo") == before
