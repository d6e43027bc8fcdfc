"""Times and indices of frames, against the presentation times that PyAV's decoder gives."""

from fractions import Fraction

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.hub import video_reading
from mmrl.hub.video_reading import VideoError, decode_frames, read_index
from mmrl.hub.video_sampling import frame_times, qwen_vl_utils, sample_file, sample_frames
from tests.hub.numbered_clips import TICK, even_times, number_of, numbered, numbers_of, write_clip

av = pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")

RECORDING = [*map(float, range(20)), *[20 + number / 30 for number in range(60)]]
"""A screen recording: a frame a second, then 30."""
LOW_LIGHT = [*[number / 22 for number in range(88)], *[4 + number / 30 for number in range(120)]]
"""A phone that slows down in the dark; each frame lasts half to one and a half times the median."""
FILM = [*[number / 24 for number in range(48)], *[2 + number / 30 for number in range(60)]]
SLIDES = [0.0, 12.0, 12.5, 13.0, 40.0]
JITTER = [number / 30 + (0.011 if number % 7 == 3 else 0.0) for number in range(60)]


@pytest.fixture(autouse=True)
def only_pyav(monkeypatch):
    monkeypatch.setattr(video_reading, "_torchcodec_decoder", lambda: None)


@pytest.fixture(scope="module")
def library():
    try:
        return qwen_vl_utils()
    except UserError:
        pytest.skip("needs torchvision and qwen-vl-utils")


def shown(path):
    """(time in seconds from the start of the file, number) of each frame, as PyAV decodes them."""
    with av.open(str(path)) as container:
        start_s = container.start_time / 1e6
        frames = [(frame.time - start_s, frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    return [time for time, _ in frames], numbers_of(frame for _, frame in frames)


def with_sound(path, *, video_at=None, cover=False):
    """A second of silence from 0 s on, frames from `video_at` on, and a picture of the cover."""
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=8000, layout="mono")
        streams = []
        if cover:
            picture = container.add_stream("mjpeg", rate=1)
            picture.width, picture.height, picture.pix_fmt = 96, 48, "yuvj420p"
            picture.disposition = av.stream.Disposition.attached_pic
            streams.append((picture, [(0, 77)]))
        if video_at is not None:
            video = container.add_stream("libx264", rate=10, options={"bf": "0"})
            video.width, video.height, video.pix_fmt = 96, 48, "yuv420p"
            streams.append((video, [(video_at + number / 10, number) for number in range(20)]))
        for stream, _ in streams:
            stream.codec_context.time_base = TICK
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 8192), np.float32), format="fltp", layout="mono")
        silence.sample_rate, silence.pts = 8000, 0
        container.mux([*sound.encode(silence), *sound.encode()])
        for stream, frames in streams:
            for time_s, number in frames:
                frame = av.VideoFrame.from_ndarray(numbered(number), format="rgb24").reformat(format=stream.pix_fmt)
                frame.pts, frame.time_base = round(time_s / TICK), TICK
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    return path


def rewrapped(source, path, change):
    """The same packets in another file, each changed by `change(place, packet)`."""
    with av.open(str(source)) as given, av.open(str(path), "w") as made:
        stream = made.add_stream_from_template(given.streams.video[0])
        packets = [packet for packet in given.demux(video=0) if packet.dts is not None]
        for place, packet in enumerate(packets):
            change(place - len(packets), packet)
            packet.stream = stream
            made.mux(packet)
    return path


@pytest.mark.parametrize(
    "times", [RECORDING, LOW_LIGHT, FILM, SLIDES, JITTER], ids=["screen", "dark", "film", "slides", "jitter"]
)
@pytest.mark.parametrize(("name", "bframes"), [("a.mp4", 2), ("a.mkv", 2), ("a.ts", 2), ("a.avi", 0)])
def test_times_are_presentation_times_and_indices_those_of_decoded_frames(tmp_path, times, name, bframes):
    path = write_clip(tmp_path / name, times, bframes=bframes)
    index = read_index(path)
    true_s, numbers = shown(path)
    if name == "a.avi":  # PyAV gives it the times of decoding, which start with the second frame
        true_s = [round(time_s / TICK) * float(TICK) for time_s in times]
    assert numbers == list(range(len(times)))
    assert index.times_s == pytest.approx(true_s, abs=1e-6)
    assert index.times_s == pytest.approx(times, abs=1e-3)
    assert not index.constant
    some = np.unique(np.linspace(0, index.total - 1, 9).round().astype(int)).tolist()
    assert numbers_of(decode_frames(index, some)) == some
    for number in some:
        assert index.frame_at(times[number]) == number


@pytest.mark.parametrize(("name", "rate"), [("a.mp4", 30), ("a.mkv", 30000 / 1001), ("a.ts", 25), ("a.avi", 10)])
def test_a_constant_rate_is_known_as_such(tmp_path, name, rate):
    index = read_index(write_clip(tmp_path / name, even_times(60, rate), bframes=0, fps=round(rate)))
    assert index.constant
    assert index.fps == pytest.approx(rate, rel=1e-3)


def test_a_rate_that_drifts_from_the_stated_one_is_that_of_the_frames(tmp_path):
    """Ten minutes at 9.9 frames a second in a file that says 10: six seconds at the end."""
    path = write_clip(tmp_path / "a.mkv", even_times(600, 9.9), gop=100, bframes=0)
    index = read_index(path)
    assert index.fps == pytest.approx(9.9, rel=1e-4)
    assert index.times_s[-1] == pytest.approx(599 / 9.9, abs=1e-3)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts"])
def test_times_begin_with_the_file(tmp_path, name):
    """As players count: from the first frame, or from the sound where that comes earlier."""
    late = read_index(write_clip(tmp_path / name, [5 + time_s for time_s in even_times(12)]))
    assert late.times_s == pytest.approx(even_times(12), abs=1e-6)
    assert late.constant
    path = with_sound(tmp_path / f"sound.{name}", video_at=0.5)
    index = read_index(path)
    assert index.times_s == pytest.approx(shown(path)[0], abs=2e-3)
    assert index.times_s[0] > 0.4
    assert not index.constant


def test_frames_that_an_edit_list_hides_do_not_count(tmp_path):
    path = write_clip(tmp_path / "a.mp4", [time_s - 0.5 for time_s in even_times(20)], gop=20)
    index = read_index(path)
    assert (index.total, index.times_s) == (15, pytest.approx(even_times(15)))
    assert numbers_of(decode_frames(index, [0, 14])) == [5, 19] == shown(path)[1][::14]


def test_the_cover_of_a_sound_file_is_no_video(tmp_path):
    with pytest.raises(VideoError, match="it has no video track"):
        read_index(with_sound(tmp_path / "song.mp4", cover=True))
    index = read_index(with_sound(tmp_path / "both.mp4", cover=True, video_at=0.0))
    assert numbers_of(decode_frames(index, [0, 19])) == [0, 19]


@pytest.mark.parametrize(("aspect", "width"), [(Fraction(64, 45), 137), (Fraction(1, 2), 48), (Fraction(97, 96), 96)])
def test_pixels_become_square(tmp_path, aspect, width):
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 48, "yuv420p"
        stream.codec_context.sample_aspect_ratio = aspect
        container.mux(stream.encode(av.VideoFrame.from_ndarray(numbered(9), format="rgb24")))
        container.mux(stream.encode())
    (frame,) = decode_frames(read_index(tmp_path / "a.mp4"), [0])
    assert frame.shape == (48, width, 3)
    if width == 48:
        assert number_of(frame) == 9


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv"])
def test_the_last_frame_lasts_as_long_as_the_file_says(tmp_path, name, library):
    def keep(place, packet):
        packet.duration = round(5 / packet.time_base) if place == -1 else packet.duration

    path = rewrapped(write_clip(tmp_path / f"whole.{name}", even_times(10), bframes=0), tmp_path / name, keep)
    index = read_index(path)
    assert index.end_s == pytest.approx(5.9, abs=1e-3)
    frames = sample_file(str(path), {"fps": 2.0, "resized_height": 56, "resized_width": 112}, 14)
    assert len(frames[0]) == 10  # of 5.9 seconds, an even number
    assert [number_of(frame.permute(1, 2, 0).numpy()) for frame in frames[0]] == [0, 6, *[9] * 8]
    assert frame_times(frames)[-1] == pytest.approx(5.9, abs=0.01)


@pytest.mark.parametrize("times", [RECORDING, LOW_LIGHT, FILM, SLIDES], ids=["screen", "dark", "film", "slides"])
@pytest.mark.parametrize("options", [{"fps": 1.0}, {"nframes": 8}, {"video_start": 2.5, "fps": 4.0}], ids=str)
def test_a_model_is_told_when_the_frames_it_sees_appear(tmp_path, times, options, library):
    """`VideoMetadata.timestamps` is where transformers' processors take times from."""
    from transformers.video_utils import VideoMetadata

    path = str(write_clip(tmp_path / "a.mp4", times))
    pixels, metadata = sample_file(path, {**options, "resized_height": 56, "resized_width": 112}, 14)
    told_s = VideoMetadata(**metadata).timestamps
    numbers = [number_of(frame.permute(1, 2, 0).numpy()) for frame in pixels]
    assert all(isinstance(place, int) for place in metadata["frames_indices"])
    assert told_s == sorted(told_s) == frame_times((pixels, metadata))
    ends_s = [*times[1:], np.inf]
    for place, (number, time_s) in enumerate(zip(numbers, told_s, strict=True)):
        if number in numbers[:place]:  # nothing new has come since
            assert times[number] < time_s < ends_s[number]
        else:
            assert time_s == pytest.approx(times[number], abs=1e-3)
    if "fps" in options:
        assert VideoMetadata(**metadata).sampled_fps == pytest.approx(options["fps"], rel=0.1)


def test_frames_of_a_list_have_the_rate_that_they_were_sampled_at(library):
    """Of a film of 30 frames a second, one a second was kept."""
    from PIL import Image

    images = [Image.new("RGB", (56, 56))] * 4
    frames = sample_frames(images, 4, {"sample_fps": 1.0, "raw_fps": 30.0, "min_pixels": 784}, 14)
    assert frame_times(frames) == [0.0, 1.0, 2.0, 3.0]
