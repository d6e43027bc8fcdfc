import re

import numpy as np
import pytest

from mmrl.hub.foreign import MalformedError
from robotics.sim.gym_adapter import EnvError, GymRow, resize

gymnasium = pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'")
spaces = gymnasium.spaces


class Arm(gymnasium.Env):
    """Records its inputs; observations are a Dict with the requested keys."""

    def __init__(self, observation=None, action=None, info=None, render_mode=None):
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 20}
        parts = {
            "zeta": spaces.Box(-1, 1, (2,), np.float64),
            "camera": spaces.Box(0, 255, (4, 6, 3), np.uint8),
            "angle": spaces.Box(-1, 1, (1,), np.float32),
            "depth": spaces.Box(0, 9, (4, 6), np.float32),
        }
        self.observation_space = observation or spaces.Dict(parts)
        self.action_space = action or spaces.Box(
            np.array([[-1, 0]], np.float32), np.array([[3, 0.5]], np.float32), dtype=np.float32
        )
        self.info, self.render_mode = info if info is not None else {"success": False}, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seen = {"seed": seed, "options": options}
        return self._observe(), {}

    def step(self, action):
        self.seen = {"action": action}
        return self._observe(), 2.5, False, True, self.info

    def render(self):
        return np.full((5, 7, 3), 9, np.uint8)

    def _observe(self):
        known = {"zeta": [1.0, 2.0], "camera": np.full((4, 6, 3), 8, np.uint8), "angle": [3.0], "depth": [[4.0]]}
        if isinstance(self.observation_space, spaces.Dict):
            return {key: np.asarray(known[key]) for key in self.observation_space.spaces}
        return np.zeros(self.observation_space.shape, self.observation_space.dtype)


def row(arm: Arm | None = None, **options) -> GymRow:
    return GymRow(arm or Arm(), **{"horizon": 5, **options})


def test_flat_parts_of_a_dict_are_the_state_and_its_image_the_image():
    adapted = row()
    assert adapted.state_size == 3
    assert sorted(adapted.state().tolist()) == [1.0, 2.0, 3.0]
    assert adapted.image_size == (4, 6)
    assert (adapted.render() == 8).all()


def test_keys_choose_parts_and_their_order():
    adapted = row(state_keys=["zeta", "angle", "zeta"], image_key="camera")
    np.testing.assert_array_equal(adapted.state(), [1, 2, 3, 1, 2])
    for options in ({"state_keys": ["beta"]}, {"image_key": "beta"}):
        with pytest.raises(EnvError, match=r"have no 'beta'; they have: .*camera"):
            row(**options)


@pytest.mark.parametrize(
    ("space", "mode", "state_size", "image_size"),
    [
        (spaces.Box(-1, 1, (2, 3), np.float64), None, 6, None),
        (spaces.Box(-1, 1, (2, 3), np.float64), "rgb_array", 6, (5, 7)),
        (spaces.Box(0, 255, (8, 9, 3), np.uint8), None, 0, (8, 9)),
    ],
)
def test_an_observation_that_is_one_array_is_state_or_image(space, mode, state_size, image_size):
    adapted = row(Arm(space, render_mode=mode))
    assert adapted.state_size == state_size
    assert adapted.image_size == image_size
    with pytest.raises(EnvError, match="only apply to a Dict"):
        row(Arm(space), state_keys=["x"])


@pytest.mark.parametrize("parts", [(2, 3), (2, 2)])
def test_an_observation_of_several_arrays_without_names_is_refused(parts):
    space = spaces.Tuple([spaces.Box(-1, 1, (size,)) for size in parts])
    with pytest.raises(EnvError, match=r"observations are Tuple\(.*each part is an entry of a Dict"):
        row(Arm(space))


def test_actions_are_scaled_to_the_bounds_of_each_entry():
    arm = Arm()
    adapted = row(arm)
    assert adapted.action_size == 2
    for given, expected in (([-1, -1], [[-1, 0]]), ([1, 1], [[3, 0.5]]), ([0, 0.5], [[1, 0.375]])):
        adapted.step(np.array(given, np.float64))
        np.testing.assert_allclose(arm.seen["action"], expected)
        assert arm.seen["action"].dtype == np.float32


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Discrete(4), r"Discrete\(4\); only a Box"),
        (spaces.MultiDiscrete([2, 2]), "only a Box"),
        (spaces.Box(-np.inf, 1, (2,)), "needs finite bounds"),
    ],
)
def test_actions_that_cannot_be_scaled_are_refused(space, message):
    with pytest.raises(EnvError, match=message):
        row(Arm(action=space))


@pytest.mark.parametrize(
    ("info", "options", "success"),
    [
        ({}, {"success_key": ""}, False),
        ({"success": 1.0}, {}, True),
        ({"is_success": np.True_}, {}, True),
        ({"success": np.array([1])}, {}, True),
        ({"success": None, "is_success": 1}, {}, True),
        ({"is_success": 0.0, "other": 1}, {}, False),
        ({"solved": True, "success": False}, {"success_key": "solved"}, True),
        ({}, {"success_reward": 2.5}, True),
        ({"success": True}, {"success_reward": 2.6}, False),
    ],
)
def test_success_comes_from_info_or_the_reward(info, options, success):
    assert row(Arm(info=info), **options).step(np.zeros(2)) == (2.5, success, False, True)


@pytest.mark.parametrize("value", [float("nan"), 0.5, "no", np.array([True, False])])
def test_a_success_that_is_neither_true_nor_false_is_named(value):
    with pytest.raises(MalformedError, match=r"info\['success'\] is .*; expected True or False"):
        row(Arm(info={"success": value})).step(np.zeros(2))


def test_a_success_key_that_info_lacks_is_named():
    with pytest.raises(EnvError, match="info has no 'solved'; it has: done, phase"):
        row(Arm(info={"phase": 1, "done": 0}), success_key="solved").step(np.zeros(2))


def test_the_seed_begins_an_episode_and_options_only_where_requested():
    arm = Arm()
    row(arm).reset("Arm", 3, "train", 77)
    assert arm.seen == {"seed": 77, "options": None}
    row(arm, layout_options=True, task="lift").reset("lift", 3, "held_out", 78)
    assert arm.seen == {"seed": 78, "options": {"layout": 3, "split": "held_out"}}


def test_an_environment_whose_reset_takes_no_options_begins():
    class Plain(Arm):
        def reset(self, *, seed=None):
            return super().reset(seed=seed)

    adapted = row(Plain())
    adapted.reset("Plain", 3, "train", 3)
    assert adapted.state_size == 3


def test_a_reset_that_returns_the_observation_alone_is_named():
    class Old(Arm):
        def reset(self, **asked):
            return super().reset(**asked)[0]

    with pytest.raises(EnvError, match=r"reset of Old returned dict; expected \(observation, info\)"):
        row(Old())


@pytest.mark.parametrize("shape", [(8, 8, 12), (4, 8, 8, 3), (4, 8, 8)])
def test_stacked_images_are_not_taken_for_a_state(shape):
    with pytest.raises(EnvError, match="expected one image"):
        row(Arm(spaces.Box(0, 255, shape, np.uint8)))


def test_the_horizon_is_that_of_the_id_or_must_be_given():
    assert GymRow(gymnasium.make("Pendulum-v1")).horizon == 200
    assert GymRow(gymnasium.make("Pendulum-v1"), horizon=7).horizon == 7
    for horizon in (None, 0):
        with pytest.raises(EnvError, match=f"horizon is {horizon}"):
            GymRow(Arm(), horizon=horizon)


def test_the_task_is_named_after_the_id():
    assert GymRow(gymnasium.make("Pendulum-v1"), instruction="swing up").tasks() == {"Pendulum-v1": "swing up"}
    assert row().tasks() == {"Arm": ""}
    assert row().describe()["render_fps"] == 20


@pytest.mark.parametrize("size", [3, 4, 10, 32])
def test_images_are_resized_to_a_square_by_areas(size):
    picture = np.random.default_rng(0).integers(0, 256, (12, 20, 3)).astype(np.uint8)
    fine = picture.repeat(size, 0).repeat(size, 1)  # so that cells end where pixels do
    expected = fine.reshape(size, 12, size, 20, 3).mean((1, 3))
    found = resize(picture, size, "stretch")
    assert found.dtype == np.uint8
    np.testing.assert_allclose(found, expected, atol=0.5 + 1e-6)
    assert (resize(np.full((12, 20, 3), 77, np.uint8), size, "stretch") == 77).all()


@pytest.mark.parametrize(
    ("shape", "top", "left"), [((48, 96), 16, 0), ((96, 48), 0, 16), ((30, 40), 8, 0), ((9, 9), 0, 0)]
)
def test_a_camera_that_is_not_square_keeps_its_proportions(shape, top, left):
    """The place of the picture is that of openpi's `resize_with_pad` (openpi_client.image_tools)."""
    found = resize(np.full((*shape, 3), 77, np.uint8), 64)
    expected = np.zeros((64, 64, 3), np.uint8)
    expected[top : 64 - top, left : 64 - left] = 77
    assert np.array_equal(found, expected)


def test_the_fit_is_declared_and_described():
    wide = row(Arm(spaces.Dict({"camera": spaces.Box(0, 255, (4, 6, 3), np.uint8)})), size=4)
    assert wide.fitted_camera == {"camera_size": [4, 6], "size": 4, "fit": "pad"}
    assert wide.describe()["image_fit"] == "pad"
    assert "image_fit" not in row(Arm(spaces.Dict({"camera": spaces.Box(0, 255, (4, 6, 3), np.uint8)}))).describe()
    with pytest.raises(EnvError, match="fit is 'crop'; must be pad or stretch"):
        row(fit="crop")


def test_one_size_applies_to_every_image():
    drawn = row(Arm(spaces.Box(-1, 1, (2, 3), np.float64), render_mode="rgb_array"), size=4)
    assert drawn.image_size == (4, 4)
    assert drawn.render().shape == (4, 4, 3)
    seen = row(size=4, fit="stretch")
    assert seen.image_size == (4, 4)
    assert (seen.render() == 8).all()
    told = Arm(spaces.Box(-1, 1, (2, 3), np.float64), render_mode="rgb_array")
    told.metadata["image_size"] = (5, 7)
    assert row(told).image_size == (5, 7)
    assert row(told, size=6).image_size == (6, 6)


def test_an_episode_without_success_information_is_refused():
    silent = row(Arm(info={"energy": 1}))
    with pytest.raises(
        EnvError, match=r"info does not report success; it has: energy\. Set success_key.*success_reward"
    ):
        silent.step(np.zeros(2))
    assert row(Arm(info={}), success_key="").step(np.zeros(2))[1] is False
    assert row(Arm(info={}), success_reward=2.0).step(np.zeros(2))[1] is True
    once = Arm(info={"success": True})
    adapted = row(once)
    adapted.step(np.zeros(2))
    once.info = {}
    adapted.reset("Arm", 0, "train", 0)
    assert adapted.step(np.zeros(2))[1] is False  # it has been seen to speak of success


def test_the_horizon_ends_an_episode_without_success_information():
    class Endless(Arm):
        def step(self, action):
            observation, reward, _, _, info = super().step(action)
            return observation, reward, False, False, info

    adapted = row(Endless(info={}), horizon=3)
    adapted.reset("Endless", 0, "train", 0)
    adapted.step(np.zeros(2))
    adapted.step(np.zeros(2))
    with pytest.raises(EnvError, match="info does not report success; it has: nothing"):
        adapted.step(np.zeros(2))


def test_entries_of_a_dict_within_a_dict_are_state():
    class Kitchen(Arm):
        def _observe(self):
            return {"goal": {"kettle": np.array([7.0]), "door": np.array([[5.0, 6.0]])}, "zeta": np.array([1.0, 2.0])}

    goal = spaces.Dict({"kettle": spaces.Box(-9, 9, (1,)), "door": spaces.Box(-9, 9, (1, 2))})
    kitchen = Kitchen(spaces.Dict({"goal": goal, "zeta": spaces.Box(-1, 1, (2,))}))
    adapted = row(kitchen, state_keys=["goal", "zeta"])
    assert adapted.state_size == 5
    np.testing.assert_array_equal(adapted.state(), [5, 6, 7, 1, 2])
    # a matrix is state only if the user says so, wherever it is
    assert row(kitchen).state_size == 2
    assert "goal" in row(kitchen).left_out


@pytest.mark.parametrize(
    "inside",
    [
        spaces.Box(0, 1, (8, 8), np.float32),
        spaces.Box(0, 255, (8, 8), np.uint8),
        spaces.Box(0, 255, (2, 8, 8, 3), np.uint8),
    ],
)
def test_maps_and_stacks_of_images_within_a_dict_are_left_out_of_the_state(inside):
    observation = spaces.Dict({"sensors": spaces.Dict({"depth": inside}), "zeta": spaces.Box(-1, 1, (2,))})

    class Seeing(Arm):
        def _observe(self):
            return {"sensors": {"depth": np.zeros(inside.shape, inside.dtype)}, "zeta": np.array([1.0, 2.0])}

    adapted = row(Seeing(observation))
    assert adapted.state_size == 2
    assert list(adapted.left_out) == ["sensors"]


def test_images_are_not_part_of_the_state():
    inner = spaces.Dict({"rgb": spaces.Box(0, 255, (4, 6, 3), np.uint8)})
    observation = spaces.Dict({"cam": inner, "zeta": spaces.Box(-1, 1, (2,))})
    for options in ({}, {"state_keys": ["zeta", "cam"]}):
        with pytest.raises(EnvError, match="the entry 'cam' of the state contains an image"):
            row(Arm(observation), **options)


def test_an_entry_that_is_not_an_image_is_not_rendered():
    space = spaces.Dict({"float": spaces.Box(-1, 1, (4, 6, 3), np.float32), "zeta": spaces.Box(-1, 1, (2,))})

    class Floats(Arm):
        def _observe(self):
            return {"float": np.ones((4, 6, 3), np.float32), "zeta": np.zeros(2)}

    with pytest.raises(EnvError, match=r"image_key 'float' is Box.*; an image is a Box .* Available: none"):
        row(Floats(space), image_key="float", state_keys=["zeta"])


PICTURE = np.random.default_rng(0).integers(0, 256, (4, 6, 3)).astype(np.uint8)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Box(0, 255, (3, 4, 6), np.uint8), PICTURE.transpose(2, 0, 1)),
        (spaces.Box(0, 1, (4, 6, 3), np.float32), (PICTURE / 255).astype(np.float32)),
    ],
)
@pytest.mark.parametrize("entry", [True, False])
def test_images_of_other_forms_are_seen_instead_of_what_is_rendered(space, value, entry):
    class Other(Arm):
        def _observe(self):
            return {"picture": value, "zeta": np.zeros(2)} if entry else value

    found = row(Other(spaces.Dict({"picture": space, "zeta": spaces.Box(-1, 1, (2,))}) if entry else space))
    assert (found.state_size, found.image_size) == (2 if entry else 0, (4, 6))
    np.testing.assert_array_equal(found.render(), PICTURE)


def test_rgb_comes_before_other_images_and_greys_only_where_they_are_named():
    parts = {"a": spaces.Box(0, 255, (3, 4, 6), np.uint8), "b": spaces.Box(0, 255, (4, 6, 3), np.uint8)}
    grey = spaces.Box(0, 255, (4, 6), np.uint8)

    class Several(Arm):
        def _observe(self):
            return {"a": PICTURE.transpose(2, 0, 1), "b": 255 - PICTURE, "grey": PICTURE[..., 0]}

    np.testing.assert_array_equal(row(Several(spaces.Dict(parts | {"grey": grey}))).render(), 255 - PICTURE)
    named = row(Several(spaces.Dict(parts | {"grey": grey})), image_key="grey")
    np.testing.assert_array_equal(named.render()[..., 2], PICTURE[..., 0])
    assert row(Several(spaces.Dict({"grey": grey}))).image_size is None


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (np.full((5, 7, 3), 0.5), r"what it shows cannot be used: an image of shape \(5, 7, 3\) has type float64"),
        (np.full((5, 7, 3), 300), "has type int64; expected uint8, 0 to 255"),
        (np.zeros((3, 5, 7), np.uint8), r"has the shape \(3, 5, 7\); expected \(H, W, 3\); the channels come last"),
    ],
)
def test_rendered_images_are_checked_before_they_are_cast(drawn, message):
    class Draws(Arm):
        def render(self):
            return drawn

    adapted = row(Draws(spaces.Box(-1, 1, (2,)), render_mode="rgb_array"))
    # a policy of states needs no images; a worker that has to draw them says this
    assert adapted.image_size is None
    assert re.search(message, adapted.image_problem)


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.3), (-3.0718, -0.0698)])
def test_the_largest_command_is_within_the_bounds(low, high):
    arm = Arm(action=spaces.Box(low, high, (1,), np.float64))
    adapted = row(arm)
    for action in (-1.0, 1.0):
        adapted.step(np.array([action]))
        assert arm.action_space.contains(arm.seen["action"])


class Paying(Arm):
    reward: object = 1.5

    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, self.reward, *rest


@pytest.mark.parametrize("reward", [np.array([1.5]), np.float32(1.5), np.array(1.5)])
def test_a_reward_may_be_an_array_with_one_entry(reward):
    arm = Paying()
    arm.reward = reward
    assert row(arm).step(np.zeros(2))[0] == 1.5


@pytest.mark.parametrize("reward", [np.ones(2), "1.5", None])
def test_a_reward_that_is_no_number_is_named(reward):
    arm = Paying()
    arm.reward = reward
    with pytest.raises(MalformedError, match=r"the reward is .*; expected a number"):
        row(arm).step(np.zeros(2))


def test_vector_environments_are_refused():
    with pytest.raises(EnvError, match="is a vector environment"):
        GymRow(gymnasium.make_vec("Pendulum-v1", 1), horizon=5)


def test_what_is_neither_state_nor_image_is_said():
    assert list(row().left_out) == ["depth"]
    assert row(state_keys=["zeta", "angle"]).left_out == {}

    class Told(Arm):
        def _observe(self):
            return {"zeta": np.array([1.0, 2.0]), "order": "lift", "joints": np.ones((2, 7), np.float32)}

    parts = {"zeta": spaces.Box(-1, 1, (2,)), "order": spaces.Text(9), "joints": spaces.Box(-3, 3, (2, 7))}
    adapted = row(Told(spaces.Dict(parts)))
    assert adapted.state().tolist() == [1, 2]
    assert sorted(adapted.left_out) == ["joints", "order"]
    assert row(Told(spaces.Dict(parts)), state_keys=["zeta", "joints"]).state_size == 16


@pytest.mark.parametrize(
    "info", [{"intervene_action": [[0.0, 0.5]]}, {"teleop_action": np.array([0, 0.5]), "is_intervention": True}]
)
def test_a_persons_action_is_reported_in_the_scale_of_the_policys(info):
    # bounds of -1 to 3 and 0 to 0.5
    adapted = row(Arm(info={"success": False, **info}))
    adapted.step(np.zeros(2))
    np.testing.assert_allclose(adapted.executed, [-0.5, 1.0])
    adapted.reset("Arm", 0, "train", 0)
    assert adapted.executed is None


@pytest.mark.parametrize(
    "info",
    [
        {"teleop_action": np.zeros(2), "is_intervention": False, "intervene_action": None},
        {"teleop_action": np.zeros(2), "is_intervention": np.array([False])},
        {"teleop_action": np.zeros(2)},
    ],
)
def test_a_person_who_does_not_act_replaces_nothing(info):
    adapted = row(Arm(info={"success": False, **info}))
    assert adapted.step(np.zeros(2))[0] == 2.5
    assert adapted.executed is None


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({"is_intervention": True}, "has no action of the person: intervene_action or teleop_action"),
        ({"intervene_action": np.zeros(3)}, r"a person's action is \[0. 0. 0.\]; expected 2 finite numbers"),
        ({"teleop_action": {"x": 1}, "is_intervention": True}, r"a person's action is \{'x': 1\}; expected 2 numbers"),
    ],
)
def test_a_persons_action_that_cannot_be_read_is_named(info, text):
    with pytest.raises(EnvError, match=text):
        row(Arm(info={"success": False, **info})).step(np.zeros(2))


@pytest.mark.parametrize("key", ["final_obs", "final_observation", "terminal_observation"])
def test_the_last_observation_of_an_environment_that_resets_itself_is_its_episodes_own(key):
    last = {"zeta": np.array([8.0, 9.0]), "angle": np.array([7.0])}
    parts = {"zeta": spaces.Box(-1, 1, (2,)), "angle": spaces.Box(-1, 1, (1,))}
    arm = Arm(spaces.Dict(parts), info={"success": False, key: last}, render_mode="rgb_array")
    adapted = row(arm)
    adapted.step(np.zeros(2))
    assert sorted(adapted.state().tolist()) == [7, 8, 9]
    with pytest.raises(EnvError, match="resets itself, so it cannot render the end of an episode"):
        adapted.render()
    adapted.reset("Arm", 0, "train", 0)
    assert adapted.render().shape == (5, 7, 3)
    assert sorted(adapted.state().tolist()) == [1, 2, 3]


def test_success_under_a_key_of_ones_own_may_be_reported_at_the_end_only():
    class Late(Arm):
        steps = 0

        def step(self, action):
            observation, reward, _, _, _ = super().step(action)
            self.steps += 1
            return observation, reward, False, self.steps == 2, {"solved": True} if self.steps == 2 else {}

    adapted = row(Late(), success_key="solved")
    assert adapted.step(np.zeros(2))[1] is False
    assert adapted.step(np.zeros(2))[1] is True


def test_a_wrapped_environment_is_named_after_what_it_wraps():
    assert row(gymnasium.wrappers.TimeLimit(Arm(), 5)).tasks() == {"Arm": ""}
