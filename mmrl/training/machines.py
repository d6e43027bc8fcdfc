"""Processes of a run on several machines: a watch on the others, and what a machine without its folder needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from mmrl.errors import PeerLostError, RunStopped, UserError
from mmrl.runs.checkpoint import MANIFEST, TEMPORARY_PREFIX
from mmrl.runs.launch import LAST_WORDS
from mmrl.training.processes import all_ranks, from_all, merge_lists

BEAT_S = 2.0
"""Seconds between two heartbeats of a process."""
SILENCE_S = 10.0
"""Seconds without a heartbeat after which a process is assumed to have ended, if a connection has broken as well."""
LOST_S = 120.0
"""Seconds without a heartbeat after which a process counts as lost in any case; Python may be blocked for a while."""
GRACE_S = 4.0
"""Seconds that a failed process stays alive so that the others can read the reason."""
PIECE_BYTES = 2**26
GONE = "the store shared by the processes is gone, together with the first machine or its launcher"
ResultT = TypeVar("ResultT")


class Watch:
    """Tells the other processes of a run what this one does, and ends this one if another has failed or vanished.

    A collective operation waits for every process. Without this watch, the remaining processes would wait until the
    process group's timeout. A thread writes a heartbeat to the store by which the processes found each other, and reads
    the others' heartbeats.
    """

    def __init__(self, store: torch.distributed.Store, rank: int, count: int) -> None:
        self.stage: Callable[[], str] = lambda: "starting"
        """Describes this process's current stage, for messages such as "at rollout of step 7"."""
        self._store = store
        self._rank = rank
        self._count = count
        self._host = socket.gethostname()
        self._beat = 0
        self._seen: dict[int, tuple[str, float]] = {}
        # an event and not a flag: it also ends the waits of the threads
        self._over = threading.Event()
        self._answered = time.monotonic()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="mmrl-watch", daemon=True)
        # before the others look: they need a note to compare with
        self._write("alive")

    def start(self) -> None:
        """Start watching; all processes have been created."""
        self._thread.start()
        # a second thread, since the first may be blocked in the store
        threading.Thread(target=self._guard, name="mmrl-watch-store", daemon=True).start()

    def close(self, status: str, message: str = "") -> None:
        """Stop watching, and record how this process ended: "done" or "failed"."""
        self._over.set()
        self._thread.join(SILENCE_S)
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self._write(status, message)
        if status == "failed" and LAST_WORDS not in os.environ:
            # long enough for the others to read why
            time.sleep(GRACE_S)

    def culprit(self) -> str | None:
        """Describe the process that failed or ended during a collective operation; None if all are alive."""
        ends = time.monotonic() + SILENCE_S + BEAT_S
        # a process that has just been killed needs a while to look dead
        while time.monotonic() < ends:
            try:
                if found := self._look(SILENCE_S):
                    return found
            except RuntimeError:
                return GONE
            time.sleep(BEAT_S / 4)
        return None

    def _run(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                self._write("alive")
                found = self._look(LOST_S)
                self._answered = time.monotonic()
            except RuntimeError as error:  # torch's DistStoreError and DistNetworkError
                found = f"{GONE} ({' '.join(str(error).split())[:200]})"
            if found and not self._over.wait(GRACE_S):  # time for its own error, which says more
                self._end(found)

    def _guard(self) -> None:
        """End this process if the store has been silent for too long, as after a cable was pulled."""
        while not self._over.wait(BEAT_S):
            silence_s = time.monotonic() - self._answered
            if silence_s > LOST_S:
                self._end(f"{GONE}: it has not responded for {silence_s:.0f} s")

    def _end(self, reason: str) -> None:
        sys.stderr.write(f"mmrl: {self._name(self._rank, self._host)} ends at {self.stage()}: {reason}\n")
        sys.stderr.flush()
        # os._exit: the main thread may be stuck in a collective operation that never returns
        os._exit(1)

    def _write(self, status: str, message: str = "") -> None:
        self._beat += 1
        # the beat makes every note differ from the one before
        note = {"beat": self._beat, "status": status, "host": self._host, "stage": self.stage(), "message": message}
        with self._lock:
            # one connection for two threads
            self._store.set(f"mmrl/watch/{self._rank}", json.dumps(note))

    def _look(self, silence_s: float) -> str | None:
        """Describe the first other process that failed or went silent for `silence_s`; None if all are alive."""
        now = time.monotonic()
        for rank in (rank for rank in range(self._count) if rank != self._rank):
            with self._lock:
                text = self._store.get(f"mmrl/watch/{rank}").decode()
            note = json.loads(text)
            # by content and own clock, since the clocks of machines differ
            if self._seen.get(rank, ("", 0.0))[0] != text:
                self._seen[rank] = (text, now)
            where = f"{self._name(rank, note['host'])}, at {note['stage']},"
            if note["status"] == "failed":
                return f"{where} failed: {note['message']}"
            if note["status"] == "alive" and now - self._seen[rank][1] > silence_s:
                return (
                    f"{where} has not sent a heartbeat for {now - self._seen[rank][1]:.0f} s: it was killed or "
                    "disconnected"
                )
        return None

    def _name(self, rank: int, host: str) -> str:
        return f"process {rank} of {self._count} on {host}"


@contextlib.contextmanager
def watched(accelerator: Accelerator) -> Iterator[Watch | None]:
    """Watch the other processes; errors caused by another process report it. A run of one process has no watch."""
    if accelerator.num_processes == 1:
        yield None
        return
    # the store by which the processes have found each other
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    watch = Watch(store.clone(), accelerator.process_index, accelerator.num_processes)
    # all have written a note, before any looks
    accelerator.wait_for_everyone()
    watch.start()
    try:
        yield watch
    except RunStopped:
        watch.close("done")
        raise
    except Exception as error:
        # a launcher of ours has seen which process failed, and names it
        with _without_sigterm():
            found = watch.culprit() if _may_follow(error) and LAST_WORDS not in os.environ else None
        watch.close("failed", found or f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        if found:
            raise PeerLostError(found) from error
        raise
    watch.close("done")


@contextlib.contextmanager
def _without_sigterm() -> Iterator[None]:
    """Ignore SIGTERM, which torchrun sends to the processes that are left before they know which one was lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


FOLLOWS = re.compile(r"gloo|nccl|socket|connection|peer|store|timed? ?out", re.IGNORECASE)
"""Words in errors of collective operations; errors of gloo are plain RuntimeErrors."""


def _may_follow(error: Exception) -> bool:
    """Whether an error may only follow from the end of another process."""
    connections = (torch.distributed.DistError, ConnectionError, TimeoutError)
    return isinstance(error, connections) or (isinstance(error, RuntimeError) and bool(FOLLOWS.search(str(error))))


def in_first_process(accelerator: Accelerator | None, act: Callable[[], ResultT]) -> ResultT:
    """Run `act` only in the first process, and return its result or raise its UserError in all processes."""
    if accelerator is None or accelerator.num_processes == 1:
        return act()
    found: list[Any] = [None, None]
    if accelerator.is_main_process:
        # every process needs the result, so an error has to be sent too
        try:
            found[0] = act()
        except UserError as error:
            found[1] = str(error)
    broadcast_object_list(found)
    if found[1] is not None:
        raise UserError(found[1])
    return found[0]


def in_turns(accelerator: Accelerator, act: Callable[[], ResultT]) -> ResultT:
    """Call `act` in the first process, then in the first process of each other machine, then in the rest.

    So what it builds on a disk is built once, be the disk shared or not.
    """
    turn = 0 if accelerator.is_main_process else 1 if accelerator.is_local_main_process else 2
    result = None
    for now in range(3):
        if turn == now:
            result = act()
        accelerator.wait_for_everyone()
    return result  # type: ignore[return-value]


def describe(accelerator: Accelerator, run_dir: Path) -> str:
    """Describe which machine writes the run folder and where the others read; empty for one machine."""
    places = merge_lists([(socket.gethostname(), str(Path.cwd()))], accelerator)
    writer, others = (
        places[0],
        [f"{host} in {folder}" for host, folder in dict.fromkeys(places) if host != places[0][0]],
    )
    if not others:
        return ""
    return f"{writer[0]} writes {run_dir.absolute()}; {', '.join(others)} reads data and models but stores nothing"


def check_same_tasks(accelerator: Accelerator, digest: Callable[[], str | None]) -> None:
    """Raise an error if machines have different training data from the first one; on one machine nothing is read."""
    hosts = merge_lists([socket.gethostname()], accelerator)
    # one machine has one copy of the data
    if len(set(hosts)) == 1:
        return
    digests = merge_lists([digest()], accelerator)
    other = next((host for host, own in zip(hosts, digests, strict=True) if own != digests[0]), None)
    if other is not None:
        raise UserError(
            f"the training data on {other} differ from those on {hosts[0]} (digests {', '.join(map(str, digests))}); "
            "every machine needs the same files"
        )


def check_same_folder(folder: Path, entries: int) -> None:
    """Raise UserError if a machine finds another number of entries in a folder that the first process writes to.

    All processes must call it.
    """
    (writer, written), *others = from_all((socket.gethostname(), entries))
    for host, found in others:
        if found != written:
            raise UserError(
                f"{folder} has {written} episodes on {writer}, which writes them, but {found} on {host}; machines that "
                "train together need it on a shared disk"
            )


@contextlib.contextmanager
def on_every_machine(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Copy a checkpoint of the first process to machines that do not have it, while it is being read.

    A machine has it if its own folder of that name has the same manifest, as on a shared disk.
    """
    if accelerator.num_processes == 1:
        yield
        return
    found = in_first_process(accelerator, lambda: _digest(folder))
    # by manifest: the checksums of all files in one small file
    lacks = _digest(folder) != found
    if all_ranks(not lacks, accelerator):
        yield
        return
    receives = lacks and accelerator.is_local_main_process
    # under a temporary name, which Checkpoints.remove_partial deletes after a kill
    draft = folder.with_name(f"{TEMPORARY_PREFIX}received-{folder.name}") if receives else None
    _send(folder, draft, accelerator)
    # no process reads it before it is whole
    if draft is not None:
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    accelerator.wait_for_everyone()
    if _digest(folder) != found:
        raise UserError(f"{folder} was damaged while being sent to {socket.gethostname()}")
    yield
    # every process has read it before any machine deletes its copy
    accelerator.wait_for_everyone()
    # brought here for the resume alone: the first machine keeps the checkpoints
    if receives:
        shutil.rmtree(folder, ignore_errors=True)


def _digest(folder: Path) -> str:
    """Digest of a checkpoint's manifest, which holds the checksums of its files; empty if missing."""
    file = folder / MANIFEST
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() if file.is_file() else ""


def _send(folder: Path, draft: Path | None, accelerator: Accelerator) -> None:
    """Send the files of a folder from the first process to those with a draft, in pieces; every process calls it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if accelerator.is_main_process else []
    names = in_first_process(accelerator, lambda: [(str(f.relative_to(folder)), f.stat().st_size) for f in files])
    for name, size in names:
        source = (folder / name).open("rb") if accelerator.is_main_process else None
        target = _opened(draft / name) if draft is not None else None
        for start in range(0, size, PIECE_BYTES):
            length = min(PIECE_BYTES, size - start)
            data = bytearray(length) if source is None else bytearray(source.read(length))
            piece = torch.frombuffer(data, dtype=torch.uint8).to(accelerator.device)
            torch.distributed.broadcast(piece, 0)
            if target is not None:
                target.write(piece.cpu().numpy().tobytes())
        for file in (source, target):
            if file is not None:
                file.close()


def _opened(path: Path) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")
