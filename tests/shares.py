"""Code that merges items of several processes, run for one rank after the other in a single process."""

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import pytest

ResultT = TypeVar("ResultT")


class _SentError(Exception):
    pass


def in_shares(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, act: Callable[[int], ResultT], count: int
) -> list[ResultT]:
    """Results of `act(rank)` in each of `count` processes, where it calls `merge_in_order` of a module once.

    It is called twice: first to see what it sends, then with the items of all processes.
    """
    sent: list[tuple[Any, Any]] = []

    def record(items: list[tuple[Any, Any]]) -> list[Any]:
        sent.extend(items)
        raise _SentError

    monkeypatch.setattr(module, "merge_in_order", record)
    for rank in range(count):
        with contextlib.suppress(_SentError):
            act(rank)
    merged = [item for _, item in sorted(sent, key=lambda entry: entry[0])]
    monkeypatch.setattr(module, "merge_in_order", lambda items: list(merged))
    return [act(rank) for rank in range(count)]
