"""Videos as mp4: whole ones in a call, growing ones frame by frame, readable even when the process is killed.

A growing video is written in fragments to `<name>.part.mp4`, which plays up to its last fragment at any moment; closing
copies the packets into a plain mp4 under the final name. Colours lose something: H.264 at crf 18 with colour at half
resolution (yuv420p, which every player reads) brings images back within about 2 of 255 levels on average, but pixels
next to sharp coloured edges only within about 100.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmrl.errors import UserError
from mmrl.files import replaced
from mmrl.hub.video_reading import PIXELS

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class VideoSettings:
    """Settings of the H.264 encoder."""

    crf: int = 18
    """Quality of libx264, from 0 (lossless except for the colour format) to 51 (worst)."""
    gop: int = 30
    """Number of frames between key frames: small for quick access, large for small files."""
    encoder: str | None = None
    """FFmpeg's name of the encoder; null takes the first available one of libx264 and libopenh264."""


def write_mp4(
    path: str | os.PathLike[str], frames: Iterable[ArrayLike], fps: float, settings: VideoSettings | None = None
) -> Path:
    """Write a video; the file only gets its name when it is complete.

    Args:
        path: of the file; missing folders are made.
        frames: (T, H, W, 3) uint8, or anything that yields (H, W, 3); odd sizes are padded by repeating the edge.
        fps: frames a second.
        settings: of the encoder; `VideoSettings()` when None.

    Returns:
        Path of the video.

    Raises:
        UserError: there are no frames, fps is not positive, or no encoder.
        ValueError: the frames differ in shape or are not uint8 RGB.
    """
    return _write(Path(path), frames, fps, _h264(settings or VideoSettings()))


def write_gray12_mp4(path: str | os.PathLike[str], frames: Iterable[ArrayLike], fps: float) -> Path:
    """Write images (T, H, W) of 12-bit codes, uint16, as lossless HEVC; raises the same errors as `write_mp4`.

    FFmpeg's error passes through if x265 is missing or takes no images of this size.
    """
    return _write(Path(path), frames, fps, GRAY12)


def _write(path: Path, frames: Iterable[ArrayLike], fps: float, codec: _Codec) -> Path:
    with replaced(path) as draft:
        encoder = _Encoder(draft, fps, codec, WHOLE)
        # closed also after an error, so that the draft can be removed
        try:
            for frame in frames:
                encoder.add(frame)
            if not encoder.frames:
                raise UserError(f"no frames for {path}; a video needs at least one")
        finally:
            encoder.close()
    return path


class VideoRecorder:
    """Writes frames as they arrive; a recording survives an exception or a kill.

        with VideoRecorder("run.mp4", fps=20) as video:
            video.add(frame)

    Args:
        path: of the video; it appears on closing, and until then `part` is the one that grows.
        fps: frames a second.
        settings: of the encoder; with a key frame every second when None.

    Raises:
        UserError: fps is not positive or no encoder is there.
    """

    def __init__(self, path: str | os.PathLike[str], fps: float, settings: VideoSettings | None = None) -> None:
        self.path = Path(path)
        self.part = self.path.with_name(f"{self.path.stem}.part.mp4")
        """The growing video, with one fragment per key frame."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        codec = _h264(settings or VideoSettings(gop=max(1, round(fps))))
        self._encoder = _Encoder(self.part, fps, codec, FRAGMENTS)
        self._closed = False

    @property
    def frames(self) -> int:
        """Number of frames so far."""
        return self._encoder.frames

    def add(self, frame: ArrayLike) -> None:
        """Append an image (H, W, 3) uint8 RGB of the same size as the first."""
        if self._closed:
            raise ValueError(f"the recorder of {self.path} is closed")
        self._encoder.add(frame)

    def close(self) -> Path | None:
        """Finish the video and return its path; None if there were no frames and therefore no file."""
        if self._closed:
            return self.path if self.frames else None
        self._closed = True
        self._encoder.close()
        if not self.frames:
            self.part.unlink(missing_ok=True)
            return None
        # copied without decoding: the fragments become one plain file
        copy_video([self.part], self.path)
        self.part.unlink()
        return self.path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def copy_video(sources: Iterable[Path], target: Path) -> None:
    """Concatenate videos of the same size and rate without decoding them; replaces the target in one step."""
    import av

    with replaced(target) as draft, contextlib.closing(_File(draft)) as file:
        with av.open(file, "w", format="mp4", options=WHOLE) as output:
            stream: Any = None
            start = 0
            for path in sources:
                with av.open(str(path)) as source:
                    video = source.streams.video[0]
                    if stream is None:
                        stream = output.add_stream_from_template(video)
                        # the template's time base, so that times need no conversion
                        stream.time_base = video.time_base
                    start = _append_packets(source, output, stream, start)
        file.check()
        if stream is None:
            raise ValueError("no videos to concatenate")


class _File:
    """A file for FFmpeg, whose writer of mp4 crashes the process after a write that failed: `check` raises instead."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)  # faststart opens it once more, to read what it moves behind the index
        self._file = path.open("w+b", buffering=0)
        self._error: OSError | None = None
        self.seek = self._file.seek
        self.tell = self._file.tell
        self.read = self._file.read
        self.close = self._file.close

    def write(self, content: Any) -> int:
        rest = memoryview(content)
        try:
            # no exception from here: FFmpeg's writer would crash the process after one
            while rest and self._error is None:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._error = OSError(error.errno, error.strerror, self.name)
        return len(content)

    def check(self) -> None:
        if self._error is not None:
            raise self._error


def pad_to_even(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Repeat the last row and column of (H, W, 3) uint8 if their number is odd."""
    height, width, _ = frame.shape
    if height % 2 == 0 and width % 2 == 0:
        return frame
    # the edge is repeated, so that padding adds no visible border
    return np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")


@dataclass(frozen=True)
class _Codec:
    """An encoder of FFmpeg with its options, and the pixels that it is given and stores."""

    encoder: str
    options: Mapping[str, str]
    given: str = "rgb24"
    stored: str = "yuv420p"


class _Encoder:
    """An mp4 that grows; the file is made with the first frame, whose size is the video's."""

    def __init__(self, path: Path, fps: float, codec: _Codec, container: Mapping[str, str]) -> None:
        if not 0 < fps < 1000:
            raise UserError(f"fps is {fps}; must be between 0 and 1000")
        self._path = path
        self._codec = codec
        self._options = dict(container)
        # players expect small denominators, such as 30000/1001
        self._rate = Fraction(fps).limit_denominator(1001)
        self._file: _File
        self._output: Any = None
        self._stream: Any = None
        self._shape: tuple[int, ...] = ()
        self.frames = 0

    def add(self, frame: ArrayLike) -> None:
        import av

        image = np.asarray(frame)
        shape, kind = PIXELS[self._codec.given]
        if image.dtype != kind or image.shape[2:] != shape or image.ndim != 2 + len(shape) or not image.size:
            wanted = ", ".join(map(str, ("H", "W", *shape)))
            raise ValueError(
                f"a frame has shape {image.shape} and type {image.dtype}; expected ({wanted}) {np.dtype(kind)}"
            )
        if image.shape != (self._shape or image.shape):
            raise ValueError(f"frame {self.frames} has shape {image.shape}; earlier frames have {self._shape}")
        self._shape = image.shape
        if self._codec.stored == "yuv420p":  # which has a colour for every two rows and columns
            image = pad_to_even(image)
        if self._output is None:
            # the encoder needs the size of the first frame
            self._open(image.shape)
        encoded = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format=self._codec.given)
        encoded.pts = self.frames
        encoded.time_base = 1 / self._rate
        self._output.mux(self._stream.encode(encoded))
        # what failed inside FFmpeg's writer is raised here
        self._file.check()
        self.frames += 1

    def close(self) -> None:
        if self._output is None:
            return
        with contextlib.closing(self._file):
            # the encoder still holds frames
            self._output.mux(self._stream.encode())
            self._output.close()
            self._output = None
            self._file.check()

    def _open(self, shape: tuple[int, ...]) -> None:
        import av

        self._file = _File(self._path)
        output = av.open(self._file, "w", format="mp4", options=self._options)
        self._stream = output.add_stream(self._codec.encoder, rate=self._rate, options=dict(self._codec.options))
        self._stream.height, self._stream.width = shape[:2]
        self._stream.pix_fmt = self._codec.stored
        # The bytes would depend on the number of threads.
        self._stream.codec_context.thread_count = 1
        self._output = output


def _h264(settings: VideoSettings) -> _Codec:
    """The encoder of settings; raises UserError if this PyAV has none."""
    wanted = (settings.encoder,) if settings.encoder else ENCODERS
    found = next(filter(_can_encode, wanted), None)
    if found is None:
        raise UserError(
            f"this PyAV has no encoder {' or '.join(wanted)}; install one with: pip install --force-reinstall av"
        )
    # no B-frames: each frame then has its packet, and times rise
    options = {"g": str(settings.gop), "bf": "0"}
    if found == "libx264":
        # with mbtree the bytes of small images depend on the earlier content of memory
        options |= {"crf": str(settings.crf), "preset": "veryfast", "mbtree": "0"}
    return _Codec(found, options)


def _can_encode(name: str) -> bool:
    import av

    try:
        return bool(av.Codec(name, "w").is_encoder)
    except ValueError:
        return False


def _append_packets(source: Any, output: Any, stream: Any, start: int) -> int:
    video = source.streams.video[0]
    end = start
    for packet in source.demux(video):
        # packets without times only flush the demuxer
        if packet.dts is None:
            continue
        # shifted behind the source before
        packet.pts = packet.pts + start
        packet.dts = packet.dts + start
        packet.stream = stream
        end = max(end, packet.pts + (packet.duration or 0))
        output.mux(packet)
    return end


ENCODERS = ("libx264", "libopenh264")
# Frames that refer to others lose pixels of noisy depth in x265, although it is asked for no loss.
GRAY12 = _Codec("libx265", {"g": "1", "bf": "0", "x265-params": "lossless=1:log-level=none"}, "gray12le", "gray12le")
WHOLE = {"movflags": "faststart"}
"""Options of a file whose index comes first."""
FRAGMENTS = {"movflags": "frag_keyframe+empty_moov+default_base_moof", "flush_packets": "1"}
"""Options of a file that can be read while it grows."""
