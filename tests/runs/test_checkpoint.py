import json

import pytest
import torch

from mmrl.errors import UserError
from mmrl.runs.checkpoint import Checkpoints, check_model, link_or_copy, write_manifest


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


@pytest.mark.parametrize("kind", ["truncated", "missing", "flipped", "state", "manifest", "entry", "list"])
def test_damage_is_named_with_the_newest_whole_one(checkpoints, kind):
    damage(checkpoints.path(3), kind)
    with pytest.raises(UserError, match=f"{DAMAGE[kind]}.*step 2 is intact: add --from-last-good") as refused:
        checkpoints.latest()
    assert "\n" not in str(refused.value)


DAMAGE = {
    "truncated": "has 10 bytes instead of 1000",
    "missing": "model/weights is missing",
    "flipped": "model/weights has changed",
    "state": "state.pt has changed",
    "manifest": "manifest.json cannot be read",
    "entry": "its entry for state.pt is 'x'",
    "list": "manifest.json cannot be read",
}


def damage(folder, kind):
    weights, state, manifest = folder / "model" / "weights", folder / "state.pt", folder / "manifest.json"
    if kind == "truncated":
        weights.write_bytes(b"x" * 10)
    elif kind == "missing":
        weights.unlink()
    elif kind in ("flipped", "state"):
        path = weights if kind == "flipped" else state
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    else:
        entries = json.loads(manifest.read_text()) | {"state.pt": "x"}
        manifest.write_text({"manifest": "{", "entry": json.dumps(entries), "list": "[1]"}[kind])


def test_sizes_alone_are_checked_where_the_first_release_wrote_no_more(checkpoints):
    manifest = checkpoints.path(3) / "manifest.json"
    manifest.write_text(json.dumps({name: entry["bytes"] for name, entry in json.loads(manifest.read_text()).items()}))
    assert checkpoints.latest() == checkpoints.path(3)
    (checkpoints.path(3) / "model" / "weights").write_bytes(b"x")
    with pytest.raises(UserError, match="has 1 bytes instead of 1000"):
        checkpoints.latest()


def test_damaged_ones_are_set_aside_never_deleted(checkpoints, caplog):
    damage(checkpoints.path(3), "flipped")
    checkpoints.set_damaged_aside()
    assert checkpoints.latest() == checkpoints.path(2)
    aside = checkpoints.folder / "damaged-step-000003"
    assert (aside / "state.pt").is_file()
    assert "model/weights has changed" in caplog.text
    checkpoints.save(3, {"step": 3}, write)
    damage(checkpoints.path(3), "missing")
    checkpoints.set_damaged_aside()
    assert len(list(checkpoints.folder.glob("damaged-step-000003*"))) == 2
    damage(checkpoints.path(2), "state")
    with pytest.raises(UserError, match=r"no checkpoint in .* is intact"):
        checkpoints.set_damaged_aside()
    assert checkpoints.steps() == [2]


def test_state_with_the_right_checksum_that_cannot_be_read_is_damage_too(checkpoints):
    (checkpoints.path(3) / "state.pt").write_bytes(b"no archive")
    write_manifest(checkpoints.path(3))
    with pytest.raises(UserError, match=r"state\.pt cannot be read .*--from-last-good"):
        Checkpoints.load_state(checkpoints.latest())
    checkpoints.set_damaged_aside()
    assert checkpoints.latest() == checkpoints.path(2)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        "null",
        '{"step": "2", "metric": "a", "value": 1}',
        '{"step": 2, "metric": "a", "value": NaN}',
        '{"step": true, "metric": "a", "value": 1}',
        '{"metric": "a", "value": 1}',
        "[" * 100_000,
    ],
)
def test_odd_best_file_is_one_line(checkpoints, text):
    (checkpoints.folder / "best.json").write_text(text)
    with pytest.raises(UserError, match=r"best\.json is damaged: .*; delete it") as refused:
        checkpoints.best()
    assert "\n" not in str(refused.value)


def test_a_checkpoint_that_was_being_replaced_is_restored_after_a_kill(checkpoints):
    checkpoints.path(3).rename(checkpoints.folder / ".replaced-step-000003")
    checkpoints.remove_partial()
    assert checkpoints.latest() == checkpoints.path(3)


def test_model_folder_of_a_checkpoint_is_verified(checkpoints, tmp_path):
    check_model(checkpoints.path(3) / "model")
    check_model(tmp_path)  # no checkpoint
    damage(checkpoints.path(3), "state")
    check_model(checkpoints.path(3) / "model")
    damage(checkpoints.path(3), "flipped")
    with pytest.raises(UserError, match="model/weights has changed"):
        check_model(checkpoints.path(3) / "model")


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
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    found -= {"manifest.json", "README.md"}  # neither describes itself
    assert set(listed) == found == {"model/weights", "state.pt"}


def test_link_or_copy_has_the_same_files(tmp_path):
    source = tmp_path / "a"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "f").write_text("hello")
    link_or_copy(source, tmp_path / "b")
    assert (tmp_path / "b" / "sub" / "f").read_text() == "hello"
