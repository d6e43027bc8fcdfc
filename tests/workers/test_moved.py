"""Names of modules of an earlier version in configurations."""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

from mmrl.workers import loading

MOVED = json.loads((Path(loading.__file__).with_name("moved.json")).read_text())


def exists(name):
    """Whether it is a module, or a name that a package gives out."""
    try:
        if importlib.util.find_spec(name) is not None:
            return True
    except ModuleNotFoundError:  # its package is gone too
        return False
    package, _, last = name.rpartition(".")
    return last in getattr(importlib.import_module(package), "__all__", ())


def test_an_old_name_gets_an_error_that_says_the_new_one():
    with pytest.raises(
        loading.LoadError, match=r"mmrl\.vlm\.engine\.policy was renamed to mmrl\.vlm\.engine\.vlm_policy"
    ):
        loading.find_function("mmrl.vlm.engine.policy:load_policy")


def test_old_names_are_gone_and_new_ones_exist():
    assert [old for old in MOVED if exists(old)] == []
    assert [new for new in MOVED.values() if not exists(new)] == []


def test_an_old_class_of_a_package_gets_an_error_that_says_the_new_one():
    with pytest.raises(ImportError, match=r"diffusion\.ModelConfig is diffusion\.PipelineConfig now"):
        exec("from diffusion import ModelConfig")
    assert not hasattr(importlib.import_module("diffusion"), "NeverThere")
