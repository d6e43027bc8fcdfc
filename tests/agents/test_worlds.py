import json
import signal
import sys
from itertools import product

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from transformers import AutoTokenizer

from mmrl.agents.environments.environment import Action
from mmrl.agents.environments.environment_service import open_environment
from mmrl.agents.toy.build import build_experts, build_model
from mmrl.agents.toy.grid import (
    COLOURS,
    MOVES,
    Cell,
    GridLayout,
    GridState,
    GridWorld,
    first_state,
    move,
    reached,
    shortest_path,
)
from mmrl.errors import UserError

KINDS = [{}, {"walls": 6}, {"key": True}, {"walls": 4, "key": True, "min_distance": 8, "max_distance": 12}]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_shortest_path_leads_to_the_goal(kind):
    env = GridWorld(**{"max_steps": 50, **kind})
    for seed in range(20):
        _, info = env.reset(seed=seed)
        path = env.shortest_path()
        assert len(path) == info["distance"]
        assert kind.get("min_distance", 1) <= len(path) <= kind.get("max_distance", 50)
        outcomes = [env.step(action)[1:4] for action in path]
        assert outcomes == [*[(0.0, False, False)] * (len(path) - 1), (1.0, True, False)]


def test_no_shorter_path_exists():
    """Compared with trying every sequence of moves, on a layout drawn by hand.

    . K # .
    S # G .
    . . # .
    . . . .
    """
    walls = frozenset({Cell(0, 2), Cell(1, 1), Cell(2, 2)})
    layout = GridLayout(4, Cell(1, 0), Cell(1, 2), walls, Cell(0, 1))
    path = shortest_path(layout)
    assert len(path) == 12
    assert path[:4] == ["up", "right", "left", "down"]
    without = GridLayout(4, Cell(1, 0), Cell(1, 2), walls)
    assert len(shortest_path(without)) == 8

    def leads_there(moves):
        state = first_state(without)
        for name in moves:
            state = move(without, state, name)
        return reached(without, state)

    assert not any(leads_there(moves) for moves in product(MOVES, repeat=7))
    assert leads_there(shortest_path(without))


def test_a_goal_behind_walls_is_not_reached():
    layout = GridLayout(3, Cell(0, 0), Cell(2, 2), frozenset({Cell(1, 2), Cell(2, 1)}))
    assert shortest_path(layout) is None
    state = GridState(Cell(1, 1), True)
    assert move(layout, state, "right") == move(layout, state, "down") == state
    assert move(layout, GridState(Cell(0, 0), True), "up") == GridState(Cell(0, 0), True)


def test_the_goal_does_not_count_without_the_key():
    layout = GridLayout(3, Cell(0, 0), Cell(0, 1), frozenset(), Cell(0, 2))
    on_goal = move(layout, first_state(layout), "right")
    assert not reached(layout, on_goal)
    with_key = move(layout, on_goal, "right")
    assert with_key.has_key
    assert reached(layout, move(layout, with_key, "left"))


def test_the_same_seed_gives_the_same_pixels():
    first, second = GridWorld(walls=3), GridWorld(walls=3)
    pictures = [env.reset(seed=seed)[0]["image"] for env in (first, second) for seed in (1, 2)]
    np.testing.assert_array_equal(pictures[0], pictures[2])
    np.testing.assert_array_equal(pictures[1], pictures[3])
    assert (pictures[0] != pictures[1]).any()
    first.step(0)
    np.testing.assert_array_equal(first.reset(seed=1)[0]["image"], pictures[0])


def test_the_image_shows_all_positions():
    env = GridWorld(size=4, cell=14, walls=2, key=True, max_steps=99)
    observation, _ = env.reset(seed=3)
    assert observation["mission"] == "Fetch the yellow key, then go to the green square."
    assert env.observation_space.contains(observation)

    def colours(image):
        centres = image[7::14, 7::14]
        return {
            name: {Cell(*place) for place in np.argwhere((centres == colour).all(-1)).tolist()}
            for name, colour in COLOURS.items()
        }

    seen, layout = colours(observation["image"]), env.layout
    assert (seen["agent"], seen["goal"], seen["key"], seen["wall"]) == (
        *({layout.start}, {layout.goal}, {layout.key}, set(layout.walls)),
    )
    while not env.state.has_key:
        image = env.step(env.shortest_path()[0])[0]["image"]
    seen = colours(image)
    assert (seen["key"], seen["agent"]) == ({env.state.agent}, set()), "the key is on the agent"


def test_the_text_names_all_cells():
    env = GridWorld(size=4, walls=1, key=True, text=True, max_steps=99)
    observation, _ = env.reset(seed=3)
    layout = env.layout
    cells = {"agent": layout.start, "goal": layout.goal, "key": layout.key, "wall": next(iter(layout.walls))}
    words = [f"{name} {'abcd'[cell.row]}{cell.column}" for name, cell in cells.items()]
    assert observation == {"state": " ".join(words)}
    while not env.state.has_key:
        observation = env.step(env.shortest_path()[0])[0]
    words[0] = f"agent {words.pop(2).split()[1]}"
    assert observation == {"state": " ".join(words)}, "the agent stands where the key was"


def test_a_language_model_reads_a_cell_as_one_token(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(build_model(tmp_path / "m", family="qwen3"))
    assert tokenizer.tokenize("agent c3 goal a1") == ["agent", "Ġ", "c3", "Ġgoal", "Ġ", "a1"]
    assert tokenizer.tokenize("<action>up</action>") == ["<action>", "up", "</action>"]


def test_episodes_are_cut():
    env = GridWorld(size=3, max_steps=2, min_distance=3)
    env.reset(seed=0)
    way_back = {0: 1, 1: 0, 2: 3, 3: 2}
    action = env.shortest_path()[0]
    assert env.step(action)[2:4] == (False, False)
    assert env.step(way_back[action])[2:4] == (False, True)
    env.reset(seed=0)
    assert env.step(action)[2:4] == (False, False)


def test_the_wind_moves_the_agent_independently_of_its_action():
    env = GridWorld(size=4, min_distance=4, max_steps=200, winds={"calm": 0.0, "windy": 0.5, "storm": 1.0})
    way_back = {0: 1, 1: 0, 2: 3, 3: 2}

    def turn_away(name, seed):
        """Distances after each move of an agent that always moves away from the goal."""
        _, info = env.reset(seed=seed, options={"name": name})
        found, over = [(info["distance"], False)], False
        while not over:
            _, reward, done, cut, info = env.step(way_back[env.expert_action()])
            over = done or cut
            found.append((len(env.shortest_path()), info["carried"]))
        return found, reward

    calm, storm = turn_away("calm", 1), turn_away("storm", 1)
    assert not any(carried for _, carried in calm[0])
    assert calm[1] == 0.0
    assert [distance for distance, _ in storm[0]] == list(range(storm[0][0][0], -1, -1))
    assert storm[1] == 1.0
    steps = [move for seed in range(20) for move in turn_away("windy", seed)[0][1:]]
    share, spread = np.mean([carried for _, carried in steps]), 0.5 / len(steps) ** 0.5
    assert abs(share - 0.5) < 5 * spread
    assert turn_away("windy", 3) == turn_away("windy", 3), "the seed says when the wind blows"


def test_the_mission_mentions_the_wind_and_the_image_does_not_show_it():
    env = GridWorld(winds={"calm": 0.0, "windy": 0.5})
    calm, windy = (env.reset(seed=2, options={"name": name})[0] for name in ("calm", "windy"))
    assert (calm["mission"], windy["mission"]) == ("Go to the green square.", "Go to the green square. It is windy.")
    np.testing.assert_array_equal(calm["image"], windy["image"])
    with pytest.raises(UserError, match="no entry for the task 'gusty'; tasks of this grid: calm, windy"):
        env.reset(seed=2, options={"name": "gusty"})


def test_recorded_experts_take_the_names_in_turn(tmp_path):
    winds = {"calm": 0.0, "windy": 1.0}
    folder = build_experts(tmp_path / "e", count=4, mistakes=1.0, names=list(winds), size=3, max_steps=9, winds=winds)
    rows = [json.loads(line) for line in (folder / "episodes.jsonl").open()]
    assert [row["task"]["name"] for row in rows] == ["calm", "windy", "calm", "windy"]
    assert [row["success"] for row in rows[1::2]] == [True, True], "carried there by the wind alone"


def test_the_environment_keeps_gymnasiums_rules():
    check_env(GridWorld(walls=2, key=True), skip_render_check=True)
    check_env(GridWorld(walls=2, key=True, text=True, size=12), skip_render_check=True)
    made = gymnasium.make("mmrl.agents.toy.grid:mmrl/GridWorld-v0", size=3, render_mode="rgb_array")
    made.reset(seed=0)
    assert made.render().shape == (84, 84, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 1}, "a grid of 1 cells of 28 pixels"),
        ({"cell": 5000}, "at most 4096 pixels in all"),
        ({"walls": 23}, "walls is 23; a grid of 5 x 5 has room for 0 to 22"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"size": 27, "text": True}, r"at most 26 cells per side \(one letter per row\), not 27"),
        ({"winds": {"windy": 1.5}}, "winds.windy is 1.5; expected a fraction"),
        ({"min_distance": 9}, "no grid of 5 x 5 .* path of 9 to any number of moves; allow shorter"),
        ({"min_distance": 4, "max_distance": 3}, "path of 4 to 3 moves"),
    ],
)
def test_impossible_worlds_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        GridWorld(**options)


def test_minigrid_that_is_missing_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "minigrid", None)
    with pytest.raises(Exception, match=r"needs the package minigrid, .* pip install 'mmrl-suite\[minigrid\]'"):
        open_environment("mmrl.agents.environments.gym:make", {"id": "MiniGrid-Empty-5x5-v0"}, {})


def test_minigrid_is_seen_as_images_and_acted_on_by_name():
    pytest.importorskip("minigrid")
    kwargs = {"id": "MiniGrid-Empty-5x5-v0", "max_steps": 9}
    env = open_environment("mmrl.agents.environments.gym:make", kwargs, {})
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # opened in one's own process, Ctrl-C works
    assert list(env.actions) == ["left", "right", "forward", "pickup", "drop", "toggle", "done"]
    observation, _ = env.reset({}, 1)
    assert observation.text == "get to the green goal square"
    assert observation.images[0].shape == (140, 140, 3)
    names = ["forward", "forward", "right", "forward", "forward"]
    outcomes = [env.step(Action(name)) for name in names]
    assert [(reward > 0, ended) for _, reward, ended, _, _ in outcomes] == [*[(False, False)] * 4, (True, True)]
    with pytest.raises(Exception, match="MiniGrid has no 'MiniGrid-Emty-5x5-v0'; close are MiniGrid-Empty-5x5-v0"):
        open_environment("mmrl.agents.environments.gym:make", {"id": "MiniGrid-Emty-5x5-v0"}, {})
    part = open_environment(
        "mmrl.agents.environments.gym:make",
        {"id": "MiniGrid-Empty-5x5-v0", "full_view": False, "tile_size": 14, "direction": True},
        {},
    )
    observation, _ = part.reset({}, 1)
    assert observation.images[0].shape == (98, 98, 3)
    assert observation.text.endswith("direction: 0")
