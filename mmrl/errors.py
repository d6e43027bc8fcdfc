"""Errors that end a command: a user's mistake (exit 2), a failed run (exit 1), a signal (exit 128 + n)."""

import difflib
from collections.abc import Iterable, Sequence
from importlib.util import find_spec


class UserError(Exception):
    """A mistake in a command, configuration or input; the message states the culprit and the allowed values."""


class ConfigError(UserError, ValueError):
    """A value of a configuration that is outside its declared bounds."""


class NoPlan(UserError):  # noqa: N818 - a dry run says it and goes on
    """There is no plan of the memory that a recipe or kind of policy needs."""


class RunError(Exception):
    """A run that could not continue; the message states the cause and where the evidence was saved."""


class PeerLostError(RunError):
    """A run that ended because another of its processes failed or vanished."""


class RunStopped(Exception):  # noqa: N818 - not an error: the run did what the signal asked for
    """A run that ended because a signal asked for it."""

    def __init__(self, signum: int, message: str, *, resumable: bool = True) -> None:
        super().__init__(message)
        self.signum = signum
        self.resumable = resumable


def did_you_mean(name: object, known: Iterable[object], parent: str = "") -> str:
    """Suggest the closest known name, written after its parent's, as a sentence; empty if none is close."""
    close = difflib.get_close_matches(str(name), map(str, known), n=1)
    return f"did you mean '{parent}{close[0]}'? " if close else ""


def require_packages(what: str, names: Sequence[str], extra: str) -> None:
    """Check that packages of an extra are installed, before any work starts."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise UserError(
            f"{what} needs {' and '.join(missing)}, which is not installed: pip install 'mmrl-suite[{extra}]'"
        )
