"""Rows, groups and tensors of a rollout stay together."""

import numpy as np
import pytest
import torch

from diffusion.data.prompts import DiffusionTask
from diffusion.sampling.trajectories import DiffusionPayload


def payload(rows=4, groups=2, start=0.0):
    numbers = torch.arange(rows, dtype=torch.float32) + start
    return DiffusionPayload(
        tasks=[DiffusionTask(f"t{n}", f"prompt {n}") for n in range(groups)],
        latents=numbers.view(-1, 1, 1, 1).expand(-1, 2, 3, 3).clone(),
        images=np.arange(rows, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(3, 3),
        sigma=numbers[:, None].expand(-1, 5).clone(),
        states=numbers.view(-1, 1, 1, 1, 1).expand(-1, 6, 2, 3, 3).clone(),
        noise_seed=torch.arange(rows),
        finite=[True] * rows,
    )


def test_selection_takes_the_same_rows_of_everything():
    found = payload().select(torch.tensor([3, 0]), torch.tensor([1]))
    assert found.prompts == ["prompt 1"]
    assert found.latents[:, 0, 0, 0].tolist() == [3.0, 0.0]
    assert found.images[:, 0, 0, 0].tolist() == [3, 0]
    assert found.sigma[:, 0].tolist() == [3.0, 0.0]
    assert found.states[:, 5, 0, 0, 0].tolist() == [3.0, 0.0]
    assert found.noise_seed.tolist() == [3, 0]
    assert found.mean_old is None
    assert len(found.finite) == 2


def test_joining_is_the_inverse_of_cutting():
    whole = payload()
    parts = [whole.select(torch.tensor(rows), torch.tensor([g])) for g, rows in enumerate(([0, 1], [2, 3]))]
    joined = DiffusionPayload.concat(parts)
    assert joined.prompts == whole.prompts
    assert torch.equal(joined.states, whole.states)
    assert np.array_equal(joined.images, whole.images)
    assert joined.finite == whole.finite


def test_rows_without_an_image_become_zeros_and_the_others_stay():
    whole = payload(start=1.0)
    whole.latents[1], whole.states[1, 3] = float("inf"), float("nan")
    whole.mean_old = torch.full((4, 5, 2, 3, 3), 7.0)
    whole.finite = [True, False, True, True]
    cleaned = whole.without_nonfinite()
    assert float(cleaned.latents[1].abs().max()) == 0.0
    assert float(cleaned.states[1].abs().max()) == 0.0
    assert float(cleaned.mean_old[1].abs().max()) == 0.0
    assert torch.equal(cleaned.latents[2], whole.latents[2])
    assert torch.equal(cleaned.sigma, whole.sigma)
    assert whole.latents[1].isinf().all()  # the original is left alone
    whole.finite = [True] * 4
    assert whole.without_nonfinite() is whole


@pytest.mark.parametrize("change", [{"images": np.zeros((3, 1, 1, 3), np.uint8)}, {"finite": [True]}])
def test_numbers_of_rows_must_agree(change):
    parts = vars(payload()) | change
    with pytest.raises(ValueError, match="4 rows in 2 groups"):
        DiffusionPayload(**parts)
