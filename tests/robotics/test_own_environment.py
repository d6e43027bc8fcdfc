"""A user's own Gymnasium environment and policy, as README and docs show it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.settings import TrainerConfig
from robotics.data import LeRobotReader
from robotics.episodes.demonstrations import DemonstrationConfig, load_demonstrations
from robotics.episodes.payload import EpisodeSetConfig
from robotics.episodes.recording import build_demonstrations
from robotics.policies.base.action_statistics import ActionRange
from robotics.policies.policy_loading import ActionPolicyConfig
from robotics.serving import ServeConfig, open_served_policy
from robotics.sim.opening import SimConfig

pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'")

DOCS = Path(__file__).parents[2] / "docs" / "robotics.md"


@pytest.fixture
def example(tmp_path):
    """A folder with the files that the docs show."""
    names = r"my_robot\.py|my_training\.py|my_robot\.yaml"
    blocks = re.findall(rf"```(?:python|yaml)\n# ({names})\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    assert {name for name, _ in blocks} == {"my_robot.py", "my_training.py", "my_robot.yaml"}
    for name, text in blocks:
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_example_of_the_docs_trains(example):
    run(example, "my_training.py")
    assert (example / "runs" / "my-robot" / "report.html").is_file()
    rows = (example / "runs" / "my-robot" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 20
    last = json.loads((example / "runs" / "my-robot" / "evaluations.jsonl").read_text().splitlines()[-1])
    assert last["success/sampled"] >= 0.8, "the example learns, wherever its new policy begins"


@pytest.mark.slow
def test_the_example_of_the_docs_runs_from_the_command_line_and_its_folder_can_be_moved(example):
    run(example, "-m", "mmrl.cli", "train", "my_robot.yaml", "trainer.steps=2", "sim.workers=2")
    moved = example / "elsewhere"
    (example / "runs" / "my-robot").rename(moved)
    said = run(example, "-m", "mmrl.cli", "evaluate", "elsewhere")
    assert "20 of 20 episodes were read from" in said  # those of the last evaluation of the run
    assert not (example / "runs" / "my-robot").exists()


ENVS = Path(__file__).with_name("own_envs.py")
SLIDER = {"kind": "gymnasium", "env": f"{ENVS}:Slider", "horizon": 4, "image_size": 8, "workers": 2}


def test_successful_episodes_of_an_expert_become_demonstrations(tmp_path):
    about = {"sim": SLIDER, "expert": f"{ENVS}:slide", "episodes": 3}
    folder = build_demonstrations(str(tmp_path / "demos"), **about)
    reader = LeRobotReader(folder)
    assert (len(reader), reader.info["fps"], reader.info["robot_type"]) == (3, 7, "Slider")
    found = load_demonstrations(DemonstrationConfig(path=str(folder)))
    assert found.instructions == ["slide"] * 3
    for states, actions, images in zip(found.states, found.actions, found.images, strict=True):
        np.testing.assert_array_equal(states, [[0, 50], [25, 50]])
        np.testing.assert_allclose(actions, [[0.75], [1.0]], atol=1e-6)  # of -10..30, clipped to its bounds
        assert images.shape == (2, 8, 8, 3)
        assert np.abs(images.mean((1, 2, 3)) - [0, 25]).max() < 3  # a video rounds
    with pytest.raises(UserError, match="demos already exists"):
        build_demonstrations(str(folder), **about)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert": f"{ENVS}:fails"}, r"in 0 of 4 episodes of 'Slider', 8 are required; 4 .* failed.*ZeroDivision"),
        ({"expert": f"{ENVS}:wide"}, r"the expert's action is \[0\. 0\.\]; expected 1 finite number"),
        ({"expert": f"{ENVS}:nothing"}, "has no 'nothing'"),
        ({"expert": ""}, "has no built-in expert"),
        ({"expert": f"{ENVS}:slide", "first_layout": 1, "episodes": 0}, "episodes is 0; must be at least 1"),
        ({"sim": {**SLIDER, "envs": 1}}, "envs"),
        (
            {"sim": {"kind": "tabletop", "tasks": ["reach"]}, "expert": f"{ENVS}:slide"},
            "only gymnasium takes an expert",
        ),
    ],
)
def test_an_expert_that_cannot_work_is_named(tmp_path, changes, message):
    about = {"sim": SLIDER, "expert": f"{ENVS}:slide", "episodes": 8} | changes
    with pytest.raises(UserError, match=message):
        build_demonstrations(str(tmp_path / "demos"), **about)
    assert not list(tmp_path.iterdir())


def recipe_of(tmp_path, name, env):
    sim = SimConfig(
        kind="gymnasium",
        env=f"{ENVS}:{env}",
        horizon=8,
        image_size=0,
        workers=1,
        options={"adapter": {"success_key": ""}},
    )
    entry = find_recipe(name)
    config = entry.load_config_class()(
        recipe=name,
        output_dir=str(tmp_path),
        sim=sim,
        model=ActionPolicyConfig(kind="gaussian", chunk=2),
        data=EpisodeSetConfig(layouts=50),
        trainer=TrainerConfig(steps=1, tasks_per_step=4, samples_per_task=4, threads=1),
    )
    config.validate()
    return entry.load_recipe_class()(config)


@pytest.mark.parametrize("name", ["robot_grpo", "robot_ppo"])
def test_rewards_paid_early_in_an_episode_count(tmp_path, name, closing):
    recipe = closing(recipe_of(tmp_path, name, "PaysEarly"))
    with torch.no_grad():
        drawn = recipe.rollout(recipe.policy, recipe.train_tasks[:4], Streams(0), Step())
        rollouts = recipe.score(drawn, Step())
    torch.testing.assert_close(rollouts.reward, rollouts.payload.last_state[:, 0])
    torch.testing.assert_close(rollouts.reward_terms["return"], rollouts.reward)
    assert len(set(rollouts.reward.tolist())) > 1


@pytest.mark.parametrize("name", ["robot_grpo", "robot_ppo"])
def test_bounds_of_actions_travel_from_the_environment_into_the_served_folder(tmp_path, name, closing):
    recipe = closing(recipe_of(tmp_path, name, "SmallSteps"))
    recipe.policy.save_pretrained(tmp_path / "saved")
    recipe.policy.export(tmp_path / "exported")
    for folder in ("saved", "exported"):
        bounds = open_served_policy(tmp_path / folder, ServeConfig()).bounds
        assert bounds is not None
        np.testing.assert_allclose([bounds.low, bounds.high], [[-0.15], [0.25]], rtol=1e-6)


@pytest.mark.parametrize("entries", [{"low": [0.0]}, {"low": [1.0], "high": [0.0]}, {"low": [0.0], "high": [None]}])
def test_damaged_bounds_are_named(tmp_path, entries):
    (tmp_path / "action_bounds.json").write_text(json.dumps(entries))
    with pytest.raises(
        UserError, match=r"bounds\.json (needs low and high with 1|has low .* low must not exceed high)"
    ):
        ActionRange.load(tmp_path / "action_bounds.json", 1)
