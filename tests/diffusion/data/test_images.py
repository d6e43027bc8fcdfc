"""Captioned images: built by functions, given by users, and damaged files."""

import json
import zipfile

import numpy as np
import pytest
from PIL import Image

from diffusion.data.captioned_images import ImageDataConfig, load_images, write_images
from diffusion.data.image_pairs import ImagePairConfig, load_pairs
from mmrl.errors import UserError

PIXELS = np.random.default_rng(0).integers(0, 256, (3, 8, 6, 3), dtype=np.uint8)


def test_packed_images_are_unpacked_unchanged(tmp_path):
    path = write_images(tmp_path / "deep/images.npz", PIXELS, ["one", "", "ünï"])
    found = load_images(ImageDataConfig(path=str(path)))
    assert [image.caption for image in found] == ["one", "", "ünï"]
    assert all(np.array_equal(image.read(), pixels) for image, pixels in zip(found, PIXELS, strict=True))
    with pytest.raises(ValueError, match="3 images and 1 captions"):
        write_images(path, PIXELS, ["one"])


def test_lists_name_files_relative_to_themselves(tmp_path):
    (tmp_path / "pictures").mkdir()
    Image.fromarray(PIXELS[0]).save(tmp_path / "pictures/a.png")
    Image.fromarray(PIXELS[1][..., 0]).save(tmp_path / "pictures/grey.png")
    rows = [{"image": "pictures/a.png", "prompt": "one"}, {"image": "pictures/grey.png", "prompt": "grey"}]
    path = tmp_path / "list.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    found = load_images(ImageDataConfig(path=str(path)))
    assert np.array_equal(found[0].read(), PIXELS[0])
    assert np.array_equal(found[1].read(), PIXELS[1][..., :1].repeat(3, 2))
    (tmp_path / "pictures/a.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"a\.png cannot be read as an image"):
        found[0].read()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "contains no images"),
        (b"{", r"list\.jsonl line 1: not valid JSON"),
        (b'{"image": "a.png"}', "line 1: expected"),
        (b"[1]", "line 1: expected"),
        (b'{"image": "gone.png", "prompt": "x"}', r"line 1: image not found: .*gone\.png"),
        (b"\xff\xfe", "line 1: not UTF-8"),
    ],
)
def test_bad_lists_are_errors(content, message, tmp_path):
    path = tmp_path / "list.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_images(ImageDataConfig(path=str(path)))


def damaged(whole, kind):
    return {
        "empty": b"",
        "text": b"not an archive",
        "cut": whole[: len(whole) // 2],
        "flipped": whole[:120] + bytes(255 - byte for byte in whole[120:180]) + whole[180:],
    }[kind]


@pytest.mark.parametrize("kind", ["empty", "text", "cut", "flipped"])
def test_damaged_archives_are_errors(kind, tmp_path):
    path = write_images(tmp_path / "images.npz", PIXELS, ["a", "b", "c"])
    path.write_bytes(damaged(path.read_bytes(), kind))
    with pytest.raises(UserError, match=r"images\.npz is not a valid file of captioned images"):
        load_images(ImageDataConfig(path=str(path)))


@pytest.mark.parametrize(
    "arrays",
    [
        {"images": PIXELS.astype(np.float32), "captions": np.array(["a", "b", "c"])},
        {"images": PIXELS[..., :1], "captions": np.array(["a", "b", "c"])},
        {"images": PIXELS[0], "captions": np.array(["a"] * 8)},
        {"images": PIXELS, "captions": np.array(["a"])},
    ],
)
def test_arrays_of_other_shapes_are_errors(arrays, tmp_path):
    np.savez(tmp_path / "images.npz", **arrays)
    with pytest.raises(UserError, match=r"must be uint8 \(N, h, w, 3\)"):
        load_images(ImageDataConfig(path=str(tmp_path / "images.npz")))


def test_archives_without_captions_and_missing_files_are_errors(tmp_path):
    np.savez(tmp_path / "images.npz", images=PIXELS)
    with pytest.raises(UserError, match="captions"):
        load_images(ImageDataConfig(path=str(tmp_path / "images.npz")))
    with pytest.raises(UserError, match="file not found"):
        load_images(ImageDataConfig(path=str(tmp_path / "gone.npz")))
    with pytest.raises(UserError, match=r"images\.path is not set"):
        load_images(ImageDataConfig())


def npy(descr, shape, content=b""):
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


CAPTIONS = npy("<U1", (3,), b"a\0\0\0" * 3)


@pytest.mark.parametrize(
    ("images", "captions", "message"),
    [
        (npy("|u1", (10**12, 8, 6, 3)), CAPTIONS, "contains 0 bytes"),
        (npy("|u1", (3, 2**40, 2**40, 3)), CAPTIONS, "contains 0 bytes"),
        (npy("|O", (3,)), CAPTIONS, "object"),
        (npy("<f4", (3, 1, 1, 3), bytes(36)), CAPTIONS, "must be uint8"),
        (npy("|u1", (), b"\0"), CAPTIONS, "must be uint8"),
        (npy("|u1", (3, 1, 1, 3), bytes(9)), npy("<i8", (3,), bytes(24)), "N texts"),
        (npy("|u1", (3, 1, 1, 3), bytes(9)), npy("<U1", (), b"a\0\0\0"), "N texts"),
        (npy("|u1", (3, 3, 3, 3), bytes(81)), CAPTIONS, "more than 8"),
        (b"\x93NUMPY\x01\x00\x01\x00{", CAPTIONS, "is not a valid file of captioned images"),
        (b"no array", CAPTIONS, "is not a valid file of captioned images"),
    ],
)
def test_arrays_with_false_headers_are_refused(images, captions, message, tmp_path):
    path = tmp_path / "bad.npz"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("images.npy", images)
        packed.writestr("captions.npy", captions)
    with pytest.raises(UserError, match=message):
        load_images(ImageDataConfig(path=str(path), max_image_pixels=8))


def test_a_large_image_of_a_list_is_refused_by_its_header(tmp_path):
    Image.fromarray(PIXELS[0]).save(tmp_path / "a.png")
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps({"image": "a.png", "prompt": "one"}))
    (image,) = load_images(ImageDataConfig(path=str(path), max_image_pixels=47))
    with pytest.raises(UserError, match=r"6 x 8 pixels, more than 47 \(images\.max_image_pixels\)"):
        image.read()


@pytest.mark.parametrize("row", [{"image": "x" * 300, "prompt": "a"}, {"image": 1, "prompt": "a"}, {"image": "\ud800"}])
def test_rows_of_a_list_that_name_no_image(row, tmp_path):
    path = tmp_path / "list.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"list\.jsonl line 1: "):
        load_images(ImageDataConfig(path=str(path)))


def test_images_inside_a_parquet_table(tmp_path):
    datasets = pytest.importorskip("datasets")
    names = ("image", "chosen", "rejected")
    features = {"prompt": datasets.Value("string"), **{name: datasets.Image() for name in names}}
    pixels = dict(zip(names, PIXELS, strict=True))
    row = {"prompt": "one", **{name: Image.fromarray(each) for name, each in pixels.items()}}
    path = tmp_path / "list.parquet"
    datasets.Dataset.from_list([row, row], features=datasets.Features(features)).to_parquet(path)
    found = load_images(ImageDataConfig(path=str(path)))
    assert [image.caption for image in found] == ["one", "one"]
    assert all(np.array_equal(image.read(), pixels["image"]) for image in found)
    pairs = load_pairs(ImagePairConfig(path=str(path)))
    assert all(np.array_equal(pair.chosen(), pixels["chosen"]) for pair in pairs.tasks)
    assert np.array_equal(pairs.tasks[1].rejected(), pixels["rejected"])
    with pytest.raises(UserError, match=r"column image of row 1 cannot be read .*more than 47"):
        load_images(ImageDataConfig(path=str(path), max_image_pixels=47))[0].read()
