"""The robot's side of serving: actions at a declared rate, while the next chunk is computed.

    control steps    0 1 2 3 4 5 6 7 8 ...      one call of `RealTimeController.step` each, which never waits
    running chunk    ======*=======|            after n_action_steps, the next chunk is asked for (*) and computed
    next chunk             ........=======      in a thread; it takes over (|) at the entry for that control step

The delay is measured: a chunk takes over at the entry that follows the actions executed since its observation. With
real-time chunking, the request contains the rest of the running chunk and the largest of the last delays.

If the actions run out, the arm is stopped until the next chunk arrives. `drive` also stops it if the loop itself hangs.
No torch is needed: numpy, websockets and msgpack are enough on the robot.

Source: Real-Time Chunking, arXiv 2506.07339, algorithm 1.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmrl.errors import RunError, UserError, require_packages
from robotics.episodes.pacing import Pacer
from robotics.policies.base.inpainting import MODES, blend
from robotics.serving.messages import pack, unpack

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOGGER = logging.getLogger("mmrl")
KEPT_DELAYS = 10
"""Number of latest delays, the largest of which is expected next."""
DISCARD_S = 2.0
"""A chunk whose observation is older, or whose loop paused for longer, is not executed: the scene may have changed."""
STALL_STEPS = 3
"""Periods without a command after which `drive` stops the arm."""


class PolicyClient:
    """A connection to `mmrl serve`, opened again after it was lost.

    Args:
        address: such as ws://127.0.0.1:8000.
        token: the server's token, if it has one.
        timeout_s: seconds to wait for a response.
    """

    def __init__(self, address: str = "ws://127.0.0.1:8000", token: str = "", timeout_s: float = 10.0) -> None:
        require_packages("the robot's client", ("websockets", "msgpack"), "serve")
        self._address, self._timeout_s = address, timeout_s
        self._headers = {"Authorization": f"Api-Key {token}"} if token else {}
        self._connection: Any = None
        self._open = contextlib.ExitStack()
        self.metadata: dict[str, Any] = {}
        """What the server says of its policy, see `docs/robot_policies.md`; nested entries are joined with `/`."""
        self._connect()

    def infer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The response to an observation.

        Raises:
            RunError: the server rejected it.
            OSError: there is no connection, or no response in time.
        """
        try:
            if self._connection is None:
                self._connect()
            self._connection.send(pack(message))
            reply = self._connection.recv(timeout=self._timeout_s)
        except Exception:
            # an answer that comes later would be taken for that of the next observation
            self.close()
            raise
        if isinstance(reply, str):
            raise RunError(f"the server answered: {reply}")
        return unpack(reply)

    def reset(self) -> None:
        """Restart the server's random numbers for this robot."""
        self.infer({"endpoint": "reset"})

    def close(self) -> None:
        """Close the connection."""
        self._connection = None
        self._open.close()

    def _connect(self) -> None:
        from websockets.sync.client import connect

        options: dict[str, Any] = {
            "additional_headers": self._headers,
            "compression": None,
            "max_size": None,
            "close_timeout": 0.5,
        }
        self._connection = self._open.enter_context(connect(self._address, **options))
        self.metadata = unpack(self._connection.recv(timeout=self._timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@dataclass(frozen=True)
class RealTimeSettings:
    """Rate, budget and stop of a robot; None takes what the server's metadata says."""

    control_hz: float | None = None
    """Control steps per second."""
    n_action_steps: int | None = None
    """Control steps after an observation before the next one is sent; at most those of a chunk without the delay."""
    mode: str | None = None
    """naive, blend or rtc, see `DelaySettings.mode`. Default: rtc if the policy can continue chunks, else blend."""
    latency_budget_ms: float | None = None
    """Time for a response; later ones are counted. Default: until the actions run out."""
    stop: Sequence[str] | None = None
    """Action that stops the arm: zero (of motions, whose 0 is no motion) or hold (of positions, whose last value is
    kept), once or for each entry of an action."""


@dataclass
class RealTimeCounts:
    """Numbers of a robot's control steps and chunks so far."""

    steps: int = 0
    """Control steps."""
    chunks: int = 0
    """Chunks that were executed, from some entry on."""
    late: int = 0
    """Responses over the latency budget."""
    discarded: int = 0
    """Responses too old to execute."""
    errors: int = 0
    """Requests without an answer."""
    starved: int = 0
    """Control steps without an action, in which the arm was stopped; those before the first chunk do not count."""
    stalled: int = 0
    """How often the watchdog of `drive` stopped the arm."""
    last_error: str = ""
    latency_ms: list[float] = field(default_factory=list)
    """Time from each request to its response."""
    delays: list[int] = field(default_factory=list)
    """Actions executed between observation and takeover, of each chunk after the first."""
    seams: list[float] = field(default_factory=list)
    """Distances of consecutive actions where one chunk follows another, in the units of the actions."""
    inside: list[float] = field(default_factory=list)
    """Distances of consecutive actions inside of chunks."""

    def summary(self) -> str:
        """One line."""
        text = f"{self.steps} control steps, {self.chunks} chunks"
        named = ("late", "discarded", "errors", "starved", "stalled")
        text += "".join(f", {getattr(self, name)} {name}" for name in named if getattr(self, name))
        if self.latency_ms:
            text += "; latency p50 {:.0f} ms, p90 {:.0f} ms".format(*np.quantile(self.latency_ms, [0.5, 0.9]))
        if self.delays:
            text += f"; delay {np.mean(self.delays):.1f} control steps"
        if self.seams and self.inside:
            text += f"; jumps {np.mean(self.seams):.3f} at seams, {np.mean(self.inside):.3f} inside"
        return text


class RealTimeController:
    """Actions for a control loop, from chunks that are computed meanwhile.

        with PolicyClient("ws://gpu:8000") as client, RealTimeController(client.infer, client.metadata) as controller:
            drive(robot.observe, robot.act, controller, steps=600)

    Args:
        infer: answers observations with `actions` (K, D), as `PolicyClient.infer` and openpi's client do. Called in a
            thread, one call at a time.
        metadata: the server's.
        settings: what the metadata leaves open, or is to be different.

    Raises:
        UserError: the rate or the stop action is unknown, or the chunks are too short for the budget.
    """

    def __init__(
        self,
        infer: Callable[[dict[str, Any]], Mapping[str, Any]],
        metadata: Mapping[str, Any],
        settings: RealTimeSettings | None = None,
    ) -> None:
        own = settings or RealTimeSettings()
        self._infer = infer
        # openpi's client keeps the entries nested, ours joins them
        nested = metadata.get("actions")
        shape = nested.get("shape") if isinstance(nested, Mapping) else metadata.get("actions/shape")
        if shape is None or len(shape) != 2:
            raise UserError(
                f"the server's metadata has {', '.join(metadata) or 'nothing'}, but not the shape of a chunk of "
                "actions; only `mmrl serve` says it, for other servers add actions={'shape': [K, D]}"
            )
        self._chunk_size, self._size = shape
        self.control_hz = float(_known("control_hz", own.control_hz, metadata))
        self.stop = _stops(_known("stop", own.stop, metadata), self._size)
        continues = bool(metadata.get("continues_chunks"))
        self.mode = own.mode or ("rtc" if continues else "blend")
        if self.mode not in MODES:
            raise UserError(f"mode is {self.mode}; must be one of {', '.join(MODES)}")
        if self.mode == "rtc" and not continues:
            raise UserError("mode is rtc, but the served policy cannot continue chunks; use blend or naive")
        self.taken = own.n_action_steps or int(metadata.get("n_action_steps") or self._chunk_size)
        self.budget_ms = self._budget(own.latency_budget_ms or metadata.get("latency_budget_ms"))
        self.counts = RealTimeCounts()
        self._thread = ThreadPoolExecutor(1, "chunks")
        self._pending: Future[tuple[float, Any]] | None = None
        self.reset()

    def reset(self) -> None:
        """Begin an episode: forget the running chunk, and the response under way."""
        self._chunk: NDArray[np.float32] = np.zeros((0, self._size), np.float32)
        self._at = 0  # entry of the chunk to execute next, which is also the control steps since its observation
        self._fresh = False  # whether that is the first entry of a chunk that took over
        self._last: NDArray[np.float32] | None = None  # last action
        if self._pending is not None:
            self._pending.cancel()  # it may still wait behind one that hangs
        self._pending = None
        self._seen_s = self._stepped_s = math.inf  # times of the requested observation and of the last control step
        self._running = self._chunk  # rest of the chunk at the last request
        self._since = 0  # actions executed since then
        expected = math.ceil(self.budget_ms * self.control_hz / 1000)
        self._delays: deque[int] = deque([expected], maxlen=KEPT_DELAYS)

    def step(self, observation: Mapping[str, Any], seen_s: float | None = None) -> NDArray[np.float32] | None:
        """Choose the action (D,) of a control step.

        Args:
            observation: message of the present observation, for `infer`.
            seen_s: `time.perf_counter()` before it was taken; None = now.

        Returns:
            An action of the running chunk; if they have run out, the action that stops the arm. None before the first
            chunk: the robot has not moved, and there is nothing to send.
        """
        self.counts.steps += 1
        now = time.perf_counter()
        if now - self._stepped_s > DISCARD_S:
            self._at = len(self._chunk)  # the rest was meant for the scene before the pause
        self._stepped_s = now
        self._receive(now)
        if self._pending is None and (self._at >= self.taken or self._at >= len(self._chunk)):
            self._request(observation, now if seen_s is None else seen_s)
        if self._at >= len(self._chunk):
            self.counts.starved += self._last is not None
            return self.stop_action()
        action = self._chunk[self._at]
        if self._last is not None:
            jumps = self.counts.seams if self._fresh else self.counts.inside
            jumps.append(float(np.linalg.norm(action - self._last)))
        self._last, self._fresh = action, False
        self._at += 1
        self._since += 1
        return action

    def stop_action(self) -> NDArray[np.float32] | None:
        """Action (D,) that stops the arm; None before the first action."""
        if self._last is None:
            return None
        return np.where([word == "zero" for word in self.stop], np.float32(0), self._last)

    def close(self) -> None:
        """Stop asking for chunks."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _request(self, observation: Mapping[str, Any], seen_s: float) -> None:
        # copied, as robots reuse their buffers, and it is packed later in the thread
        message = copy.deepcopy(dict(observation))
        self._seen_s = seen_s
        self._running, self._since = self._chunk[self._at :], 0
        if self.mode == "rtc" and len(self._running):
            delay = min(max(self._delays), len(self._running))
            message["running"] = {"actions": np.ascontiguousarray(self._running), "delay": delay}

        # not in the thread, where it may wait behind a request from before a reset
        began = time.perf_counter()

        def timed() -> tuple[float, Any]:
            answer = self._infer(message)
            return 1000 * (time.perf_counter() - began), answer["actions"]

        self._pending = self._thread.submit(timed)

    def _receive(self, now_s: float) -> None:
        """Take over a chunk that has arrived, unless it is too old."""
        if self._pending is None or not self._pending.done():
            return
        pending, self._pending = self._pending, None
        try:
            latency_ms, actions = pending.result()
            chunk = np.asarray(actions, np.float32)
            if chunk.shape != (self._chunk_size, self._size) or not np.isfinite(chunk).all():
                raise RunError(f"the chunk has the shape {chunk.shape}, or numbers that are not finite")
        except Exception as error:  # whatever it is, the arm must be stopped and not the loop
            self.counts.errors += 1
            text = f"{type(error).__name__}: {error}"
            if text != self.counts.last_error:
                LOGGER.warning("no chunk: %s", text)
            self.counts.last_error = text
            return
        self.counts.latency_ms.append(latency_ms)
        self.counts.late += latency_ms > self.budget_ms
        if now_s - self._seen_s > DISCARD_S:
            if not self.counts.discarded:
                seconds = now_s - self._seen_s
                LOGGER.warning(
                    "a chunk came %.1f s after its observation and is not executed (limit: %g s)", seconds, DISCARD_S
                )
            self.counts.discarded += 1
            return
        if len(self._running):
            self._delays.append(self._since)
            self.counts.delays.append(self._since)
            if self.mode == "blend":
                chunk = blend(self._running[None], chunk[None], [self._since])[0]
        self.counts.chunks += 1
        # actions and not control steps: an arm that was stopped meanwhile is where it was
        self._chunk, self._at, self._fresh = chunk, self._since, True

    def _budget(self, declared: float | None) -> float:
        """Latency budget in milliseconds."""
        left = self._chunk_size - self.taken
        longest = 1000 * left / self.control_hz
        if self._chunk_size == 1:
            raise UserError(
                "the policy's chunks have one control step, so the next one cannot be computed meanwhile; train it "
                "with model.chunk above 1, or call `infer` at every control step in your own loop"
            )
        if left < 1 or (declared or 0.0) > longest:
            raise UserError(
                f"of the {self._chunk_size} control steps of a chunk, n_action_steps={self.taken} leave {left} for the "
                f"time until the next one, {longest:.0f} ms at {self.control_hz:g} Hz; the latency budget is "
                f"{declared or 1000 / self.control_hz:.0f} ms. Set a smaller n_action_steps"
            )
        return float(declared or longest)


class Watchdog:
    """Calls a function if it is not fed for too long.

    Args:
        timeout_s: seconds.
        stop: what to call, in a thread of its own, once per stall.
    """

    def __init__(self, timeout_s: float, stop: Callable[[], object]) -> None:
        self._timeout_s, self._stop = timeout_s, stop
        self._fed, self._ended = threading.Event(), False
        self.fired = 0
        """Number of stalls."""
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def feed(self) -> None:
        """Say that a command was sent."""
        self._fed.set()

    def close(self) -> None:
        """End the watch."""
        self._ended = True
        self._fed.set()
        self._thread.join()

    def _watch(self) -> None:
        self._fed.wait()  # from the first command on: before it, nothing moves
        while not self._ended:
            self._fed.clear()
            if self._fed.wait(self._timeout_s) or self._ended:
                continue
            self.fired += 1
            try:
                self._stop()
            except Exception as error:  # a broken robot must not end the watch
                LOGGER.error("the watchdog could not stop the arm: %s: %s", type(error).__name__, error)
            self._fed.wait()


def drive(
    observe: Callable[[], Mapping[str, Any]],
    act: Callable[[NDArray[np.float32]], object],
    controller: RealTimeController,
    steps: int,
) -> RealTimeCounts:
    """Run the control loop at its rate, and stop the arm at the end, at an error and whenever the loop hangs.

    It begins with `controller.reset()`: nothing of an earlier drive is executed.

    Args:
        observe: reads the robot's observation, as a message for the server.
        act: sends an action (D,) to the robot. The watchdog calls it from another thread.
        controller: see `RealTimeController`.
        steps: control steps.

    Returns:
        The counts, also logged.
    """
    controller.reset()
    pacer, counts = Pacer(controller.control_hz), controller.counts

    def stop() -> None:
        action = controller.stop_action()
        if action is not None:
            act(action)

    watchdog = Watchdog(STALL_STEPS / controller.control_hz, stop)
    try:
        for _ in range(steps):
            pacer.wait()
            before_s = time.perf_counter()
            action = controller.step(observe(), before_s)
            if action is not None:
                act(action)
                watchdog.feed()
    finally:
        watchdog.close()
        counts.stalled += watchdog.fired
        stop()
        LOGGER.info("%s", counts.summary())
    return counts


def _known(name: str, own: Any, metadata: Mapping[str, Any]) -> Any:
    """An entry of the settings, else of the metadata; raises UserError without either."""
    found = metadata.get(name) if own is None else own
    if not found:
        raise UserError(f"neither RealTimeSettings nor the server's metadata has {name}; {MISSING[name]}")
    return found


def _stops(words: Any, size: int) -> list[str]:
    """The words for each entry of an action."""
    found = [words] * size if isinstance(words, str) else list(words) * (size if len(words) == 1 else 1)
    if len(found) != size or set(found) - {"zero", "hold"}:
        raise UserError(f"stop is {words}; expected zero or hold, once or for each of the {size} entries of an action")
    return found


MISSING = {
    "control_hz": "state the control steps per second",
    "stop": "state what stops the arm: zero if the actions are motions, hold if they are positions",
}
