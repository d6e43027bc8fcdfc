"""Inputs of policies, and errors for those that do not fit."""

import pytest
import torch

from robotics.policies.base.action_policy import PolicyInputs
from tests.robotics.policies.builders import TEXTS, make_inputs


def test_inputs_are_selected_and_joined():
    batch = make_inputs()
    parts = PolicyInputs.concat([batch.select(torch.tensor([2])), batch.select([0, 1])])
    assert parts.instructions == (TEXTS[2], TEXTS[0], TEXTS[1])
    assert torch.equal(parts.state, batch.state[[2, 0, 1]])
    assert torch.equal(batch.select(torch.tensor([True, False, True])).images, batch.images[[0, 2]])
    blind = PolicyInputs(None, batch.state, TEXTS)
    assert PolicyInputs.concat([blind, blind]).images is None
    assert len(blind.to("cpu").select([1])) == 1


@pytest.mark.parametrize(
    ("images", "state"),
    [
        (torch.zeros(3, 3, 8, 8, dtype=torch.uint8), None),
        (torch.zeros(3, 8, 8, 3), None),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), None),
        (None, torch.zeros(3)),
        (None, torch.zeros(2, 4)),
    ],
)
def test_inputs_of_other_shapes_are_refused(images, state):
    with pytest.raises(ValueError):
        PolicyInputs(images, state, TEXTS)
