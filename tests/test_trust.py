"""Reading files and messages cannot run code."""

import ast
from pathlib import Path

import numpy as np
import pytest

PROJECT = Path(__file__).resolve().parents[1]
FILES = [path for room in ("mmrl", "diffusion", "robotics") for path in (PROJECT / room).rglob("*.py")]


def calls(path):
    """Dotted names of a file's calls, with the keyword arguments that are literals."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            literal = {key.arg: key.value.value for key in node.keywords if isinstance(key.value, ast.Constant)}
            yield ast.unparse(node.func), literal


@pytest.mark.parametrize("room", ["mmrl", "diffusion", "robotics"])
def test_tensors_and_arrays_are_loaded_without_pickles(room):
    for path in (PROJECT / room).rglob("*.py"):
        for name, options in calls(path):
            if name == "torch.load":
                assert options.get("weights_only") is True, path
            if name in ("np.load", "numpy.load"):
                assert not options.get("allow_pickle"), path


def test_nothing_is_unpickled_or_executed():
    assert len(FILES) > 100
    forbidden = {"eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
    for path in FILES:
        assert not forbidden & {name for name, _ in calls(path)}, path
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing", "joblib"} & {
                module.partition(".")[0] for module in modules
            }, path
        assert not any(options.get("shell") for _, options in calls(path)), path
        assert not any(options.get("trust_remote_code") for _, options in calls(path)), path


def test_numpy_refuses_pickled_arrays(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        np.load(tmp_path / "objects.npy")
