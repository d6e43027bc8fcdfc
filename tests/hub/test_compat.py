from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.hub import compat
from tests.vlm.builders import noise_image, write_video


@pytest.fixture
def imports(monkeypatch):
    """Let `import torchvision` fail with the given errors, one after another, and then succeed."""
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchvision"}

    def fail_with(*errors: Exception) -> None:
        waiting = list(errors)

        def import_module(name: str):
            assert name == "torchvision"
            sys.modules["torchvision.halfway"] = object()
            if waiting:
                raise waiting.pop(0)

        monkeypatch.setattr(importlib, "import_module", import_module)

    yield fail_with
    sys.modules.pop("torchvision.halfway", None)
    sys.modules.update(kept)


def missing(name: str) -> RuntimeError:
    return RuntimeError(f"operator torchvision::{name} does not exist")


def ensure() -> str:
    return compat.ensure_torchvision.__wrapped__()


def test_this_machine_has_a_known_state():
    assert compat.ensure_torchvision() in compat.TORCHVISION_STATES


def test_native_import_is_left_alone(imports):
    imports()
    assert ensure() == "native"


def test_missing_operators_are_declared_and_the_import_is_tried_again(imports):
    imports(missing("suite_test_a"), missing("suite_test_b"))
    assert ensure() == "patched"
    for name in ("suite_test_a", "suite_test_b"):
        schema = getattr(torch.ops.torchvision, name).default._schema
        assert len(schema.arguments) == 3


def test_half_imported_modules_are_forgotten_before_the_next_try(imports):
    imports(missing("suite_test_c"))
    sys.modules["torchvision.stale"] = object()
    ensure()
    assert "torchvision.stale" not in sys.modules


def test_absent(imports):
    imports(ModuleNotFoundError("No module named 'torchvision'", name="torchvision"))
    assert ensure() == "absent"


@pytest.mark.parametrize(
    "error",
    [
        OSError("libcudart.so.13: cannot open shared object file"),
        ImportError("cannot import name 'x'"),
        RuntimeError("something else"),
    ],
)
def test_other_failures_say_what_to_install(imports, error):
    imports(error)
    with pytest.raises(UserError, match="whl/cpu torchvision"):
        ensure()


def test_a_missing_dependency_is_named(imports):
    imports(ModuleNotFoundError("No module named 'PIL'", name="PIL"))
    with pytest.raises(UserError, match="PIL"):
        ensure()


def test_endless_operators_end(imports):
    imports(*(missing(f"suite_test_many_{index}") for index in range(40)))
    with pytest.raises(UserError, match="more than 16"):
        ensure()


def test_vision_info_without_media():
    messages = [{"role": "user", "content": "hello"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
    assert compat.vision_info(messages, 14) == (None, None)


def test_vision_info_keeps_the_order_of_images_and_videos(tmp_path):
    path = write_video(tmp_path / "clip.mp4")
    red, blue = Image.new("RGB", (56, 56), (255, 0, 0)), Image.new("RGB", (84, 56), (0, 0, 255))
    content = [
        {"type": "image", "image": red},
        {"type": "video", "video": str(path), "fps": 2.0, "min_pixels": 28 * 28, "max_pixels": 56 * 84},
        {"type": "image", "image": blue},
    ]
    images, videos = compat.vision_info([{"role": "user", "content": content}], 14)
    assert [image.size for image in images] == [(56, 56), (84, 56)]
    assert images[0].getpixel((0, 0)) == (255, 0, 0)
    frames, metadata = videos[0]
    # 20 frames at 10 per second make 4 frames at 2 per second, spread from the first to the last
    assert metadata["frames_indices"] == [0, 6, 13, 19]
    assert metadata["fps"] == 10.0
    assert frames.shape[:2] == (4, 3)
    assert frames.shape[2] % 28 == 0
    assert frames.shape[3] % 28 == 0
    np.testing.assert_allclose(frames.mean((1, 2, 3)), [0, 72, 156, 228], atol=4)


def test_a_part_of_a_video(tmp_path):
    path = write_video(tmp_path / "clip.mp4")
    item = {"type": "video", "video": str(path), "nframes": 4, "video_start": 1.0, "video_end": 1.6, "min_pixels": 784}
    _, videos = compat.vision_info([{"role": "user", "content": [item]}], 16)
    assert videos[0][1]["frames_indices"] == [10, 12, 14, 16]


def test_without_qwen_vl_utils_images_still_work(monkeypatch, tmp_path):
    monkeypatch.setattr(compat, "_qwen_vl_utils", lambda: None)
    noise_image(30, 40, 0).convert("L").save(tmp_path / "grey.png")
    content = [{"type": "image", "image": str(tmp_path / "grey.png")}]
    images, videos = compat.vision_info([{"role": "user", "content": content}], 14)
    assert videos is None
    assert images[0].mode == "RGB"
    assert images[0].size == (40, 30)
    with pytest.raises(UserError, match="qwen-vl-utils"):
        compat.vision_info([{"role": "user", "content": [{"type": "video", "video": "clip.mp4"}]}], 14)


def test_progress_bars_come_back():
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    with compat.quiet_transformers():
        assert not logging.is_progress_bar_enabled()
    assert logging.is_progress_bar_enabled() == before
