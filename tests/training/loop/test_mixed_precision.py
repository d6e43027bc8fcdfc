"""Several optimiser steps under autocast."""

import pytest
from accelerate.state import AcceleratorState

from mmrl.training.processes import seed_everything
from tests.contracts.domains import domain_of, run


@pytest.fixture
def fresh_accelerator():
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


def losses_of(name, precision, folder):
    config = domain_of(name).make_config(name, folder)
    config.trainer.mixed_precision, config.trainer.epochs, config.trainer.learning_rate = precision, 4, 0.02
    config.evaluation.at_start = config.evaluation.at_end = False
    AcceleratorState._reset_state()
    seed_everything(0)
    return run(config, folder / precision, steps=1)[1]


def test_later_steps_under_autocast_see_the_weights_of_the_earlier_ones(tmp_path, fresh_accelerator):
    exact = losses_of("robot_clone", "none", tmp_path)
    found = losses_of("robot_clone", "bf16", tmp_path)
    assert len(exact) == 4
    assert exact[-1] < 0.5 * exact[0]
    # bfloat16 has 8 bits; stale weights would leave the last loss above half of the first
    assert found == pytest.approx(exact, abs=0.1 * exact[0])
