"""Environments that misbehave on request; loaded by path in a worker, so only the standard library and numpy are
imported.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

import numpy as np

TASKS = {"walk": "walk on", "die": "die at step 3", "hang": "hang at step 3", "raise": "raise at step 3"}
TASKS |= {"nan": "turn to NaN at step 3", "lock": "keep Python's lock", "chatty": "print", "stubborn": "never begin"}
TASKS |= {"parent": "start a process", "stop": "stop itself", "flaky": "begin at the second attempt"}


def _note_hanging():
    """Say to the fixture `hanging` that this process answers no more."""
    with open(os.environ.get("MMRL_TEST_HANGING", os.devnull), "a") as file:
        file.write(f"{os.getpid()}\n")


class Fake:
    """Counts; the state is (steps, task number, layout, sum of actions)."""

    action_size, state_size = 2, 4

    def __init__(self, horizon=10, success_at=None, marks=None, draws=True):
        self.horizon, self.success_at, self.marks = horizon, success_at, marks
        self.image_size = (6, 8) if draws else None
        self.steps, self.task, self.layout, self.total, self.drawn = 0, "walk", 0, 0.0, 0

    def tasks(self):
        return TASKS

    def layouts(self):
        return {"train": 50, "held_out": None}

    def reset(self, task, layout, split, seed):
        self.steps, self.task, self.layout, self.total = 0, task, layout, 0.0
        self.seed, self.split = seed, split
        if task == "stubborn":
            raise RuntimeError("cannot begin, ever")
        if task == "flaky" and self._first_time():
            os.kill(os.getpid(), signal.SIGKILL)

    def step(self, action):
        self.steps += 1
        self.total += float(np.sum(action))
        if self.steps == 3:
            getattr(self, "_" + self.task, lambda: None)()
        return self.steps * 1.0, self.steps == self.success_at, False, False

    def state(self):
        first = np.nan if self.task == "nan" and self.steps >= 3 else self.steps
        return np.array([first, list(TASKS).index(self.task), self.layout, self.total])

    def render(self):
        self.drawn += 1
        return np.full((*self.image_size, 3), self.steps, np.uint8)

    def expert(self):
        return np.full(2, self.steps / 100)

    def describe(self):
        return {"drawn": self.drawn, "gl": os.environ.get("MUJOCO_GL"), "pid": os.getpid()}

    def close(self):
        self._mark("closed")

    def _mark(self, name):
        if self.marks:
            with open(os.path.join(self.marks, name), "a") as file:
                file.write(f"{os.getpid()}\n")

    def _first_time(self):
        seen = os.path.exists(os.path.join(self.marks, "flaky"))
        self._mark("flaky")
        return not seen

    def _die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def _hang(self):
        _note_hanging()
        time.sleep(1000)

    def _raise(self):
        raise ValueError("the hinge\nbroke")

    def _lock(self):
        _note_hanging()
        ctypes.PyDLL(None).sleep(1000)

    def _stop(self):
        _note_hanging()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _chatty(self):
        print("MRLW" * 50_000)  # noqa: T201
        os.write(1, b"written by C code\n")
        print("to stderr", file=sys.stderr, flush=True)  # noqa: T201
        assert sys.stdin.read() == ""

    def _parent(self):
        child = subprocess.Popen(["sleep", "1000"])
        with open(os.path.join(self.marks, "child"), "w") as file:
            file.write(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)


def make(**options):
    return Fake(**options)


def broken():
    raise OSError("no licence found")


class UnusableError(Exception):
    for_user = True


def unusable():
    raise UnusableError("set ARM_FOLDER to where the arms lie")


def dies():
    os._exit(7)


class Misshapen(Fake):
    def state(self):
        return np.zeros(4 if self.steps == 0 else 3)


def misshapen():
    return Misshapen()


class Odd(Fake):
    """At control step 3 its observation is malformed."""

    def __init__(self, what, **options):
        super().__init__(**options)
        self.what = what

    def step(self, action):
        reward, *flags = super().step(action)
        if self.steps == 3 and self.what == "reward":
            reward = float("nan")
        return (reward, *flags)

    def state(self):
        state = super().state()
        if self.steps == 3 and self.what == "state":
            state[1] = np.inf
        return state[:-1] if self.steps == 3 and self.what == "state_shape" else state

    def render(self):
        image = super().render()
        return image[1:] if self.steps >= 3 and self.what == "image_shape" else image

    def _raise(self):
        raise ValueError(f"hinge {self.layout} broke")


def odd(**options):
    return Odd(**options)


class Lying(Fake):
    def __init__(self, **claims):
        super().__init__()
        vars(self).update(claims)


def lying(**claims):
    return Lying(**claims)


class Counting(Fake):
    """Its expert reports how many images were rendered."""

    def expert(self):
        return np.full(2, float(self.drawn))


def counting(**options):
    return Counting(**options)


class Hungry(Fake):
    def step(self, action):
        self.held = np.ones(40 << 20)
        time.sleep(5)
        return super().step(action)


def hungry():
    return Hungry()
