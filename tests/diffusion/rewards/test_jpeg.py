import io

import numpy as np
import pytest
from PIL import Image

from diffusion.rewards.jpeg import jpeg_compressibility, jpeg_incompressibility
from mmrl.errors import UserError


def pictures():
    flat = np.full((32, 32, 3), 128, dtype=np.uint8)
    return [flat, np.random.default_rng(0).integers(0, 256, flat.shape, dtype=np.uint8)]


def test_size_is_that_of_the_file_in_thousands_of_bytes():
    sizes = jpeg_incompressibility(["", ""], pictures())
    for size, image in zip(sizes, pictures(), strict=True):
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=95)
        assert size == len(buffer.getvalue()) / 1000
    assert sizes[0] < 1.0 < sizes[1]


def test_both_scales_of_compressibility():
    sizes = np.asarray(jpeg_incompressibility(["", ""], pictures()))
    assert jpeg_compressibility(["", ""], pictures()) == pytest.approx(-sizes)
    assert jpeg_compressibility(["", ""], pictures(), scale="flow_grpo") == pytest.approx(-sizes / 500)


def test_unknown_scale_is_named():
    with pytest.raises(UserError, match="'dance'; use one of ddpo, flow_grpo"):
        jpeg_compressibility([], [], scale="dance")
