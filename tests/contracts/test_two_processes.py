"""A run in two processes is the run in one: the same samples, and weights up to the rounding of sums."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from mmrl.core.rollouts import Rollouts
from mmrl.recipes import RECIPES
from mmrl.training.processes import make_accelerator, merge_in_order
from mmrl.training.trainer import Trainer
from tests.contracts.domains import domain_of, weights
from tests.contracts.options import with_changes

STEPS, PROCESSES, LIMIT_S = 3, 2, 240
QUICK = ("sft", "agent_clone", "flow_pretrain", "robot_ppo", "flow3d")
"""One for each package; the others take as long and are run with the slow tests."""
CONTROLS = {"robot_ppo-shuffled": ("robot_ppo", {"reward.potential": 0.0, "shuffle_success": True})}
"""Further runs: a recipe and its options."""


def train(config: Any, folder: Path) -> dict[str, Any]:
    """Weights before and after a run, and the rows of each step: length, reward and mean advantage, group by group."""
    trainer = Trainer(RECIPES[config.recipe].load_recipe_class()(config), config, folder, make_accelerator(), None)
    begin, rows = weights(trainer).clone(), []
    estimate = trainer.recipe.advantages

    def noted(rollouts: Rollouts, *others: Any) -> Rollouts:
        found = estimate(rollouts, *others)
        advantage = torch.zeros(found.num_rows) if found.advantage is None else (found.advantage * found.mask).sum(1)
        numbers = torch.stack([found.mask.sum(1), found.reward, advantage.detach()], 1).double()
        own = [numbers[found.group == group].tolist() for group in range(found.num_groups)]
        rank, count = trainer.accelerator.process_index, trainer.accelerator.num_processes
        rows.append(torch.tensor(merge_in_order([(rank + count * number, one) for number, one in enumerate(own)])))
        return found

    trainer.recipe.advantages = noted
    trainer.run()
    trainer.recipe.close()
    return {"begin": begin, "weights": weights(trainer), "rows": torch.stack(rows)}


def member(rank: int, config: Any, folder: Path) -> None:
    """One process of the run; the first one writes what it finds."""
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    code = 1
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        store = torch.distributed.FileStore(str(folder / "store"), PROCESSES)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES)
        found = train(config, folder / "two")
        if rank == 0:
            torch.save(found, folder / "two.pt")
        torch.distributed.barrier()
        code = 0
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
    os._exit(code)


def train_in_two(config: Any, folder: Path) -> dict[str, Any]:
    """The same in two processes, forked from one that has imported everything and started no thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    members = [context.Process(target=member, args=(rank, config, folder)) for rank in range(PROCESSES)]
    for process in members:
        process.start()
    ends = time.monotonic() + LIMIT_S
    while any(one.is_alive() for one in members) and not any(one.exitcode for one in members):
        assert time.monotonic() < ends or any(one.kill() for one in members), "the processes wait for each other"
        members[0].join(0.1)
    codes = [process.exitcode for process in members]
    for process in members:
        process.kill()
    errors = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("error-*.txt"))]
    assert codes == [0, 0], "\n".join([str(codes), *errors])
    return torch.load(folder / "two.pt")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*RECIPES, *CONTROLS)]
)
def test_two_processes_sample_and_learn_what_one_does(name, tmp_path):
    name, changes = CONTROLS.get(name, (name, {}))
    domain = domain_of(name)
    for module in domain.needs:
        pytest.importorskip(module)
    config = with_changes(domain.make_config(name, tmp_path), changes)
    config.trainer.steps, config.trainer.tasks_per_step, config.trainer.threads = STEPS, 4, 1
    config.trainer.adam_eps, config.trainer.learning_rate = 1.0, 0.1  # so that no rounding of a gradient turns a sign
    config.validate()
    assert PartialState().num_processes == 1
    one, two = train(config, tmp_path / "one"), train_in_two(config, tmp_path)
    assert one["rows"].shape == two["rows"].shape
    for column, tolerance in enumerate((0.0, 1e-3, 2e-2)):
        found, expected = two["rows"][..., column], one["rows"][..., column]
        torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance, equal_nan=True)
    moved = float((one["weights"] - one["begin"]).abs().max())
    assert moved > 0
    # rounding grows where the gradients of a group cancel; other samples would differ by about as much as they move
    rounding = torch.finfo(torch.float32).eps * one["weights"].abs().clamp(min=1.0) * STEPS
    difference = (two["weights"] - one["weights"]).abs()
    assert bool((difference <= 1e-2 * moved + rounding).all()), float(difference.max()) / moved
