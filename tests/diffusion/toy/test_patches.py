"""The autoencoder without training."""

import numpy as np
import pytest
import torch

from diffusion.toy.pipelines.patches import PatchAutoencoder
from mmrl.errors import UserError
from tests.rounding import assert_equal_up_to_rounding

IMAGES = np.random.default_rng(0).integers(0, 256, (20, 8, 12, 3), dtype=np.uint8)


def as_tensor(images):
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def test_all_directions_lose_nothing():
    model = PatchAutoencoder.fit(IMAGES, 4, 48)
    x = as_tensor(IMAGES)
    latents = model.encode(x).latent_dist.sample()
    assert latents.shape == (20, 48, 2, 3)
    assert_equal_up_to_rounding(model.decode(latents).sample, x, passes=2)
    assert_equal_up_to_rounding(model.decode(latents, return_dict=False)[0], x, passes=2)


def test_directions_are_the_principal_components():
    model = PatchAutoencoder.fit(IMAGES, 2, 5)
    patches = (IMAGES / 127.5 - 1).reshape(20, 4, 2, 6, 2, 3).transpose(0, 1, 3, 5, 2, 4).reshape(-1, 12)
    mean = patches.mean(0)
    np.testing.assert_allclose(model.mean.numpy(), mean, atol=1e-5)
    _, _, directions = np.linalg.svd(patches - mean, full_matrices=False)
    overlap = np.abs(model.basis.numpy() @ directions[:5].T)
    np.testing.assert_allclose(overlap, np.eye(5), atol=1e-3)
    coordinates = (patches - mean) @ model.basis.numpy().T
    assert model.config.scaling_factor == pytest.approx(1 / coordinates.std(), rel=1e-3)
    latents = model.encode(as_tensor(IMAGES)).latent_dist.mean * model.config.scaling_factor
    assert float(latents.std()) == pytest.approx(1.0, rel=0.01)


def test_fitting_repeats_bit_for_bit_and_is_saved_whole(tmp_path):
    first, second = (PatchAutoencoder.fit(IMAGES, 4, 7) for _ in range(2))
    assert torch.equal(first.basis, second.basis)
    first.save_pretrained(tmp_path)
    again = PatchAutoencoder.from_pretrained(tmp_path)
    assert torch.equal(again.basis, first.basis)
    assert torch.equal(again.mean, first.mean)
    assert again.config.scaling_factor == first.config.scaling_factor


def test_images_of_one_colour_have_a_scale():
    model = PatchAutoencoder.fit(np.full((2, 4, 4, 3), 9, np.uint8), 2, 3)
    assert np.isfinite(model.config.scaling_factor)
    assert bool(model.encode(as_tensor(np.zeros((1, 4, 4, 3), np.uint8))).latent_dist.mean.isfinite().all())


@pytest.mark.parametrize(
    ("patch", "channels", "message"),
    [(3, 4, "patch=3 must be 2"), (2, 13, "between 1 and 12"), (2, 0, "between 1 and 12")],
)
def test_sizes_that_do_not_fit_are_refused(patch, channels, message):
    with pytest.raises(UserError, match=message):
        PatchAutoencoder.fit(IMAGES[:, :6, :6], patch, channels)
