"""`mmrl sim play`: videos, strips and windows of experts, random actions and saved policies."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.cli import main
from mmrl.errors import UserError
from robotics.episodes.collect import ActingSettings, run_episodes
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.small import SmallVlaConfig, SmallVlaPolicy
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.envs import TabletopEnv
from robotics.scenes.play import RandomActor
from robotics.scenes.videos import Caption, ImageStrip, write_strips
from robotics.serving.acting import PolicyActor
from robotics.sim.episodes import EpisodeSpec

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")

ROOT = Path(__file__).resolve().parents[2]
NO_DISPLAY = not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def frames_of(path):
    import av

    with av.open(str(path)) as video:
        return [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)], video.streams.video[
            0
        ].average_rate


def tiny_policy(folder, state_size=10, action_size=5, image_size=(32, 32)):
    torch.manual_seed(0)
    encoder = EncoderConfig(
        image_size=image_size, state_size=state_size, width=32, heads=2, layers=1, channels=8, keypoints=4
    )
    policy = SmallVlaPolicy.build(SmallVlaConfig(action_size, 4, encoder=encoder), ["touch the red cube"])
    policy.save_pretrained(folder)
    return policy


@pytest.mark.usefixtures("backend")
def test_a_video_shows_each_episode_and_its_end(tmp_path, capsys):
    film, strip = tmp_path / "new/film.mp4", tmp_path / "strip.png"
    options = ["height=48", "horizon=4", "layout=7", "split=train", "--policy", "random", "--episodes", "2"]
    assert main(["sim", "play", "push", *options, "--video", str(film), "--strip", str(strip)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "episode 1, layout 7 of train: not solved in 0.4 s",
        "episode 2, layout 8 of train: not solved in 0.4 s",
        "push: 0 of 2 solved",
        f"written: {film}",
        f"written: {strip}",
    ]
    frames, rate = frames_of(film)
    # 0.4 s at 25 frames a second from the start on, of which the last frame stays for a second
    assert len(frames) == 2 * (10 + 25)
    assert rate == 25
    assert frames[0].shape == (48, 64, 3)
    bars = [frame[-2, -2].astype(int) for frame in frames]
    red = [bool(bar[0] > 2 * bar[1:].max()) for bar in bars]
    assert red == 2 * (10 * [False] + 25 * [True])
    with Image.open(strip) as picture:
        assert picture.size == (5 * 176 + 4 * 3, 2 * (22 + 176) + 8)
    assert list(tmp_path.rglob("*.part*")) == []


@pytest.mark.usefixtures("backend")
def test_the_expert_solves_the_shown_task(tmp_path, capsys):
    strip = tmp_path / "strip.png"
    assert main(["sim", "play", "reach", "height=48", "arm=ur5e", "--seed", "3", "--strip", str(strip)]) == 0
    assert "reach: 1 of 1 solved" in capsys.readouterr().out
    with Image.open(strip) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    last = pixels[-8, 5 * (176 + 3) + 2]  # beside the time in the last picture
    assert last[1] > 2 * last[[0, 2]].max()


@pytest.mark.usefixtures("backend")
def test_a_policy_acts_as_in_an_evaluation_of_it(tmp_path, closing):
    policy = tiny_policy(tmp_path / "policy")
    episode = EpisodeSpec("reach", "touch the red cube", 5, "held_out")
    settings = BatchSettings((32, 32), camera="front", state="proprio", horizon=10)
    with TabletopBatch(["reach"], settings=settings) as sim:
        evaluated = run_episodes(
            policy.eval(), sim, [episode], ActingSettings(), torch.Generator().manual_seed(0), greedy=True
        )
    actor = PolicyActor(tmp_path / "policy")
    env = closing(TabletopEnv("reach", horizon=10, split="held_out", **actor.options))
    observation, _ = env.reset(options={"layout": 5})
    actor.reset(0)
    actions, ended = [], False
    while not ended:
        actions.append(actor.act(env, observation))
        observation, _, terminated, truncated, _ = env.step(actions[-1])
        ended = terminated or truncated
    np.testing.assert_allclose(np.stack(actions), evaluated.actions[0], atol=1e-6)


@pytest.mark.usefixtures("backend")
def test_a_saved_policy_is_recorded(tmp_path, capsys):
    tiny_policy(tmp_path / "policy", state_size=22)
    film = tmp_path / "film.mp4"
    arguments = ["--policy", str(tmp_path / "policy"), "--video", str(film)]
    assert main(["sim", "play", "reach", "height=48", "horizon=2", "temperature=0.5", *arguments]) == 0
    assert "reach: 0 of 1 solved" in capsys.readouterr().out
    assert len(frames_of(film)[0]) == 5 + 25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action_size": 7}, "have 7 entries, but those of reach have 5"),
        ({"state_size": 3}, "reads a state of 3 entries, but reach has state with 22, proprio with 10"),
    ],
)
def test_policies_of_other_robots_are_refused(changes, message, tmp_path):
    tiny_policy(tmp_path / "policy", **changes)
    with pytest.raises(UserError, match=message):
        PolicyActor(tmp_path / "policy")


def test_random_actions_repeat_with_their_seed():
    one, same, other = RandomActor(3), RandomActor(3), RandomActor(4)
    for actor in (one, same, other):
        actor.reset(1)
    env = SimpleNamespace(action_space=SimpleNamespace(shape=(5,)))
    first = [one.act(env, {}) for _ in range(6)]
    np.testing.assert_array_equal(first, [same.act(env, {}) for _ in range(6)])
    assert not np.array_equal(first[0], other.act(env, {}))
    assert np.array_equal(first[0], first[4])
    assert not np.array_equal(first[4], first[5])


def test_strips_show_frames_from_the_first_to_the_last(tmp_path):
    strip = ImageStrip()
    for number in range(21):
        strip.add(np.full((60, 80, 3), 10 * number, np.uint8), Caption("touch", number / 10))
    row = strip.draw(count=5, side=40)
    assert row.size == (5 * 40 + 4 * 3, 22 + 40)
    levels = [row.getpixel((number * 43 + 20, 25))[0] for number in range(5)]
    assert levels == [0, 50, 100, 150, 200]
    write_strips(tmp_path / "a/strip.png", [strip, ImageStrip(), strip])
    with Image.open(tmp_path / "a/strip.png") as page:
        assert page.height == 2 * (22 + 176) + 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "unknown task 'fly'; available: reach"),
        (["push", "--policy", "nobody"], "--policy is 'nobody', which is neither one of expert, random nor the folder"),
        (["push", "--episodes", "0"], "--episodes is 0; must be at least 1"),
        (["push", "--video", "film.gif"], "film.gif must end with .mp4"),
        (["push", "--strip", "film.jpg"], "film.jpg must end with .png"),
        (["push", "arms=panda"], "did you mean|arm"),
        (["push", "arm=hand"], "panda, ur5e"),
        (["push", "split=test"], "train"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys, tmp_path):
    files = [] if {"--video", "--strip"} & set(arguments) else ["--video", str(tmp_path / "film.mp4")]
    assert main(["sim", "play", *arguments, *files]) == 2
    error = capsys.readouterr().err
    assert any(part in error for part in message.split("|")), error
    assert not (tmp_path / "film.mp4").exists()


def test_without_a_display_a_video_is_suggested(monkeypatch, capsys):
    if sys.platform != "linux":
        pytest.skip("DISPLAY is Linux's")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert main(["sim", "play", "push"]) == 2
    assert "--video film.mp4" in capsys.readouterr().err


@pytest.mark.skipif(NO_DISPLAY, reason="needs a display; xvfb-run pytest gives one")
def test_a_window_opens_and_closes():
    command = [sys.executable, "-m", "mmrl.cli", "sim", "play", "push", "horizon=3", "--policy", "random"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "push: 0 of 1 solved" in done.stdout
