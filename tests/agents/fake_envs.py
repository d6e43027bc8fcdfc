"""Environments that misbehave on request; loaded by path in a worker."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from mmrl.agents.environments.environment import Action
from mmrl.errors import UserError

HELD = []


def hang():
    """Never end, and say so to the fixture `hanging`."""
    with open(os.environ.get("MMRL_TEST_HANGING", os.devnull), "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)


class Fake:
    """Counts its steps; the action's name selects the fault."""

    actions = {"go": "take a step", "end": "end the episode"}  # noqa: RUF012

    def __init__(self, folder="", length=3):
        self.folder, self.length, self.steps, self.task, self.seed = folder, length, 0, {}, 0

    def reset(self, task, seed):
        self.steps, self.task, self.seed = 0, task, seed
        getattr(self, "_begin_" + task.get("name", "well"))()
        return {"text": f"seed {seed}", "image": np.full((2, 3, 3), seed, np.uint8)}, {"pid": os.getpid()}

    def step(self, action):
        self.steps += 1
        if hasattr(self, "_act_" + action.name):
            return getattr(self, "_act_" + action.name)()
        if action.name not in self.actions:
            return "what?", 0.0, False, {"action_error": f"no action {action.name}"}
        image = np.full((2, 3, 3), self.steps, np.uint8)
        info = {"arguments": action.arguments, "answer": action.text, "open": sys.stderr, "box": np.arange(4)}
        return {"image": image}, float(self.steps), action.name == "end", self.steps >= self.length, info

    def close(self):
        pass

    def _begin_well(self):
        pass

    def _begin_never(self):
        raise RuntimeError("cannot begin, ever")

    def _begin_unknown(self):
        raise UserError("there is no task 'unknown'; there is: well")

    def _begin_slowly(self):
        hang()

    def _begin_flaky(self):
        mark = Path(self.folder) / "begun"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def _act_raise(self):
        raise ValueError("the door is stuck")

    def _act_exit(self):
        raise SystemExit(0)

    def _act_die(self):
        os._exit(3)

    def _act_hang(self):
        hang()

    def _act_wait(self):
        while not (Path(self.folder) / "go").exists():
            time.sleep(0.005)
        return "gone", 0.0, False

    def _act_eat(self):
        while True:
            HELD.append(np.ones(1 << 20))
            time.sleep(0.01)

    def _act_print(self):
        os.write(1, b"noise" * 1000)
        return "printed", 0.0, False

    def _act_nan(self):
        return "", float("nan"), False

    def _act_float_image(self):
        return np.zeros((2, 2, 3)), 0.0, False

    def _act_two_values(self):
        return "", 0.0

    def _act_none(self):
        return None, 0.0, False


class Guide(Fake):
    """Has an expert, which fails in a different way for each of the seeds 1 to 4 and never ends for seed 5."""

    def expert(self):
        if self.seed == 1:
            raise ValueError("the guide is lost")
        if self.seed == 2:
            os._exit(3)
        if self.seed == 3:
            hang()
        self.length = 10**6 if self.seed == 5 else 3
        return "go" if self.seed == 4 else Action("go", {"x": self.steps})


class Looking(Fake):
    """Says whether the agent sees images."""

    show_images = True

    def reset(self, task, seed):
        return f"images: {self.show_images}"


class Thin(Fake):
    """Shows an image that no model can read after the first step of some episodes; the others end with it."""

    episodes = 0

    def reset(self, task, seed):
        self.episodes += 1
        return "go"

    def step(self, action):
        odd = self.episodes % 2
        return {"image": np.zeros((1000, 4, 3), np.uint8), "text": ""} if odd else "done", 1.0, not odd


class NoStep:
    def reset(self, task, seed):
        return ""

    def close(self):
        pass


class Named(Fake):
    actions = ("go", "end")


class Counted(Fake):
    actions = 2


class Functions(Fake):
    tools = [print]  # noqa: RUF012


class Nameless(Fake):
    tools = [{"name": "search"}]  # noqa: RUF012


def broken():
    raise OSError("no licence found")


def unusable():
    raise UserError("set MAZES to where the mazes lie")


def dies():
    os._exit(7)
