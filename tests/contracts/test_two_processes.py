"""A run in two processes is the run in one: the same samples, weights and metrics up to rounding, in float64."""

import contextlib
import json
import math
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from mmrl.core.rollouts import Rollouts
from mmrl.errors import RunStopped
from mmrl.recipes import RECIPES
from mmrl.runs.tracking import build_tracker
from mmrl.training.processes import make_accelerator, merge_in_order, sum_gradients
from mmrl.training.trainer import StopSignals, Trainer
from tests.contracts.domains import ONE_PROCESS, domain_of, weights
from tests.contracts.double import ROUNDING, computes_in_double, in_double
from tests.contracts.options import with_changes
from tests.programs import fork_context

STEPS, LIMIT_S = 3, 240
MANY = [name for name in RECIPES if name not in ONE_PROCESS]
QUICK = ("sft", "distil", "robot_ppo", "flow3d")
"""The others take as long and are run with the slow tests."""
CONTROLS = {
    "robot_ppo-shuffled": ("robot_ppo", {"reward.potential": 0.0, "shuffle_success": True}),
    "robot_grpo-remembering": ("robot_grpo", {"objective.preset": "single_stream"}),
    "preference-kto": ("preference", {"objective.preset": "kto"}),
}
"""Further runs: a recipe and its options."""
RELATIVE = 1e-3
"""Share of the largest number of its kind that float32 may differ by: 6e-8 through some hundred operations, three steps
and the quotients of advantages."""
OF_ONE_PROCESS = {
    "time/": "seconds of the first process",
    "memory/": "bytes of a process, which holds its share of the tasks",
    "tokens/per_second": "follows from the seconds",
    "cost/seconds": "follows from the seconds",
    "sampler/idle": "a share of seconds",
    "tspo/videos_embedded": "the second run finds the features of the first in its folder",
}
"""Beginnings of the names of metrics that hang on the number of processes, and the reason."""


class StopAfter(StopSignals):
    """Asks a run to stop after a step, as a signal would."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.signum = signal.SIGTERM
        self.trainer: Trainer | None = None

    def requested(self, accelerator: Any) -> bool:
        return self.trainer is not None and self.trainer.step >= self.step


def train_in_double(*arguments: Any) -> dict[str, Any]:
    """`train` in float64."""
    with in_double():
        return train(*arguments)


def train(config: Any, folder: Path, until: int = STEPS, resume: bool = False) -> dict[str, Any]:
    """Weights before and after a run, and the rows of each step: length, reward and mean advantage, group by group.

    A supervised recipe may have fewer groups in a step.
    """
    stop = StopAfter(until) if until < config.trainer.steps else None
    recipe = RECIPES[config.recipe].load_recipe_class()(config)
    if computes_in_double():
        recipe.policy.double()
    accelerator = make_accelerator(config.trainer.mixed_precision)
    folder.mkdir(exist_ok=True)
    writes = accelerator.is_main_process
    tracker = build_tracker(config.tracking, folder, total_steps=config.trainer.steps) if writes else None
    trainer = Trainer(recipe, config, folder, accelerator, tracker, stop)
    if stop is not None:
        stop.trainer = trainer
    if resume:
        trainer.resume()
    begin, rows = weights(trainer).clone(), []
    estimate = trainer.recipe.advantages

    def noted(rollouts: Rollouts, *others: Any) -> Rollouts:
        found = estimate(rollouts, *others)
        advantage = torch.zeros(found.num_rows) if found.advantage is None else (found.advantage * found.mask).sum(1)
        columns = (found.mask.sum(1), found.reward, advantage.detach())
        numbers, groups = torch.stack([column.cpu() for column in columns], 1).double(), found.group.cpu()
        own = [numbers[groups == group].tolist() for group in range(found.num_groups)]
        rank, count = trainer.accelerator.process_index, trainer.accelerator.num_processes
        # rows of a store belong to no task of the step, and are dealt in turns
        places = found.places or range(rank, rank + count * len(own), count)
        rows.append(torch.tensor(merge_in_order(list(zip(places, own, strict=True)))))
        return found

    trainer.recipe.advantages = noted
    with contextlib.suppress(RunStopped):
        trainer.run()
    trainer.rollers.close()
    trainer.recipe.close()
    if tracker is not None:
        tracker.close()
    return {"name": config.recipe, "begin": begin, "weights": weights(trainer), "rows": rows}


def member(
    rank: int, count: int, run: Callable[..., Any], config: Any, folder: Path, scratch: Path, *options: Any
) -> None:
    """One process of the run; the first one writes what it finds."""
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    code = 1
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        store = torch.distributed.FileStore(str(scratch / "store"), count)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
        found = run(config, folder, *options)
        if rank == 0:
            torch.save(found, scratch / "found.pt")
        torch.distributed.barrier()
        code = 0
    except BaseException:
        (scratch / f"error-{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")
    os._exit(code)


def train_in_two(
    config: Any, folder: Path, *options: Any, run: Callable[..., Any] = train, processes: int = 2
) -> dict[str, Any]:
    """The same in two processes or more, forked from one that has imported everything and started no thread."""
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    context = fork_context()
    members = [
        context.Process(target=member, args=(rank, processes, run, config, folder, scratch, *options))
        for rank in range(processes)
    ]
    for process in members:
        process.start()
    ends = time.monotonic() + LIMIT_S
    while any(one.is_alive() for one in members) and not any(one.exitcode for one in members):
        assert time.monotonic() < ends or any(one.kill() for one in members), "the processes wait for each other"
        members[0].join(0.1)
    codes = [process.exitcode for process in members]
    for process in members:
        process.kill()
    errors = [path.read_text(encoding="utf-8") for path in sorted(scratch.glob("error-*.txt"))]
    assert codes == [0] * processes, "\n".join([str(codes), *errors])
    return torch.load(scratch / "found.pt")  # type: ignore[no-any-return]


def make(name: str, folder: Path, tasks: int = 4) -> Any:
    """A tiny run whose optimiser no rounding of a gradient can turn."""
    name, changes = CONTROLS.get(name, (name, {}))
    domain = domain_of(name)
    for module in domain.needs:
        pytest.importorskip(module)
    config = with_changes(domain.make_config(name, folder), changes)
    config.trainer.steps, config.trainer.tasks_per_step, config.trainer.threads = STEPS, tasks, 1
    config.trainer.adam_eps, config.trainer.learning_rate = 1.0, 0.1
    config.checkpoint.every = 1
    config.validate()
    assert PartialState().num_processes == 1
    return config


def assert_same(found: dict[str, Any], whole: dict[str, Any], relative: float | None = None) -> None:
    """The same samples, and numbers up to rounding, over the last steps of a run.

    Args:
        found: of `train` or `train_in_double`.
        whole: of the same function.
        relative: allowed difference of numbers as a share of the largest, and of a weight of the largest move.
    """
    double = whole["weights"].dtype is torch.float64
    relative = relative or (ROUNDING if double else RELATIVE)
    rows, expected = torch.cat(found["rows"]), torch.cat(whole["rows"][-len(found["rows"]) :])
    every = torch.cat(whole["rows"])
    assert rows.shape == expected.shape
    for column, tolerance in enumerate((0.0, min(relative, RELATIVE), relative)):
        size = float(every[..., column].abs().nan_to_num(0.0).max())
        torch.testing.assert_close(
            rows[..., column], expected[..., column], rtol=0.0, atol=tolerance * size, equal_nan=True
        )
    moved = float((whole["weights"] - whole["begin"]).abs().max())
    assert moved > 0
    # of a weight itself each step, and of the gradients; other samples would differ by about as much as they move
    rounding = torch.finfo(whole["weights"].dtype).eps * whole["weights"].abs() * STEPS
    difference = (found["weights"] - whole["weights"]).abs()
    assert bool((difference <= relative * moved + rounding).all()), float(difference.max()) / moved


def assert_same_metrics(found: Path, whole: Path) -> None:
    """Every number that two runs in float64 logged is the same up to rounding, but for those of `OF_ONE_PROCESS`."""
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        own, expected = ([without(row) for row in read_rows(folder / name)] for folder in (found, whole))
        assert len(own) == len(expected)
        assert own or name != "metrics.jsonl"
        for one, other in zip(own, expected, strict=True):
            assert one == pytest.approx(other, rel=ROUNDING, abs=ROUNDING, nan_ok=True), name


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that may be missing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def without(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the numbers of one process."""
    kept = {name: row[name] for name in row if name != "time" and not name.startswith(tuple(OF_ONE_PROCESS))}
    kept = {name: value for name, value in kept.items() if not isinstance(value, str)}
    return {name: math.nan if value is None else value for name, value in kept.items()}


def every(quick: tuple[str, ...]) -> list[Any]:
    """The names of all runs, those that are not quick marked as slow."""
    names = (*MANY, *CONTROLS)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", every(QUICK))
def test_two_processes_sample_and_learn_what_one_does(name, tmp_path):
    config = make(name, tmp_path)
    whole = train_in_double(config, tmp_path / "one")
    assert_same(train_in_two(config, tmp_path / "two", run=train_in_double), whole)
    assert_same_metrics(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_three_processes_sample_and_learn_what_one_does(name, tmp_path):
    config = make(name, tmp_path, tasks=6)
    if name == "digirl":
        config.digirl.batch_episodes = 3
    whole = train_in_double(config, tmp_path / "one")
    assert_same(train_in_two(config, tmp_path / "three", processes=3, run=train_in_double), whole)
    assert_same_metrics(tmp_path / "three", tmp_path / "one")


def train_with_a_flaw(*arguments: Any) -> dict[str, Any]:
    """`train_in_double`, but the gradients of the second process count a millionth more."""

    def flawed(parameters: Any, accelerator: Any) -> None:
        for parameter in parameters:
            if accelerator.process_index == 1 and parameter.grad is not None:
                parameter.grad *= 1 + 1e-6
        sum_gradients(parameters, accelerator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmrl.training.update.sum_gradients", flawed)
        return train_in_double(*arguments)


def test_a_gradient_that_is_off_by_a_millionth_in_one_process_is_found(tmp_path):
    """In float32 it would be lost in rounding."""
    config = make("robot_ppo", tmp_path)
    whole = train_in_double(config, tmp_path / "one")
    flawed = train_in_two(config, tmp_path / "two", run=train_with_a_flaw)
    with pytest.raises(AssertionError):
        assert_same(flawed, whole)


@pytest.mark.parametrize("name", every(QUICK[-1:]))
def test_a_run_that_is_resumed_in_another_number_of_processes_ends_as_one_that_never_stopped(name, tmp_path):
    config = make(name, tmp_path)
    whole = train_in_double(config, tmp_path / "whole")
    train_in_double(config, tmp_path / "more", STEPS - 1)
    assert_same(train_in_two(config, tmp_path / "more", STEPS, True, run=train_in_double), whole)
    train_in_two(config, tmp_path / "fewer", STEPS - 1, run=train_in_double)
    assert_same(train_in_double(config, tmp_path / "fewer", STEPS, True), whole)


@pytest.mark.slow
def test_a_run_that_needed_no_reference_yet_goes_on_with_more_steps(tmp_path):
    """Its steps were all the critic's warm-up."""
    config = make("vl_dac", tmp_path)
    config.trainer.steps = config.warmup_updates
    train(config, tmp_path / "run")
    assert not list((tmp_path / "run").rglob("reference"))
    config.trainer.steps += 1
    whole = train(config, tmp_path / "whole", config.trainer.steps)
    assert_same(train(config, tmp_path / "run", config.trainer.steps, True), whole)
