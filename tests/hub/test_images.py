"""Untrusted images: the header decides whether a pixel is decoded."""

import io
import struct
import zlib

import pytest
from PIL import Image, ImageFile

from mmrl.hub.images import MAX_IMAGE_PIXELS, ImageError, check_pixels, decode_image, read_image_file


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
