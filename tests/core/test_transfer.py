"""Tensors that go to the host together."""

import pytest
import torch

from mmrl.core.payload import numbers, to_host
from mmrl.core.rollouts import Rollouts
from tests.core.builders import random_rollouts
from tests.devices.label import labelled_gpu

VALUES = [
    torch.tensor([True, False, True]),
    torch.tensor(2.5),
    torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
    torch.tensor([[1.5], [float("nan")]], dtype=torch.bfloat16),
    torch.zeros(0, 3, dtype=torch.float64),
    torch.tensor([1e-300], dtype=torch.float64),
]


def test_tensors_of_all_kinds_arrive_by_one_transfer():
    with labelled_gpu() as syncs:
        given = [value.to("cuda") for value in VALUES]
        syncs.clear()
        found = to_host([*given, VALUES[0]])
        assert sum(syncs.values()) == 1
    assert found[-1] is VALUES[0]
    for value, copied in zip(VALUES, found, strict=False):
        assert type(copied) is torch.Tensor
        torch.testing.assert_close(copied, value, rtol=0.0, atol=0.0, equal_nan=True)


def test_numbers_mix_those_of_python_and_of_tensors():
    with labelled_gpu() as syncs:
        values = [torch.tensor(3, device="cuda"), 0.1, torch.tensor(0.5, dtype=torch.float64, device="cuda")]
        syncs.clear()
        assert numbers(values) == [3.0, 0.1, 0.5]
        assert sum(syncs.values()) == 1


def test_rollouts_on_a_gpu_are_cut_without_waiting_for_it():
    whole = random_rollouts(seed=1, groups=5, samples=3)
    with labelled_gpu() as syncs:
        there = whole.to("cuda")
        assert there.group.device.type == "cuda"
        syncs.clear()
        parts = there.minibatches(2, torch.Generator().manual_seed(0))
        chunks = [chunk for part in parts for chunk in part.micro_batches(2)]
        joined = Rollouts.concat(chunks)
        assert joined.num_groups >= 5
        assert not syncs
        found = joined.to("cpu")
    here = [chunk for part in whole.minibatches(2, torch.Generator().manual_seed(0)) for chunk in part.micro_batches(2)]
    expected = Rollouts.concat(here)
    for name in ("group", "mask", "logp_old", "reward"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert torch.equal(found.host.mask, expected.mask)
    assert torch.equal(found.host.group, expected.group)


def test_a_new_mask_is_checked_and_reaches_the_host():
    rollouts = random_rollouts(seed=1)
    shorter = rollouts.mask.clone()
    shorter[:, -1] = 0.0
    assert torch.equal(rollouts.replace(mask=shorter).host.mask, shorter)
    with pytest.raises(ValueError, match="only 0 and 1"):
        rollouts.replace(mask=shorter * 0.5)
    with pytest.raises(TypeError, match="no field rewards"):
        rollouts.replace(rewards=rollouts.reward)
