"""Untrusted images: the header decides whether a pixel is decoded."""

import io
import os
import struct
import zlib

import pytest
from PIL import Image, ImageFile

from mmrl.files import IMAGE_FORMATS
from mmrl.gui.grounding.samples import image_size
from mmrl.hub.images import MAX_IMAGE_PIXELS, ImageError, check_pixels, decode_image, read_image_file
from mmrl.vlm.data.task import TaskError, open_image


def png(width, height, pixels=b""):
    """A PNG file with an arbitrary header."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def good(width, height):
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def undecoded(monkeypatch):
    """Fails if a pixel is decoded."""

    def refuse(image):
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)


@pytest.mark.parametrize("size", [(12_768, 12_768), (32_000, 32_000), (2**31 - 1, 2**31 - 1), (8001, 8000)])
def test_a_large_image_is_refused_by_its_header(size, undecoded):
    with pytest.raises(ImageError, match="pixels"):
        decode_image(png(*size))


def test_the_limit_is_an_option_and_named(undecoded):
    with pytest.raises(ImageError, match=r"6 x 5 pixels, more than 29 \(data\.max_image_pixels\)"):
        decode_image(png(6, 5), 29, "data.max_image_pixels")


def test_up_to_the_limit_images_are_decoded():
    assert decode_image(good(6, 5), 30).size == (6, 5)
    check_pixels(8000, 8000, MAX_IMAGE_PIXELS)


@pytest.mark.parametrize("content", [b"", b"GIF89a", good(6, 5)[:45], png(0, 5), b"\x00" * 100])
def test_unreadable_images_raise_one_kind_of_error(content):
    with pytest.raises(ImageError):
        decode_image(content)


def test_a_file_longer_than_any_such_image_is_not_read(tmp_path):
    path = tmp_path / "big.png"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no space
    with pytest.raises(ImageError, match="1099511627776 bytes"):
        read_image_file(path)


def encoded(form, **options):
    buffer = io.BytesIO()
    Image.new("RGB", (6, 5), "red").save(buffer, form, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("form", IMAGE_FORMATS)
def test_allowed_formats_are_decoded(form):
    assert decode_image(encoded(form)).size == (6, 5)


FOREIGN = {form: encoded(form) for form in ("TIFF", "PPM", "ICO", "EPS", "PCX", "SGI", "JPEG2000", "DDS", "ICNS")}
FOREIGN |= {"PSD": b"8BPS\0\1" + b"\0" * 60, "FLI": b"\0\0\0\0\x11\xaf" + b"\0" * 122}


@pytest.mark.parametrize("form", FOREIGN)
def test_other_formats_are_named_and_no_decoder_of_theirs_runs(form, monkeypatch, tmp_path):
    Image.init()

    def refuse(*arguments):
        raise AssertionError("a decoder ran")

    monkeypatch.setitem(Image.OPEN, form, (refuse, Image.OPEN[form][1]))
    sentence = f"it is a {form} image; allowed formats are PNG, JPEG, WEBP, GIF, BMP"
    with pytest.raises(ImageError, match=sentence):
        decode_image(FOREIGN[form])
    (tmp_path / "image.png").write_bytes(FOREIGN[form])
    with pytest.raises(OSError, match=sentence):
        image_size(tmp_path / "image.png")
    with pytest.raises(TaskError, match=sentence):
        open_image(FOREIGN[form], "task")


def test_what_is_no_image_is_not_called_one():
    with pytest.raises(ImageError, match="it is damaged or not an image; allowed formats are PNG"):
        decode_image(b"no image at all")


def test_no_pipe_is_read_as_an_image(tmp_path):
    os.mkfifo(tmp_path / "image.png")
    with pytest.raises(ImageError, match="a named pipe, not a file"):
        read_image_file(tmp_path / "image.png")
