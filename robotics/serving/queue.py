"""One policy for many robots: observations that wait at the same time are processed in one call of the policy."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from robotics.episodes.collect import sim_actions
from robotics.policies.base.action_policy import INPUT_SHAPES, PolicyInputs
from robotics.policies.base.action_tokens import RowGenerators
from robotics.policies.base.inpainting import RunningChunk, check_inpaints
from robotics.serving.messages import BadMessageError, describe_value
from robotics.serving.observations import RUNNING_KEYS
from robotics.serving.opening import ServedPolicy

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class QueuedChunk:
    """A policy's response to one observation."""

    actions: NDArray[np.float32]  # (K, D)
    infer_ms: float  # duration of the call of the policy
    batch_size: int  # observations that it answered


@dataclass(frozen=True, eq=False)  # tensors cannot be compared by ==
class _Request:
    inputs: PolicyInputs
    generator: torch.Generator
    running: RunningChunk | None
    answer: asyncio.Future[QueuedChunk]

    @property
    def shapes(self) -> list[torch.Size | None]:
        """Shapes of the inputs; requests with equal shapes can be batched."""
        parts = [getattr(self.inputs, name) for name in INPUT_SHAPES]
        parts.append(None if self.running is None else self.running.actions)
        return [None if part is None else part.shape for part in parts]


class PolicyQueue:
    """Queue of observations for the policy, which runs in a thread so that messages can be read meanwhile.

        robot 1  ──▶┐
        robot 2  ──▶┤ waiting ──▶ the policy's thread: up to max_batch at once ──▶ answers
        robot 3  ──▶┘

    Each call takes the observations that arrived during the previous one; it does not wait for more.
    """

    def __init__(self, served: ServedPolicy) -> None:
        self._served = served
        self._waiting: deque[_Request] = deque()
        self._filled = asyncio.Event()
        # one thread: calls of the policy must not overlap
        self._thread = ThreadPoolExecutor(1, "policy")

    async def ask(
        self, inputs: PolicyInputs, generator: torch.Generator, running: RunningChunk | None = None
    ) -> QueuedChunk:
        """Wait for the response to one observation."""
        request = _Request(inputs, generator, running, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._filled.set()
        return await request.answer

    async def run(self) -> None:
        """Respond to observations until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._filled.wait()
                batch = self._next_batch()
                found = await loop.run_in_executor(self._thread, self._answers, batch)
                for request, answer in zip(batch, found, strict=True):
                    if request.answer.done():  # cancelled, because its robot has left
                        continue
                    if isinstance(answer, Exception):
                        request.answer.set_exception(answer)
                    else:
                        request.answer.set_result(answer)
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _next_batch(self) -> list[_Request]:
        """Take the oldest request and those that can be batched with it."""
        first = self._waiting[0]
        # oldest first, so that no robot waits for ever behind others of another shape
        alike = [request for request in self._waiting if request.shapes == first.shapes]
        batch = alike[: self._served.config.max_batch]
        for request in batch:
            self._waiting.remove(request)
        if not self._waiting:
            self._filled.clear()
        return batch

    def _answers(self, batch: list[_Request]) -> list[QueuedChunk | Exception]:
        """A chunk or an exception per request; if the policy raises, each is retried alone to find the culprit."""
        try:
            inputs = PolicyInputs.concat([request.inputs for request in batch])
            # one generator per robot, so that its answers do not depend on the batch
            draws = RowGenerators([request.generator for request in batch])
            return list(choose_chunks(self._served, inputs, draws, _together(batch)))
        except Exception as error:
            if len(batch) == 1:
                return [error]
        return [answer for request in batch for answer in self._answers([request])]


def choose_chunks(
    served: ServedPolicy, inputs: PolicyInputs, generator: torch.Generator, running: RunningChunk | None = None
) -> list[QueuedChunk]:
    """Call the policy once; a chunk that a robot executes meanwhile is continued."""
    policy, temperature = served.policy, served.config.temperature
    began = time.perf_counter()
    previous: dict[str, Any] = {} if running is None else {"previous": running}
    with torch.no_grad(), served.autocast():
        choice = policy.act(
            inputs.to(policy.device), generator, temperature=temperature or 1.0, greedy=temperature == 0, **previous
        )
    actions = sim_actions(choice.actions.float().cpu().numpy(), served.scale)
    actions = actions.clip(-1, 1)  # as simulators do; a robot must not get more than the policy was trained with
    if served.bounds is not None:
        actions = served.bounds.to_data(torch.from_numpy(actions)).numpy()
    elapsed = 1000 * (time.perf_counter() - began)
    return [QueuedChunk(row, elapsed, len(inputs)) for row in actions]


def read_running(served: ServedPolicy, message: Mapping[str, Any]) -> RunningChunk | None:
    """The chunk that a robot executes, in the policy's units; None if the message has none.

    Raises:
        BadMessageError: only one of its two entries is there, or one does not fit the policy.
        UserError: the policy cannot continue a chunk.
    """
    found: list[Any] = [message.get(key) for key in RUNNING_KEYS]
    actions, delay = found
    if actions is None and delay is None:
        return None
    check_inpaints(served.policy)
    chunk, size = served.policy.chunk, served.policy.action_size
    fits = isinstance(actions, np.ndarray) and actions.ndim == 2 and actions.dtype.kind in "iuf"
    if not (fits and 1 <= len(actions) <= chunk and actions.shape[1] == size and np.isfinite(actions).all()):
        raise BadMessageError(
            f"{RUNNING_KEYS[0]} is {describe_value(actions)}; expected finite float32 (n, {size}), n in 1..{chunk}"
        )
    if type(delay) is not int or not 0 <= delay <= len(actions):
        raise BadMessageError(
            f"{RUNNING_KEYS[1]} is {describe_value(delay)}; expected control steps, a whole number in "
            f"0..{len(actions)}, the actions that are left"
        )
    left = torch.tensor(np.asarray(actions, np.float32))
    # the way back of `choose_chunks`
    left = left if served.bounds is None else served.bounds.to_sim(left)
    left = left if served.scale is None else served.scale.normalise(left)
    return RunningChunk(left[None], torch.tensor([delay]), served.config.guidance)


def _together(batch: list[_Request]) -> RunningChunk | None:
    """The running chunks of requests with equal shapes."""
    found = [request.running for request in batch if request.running is not None]
    if not found:
        return None
    actions, delay = (torch.cat([getattr(each, name) for each in found]) for name in ("actions", "delay"))
    return RunningChunk(actions, delay, found[0].limit)
