"""The home screen as a task: apps in order, tiles that move, and an agent whose answers are points."""

import json
from pathlib import Path

import numpy as np
import pytest

from mmrl.agents.environments.environment import Action
from mmrl.agents.environments.experts import run_expert
from mmrl.agents.environments.videos import draw_frames
from mmrl.config import load_run
from mmrl.errors import UserError
from mmrl.gui.grounding.answers import parse_answer
from mmrl.gui.grounding.coords import CoordinateSpace
from mmrl.gui.toy.pages.launcher import COLORS, build_model
from mmrl.gui.toy.pages.vocabulary import functions
from mmrl.gui.toy.tasks.catalogue import make_case
from mmrl.gui.toy.web_env import PointingAgentEnv, WebTaskEnv, WebTaskSettings
from mmrl.training.run import train
from tests.gui.screens import SMALL

CONFIG = Path(__file__).parents[2] / "configs/gui/launcher_clone.yaml"
KNOWN = functions("train", "en")


@pytest.fixture
def env(browser, closing):
    settings = WebTaskSettings(width_px=128, height_px=96, space=CoordinateSpace.REL1000, sub_goals=3, max_steps=8)
    return closing(WebTaskEnv(settings, browser))


def places(env):
    return {element.key: element.center for element in env.elements()}


def click(env, name):
    x, y = env.viewpoint.from_image(places(env)[name])
    return env.step({"name": "click", "arguments": {"x": x, "y": y}})


def test_distractors_are_apps_of_the_same_families():
    for seed in range(10):
        for count in range(4):
            config = make_case("launcher", seed, 3, count).config
            families = {KNOWN[name].family for name in config["wanted"]}
            near = [name for name in config["tiles"] if KNOWN[name].family in families and name not in config["wanted"]]
            assert len(near) <= count
            assert len(config["tiles"]) == 12
            assert all(sorted(order) == sorted(config["tiles"]) for order in config["orders"])


def test_apps_are_requested_by_name_or_by_function():
    named, wished = make_case("launcher", 1, 2), make_case("wishes", 1, 2)
    for name in named.config["wanted"]:
        assert f'"{KNOWN[name].labels[0]}"' in named.instruction
    for name in wished.config["wanted"]:
        assert any(phrase[1:] in wished.instruction for phrase in KNOWN[name].phrases)
        assert KNOWN[name].labels[0] not in wished.instruction


def test_the_right_app_shows_that_it_is_open_and_moves_the_tiles(env):
    env.reset(seed=0, options={"task": {"name": "launcher", "seed": 1}})
    wanted, before = env._case.config["wanted"], places(env)
    assert len(before) == 12
    *_, info = click(env, wanted[0])
    after = places(env)
    assert info["progress"] == pytest.approx(1 / 3)
    assert sum(after[name] != before[name] for name in before) >= 6
    names = {element.key: element.name for element in env.elements()}
    assert names[wanted[0]].endswith("(opened)")
    x, y = (round(edge) for edge in env.elements()[list(after).index(wanted[0])].center)
    color = [int(COLORS[wanted[0]][place : place + 2], 16) for place in (1, 3, 5)]
    assert not np.array_equal(env.render()[y - 8, x], color)  # the tile is no longer filled


def test_a_wrong_app_or_a_wrong_order_ends_it_and_an_open_one_or_a_gap_changes_nothing(env):
    task = {"name": "launcher", "seed": 1}
    env.reset(seed=0, options={"task": task})
    wanted = env._case.config["wanted"]
    _, reward, terminated, _, info = click(env, wanted[1])
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    env.reset(seed=0, options={"task": task})
    click(env, wanted[0])
    *_, terminated, _, info = click(env, wanted[0])
    assert (terminated, info["progress"]) == (False, pytest.approx(1 / 3))
    *_, terminated, _, info = env.step({"name": "click", "arguments": {"x": 0, "y": 0}})
    assert (terminated, info["progress"]) == (False, pytest.approx(1 / 3))
    click(env, wanted[1])
    _, reward, terminated, _, info = click(env, wanted[2])
    assert (reward, terminated, info["success"]) == (1.0, True, True)


def test_an_agent_answers_with_points_as_a_grounding_model_does(env):
    agent = PointingAgentEnv(env)
    episode = run_expert(agent, {"name": "wishes", "seed": 2}, 0, "text")
    assert (episode.success, len(episode.turns)) == (True, 3)
    for turn in episode.turns:
        ((x, y),) = parse_answer(turn.action.text).points
        assert turn.info["marks"][0] == pytest.approx((x * 128 / 1000, y * 96 / 1000))
    assert len(list(draw_frames(episode.video()))) == 4
    agent.reset({"name": "launcher"}, 0)
    *_, terminated, _, info = agent.step(Action("say", {"text": "top left, I think"}))
    assert (terminated, info["action_error"]) == (False, "wrong_arguments")
    agent.reset({"name": "login"}, 0)
    agent.step(agent.expert())  # into the first field
    with pytest.raises(UserError, match="next action is type"):
        agent.expert()


@pytest.mark.slow
def test_the_configuration_clones_the_expert_in_the_browser(browser, tmp_path):
    model = build_model(tmp_path / "model", family="qwen3_vl", **SMALL)
    overrides = [f"output_dir={tmp_path / 'run'}", f"model.path={model}", "trainer.steps=2", "trainer.tasks_per_step=2"]
    overrides += ["trainer.warmup_steps=0", "data.seeds=2", "eval_data.heldout.seeds=2", "evaluation.videos=1"]
    overrides += ["tracking.quiet=true", "tracking.tensorboard=false", "tracking.strict=true"]
    run_dir = train(*load_run(CONFIG, overrides))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["episode/success"] for row in rows] == [1.0, 1.0]
    assert list((run_dir / "videos").glob("*.mp4"))
