"""Rollout workers as Ray actors, on this machine or on a running cluster.

Weights are put into Ray's object store once per step, which copies them once to each machine. A worker is an actor that
Ray places according to its cores and GPUs; with a GPU it also renders there. Ray reports lost actors and machines; the
scheduling of units and the handling of lost ones is in `mmrl.training.rollers`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from mmrl.core.rollouts import Rollouts
from mmrl.errors import RunError, UserError
from mmrl.files import replaced
from mmrl.recipes import find_recipe
from mmrl.runs.folder import resume_command
from mmrl.training import ray_sentinel
from mmrl.training.evaluation import Batch, Evaluation, Row
from mmrl.training.machines import in_first_process
from mmrl.training.processes import Streams, merge_lists, sum_over_processes, versions
from mmrl.training.recipe import Recipe, Step
from mmrl.training.rollers import (
    Dealer,
    Hello,
    LocalRollers,
    Lost,
    NotStarted,
    Raised,
    Rollers,
    TrialUnit,
    Unit,
    UnitOutcome,
    cut,
    joined,
    scored,
)
from mmrl.training.rollout_worker import RolloutWorker, WorkerJob, add_notes, checksum, trained_weights
from mmrl.training.settings import BaseRunConfig, RollersConfig
from mmrl.workers import given

LOGGER = logging.getLogger("mmrl")
START_S = 600.0
"""Maximum seconds for a worker to start while no other one is running."""
POLL_S = 1.0
CLOSE_S = 5.0
"""Seconds that workers have to close their environments."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
"""Defaults for Ray's environment variables: no usage reports, the worker itself hides GPUs, and workers run at the
priority of the run (by default Ray lowers it by 15, so that any other program on the machine goes first)."""
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Variable that Ray reads when it is imported: "0" binds its ports to the loopback address, on any system."""
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def open_rollers(
    recipe: Recipe[Any, Any], config: BaseRunConfig, accelerator: Accelerator, run_dir: Path, entry: Any = None
) -> Rollers:
    """Create the rollers of a run; returns once the first worker has started.

    Args:
        recipe: recipe of the training process.
        config: configuration that the recipe was built from.
        accelerator: of the training process.
        run_dir: folder that receives what workers write.
        entry: entry of the recipe; by default found by name.

    Raises:
        UserError: Ray is not installed, or a worker refuses to start.
        RunError: no worker starts.
    """
    # supervised configurations have none
    options: RollersConfig = getattr(config, "rollers", None) or RollersConfig()
    if options.engine == "local":
        return LocalRollers(recipe, accelerator, options.unit)
    return RayRollers(recipe, config, accelerator, run_dir, entry or find_recipe(config.recipe))


class RayWorker(RolloutWorker):
    """A rollout worker as a Ray actor."""

    def __init__(self) -> None:
        super().__init__()
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        if gpus:  # EGL counts all GPUs, also those that CUDA_VISIBLE_DEVICES hides
            os.environ.setdefault("MUJOCO_EGL_DEVICE_ID", gpus[0])
        else:
            # the variable of SETTINGS keeps Ray from hiding GPUs, so a worker without one does it itself
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # versions that no run has, so that the first unit loads both
        self._versions: list[int] = [-1, -1]

    def work_at(self, numbers: Sequence[int], references: Sequence[Any], unit: bytes) -> bytes:
        """Sample and score a unit, or run its trials.

        Args:
            numbers: versions of weights and state.
            references: object references to both; the weights come with a checksum, the state is pickled.
            unit: a pickled unit, since arrays that Ray serialises itself are read-only.

        Returns:
            A pickled `UnitOutcome`.
        """
        import ray

        # weights change once a step, and a worker does several units of it
        if numbers[0] != self._versions[0]:
            self.load(*ray.get(references[0]))
        # no state: the recipe's rollout reads nothing of the run
        if numbers[1] != self._versions[1] and references[1] is not None:
            self.load_state(*pickle.loads(ray.get(references[1])))
        self._versions = list(numbers)
        # pickled here: Ray would share arrays of the result, read-only
        return pickle.dumps(self.work(pickle.loads(unit)))


class RayCrew:
    """Actors by number; lost actors are killed in case they were only unreachable."""

    def __init__(self, job: bytes, options: RollersConfig, raylet: str = "") -> None:
        import ray

        self._ray = ray
        self._options = options
        self._raylet = raylet
        # once into the object store, from where every actor reads it
        self._job = ray.put(job)
        resources = {"num_cpus": options.num_cpus, "num_gpus": options.num_gpus}
        remote: Any = ray.remote
        # no restarts by Ray: a new actor has no weights, and the dealer decides who repeats a unit
        self._kind = remote(**resources, max_restarts=0, max_task_retries=0)(RayWorker)
        self._actors: dict[int, Any] = {}
        # the answer that is waited for, and whose it is
        self._waiting: dict[Any, int] = {}
        self._starting: set[int] = set()
        self._next = 0
        self._closed = False
        self.numbers = (0, 0)
        self.references = (None, None)
        """Versions of weights and state for the next units, and their object references."""

    def start(self) -> int:
        """Start an actor in the background; Ray queues it while no machine has room."""
        self._next += 1
        # numbers grow and are never used again: a late answer of a lost worker finds no owner
        self._actors[self._next] = actor = self._kind.remote()
        self._starting.add(self._next)
        self._waiting[actor.open.remote(self._job)] = self._next
        return self._next

    def ask(self, worker: int) -> None:
        """Ping an actor."""
        self._waiting[self._actors[worker].answer.remote()] = worker

    def send(self, worker: int, unit: Any) -> None:
        """Send a unit to an actor."""
        actor = self._actors[worker]
        self._waiting[actor.work_at.remote(self.numbers, self.references, pickle.dumps(unit))] = worker

    def wait(self) -> tuple[int, Hello | NotStarted | UnitOutcome | Raised | Lost]:
        """Wait for the next reply."""
        began = time.monotonic()
        while True:
            # polls, since a lost machine or a call of `interrupt` does not end the wait
            found, _ = self._ray.wait(list(self._waiting), num_returns=1, timeout=POLL_S)
            if found:
                break
            if self._closed:
                raise RunError("the rollout workers are closed")
            self._check_raylet()
            # only while nothing else is running: a busy cluster may take long to start another worker
            if time.monotonic() - began > START_S and self._starting.issuperset(self._waiting.values()):
                raise RunError(f"no rollout worker has started in {START_S:g} s: {self._room()}")
        worker = self._waiting.pop(found[0])
        self._starting.discard(worker)
        return worker, self._answer(worker, found[0])

    def interrupt(self) -> None:
        """Make `wait` give up, in any thread."""
        self._closed = True

    def close(self) -> None:
        """End the actors."""
        # a busy actor would answer only after its unit, so it is killed as it is
        idle = [actor for number, actor in self._actors.items() if number not in self._waiting.values()]
        # limited: an environment that hangs must not keep the run from ending
        self._ray.wait([actor.close.remote() for actor in idle], num_returns=len(idle), timeout=CLOSE_S) if idle else ()
        for actor in self._actors.values():
            self._ray.kill(actor)

    def _answer(self, worker: int, reference: Any) -> Hello | NotStarted | UnitOutcome | Raised | Lost:
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(reference)
            return pickle.loads(answer) if isinstance(answer, bytes) else answer
        except errors.RayTaskError as error:
            # an exception of the unit itself, which any other worker would raise too
            if not isinstance(error.cause, errors.RayError):
                return Raised(error.cause, str(error))
            reason = error.cause  # what it was to read has gone with another machine
        except errors.RayError as error:
            reason = error
        # a full store is the run's fault, and would be met by every other worker
        with store_errors():
            if isinstance(reason, errors.ObjectStoreFullError | errors.OutOfDiskError):
                raise reason
        self._check_raylet()
        # perhaps only the connection is gone: its late answer must not meet that of its replacement
        self._ray.kill(self._actors.pop(worker))
        text = " ".join(str(reason).split())
        if len(text) > 400:  # the end of a traceback says most
            text = f"{text[:200]} ... {text[-200:]}"
        return Lost(f"{type(reason).__name__}: {text}")

    def _check_raylet(self) -> None:
        """Give up as soon as Ray is lost on this machine: nothing can be sent, and Ray would end this process."""
        if self._raylet and ray_sentinel.is_lost(self._raylet):
            raise RunError(
                f"Ray's raylet has died on {socket.gethostname()} (killed, or out of memory); `--resume` continues "
                "from the last checkpoint"
            )

    def _room(self) -> str:
        free = {name: count for name, count in self._ray.available_resources().items() if name in ("CPU", "GPU")}
        options = self._options
        return (
            f"each asks for rollers.num_cpus={options.num_cpus:g} and rollers.num_gpus={options.num_gpus:g}; free in "
            f"the cluster: {free or 'nothing'}"
        )


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn a full object store into an error that suggests what to do."""
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
    """Samples and scores in Ray actors. Tasks that depend on each other are sampled and scored in this process."""

    def __init__(
        self, recipe: Recipe[Any, Any], config: Any, accelerator: Accelerator, run_dir: Path, entry: Any
    ) -> None:
        self._recipe = recipe
        self._accelerator = accelerator
        self._run_dir = run_dir
        options: RollersConfig = config.rollers
        # refused before Ray is started
        check_processes(options, accelerator)
        self._unit = options.unit or 1
        # workers are shared out like tasks: every world-size-th one
        self._size = len(range(accelerator.process_index, options.workers, accelerator.num_processes))
        self._local = LocalRollers(recipe, accelerator)
        self._link = _connect(options, accelerator)
        import ray

        self._ray = ray
        self._sentinel = _start_sentinel(self._link, run_dir)
        # a cluster that was started for this run must not outlive it
        try:
            _check_room(options)
            # trained weights are sent every step, so only the frozen ones are compared
            frozen = checksum(recipe.policy, trained=False)
            job = WorkerJob(entry, config, os.getcwd(), versions(), frozen, given.portable(weights=True))
            self._crew = RayCrew(_pickled(job), options, self._link.raylet)
            self._dealer = Dealer(self._crew, self._size)
            hello = self._dealer.start()
        except BaseException:
            self._disconnect()
            raise
        LOGGER.info("%d rollout workers; the first one is on %s (%s)", self._size, hello.host, hello.device)
        self._again = 0
        self._lost = 0
        self._busy_s = 0.0
        self._since = time.perf_counter()
        # None: changed since they were last sent
        self._weights: Any = None
        self._draws = 0
        self._loads = 0
        self._staleness = 0
        self.looks_ahead = options.overlap
        self._ahead: Future[list[UnitOutcome]] | None = None
        # one thread: units of two steps would compete for workers
        self._thread = ThreadPoolExecutor(1, "rollers")
        if options.overlap:
            # log-probabilities of sampler and policy then differ by an update
            recipe.samples_elsewhere = True  # the policy that is updated is not the one that has sampled
            _advise(recipe)

    def load(self, step: Step) -> None:
        """Mark the weights as changed; they are sent when they are first needed."""
        # not at once: a step whose tasks are sampled here needs none in the workers
        self._weights = None

    def begin(self, tasks: Sequence[Any], streams: Streams, step: Step) -> None:
        """Sample tasks in the background, with the current weights and state."""
        if self._recipe.rolls_apart(step):
            units = self._units(tasks, streams, step)
            # a list: errors are raised in `rollout`, on the main thread
            self._ahead = self._thread.submit(lambda: list(self._dealer.run(units)))

    def rollout(self, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Rows of the tasks, sampled by the workers, in order."""
        recipe, ahead = self._recipe, self._ahead
        if ahead is not None:
            # begun during the last update, with the weights of before it
            outcomes = ahead.result()
            self._ahead = None
            self._staleness = 1
        elif recipe.rolls_apart(step):
            outcomes = list(self._dealer.run(self._units(tasks, streams, step)))
        else:
            return self._local.rollout(tasks, streams, step)
        # each worker logs the same warning, which is shown once
        said: set[tuple[int, str]] = set()
        for outcome in outcomes:
            self._lost += int(outcome.lost)
            self._take(outcome, said)
        # rows come from the workers on the CPU
        return joined(outcomes).to(self._accelerator.device)

    def _units(self, tasks: Sequence[Any], streams: Streams, step: Step) -> list[Unit]:
        """Split tasks into units; workers load the current weights and state for them."""
        stages = {stage.name: stage.state_dict() for stage in self._recipe.stages}
        with store_errors():
            state = self._ray.put(pickle.dumps((self._recipe.rollout_state(tasks), stages)))
        # the version by which a worker sees that its state is old
        self._draws += 1
        self._send_weights(state)
        return cut(tasks, streams, step, self._unit)

    def _send_weights(self, state: Any) -> None:
        """Publish the current policy, unless it has been sent already, and a state."""
        policy = self._recipe.policy
        with store_errors():
            # shared by all units of a step
            if self._weights is None:
                self._weights = self._ray.put((trained_weights(policy), checksum(policy, trained=True)))
                self._loads += 1
        self._crew.numbers = (self._loads, self._draws)
        self._crew.references = (self._weights, state)

    def _take(self, outcome: UnitOutcome, said: set[tuple[int, str]]) -> None:
        """Merge what a worker recorded, wrote and logged; log lines in `said` are not repeated."""
        self._busy_s += outcome.seconds
        # a lost unit has noted nothing
        if not outcome.lost:
            add_notes(self._recipe, outcome.added)
        # by content: a warning that ten workers log is one warning
        for line in outcome.logs:
            if line not in said:
                LOGGER.log(line[0], "%s", line[1])
                said.add(line)
        self._write(outcome)

    def score(self, rollouts: Rollouts, streams: Streams, step: Step) -> Rollouts:
        """Score the rows, unless the workers have done it."""
        done = self._recipe.rolls_apart(step) and self._recipe.scores_apart
        return rollouts if done else scored(self._recipe, rollouts, streams, step)

    def evaluate(self, split: str, step: Step) -> Evaluation:
        """Evaluate the policy in the workers; `lost` counts the trials that no worker completed."""
        lost, said = 0, set[tuple[int, str]]()
        self._weights = None  # those of an evaluation may be averages

        def elsewhere(measure: int, batches: Sequence[Batch]) -> Iterator[Sequence[Row]]:
            nonlocal lost
            # an evaluation needs no new state
            self._send_weights(self._crew.references[1])
            units = [TrialUnit(batch, start, split, measure, step) for start, batch in batches]
            # in the order of units, so that the evaluation is the same as in one process
            done = 0
            for unit, outcome in zip(units, self._dealer.run(units), strict=True):
                done += int(not outcome.lost)
                lost += len(unit.tasks) if outcome.lost else 0
                self._take(outcome, said)
                yield outcome.rows
            if units and not done:
                raise RunError(f"no rollout worker has completed a trial of {split}")

        found = self._recipe.evaluate(self._recipe.policy, split, self._accelerator, step, elsewhere)
        self._weights = None
        # every process calls it, also one without lost trials
        if count := sum_over_processes({"lost": float(lost)})["lost"]:
            found.metrics["lost"] = count
        return found

    def metrics(self) -> dict[str, float]:
        """Lost and repeated units of the step, worker utilisation, and the age of the weights used for sampling."""
        now = time.perf_counter()
        # all processes have workers of their own, and metrics are those of the run
        found = sum_over_processes(
            {
                "rollers/lost": float(self._lost),
                "rollers/again": float(self._dealer.again - self._again),
                "busy": self._busy_s,
                "time": self._size * (now - self._since),
            }
        )
        # a ratio of sums, not a mean of ratios: workers are not spread evenly
        busy, total = found.pop("busy"), found.pop("time")
        found |= {"rollers/busy": busy / total, "rollers/staleness": float(self._staleness)}
        # from here to the next call: metrics are those of a step
        self._again = self._dealer.again
        self._lost = 0
        self._busy_s = 0.0
        self._since = now
        self._staleness = 0
        return found

    def close(self) -> None:
        """Stop the workers, and Ray if it was started for this run."""
        # first: the thread below may be waiting for workers, and shutdown waits for the thread
        self._crew.interrupt()
        self._thread.shutdown()
        with suppress(self._ray.exceptions.RayError):  # another training process has ended the Ray that it started
            self._crew.close()
        self._disconnect()

    def _write(self, outcome: UnitOutcome) -> None:
        """Write the files of a worker, or why a unit was lost, to the run folder."""
        lost = {"failures/rollers.txt": f"{outcome.error}\n".encode()} if outcome.lost else {}
        # a name from a worker is relative to the run's folder
        for name, content in {**outcome.files, **lost}.items():
            path = self._run_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # under a temporary name first: a kill leaves no half-written file
            with replaced(path) as draft:
                draft.write_bytes(content)

    def _disconnect(self) -> None:
        if self._sentinel is not None:
            # first: the end of Ray below is meant
            self._sentinel.communicate(b"1")
            self._sentinel = None
        if self._link.owned:
            self._ray.shutdown()


def _advise(recipe: Recipe[Any, Any]) -> None:
    """Log advice if nothing corrects for samples from older weights."""
    # a ratio or a correction would weigh stale samples
    if "logp_rollout" not in recipe.objective.needs and not recipe.keeps_sampled_logp:
        LOGGER.info(
            "rollers.overlap uses samples that are one update old; trainer.old_logp=sampler or an "
            "objective.correction accounts for the change of their probability"
        )


def check_processes(options: RollersConfig, accelerator: Accelerator) -> None:
    """Reject worker settings that the processes of a run could not use; all processes must call it."""
    if options.engine == "local":
        return
    # a process without a worker would wait for ever
    if options.workers < accelerator.num_processes:
        raise UserError(
            f"rollers.workers is {options.workers}; with {accelerator.num_processes} processes it must be at least "
            "that many"
        )
    # dict.fromkeys keeps the order of ranks
    hosts = list(dict.fromkeys(merge_lists([socket.gethostname()], accelerator)))
    if len(hosts) > 1 and not options.address:
        raise UserError(
            f"the run has processes on {', '.join(hosts)}, but a Ray that it starts itself only runs on "
            f"{hosts[0]}; run `ray start` on all of them and set rollers.address=auto"
        )


@dataclass(frozen=True)
class RayLink:
    """This process's connection to Ray."""

    owned: bool
    """Whether this process must shut Ray down."""
    raylet: str = ""
    """Socket of the raylet on this machine; empty if unknown."""
    gcs: str = ""
    """Host and port of the process that keeps the state of the cluster."""


def start_ray(cores: float) -> RayLink:
    """Start Ray on this machine for this process, with at least `cores` CPUs; its ports are for this machine only."""
    # more than there are, if the user asks for it: Ray counts cores and does not bind them
    cores = max(os.cpu_count() or 1, math.ceil(cores))
    _keep_to_loopback()
    with _connecting("Ray instance on this machine") as ray:
        # local: not a cluster that happens to run on this machine
        context = ray.init(address="local", num_cpus=cores, include_dashboard=False, **QUIET)
    link = _link(context, owned=True)
    if not _is_loopback(link.gcs):
        LOGGER.warning(
            "Ray listens at %s, also for other machines, because it was imported before the run; set %s=0 in the "
            "environment, or import ray later",
            link.gcs,
            LOOPBACK,
        )
    return link


def _keep_to_loopback() -> None:
    os.environ.setdefault(LOOPBACK, "0")


def _is_loopback(address: str) -> bool:
    return address.rpartition(":")[0] in ("127.0.0.1", "[::1]", "localhost")


def _link(context: Any, *, owned: bool) -> RayLink:
    # absent where Ray's client is connected to a cluster, `ray://`
    found = getattr(context, "address_info", None) or {}
    return RayLink(owned, str(found.get("raylet_socket_name") or ""), str(found.get("gcs_address") or ""))


def _connect(options: RollersConfig, accelerator: Accelerator) -> RayLink:
    """Join a cluster, or start one for the run."""
    # somebody else's, such as a notebook's: it is left running
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return RayLink(owned=False)
    address = options.address
    if not address:
        cores = options.workers * options.num_cpus
        # one process starts it, the others join by address
        link, mode = in_first_process(accelerator, lambda: (start_ray(cores), os.environ.get("RAY_AUTH_MODE")))
        if accelerator.is_main_process:
            return link
        address = link.gcs
        if mode is not None:  # set by Ray where it starts, and read here when it is imported
            os.environ["RAY_AUTH_MODE"] = mode
    if _is_loopback(address):
        # without it Ray looks for a loopback address at the machine's address in the network
        _keep_to_loopback()
    with _connecting(f"cluster at rollers.address={address}") as ray:
        return _link(ray.init(address=address, **QUIET), owned=False)


def _start_sentinel(link: RayLink, run_dir: Path) -> subprocess.Popen[bytes] | None:
    """Start the process that speaks for this one if Ray ends it; none where the raylet is not known."""
    if not link.raylet:
        return None
    job = {"raylet": link.raylet, "gcs": link.gcs, "host": socket.gethostname(), "resume": resume_command(run_dir)}
    # -I -S: 10 ms and 10 MB, nothing of the environment
    command = [sys.executable, "-I", "-S", ray_sentinel.__file__, json.dumps(job)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)


@contextmanager
def _connecting(where: str) -> Iterator[Any]:
    """Yield the ray module with our environment variables set; restores the signal handlers afterwards."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UserError("rollers.engine is ray, which is not installed: pip install 'mmrl-suite[ray]'") from error
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # Ray installs its own handlers, which would end the run without a checkpoint
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
    """Reject workers that fit on no machine of the cluster."""
    import ray

    # a worker has to fit on one machine: the sum over machines says nothing
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, wanted, key in (("CPU", options.num_cpus, "num_cpus"), ("GPU", options.num_gpus, "num_gpus")):
        most = max((node.get(name, 0.0) for node in nodes), default=0.0)
        if wanted > most:
            raise UserError(
                f"rollers.{key} is {wanted:g}, but no machine of the cluster has more than {most:g} {name}s"
            )


def _pickled(job: WorkerJob) -> bytes:
    try:
        return pickle.dumps(job)
    except Exception as error:
        raise UserError(
            f"the run cannot be sent to workers: {type(error).__name__}: {error}; set policy and simulator by "
            "name in the configuration instead of passing objects, or use rollers.engine=local"
        ) from error
