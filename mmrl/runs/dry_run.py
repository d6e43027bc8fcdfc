"""Opening a recipe without its model: what `mmrl train CONFIG --dry-run` reads is what the run itself reads.

A recipe reads and checks its data, and calls `model_follows` before it loads the first model. In a dry run it goes no
further, so every error of the data that the run would raise is raised here, by the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_DRY: ContextVar[bool] = ContextVar("dry_run", default=False)


class DataRead(BaseException):
    """Raised in a dry run once a recipe has read and checked its data."""

    def __init__(self, recipe: Any) -> None:
        super().__init__(f"the data of {type(recipe).__name__} have been read")
        self.recipe = recipe


class NotReadError(BaseException):
    """Raised in a dry run if data are not on this machine and the real run would build or download them."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


@contextmanager
def data_only() -> Iterator[None]:
    """Open recipes inside as a dry run does: they end with `DataRead`, or with `NotReadError`."""
    token = _DRY.set(True)
    try:
        yield
    finally:
        _DRY.reset(token)


def model_follows(recipe: Any) -> None:
    """Mark that the recipe's data have been read and checked, and its model is loaded next; a dry run ends here."""
    for stage in recipe.stages:
        stage.check_data(recipe.train_tasks)
    if _DRY.get():
        raise DataRead(recipe)


def fetch_follows(path: str, reason: str) -> None:
    """Mark that data are built or downloaded next, for the given `reason`; a dry run does neither."""
    if _DRY.get():
        raise NotReadError(path, reason)
