"""Rollout workers in Ray sample and learn what one process does, also when one of them is killed."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.recipes import RECIPES
from mmrl.runs.run_log import RunLog
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.ray_rollers import RayCrew
from mmrl.training.rollers import Dealer, TrialUnit
from mmrl.training.run import evaluate
from mmrl.training.settings import RollersConfig
from tests.contracts.record import main, note, samples
from tests.contracts.test_two_processes import make, train
from tests.training.test_rollers import Ahead

pytestmark = pytest.mark.slow
SAMPLED = [name for name in RECIPES if samples(name)]
WORKERS = 2
BY_THE_CLOCK = ("time/", "memory/", "tokens/per_second", "rollers/", "cost/seconds")
SHARED_WORK = 1e-4
"""Of the move, for language models: their updates share prefills and prompts that sampling in the same process keeps,
which rounds differently: float32 (6e-8) through some hundred operations."""


class Watched:
    """A run with its metrics."""

    def __init__(
        self, config: Any, folder: Path, options: RollersConfig, kill: Callable[[RayCrew, int], None] | None = None
    ) -> None:
        """`kill` is called in the last step, with a worker that has just been given its tasks."""
        self.metrics: list[dict[str, float]] = []
        self.killed = 0
        self.again = 0.0
        """Units that were given to a worker once more."""
        config.rollers, last = options, config.trainer.steps - 1
        with pytest.MonkeyPatch.context() as patch:
            log, send, start = RunLog.step, RayCrew.send, Dealer.start

            def logged(run: Any, step: int, metrics: Any, tokens: float) -> None:
                self.again += metrics.get("rollers/again", 0.0)
                self.metrics.append({k: v for k, v in metrics.items() if not k.startswith(BY_THE_CLOCK)})
                log(run, step, metrics, tokens)

            def sent(crew: Any, worker: int, unit: Any) -> None:
                send(crew, worker, unit)
                if kill is not None and not self.killed and unit.step.number == last:
                    kill(crew, worker)
                    self.killed += 1

            def all_started(dealer: Any) -> Any:
                return [start(dealer) for _ in range(options.workers)][-1]

            patch.setattr(Dealer, "start", all_started)
            patch.setattr(RunLog, "step", logged)
            patch.setattr(RayCrew, "send", sent)
            self.found = train(config, folder)

    @property
    def moved(self) -> float:
        return float((self.found["weights"] - self.found["begin"]).abs().max())

    def differs(self, other: Watched) -> float:
        """Largest difference of a weight, as a share of the largest move."""
        difference = (self.found["weights"] - other.found["weights"]).abs().max()
        return float(difference) / self.moved

    def differing_metrics(self, other: Watched) -> list[str]:
        """Metrics that differ by more than the rounding of sums of other shapes."""
        found = []
        for mine, others in zip(self.metrics, other.metrics, strict=True):
            assert mine.keys() == others.keys()
            pairs = ((name, torch.tensor([mine[name], others[name]])) for name in mine)
            found += [n for n, pair in pairs if not torch.isclose(*pair, 1e-3, 1e-5, equal_nan=True)]
        return found


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with connected() as found:
        yield found


@contextmanager
def own_signals() -> Iterator[None]:
    """Put the handlers of signals back that Ray replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class connected:  # noqa: N801
    """Ray on this machine, without its own guard of memory and handlers of signals."""

    def __enter__(self) -> Any:
        ray = pytest.importorskip("ray")
        os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 - Ray's spelling
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        with own_signals():
            options = {"num_cpus": WORKERS, "object_store_memory": 300 << 20}
            ray.init(address="local", include_dashboard=False, log_to_driver=False, **options)
        return ray

    def __exit__(self, *error: object) -> None:
        pytest.importorskip("ray").shutdown()


def kill_actor(crew: RayCrew, worker: int) -> None:
    crew._ray.kill(crew._actors[worker])


def measured(name: str, folder: Path) -> tuple[Watched, Watched, Watched]:
    """The recipe's run as it is, cut into units in this process, and in workers of which one is killed at the end."""
    here = Watched(make(name, folder), folder / "here", RollersConfig())
    units = Watched(make(name, folder), folder / "units", RollersConfig(unit=1))
    ray = Watched(make(name, folder), folder / "ray", RollersConfig(engine="ray", workers=WORKERS), kill_actor)
    return here, units, ray


def check(name: str, here: Watched, units: Watched, ray: Watched) -> None:
    """Equal bits, or rounding where the update shares what only a sampler in its process keeps."""
    assert here.moved > 0
    assert ray.again == 1
    shares = shares_work(name)
    assert ray.differs(units) <= (SHARED_WORK if shares else 0.0)
    far, near, cut = (torch.cat(one.found["rows"]) for one in (ray, here, units))
    assert torch.equal(far[..., 0], near[..., 0])  # as many decisions, group by group
    if not shares:
        assert torch.equal(far.nan_to_num(9.0), cut.nan_to_num(9.0))
    assert ray.differing_metrics(here if shares else units) == []


def shares_work(name: str) -> bool:
    """Whether the recipe samples from a language model."""
    return RECIPES[name].target.startswith("mmrl.") and name != "tspo"


@pytest.mark.parametrize("name", SAMPLED)
def test_workers_of_which_one_is_killed_sample_and_learn_what_one_process_does(name, tmp_path, ray):
    here, units, ray = measured(name, tmp_path)
    check(name, here, units, ray)
    note("units", name, units.differs(here))
    note("workers against units", name, ray.differs(units))
    note("workers", name, ray.differs(here))


@pytest.mark.parametrize("name", ["vlm", "agent", "tspo", "flow_grpo", "flow3d_awm", "robot_grpo"])
def test_an_evaluation_in_workers_of_which_one_is_killed_measures_what_one_process_does(name, tmp_path, ray):
    def measured(folder: Path, options: RollersConfig) -> tuple[dict[str, float], list[str], dict[str, bytes]]:
        config = make(name, tmp_path)
        config.rollers, config.output_dir, config.evaluation.batch_tasks = options, str(folder), 2
        seen = {"seen": True} if hasattr(config.data, "seen") else {}
        config.eval_data = config.eval_data or {"held": dataclasses.replace(config.data, **seen)}
        found = evaluate(RECIPES[name], config)
        files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
        content = {file: path.read_bytes() for file, path in files.items() if file.startswith(("samples", "videos"))}
        assert content
        return found, sorted(files), content

    killed = []
    send = RayCrew.send

    def sent(crew: RayCrew, worker: int, unit: Any) -> None:
        send(crew, worker, unit)
        if not killed:
            kill_actor(crew, worker)
            killed.append(unit)

    here = measured(tmp_path / "here", RollersConfig())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayCrew, "send", sent)
        there = measured(tmp_path / "there", RollersConfig(engine="ray", workers=WORKERS))
    assert [type(unit) for unit in killed] == [TrialUnit]
    pairs = [(value, there[0][metric]) for metric, value in here[0].items() if not metric.startswith(BY_THE_CLOCK)]
    torch.testing.assert_close(*torch.tensor(pairs).T, rtol=0.0, atol=0.0, equal_nan=True)
    assert there[0].keys() == here[0].keys()
    assert there[1:] == here[1:]


@pytest.mark.parametrize(("name", "preset"), [("robot_grpo", ""), ("flow_grpo", ""), ("robot_grpo", "single_stream")])
def test_a_step_that_is_sampled_beside_an_update_has_the_weights_before_it(name, preset, tmp_path, ray, monkeypatch):
    """And the tasks that an objective chose before it."""

    def one_update_late(folder: Path, options: RollersConfig) -> Watched:
        config = make(name, tmp_path)
        if preset:
            config.objective = ObjectiveConfig(preset=preset)
        config.checkpoint.every = 0
        return Watched(config, folder, options)

    beside = one_update_late(tmp_path / "ray", RollersConfig(engine="ray", workers=WORKERS, overlap=True))

    def ahead(recipe: Any, config: Any, accelerator: Any, *others: Any) -> Ahead:
        recipe.samples_elsewhere = True
        return Ahead(recipe, accelerator, 1)

    monkeypatch.setattr("mmrl.training.trainer.open_rollers", ahead)
    here = one_update_late(tmp_path / "here", RollersConfig())
    assert here.moved > 0
    assert beside.differs(here) == 0


if __name__ == "__main__":
    sys.exit(main(["workers", *(word for name in sys.argv[1:] for word in ("--recipe", name))]))
