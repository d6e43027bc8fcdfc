"""Selection and size of a model's frames, against qwen-vl-utils with a reader that holds every frame."""

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.hub import video_reading, video_sampling
from mmrl.hub.video_reading import VideoError
from mmrl.hub.video_sampling import frame_times, qwen_vl_utils, sample_file, sample_frames
from tests.hub.numbered_clips import even_times, number_of, numbered, write_clip

av = pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")


@pytest.fixture(scope="module")
def library():
    try:
        return qwen_vl_utils()
    except UserError:
        pytest.skip("needs torchvision and qwen-vl-utils")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Four seconds, 10 frames a second, 96 x 48."""
    return str(write_clip(tmp_path_factory.mktemp("clips") / "a.mp4", even_times(40)))


@pytest.fixture
def theirs(library, monkeypatch):
    """The library's `fetch_video` with a reader of all frames, written after its own reader for decord."""

    def read(element):
        with av.open(element["video"]) as container:
            rate = float(container.streams.video[0].average_rate)
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        start, end, span = library.calculate_video_frame_range(element, len(frames), rate)
        count = library.smart_nframes(element, total_frames=span, video_fps=rate)
        places = torch.linspace(start, end, count).round().long().tolist()
        pixels = torch.from_numpy(np.stack([frames[place] for place in places])).permute(0, 3, 1, 2)
        metadata = {"fps": rate, "frames_indices": places, "total_num_frames": span, "video_backend": "pyav"}
        return pixels, metadata, count / span * rate

    monkeypatch.setitem(library.VIDEO_READER_BACKENDS, "pyav", read)
    monkeypatch.setattr(library, "FORCE_QWENVL_VIDEO_READER", "pyav")
    library.get_video_reader_backend.cache_clear()
    monkeypatch.setattr(video_reading, "_torchcodec_decoder", lambda: None)

    def fetch(video, options, patch_size):
        item = {"type": "video", "video": video, **options}
        return library.fetch_video(item, image_patch_size=patch_size, return_video_metadata=True)

    yield fetch
    library.get_video_reader_backend.cache_clear()


@pytest.mark.parametrize("patch_size", [14, 16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fps": 1.0},
        {"fps": 30.0, "max_pixels": 64 * 64, "min_pixels": 32 * 32},
        {"fps": 0.1, "min_frames": 7},
        {"fps": 8.0, "max_frames": 9},
        {"nframes": 5},
        {"nframes": 12, "total_pixels": 40_000, "min_pixels": 784},
        {"nframes": 4, "video_start": 1.0, "video_end": 1.6, "min_pixels": 784},
        {"video_start": 2.5},
        {"video_end": 0.74, "resized_height": 70, "resized_width": 120},
    ],
    ids=str,
)
def test_frames_sizes_and_metadata_are_those_of_the_library(theirs, clip, options, patch_size):
    expected, known = theirs(clip, options, patch_size)
    found, metadata = sample_file(clip, options, patch_size)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    assert metadata == {name: known[name] for name in ("fps", "frames_indices", "total_num_frames")}


@pytest.mark.parametrize("count", [1, 4, 5])
@pytest.mark.parametrize("options", [{}, {"sample_fps": 4.0, "min_pixels": 784, "max_pixels": 12_000}], ids=str)
def test_lists_of_frames_are_those_of_the_library(theirs, count, options):
    images = [Image.fromarray(np.random.default_rng(n).integers(0, 256, (50, 90, 3), np.uint8)) for n in range(count)]
    expected, known = theirs(images, options, 14)
    found, metadata = sample_frames(iter(images), count, options, 14)
    assert torch.equal(found, expected)
    assert metadata == known


def test_times_of_frames(clip, library):
    assert frame_times(sample_file(clip, {"fps": 2.0}, 14)) == pytest.approx([0, 0.6, 1.1, 1.7, 2.2, 2.8, 3.3, 3.9])
    part = sample_file(clip, {"nframes": 2, "video_start": 2.0, "video_end": 3.0}, 14)
    assert frame_times(part) == [2.0, 3.0]


def test_times_of_a_variable_rate_are_true(tmp_path, library):
    """A video without motion from second 1 to second 9."""
    times = [*even_times(10), *[9.0 + number / 10 for number in range(10)]]
    path = write_clip(tmp_path / "a.mp4", times)
    frames, metadata = sample_file(
        str(path), {"nframes": 12, "min_pixels": 96 * 48, "resized_height": 56, "resized_width": 112}, 14
    )
    for frame, time in zip(frames, frame_times((frames, metadata)), strict=True):
        shown = number_of(frame.permute(1, 2, 0).numpy())
        later = [other for other in times if other > times[shown]]
        assert times[shown] - 0.051 <= time < min(later, default=10)


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_very_short_videos(tmp_path, frames, library):
    path = write_clip(tmp_path / "a.mp4", even_times(frames))
    options = {"resized_height": 56, "resized_width": 112}
    pixels, metadata = sample_file(str(path), options, 14)
    assert metadata["frames_indices"] == [0, max(0, frames - 1)]
    assert [number_of(frame.permute(1, 2, 0).numpy()) for frame in pixels] == metadata["frames_indices"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nframes": 50}, "nframes should in interval"),
        ({"video_start": 3.0, "video_end": 2.0}, "Invalid time range"),
        ({"fps": 2.0, "nframes": 4}, "either `fps` or `nframes`"),
        ({"min_pixels": 50_000, "max_pixels": 40_000}, "max_pixels"),
        ({"max_pixels": 40_000}, "min_pixels, which is 100352 by default; set min_pixels, too"),
    ],
)
def test_what_cannot_be_chosen_is_named(clip, library, options, message):
    with pytest.raises(VideoError, match=message) as caught:
        sample_file(clip, options, 14)
    assert caught.value.kind == "unusable_video"


def test_lists_that_cannot_be_used(library):
    images = [Image.new("RGB", (60, 60))] * 3
    for count, options, kind in ((0, {}, "empty_video"), (3, {"max_frames": 2}, "unusable_video")):
        with pytest.raises(VideoError) as caught:
            sample_frames(images[:count], count, options, 14)
        assert caught.value.kind == kind
    with pytest.raises(VideoError, match="differ in size: 112 x 112 and 280 x 112"):
        sample_frames([images[0], Image.new("RGB", (300, 120))], 2, {}, 14)
    with pytest.raises(VideoError, match="aspect ratio"):
        sample_frames([Image.new("RGB", (1, 500))], 1, {}, 14)


def test_large_frames_are_reduced_one_by_one(tmp_path, monkeypatch, library):
    """For 24 frames of 960 x 480, only their 112 x 56 versions are kept."""
    large = np.kron(numbered(1)[..., 0], np.ones((10, 10), np.uint8))[..., None].repeat(3, 2)
    path = write_clip(tmp_path / "a.mp4", even_times(24), frame=lambda number: large)
    sizes = []
    original = video_sampling.decode_frames

    def watched(index, numbers):
        for frame in original(index, numbers):
            sizes.append(frame.shape)
            yield frame

    monkeypatch.setattr(video_sampling, "decode_frames", watched)
    pixels, _ = sample_file(str(path), {"nframes": 24, "min_pixels": 784, "max_pixels": 112 * 56}, 14)
    assert sizes == [(480, 960, 3)] * 24
    assert pixels.shape == (24, 3, 56, 112)


def test_without_the_library_the_error_says_what_to_install(monkeypatch, clip):
    monkeypatch.setattr(video_sampling, "ensure_torchvision", lambda: "absent")
    video_sampling.qwen_vl_utils.cache_clear()
    with pytest.raises(UserError, match=r"mmrl-suite\[vlm\]"):
        sample_file(clip, {}, 14)
    video_sampling.qwen_vl_utils.cache_clear()
