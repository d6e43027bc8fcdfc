"""Calling other people's programs: installed packages, and clones of repositories at a known commit."""

import ast
import importlib.metadata
import subprocess
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

Made = tuple[Any, ...]
"""Citation, inputs, peers and the clones that computed them."""


class Clone:
    """A clone of a public repository, read but never changed.

    Args:
        path: where it lies.
        repository: owner/name.
        commit: the commit it must be at; the scripts name places by line.
    """

    def __init__(self, path: str, repository: str, commit: str) -> None:
        self.path, self.repository, self.commit = Path(path), repository, commit
        command = ["git", "-C", path, "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if found != commit:
            raise SystemExit(f"{path} is at {found}; these numbers were made at {repository} {commit}")

    @property
    def name(self) -> str:
        return f"github.com/{self.repository} at {self.commit[:12]}"

    def function(self, file: str, name: str, /, **names: Any) -> Any:
        """A function or class of a file, without running the rest of the file.

        Args:
            file: path inside the repository.
            name: of the function or class.
            names: what it finds among the globals of its module.
        """
        tree = ast.parse((self.path / file).read_text())
        (node,) = [x for x in tree.body if isinstance(x, ast.FunctionDef | ast.ClassDef) and x.name == name]
        node.decorator_list = []
        scope: dict[str, Any] = {"torch": torch, "np": np, "__name__": name, **names}
        exec(compile(ast.Module([_without_annotations(node)], []), f"{self.repository}/{file}", "exec"), scope)
        return scope[name]

    def lines(self, file: str, first: int, last: int, /, **names: Any) -> SimpleNamespace:
        """Run lines of a longer function with the variables that they read; returns all variables afterwards."""
        text = (self.path / file).read_text().splitlines()[first - 1 : last]
        scope: dict[str, Any] = {"torch": torch, "np": np, **names}
        code = textwrap.dedent("\n".join(text))
        exec(compile(code, f"{self.repository}/{file}:{first}-{last}", "exec"), scope)
        return SimpleNamespace(**{key: value for key, value in scope.items() if key != "__builtins__"})


class Wheel(Clone):
    """An installed package whose functions are called without its imports."""

    def __init__(self, repository: str) -> None:
        self.path, self.repository = Path(str(importlib.metadata.distribution(repository).locate_file(""))), repository

    @property
    def name(self) -> str:
        return package(self.repository)


@contextmanager
def doubles() -> Iterator[None]:
    """Let `x.float()` keep float64 and `x.cuda()` stay on the CPU, so that a peer computes in float64."""
    kept = Tensor.float, Tensor.cuda
    Tensor.float, Tensor.cuda = Tensor.double, lambda x, *_, **__: x
    try:
        yield
    finally:
        Tensor.float, Tensor.cuda = kept


def package(name: str) -> str:
    """An installed package and its version."""
    return f"{name} {importlib.metadata.version(name)}"


def tensors(inputs: dict[str, Any]) -> SimpleNamespace:
    """Floats as float64 tensors, whole numbers as int64."""
    return SimpleNamespace(**{key: _tensor(value) for key, value in inputs.items()})


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss, leaf)[0]


def numbers(seed: int, *shape: int, low: float = -1.0, high: float = 1.0) -> Any:
    """Nested lists of reproducible numbers with three decimals."""
    return np.random.RandomState(seed).uniform(low, high, shape).round(3).tolist()


def _tensor(value: Any) -> Any:
    if isinstance(value, list) and not isinstance(value[0], dict | str):
        return torch.from_numpy(np.array(value))
    return value


def _without_annotations(node: ast.stmt) -> ast.stmt:
    """Types in the head of a function need imports that the numbers do not."""
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef):
            child.returns = None
            arguments = child.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                argument.annotation = None
    return node
