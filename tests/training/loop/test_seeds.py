from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import torch

from mmrl.training.processes import (
    capture_global_rng,
    make_generator,
    restore_global_rng,
    seed_everything,
    stream_seed,
)


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(np.random.normal()), float(torch.rand(()))]


def test_global_generators_continue_where_they_were(tmp_path):
    seed_everything(5)
    draw()
    torch.save(capture_global_rng(), tmp_path / "rng.pt")
    expected = draw()
    draw()
    restore_global_rng(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert draw() == expected


def test_what_a_run_imports_late_draws_nothing_from_the_seeded_generators():
    program = (
        "import random; from mmrl.training.processes import seed_everything; seed_everything(1)\n"
        "state = random.getstate(); import rich.console, rich.progress, rich.table, matplotlib.figure, PIL.Image\n"
        "print(random.getstate() == state)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_streams_differ_by_purpose_and_repeat():
    seeds = {stream_seed(0, "rollout", step, rank) for step in range(10) for rank in range(10)}
    assert len(seeds) == 100
    assert stream_seed(0, "rollout", 1) == 6929956040392660302  # stays what it was: saved runs depend on it
    first, second = (torch.rand(3, generator=make_generator(1, "a")) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.rand(3, generator=make_generator(2, "a")))
