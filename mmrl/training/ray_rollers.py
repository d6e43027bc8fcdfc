"""Rollout workers as Ray actors, on this machine or on a running cluster.

Weights are put into Ray's object store once a step, which copies them once to each machine. A worker is an actor that
Ray places by its cores and GPUs; with a GPU it also renders there. Ray tells of actors and machines that are gone; how
units are dealt, and what is done about lost ones, is in `mmrl.training.rollers`.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mmrl.core.rollouts import Rollouts
from mmrl.errors import RunError, UserError
from mmrl.files import replaced
from mmrl.recipes import find_recipe
from mmrl.training.evaluation import Batch, Evaluation, Row
from mmrl.training.machines import in_first_process
from mmrl.training.processes import Streams, merge_lists, sum_over_processes, versions
from mmrl.training.recipe import Recipe, Step
from mmrl.training.rollers import (
    Dealer,
    Hello,
    LocalRollers,
    Lost,
    Outcome,
    Raised,
    Refusal,
    Rollers,
    TrialUnit,
    Unit,
    cut,
    joined,
)
from mmrl.training.rollout_worker import Job, RolloutWorker, add_notes, checksum, trained_weights
from mmrl.training.settings import BaseRunConfig, RollersConfig

LOGGER = logging.getLogger("mmrl")
START_S = 600.0
"""Seconds in which a worker has to start when no other one works."""
POLL_S = 1.0
CLOSE_S = 5.0
"""Seconds that workers have to end their environments."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
"""Variables of Ray where the user has set none: no reports to its makers, GPUs are hidden by the worker itself, and
workers have the priority of the run (15 less by default, so that anything else on their machine goes first)."""
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def open_rollers(
    recipe: Recipe[Any, Any], config: BaseRunConfig, accelerator: Accelerator, run_dir: Path, entry: Any = None
) -> Rollers:
    """Create the rollers of a run; returns once the workers have started.

    Args:
        recipe: that of the training process.
        config: from which the recipe was made.
        accelerator: of the training process.
        run_dir: folder that receives what workers write.
        entry: the recipe's row; by default that of its name.

    Raises:
        UserError: Ray is not installed, or a worker cannot start as things are.
        RunError: no worker starts.
    """
    options: RollersConfig = getattr(config, "rollers", None) or RollersConfig()
    if options.engine == "local":
        return LocalRollers(recipe, accelerator, options.unit)
    return RayRollers(recipe, config, accelerator, run_dir, entry or find_recipe(config.recipe))


class RayWorker(RolloutWorker):
    """A worker in an actor."""

    def __init__(self) -> None:
        super().__init__()
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        if gpus:  # EGL counts all GPUs, also those that CUDA_VISIBLE_DEVICES hides
            os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", gpus[0])
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._versions: list[int] = [-1, -1]

    def work_at(self, numbers: Sequence[int], references: Sequence[Any], unit: bytes) -> bytes:
        """Sample and score a unit, or run its trials.

        Args:
            numbers: versions of weights and state.
            references: where those are; the weights come with their checksum, the state is pickled.
            unit: a pickled unit; arrays that Ray pickles itself cannot be written to.

        Returns:
            A pickled `Outcome`.
        """
        import ray

        if numbers[0] != self._versions[0]:
            self.load(*ray.get(references[0]))
        if numbers[1] != self._versions[1] and references[1] is not None:
            self.load_state(pickle.loads(ray.get(references[1])))
        self._versions = list(numbers)
        return pickle.dumps(self.work(pickle.loads(unit)))


class RayCrew:
    """Actors by number; a lost one is killed, in case it was only out of reach."""

    def __init__(self, job: bytes, options: RollersConfig) -> None:
        import ray

        self._ray, self._options = ray, options
        self._job = ray.put(job)
        resources = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus}
        remote: Any = ray.remote
        self._kind = remote(**resources, max_restarts=0, max_task_retries=0)(RayWorker)
        self._actors: dict[int, Any] = {}
        self._waiting: dict[Any, int] = {}
        self._starting: set[int] = set()
        self._next = 0
        self._closed = False
        self.numbers, self.references = (0, 0), (None, None)
        """Versions of the weights and of the state for the next units, and where they are."""

    def start(self) -> int:
        """Begin to start an actor; Ray keeps it waiting while no machine has room."""
        self._next += 1
        self._actors[self._next] = actor = self._kind.remote()
        self._starting.add(self._next)
        self._waiting[actor.open.remote(self._job)] = self._next
        return self._next

    def ask(self, worker: int) -> None:
        """Ask whether an actor is still there."""
        self._waiting[self._actors[worker].answer.remote()] = worker

    def send(self, worker: int, unit: Any) -> None:
        """Give an actor a unit."""
        actor = self._actors[worker]
        self._waiting[actor.work_at.remote(self.numbers, self.references, pickle.dumps(unit))] = worker

    def wait(self) -> tuple[int, Hello | Refusal | Outcome | Raised | Lost]:
        """The next answer."""
        began = time.monotonic()
        while True:
            found, _ = self._ray.wait(list(self._waiting), num_returns=1, timeout=POLL_S)
            if found:
                break
            if self._closed:
                raise RunError("the rollout workers are closed")
            if time.monotonic() - began > START_S and self._starting.issuperset(self._waiting.values()):
                raise RunError(f"no rollout worker has started in {START_S:g} s: {self._room()}")
        worker = self._waiting.pop(found[0])
        self._starting.discard(worker)
        return worker, self._answer(worker, found[0])

    def interrupt(self) -> None:
        """Have `wait` give up, in whichever thread it is."""
        self._closed = True

    def close(self) -> None:
        """End the actors."""
        idle = [actor for number, actor in self._actors.items() if number not in self._waiting.values()]
        self._ray.wait([actor.close.remote() for actor in idle], num_returns=len(idle), timeout=CLOSE_S) if idle else ()
        for actor in self._actors.values():
            self._ray.kill(actor)

    def _answer(self, worker: int, reference: Any) -> Hello | Refusal | Outcome | Raised | Lost:
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(reference)
            return pickle.loads(answer) if isinstance(answer, bytes) else answer
        except errors.RayTaskError as error:
            if not isinstance(error.cause, errors.RayError):
                return Raised(error.cause, str(error))
            reason = error.cause  # what it was to read has gone with another machine
        except errors.RayError as error:
            reason = error
        with store_errors():
            if isinstance(reason, errors.ObjectStoreFullError | errors.OutOfDiskError):
                raise reason
        self._ray.kill(self._actors.pop(worker))
        text = " ".join(str(reason).split())
        if len(text) > 400:  # the end of a traceback says most
            text = f"{text[:200]} ... {text[-200:]}"
        return Lost(f"{type(reason).__name__}: {text}")

    def _room(self) -> str:
        free = {name: count for name, count in self._ray.available_resources().items() if name in ("CPU", "GPU")}
        options = self._options
        return (
            f"each asks for rollers.num_cpus={options.num_cpus:g} and rollers.num_gpus={options.num_gpus:g}; free in "
            f"the cluster: {free or 'nothing'}"
        )


@contextmanager
def store_errors() -> Iterator[None]:
    """Say what to do about a full object store."""
    import ray

    try:
        yield
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise RunError(
            f"Ray's object store is full ({' '.join(str(error).split())[:200]}); lower rollers.unit or "
            "trainer.tasks_per_step, free the disk that it spills to, or start a cluster with a larger one, `ray start "
            "--head --object-store-memory=BYTES`, and set rollers.address=auto; `--resume` continues from the last "
            "checkpoint"
        ) from error


class RayRollers:
    """Samples and scores in Ray actors; this process samples what workers cannot, and scores what compares tasks."""

    def __init__(
        self, recipe: Recipe[Any, Any], config: Any, accelerator: Accelerator, run_dir: Path, entry: Any
    ) -> None:
        self._recipe, self._accelerator, self._run_dir = recipe, accelerator, run_dir
        options: RollersConfig = config.rollers
        check_processes(options, accelerator)
        self._unit = options.unit or 1
        self._size = len(range(accelerator.process_index, options.workers, accelerator.num_processes))
        self._local = LocalRollers(recipe, accelerator)
        self._owns = _connect(options, accelerator)
        import ray

        self._ray = ray
        try:
            _check_room(options)
            job = Job(entry, config, os.getcwd(), versions(), checksum(recipe.policy, trained=False))
            self._crew = RayCrew(_pickled(job), options)
            self._dealer = Dealer(self._crew, self._size, options.tries)
            hello = self._dealer.start()
        except BaseException:
            self._disconnect()
            raise
        LOGGER.info("%d rollout workers; the first one is on %s (%s)", self._size, hello.host, hello.device)
        self._again, self._lost, self._busy_s, self._since = 0, 0, 0.0, time.perf_counter()
        self._weights: Any = None
        self._draws, self._loads, self._staleness = 0, 0, 0
        self.looks_ahead = options.overlap
        self._ahead: Future[list[Outcome]] | None = None
        self._thread = ThreadPoolExecutor(1, "rollers")
        if options.overlap:
            recipe.samples_elsewhere = True  # the policy that is updated is not the one that has sampled
            _advise(recipe)

    def load(self, step: Step) -> None:
        """The weights go to the object store when they are first asked for."""
        self._weights = None

    def begin(self, tasks: Sequence[Any], streams: Streams, step: Step) -> None:
        """Sample tasks beside what this thread does; weights and state are those of now."""
        if self._recipe.rolls_apart(step):
            units = self._units(tasks, streams, step)
            self._ahead = self._thread.submit(lambda: list(self._dealer.run(units)))

    def rollout(self, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Rows of the tasks from the workers, in order."""
        recipe, ahead = self._recipe, self._ahead
        if ahead is not None:
            outcomes, self._ahead, self._staleness = ahead.result(), None, 1
        elif recipe.rolls_apart(step):
            outcomes = list(self._dealer.run(self._units(tasks, streams, step)))
        else:
            return self._local.rollout(tasks, streams, step)
        said: set[tuple[int, str]] = set()
        for outcome in outcomes:
            self._lost += int(outcome.lost)
            self._take(outcome, said)
        return joined(outcomes).to(self._accelerator.device)

    def _units(self, tasks: Sequence[Any], streams: Streams, step: Step) -> list[Unit]:
        """Units, for which workers load the weights and the state of now."""
        with store_errors():
            state = self._ray.put(pickle.dumps(self._recipe.rollout_state(tasks)))
        self._draws += 1
        self._send_weights(state)
        return cut(tasks, streams, step, self._unit)

    def _send_weights(self, state: Any) -> None:
        """Have the workers load the policy as it is now, unless it has been sent, and a state."""
        policy = self._recipe.policy
        with store_errors():
            if self._weights is None:
                self._weights = self._ray.put((trained_weights(policy), checksum(policy, trained=True)))
                self._loads += 1
        self._crew.numbers, self._crew.references = (self._loads, self._draws), (self._weights, state)

    def _take(self, outcome: Outcome, said: set[tuple[int, str]]) -> None:
        """Take over what a worker noted, wrote and logged; each line that is not in `said` once."""
        self._busy_s += outcome.seconds
        if not outcome.lost:
            add_notes(self._recipe, outcome.added)
        for line in outcome.logs:
            if line not in said:
                LOGGER.log(line[0], "%s", line[1])
                said.add(line)
        self._write(outcome)

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """The rows with their rewards, which they have already unless those compare tasks."""
        done = self._recipe.rolls_apart(step) and self._recipe.scores_apart
        return rollouts if done else self._recipe.score(rollouts, step)

    def evaluate(self, split: str, step: Step) -> Evaluation:
        """Measure the policy in the workers; `lost` counts the trials that no worker brought to an end."""
        lost, said = 0, set[tuple[int, str]]()
        self._weights = None  # those of an evaluation may be averages

        def elsewhere(measure: int, batches: Sequence[Batch]) -> Iterator[Sequence[Row]]:
            nonlocal lost
            self._send_weights(self._crew.references[1])
            units = [TrialUnit(batch, start, split, measure, step) for start, batch in batches]
            done = 0
            for unit, outcome in zip(units, self._dealer.run(units), strict=True):
                done += int(not outcome.lost)
                lost += len(unit.tasks) if outcome.lost else 0
                self._take(outcome, said)
                yield outcome.rows
            if units and not done:
                raise RunError(f"no rollout worker has brought a trial of {split} to an end")

        found = self._recipe.evaluate(self._recipe.policy, split, self._accelerator, step, elsewhere)
        self._weights = None
        if count := sum_over_processes({"lost": float(lost)})["lost"]:
            found.metrics["lost"] = count
        return found

    def metrics(self) -> dict[str, float]:
        """Lost and repeated units of the step, how busy the workers were, and how old the weights that sampled."""
        now = time.perf_counter()
        found = sum_over_processes(
            {
                "rollers/lost": float(self._lost),
                "rollers/again": float(self._dealer.again - self._again),
                "busy": self._busy_s,
                "time": self._size * (now - self._since),
            }
        )
        busy, total = found.pop("busy"), found.pop("time")
        found |= {"rollers/busy": busy / total, "rollers/staleness": float(self._staleness)}
        self._again, self._lost, self._busy_s, self._since = self._dealer.again, 0, 0.0, now
        self._staleness = 0
        return found

    def close(self) -> None:
        """End the workers, and Ray if it was started for this run."""
        self._crew.interrupt()
        self._thread.shutdown()
        with suppress(self._ray.exceptions.RayError):  # another training process has ended the Ray that it started
            self._crew.close()
        self._disconnect()

    def _write(self, outcome: Outcome) -> None:
        """Write what a worker has written, or why a unit was lost, into the run's folder."""
        lost = {"failures/rollers.txt": f"{outcome.error}\n".encode()} if outcome.lost else {}
        for name, content in {**outcome.files, **lost}.items():
            path = self._run_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with replaced(path) as draft:
                draft.write_bytes(content)

    def _disconnect(self) -> None:
        if self._owns:
            self._ray.shutdown()


def _advise(recipe: Recipe[Any, Any]) -> None:
    """Say where nothing corrects for samples of older weights."""
    if "logp_rollout" not in recipe.objective.needs and not recipe.keeps_sampled_logp:
        LOGGER.info(
            "rollers.overlap updates on samples that are one update old; trainer.old_logp=sampler or a correction of "
            "the objective weighs them by how likely they have become"
        )


def check_processes(options: RollersConfig, accelerator: Accelerator) -> None:
    """Refuse workers that the processes of a run could not use; every process calls it."""
    if options.engine == "local":
        return
    if options.workers < accelerator.num_processes:
        raise UserError(
            f"rollers.workers is {options.workers}; with {accelerator.num_processes} processes it must be at least "
            "that many"
        )
    hosts = list(dict.fromkeys(merge_lists([socket.gethostname()], accelerator)))
    if len(hosts) > 1 and not options.address:
        raise UserError(
            f"the run has processes on {', '.join(hosts)}, and a Ray that it starts itself is on {hosts[0]} alone; run "
            "`ray start` on all of them and set rollers.address=auto"
        )


def start_ray(cores: float) -> str:
    """Start a Ray of this process on this machine, with so many cores at least; returns its address."""
    cores = max(os.cpu_count() or 1, math.ceil(cores))
    with _connecting("Ray that was to start on this machine") as ray:
        # local: not a cluster that happens to run on this machine
        context = ray.init(address="local", num_cpus=cores, include_dashboard=False, **QUIET)
    return str(context.address_info["gcs_address"])


def _connect(options: RollersConfig, accelerator: Accelerator) -> bool:
    """Join a cluster, or start one for the run; returns whether this process has to leave it."""
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return False
    address = options.address
    if not address:
        cores = options.workers * options.num_cpus
        address, mode = in_first_process(accelerator, lambda: (start_ray(cores), os.environ.get("RAY_AUTH_MODE")))
        if accelerator.is_main_process:
            return True
        if mode is not None:  # set by Ray where it starts, and read here when it is imported
            os.environ["RAY_AUTH_MODE"] = mode
    with _connecting(f"cluster at rollers.address={address}") as ray:
        ray.init(address=address, **QUIET)
    return True


@contextmanager
def _connecting(where: str) -> Iterator[Any]:
    """Ray's module, with the suite's variables; handlers of signals stay as they were."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UserError("rollers.engine is ray, which is not installed: pip install 'mmrl-suite[ray]'") from error
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    handlers = {each: signal.getsignal(each) for each in SIGNALS}
    try:
        yield ray
    except Exception as error:  # Ray raises what comes to hand, also where a start takes too long
        raise UserError(f"no connection to the {where}: {' '.join(str(error).split())[:300]}") from error
    finally:
        for each, handler in handlers.items():
            with suppress(ValueError):  # signals are the main thread's, and elsewhere Ray leaves them alone
                signal.signal(each, handler)


def _check_room(options: RollersConfig) -> None:
    """Refuse workers that no machine of the cluster could hold."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, wanted, key in (("CPU", options.num_cpus, "num_cpus"), ("GPU", options.num_gpus, "num_gpus")):
        most = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if wanted > most:
            raise UserError(
                f"rollers.{key} is {wanted:g}, but no machine of the cluster has more than {most:g} {name}s"
            )


def _pickled(job: Job) -> bytes:
    try:
        return pickle.dumps(job)
    except Exception as error:
        raise UserError(
            f"the run cannot be sent to workers: {type(error).__name__}: {error}; name policy and simulator in the "
            "configuration instead of giving them as objects, or use rollers.engine=local"
        ) from error
