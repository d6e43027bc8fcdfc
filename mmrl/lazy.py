"""Packages whose names are loaded when they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Build `__getattr__`, `__dir__` and `__all__` of a package that gives out names without importing their modules.

    __getattr__, __dir__, __all__ = lazy_names(__name__, {"package.module": ("Name", "function")})
    """
    home = {name: module for module, names in homes.items() for name in names}
    public = sorted(home)

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return get, lambda: public, public
