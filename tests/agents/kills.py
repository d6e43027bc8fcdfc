"""Episodes whose tool servers and workers are killed at random, and the account of all of them."""

import math
import os
import random
import signal
import time
from collections import Counter

from mmrl.agents.environments.agent_tasks import AgentTask


def play_with_kills(pool, task, first, move, last, victim, kills, *, counted=0, seed=0):
    """Play episodes of four moves until so many victims are dead; returns how the episodes ended.

    In each round most of the episodes lose their `victim(row, result, generator)`, the id of a process, before one of
    their moves; the result is that of `first`. The environment counts the moves, `first` too if `counted` is 1, and
    `last` ends an episode.
    """
    generator, endings = random.Random(0), Counter()
    rows = range(pool.size)
    while endings["killed"] < kills:
        assert all(
            turn.failure is None for turn in pool.reset({row: AgentTask("t", task, seed) for row in rows}).values()
        )
        found = pool.step(dict.fromkeys(rows, first))
        doomed = {row: generator.randrange(2) for row in rows if generator.random() < 0.75}
        killed = set()
        for number in range(4):
            results = pool.step(dict.fromkeys(pool.live, last if number == 3 else move))
            for row, turn in results.items():
                if row in killed:
                    assert turn.failure is not None
                    assert math.isnan(turn.reward), "a lost episode must not look like one that earned nothing"
                    endings["failed"] += 1
                elif number == 3:
                    assert (turn.failure, turn.terminated, turn.reward) == (None, True, 1.0)
                    endings["success"] += 1
                else:
                    assert turn.observation.text == str(number + 1 + counted), "each episode has a state of its own"
            for row in [row for row in pool.live if doomed.get(row) == number]:
                end_process(victim(row, found[row], generator))
                killed.add(row)
        endings["killed"] += len(killed)
        endings["played"] += pool.size
    return endings


def end_process(pid):
    """Kill a process and wait until it has gone, or waits for its parent."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.005)
    raise AssertionError(f"process {pid} does not end")
