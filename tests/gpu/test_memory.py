"""Peaks, clocks and random states of a GPU."""

import pytest
import torch

from benchmarks.measure import repeat
from mmrl.runs.run_log import peak_memory_mb, restart_peak_memory
from mmrl.training.processes import capture_global_rng, restore_global_rng

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def test_the_peak_is_that_of_tensors_since_the_restart():
    held = torch.empty(10_000_000, dtype=torch.uint8, device=DEVICE)
    del held
    restart_peak_memory(DEVICE)
    before = peak_memory_mb(DEVICE)
    held = torch.empty(64_000_000, dtype=torch.uint8, device=DEVICE)
    assert 63.9 < peak_memory_mb(DEVICE) - before < 67
    del held
    assert peak_memory_mb(DEVICE) - before > 63.9


def test_a_benchmark_times_what_the_gpu_does_and_its_peak():
    matrix = torch.randn(4096, 4096, device=DEVICE)

    def once(watch):
        with watch.stage("products"):
            for _ in range(20):
                matrix @ matrix
        with watch.stage("nothing"):
            pass

    found = repeat(once, 2, "cuda")
    assert found["wall_s"]["products"] > 10 * found["wall_s"]["nothing"] >= 0
    assert found["peak_mb"]["total"] >= matrix.nbytes / 2**20


def test_a_checkpoint_holds_the_state_of_the_gpus_generator():
    state = capture_global_rng()
    drawn = torch.rand(4, device=DEVICE)
    assert not torch.equal(torch.rand(4, device=DEVICE), drawn)
    restore_global_rng(state)
    assert torch.equal(torch.rand(4, device=DEVICE), drawn)
