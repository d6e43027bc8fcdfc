"""Tools and a reward for the tests of `mmrl.agents.environments.tools`."""


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: one number.
        b: the other.
    """
    return a + b


def fail(text: str) -> str:
    """
    Fail with a text.

    Args:
        text: what to say.
    """
    raise ValueError(f"no {text}")


def reward(task, answer):
    return float(str(task["answer"]) in answer)


def undescribed(a, b):
    return a
