import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Text

from mmrl.agents.agent_recipe import check_environment
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.env_pool import EnvironmentConfig, EnvPool
from mmrl.agents.environments.environment import FORMATS, Action
from mmrl.agents.environments.gym import GymEnvironment, NotExecutableError, action_reader
from mmrl.errors import UserError

PICTURE = Box(0, 255, (4, 6, 3), np.uint8)


class Room(gymnasium.Env):
    """Returns samples of its observation space."""

    def __init__(self, observation_space, action_space=None, render_mode=None):
        self.observation_space, self.render_mode = observation_space, render_mode
        self.action_space = Discrete(2) if action_space is None else action_space
        self.options, self.actions_seen = None, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.options = options
        return self.observation_space.sample(), {"seed": seed}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.actions_seen.append(action)
        return self.observation_space.sample(), 0.5, False, False, {}

    def render(self):
        return np.full((3, 3, 3), 9, np.uint8)


def test_a_registered_environment_runs_in_processes():
    kwargs = {"id": "mmrl.agents.toy.grid:mmrl/GridWorld-v0", "size": 3, "cell": 8, "min_distance": 2}
    config = EnvironmentConfig("gymnasium:make", kwargs, {"action_names": ["N", "S", "W", "E"]}, workers=2)
    local = gymnasium.make(**kwargs)
    with EnvPool(config) as pool:
        assert list(pool.actions) == ["N", "S", "W", "E"]
        turns = pool.reset({row: AgentTask("grid", {}, 5) for row in (0, 1)})
        expected, _ = local.reset(seed=5)
        for row in (0, 1):
            np.testing.assert_array_equal(turns[row].observation.images[0], expected["image"])
            assert turns[row].observation.text == "Go to the green square."
        for move in local.unwrapped.shortest_path():
            expected, reward, terminated, _, _ = local.step(move)
            turns = pool.step({0: Action("NSWE"[move])})
            np.testing.assert_array_equal(turns[0].observation.images[0], expected["image"])
            assert (turns[0].reward, turns[0].terminated) == (reward, terminated)
            assert turns[0].observation.text == "", "the mission is said once"
        assert (turns[0].reward, turns[0].info["success"]) == (1.0, True)
        turn = pool.step({1: Action("up")})[1]
        assert turn.observation.text == turn.info["action_error"]
        assert turn.info["action_error"] == "There is no action 'up'; the actions are: N, S, W, E."
        assert len(turn.observation.images) == 1, "the agent still sees where it is"


def test_images_and_texts_of_an_observation_are_chosen():
    space = Dict({"camera": PICTURE, "map": Box(0, 255, (4, 4), np.uint8), "goal": Text(5), "steps": Discrete(3)})
    observation, info = GymEnvironment(Room(space)).reset({}, 3)
    assert (len(observation.images), info) == (2, {"seed": 3})
    assert "steps" not in observation.text
    chosen = GymEnvironment(Room(space), image_keys=["map"], text_keys=["goal", "steps"])
    observation, _ = chosen.reset({}, 3)
    assert [image.shape for image in observation.images] == [(4, 4, 3)]
    assert observation.text.splitlines()[-1].startswith("steps: ")
    drawn = GymEnvironment(Room(space, render_mode="rgb_array"), image_keys=[], text_keys=[], render=True)
    assert [int(image[0, 0, 0]) for image in drawn.reset({}, 0)[0].images] == [9]


def test_an_environment_without_image_or_text_is_rendered():
    room = Room(Box(-1, 1, (4,)), render_mode="rgb_array")
    env = GymEnvironment(room)
    assert env.reset({"maze": 3}, 0)[0].images[0].shape == (3, 3, 3)
    assert room.options == {"maze": 3}
    env.reset({}, 0)
    assert room.options is None
    GymEnvironment(room, task_options=False).reset({"maze": 3}, 0)
    assert room.options is None


def test_a_text_alone_is_said_every_turn():
    env = GymEnvironment(Room(Text(1, min_length=1, charset="a")))
    assert env.reset({}, 0)[0].text == env.step(Action("1"))[0].text == "a"
    both = Dict({"image": PICTURE, "goal": Text(1, min_length=1, charset="a")})
    once, always = GymEnvironment(Room(both)), GymEnvironment(Room(both), repeat_text=True)
    assert [env.reset({}, 0)[0].text for env in (once, always)] == ["a", "a"]
    assert [env.step(Action("1"))[0].text for env in (once, always)] == ["", "a"]
    assert once.reset({}, 0)[0].text == "a"


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        (Box(-1, 1, (4,)), {}, "its render_mode is None; create it with render_mode='rgb_array'"),
        (PICTURE, {"render": True}, "is shown to the agent as it renders itself"),
        (Dict({"a": PICTURE}), {"image_keys": ["b"]}, r"adapter.image_keys: .* no 'b'; it has: a \(Box\)"),
        (Dict({"a": PICTURE, "t": Text(3)}), {"image_keys": ["t"]}, "'t' is Text.*an image is a Box of uint8"),
        (PICTURE, {"text_keys": ["goal"]}, "no 'goal'; it is not a Dict"),
        (PICTURE, {"action_names": ["a"]}, r"has 1 names \(1 distinct\); the environment has 2 actions"),
        (PICTURE, {"action_names": ["a", "a"]}, r"2 names \(1 distinct\)"),
    ],
)
def test_what_cannot_be_shown_or_named_is_refused(space, options, message):
    with pytest.raises(UserError, match=message):
        GymEnvironment(Room(space), **options)


BOX = Box(np.float32([0, -1]), np.float32([10, 1]))
ARGUMENTS = Dict({"point": BOX, "button": Discrete(3, start=1), "text": Text(5)})


@pytest.mark.parametrize(
    ("space", "names", "action", "value"),
    [
        (Discrete(3), None, Action("2"), 2),
        (Discrete(3, start=5), None, Action("6"), 6),
        (Discrete(2, start=5), ("a", "b"), Action("b"), 6),
        (Text(5), None, Action("hello"), "hello"),
        (Text(20, charset="ab "), None, Action("type", {"text": "a b"}), "a b"),
        (BOX, None, Action("act", {"value": [3, 0.5]}), [3, 0.5]),
        (Box(0, 9, (), np.int32), None, Action("act", {"value": 9}), 9),
    ],
)
def test_actions_become_members_of_the_space(space, names, action, value):
    read = action_reader(space, names).read(action)
    assert space.contains(read)
    assert np.asarray(read).tolist() == value


@pytest.mark.parametrize(
    ("space", "names", "formats"),
    [
        (Discrete(12), None, ["json", "tag", "tool_call"]),
        (Discrete(2), ("turn left", "go"), ["json", "tag", "tool_call"]),
        (Discrete(2), ("left", "right"), ["json", "call", "tag", "tool_call"]),
        (Text(5), None, list(FORMATS)),
        (BOX, None, ["json", "call", "tag", "tool_call"]),
        (Box(-np.inf, np.inf, (2,)), None, ["json", "call", "tag", "tool_call"]),
        (ARGUMENTS, None, ["json", "call", "tag", "tool_call"]),
        (Dict({"text": Text(5)}), None, [name for name in FORMATS if name != "pyautogui"]),
    ],
)
def test_the_formats_that_fit_a_space(space, names, formats):
    room = Room(PICTURE)
    room.action_space = space
    found = GymEnvironment(room, action_names=names).fitting_formats()
    assert [name for name in found if name != "pyautogui"] == [name for name in formats if name != "pyautogui"]


def test_a_format_without_the_environments_actions_is_refused_before_the_model_is_loaded():
    kwargs = {"id": "mmrl.agents.toy.grid:mmrl/GridWorld-v0", "size": 3, "cell": 8, "min_distance": 2}
    with EnvPool(EnvironmentConfig("gymnasium:make", kwargs, workers=1, isolate=False)) as pool:
        for name in pool.formats:
            check_environment(pool, name, tools=False)
        check_environment(pool, "my_formats.py:read", tools=False)
        with pytest.raises(UserError, match=r"actions.format is 'text'.*formats that can: json, .*tag, tool_call"):
            check_environment(pool, "text", tools=False)


def test_arguments_become_entries_of_a_dict():
    read = action_reader(ARGUMENTS, None).read(Action("click", {"point": [1, 0], "button": 3, "text": "x"}))
    assert ARGUMENTS.contains(read)
    plain = {key: np.asarray(entry).tolist() for key, entry in read.items()}
    assert plain == {"point": [1, 0], "button": 3, "text": "x"}


@pytest.mark.parametrize(
    ("space", "action", "message"),
    [
        (Discrete(3), Action("3"), "no action '3'; the actions are: 0, 1, 2"),
        (Discrete(3), Action("True"), "no action 'True'"),
        (Discrete(3), Action("2", {"x": 1}), "The action 2 takes no arguments"),
        (Text(5), Action("too long"), "must have 1 to 5 characters"),
        (Text(5), Action("type", {"text": 3}), "The action is a text"),
        (BOX, Action("act", {"value": [11, 0.5]}), "argument value must be a list of numbers of the shape"),
        (BOX, Action("act", {"value": [True, 0.5]}), "argument value must be"),
        (BOX, Action("act", {"value": [3, "0.5"]}), "argument value must be"),
        (BOX, Action("act", {"value": [[3], [1, 2]]}), "argument value must be"),
        (BOX, Action("act", {"value": [3]}), "argument value must be"),
        (BOX, Action("act", {"value": 10**400}), "argument value must be"),
        (BOX, Action("act"), "needs the arguments value; given: none"),
        (Box(0, 9, (), np.int32), Action("act", {"value": 2.5}), "value must be a number from 0 to 9"),
        (Box(0, 255, (), np.uint8), Action("act", {"value": 257}), "value must be a number"),
        (ARGUMENTS, Action("click", {"point": [1, 0], "button": 0, "text": "x"}), "from 1 to 3"),
        (ARGUMENTS, Action("click", {"point": [1, 0], "button": True, "text": "x"}), "button must be a whole"),
        (ARGUMENTS, Action("click", {"point": [1, 0], "text": "x"}), "needs .*; given: point, text"),
    ],
)
def test_what_is_no_member_is_explained_to_the_agent(space, action, message):
    with pytest.raises(NotExecutableError, match=message):
        action_reader(space, None).read(action)


def test_actions_describe_themselves():
    (text,) = action_reader(ARGUMENTS, None).actions.values()
    assert "button: a whole number from 1 to 3" in text
    assert "text: a text of 1 to 5 characters" in text
    assert action_reader(Text(3), None).actions == {}


@pytest.mark.parametrize(
    ("space", "names", "message"),
    [
        (BOX, ("a",), "action_names is for Discrete actions; this environment's are Box"),
        (MultiBinary(3), None, r"entry 'value' is MultiBinary\(3\); supported action spaces: Discrete, Box, Text"),
        (Dict({"a": Dict({"b": BOX})}), None, "entry 'a' is Dict"),
    ],
)
def test_spaces_that_agents_cannot_write_are_refused(space, names, message):
    with pytest.raises(UserError, match=message):
        action_reader(space, names)
