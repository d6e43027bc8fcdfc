"""Messages of robot code if a package of another extra is not installed."""

import sys

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.data import robot_features
from robotics.data.reader import LeRobotReader
from robotics.data.writer import EpisodeWriter
from robotics.methods.progress import ProgressSettings, progress_rewards


def test_datasets_name_missing_columns(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # as if it were not installed
    message = r"a LeRobotDataset needs pyarrow, which is not installed: pip install 'mmrl-suite\[vla\]'"
    with pytest.raises(UserError, match=message):
        EpisodeWriter(tmp_path / "demos", fps=10, features=robot_features(state=2, action=2, cameras={}))
    assert not (tmp_path / "demos").exists()
    with pytest.raises(UserError, match=message):
        LeRobotReader(tmp_path / "demos")


def test_the_progress_reward_names_its_requirements(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    success = np.array([True, True, False, False])
    latents = np.random.default_rng(0).normal(size=(4, 3))
    with pytest.raises(UserError, match=r"clustering of successes needs sklearn.*mmrl-suite\[vla\]"):
        progress_rewards(latents, success, np.ones(4, bool), ["push"] * 4, ProgressSettings())
