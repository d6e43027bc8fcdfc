import json

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from robotics.methods.video_encoder import (
    POOLINGS,
    VideoEncoder,
    VideoEncoderConfig,
    VideoTraining,
    fit_frames,
    train_video_encoder,
)
from tests.rounding import assert_equal_up_to_rounding

SIDE = 32
SMALL = VideoEncoderConfig(height=SIDE, width=SIDE, channels=8, frame_channels=8, size=32)
TINY = VideoEncoderConfig(height=16, width=8, channels=4, frame_channels=2, size=6, clip_frames=4)
DISTRACTOR_STEP, HAND_SHAKE, PIXEL_NOISE = 0.6, 0.15, 12


def play(rng, kind):
    """Frames of a dot that moves to a disc, next to another that wanders, and the share of the path that is left.

    A success ends at the disc; a failure stops on its path or moves elsewhere, and stays there for the same time again.
    """
    start, goal = np.array([rng.uniform(5, 27), rng.uniform(22, 28)]), np.array([rng.uniform(8, 24), rng.uniform(4, 7)])
    aim = np.array([rng.uniform(3, 29), rng.uniform(6, 29)]) if kind == "astray" else goal
    way = aim - start
    length = np.linalg.norm(way) * (rng.uniform(0, 0.95) if kind == "stops" else 1.0)
    travelled = np.minimum(np.arange(60) * rng.uniform(0.9, 1.6), length)
    arrived = int(np.argmax(travelled >= length))
    travelled = travelled[: arrived + 1] if kind == "success" else travelled[:40]
    dot = start + np.outer(travelled, way / np.linalg.norm(way)) + rng.normal(0, HAND_SHAKE, (len(travelled), 2))
    other = (rng.uniform(4, 28, 2) + np.cumsum(rng.normal(0, DISTRACTOR_STEP, dot.shape), axis=0)).clip(2, 29)
    return draw(rng, goal, other, dot), float(np.linalg.norm(dot[-1] - goal) / np.linalg.norm(start - goal))


def draw(rng, goal, other, dot):
    grid = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE)), axis=-1)
    video = np.full((len(dot), SIDE, SIDE, 3), 60.0)
    for frame, middle, wanderer in zip(video, dot, other, strict=True):
        for centre, colour, radius in (
            (goal, (40, 200, 60), 3.5),
            (wanderer, (80, 80, 220), 2.2),
            (middle, (230, 60, 40), 2.8),
        ):
            frame[np.square(grid - centre).sum(-1) < radius**2] = colour
    return (video + rng.normal(0, PIXEL_NOISE, video.shape)).clip(0, 255).astype(np.uint8)


def ranks(values):
    return np.argsort(np.argsort(values)).astype(float)


def progress_correlation(encoder):
    """Spearman's correlation, over failures, between the distance to the mean success and the remaining share of the
    path.
    """
    rng = np.random.default_rng(5)
    wins = [play(rng, "success")[0] for _ in range(16)]
    losses, left = zip(*[play(rng, ("stops", "astray")[number % 2]) for number in range(60)], strict=True)

    def embed(videos):
        clips = [video[np.linspace(0, len(video) - 1, 16).astype(int)] for video in videos]
        with torch.no_grad():
            return encoder.trajectory(torch.from_numpy(np.stack(clips))).numpy()

    distance = np.linalg.norm(embed(losses) - embed(wins).mean(0), axis=1)
    return np.corrcoef(ranks(distance), ranks(left))[0, 1]


def random_videos(count=3, frames=6, shape=(16, 8)):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (frames, *shape, 3), dtype=np.uint8) for _ in range(count)]


@pytest.fixture(scope="module")
def plays():
    rng = np.random.default_rng(0)
    return [play(rng, kind)[0] for kind in ["success"] * 26 + ["stops"] * 20 + ["astray"] * 20]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_after_training_the_distance_to_successes_follows_the_remaining_path(plays, seed):
    explained = []
    training = VideoTraining(steps=100, learning_rate=3e-3, seed=seed)
    trained = train_video_encoder(plays, SMALL, training, lambda step, terms: explained.append(terms["explained"]))
    torch.manual_seed(seed)
    untrained = VideoEncoder(SMALL).eval()
    # Over five seeds 0.31 to 0.72 against -0.17 to 0.30.
    assert progress_correlation(trained) > progress_correlation(untrained) + 0.2
    assert explained[-1] > 0.5 > explained[0]


def test_equal_seeds_give_equal_weights_and_leave_the_global_generator_alone():
    def weights(seed):
        state = torch.get_rng_state()
        encoder = train_video_encoder(random_videos(), TINY, VideoTraining(steps=3, batch=4, frames=3, seed=seed))
        assert torch.equal(state, torch.get_rng_state())
        return torch.cat([weight.flatten() for weight in encoder.state_dict().values()])

    first = weights(1)
    assert torch.equal(first, weights(1))
    assert not torch.equal(first, weights(2))


def test_a_step_learns_from_every_parameter():
    torch.manual_seed(0)
    before = VideoEncoder(TINY).state_dict()
    # Without weight decay, only what has a gradient moves from the weights that the same seed gives.
    trained = train_video_encoder(random_videos(), TINY, VideoTraining(steps=2, batch=4, weight_decay=0, seed=0))
    assert all(not torch.equal(before[name], weight) for name, weight in trained.state_dict().items())


def test_saved_and_read_again_it_gives_the_same_bits(tmp_path):
    encoder = VideoEncoder(TINY).eval()
    encoder.save_pretrained(tmp_path / "encoder")
    restored = VideoEncoder.from_pretrained(tmp_path / "encoder")
    clips = torch.from_numpy(np.stack(random_videos()))
    assert restored.config == TINY
    assert not restored.training
    assert torch.equal(restored(clips), encoder(clips))


def test_a_damaged_or_foreign_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        VideoEncoder.from_pretrained(tmp_path)
    VideoEncoder(TINY).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"size": 12}))
    with pytest.raises(UserError, match="weights in"):
        VideoEncoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"depth": 1}))
    with pytest.raises(UserError, match="unknown entries"):
        VideoEncoder.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vjepa2"}))
    with pytest.raises(UserError, match="describes a vjepa2"):
        VideoEncoder.from_pretrained(tmp_path)


def test_poolings_by_hand():
    latents = torch.arange(8.0)[None, :, None]
    assert POOLINGS["mean"](latents).tolist() == [[3.5]]
    assert POOLINGS["end"](latents).tolist() == [[6.5]]
    assert POOLINGS["mean_and_end"](latents).tolist() == [[3.5, 6.5]]
    assert POOLINGS["end"](latents[:, :2]).tolist() == [[1.0]]
    encoder = VideoEncoder(TINY)
    assert [encoder.latent_size(name) for name in POOLINGS] == [6, 6, 12]


def test_the_mean_forgets_the_order_and_the_end_does_not():
    encoder = VideoEncoder(TINY).eval()
    clip = torch.from_numpy(np.stack(random_videos(1)))
    turned = clip.flip(1)
    assert_equal_up_to_rounding(encoder.trajectory(clip, "mean"), encoder.trajectory(turned, "mean"))
    assert not torch.allclose(encoder.trajectory(clip, "end"), encoder.trajectory(turned, "end"))


def test_integers_and_shares_of_one_are_the_same_pixels():
    encoder = VideoEncoder(TINY).eval()
    clips = torch.from_numpy(np.stack(random_videos(2)))
    assert_equal_up_to_rounding(encoder(clips), encoder(clips.float() / 255))


def test_frames_of_another_size_are_resized():
    flat = np.full((2, 64, 40, 3), 200, np.uint8)
    assert torch.equal(fit_frames(flat, TINY), torch.full((2, 16, 8, 3), 200, dtype=torch.uint8))
    halves = np.concatenate([np.zeros((1, 32, 16, 3), np.uint8), np.full((1, 32, 16, 3), 100, np.uint8)], axis=2)
    assert fit_frames(halves, TINY)[0, 5, :, 0].tolist() == pytest.approx([0, 0, 0, 6, 94, 100, 100, 100], abs=8)
    own = random_videos(1)[0]
    assert np.array_equal(fit_frames(own, TINY).numpy(), own)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"height": 20}, "height .* 20; must be at least 1 and a multiple of 8"),
        ({"channels": 6}, "a multiple of 4"),
        ({"clip_frames": 1}, "at least 2"),
        ({"size": 0}, "at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changed, message):
    with pytest.raises(UserError, match=message):
        VideoEncoder(VideoEncoderConfig(**changed))


@pytest.mark.parametrize(
    "changed", [{"steps": 0}, {"frames": 1}, {"scale": 0.0}, {"learning_rate": -1.0}, {"pixel_noise": float("nan")}]
)
def test_training_out_of_range_is_refused(changed):
    with pytest.raises(UserError, match=next(iter(changed))):
        train_video_encoder(random_videos(), TINY, VideoTraining(**changed))


def test_what_is_no_trajectory_is_refused():
    with pytest.raises(UserError, match="at least one trajectory"):
        train_video_encoder([], TINY)
    with pytest.raises(UserError, match="trajectory 1 is float32"):
        train_video_encoder([random_videos(1)[0], np.zeros((4, 16, 8, 3), np.float32)], TINY)
    with pytest.raises(UserError, match="trajectory 0 is uint8 of shape \\(1, 16, 8, 3\\)"):
        train_video_encoder([random_videos(1)[0][:1]], TINY)
    with pytest.raises(UserError, match="must be one of mean, end, mean_and_end"):
        VideoEncoder(TINY).trajectory(torch.zeros(1, 2, 16, 8, 3), "max")
    with pytest.raises(ValueError, match="clips are"):
        VideoEncoder(TINY)(torch.zeros(1, 2, 8, 16, 3))
