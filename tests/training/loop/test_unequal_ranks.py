from pathlib import Path

import pytest
import torch

from tests.programs import run_processes


def run(output: Path, chooses: str, minibatches: int, micro_batch: int, processes: int, *words: str) -> dict:
    script = ["-m", "tests.training.loop.two_ranks_loop", chooses, str(minibatches), str(micro_batch), str(output)]
    run_processes([*script, *words], processes)
    return torch.load(output)


SLOW = [("drop", 1, 5), ("drop", 1, 0), ("none", 4, 0), ("resample", 1, 0), ("resample", 2, 0)]


@pytest.mark.parametrize(
    ("chooses", "minibatches", "micro_batch"),
    [*(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW), ("drop", 3, 0)],
)
def test_processes_with_unequal_work_make_the_steps_of_one(tmp_path, chooses, minibatches, micro_batch):
    one = run(tmp_path / "one.pt", chooses, minibatches, 5, 1)
    two = run(tmp_path / "two.pt", chooses, minibatches, micro_batch, 2)
    assert one["steps"] == two["steps"] == 2 * minibatches
    for name, value in one["weights"].items():
        assert value.abs().max() > 0
        torch.testing.assert_close(two["weights"][name], value, rtol=1e-5, atol=1e-6)
    for name, value in one["metrics"].items():  # of the samples of all processes, not of the first one's
        assert two["metrics"][name] == pytest.approx(value, rel=1e-5)


def test_a_process_whose_rewards_all_fail_has_its_groups_in_the_minibatches_of_one(tmp_path):
    one, two = (run(tmp_path / f"{number}.pt", "none", 3, 0, number, "fails") for number in (1, 2))
    assert one["steps"] == two["steps"]
    for name, value in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], value, rtol=1e-5, atol=1e-6)
