import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from robotics.methods.latents import (
    LatentConfig,
    PixelLatent,
    PixelSettings,
    StateLatent,
    StateSettings,
    VideoLatent,
    VideoLatentSettings,
    Vjepa2Latent,
    Vjepa2Settings,
    crop_clip,
    make_latent,
    sample_indices,
    state_statistics,
)
from robotics.methods.video_encoder import VideoEncoder, VideoEncoderConfig

NO_STATES = np.zeros((1, 2), np.float32)


def videos(*lengths, shape=(20, 24), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (length, *shape, 3), dtype=np.uint8) for length in lengths]


def embed(latent, given):
    return latent.embed(given, [NO_STATES] * len(given))


@pytest.fixture(scope="module")
def vjepa2(tmp_path_factory):
    """A folder with a tiny random V-JEPA 2 and the model itself."""
    pytest.importorskip("transformers", reason="needs pip install 'mmrl-suite[vlm]'")
    from mmrl.hub.compat import ensure_torchvision, quiet_transformers

    ensure_torchvision()
    from transformers import VJEPA2Config, VJEPA2Model

    torch.manual_seed(0)
    config = VJEPA2Config(
        patch_size=8,
        crop_size=16,
        frames_per_clip=6,
        tubelet_size=2,
        hidden_size=24,
        num_attention_heads=2,
        num_hidden_layers=2,
        pred_hidden_size=24,
        pred_num_attention_heads=2,
        pred_num_hidden_layers=1,
        pred_num_mask_tokens=1,
    )
    model = VJEPA2Model(config).eval()
    folder = tmp_path_factory.mktemp("vjepa2")
    with quiet_transformers():
        model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def video_encoder():
    torch.manual_seed(0)
    return VideoEncoder(VideoEncoderConfig(height=16, width=16, channels=4, frame_channels=2, size=8, clip_frames=4))


@pytest.mark.parametrize(
    ("count", "wanted", "pad", "expected"),
    [
        (100, 8, "cycle", [0, 14, 28, 42, 56, 70, 84, 99]),
        (8, 8, "cycle", [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, 8, "cycle", [0, 1, 2, 0, 1, 2, 0, 1]),
        (3, 8, "edge", [0, 1, 2, 2, 2, 2, 2, 2]),
        (1, 3, "cycle", [0, 0, 0]),
        (5, 1, "edge", [0]),
    ],
)
def test_which_frames_make_a_clip(count, wanted, pad, expected):
    assert sample_indices(count, wanted, pad).tolist() == expected


def test_a_whole_failed_episode_is_sampled_as_in_the_released_code():
    indices = sample_indices(513, 64)
    # 512 / 63 = 8.126984 a step, rounded toward zero
    assert indices[:9].tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 65]
    assert (indices[-1], len(indices)) == (512, 64)
    with pytest.raises(ValueError, match="cannot take 64 of 0"):
        sample_indices(0, 64)


def test_images_are_resized_cropped_and_standardised():
    grey = np.full((2, 256, 300, 3), 128, np.uint8)
    clip = crop_clip(grey, 384)
    assert clip.shape == (2, 3, 384, 384)
    expected = (128 / 255 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(clip[1, :, 100, 200].numpy(), expected, rtol=1e-5)
    # The short side of 32 becomes 36 for a crop of 32: 9/8 as large, so 14.2 of 16 pixels of each half are left.
    halves = np.zeros((1, 32, 64, 3), np.uint8)
    halves[:, :, 32:] = 255
    row = crop_clip(halves, 32)[0, 0, 16]
    assert row[:15].max() < row[17:].min()
    np.testing.assert_allclose(row[[0, -1]].numpy(), [(0 - 0.485) / 0.229, (1 - 0.485) / 0.229], rtol=1e-5)


def test_vjepa2_averages_the_tokens_of_the_encoder(vjepa2):
    folder, model = vjepa2
    latent = make_latent(LatentConfig("vjepa2", options={"path": str(folder)}))
    given = videos(4, 30)
    outcome = embed(latent, given)
    for row, video in enumerate(given):
        clip = crop_clip(video[sample_indices(len(video), 6)], 16)
        with torch.no_grad():
            tokens = model(clip[None], skip_predictor=True).last_hidden_state
        assert tokens.shape == (1, 3 * 2 * 2, 24)
        np.testing.assert_allclose(outcome.latents[row], tokens.mean(1)[0].numpy(), atol=1e-5)
    assert outcome.latents.shape == (2, latent.size) == (2, 24)
    assert outcome.latents.dtype == np.float32


def test_vjepa2_in_one_batch_equals_one_by_one(vjepa2):
    folder, _ = vjepa2
    given = videos(4, 30, 9)
    alone = embed(Vjepa2Latent(Vjepa2Settings(str(folder))), given)
    together = embed(Vjepa2Latent(Vjepa2Settings(str(folder), batch_size=8)), given)
    np.testing.assert_allclose(together.latents, alone.latents, atol=1e-5)


def test_short_clips_can_be_filled_up_with_their_last_frame(vjepa2):
    folder, _ = vjepa2
    video = videos(4)[0]
    held = np.concatenate([video, video[-1:], video[-1:]])
    edge = Vjepa2Latent(Vjepa2Settings(str(folder), pad="edge"))
    cycle = Vjepa2Latent(Vjepa2Settings(str(folder)))
    np.testing.assert_allclose(embed(edge, [video]).latents, embed(cycle, [held]).latents, atol=1e-6)
    assert np.abs(embed(cycle, [video]).latents - embed(cycle, [held]).latents).max() > 1e-4


def test_a_missing_vjepa2_is_named(tmp_path):
    pytest.importorskip("transformers", reason="needs pip install 'mmrl-suite[vlm]'")
    with pytest.raises(UserError, match="cannot read a V-JEPA 2 model from"):
        make_latent(LatentConfig("vjepa2", options={"path": str(tmp_path)}))


def test_video_is_the_saved_encoder_over_evenly_taken_frames(tmp_path, video_encoder):
    video_encoder.save_pretrained(tmp_path)
    latent = make_latent(LatentConfig("video", options={"path": str(tmp_path), "batch_size": 2}))
    given = videos(9, 2, 4, shape=(16, 16))
    taken = np.stack([given[0][[0, 2, 5, 8]], given[1][[0, 1, 1, 1]], given[2]])
    with torch.no_grad():
        expected = video_encoder.eval().trajectory(torch.from_numpy(taken)).numpy()
    np.testing.assert_allclose(embed(latent, given).latents, expected, atol=1e-6)
    assert latent.size == 16


def test_pixels_by_hand():
    video = np.zeros((2, 4, 4, 3), np.uint8)
    video[0, :, :2, 0] = 255
    video[1, :2, :, 0] = 255
    outcome = embed(PixelLatent(PixelSettings(side=2)), [video])
    mean, last = outcome.latents[0].reshape(2, 2, 2, 3)
    assert last[..., 0].tolist() == [[1, 1], [0, 0]]
    assert mean[..., 0].tolist() == [[1, 0.5], [0.5, 0]]
    assert outcome.latents[0].reshape(2, 4, 3)[..., 1:].max() == 0


def test_states_by_hand():
    path = np.float32([[0, 10], [2, 10], [4, 40]])
    latent = StateLatent(StateSettings(mean=[2, 10], std=[2, 0], points=5))
    outcome = latent.embed([None], [path])
    expected = [[-1, 0], [-0.5, 0], [0, 0], [0.5, 15], [1, 30], [1, 30]]
    np.testing.assert_allclose(outcome.latents[0].reshape(6, 2), expected, rtol=1e-6)
    assert latent.size == 12


def test_states_of_one_time_and_their_statistics():
    paths = [np.float32([[0, 1], [2, 1]]), np.float32([[4, 1]])]
    mean, std = state_statistics(paths)
    assert mean == [2, 1]
    assert std == pytest.approx([np.sqrt(8 / 3), 0])
    latent = StateLatent(StateSettings(mean, std, points=2))
    np.testing.assert_allclose(
        latent.embed([None], paths[1:]).latents[0].reshape(3, 2)[:, 0], 2 / np.sqrt(8 / 3), rtol=1e-6
    )
    with pytest.raises(UserError, match="at least one trajectory"):
        state_statistics([])


def test_statistics_of_the_first_episodes():
    paths = [np.float32([[0, 1], [2, 1]]), np.float32([[4, 1]])]
    latent = make_latent(LatentConfig("state", options={"points": 2}))
    assert latent.size == 0
    latent.fit(paths)
    given = StateLatent(StateSettings(*state_statistics(paths), points=2))
    np.testing.assert_array_equal(latent.embed([None], paths[:1]).latents, given.embed([None], paths[:1]).latents)
    restored = make_latent(LatentConfig("state", options={"points": 2}))
    restored.load_state_dict(latent.state_dict())
    assert restored.size == 6
    both = [each.embed([None] * 2, paths).latents for each in (latent, restored)]
    np.testing.assert_array_equal(*both)
    assert given.state_dict() == {}


def test_only_some_latents_are_fitted():
    pixels = PixelLatent(PixelSettings())
    with pytest.raises(TypeError, match="PixelLatent is not fitted"):
        pixels.fit([NO_STATES])
    pixels.load_state_dict({})
    with pytest.raises(ValueError, match="PixelLatent is not fitted; the checkpoint has mean of its latent"):
        pixels.load_state_dict({"mean": [0.0]})


def test_the_position_of_the_object_is_the_last_one():
    latent = make_latent(LatentConfig("object"))
    outcome = latent.embed([None] * 3, [np.eye(3, dtype=np.float32), np.ones((1, 3), np.float32), NO_STATES])
    assert outcome.latents[:2].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert outcome.reasons == {2: "positions of the object are (1, 2); expected (F >= 1, 3)"}


def test_what_cannot_be_embedded_is_invalid_with_its_reason(video_encoder):
    latent = VideoLatent(VideoLatentSettings(), video_encoder)
    good = videos(5)[0]
    given = [good, None, good[:0], good.astype(np.float32), good[..., :2]]
    outcome = embed(latent, given)
    assert outcome.valid.tolist() == [True, False, False, False, False]
    assert np.isnan(outcome.latents[1:]).all()
    assert np.isfinite(outcome.latents[0]).all()
    assert list(outcome.reasons) == [1, 2, 3, 4]
    assert "no images" in outcome.reasons[1]
    assert "float32" in outcome.reasons[3]
    assert latent.counts["invalid"] == 4


def test_wrong_states_are_invalid():
    latent = StateLatent(StateSettings(mean=[0, 0], std=[1, 1]))
    paths = [np.ones((3, 2)), np.ones((3, 3)), np.ones((0, 2)), np.full((3, 2), np.nan)]
    outcome = latent.embed([None] * 4, paths)
    assert outcome.valid.tolist() == [True, False, False, False]
    assert "not finite" in outcome.reasons[3]


def test_a_row_that_breaks_the_network_does_not_cost_the_others_theirs(video_encoder, monkeypatch):
    latent = VideoLatent(VideoLatentSettings(batch_size=3), video_encoder)
    given = videos(4, 4, 4, shape=(16, 16))
    given[1][:] = 7
    given[2][:] = 8
    expected = embed(VideoLatent(VideoLatentSettings(), video_encoder), given).latents
    real = video_encoder.trajectory

    def fragile(clips, pooling):
        if (clips == 7).all(dim=(1, 2, 3, 4)).any():
            raise RuntimeError("out of memory")
        found = real(clips, pooling)
        found[(clips == 8).all(dim=(1, 2, 3, 4))] = torch.nan
        return found

    monkeypatch.setattr(video_encoder, "trajectory", fragile)
    outcome = embed(latent, given)
    assert outcome.reasons == {1: "RuntimeError: out of memory", 2: "the latent is not finite"}
    np.testing.assert_allclose(outcome.latents[0], expected[0], atol=1e-6)
    monkeypatch.setattr(video_encoder, "trajectory", real)
    np.testing.assert_allclose(embed(latent, given).latents, expected, atol=1e-6)


def test_a_trajectory_is_embedded_once(video_encoder, monkeypatch):
    latent = VideoLatent(VideoLatentSettings(cache=2), video_encoder)
    computed = []
    real = video_encoder.trajectory
    monkeypatch.setattr(video_encoder, "trajectory", lambda clips, p: (computed.append(len(clips)), real(clips, p))[1])
    first, second, third = videos(4, 5, 6)
    outcome = embed(latent, [first, second, first.copy()])
    assert np.array_equal(outcome.latents[0], outcome.latents[2])
    assert not np.allclose(outcome.latents[0], outcome.latents[1])
    again = embed(latent, [second, first])
    assert np.array_equal(again.latents, outcome.latents[[1, 0]])
    assert sum(computed) == 2
    assert dict(latent.counts) == {"reused": 2, "embedded": 2, "invalid": 0}
    embed(latent, [third])
    embed(latent, [first])
    assert sum(computed) == 3
    embed(latent, [second])
    assert sum(computed) == 4


def test_without_the_cache_everything_is_recomputed(video_encoder):
    latent = VideoLatent(VideoLatentSettings(), video_encoder)
    given = videos(4, 5)
    embed(latent, given[:1])
    for _ in range(2):
        latent.embed(given, [NO_STATES] * 2, reuse=False)
    assert dict(latent.counts) == {"reused": 0, "embedded": 5, "invalid": 0}
    embed(latent, given)
    assert dict(latent.counts) == {"reused": 1, "embedded": 6, "invalid": 0}


def test_one_by_one_does_not_depend_on_the_others_bit_for_bit(video_encoder):
    given = videos(4, 5, 6, 4, 5)
    together, alone = (embed(VideoLatent(VideoLatentSettings(), video_encoder), part) for part in (given, given[:1]))
    np.testing.assert_allclose(together.latents[:1], alone.latents, rtol=1e-5)
    latent = VideoLatent(VideoLatentSettings(cache=0), video_encoder)
    single = latent.embed(given, [NO_STATES] * 5, one_by_one=True).latents
    np.testing.assert_array_equal(single[:1], alone.latents)


def test_an_empty_batch_has_latents_of_the_right_size(video_encoder):
    assert embed(VideoLatent(VideoLatentSettings(), video_encoder), []).latents.shape == (0, 16)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LatentConfig("jepa"), "allowed: vjepa2, video, pixels, state, object"),
        (LatentConfig("pixels", path="here"), "latent.path is 'here', but latent.kind=pixels does not read a folder"),
        (LatentConfig("state", path="here", options={"mean": [0.0], "std": [1.0]}), "takes its scale from"),
        (LatentConfig("pixels", options={"sides": 4}), "latent.options has sides; options of pixels are: side"),
        (LatentConfig("pixels", options={"side": 0}), "at least 1"),
        (LatentConfig("pixels", frames="all"), "allowed: step, chunk"),
        (LatentConfig("video"), "latent.kind=video needs latent.path"),
        (LatentConfig("vjepa2"), "latent.kind=vjepa2 needs latent.path"),
        (LatentConfig("vjepa2", options={"path": "x", "pad": "zero"}), "cycle, edge"),
        (LatentConfig("video", options={"path": "x", "batch_size": 0}), "batch_size is 0; must be at least 1"),
        (LatentConfig("state", options={"mean": [0.0]}), "takes the mean and std .*; mean has 1 and std 0"),
        (LatentConfig("object", options={"side": 4}), "latent.options has side; options of object are: "),
        (LatentConfig("state", options={"mean": [0.0], "std": [-1.0]}), r"std is \[-1.0\]; must be at least 0"),
    ],
)
def test_wrong_settings_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        make_latent(config)


def test_frames_and_states_belong_together():
    with pytest.raises(ValueError, match="2 trajectories of frames and 1 of states"):
        PixelLatent(PixelSettings()).embed(videos(2, 2), [NO_STATES])
