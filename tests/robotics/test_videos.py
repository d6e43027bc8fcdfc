"""Videos of the tabletop, which must not affect policies."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.episodes.episode_evaluation import ReplayVideos
from robotics.scenes import viewer
from robotics.scenes.arms import ARMS
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.envs import OBSERVATIONS, TabletopEnv
from robotics.scenes.experts import Expert
from robotics.scenes.presentation import PresentedScene
from robotics.scenes.tabletop_tasks import TASKS, TabletopScene
from robotics.scenes.videos import Caption, video_size, write_caption
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.gym_adapter import GymRow
from robotics.sim.opening import SimConfig, open_video_sim

mujoco = pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")

SIZE = (72, 96)
NO_DISPLAY = not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
GPU_LEVELS = 2
"""Of 255, by which two images of one scene differ on a GPU; none on a CPU."""


def film_env(task="reach", **options):
    return TabletopEnv(task, render_mode="rgb_array", render_size=SIZE, **{"observation": "state", **options})


def play(env, actions, between=lambda env: None):
    seen = [env.reset(options={"layout": 2})[0]]
    for action in actions:
        between(env)
        seen.append(env.step(action)[0])
    return seen


def expert_actions(task, layout, arm="panda"):
    env, expert, actions = TabletopEnv(task, arm, "state"), Expert(task), []
    env.reset(options={"layout": layout})
    done = False
    while not done:
        actions.append(expert.act(env.state))
        done = any(env.step(actions[-1])[2:4])
    return np.array(actions)


def bar_colour(frame):
    """Colour of the caption at its right edge."""
    return frame[-2, -2].astype(int)


def coloured(frame, channel):
    """Number of pixels above the caption of nearly this channel alone."""
    picture = frame[: -round(0.09 * len(frame))].astype(int)
    others = [other for other in range(3) if other != channel]
    return int((picture[..., channel] > 2 * picture[..., others].max(axis=-1)).sum())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("camera", ["front", "wrist"])
def test_observations_are_the_same_bits_when_videos_are_rendered_in_between(camera, closing):
    actions = np.random.default_rng(0).uniform(-1, 1, (6, 5))
    options = {"observation": OBSERVATIONS, "image_size": (40, 56), "camera": camera}
    filmed = closing(film_env("push", **options))
    plain = closing(TabletopEnv("push", **options))
    frames = []
    with_film = play(filmed, actions, lambda env: frames.append(env.render()))
    without = play(plain, actions)
    for one, other in zip(with_film, without, strict=True):
        for kind in OBSERVATIONS:
            np.testing.assert_array_equal(one[kind], other[kind])
    assert len({frame.tobytes() for frame in frames}) == len(frames)


@pytest.mark.usefixtures("backend")
def test_the_look_policy_renders_the_policys_images(closing):
    env = closing(film_env("push", observation=("state", "rgb"), image_size=SIZE, render_look="policy"))
    seen, _ = env.reset(options={"layout": 1})
    np.testing.assert_array_equal(env.render(), seen["rgb"])
    film = closing(film_env("push", observation=("state", "rgb"), image_size=SIZE))
    seen, _ = film.reset(options={"layout": 1})
    np.testing.assert_array_equal(film.policy_image(), seen["rgb"])
    assert not np.array_equal(film.render(), seen["rgb"])


@pytest.mark.usefixtures("backend")
def test_the_adapter_of_gymnasium_gives_policies_the_policys_image(closing):
    env = gymnasium.make(
        "robotics.scenes.registration:mmrl/Push-v0", observation="state", render_mode="rgb_array", render_size=SIZE
    )
    row = closing(GymRow(env, horizon=5, layout_options=True))
    row.reset("push", 1, "train", 0)
    np.testing.assert_array_equal(row.render(), env.unwrapped.policy_image())
    assert not np.array_equal(row.render(), env.render())


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("task", TASKS)
def test_the_presented_scene_takes_over_every_pose_and_adds_no_joint(task, arm):
    scene = TabletopScene(TASKS[task], ARMS[arm])
    data, presented = mujoco.MjData(scene.model), PresentedScene(scene)
    scene.reset(scene.model, data, np.random.default_rng(5))
    mujoco.mj_forward(scene.model, data)
    before = mujoco.mj_stateSize(scene.model, mujoco.mjtState.mjSTATE_INTEGRATION)
    state = np.empty(before)
    mujoco.mj_getState(scene.model, data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    presented.show(data, "success")
    after = np.empty(before)
    mujoco.mj_getState(scene.model, data, after, mujoco.mjtState.mjSTATE_INTEGRATION)
    np.testing.assert_array_equal(after, state)
    assert (presented.model.nq, presented.model.nu) == (scene.model.nq, scene.model.nu)
    for number in range(scene.model.nbody):
        name = scene.model.body(number).name
        np.testing.assert_allclose(presented.data.body(name).xpos, data.body(name).xpos, atol=1e-12)
        np.testing.assert_allclose(presented.data.body(name).xmat, data.body(name).xmat, atol=1e-12)
    for number in range(scene.model.ngeom):
        name = scene.model.geom(number).name
        if name and name != "floor":
            np.testing.assert_allclose(presented.data.geom(name).xpos, data.geom(name).xpos, atol=1e-12)


@pytest.mark.usefixtures("backend")
def test_success_turns_green(closing):
    env = closing(film_env("reach"))
    env.reset(options={"layout": 4})
    running = env.render()
    for action in expert_actions("reach", 4):
        env.step(action)
    solved = env.render()
    assert bar_colour(running).max() < 60
    assert bar_colour(solved)[1] > 2 * bar_colour(solved)[[0, 2]].max()
    assert coloured(solved, 1) > coloured(running, 1) + 5
    env.reset(options={"layout": 4})
    np.testing.assert_allclose(env.render().astype(int), running, atol=GPU_LEVELS)


@pytest.mark.usefixtures("backend")
def test_time_that_ran_out_turns_red(closing):
    env = closing(film_env("push", horizon=2))
    env.reset(options={"layout": 4})
    frames = [env.render()]
    for _ in range(2):
        env.step(np.zeros(5))
        frames.append(env.render())
    assert bar_colour(frames[1]).max() < 60
    assert bar_colour(frames[2])[0] > 3 * bar_colour(frames[2])[1:].max()
    assert coloured(frames[2], 0) > coloured(frames[1], 0) + 5


def test_captions_say_what_happened_and_fit():
    grey = np.full((240, 320, 3), 128, np.uint8)
    running = write_caption(grey, Caption("push the red cube into the blue zone", 1.23))
    assert (grey == 128).all()
    assert (running[:200] == 128).all()
    assert Caption("", 1.23).ending == "1.2 s"
    assert Caption("", 1.23, "success").ending == "solved in 1.2 s"
    assert Caption("", 6.0, "failure").ending == "not solved in 6.0 s"
    time, both = (
        (write_caption(grey, Caption(text, 1.23))[224:] > 100).any(axis=(0, 2)) for text in ("", "push " * 40)
    )
    begin = int(time.argmax())
    assert 240 < begin < 300
    assert both[:200].any()
    assert not both[begin - 4 : begin].any()  # the instruction is cut before the time
    np.testing.assert_array_equal(both[begin:], time[begin:])
    tiny = write_caption(np.zeros((20, 24, 3), np.uint8), Caption("push", 1.0, "success"))
    assert tiny.shape == (20, 24, 3)


@pytest.mark.usefixtures("backend")
def test_the_batch_renders_the_same_video_as_the_environment(closing):
    actions = expert_actions("push", 2)
    env = closing(TabletopEnv("push", observation="state", render_mode="rgb_array", render_size=video_size(96)))
    env.reset(options={"layout": 2})
    for action in actions:
        env.step(action)
    bar = round(0.075 * 96) + 1
    sim = closing(open_video_sim(SimConfig(tasks=["push"], image_size=32), 96))
    sim.reset([EpisodeSpec("push", "", 2)])
    result = sim.step_chunk(actions[None], record=[0])
    assert result.success[0]
    np.testing.assert_allclose(result.frames[0][-1][:-bar].astype(int), env.render()[:-bar], atol=GPU_LEVELS)
    assert coloured(result.frames[0][-1], 1) > coloured(result.frames[0][-2], 1) + 5
    assert sim.describe()["look"] == "film"


def test_evaluations_made_before_there_were_looks_keep_their_fingerprint():
    with TabletopBatch(settings=BatchSettings(image_size=None)) as sim:
        assert "look" not in sim.describe()


@pytest.mark.usefixtures("backend")
def test_an_evaluation_writes_videos(tmp_path):
    import av

    config = SimConfig(tasks=["reach"], image_size=16, horizon=3)
    row = {"task": "reach", "instruction": "touch the red cube", "layout": 0, "split": "train", "failed": False}
    with TabletopBatch(["reach"], settings=BatchSettings((16, 16), horizon=3)) as sim:
        videos = ReplayVideos(sim, config, tmp_path, "step", count=1, fps=5, size=48)
        videos.write([row | {"success": False, "actions": np.zeros((3, 5)).tolist()}])
    (path,) = tmp_path.glob("*.mp4")
    assert path.name == "step-failure-reach-0.mp4"
    with av.open(str(path)) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    assert len(frames) == 1 + 3 + 4  # the last one stays for a second
    assert frames[0].shape == (48, 64, 3)
    assert bar_colour(frames[-1])[0] > 2 * bar_colour(frames[-1])[1:].max()
    assert bar_colour(frames[0]).max() < 70


@pytest.mark.parametrize("display", [None, ":77"])
def test_without_a_display_a_window_says_what_to_do(display, monkeypatch):
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    if display:
        monkeypatch.setenv("DISPLAY", display)
    if sys.platform != "linux":
        pytest.skip("DISPLAY is Linux's")
    with pytest.raises(UserError, match=r"(?s)display.*rgb_array.*mmrl sim play TASK --video film.mp4"):
        TabletopEnv("reach", observation="state", render_mode="human")


def test_an_unknown_look_is_named():
    with pytest.raises(UserError, match="render_look is 'plain'; must be film or policy"):
        TabletopEnv("reach", observation="state", render_look="plain")


class Clock:
    """A clock that advances only while something waits."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Window:
    """A viewer whose images take time; it records when each was shown and its caption."""

    def __init__(self, clock, draw_s):
        self.clock, self.draw_s, self.shown, self.open = clock, draw_s, [], True
        self.cam = mujoco.MjvCamera()

    def is_running(self):
        return self.open

    def lock(self):
        return contextlib.nullcontext()

    def set_texts(self, text):
        self.caption = text[3]

    def sync(self):
        self.clock.now += self.draw_s
        self.shown.append((self.clock.now, self.caption))

    def close(self):
        self.open = False


@pytest.mark.parametrize(("draw_s", "least"), [(0.0, 101), (0.015, 101), (0.3, 4)])
def test_a_window_keeps_to_real_time_and_shows_the_end(draw_s, least, monkeypatch, closing):
    clock = Clock()
    window = Window(clock, draw_s)
    monkeypatch.setattr(viewer, "time", clock)
    monkeypatch.setattr(viewer, "check_display", lambda: None)
    opening = SimpleNamespace(launch_passive=lambda *given, **options: window)
    monkeypatch.setitem(sys.modules, "mujoco.viewer", opening)
    monkeypatch.setattr(mujoco, "viewer", opening, raising=False)
    env = closing(TabletopEnv("push", observation="state", render_mode="human", horizon=20))
    env.reset(options={"layout": 0})
    for _ in range(20):
        clock.now += 0.001  # of physics
        env.step(np.zeros(5))
    assert len(window.shown) >= least
    assert window.shown[0][1] == "0.0 s"
    assert window.shown[-1][1] == "not solved in 2.0 s"
    assert clock.now - window.shown[0][0] == pytest.approx(2.0, abs=0.02 + 2 * draw_s)
    window.open, shown = False, len(window.shown)
    assert env.window_closed
    env.reset(options={"layout": 0})
    assert len(window.shown) == shown


WATCHED = """
import numpy as np
from robotics.scenes import Expert, TabletopEnv

watched = TabletopEnv("reach", observation="state", render_mode="human", horizon=6)
plain = TabletopEnv("reach", observation="state", horizon=6)
expert = Expert("reach")
for env in (watched, plain):
    env.reset(options={"layout": 1})
for _ in range(6):
    action = expert.act(plain.state)
    one, other = watched.step(action), plain.step(action)
    assert np.array_equal(one[0]["state"], other[0]["state"])
assert watched.render() is None and not watched.window_closed
watched.close()
print("watched")
"""


@pytest.mark.skipif(NO_DISPLAY, reason="needs a display; xvfb-run pytest gives one")
def test_watching_changes_nothing():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", WATCHED], capture_output=True, text=True, timeout=120, cwd=root)
    assert done.stdout.strip() == "watched", done.stderr
