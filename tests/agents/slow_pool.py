"""Environments of this process whose results arrive after made-up seconds, so that tests need no clock."""

import math
import random
from collections import Counter
from dataclasses import replace

from mmrl.agents.environments.env_pool import EnvPool
from mmrl.agents.environments.environment import Action


class SlowPool(EnvPool):
    """Results come in the order of made-up seconds; `poll` waits by moving the time forward."""

    def __init__(self, config, folder=None, *, seconds=None, seed=0):
        super().__init__(replace(config, isolate=False), folder)
        self.seconds, self.generator = seconds or self._uniform, random.Random(seed)
        self.actions_of = Counter()
        self.now = 0.0
        self.alone = {}
        """Seconds that each row's environment has worked."""
        self.held = {}

    def submit(self, row, asked):
        super().submit(row, asked)
        # starts take no time, so that the time of an episode is that of its actions
        took = self.seconds(row, self.actions_of[row], self.generator) if isinstance(asked, Action) else 0.0
        self.actions_of[row] += isinstance(asked, Action)
        self.alone[row] = self.alone.get(row, 0.0) + took
        (result,) = super().poll().values()
        self.held[row] = self.now + took, result

    def poll(self, timeout_s=math.inf):
        if not self.held:
            return {}
        self.now = max(self.now, min(min(due for due, _ in self.held.values()), self.now + timeout_s))
        return {row: self.held.pop(row)[1] for row, (due, _) in sorted(self.held.items()) if due <= self.now}

    @staticmethod
    def _uniform(row, number, generator):
        return generator.uniform(0.1, 2.0)
