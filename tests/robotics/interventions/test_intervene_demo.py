"""The intervention demo in small: the chain of its stages, not their results."""

from pathlib import Path

import numpy as np
import pytest

from mmrl.training import run as stages
from robotics.interventions.record import read_attempts
from robotics.toy import intervene_demo as demo

ROOT = Path(__file__).parents[3]
SMALL = [
    *("sim.horizon=8", "sim.workers=1", "tracking.quiet=true", "tracking.tensorboard=false"),
    *("demonstrations.build_options.episodes=2", "evaluation.videos=0", "evaluation.every=2", "trainer.steps=4"),
    *("trainer.tasks_per_step=8", "eval_data.held_out.layouts=2"),
    "model.options.encoder={width: 32, heads: 2, layers: 1, image_size: null}",
]
ROUNDS = ["interventions.first=2", "interventions.every=1", "interventions.episodes=2"]


@pytest.mark.slow
def test_the_whole_chain_runs_and_films_who_had_control(tmp_path, backend, monkeypatch):
    monkeypatch.chdir(ROOT)

    def finish(config, run_dir, overrides=()):
        rounds = ROUNDS if config.name == "demo_hg_dagger.yaml" else []
        return stages.finish_run(config, run_dir, [*overrides, *SMALL, *rounds])

    monkeypatch.setattr(demo, "finish_run", finish)
    monkeypatch.setattr(demo, "FILM_HEIGHT", 48)
    lines = demo.run(tmp_path / "demo")
    assert lines[0].startswith("success on 2 held-out initial states")
    assert [line.split()[0] for line in lines[2:4]] == ["2", "4"]
    assert all(line.count("%") == 2 for line in lines[2:4])
    assert [line.split(":")[0].strip() for line in lines[5:7]] == ["round  1", "round  2"]
    assert len(read_attempts(tmp_path / "demo" / "hg_dagger" / "interventions")) == 4
    assert (tmp_path / "demo" / "interventions.mp4").stat().st_size > 0
    assert (tmp_path / "demo" / "hg_dagger" / "report.html").is_file()


def test_the_frame_is_orange_while_the_person_has_control():
    frames = np.zeros((4, 48, 64, 3), np.uint8)
    marked = demo._marked(frames, [False, True, False], "round 1", True, 10)
    # the first picture is before any action, the last one is held for a second
    assert len(marked) == 3 + 10
    assert [tuple(picture[0, 0]) == demo.ORANGE for picture in marked[:4]] == [False, False, True, False]
