"""Draws of the rows of a batch, each from its own generator."""

import pytest
import torch

from robotics.policies.base.action_tokens import RowGenerators, draw_rows


def test_a_row_draws_the_same_whatever_rows_are_beside_it():
    both = draw_rows(torch.randn, (2, 3), RowGenerators.seeded([4, 5]))
    assert torch.equal(draw_rows(torch.randn, (1, 3), RowGenerators.seeded([5])), both[1:])


def test_another_number_of_rows_than_generators_is_refused():
    with pytest.raises(ValueError, match=r"the shape \(3, 2\) has 3 rows, but there are 2 generators"):
        draw_rows(torch.rand, (3, 2), RowGenerators.seeded([4, 5]))
