"""One policy for many robots: observations that wait at the same time are processed in one call of the policy."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from robotics.episodes.collect import sim_actions
from robotics.policies.base.action_policy import INPUT_SHAPES, PolicyInputs
from robotics.policies.base.action_tokens import RowGenerators
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
    answer: asyncio.Future[QueuedChunk]

    @property
    def shapes(self) -> list[torch.Size | None]:
        """Shapes of the inputs; requests with equal shapes can be batched."""
        parts = (getattr(self.inputs, name) for name in INPUT_SHAPES)
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

    async def ask(self, inputs: PolicyInputs, generator: torch.Generator) -> QueuedChunk:
        """Wait for the response to one observation."""
        request = _Request(inputs, generator, asyncio.get_running_loop().create_future())
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
            return list(choose_chunks(self._served, inputs, RowGenerators([request.generator for request in batch])))
        except Exception as error:
            if len(batch) == 1:
                return [error]
        return [answer for request in batch for answer in self._answers([request])]


def choose_chunks(served: ServedPolicy, inputs: PolicyInputs, generator: torch.Generator) -> list[QueuedChunk]:
    """Call the policy once."""
    policy, temperature = served.policy, served.config.temperature
    began = time.perf_counter()
    with torch.no_grad(), served.autocast():
        choice = policy.act(
            inputs.to(policy.device), generator, temperature=temperature or 1.0, greedy=temperature == 0
        )
    actions = sim_actions(choice.actions.float().cpu().numpy(), served.scale)
    actions = actions.clip(-1, 1)  # as simulators do; a robot must not get more than the policy was trained with
    if served.bounds is not None:
        actions = served.bounds.to_data(torch.from_numpy(actions)).numpy()
    elapsed = 1000 * (time.perf_counter() - began)
    return [QueuedChunk(row, elapsed, len(inputs)) for row in actions]
