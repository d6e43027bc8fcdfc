from pathlib import Path

import pytest
import torch

from tests.programs import run_processes

REMEMBERING = ("dcpo", "single_stream", "riskpo", "entropy_smoothing")
SLOW = (("grpo", 0), ("reinforce_pp", 3), ("dapo", 0), ("bapo", 5), *((preset, 0) for preset in REMEMBERING))


def start(output: Path, preset: str, micro_batch: int, processes: int) -> dict:
    run_processes(["-m", "tests.training.loop.two_ranks", preset, str(micro_batch), str(output)], processes)
    return torch.load(output)


# micro-batches share the bias; two processes leave out the groups without a gradient, which DAPO has and one process
# does not leave out
@pytest.mark.parametrize(
    ("preset", "micro_batch"), [*(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW), ("dapo", 5)]
)
def test_two_processes_make_the_update_of_one(tmp_path, preset, micro_batch):
    one, two = start(tmp_path / "1.pt", preset, 0, 1), start(tmp_path / "2.pt", preset, micro_batch, 2)
    for name, value in one["weights"].items():
        assert value.abs().max() > 0
        torch.testing.assert_close(two["weights"][name], value, rtol=1e-5, atol=1e-6)
    if preset not in REMEMBERING:
        dead = 0.5 if preset in ("dapo", "bapo") else 0  # all of the second process
        assert two["metrics"]["update/zero_advantage_groups"] == dead
    (state,) = one["states"]
    assert bool(state) == (preset in REMEMBERING)
    torch.testing.assert_close(two["states"], [state, state], rtol=1e-6, atol=1e-9)
    # once the policy has moved, groups without a gradient have other ratios, and two processes leave them out
    other = ("bound_low", "bound_high") if preset == "bapo" else ("ratio_mean", "entropy")
    for name in ("loss/total", "optim/grad_norm", *(f"policy/{name}" for name in other)):
        assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-5, abs=1e-6)
