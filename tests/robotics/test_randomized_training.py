"""Domain randomisation in training, evaluation and demonstrations."""

import json

import pytest

from mmrl.config import load_run
from mmrl.errors import UserError
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.run import train
from robotics.data import LeRobotReader
from robotics.methods.grpo import RobotGrpoRecipe
from robotics.toy.draw_sheet import draw_sheet
from robotics.toy.tabletop_demos import build_demonstrations
from tests.robotics.test_randomization import PARTS
from tests.robotics.test_robot_configs import CONFIGS
from tests.robotics.tiny_runs import TWO_STEPS, save_tiny_policy

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
TEXTS = ["touch the red cube", "push the red cube into the blue zone"]


def read(folder, name):
    (path,) = folder.glob(name)
    return [json.loads(line) for line in path.open()]


def test_the_randomised_run_takes_two_steps_and_is_evaluated_both_ways(tmp_path, backend):
    overrides = [
        *TWO_STEPS,
        "eval_data.randomized.layouts=1",
        "evaluation.videos=0",
        f"output_dir={tmp_path / 'run'}",
        f"model.path={save_tiny_policy(tmp_path / 'policy', TEXTS)}",
    ]
    entry, config = load_run(CONFIGS[0].with_name("demo_robot_randomized.yaml"), overrides)
    run_dir = train(entry, config)
    assert [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").open()] == [1, 2]
    # An evaluation before the first step and one after the last, of other weights.
    for path in (run_dir / "episodes").glob("held_out-*.jsonl"):
        rows = [json.loads(line) for line in path.open()]
        assert rows
        assert all(row["draw"] is None and "randomization" not in row for row in rows)
    for path in (run_dir / "episodes").glob("randomized-*.jsonl"):
        rows = [json.loads(line) for line in path.open()]
        assert {row["task"] for row in rows} == {"reach", "push"}
        assert len({row["randomization"]["friction"] for row in rows}) == len(rows)


@pytest.mark.parametrize("per", ["group", "episode"])
def test_a_group_shares_its_draw_unless_each_episode_has_its_own(per, tmp_path, backend, closing):
    ranges = ["sim.randomization.friction=[0.5,1.5]", "sim.randomization.mass=[0.5,2.0]"]
    own = [f"output_dir={tmp_path}", f"model.path={save_tiny_policy(tmp_path / 'policy', TEXTS)}"]
    _, config = load_run(
        CONFIGS[0].with_name("tabletop_grpo.yaml"), [*TWO_STEPS, *ranges, *own, f"sim.randomization.per={per}"]
    )
    recipe = closing(RobotGrpoRecipe(config))
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:3], Streams(0), Step())
    frictions = [draw["friction"] for draw in rollouts.payload.drawn]
    assert len(frictions) == 6
    assert len(set(frictions)) == (3 if per == "group" else 6)
    assert (frictions[0] == frictions[1]) == (per == "group")
    assert all(spec.draw is None for specs in recipe.eval_tasks.values() for spec in specs)


def test_a_set_that_asks_for_a_randomisation_that_is_off_is_refused():
    path = CONFIGS[0].with_name("tabletop_grpo.yaml")
    with pytest.raises(
        UserError, match=r"eval_data\.held_out\.randomized is true, but sim\.randomization has no ranges"
    ):
        load_run(path, ["eval_data.held_out.randomized=true"])
    with pytest.raises(UserError, match=r"sim\.randomization\.mass"):
        load_run(path, ["sim.randomization.mass=[-1,1]"])
    with pytest.raises(
        UserError, match=r"sim\.randomization\.per is 'episode', but no episodes are sampled during training"
    ):
        load_run(CONFIGS[0].with_name("tabletop_clone.yaml"), ["sim.randomization.per=episode"])


def test_demonstrations_hold_the_observations_and_record_the_draws(tmp_path, backend):
    ranges = {"camera": {"position_m": 0.05}, "mass": [0.5, 2.0], "sensor_noise": {"position_m": 0.01}}
    for name, options in (("plain", {}), ("varied", {"randomization": ranges})):
        build_demonstrations(str(tmp_path / name), tasks=["reach"], episodes=3, image_size=32, **options)
    plain, varied = (LeRobotReader(tmp_path / name).episode(0) for name in ("plain", "varied"))
    lines = read(tmp_path / "varied", "meta/randomization.jsonl")
    assert [line["episode_index"] for line in lines] == [0, 1, 2]
    assert len({line["drawn"]["mass.red_cube"] for line in lines}) == 3
    assert not (tmp_path / "plain/meta/randomization.jsonl").exists()
    # The same initial state, measured with noise and seen by another camera.
    assert 0 < abs(plain.state[0, :3] - varied.state[0, :3]).max() < 0.06
    assert (plain.state[0, 5:10] == varied.state[0, 5:10]).all()
    assert abs(plain.images["front"][0].astype(int) - varied.images["front"][0]).mean() > 1
    with pytest.raises(UserError, match="did you mean 'friction'"):
        build_demonstrations(str(tmp_path / "other"), randomization={"fricton": [1, 2]})


def test_a_sheet_shows_the_nominal_scene_first(backend):
    _, run = load_run(CONFIGS[0].with_name("demo_robot_randomized.yaml"), ["sim.image_size=32"])
    sheet = draw_sheet(run.sim, "push", 3, images=5, columns=3)
    assert sheet.shape == (67, 102, 3)
    assert (sheet[35:, 70:] == 255).all()
    _, plain = load_run(CONFIGS[0].with_name("demo_robot_ppo.yaml"), ["sim.image_size=32"])
    with pytest.raises(UserError, match=r"needs sim\.randomization with a range"):
        draw_sheet(plain.sim, "push", 3)
    assert PARTS.keys() >= set(run.sim.randomization.active())
