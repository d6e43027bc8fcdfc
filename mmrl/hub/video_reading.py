"""Decode selected frames of a video file one at a time, however long the file is.

`read_index` lists the frames without decoding them. `decode_frames` then seeks to the key frame before each wanted
frame and decodes from there, so the time goes with the frames that are wanted and their distance from key frames, and
the memory with two frames and those that the decoder keeps to predict others from (at most 16, as H.264 allows).
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from mmrl.hub.images import MAX_IMAGE_PIXELS, ImageError, check_pixels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Frame = NDArray[np.uint8]

LOGGER = logging.getLogger("mmrl")

ROUNDING_S = 0.0005
"""Half a millisecond: many containers round times to milliseconds, and the error remains if a file is remuxed."""
TICKS, SHARE = 2.0, 0.25
"""In a video of constant rate, the time of frame n differs from n / fps by at most this many units of the file's time
or milliseconds, which are rounding, and by at most this fraction of a frame's duration."""
SQUARE = 0.02
"""Pixels whose width and height differ by less are treated as square."""
LATE_END_S = 1.0
"""A Matroska file was cut off if its packets end earlier than the duration in its header by more than this."""
BATCH = 8
"""Number of frames that torchcodec decodes per call."""


class VideoError(ValueError):
    """A video that cannot be used."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class VideoIndex:
    """The frames of a file, by index in display order."""

    path: str
    fps: float
    """Frames per second; the average if the rate is variable."""
    times_s: list[float]
    """(T) presentation time of each frame, in seconds from the start of the file."""
    end_s: float
    """Time at which the last frame ends."""
    constant: bool
    """Whether each frame n is shown from n / fps, for 1 / fps."""
    pts: list[int] | None
    """(T) the same times in units of the file, used to find frames; None if frames are found by their order."""
    key_pts: list[int] = field(default_factory=list)
    """Times of the key frames, in ascending order."""
    pixel_aspect: float = 1.0
    """Width of a stored pixel over its height."""

    @property
    def total(self) -> int:
        """Number of frames T."""
        return len(self.times_s)

    def frame_at(self, time_s: float) -> int:
        """Index of the frame that is shown at a time; the first frame if the time is before it."""
        # a hair later than the time itself: containers round starts down
        return max(bisect.bisect_right(self.times_s, time_s + ROUNDING_S) - 1, 0)


def read_index(path: str | os.PathLike[str], max_pixels: int = MAX_IMAGE_PIXELS) -> VideoIndex:
    """List the frames of a video file, each of at most `max_pixels`, without decoding them."""
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise VideoError("missing_video", f"file not found: {path}")
    # empty files have no container to open
    size = os.path.getsize(path)
    if not size:
        raise VideoError("empty_video", "it has zero bytes")
    with opened(path) as container:
        stream = video_stream(container, max_pixels)
        packets, ends = _list_packets(container, stream)
        # before frames are counted: a file that was cut off may still list all of them
        _check_whole(container, stream, size, ends)
        if not packets:
            raise VideoError("empty_video", "it has no frames")
        return _index(path, container, stream, packets)


def decode_frames(index: VideoIndex, numbers: Sequence[int]) -> Iterator[Frame]:
    """Decode the frames (H, W, 3) uint8 RGB of some indices, upright and with square pixels, one at a time."""
    decode = _torchcodec_decoder() or _decode_pyav
    # each frame once, though it may be wanted twice
    coming = decode(index, list(dict.fromkeys(numbers)))
    last, frame = -1, None
    for wanted in numbers:
        if wanted != last:
            frame = None  # let go of it before the next one is decoded
            last, frame = wanted, next(coming)
        assert frame is not None
        yield frame


@dataclass(frozen=True)
class _Packet:
    pts: int | None
    dts: int | None
    duration: int
    key: bool


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Any]:
    """An open PyAV container; a damaged file raises `VideoError`, and no other file is opened."""
    import av

    # from PyAV 19 on, every metadata can be read and the argument is gone
    lenient: Any = {"metadata_errors": "ignore"} if int(av.__version__.partition(".")[0]) < 19 else {}
    try:
        # no other protocol or playlist: a file must not make this process open another one
        options = {"protocol_whitelist": "file", "format_whitelist": ",".join(FORMATS)}
        with av.open(os.fspath(path), options=options, **lenient) as container:
            yield container
    except (VideoError, UserError, _MissedError):
        raise
    except Exception as error:  # of damaged files PyAV returns None instead of numbers, codecs and times
        raise VideoError("unreadable_video", f"it cannot be decoded: {type(error).__name__}: {error}") from None


def video_stream(container: Any, max_pixels: int = MAX_IMAGE_PIXELS) -> Any:
    """The video track that players show, with frames of at most `max_pixels`; raises VideoError."""
    stream = container.streams.best("video")
    if stream is None or stream.disposition & type(stream.disposition).attached_pic:  # the cover of a sound file
        raise VideoError("empty_video", "it has no video track")
    if stream.codec_context is None:
        raise VideoError("unreadable_video", "the codec of its video track is unknown")
    width = square_width(stream.codec_context.width, float(stream.sample_aspect_ratio or 1))
    try:
        check_pixels(width, stream.codec_context.height, max_pixels, "data.max_image_pixels")
    except ImageError as error:
        raise VideoError("unreadable_video", f"its frames are too large or empty: {error}") from None
    return stream


def _list_packets(container: Any, stream: Any) -> tuple[list[_Packet], float]:
    """The video's packets that are shown, and when the last packet of any stream ends, in seconds."""
    packets: list[_Packet] = []
    end_s, is_vp8 = 0.0, stream.codec_context.name == "vp8"
    for packet in container.demux():
        if packet.pts is not None and packet.time_base:
            end_s = max(end_s, (packet.pts + (packet.duration or 0)) * float(packet.time_base))
        # packets without content only carry information
        shown = packet.size and not packet.is_discard and not (is_vp8 and _is_hidden(packet))
        if packet.stream_index == stream.index and shown:
            packets.append(_Packet(packet.pts, packet.dts, packet.duration or 0, packet.is_keyframe))
    return packets, end_s


def _is_hidden(packet: Any) -> bool:
    """Whether a packet of VP8 is a reference that other frames are predicted from and that is not shown (RFC 6386)."""
    return not memoryview(packet)[0] & 0x10


def _check_whole(container: Any, stream: Any, size: int, end_s: float) -> None:
    """Compare the file's size and duration with its index and header."""
    # an index names where each packet is; beyond the file's end there is nothing
    end = max((entry.pos + entry.size for entry in stream.index_entries), default=0)
    if end > size:
        raise VideoError(
            "truncated_video", f"it is truncated: its index goes to byte {end}, but the file has {size} bytes"
        )
    promised_s = (container.duration or 0) / 1e6
    if "matroska" in container.format.name and promised_s - end_s > LATE_END_S:
        raise VideoError("truncated_video", f"it is truncated: it ends after {end_s:.1f} of {promised_s:.1f} seconds")


def _index(path: str, container: Any, stream: Any, packets: Sequence[_Packet]) -> VideoIndex:
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    aspect = float(stream.sample_aspect_ratio or 1)
    pts = sorted(packet.pts for packet in packets if packet.pts is not None)
    # raw streams and AVI have no times of presentation
    if len(pts) < len(packets) or container.format.name in WITHOUT_TIMES:
        # the order of decoding has as many times as that of showing
        slots = sorted(packet.dts for packet in packets if packet.dts is not None)
        if len(slots) == len(packets):
            times = _seconds(slots, slots[0], stream.time_base)
        elif rate:
            times = [number / rate for number in range(len(packets))]
        else:
            raise VideoError("unreadable_video", "it has neither frame times nor a frame rate")
        fps, constant = _rate(times, rate, float(stream.time_base))
        return VideoIndex(path, fps, times, times[-1] + 1 / fps, constant, None, pixel_aspect=aspect)
    start = _start(container, stream, pts[0])
    times = _seconds(pts, start, stream.time_base)
    fps, constant = _rate(times, rate, float(stream.time_base))
    # the duration of the last frame, which no later frame limits
    last = max((packet.duration for packet in packets if packet.pts == pts[-1]), default=0)
    end_s = times[-1] + (float(last * stream.time_base) or 1 / fps)
    keys = sorted(packet.pts for packet in packets if packet.key and packet.pts is not None)
    # a last frame that is shown longer makes the rate variable
    constant = constant and end_s - times[-1] < 1.5 / fps
    return VideoIndex(path, fps, times, end_s, constant, pts, keys, aspect)


def _start(container: Any, stream: Any, first: int) -> int:
    """When the file starts, in units of the video's times: with its earliest track, as players show it."""
    if container.start_time is None:
        return first
    return min(first, round(Fraction(container.start_time, 1_000_000) / stream.time_base))


def _seconds(values: Sequence[int], start: int, unit: Fraction) -> list[float]:
    return [(value - start) * unit.numerator / unit.denominator for value in values]


def _rate(times_s: Sequence[float], stated: float, tick_s: float) -> tuple[float, bool]:
    """Frames a second, and whether frame n is shown at n / fps: at the rate that the file states or at the average."""
    if len(times_s) == 1:
        # a single frame has no rate
        return stated or 1.0, True
    span_s = times_s[-1] - times_s[0]
    if span_s <= 0:
        raise VideoError("unreadable_video", "the times of its frames are not increasing")
    average = (len(times_s) - 1) / span_s
    # the stated rate first: the average of a rounded file is off by a little
    for fps in (stated, average):
        if fps and times_s[0] <= 0.5 / fps and _follows(times_s, fps, tick_s):
            return fps, True
    return average, False


def _follows(times_s: Sequence[float], fps: float, tick_s: float) -> bool:
    """Whether frames come at a constant rate, up to the rounding of the container."""
    # rounding of the container, but never more than a share of a frame
    most = min(TICKS * max(tick_s, ROUNDING_S), SHARE / fps) + 1e-9
    return all(abs(time_s - times_s[0] - number / fps) <= most for number, time_s in enumerate(times_s))


def _decode_pyav(index: VideoIndex, indices: Sequence[int]) -> Iterator[Frame]:
    """Decode frames at rising indices; without times, in the order of the decoder."""
    if index.pts is None:
        yield from _decode_in_order(index, indices)
        return
    done = 0
    for seeking in (True, False):  # some files have key frames that a seek does not find
        try:
            for frame in _decode_at_times(index, indices[done:], seeking=seeking):
                yield frame
                # frames that were given are not decoded again on the second try
                done += 1
        except _MissedError:
            continue
        return
    raise VideoError("unreadable_video", f"frame {indices[done]} of {index.total} cannot be decoded")


def decode_from(path: str | os.PathLike[str], start_s: float) -> Iterator[tuple[float, Any]]:
    """Time in seconds and PyAV frame of all valid frames from the key frame before a time; raises VideoError.

    Damaged frames are left out: they are neither concealed nor an error.
    """
    import av

    with opened(path) as container:
        video = video_stream(container)
        # Without it the decoder conceals what is broken.
        video.codec_context.options = {"err_detect": "explode"}
        video.codec_context.thread_type = "NONE"
        # Backward to the key frame; ROUNDING_S is for starts that are rounded down.
        container.seek(int((start_s + ROUNDING_S) / video.time_base), stream=video)
        packets = container.demux(video)
        while True:
            try:
                packet = next(packets)
            except (StopIteration, av.error.FFmpegError):
                return
            try:
                frames = packet.decode()
            except av.error.FFmpegError:
                continue
            for frame in frames:
                if not frame.is_corrupt and frame.pts is not None:
                    yield float(frame.pts * frame.time_base), frame


class _MissedError(Exception):
    """The decoder did not give a frame at its time."""


def _decode_at_times(index: VideoIndex, indices: Sequence[int], *, seeking: bool) -> Iterator[Frame]:
    assert index.pts is not None
    with opened(index.path) as container:
        stream = video_stream(container)
        coming, last = _decoding(container, stream), None
        to_array = frame_to_array(aspect=index.pixel_aspect)
        for wanted in indices:
            target = index.pts[wanted]
            key = bisect.bisect_right(index.key_pts, target) - 1
            # seek only forward and only if it saves frames: decoding on is faster than a seek
            if seeking and key >= 0 and (last is None or index.key_pts[key] > last):
                container.seek(index.key_pts[key], stream=stream)
                coming = _decoding(container, stream)
            # the decoder gives frames in order of time
            frame = next((frame for frame in coming if frame.pts is not None and frame.pts >= target), None)
            # a later frame means that the wanted one is missing
            if frame is None or frame.pts != target:
                raise _MissedError
            last = frame.pts
            yield _upright(frame, to_array)


def _decode_in_order(index: VideoIndex, indices: Sequence[int]) -> Iterator[Frame]:
    with opened(index.path) as container:
        coming = enumerate(_decoding(container, video_stream(container)))
        to_array = frame_to_array(aspect=index.pixel_aspect)
        for wanted in indices:
            frame = next((frame for number, frame in coming if number == wanted), None)
            if frame is None:
                raise VideoError("truncated_video", f"it is truncated: frame {wanted} of {index.total} is missing")
            yield _upright(frame, to_array)


def frame_to_array(pixel_format: str = "rgb24", aspect: float = 1.0) -> Callable[[Any], NDArray[Any]]:
    """Return a function that converts the frames of one video to (H, W, 3) uint8, or (H, W) uint16 for gray12le.

    Pixels of another aspect (width over height) become square, as players show them: the width changes.

    All frames share a converter, for one thread. `av.VideoFrame.to_ndarray` makes one for each frame, with threads of
    its own, which for small frames takes longer than decoding them.
    """
    from av.video.reformatter import VideoReformatter

    converter = VideoReformatter()

    def to_array(frame: Any) -> NDArray[Any]:
        width = square_width(frame.width, aspect)
        return converter.reformat(frame, width=width, format=pixel_format).to_ndarray()

    return to_array


def square_width(width: int, aspect: float) -> int:
    """Width of a frame with square pixels; the stored width if its pixels are square up to rounding."""
    return width if abs(aspect - 1) < SQUARE else max(1, round(width * aspect))


def _decoding(container: Any, stream: Any) -> Iterator[Any]:
    return container.decode(stream)


def _upright(frame: Any, to_array: Callable[[Any], Frame]) -> Frame:
    """Convert to RGB, rotated by the display matrix."""
    if frame.is_corrupt:
        raise VideoError("unreadable_video", "one of its frames is damaged")
    pixels = to_array(frame)
    turns = round(frame.rotation / 90)
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns % 4 else pixels


@functools.cache
def _torchcodec_decoder() -> Callable[[VideoIndex, Sequence[int]], Iterator[Frame]] | None:
    """The decoder of torchcodec if that is installed, finds its FFmpeg and turns frames upright; else None."""
    try:
        from torchcodec.decoders import VideoDecoder, VideoStreamMetadata
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        LOGGER.info("videos are decoded by PyAV because the installed torchcodec cannot be used (%s)", first)
        return None
    if "rotation" not in getattr(VideoStreamMetadata, "__dataclass_fields__", {}):
        LOGGER.info("videos are decoded by PyAV because this torchcodec does not rotate videos; version 0.11 does")
        return None
    return functools.partial(_decode_torchcodec, VideoDecoder)


def _decode_torchcodec(make_decoder: Any, index: VideoIndex, indices: Sequence[int]) -> Iterator[Frame]:
    # frames without times, and pixels that are not square, which torchcodec leaves alone
    if index.pts is None or square_width(1000, index.pixel_aspect) != 1000:
        yield from _decode_pyav(index, indices)
        return
    try:
        decoder = make_decoder(index.path, dimension_order="NHWC", seek_mode="exact")
        # its count has to agree, or its indices would name other frames
        if decoder.metadata.num_frames == len(index.pts):
            # a few frames in a call: all of them would have to fit in memory
            for first in range(0, len(indices), BATCH):
                yield from decoder.get_frames_at(list(indices[first : first + BATCH])).data.numpy()
            return
    except (RuntimeError, ValueError, IndexError) as error:
        raise VideoError("unreadable_video", f"torchcodec cannot decode it: {error}") from None
    yield from _decode_pyav(index, indices)


PIXELS: dict[str, tuple[tuple[int, ...], type]] = {"rgb24": ((3,), np.uint8), "gray12le": ((), np.uint16)}
"""Channels and pixel type of each array format."""
FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2",
    "matroska,webm",
    *("avi", "mpegts", "mpeg", "mpegvideo", "h264", "hevc", "m4v", "av1", "obu", "ivf"),
    *("flv", "ogg", "asf", "gif", "apng", "webp_pipe", "mxf", "nut", "rm", "wtv", "dv"),
)
"""Containers that include their video; playlists such as HLS (.m3u8), DASH and concat open other files."""
WITHOUT_TIMES = ("avi", "h264", "hevc", "m4v")
"""Formats whose packets contain the decoding order instead of times."""
