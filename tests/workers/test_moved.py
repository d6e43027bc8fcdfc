"""Names of modules of an earlier version in configurations."""

import importlib.util
import json
from pathlib import Path

import pytest

from mmrl.workers import loading

MOVED = json.loads((Path(loading.__file__).with_name("moved.json")).read_text())


def exists(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is gone too
        return False


def test_an_old_name_gets_an_error_that_says_the_new_one():
    with pytest.raises(loading.LoadError, match=r"mmrl\.vlm\.engine\.policy is mmrl\.vlm\.engine\.vlm_policy now"):
        loading.find_function("mmrl.vlm.engine.policy:load_policy")


def test_old_names_are_gone_and_new_ones_exist():
    assert [old for old in MOVED if exists(old)] == []
    assert [new for new in MOVED.values() if not exists(new)] == []
