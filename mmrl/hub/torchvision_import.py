"""Makes `import torchvision` work everywhere in an environment whose compiled operators cannot be loaded.

`scripts/setup.sh` puts a file into such an environment that imports this module when Python starts, so that programs
that know nothing of this suite, such as `accelerate launch`, work too. Until torchvision is imported, it costs nothing.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class _TorchvisionFinder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "torchvision" else None
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(Loader):
    """Declares an operator that the import misses, and imports again."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._own.create_module(spec)

    def exec_module(self, module: Any) -> None:
        from mmrl.hub.compat import retry_with_operators

        if FINDER in sys.meta_path:  # it has nothing more to find, and would be asked at every later import
            sys.meta_path.remove(FINDER)

        def execute() -> None:
            sys.modules[module.__name__] = module
            self._own.exec_module(module)

        retry_with_operators(execute)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


FINDER = _TorchvisionFinder()
if all(type(finder).__name__ != _TorchvisionFinder.__name__ for finder in sys.meta_path):  # a .pth may be read twice
    sys.meta_path.insert(0, FINDER)
