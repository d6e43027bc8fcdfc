"""Domain randomisation: each part changes only its own quantities, and the same episode has the same draw."""

import copy
import dataclasses
import json

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.fields import bounds_of
from robotics.scenes.arms import find_arm
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.envs import TabletopEnv
from robotics.scenes.tabletop_tasks import TabletopScene, find_task
from robotics.scenes.variant import SceneParts, vary_model
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig, open_sim
from robotics.sim.randomization import RandomizationConfig, Stream, read_randomization

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")
PARTS = {
    "lights": {"position_m": 0.3, "direction_rad": 0.3, "brightness": [0.6, 1.4], "colour": 0.2},
    "camera": {"position_m": 0.05, "rotation_rad": 0.05, "fovy_deg": 4.0},
    "colours": {"pieces": 0.1, "robot": 0.2, "surroundings": 0.3},
    "textures": {"patterns": ["checker", "stripes", "gradient", "noise"], "contrast": 0.6},
    "friction": [0.5, 1.5],
    "mass": [0.5, 2.0],
    "servo_gain": [0.7, 1.3],
    "action_delay": [1, 3],
    "observation_delay": [1, 3],
    "sensor_noise": {"position_m": 0.01, "yaw_rad": 0.02, "opening_m": 0.001, "pieces_m": 0.02, "image": 6.0},
}
DERIVED_FROM_MASS = {
    *("body_subtreemass", "body_invweight0", "dof_invweight0", "dof_M0", "actuator_acc0", "tendon_invweight0"),
    *("light_poscom0", "cam_poscom0", "dof_length", "stat.meaninertia", "stat.meanmass"),
}
FIELDS = {
    "lights": {"light_pos", "light_dir", "light_diffuse", "light_ambient", "headlight.diffuse", "headlight.ambient"},
    "camera": {"cam_pos", "cam_quat", "cam_fovy"},
    "colours": {"geom_rgba", "mat_rgba"},
    "textures": {"tex_data"},
    "friction": {"geom_friction"},
    "mass": {"body_mass", "body_inertia", *DERIVED_FROM_MASS},
    "servo_gain": {"actuator_gainprm", "actuator_biasprm"},
}
EVERYTHING = read_randomization(PARTS)
PUSH = EpisodeSpec("push", "", 3)


def only(*names, **changes):
    return read_randomization({name: PARTS[name] for name in names} | changes)


def scene_of(task="push", arm="panda", config=EVERYTHING):
    return TabletopScene(find_task(task), find_arm(arm), randomization=config)


def numbers(model):
    """Every number of a model by name, as MuJoCo shows them."""
    owners = {"": model, "stat.": model.stat, "headlight.": model.vis.headlight, "opt.": model.opt}
    found = {}
    for prefix, owner in owners.items():
        for name in dir(owner):
            value = None if name.startswith("_") else getattr(owner, name)
            if isinstance(value, (np.ndarray, float, int)):
                found[prefix + name] = np.array(value)
    return found


def changed(model, nominal):
    one, other = numbers(model), numbers(nominal)
    assert one.keys() == other.keys()
    return {name for name in one if not np.array_equal(one[name], other[name])}


def varied(scene, config, episode=PUSH):
    model = copy.copy(scene.model)
    drawn = vary_model(model, config, scene.parts, Stream(config.seed, episode))
    return model, drawn


@pytest.mark.parametrize("arm", ["panda", "ur5e"])
@pytest.mark.parametrize("part", FIELDS)
@pytest.mark.parametrize("task", ["push", "drawer"])
def test_a_part_changes_its_own_numbers_and_the_scene_stays_nominal(part, arm, task):
    scene = scene_of(task, arm)
    nominal = copy.copy(scene.model)
    model, drawn = varied(scene, only(part))
    found = changed(model, scene.model)
    # A drawer's scene has no free cube, so not all that is derived from masses differs there.
    assert found <= FIELDS[part]
    assert found >= FIELDS[part] - DERIVED_FROM_MASS - ({"light_ambient"} if part == "lights" else set())
    assert drawn
    assert all(name.partition(".")[0] == part for name in drawn)
    assert json.loads(json.dumps(drawn)) == drawn
    assert not changed(scene.model, nominal)


def test_nothing_is_on_by_default_and_every_range_has_its_unit():
    assert RandomizationConfig().active() == []
    assert EVERYTHING.active() == list(PARTS)
    assert (
        TabletopBatch(["push"], settings=BatchSettings(image_size=None)).describe().keys().isdisjoint({"randomization"})
    )
    for item in dataclasses.fields(RandomizationConfig):
        value = getattr(RandomizationConfig(), item.name)
        inner = dataclasses.fields(value) if dataclasses.is_dataclass(value) else [item]
        for leaf in inner:
            if leaf.name not in ("seed", "per", "patterns"):
                assert bounds_of(leaf).unit, leaf.name


def test_draws_stay_in_their_ranges_and_fill_them():
    scene, config = scene_of(), only("lights", "camera", "friction", "mass", "servo_gain")
    drawn = [varied(scene, config, EpisodeSpec("push", "", layout))[1] for layout in range(60)]
    for name, low, high in (
        ("friction", 0.5, 1.5),
        ("mass.red_cube", 0.5, 2.0),
        ("servo_gain.joint3", 0.7, 1.3),
        ("lights.brightness", 0.6, 1.4),
        ("camera.front.fovy_deg", 34.0, 42.0),
        ("camera.front.position_m", -0.05, 0.05),
        ("lights.lamp.position_m", -0.3, 0.3),
    ):
        values = np.array([draw[name] for draw in drawn])
        assert ((values >= low) & (values <= high)).all()
        # 60 uniform draws miss the outer tenth at one end with a probability of 0.9^60 = 0.002.
        assert values.min() < low + 0.1 * (high - low)
        assert values.max() > high - 0.1 * (high - low)
    assert {draw["camera.front.position_m"][0] == draw["camera.wrist.position_m"][0] for draw in drawn} == {False}


def test_inertia_and_derived_quantities_follow_the_mass():
    scene = scene_of()
    model, drawn = varied(scene, only("mass"))
    cube, factor = model.body("red_cube").id, drawn["mass.red_cube"]
    np.testing.assert_allclose(model.body_mass[cube], factor * scene.model.body_mass[cube], rtol=1e-14)
    np.testing.assert_allclose(model.body_inertia[cube], factor * scene.model.body_inertia[cube], rtol=1e-14)
    # A free body's inverse weight is that of its mass: 1 / m, and 1 / I for its turns.
    free = slice(int(model.body("red_cube").dofadr[0]), int(model.body("red_cube").dofadr[0]) + 6)
    np.testing.assert_allclose(model.dof_invweight0[free], scene.model.dof_invweight0[free] / factor, rtol=1e-9)
    assert list(drawn) == ["mass.red_cube"]  # the zone is painted on the table
    assert set(varied(scene_of("drawer"), only("mass"))[1]) == {"mass.drawer"}


def test_every_contact_has_the_drawn_friction():
    import mujoco

    contacts = []
    scene = scene_of()
    model, drawn = varied(scene, only("friction"))
    for each in (scene.model, model):
        data = mujoco.MjData(each)
        scene.reset(each, data, np.random.default_rng(6))
        mujoco.mj_step(each, data, 20)
        contacts.append(np.array(data.contact.friction))
    assert len(contacts[0])
    np.testing.assert_allclose(contacts[1], drawn["friction"] * contacts[0], rtol=1e-12)


CALIBRATED = """<mujoco><worldbody>
  <camera name="c" pos="0 0 1" sensorsize="0.0064 0.0048" focal="0.006 0.006" resolution="640 480"/>
  <geom name="a" size=".1"/><body pos="0 0 1"><freejoint/><geom name="b" size=".1"/></body>
</worldbody><contact><pair geom1="a" geom2="b" friction="1 1 .1 .1 .1"/></contact></mujoco>"""


def test_calibrated_cameras_and_listed_contacts_of_an_own_scene_are_varied():
    import mujoco

    model = mujoco.MjModel.from_xml_string(CALIBRATED)
    parts = SceneParts({}, {}, (), (), (), np.zeros(1))
    drawn = vary_model(model, only("camera", "friction"), parts, Stream(0, PUSH))
    np.testing.assert_allclose(model.pair_friction, drawn["friction"] * np.array([[1, 1, 0.1, 0.1, 0.1]]))
    data, scene, camera = mujoco.MjData(model), mujoco.MjvScene(model, 9), mujoco.MjvCamera()
    camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, 0
    mujoco.mj_forward(model, data)
    mujoco.mjv_updateScene(model, data, mujoco.MjvOption(), None, camera, mujoco.mjtCatBit.mjCAT_ALL, scene)
    seen = scene.camera[0]
    fovy_deg = 2 * np.degrees(np.arctan(seen.frustum_top / seen.frustum_near))
    assert fovy_deg == pytest.approx(drawn["camera.c.fovy_deg"], rel=1e-5)


def test_a_draw_depends_on_its_episode_and_seed_alone():
    scene = scene_of()
    drawn = varied(scene, EVERYTHING)[1]
    alone = {name: value for part in FIELDS for name, value in varied(scene, only(part))[1].items()}
    assert alone == drawn
    others = [
        dataclasses.replace(PUSH, layout=4),
        dataclasses.replace(PUSH, split="held_out"),
        dataclasses.replace(PUSH, draw=1),
    ]
    values = [drawn["friction"], *(varied(scene, EVERYTHING, other)[1]["friction"] for other in others)]
    values.append(varied(scene, read_randomization(PARTS | {"seed": 1}))[1]["friction"])
    assert len(set(values)) == 5
    assert varied(scene, EVERYTHING, dataclasses.replace(PUSH, instruction="push it"))[1] == drawn


ACTIONS = np.random.default_rng(1).uniform(-1, 1, (6, 8, 5))


def run(config, episodes, *, chunks=(8,), size=None, state="full", workers=1, tasks=("push", "stack"), actions=ACTIONS):
    """Observed states, images, rewards, full states and draws of episodes at the end of each chunk."""
    settings = BatchSettings(image_size=size, state=state, reward="dense", randomization=config)
    seen, start = [], 0
    with TabletopBatch(list(tasks), settings=settings, workers=workers) as sim:
        begun = sim.reset(episodes)
        seen.append((begun.observation, begun.rewards, sim.full_state()))
        for length in chunks:
            result = sim.step_chunk(actions[: len(episodes), start : start + length])
            assert len(sim.live) == len(episodes)
            seen.append((result.observation, result.rewards, sim.full_state()))
            start += length
    return seen, begun.drawn


def same(one, other):
    return all(
        np.array_equal(a.state, b.state)
        and (a.images is None or np.array_equal(a.images, b.images))
        and np.array_equal(rewards, those)
        and np.array_equal(full, whole)
        for (a, rewards, full), (b, those, whole) in zip(one, other, strict=True)
    )


@pytest.mark.usefixtures("backend")
def test_the_nominal_scene_is_that_without_randomisation_bit_for_bit():
    episodes = [PUSH, EpisodeSpec("stack", "", 1)]
    plain, nothing = run(RandomizationConfig(), episodes, size=(32, 32))
    asked, drawn = run(EVERYTHING, [dataclasses.replace(each, draw=None) for each in episodes], size=(32, 32))
    assert same(plain, asked)
    assert not nothing
    assert not drawn


@pytest.mark.usefixtures("backend")
def test_episodes_are_alike_whatever_their_order_chunks_and_threads():
    episodes = [EpisodeSpec("push", "", 0), EpisodeSpec("stack", "", 1), EpisodeSpec("push", "", 2, "held_out", 5)]
    one, drawn = run(EVERYTHING, episodes, size=(32, 32), chunks=(8,))
    other, again = run(EVERYTHING, episodes, size=(32, 32), chunks=(3, 5), workers=3)
    assert same([one[0], (one[1][0], one[1][1][:, 3:], one[1][2])], [other[0], other[2]])
    assert drawn == again
    turned = [ACTIONS[2], ACTIONS[1], ACTIONS[0]]
    back, swapped = run(EVERYTHING, episodes[::-1], size=(32, 32), actions=np.stack(turned))
    assert np.array_equal(back[1][0].images[::-1], one[1][0].images)
    assert np.array_equal(back[1][0].state[::-1], one[1][0].state)
    assert [swapped[row] for row in (2, 1, 0)] == [drawn[row] for row in range(3)]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("camera", ["front", "wrist"])
def test_a_batch_and_an_environment_draw_and_see_the_same(camera, closing):
    episodes = [EpisodeSpec("push", "", 0), EpisodeSpec("push", "", 7, draw=2), EpisodeSpec("push", "", 7, draw=None)]
    views = [name for name in ("front", "wrist") if name != camera]
    settings = BatchSettings(
        image_size=(32, 32), state="full", camera=camera, views=tuple(views), reward="dense", randomization=EVERYTHING
    )
    with TabletopBatch(["push"], settings=settings, workers=2) as sim:
        begun, chunk = sim.reset(episodes), sim.step_chunk(ACTIONS[:3, :6])
    seen_by = {"image_size": (32, 32), "camera": camera, "views": views}
    env = closing(TabletopEnv("push", observation=("state", "rgb"), randomization=PARTS, **seen_by))
    for row, episode in enumerate(episodes):
        first, info = env.reset(options={"layout": episode.layout, "draw": episode.draw})
        assert info.get("randomization") == begun.drawn.get(row)
        assert np.array_equal(first["state"], begun.observation.state[row])
        assert np.array_equal(first["rgb"], begun.observation.images[row])
        assert np.array_equal(first["views"], begun.observation.views[row])
        for action in ACTIONS[row, :6]:
            seen, *_ = env.step(action)
        assert np.array_equal(seen["state"], chunk.observation.state[row])
        assert np.array_equal(seen["rgb"], chunk.observation.images[row])
        assert np.array_equal(seen["views"], chunk.observation.views[row])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("part", ["lights", "camera", "colours", "textures", "sensor_noise"])
def test_parts_that_are_seen_change_images_and_no_physics(part):
    plain, _ = run(RandomizationConfig(), [PUSH], size=(32, 32))
    other, _ = run(only(part), [PUSH], size=(32, 32))
    for (seen, rewards, full), (looks, those, whole) in zip(plain, other, strict=True):
        assert np.abs(seen.images.astype(int) - looks.images).mean() > 0.5
        assert np.array_equal(rewards, those)
        assert np.array_equal(full, whole)
        assert np.array_equal(seen.state, looks.state) == (part != "sensor_noise")


@pytest.mark.parametrize("part", ["friction", "mass", "servo_gain"])
def test_parts_of_the_physics_change_how_a_cube_is_pushed(part):
    from robotics.scenes.experts import Expert

    ends = []
    for config in (RandomizationConfig(), only(part)):
        expert = Expert("push")
        with TabletopBatch(["push"], settings=BatchSettings(image_size=None, randomization=config), workers=1) as sim:
            first = sim.reset([PUSH]).observation.state
            while len(sim.live):
                last = sim.step_chunk(expert.act(sim.full_state())[:, None]).object_poses
            ends.append((first, last))
    assert np.array_equal(ends[0][0], ends[1][0])
    assert not np.array_equal(ends[0][1], ends[1][1])


def test_a_delay_of_actions_is_the_same_actions_later():
    config = read_randomization({"action_delay": [2, 2]})
    late, drawn = run(config, [PUSH], chunks=(1, 2, 5))
    still = np.zeros((1, 2, 5))
    still[..., -1] = -1.0
    plain, _ = run(RandomizationConfig(), [PUSH], chunks=(1, 2, 5), actions=np.concatenate([still, ACTIONS[:1]], 1))
    assert same(late, plain)
    assert drawn == {0: {"action_delay": 2}}


@pytest.mark.usefixtures("backend")
def test_a_delay_returns_past_observations():
    steps = 6 * [1]
    plain, _ = run(RandomizationConfig(), [PUSH], chunks=steps, size=(32, 32))
    late, drawn = run(read_randomization({"observation_delay": [2, 2]}), [PUSH], chunks=steps, size=(32, 32))
    assert drawn == {0: {"observation_delay": 2}}
    commanded = slice(5, 10)
    for step in range(7):
        (seen, _, full), (earlier, *_), (now, _, whole) = late[step], plain[max(0, step - 2)], plain[step]
        assert np.array_equal(seen.images, earlier.images)
        assert np.array_equal(np.delete(seen.state, commanded), np.delete(earlier.state, commanded))
        assert np.array_equal(seen.state[:, commanded], now.state[:, commanded])
        assert np.array_equal(full, whole)


@pytest.mark.usefixtures("backend")
def test_noise_has_its_standard_deviation_and_leaves_the_truth_alone():
    levels = {"position_m": 0.01, "yaw_rad": 0.02, "opening_m": 0.001, "pieces_m": 0.02, "pieces_rad": 0.05}
    config = read_randomization({"sensor_noise": levels | {"image": 6.0}})
    episodes = [EpisodeSpec("push", "", layout) for layout in range(100)]
    settings = BatchSettings(image_size=(16, 16), state="full", randomization=config)
    with TabletopBatch(["push"], settings=settings, workers=1) as sim:
        observation, truth = sim.reset(episodes).observation, sim.full_state()
    noise = observation.state.astype(np.float64) - truth
    expected = np.array([*3 * [0.01], 0.02, 0.001, *5 * [0.0], *2 * [*3 * [0.02], 0.05], *4 * [0.02]])
    assert not noise[:, 5:10].any()
    # The standard deviation of 100 draws is off by 7% of itself (one sigma); float32 adds 1e-7.
    np.testing.assert_allclose(noise.std(axis=0), expected, rtol=0.3, atol=1e-6)
    assert (np.abs(noise.mean(axis=0)) <= 0.4 * expected + 1e-6).all()
    plain = BatchSettings(image_size=(16, 16), state="full")
    with TabletopBatch(["push"], settings=plain, workers=1) as sim:
        clean = sim.reset(episodes).observation.images
    difference = observation.images.astype(np.float64) - clean
    inside = (clean > 30) & (clean < 225)
    assert abs(difference[inside].std() - 6.0) < 0.1
    assert abs(difference[inside].mean()) < 0.1


def test_a_noise_is_that_of_its_control_step():
    config = only("sensor_noise")
    one, _ = run(config, [PUSH], chunks=(8,))
    many, _ = run(config, [PUSH], chunks=8 * [1])
    assert np.array_equal(one[1][0].state, many[8][0].state)
    noises = {tuple((seen.state - full)[0, :3]) for seen, _, full in many}
    assert len(noises) == 9


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"friction": [1.4, 0.6]}, "randomization.friction is [1.4, 0.6]; the first number must be the smaller one"),
        ({"mass": [0.0, 1.0]}, "mass is [0.0, 1.0]; must be a list of 2, each positive, in fractions"),
        ({"mass": [0.5]}, "must be a list of 2"),
        ({"action_delay": [0, 99]}, "in control steps"),
        ({"camera": {"position_m": -1.0}}, "camera.position_m is -1.0; must be at least 0, in m"),
        ({"lights": {"brightness": [2.0, 1.0]}}, "randomization.lights.brightness is [2.0, 1.0]"),
        ({"textures": {"patterns": ["plaid"]}}, "checker, stripes, gradient, noise"),
        ({"fricton": [1, 2]}, "did you mean 'friction'?"),
        ({"friction": "high"}, "friction"),
        ({"per": "step"}, "allowed: group, episode"),
    ],
)
def test_a_range_that_cannot_be_is_refused(given, problem):
    with pytest.raises(UserError) as error:
        TabletopEnv("push", observation="state", randomization=given)
    assert problem in str(error.value)


def test_draws_that_do_not_exist_are_refused():
    env = TabletopEnv("push", observation="state", randomization=PARTS)
    for draw in (-1, 0.5):
        with pytest.raises(UserError, match="draw is"):
            env.reset(options={"layout": 0, "draw": draw})
    with pytest.raises(UserError, match="available: layout, split, draw"):
        env.reset(options={"drawing": 1})


def test_an_environment_by_name_takes_a_dictionary_and_reports_its_draws(closing):
    import gymnasium

    env = closing(gymnasium.make("robotics.scenes.registration:mmrl/Push-v0", observation="state", randomization=PARTS))
    drawn = [env.reset(seed=0, options={"layout": layout})[1]["randomization"] for layout in (5, 6, 5)]
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]
    model, scene = env.unwrapped.model, scene_of()
    assert model.geom_friction[0, 0] == scene.model.geom_friction[0, 0] * drawn[2]["friction"]
    _, info = env.reset(options={"layout": 5, "draw": None})
    assert "randomization" not in info
    assert not changed(env.unwrapped.model, scene.model)


def test_a_vector_environment_reports_its_draws_and_agrees_with_single_ones(closing):
    from gymnasium.vector import SyncVectorEnv

    from robotics.scenes.vector_env import TabletopVectorEnv

    settings = BatchSettings(image_size=None, state="full", randomization=EVERYTHING)
    batch = closing(TabletopVectorEnv("push", 2, settings=settings, workers=1))
    single = closing(SyncVectorEnv(2 * [lambda: TabletopEnv("push", observation="state", randomization=EVERYTHING)]))
    (seen, infos), (expected, those) = batch.reset(seed=3), single.reset(seed=3)
    assert np.array_equal(seen["state"], expected["state"])
    assert infos["randomization"]["friction"].tolist() == those["randomization"]["friction"].tolist()
    for step in range(3):
        actions = ACTIONS[:2, step].astype(np.float32)
        seen, expected = batch.step(actions)[0], single.step(actions)[0]
        assert np.array_equal(seen["state"], expected["state"])


def test_processes_sample_the_same_as_threads():
    values = PARTS | {"textures": {"patterns": []}, "camera": {}, "lights": {}, "colours": {}}
    settings = SimConfig(image_size=0, tasks=["push"], state="full", randomization=read_randomization(values))
    processes = SimConfig(
        kind="gymnasium",
        env="robotics.scenes.registration:mmrl/Push-v0",
        image_size=0,
        horizon=30,
        workers=2,
        options={"observation": "state", "adapter": {"task": "push"}},
        randomization=read_randomization(values),
    )
    episodes = [EpisodeSpec("push", "", 4, draw=1), EpisodeSpec("push", "", 9, "held_out")]
    nominal = [dataclasses.replace(each, draw=None) for each in episodes]
    found = []
    for config in (settings, processes):
        sim = open_sim(config)
        try:
            for each in (episodes, nominal):
                begun, result = sim.reset(each), sim.step_chunk(ACTIONS[:2].astype(np.float32))
                found.append((begun.drawn, begun.observation.state, result.observation.state))
        finally:
            sim.close()
    for (drawn, *states), (those, *expected) in ((found[2], found[0]), (found[3], found[1])):
        assert dict(drawn) == dict(those)
        for state, other in zip(states, expected, strict=True):
            assert np.array_equal(state, other)
    assert set(found[0][0][0]) >= {"friction", "mass.red_cube", "action_delay"}
    assert not found[1][0]


def test_suites_with_their_own_scenes_refuse_ranges():
    config = SimConfig(kind="metaworld", randomization=only("friction"))
    with pytest.raises(ValueError, match=r"sim\.randomization has friction with sim\.kind metaworld"):
        config.validate()
