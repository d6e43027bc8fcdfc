from __future__ import annotations

import json

import pytest
import torch

from mmrl.errors import UserError
from mmrl.training.record.checkpoint import Checkpoints, link_or_copy


def write(folder):
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_bytes(b"x" * 1000)


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2, 3):
        made.save(step, {"step": step, "values": torch.arange(3)}, write)
    return made


def test_newest_and_best_are_kept(checkpoints):
    assert checkpoints.steps() == [2, 3]
    checkpoints.mark_best(2, "accuracy/greedy", 0.5)
    for step in (4, 5, 6):
        checkpoints.save(step, {"step": step}, write)
    assert checkpoints.steps() == [2, 5, 6]
    assert checkpoints.best() == {"step": 2, "metric": "accuracy/greedy", "value": 0.5}


def test_latest_is_read_back(checkpoints):
    state = Checkpoints.load_state(checkpoints.latest())
    assert state["step"] == 3
    assert torch.equal(state["values"], torch.arange(3))


@pytest.mark.parametrize("kind", ["truncated", "missing", "manifest"])
def test_damage_is_named_with_advice(checkpoints, kind):
    newest = checkpoints.path(3)
    if kind == "truncated":
        (newest / "model" / "weights").write_bytes(b"x" * 10)
    elif kind == "missing":
        (newest / "model" / "weights").unlink()
    else:
        (newest / "manifest.json").write_text("{")
    culprit = {
        "truncated": "has 10 bytes instead of 1000",
        "missing": "model/weights is missing",
        "manifest": "manifest",
    }
    with pytest.raises(UserError, match=f"{culprit[kind]}.*resume from step 2"):
        checkpoints.latest()


def test_nothing_to_resume(tmp_path):
    with pytest.raises(UserError, match="nothing to resume"):
        Checkpoints(tmp_path / "none").latest()


def test_interrupted_write_leaves_the_old_and_is_cleaned_up(checkpoints):
    def killed(folder):
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(4, {}, killed)
    assert checkpoints.steps() == [2, 3]
    half = checkpoints.folder / ".partial-step-000009"
    half.mkdir()
    (half / "x").write_text("x")
    checkpoints.remove_partial()
    assert not half.exists()


def test_manifest_lists_every_file(checkpoints):
    folder = checkpoints.path(3)
    listed = json.loads((folder / "manifest.json").read_text())
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"manifest.json"}
    assert set(listed) == found == {"model/weights", "state.pt"}


def test_link_or_copy_has_the_same_files(tmp_path):
    source = tmp_path / "a"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "f").write_text("hello")
    link_or_copy(source, tmp_path / "b")
    assert (tmp_path / "b" / "sub" / "f").read_text() == "hello"
