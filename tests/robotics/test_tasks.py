import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.scenes.arms import ARMS
from robotics.scenes.tabletop import PIECES, PROPRIO_SIZE, STATE_SIZE, SceneReading
from robotics.scenes.tabletop_tasks import SPLITS, SQUARE_M, TASKS, TabletopScene, draw_layout, find_task, layout_seed
from robotics.sim import FrameRenderer, RenderSettings
from robotics.sim.interface import SceneSteps

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")


def layouts(task: str, split: str, count: int):
    return [
        draw_layout(TASKS[task].areas, TASKS[task].apart_m, split, np.random.default_rng(layout_seed(split, n)))
        for n in range(count)
    ]


def started(task: str, arm: str = "panda", split: str = "train", layout: int = 0):
    scene = TabletopScene(TASKS[task], ARMS[arm], split)
    data = mujoco.MjData(scene.model)
    scene.reset(scene.model, data, np.random.default_rng(layout_seed(split, layout)))
    mujoco.mj_forward(scene.model, data)
    return scene, data


def reading(**given) -> SceneReading:
    """A scene in which nothing is near anything, at rest, with an open gripper."""
    usual = {
        "grip": [0.4, 0.0, 0.3],
        "yaw": 0.0,
        "opening": 0.08,
        "first": [0.5, 0.1, 0.025],
        "first_yaw": 0.0,
        "first_speed": 0.0,
        "second": [0.5, -0.1, 0.025],
        "second_yaw": 0.0,
        "goal": [0.4, -0.2, 0.0],
        "drawer": 0.0,
    }
    return SceneReading(**{name: np.array([value], float) for name, value in {**usual, **given}.items()})


@pytest.mark.parametrize("task", TASKS)
def test_layouts_repeat_and_lie_where_they_should(task):
    found = TASKS[task]
    for split in SPLITS:
        drawn = layouts(task, split, 40)
        assert drawn == layouts(task, split, 40)
        assert len({str(layout) for layout in drawn}) == 40
        for layout in drawn:
            points = np.array([pose[:2] for pose in layout.values()])
            for name, (x, y, yaw) in layout.items():
                area = found.areas[name]
                assert area.x_m[0] <= x <= area.x_m[1]
                assert area.y_m[0] <= y <= area.y_m[1]
                assert abs(yaw) <= area.yaw_rad
            gaps = np.linalg.norm(points[:, None] - points[None], axis=-1)[np.triu_indices(len(points), 1)]
            assert ((gaps >= found.apart_m[0]) & (gaps <= found.apart_m[1])).all()


@pytest.mark.parametrize("task", TASKS)
def test_no_piece_of_a_held_out_layout_lies_where_one_of_training_can(task):
    fields = {}
    for split in SPLITS:
        places = [pose for layout in layouts(task, split, 60) for pose in layout.values()]
        fields[split] = {(int(np.floor(x / SQUARE_M)), int(np.floor(y / SQUARE_M))) for x, y, _ in places}
    assert not fields["train"] & fields["held_out"]
    assert min(map(len, fields.values())) > 3


def test_seeds_of_the_splits_are_disjoint():
    seeds = [layout_seed(split, layout) for split in SPLITS for layout in (0, 1, 2, 999, 2**31 - 1)]
    assert len(set(seeds)) == len(seeds)
    assert {seed % 2 for seed in seeds[:5]} == {0}
    assert {seed % 2 for seed in seeds[5:]} == {1}


def test_both_cubes_are_named_in_the_same_layouts():
    assert layouts("reach", "train", 5) == layouts("reach_green", "train", 5)
    assert TASKS["reach"].instruction != TASKS["reach_green"].instruction


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("task", TASKS)
def test_an_episode_starts_at_rest_and_not_done(task, arm):
    scene, data = started(task, arm)
    before = scene.sensors.read(data.sensordata[None])
    assert not scene.task.success(before)[0]
    assert before.grip[0] == pytest.approx((0.45, 0.0, 0.22), abs=1e-3)
    mujoco.mj_step(scene.model, data, 250)
    after = scene.sensors.read(data.sensordata[None])
    assert not data.warning.number.any()
    assert after.grip == pytest.approx(before.grip, abs=1e-3)
    assert after.first == pytest.approx(before.first, abs=1e-3)
    assert after.second == pytest.approx(before.second, abs=1e-3)
    assert after.first_speed[0] < 1e-3


@pytest.mark.parametrize("task", TASKS)
def test_sensors_measure_the_positions_of_the_layout(task):
    scene, data = started(task, layout=3)
    layout, roles = layouts(task, "train", 4)[3], TASKS[task].roles
    found = scene.sensors.read(data.sensordata)
    for name, measured in ((roles.first, found.first), (roles.second, found.second), (roles.goal, found.goal)):
        if name is None:
            assert not measured.any()
        elif PIECES[name].kind != "drawer":
            assert measured == pytest.approx((*layout[name][:2], PIECES[name].height_m), abs=1e-6)
    assert found.first_yaw == pytest.approx(layout[roles.first][2])


def test_the_state_is_laid_out_as_documented():
    scene, data = started("pick_place", layout=3)
    layout = layouts("pick_place", "train", 4)[3]
    command = np.array([[0.1, 0.2, 0.3, 0.4, 1.0]])
    state = scene.sensors.state(data.sensordata[None], command)[0]
    assert state.shape == (STATE_SIZE,)
    assert state.dtype == np.float32
    assert state[:3] == pytest.approx((0.45, 0.0, 0.22), abs=1e-3)
    assert state[4] == pytest.approx(0.08)
    assert state[5:PROPRIO_SIZE] == pytest.approx(command[0])
    assert state[10:14] == pytest.approx((*layout["red_cube"][:2], 0.025, layout["red_cube"][2]), abs=1e-6)
    assert not state[14:18].any()
    assert state[18:21] == pytest.approx((*layout["yellow_plate"][:2], 0.01), abs=1e-6)
    assert state[21] == 0.0


@pytest.mark.parametrize(
    ("task", "done", "spoilt"),
    [
        ("reach", {"grip": [0.5, 0.1, 0.055]}, [{"grip": [0.5, 0.1, 0.065]}, {"grip": [0.5, -0.1, 0.025]}]),
        (
            "push",
            {"first": [0.4, -0.165, 0.025]},
            [{"first": [0.4, -0.155, 0.025]}, {"first_speed": 0.1}, {"first": [0.4, -0.2, 0.08]}],
        ),
        (
            "pick_place",
            {"first": [0.4, -0.17, 0.035], "goal": [0.4, -0.2, 0.01]},
            [{"first": [0.4, -0.15, 0.035]}, {"first_speed": 0.1}, {"opening": 0.05}, {"first": [0.4, -0.2, 0.06]}],
        ),
        (
            "stack",
            {"first": [0.51, -0.1, 0.075]},
            [{"first": [0.53, -0.1, 0.075]}, {"first_speed": 0.1}, {"opening": 0.05}, {"first": [0.5, -0.1, 0.1]}],
        ),
        ("drawer", {"drawer": 0.11}, [{"drawer": 0.09}]),
    ],
)
def test_success_by_hand(task, done, spoilt):
    assert TASKS[task].success(reading(**done)).tolist() == [True]
    assert TASKS[task].dense_reward(reading(**done)).tolist() == [1.0]
    for change in ({}, *spoilt):
        given = {**done, **change} if change else {}
        assert TASKS[task].success(reading(**given)).tolist() == [False]
        assert 0.0 <= TASKS[task].dense_reward(reading(**given))[0] <= 0.95


@pytest.mark.parametrize(
    ("task", "way"),
    [
        ("reach", [{"grip": [0.5, 0.1, z]} for z in (0.3, 0.2, 0.1, 0.07)]),
        ("push", [{"grip": [0.5, y, 0.02]} for y in (0.3, 0.2)] + [{"first": [0.42, y, 0.025]} for y in (0.0, -0.1)]),
        (
            "pick_place",
            [
                {},
                {"grip": [0.5, 0.1, 0.1]},
                {"grip": [0.5, 0.1, 0.025], "opening": 0.05},
                {"grip": [0.45, 0.0, 0.1], "first": [0.45, 0.0, 0.1], "opening": 0.05},
                {"grip": [0.4, -0.2, 0.06], "first": [0.4, -0.2, 0.06], "opening": 0.05},
            ],
        ),
        ("drawer", [{"grip": [0.4, 0.0, 0.1]}, {"grip": [0.5, 0.1, 0.03]}, {"grip": [0.5, 0.1, 0.03], "drawer": 0.05}]),
    ],
)
def test_the_dense_reward_rises_towards_success(task, way):
    rewards = [float(TASKS[task].dense_reward(reading(**moment))[0]) for moment in way]
    assert np.all(np.diff(rewards) > 0.02)


def test_scores_do_not_depend_on_how_steps_are_cut():
    scene, data = started("push")
    rng = np.random.default_rng(0)
    sensors = data.sensordata + rng.normal(0.0, 0.05, (12, scene.model.nsensordata))
    for reward in ("sparse", "dense"):
        scene.reward = reward
        whole = scene.score(steps_of(scene, sensors))
        parts = [scene.score(steps_of(scene, sensors[row : row + 1])) for row in range(12)]
        assert np.array_equal(whole[0], np.concatenate([part[0] for part in parts]))
        assert np.array_equal(whole[1], np.concatenate([part[1] for part in parts]))


def steps_of(scene, sensors) -> SceneSteps:
    count, model = len(sensors), scene.model
    return SceneSteps(np.zeros((count, model.nu)), np.zeros((count, model.nq)), np.zeros((count, model.nv)), sensors)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("task", sorted(set(TASKS) - {"reach_green"}))
def test_every_piece_covers_several_pixels_of_a_small_image(task):
    for layout in (0, 1, 2):
        scene, data = started(task, layout=layout)
        with FrameRenderer(scene.model, RenderSettings(64, 64, "front")) as renderer:
            shapes = renderer.segmentation(data)[..., 0]
        for name in TASKS[task].areas:
            body = scene.model.body(PIECES[name].body).id
            members = [
                geom
                for geom in range(scene.model.ngeom)
                if body in (scene.model.geom_bodyid[geom], scene.model.body_parentid[scene.model.geom_bodyid[geom]])
            ]
            assert np.isin(shapes, members).sum() >= 12


def test_colours_of_pieces_are_far_apart():
    colours = np.array([piece.rgba[:3] for piece in PIECES.values()])
    gaps = np.linalg.norm(colours[:, None] - colours[None], axis=-1)
    assert gaps[np.triu_indices(len(colours), 1)].min() > 0.25


def test_unknown_names_are_listed():
    with pytest.raises(UserError, match="unknown task 'juggle'; available: reach, reach_green, push"):
        find_task("juggle")
    with pytest.raises(UserError, match="split is 'test'; must be train or held_out"):
        layout_seed("test", 0)
    with pytest.raises(UserError, match="layout is -1"):
        layout_seed("train", -1)
    with pytest.raises(UserError, match="reward is 'shaped'"):
        TabletopScene(TASKS["reach"], ARMS["panda"], reward="shaped")
    scene = TabletopScene(TASKS["reach"], ARMS["panda"])
    assert scene.for_split("train") is scene
    assert scene.for_split("held_out").model is scene.model
    with pytest.raises(UserError, match="split is 'all'"):
        scene.for_split("all")


def test_a_task_without_room_says_so():
    with pytest.raises(RuntimeError, match="no layout of red_cube, green_cube"):
        draw_layout(TASKS["stack"].areas, (3.0, 4.0), "train", np.random.default_rng(0))
