"""Reward functions of a careless user, for the tests of rewards in worker processes."""

import os
import sys
import time

CALLS = []


def length(prompts, completions, **columns):
    return [float(len(text)) for text in completions]


def pid(prompts, completions, **columns):
    return [float(os.getpid())] * len(completions)


def raises_on_bad(prompts, completions, **columns):
    if "bad" in completions:
        raise RuntimeError("cannot score bad")
    return [1.0] * len(completions)


def hangs_on_bad(prompts, completions, **columns):
    if "bad" in completions:
        time.sleep(60)
    return [1.0] * len(completions)


def hangs_always(prompts, completions, **columns):
    time.sleep(60)


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


class Unpicklable:
    def __reduce__(self):
        raise TypeError("this cell stays here")
