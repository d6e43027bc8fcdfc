"""Modules that a worker loads by path run on an older Python; a pool reads only plain data."""

import ast
import re
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
WORKER_SIDE = (
    "mmrl/hub/foreign.py",
    "mmrl/workers/family.py",
    "mmrl/workers/listen.py",
    "mmrl/workers/loading.py",
    "mmrl/workers/serve.py",
    "mmrl/workers/vector/board.py",
    "mmrl/workers/vector/vector_service.py",
    "mmrl/workers/wire.py",
    "robotics/sim/env_service.py",
    "robotics/sim/gym_adapter.py",
)
ONLY_WHERE_NEEDED = {"mmrl/workers/wire.py": ("PIL",)}
"""Imported in the function that builds an image, which only environments with images receive."""


def imports_of(tree):
    """(name, line) of every import outside of TYPE_CHECKING blocks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes = node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node.body
            for other in nodes:
                yield from imports_of(ast.Module([other], []))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
        else:
            yield from imports_of(node)


@pytest.mark.parametrize("file", WORKER_SIDE)
def test_the_workers_side_is_python_3_8_with_the_standard_library_and_numpy(file):
    tree = ast.parse((PROJECT / file).read_text(), feature_version=(3, 8))
    roots = {name.split(".")[0] for name in imports_of(tree)}
    assert roots <= {*sys.stdlib_module_names, "numpy", *ONLY_WHERE_NEEDED.get(file, ())}
    # An operator between types is evaluated where annotations are not.
    assert "annotations" in {
        alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    methods = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not methods & {"removeprefix", "removesuffix", "pairwise", "is_relative_to"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr)]


def test_nothing_is_pickled_between_processes():
    for path in (PROJECT / "mmrl" / "workers").rglob("*.py"):
        names = set(imports_of(ast.parse(path.read_text())))
        assert not names & {"pickle", "marshal", "multiprocessing"}, path.name
    users = [*(PROJECT / "mmrl" / "rewards").glob("*.py"), *(PROJECT / "robotics" / "sim").glob("*.py")]
    decoding = [path.name for path in users if "decode" in path.read_text() and "mmrl.workers.wire" in path.read_text()]
    assert decoding == ["reward_service.py"]  # the worker's side


def test_there_is_one_pool():
    pools = [
        path.relative_to(PROJECT).as_posix()
        for room in ("mmrl", "diffusion", "robotics")
        for path in (PROJECT / room).rglob("*.py")
        for _ in re.findall(r"^\s*class \w*Pool", path.read_text(encoding="utf-8"), re.M)
    ]
    expected = [
        "mmrl/agents/environments/env_pool.py",
        "mmrl/workers/pool.py",
        "mmrl/workers/row_pool.py",
        "mmrl/workers/vector/env.py",
    ]
    assert sorted(pools) == expected, "environments lie in a WorkerPool"
