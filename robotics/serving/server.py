"""A policy behind a websocket: sends metadata to each robot that connects, then responds to its observations.

It uses the message format of openpi's server, so `openpi_client.WebsocketClientPolicy` works with it. The first message
to a robot is the metadata. Each message from a robot is an observation; each answer is a dictionary with `actions`
(K, D) float32, `server_timing` and `policy_timing`; a text instead of an answer is an error. `GET /healthz` returns
200.

Differences: an error does not close the connection; it is sent to the robot and logged once, and the next message is
answered. {"endpoint": "reset"} restarts the robot's random numbers. An observation may contain the chunk that the robot
executes meanwhile, `running`, which a flow policy continues; see `robotics.serving.realtime`.

Source: openpi-client 0.1.2; Physical-Intelligence/openpi src/openpi/serving/websocket_policy_server.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import http
import logging
import os
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import RunError, RunStopped, UserError, require_packages
from mmrl.training.processes import make_generator
from robotics.policies.base.action_statistics import ActionRange
from robotics.serving.messages import LARGEST_MESSAGE, BadMessageError, describe_value, pack, printable, unpack
from robotics.serving.opening import ServedPolicy
from robotics.serving.queue import PolicyQueue, QueuedChunk, choose_chunks, read_running

if TYPE_CHECKING:
    from websockets.asyncio.server import Server, ServerConnection
    from websockets.http11 import Request, Response

    from robotics.policies.base.action_policy import PolicyInputs
    from robotics.policies.base.inpainting import RunningChunk

LOGGER = logging.getLogger("mmrl")
HOST, PORT = "127.0.0.1", 8000
PROTOCOL = "openpi-client 0.1.2"
FORMAT = 2
"""Version of the metadata and of the response entries; incremented when the meaning of one changes."""
CLOSE_TIMEOUT_S = 2.0
ENDS = {1000: "left", 1001: "was disconnected by the server", 1006: "left without closing"}
"""Log texts by close code; openpi's client never closes the connection; its process just ends."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PACKAGES = ("websockets", "msgpack")
"""Packages of the extra `serve`."""
KEPT = 10_000
"""Number of latest latencies used for the quantiles."""
MOST_REASONS = 50
LINES_A_MINUTE = 100


class PolicyServer:
    """Serves robots until it is stopped.

        served = open_served_policy(Path("runs/tabletop-srpo"), ServeConfig())
        PolicyServer(served, port=8001).run()

    Args:
        served: the policy.
        host: address to listen at; 0.0.0.0 for robots on other machines.
        port: 0 for any free one, see `port`.
        token: token that clients have to send, as `Authorization: Api-Key TOKEN` (the `api_key` of openpi's client) or
            `Bearer TOKEN`; empty for no token.

    Raises:
        UserError: a package is missing, or the policy cannot answer.
    """

    def __init__(self, served: ServedPolicy, host: str = HOST, port: int = PORT, token: str = "") -> None:
        require_packages("serving", PACKAGES, "serve")
        self.host = host
        self.port = port
        self._token = token
        self._lines = _Lines()
        self.counts = AnswerCounts()
        """Over all robots."""
        self.robots = 0
        """Robots that have connected."""
        self._served = served
        _check_stop(served)
        self._present: set[int] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event
        self._queue: PolicyQueue
        # tried before listening: a policy that cannot answer must not accept robots
        self._metadata = pack(self._describe(_try_policy(served)))

    def run(self) -> None:
        """Serve until Ctrl-C, SIGTERM or SIGHUP, unless the process ignores them.

        Raises:
            RunStopped: one of them ended it.
            UserError: the address is taken or not of this machine.
        """
        found: list[int] = []

        def stop(signum: int) -> None:
            if found:  # the second signal: a policy that hangs would keep the first from ending the process
                os._exit(128 + signum)
            found.append(signum)
            self.stop()

        def heed() -> None:
            for signum in SIGNALS:
                # `nohup` ignores SIGHUP, and that choice is kept
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    asyncio.get_running_loop().add_signal_handler(signum, stop, signum)

        asyncio.run(self.serve(heed))
        if found:
            raise RunStopped(found[0], f"{signal.Signals(found[0]).name}: no longer serving", resumable=False)

    def stop(self) -> None:
        """End `serve`; may be called from any thread."""
        if self._loop is not None:
            # the only call that is safe from other threads
            self._loop.call_soon_threadsafe(self._stopping.set)

    async def serve(self, started: Callable[[], object] = lambda: None) -> None:
        """Serve until `stop` is called; `started` is called once the server listens and `port` is known."""
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._queue = PolicyQueue(self._served)
        async with await self._listen() as server:
            self.port = next(iter(server.sockets)).getsockname()[1]
            versions = ", ".join(f"{name} {_version(name)}" for name in ("mmrl-suite", *PACKAGES))
            LOGGER.info("%s; protocol of %s, format %d", versions, PROTOCOL, FORMAT)
            place = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
            LOGGER.info("serving at ws://%s, health at http://%s/healthz; press Ctrl-C to stop", place, place)
            if not self._token and self.host not in (HOST, "localhost", "::1"):
                LOGGER.warning(
                    "anyone who can reach %s can use the policy; pass --token TEXT to require a token from clients",
                    place,
                )
            started()
            tasks = [asyncio.create_task(self._queue.run()), asyncio.create_task(self._log_regularly())]
            await self._stopping.wait()
            server.close()
            await server.wait_closed()  # robots still waiting for an answer need the queue until then
            for task in tasks:
                task.cancel()
        LOGGER.info("%d robots: %s", self.robots, self.counts.summary())

    async def _listen(self) -> Server:
        from websockets.asyncio.server import serve

        silent = logging.getLogger("websockets.mmrl")
        silent.setLevel(logging.CRITICAL + 1)  # otherwise every port scan would log a traceback
        try:
            return await serve(
                self._talk,
                self.host,
                self.port,
                compression=None,  # images hardly shrink, and the robot waits
                max_size=LARGEST_MESSAGE,
                process_request=self._admit,
                origins=[None],  # robots send no Origin, web pages do: a page must not drive a robot
                close_timeout=CLOSE_TIMEOUT_S,
                logger=silent,
            )
        except (OSError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            way = "the port is already in use; choose another --port, or 0 for a free one" if taken else str(error)
            raise UserError(f"cannot listen on {self.host}, port {self.port}: {way}") from error

    async def _talk(self, connection: ServerConnection) -> None:
        """Serve one connection."""
        from websockets.exceptions import ConnectionClosed

        self.robots += 1
        robot = _Robot(self.robots, self._served.config.seed)
        self._present.add(robot.number)
        agent = connection.request.headers.get("User-Agent", "unknown client") if connection.request else "unknown"
        address = connection.remote_address
        source = f"{address[0]}:{address[1]}" if address else "an unknown address"
        self._lines.say(logging.INFO, f"{robot} connected from {source} ({printable(agent[:80])})")
        try:
            with contextlib.suppress(ConnectionClosed):
                await connection.send(self._metadata)
                async for data in connection:
                    await self._answer(robot, connection, data)
        finally:
            self._present.discard(robot.number)
            code, reason = connection.close_code, connection.close_reason
            end = ENDS.get(code or 0) or f"was lost (code {code}{f', {printable(reason)}' if reason else ''})"
            self._lines.say(logging.INFO, f"{robot} {end}: {robot.counts.summary()}")

    async def _answer(self, robot: _Robot, connection: ServerConnection, data: bytes | str) -> None:
        began = time.perf_counter()
        chunk: QueuedChunk | None = None
        try:
            message, inputs, running = await asyncio.to_thread(self._read, data)  # decoding must not block other robots
            if inputs is None:
                robot.reset()
                reply: bytes | str = pack({"status": "reset successful"})
            else:
                self._note_unread(robot, message, inputs.instructions[0])
                chunk = await self._queue.ask(inputs, robot.generator, running)
                reply = pack(_as_answer(chunk, robot.previous_ms, began))
        except Exception as error:  # an error of the policy must only affect this message
            reply = self._refuse(robot, error)
        await connection.send(reply)
        robot.previous_ms = 1000 * (time.perf_counter() - began)
        if chunk is not None:
            budget_ms = self._served.config.latency_budget_ms
            late = 0 < budget_ms < robot.previous_ms
            for counts in (robot.counts, self.counts):
                counts.add(chunk.infer_ms, robot.previous_ms, chunk.batch_size, late)

    def _read(self, data: bytes | str) -> tuple[dict[str, Any], PolicyInputs | None, RunningChunk | None]:
        """A message, the inputs of the policy, None for a reset request, and the chunk that runs meanwhile."""
        message = unpack(data)
        if _asks_for_reset(message):
            return message, None, None
        return message, self._served.format.read(message), read_running(self._served, message)

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer health checks, and refuse clients without the token."""
        if request.path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        # the last word: `Api-Key TOKEN` and `Bearer TOKEN` alike
        given = " ".join(request.headers.get_all("Authorization")).rpartition(" ")[2]
        # constant time, so that answers do not reveal how much of a token is right
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            return connection.respond(
                http.HTTPStatus.UNAUTHORIZED, "a token is required: Authorization: Api-Key TOKEN\n"
            )
        return None

    def _refuse(self, robot: _Robot, error: Exception) -> str:
        """Count and log an error, with a traceback if it is unexpected; returns the reply."""
        expected = isinstance(error, UserError | RunError)
        what = "message rejected" if isinstance(error, BadMessageError) else "the policy gave no response"
        reason = " ".join(str(error).split())
        text = f"{what}: {reason}" if expected else f"{what}: {type(error).__name__}: {reason}"
        if self.counts.refuse(text) and not expected:
            for line in "".join(traceback.format_exception(error)).splitlines():
                # printable: a robot's text must not write control characters into the log
                LOGGER.warning("%s", printable(line))
        if robot.counts.refuse(text):
            self._lines.say(logging.WARNING, f"{robot}: {printable(text)}")
        return text

    def _note_unread(self, robot: _Robot, message: dict[str, Any], prompt: str) -> None:
        """Log once which parts of a robot's messages the policy does not use."""
        if robot.prompt is None:
            unused = self._served.format.unused(message)
            if unused:
                what = ", ".join(unused)[:500]
                self._lines.say(logging.INFO, f"{robot} sends {what}, which the policy does not use")
        if prompt != robot.prompt:
            robot.prompt = prompt
            unknown = self._served.unknown_words(prompt)
            if unknown:
                words = printable(", ".join(unknown)[:500])
                self._lines.say(logging.WARNING, f"{robot}: the policy does not know the words {words}")

    async def _log_regularly(self) -> None:
        seen = 0
        while True:
            await asyncio.sleep(self._served.config.log_every_s)
            # silent while nothing happens
            if self.counts.answers + self.counts.refused.total() > seen:
                seen = self.counts.answers + self.counts.refused.total()
                LOGGER.info("%d robots now, %d so far: %s", len(self._present), self.robots, self.counts.summary())

    def _describe(self, chunk: QueuedChunk) -> dict[str, Any]:
        """The metadata."""
        steps, size = chunk.actions.shape
        about = self._served.about
        bounds = self._served.bounds or ActionRange((-1.0,) * size, (1.0,) * size)
        known = self._served.format.interface
        named = {"names": list(known.actions)} if known.actions else {}
        config = self._served.config
        units = config.action_units
        LOGGER.info("policy: %s", about.get("source", type(self._served.policy).__name__))
        LOGGER.info("observation: %s; actions: float32 %s", _in_words(self._served.format.describe()), (steps, size))
        return {
            "server": "mmrl",
            "version": _version("mmrl-suite"),
            "protocol": PROTOCOL,
            "format": FORMAT,
            "observation": self._served.format.describe(),
            "actions": {"dtype": "float32", "shape": [steps, size], "units": units, **bounds.as_dict(), **named},
            "control_hz": known.control_hz,
            "continues_chunks": self._served.policy.inpaints,
            **({"latency_budget_ms": config.latency_budget_ms} if config.latency_budget_ms else {}),
            **about,
            **({"stop": config.stop} if config.stop else {}),
        }


class AnswerCounts:
    """Counts responses and rejections, and keeps the latest latencies."""

    def __init__(self) -> None:
        self.answers = 0
        self.rows = 0  # sum of the batch sizes
        self.late = 0  # responses over the latency budget
        self.refused: Counter[str] = Counter()  # by reason
        self._infer_ms: deque[float] = deque(maxlen=KEPT)
        self._total_ms: deque[float] = deque(maxlen=KEPT)

    def add(self, infer_ms: float, total_ms: float, batch_size: int, late: bool = False) -> None:
        """Count a response."""
        self.answers += 1
        self.late += late
        self.rows += batch_size
        self._infer_ms.append(infer_ms)
        self._total_ms.append(total_ms)

    def refuse(self, reason: str) -> bool:
        """Count a rejection; returns whether to log it: the first of each kind, with a limit on kinds."""
        kind = reason if reason in self.refused or len(self.refused) < MOST_REASONS else "other reasons"
        self.refused[kind] += 1
        return self.refused[kind] == 1

    def summary(self) -> str:
        """One line, such as `12 responses, 1 rejected; policy median 4.1, 95% 5.0, maximum 6.2 ms; in total ...`."""
        text = f"{self.answers} responses"
        if self.refused:
            text += f", {self.refused.total()} rejected"
        if not self.answers:
            return text
        if self.late:
            text += f", {self.late} over the latency budget"
        batch = f"; {self.rows / self.answers:.1f} observations per call" if self.rows > self.answers else ""
        return f"{text}; policy {_quantiles(self._infer_ms)}; in total {_quantiles(self._total_ms)}{batch}"


def _quantiles(values: deque[float]) -> str:
    middle, high, largest = np.quantile(values, [0.5, 0.95, 1.0])
    return f"median {middle:.1f}, 95% {high:.1f}, maximum {largest:.1f} ms"


class _Lines:
    """Log lines caused by robots, at most `LINES_A_MINUTE`: a robot in a reconnect loop must not fill the disk."""

    def __init__(self) -> None:
        self._minute = 0
        self._said = 0

    def say(self, level: int, text: str) -> None:
        """Log a line, or suppress it."""
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            if self._said > LINES_A_MINUTE:
                LOGGER.info("%d log lines about robots suppressed", self._said - LINES_A_MINUTE)
            self._minute = minute
            self._said = 0
        self._said += 1
        if self._said <= LINES_A_MINUTE:
            LOGGER.log(level, "%s", text)


class _Robot:
    """A connection, with random numbers that do not depend on other robots."""

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self._seed = seed
        self.counts = AnswerCounts()
        self.previous_ms: float | None = None  # duration of the answer before
        self.prompt: str | None = None  # the last instruction
        self.reset()

    def reset(self) -> None:
        """Restart its random numbers."""
        # the same stream for every robot: answers do not depend on who connected first
        self.generator = make_generator(self._seed, "serve")

    def __str__(self) -> str:
        return f"robot {self.number}"


def _check_stop(served: ServedPolicy) -> None:
    """Reject a declared stop action that does not fit the actions."""
    stop, size = served.config.stop, served.policy.action_size
    if len(stop) not in (0, 1, size):
        raise UserError(f"stop has {len(stop)} entries; give one, or one for each of the {size} entries of an action")
    if "zero" in stop and served.config.action_units == "normalised" and served.policy.robot_bounds is not None:
        raise UserError(
            "stop=zero is no motion in the environment's units, but action_units=normalised sends others; use "
            "action_units=environment"
        )


def _try_policy(served: ServedPolicy) -> QueuedChunk:
    """Call the policy once with zeros: rejects a policy that cannot answer, and warms up the others."""
    try:
        return choose_chunks(served, served.format.example(), make_generator(served.config.seed, "serve"))[0]
    except UserError as error:
        hint = "" if served.config.temperature else "; a policy without greedy actions needs temperature=1"
        raise UserError(f"the policy fails on an observation of zeros: {error}{hint}") from error


def _asks_for_reset(message: dict[str, Any]) -> bool:
    endpoint = message.pop("endpoint", "infer")
    if not isinstance(endpoint, str) or endpoint not in ("infer", "reset"):
        raise BadMessageError(f"endpoint is {describe_value(endpoint)}; must be infer (or missing) or reset")
    return endpoint == "reset"


def _as_answer(chunk: QueuedChunk, previous_ms: float | None, began: float) -> dict[str, Any]:
    previous = {} if previous_ms is None else {"prev_total_ms": previous_ms}
    return {
        "actions": chunk.actions,
        "server_timing": {"infer_ms": 1000 * (time.perf_counter() - began), **previous},
        "policy_timing": {"infer_ms": chunk.infer_ms, "batch_size": chunk.batch_size},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"  # a checkout that is on the path


def _in_words(entries: dict[str, Any]) -> str:
    shapes = {name: str(tuple(kind["shape"])) if "shape" in kind else "" for name, kind in entries.items()}
    return ", ".join(f"{name} {kind['dtype']} {shapes[name]}".strip() for name, kind in entries.items())
