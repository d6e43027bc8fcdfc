"""Faulty reward functions of a user, for the tests of rewards in worker processes."""

import os
import subprocess
import sys
import time
from pathlib import Path

CALLS = []


def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def pid(prompts, completions, **columns):
    return [float(os.getpid())] * len(completions)


def raises_on_bad(prompts, completions, **columns):
    if "bad" in completions:
        raise RuntimeError("cannot score bad")
    return [1.0] * len(completions)


def hang():
    """Never end, and say so to the fixture `hanging`."""
    with open(os.environ.get("MMRL_TEST_HANGING", os.devnull), "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)


def hangs_for_several(prompts, completions, **columns):
    if len(completions) > 1:
        hang()
    return [1.0]


def hangs_on_bad(prompts, completions, **columns):
    if "bad" in completions:
        hang()
    return [1.0] * len(completions)


def hangs_always(prompts, completions, **columns):
    hang()


def killed_on_bad(prompts, completions, **columns):
    if "bad" in completions:
        os.kill(os.getpid(), 9)
    return [1.0] * len(completions)


def exits_on_bad(prompts, completions, **columns):
    if "bad" in completions:
        sys.exit(3)
    return [1.0] * len(completions)


def hard_exits_on_bad(prompts, completions, **columns):
    if "bad" in completions:
        os._exit(7)
    return [1.0] * len(completions)


def odd_values(prompts, completions, **columns):
    values = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "list": [1.0], "true": True}
    return [values.get(text, 0.5) for text in completions]


def drops_bad(prompts, completions, **columns):
    return [1.0 for text in completions if text != "bad"]


def no_list(prompts, completions, **columns):
    return 1.0


def mean_length(prompts, completions, **columns):
    return [sum(map(len, completions)) / len(completions)]


def length_above_mean_or_raise(prompts, completions, **columns):
    if "bad" in completions:
        raise RuntimeError("cannot compare bad")
    mean = sum(map(len, completions)) / len(completions)
    return [len(text) - mean for text in completions]


def raises_for_the_batch(prompts, completions, **columns):
    if len(completions) == 1:
        raise ZeroDivisionError("a secondary mistake")
    return _ask_the_judge()


def _ask_the_judge():
    raise KeyError("no judge")


def raises_for_several(prompts, completions, **columns):
    if len(completions) > 1:
        raise ValueError("one at a time")
    return [1.0]


async def async_length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


async def async_raises_on_bad(prompts, completions, **columns):
    if "bad" in completions:
        raise ValueError("bad")
    return [1.0] * len(completions)


def state_by_name(prompts, completions, completion_ids, trainer_state):
    return [trainer_state.global_step / trainer_state.max_steps + len(ids) for ids in completion_ids]


def state_by_kwargs(prompts, completions, **kwargs):
    return state_by_name(prompts, completions, kwargs["completion_ids"], kwargs["trainer_state"])


def rank(prompts, completions, **columns):
    """Compares rows, so it must see all of them."""
    order = sorted(range(len(completions)), key=lambda row: len(completions[row]))
    return [float(order.index(row)) for row in range(len(completions))]


def rank_or_raise(prompts, completions, **columns):
    if "bad" in completions:
        raise RuntimeError("cannot rank bad")
    return rank(prompts, completions)


def needs_banana(prompts, completions, banana, factor=1.0):
    return [factor * value for value in banana]


def prints(prompts, completions, **columns):
    sys.stdout.write("noise on stdout\n")
    return [1.0] * len(completions)


def content_length(prompts, completions, **columns):
    assert prompts[0][0]["role"] == "user"
    return [float(len(turns[0]["content"])) for turns in completions]


def numpy_values(prompts, completions, **columns):
    import numpy

    return numpy.linspace(0, 1, len(completions))


class Unsendable:
    """Not plain data."""


def hangs_on_some(prompts, completions, **columns):
    if any(text.startswith("bad") for text in completions):
        hang()
    return [1.0] * len(completions)


class Odd:
    """A value whose special method, named by the completion, raises."""

    def __init__(self, method, error):
        self.method, self.error = method, error

    def _raise(self, name, otherwise):
        if self.method == name:
            raise self.error("oh")
        return otherwise

    def __float__(self):
        return self._raise("float", 1.0)

    def __str__(self):
        return self._raise("str", "text")


class OddError(Exception):
    def __str__(self):
        raise GeneratorExit


class OddList:
    def tolist(self):
        raise KeyboardInterrupt("in tolist")


def raises_what_it_is_told(prompts, completions, **columns):
    errors = {"interrupt": KeyboardInterrupt, "generator": GeneratorExit, "exit": SystemExit, "odd": OddError}
    for text in completions:
        if text in errors:
            raise errors[text]()
    if "tolist" in completions:
        return OddList()
    return [Odd("float", KeyboardInterrupt) if text == "float" else 1.0 for text in completions]


def eats_memory_on_bad(prompts, completions, **columns):
    if "bad" in completions:
        held = []
        while True:
            held.append(b"x" * (16 << 20))
            time.sleep(0.01)
    return [1.0] * len(completions)


def imports_slowly(prompts, completions, **columns):
    import slow_module

    return [slow_module.VALUE] * len(completions)


DAEMON = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()} ")
time.sleep(600)
"""


def leaves_daemons(prompts, completions, pids, **columns):
    """Starts a process in a separate session whose parent ends at once, then ends as the completion says."""
    subprocess.run([sys.executable, "-c", DAEMON, pids[0]], check=True)
    while not Path(pids[0]).exists() or not Path(pids[0]).read_text():
        time.sleep(0.01)
    if "crash" in completions:
        os._exit(3)
    if "hang" in completions:
        time.sleep(600)
    return [1.0] * len(completions)


def runs_programs(prompts, completions, secret="", **columns):
    """A careless reward: executes the completion and returns the variable `reward` that it sets."""
    found = []
    for text in completions:
        names = {"reward": 0.0}
        exec(text, names)
        found.append(names["reward"])
    return found
