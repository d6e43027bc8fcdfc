"""Frames of video files: the right ones, one at a time, and a named error for every fault of a file."""

import sys
import weakref
from fractions import Fraction
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from mmrl.hub import video_reading
from mmrl.hub.video_reading import VideoError, decode_frames, frame_to_array, read_index
from mmrl.hub.video_writing import VideoSettings, write_mp4
from tests.hub.numbered_clips import even_times, numbered, numbers_of, write_clip

av = pytest.importorskip("av", reason="needs pip install 'mmrl-suite[vlm]'")


@pytest.fixture(autouse=True)
def only_pyav(monkeypatch):
    monkeypatch.setattr(video_reading, "_torchcodec_decoder", lambda: None)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.mov", "a.avi", "fragments.mp4"])
@pytest.mark.parametrize("bframes", [0, 2])
def test_the_frames_of_the_numbers(tmp_path, name, bframes):
    options = {"movflags": "frag_keyframe+empty_moov"} if name == "fragments.mp4" else None
    index = read_index(write_clip(tmp_path / name, even_times(40), bframes=bframes, options=options))
    assert (index.total, index.constant) == (40, True)
    assert index.fps == pytest.approx(10, rel=0.03 if name == "a.avi" else 1e-6)  # its times are those of decoding
    for numbers in ([0], [39], [7, 8, 9], [0, 13, 26, 39], [5, 5, 6], list(range(40))):
        assert numbers_of(decode_frames(index, numbers)) == numbers


def test_a_rate_that_is_not_a_whole_number(tmp_path):
    """Milliseconds, as in Matroska, round 1/29.97 s; the frames are still those of their numbers."""
    index = read_index(write_clip(tmp_path / "a.mkv", even_times(60, 30000 / 1001)))
    assert index.fps == pytest.approx(29.97, rel=0.01)
    assert numbers_of(decode_frames(index, [0, 29, 59])) == [0, 29, 59]


def test_hidden_frames_of_vp8_are_not_counted(tmp_path):
    """Encoders store references that are never shown as packets of their own, a little before the next frame."""
    with av.open(str(tmp_path / "a.webm"), "w") as container:
        stream = container.add_stream("libvpx", rate=10, options={"deadline": "realtime", "cpu-used": "8"})
        stream.height, stream.width, _ = numbered(0).shape
        stream.bit_rate = 2_000_000
        frames = [av.VideoFrame.from_ndarray(numbered(number), format="rgb24") for number in range(30)]
        for number, packet in enumerate(packet for frame in [*frames, None] for packet in stream.encode(frame)):
            if number in (10, 20):
                first, *rest = bytes(packet)
                hidden = av.Packet(bytes([first & ~0x10, *rest]))  # without the bit show_frame
                hidden.time_base, hidden.stream = Fraction(1, 1000), stream
                hidden.pts = hidden.dts = 100 * number - 1
                container.mux(hidden)
            container.mux(packet)
    index = read_index(tmp_path / "a.webm")
    assert (index.total, index.fps, index.constant) == (30, 10, True)
    assert numbers_of(decode_frames(index, range(30))) == list(range(30))


QUARTER_CLOCKWISE = [0, 1, -1, 0]
"""a, b, c, d of the track's matrix: x' = a x + c y, y' = b x + d y with y down; right becomes down."""


@pytest.mark.parametrize(("turned", "quarters"), [(90, 1), (-90, -1), (180, 2), (0, 0)])
def test_turned_files_come_upright(tmp_path, turned, quarters):
    if not hasattr(av.VideoStream, "set_display_rotation"):
        pytest.skip("PyAV writes turned files since 18")
    path = write_clip(tmp_path / "a.mp4", even_times(4), turned=turned)
    (frame,) = decode_frames(read_index(path), [2])
    stored = np.rot90(frame, -quarters)
    assert stored.shape == (48, 96, 3)
    assert numbers_of([stored]) == [2]
    if turned == -90:  # against the file itself
        content = path.read_bytes()
        matrix = np.frombuffer(content, ">i4", 9, content.index(b"tkhd") + 4 + 40) / 2**16
        assert matrix[[0, 1, 3, 4]].tolist() == QUARTER_CLOCKWISE


@pytest.mark.parametrize("fraction", [0.4, 0.9])
@pytest.mark.parametrize(
    ("name", "flags", "kind"),
    [
        ("index first.mp4", "faststart", "truncated_video"),
        ("index last.mp4", "", "unreadable_video"),
        ("a.mkv", "", "truncated_video"),
    ],
)
def test_files_that_end_early_are_named(tmp_path, name, flags, kind, fraction):
    noise = np.random.default_rng(0).integers(0, 256, (60, 48, 96, 3), dtype=np.uint8)
    options = {"movflags": flags} if flags else None
    path = write_clip(tmp_path / name, even_times(60, 1), options=options, frame=lambda number: noise[number])
    content = path.read_bytes()
    path.write_bytes(content[: int(fraction * len(content))])
    with pytest.raises(VideoError) as caught:
        read_index(path)
    assert caught.value.kind == kind


def test_an_early_end_that_the_index_shows_is_found_before_decoding(tmp_path, monkeypatch):
    path = write_clip(tmp_path / "a.mp4", even_times(60), options={"movflags": "faststart"})
    path.write_bytes(path.read_bytes()[:-1])
    monkeypatch.setattr(video_reading, "_upright", None)
    with pytest.raises(VideoError, match="is truncated"):
        read_index(path)


def test_what_is_no_video(tmp_path):
    (tmp_path / "zero.mp4").touch()
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1\nhttp://127.0.0.1:9/a.ts\n")
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 8000
        container.mux([*stream.encode(sound), *stream.encode()])
    found = {}
    for name in ("zero.mp4", "text.mp4", "list.m3u8", "sound.mp4", "nothing.mp4"):
        with pytest.raises(VideoError) as caught:
            read_index(tmp_path / name)
        found[name] = caught.value.kind
    assert found == {
        "zero.mp4": "empty_video",
        "text.mp4": "unreadable_video",
        "list.m3u8": "unreadable_video",
        "sound.mp4": "empty_video",
        "nothing.mp4": "missing_video",
    }


def test_a_track_of_an_unknown_codec_is_named(tmp_path):
    path = write_clip(tmp_path / "a.mp4", even_times(12))
    content = path.read_bytes()
    place = content.index(b"avc1", content.index(b"stsd"))
    path.write_bytes(content[:place] + b"zzzz" + content[place + 4 :])
    with pytest.raises(VideoError, match="codec of its video track is unknown"):
        read_index(path)


def test_damaged_files_are_read_or_named(tmp_path):
    content = write_clip(tmp_path / "a.mp4", even_times(12)).read_bytes()
    rng, kinds = np.random.default_rng(0), set()
    for _ in range(300):
        damaged = np.frombuffer(content, np.uint8).copy()
        first = content.index(b"moov") if rng.random() < 0.7 else 0
        places = rng.integers(first, len(damaged), rng.integers(1, 5))
        damaged[places] = rng.integers(0, 256, len(places))
        (tmp_path / "b.mp4").write_bytes(damaged.tobytes())
        try:
            index = read_index(tmp_path / "b.mp4")
            list(decode_frames(index, [0, index.total - 1]))
        except VideoError as error:
            kinds.add(error.kind)
    assert {"unreadable_video", "truncated_video", "empty_video"} <= kinds


@pytest.mark.parametrize("name", ["list.m3u8", "list.mp4", "concat.mp4"])
def test_a_playlist_opens_no_other_file(tmp_path, name):
    clip = write_clip(tmp_path / "a.ts", even_times(12))
    texts = {
        "concat.mp4": f"ffconcat version 1.0\nfile {clip.name}\n",
        "list": f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:9,\n{clip.name}\n#EXT-X-ENDLIST\n",
    }
    (tmp_path / name).write_text(texts.get(name, texts["list"]))
    with pytest.raises(VideoError) as caught:
        read_index(tmp_path / name)
    assert caught.value.kind == "unreadable_video"
    assert read_index(clip).total == 12


def test_frames_that_are_too_large(tmp_path):
    path = write_clip(tmp_path / "a.mp4", even_times(2))
    with pytest.raises(VideoError, match=r"96 x 48 pixels, more than 4000 \(data.max_image_pixels\)"):
        read_index(path, max_pixels=4000)


def test_a_damaged_frame_is_named(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (30, 48, 96, 3), dtype=np.uint8)
    path = write_clip(tmp_path / "a.mp4", even_times(30), gop=30, frame=lambda number: noise[number])
    with av.open(str(path)) as container:
        entries = container.streams.video[0].index_entries
        start, length = entries[14].pos, entries[14].size
    content = bytearray(path.read_bytes())
    content[start : start + length] = bytes(length)
    path.write_bytes(content)
    with pytest.raises(VideoError) as caught:
        list(decode_frames(read_index(path), [0, 29]))
    assert caught.value.kind == "unreadable_video"


def test_a_long_clip_holds_two_frames_and_decodes_only_the_needed_ones(tmp_path, monkeypatch):
    """Twenty minutes at a frame a second with a key frame each minute: eight frames are at most a minute from one."""
    path = write_mp4(tmp_path / "a.mp4", (numbered(n) for n in range(1200)), fps=1, settings=VideoSettings(gop=60))
    index = read_index(path)
    assert index.total == 1200
    made, most, decoded = [], [], []

    def watched(frame, to_array):
        pixels = original(frame, to_array)
        made.append(weakref.ref(pixels))
        most.append(sum(reference() is not None for reference in made))
        return pixels

    original = video_reading._upright
    monkeypatch.setattr(video_reading, "_upright", watched)
    whole = av.container.InputContainer.decode

    def counting(self, *streams):
        for frame in whole(self, *streams):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(video_reading, "_decoding", counting)
    numbers = np.linspace(0, 1199, 8).round().astype(int).tolist()
    assert [numbers_of([frame]) for frame in decode_frames(index, numbers)] == [[number] for number in numbers]
    assert len(most) == 8
    assert max(most) <= 2  # the one before it is still in the loop above
    assert len(decoded) <= 8 * 60


def test_frames_that_a_seek_misses_are_found_from_the_start(tmp_path, monkeypatch):
    index = read_index(write_clip(tmp_path / "a.mp4", even_times(40)))
    wrong = video_reading.VideoIndex(**vars(index) | {"key_pts": [value + 1 for value in index.key_pts]})
    assert numbers_of(decode_frames(wrong, [3, 20, 39])) == [3, 20, 39]
    shifted = video_reading.VideoIndex(**vars(index) | {"pts": [value + 1 for value in index.pts or []]})
    with pytest.raises(VideoError, match="frame 3 of 40 cannot be decoded"):
        list(decode_frames(shifted, [3, 20]))


@pytest.mark.parametrize(("pixels", "shape"), [("rgb24", (48, 64, 3)), ("gray12le", (48, 64))])
def test_frames_become_the_arrays_that_pyav_makes(pixels, shape):
    rng = np.random.default_rng(0)
    to_array = frame_to_array(pixels)
    for made_as in ("yuv420p", "rgb24", "gray12le", "yuv420p"):  # a change of format on the way
        noise = rng.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        frame = av.VideoFrame.from_ndarray(noise, format="rgb24").reformat(format=made_as)
        found = to_array(frame)
        assert found.shape == shape
        np.testing.assert_array_equal(found, frame.to_ndarray(format=pixels))


class StandInDecoder:
    """Behaves like torchcodec's VideoDecoder on the frames that PyAV reads."""

    calls: list[list[int]]

    def __init__(self, path, dimension_order, seek_mode):
        assert (dimension_order, seek_mode) == ("NHWC", "exact")
        with av.open(path) as container:
            self.frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        self.metadata = SimpleNamespace(num_frames=len(self.frames))

    def get_frames_at(self, indices):
        import torch

        self.calls.append(indices)
        return SimpleNamespace(data=torch.from_numpy(np.stack([self.frames[place] for place in indices])))


@pytest.fixture
def torchcodec(monkeypatch):
    """A fake installed torchcodec, which tests modify."""
    monkeypatch.undo()
    StandInDecoder.calls = []
    module = ModuleType("torchcodec.decoders")
    module.VideoDecoder = StandInDecoder
    module.VideoStreamMetadata = SimpleNamespace(__dataclass_fields__={"rotation": None})
    monkeypatch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", module)
    video_reading._torchcodec_decoder.cache_clear()
    yield module
    video_reading._torchcodec_decoder.cache_clear()


def test_torchcodec_is_used_where_it_is_installed(tmp_path, torchcodec):
    index = read_index(write_clip(tmp_path / "a.mp4", even_times(40)))
    numbers = list(range(0, 40, 2))
    assert numbers_of(decode_frames(index, numbers)) == numbers
    assert [len(call) for call in StandInDecoder.calls] == [8, 8, 4]
    times = [*even_times(10), *[1.0 + number for number in range(10)]]
    uneven = read_index(write_clip(tmp_path / "b.mp4", times))
    from_torchcodec = numbers_of(decode_frames(uneven, list(range(20))))
    video_reading._torchcodec_decoder.cache_clear()
    torchcodec.VideoStreamMetadata = SimpleNamespace(__dataclass_fields__={})  # before 0.11, without rotation
    assert numbers_of(decode_frames(uneven, list(range(20)))) == from_torchcodec


def test_without_a_torchcodec_that_loads_pyav_decodes(tmp_path, monkeypatch, torchcodec, caplog):
    class Broken(ModuleType):
        def __getattr__(self, name):
            raise RuntimeError("Could not load libtorchcodec\nFFmpeg is missing")

    monkeypatch.setitem(sys.modules, "torchcodec.decoders", Broken("torchcodec.decoders"))
    with caplog.at_level("INFO", "mmrl"):
        index = read_index(write_clip(tmp_path / "a.mp4", even_times(4)))
        assert numbers_of(decode_frames(index, [1, 3])) == [1, 3]
    assert (
        "decoded by PyAV because the installed torchcodec cannot be used (Could not load libtorchcodec)" in caplog.text
    )
