import random
from types import SimpleNamespace

import numpy as np
import torch

from mmrl.training import processes
from mmrl.training.processes import (
    Streams,
    capture_global_rng,
    make_generator,
    merge_in_order,
    restore_global_rng,
    seed_everything,
    stream_seed,
)
from tests.programs import run_after_torch


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


def test_a_gpu_continues_with_its_own_state_wherever_there_are_fewer(monkeypatch):
    restored = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([7], dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    state = capture_global_rng()
    restore_global_rng(state)
    restore_global_rng(state | {"cuda": [torch.tensor([3]), torch.tensor([4])]})  # of two GPUs, as older checkpoints
    assert [int(own) for own in restored] == [7, 3]


def test_a_task_draws_the_same_on_whichever_process_and_whatever_is_beside_it():
    whole = Streams(stream_seed(1, "rollout", 0))
    second = Streams(whole.seed, range(1, 6, 2))  # of two processes
    assert torch.equal(whole.uniform(6, 3, 5)[3:6], second.uniform(1, 3, 5))
    assert torch.equal(whole.seeds(6, 2)[2:4], second.seeds(3, 2)[:2])
    task = [0]  # twice the same object, and one between them that is left out
    kept = whole.among([task, [1], task, [3]], [task, task])
    assert kept.places == [0, 2]
    assert torch.equal(kept.uniform(2, 1), whole.uniform(3, 1)[[0, 2]])
    assert not torch.equal(whole.uniform(1, 4), whole.uniform(1, 4, purpose="mask"))
    first, again = (torch.rand(3, generator=streams.shared("window")) for streams in (whole, second))
    assert torch.equal(first, again)


def test_items_of_all_processes_are_in_the_order_of_one(monkeypatch):
    """Also where the first task came to nothing, so that the first process has fewer."""
    one = [(1, "b"), (2, "c"), (2, "d"), (3, "e")]
    ranks = [[item for item in one if item[0] % 2 == rank] for rank in range(2)]
    assert merge_in_order(one) == list("bcde")
    monkeypatch.setattr(processes, "PartialState", lambda: SimpleNamespace(num_processes=2))
    monkeypatch.setattr(processes, "gather_object", lambda own: [*ranks[0], *own])
    assert merge_in_order(ranks[1]) == list("bcde")


def test_what_a_run_imports_late_draws_nothing_from_the_seeded_generators():
    program = (
        "import random; from mmrl.training.processes import seed_everything; seed_everything(1)\n"
        "state = random.getstate(); import rich.console, rich.progress, rich.table, matplotlib.figure, PIL.Image\n"
        "print(random.getstate() == state)"
    )
    assert run_after_torch(program).strip() == "True"


def test_streams_differ_by_purpose_and_repeat():
    seeds = {stream_seed(0, "rollout", step, rank) for step in range(10) for rank in range(10)}
    assert len(seeds) == 100
    assert stream_seed(0, "rollout", 1) == 6929956040392660302  # stays what it was: saved runs depend on it
    first, second = (torch.rand(3, generator=make_generator(1, "a")) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.rand(3, generator=make_generator(2, "a")))
