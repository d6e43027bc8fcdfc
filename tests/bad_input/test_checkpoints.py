"""Full disks, damaged checkpoints and resumes that do not fit."""

import contextlib
import resource
import shutil

import pytest

from mmrl.training.trainer import Trainer
from tests.bad_input.conftest import blank, truncate
from tests.bad_input.supervised import supervised


@contextlib.contextmanager
def small_disk(size):
    """Let no file grow above `size` bytes, which fails in the writers as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("part", ["model/model.safetensors", "state.pt"])
@pytest.mark.parametrize("full_at", [1, 2])
def test_full_disk_at_checkpoint_time(part, full_at, made, lab, mmrl, monkeypatch):
    size = (made / "finished/checkpoints/step-000002" / part).stat().st_size
    save = Trainer.save

    def save_with_little_space(trainer):
        with small_disk(size - 5000) if trainer.step == full_at else contextlib.nullcontext():
            save(trainer)

    monkeypatch.setattr(Trainer, "save", save_with_little_space)
    code, lines = mmrl("train", lab.config)
    (line,) = lines
    assert f"checkpoint at step {full_at} could not be written to {lab.run}/checkpoints" in line
    names = sorted(path.name for path in (lab.run / "checkpoints").iterdir() if path.name != "best.json")
    assert names == [f"step-00000{3 - full_at}"]
    if full_at == 2:
        assert code == 1
        assert line.startswith("mmrl: run failed: ")
        assert "kept steps: [1]" in line
    else:
        assert code == 0
        assert line.startswith("mmrl: error: ")
        assert [row["checkpoint/failed"] for row in lab.metrics()] == [0, 1]


DAMAGES = {
    "state truncated": (lambda folder: truncate(folder / "state.pt"), "state.pt has "),
    "weights truncated": (lambda folder: truncate(folder / "model/model.safetensors"), "model/model.safetensors has "),
    "file missing": (lambda folder: (folder / "model/config.json").unlink(), "model/config.json is missing"),
    "manifest missing": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
    "manifest truncated": (lambda folder: truncate(folder / "manifest.json"), "manifest.json cannot be read"),
    "manifest of another kind": (
        lambda folder: (folder / "manifest.json").write_text("[]"),
        "manifest.json cannot be read",
    ),
    "state blank": (lambda folder: blank(folder / "state.pt"), "state.pt has changed"),
    "weights blank": (
        lambda folder: blank(folder / "model/model.safetensors"),
        "model/model.safetensors has changed",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_on_resume(damage, made, lab, refused):
    shutil.copytree(made / "finished", lab.run)
    change, message = DAMAGES[damage]
    change(lab.run / "checkpoints/step-000002")
    line = refused("train", made / "good.yaml", "evaluation.at_end=true", f"output_dir={lab.run}", "--resume")
    assert message in line
    assert f"{lab.run}/checkpoints/step-000002" in line
    advice = f"step 1 is intact: add --from-last-good to resume from it, or delete {lab.run}/checkpoints/step-000002"
    assert line.endswith(advice)
    assert (lab.run / "checkpoints/step-000001").is_dir()


def test_resume_from_the_older_checkpoint_works(made, lab, mmrl):
    shutil.copytree(made / "finished", lab.run)
    shutil.rmtree(lab.run / "checkpoints/step-000002")
    assert mmrl("train", made / "good.yaml", "evaluation.at_end=true", f"output_dir={lab.run}", "--resume") == (0, [])
    assert [row["step"] for row in lab.metrics()] == [1, 2]


def test_nothing_to_resume(lab, refused):
    assert "nothing to resume" in refused("train", lab.config, "--resume")
    (lab.run / "checkpoints").mkdir(parents=True)
    assert "nothing to resume" in refused("train", lab.config, "--resume")


def test_resume_with_other_settings(made, lab, mmrl, refused):
    shutil.copytree(made / "finished", lab.run)
    rows = lab.data(*lab.rows[:3])
    code, lines = mmrl("train", lab.config, rows, "trainer.steps=3", "--resume")
    assert code == 2
    (warning, error) = lines
    assert "resuming with different settings than before: " in warning
    assert "trainer.steps 2 -> 3" in warning
    assert "the checkpoint was made with 6 training tasks, but now there are 3" in error
    assert "is a run of recipe 'vlm' and cannot be continued with 'sft'" in refused(
        "train", supervised(lab), "--resume"
    )


def test_resume_with_other_data_of_the_same_length(made, lab, mmrl):
    shutil.copytree(made / "finished", lab.run)
    before = (lab.run / "config.yaml").read_bytes()
    rows = lab.data(*[{**row, "answer": "another"} for row in lab.rows])
    code, (_, error) = mmrl("train", lab.config, rows, "trainer.steps=3", "--resume")
    assert code == 2
    assert "made with different training tasks: their number (6) is the same, but their contents differ" in error
    assert (lab.run / "config.yaml").read_bytes() == before


def test_folder_of_another_run(made, lab, refused):
    shutil.copytree(made / "finished", lab.run)
    before = {path: path.read_bytes() for path in lab.run.rglob("*") if path.is_file()}
    line = refused("train", lab.config, "seed=5")
    assert f"{lab.run} already contains a run; add --resume" in line
    assert "output_dir=" in line
    assert {path: path.read_bytes() for path in lab.run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("below", ["", "/run"])
def test_output_folder_that_is_a_file(below, lab, refused):
    said = refused("train", lab.config, f"output_dir={lab.config}{below}")
    assert f"output_dir {lab.config}{below}: {lab.config} is not a folder; choose another path" in said


@pytest.mark.parametrize(
    ("override", "message"),
    [("output_dir=''", "output_dir is empty"), (f"output_dir={'x' * 256}/y", "output_dir has a name of 256 bytes")],
)
def test_output_folders_that_cannot_be(override, message, lab, refused):
    assert message in refused("train", lab.config, override)


def test_resume_with_other_contents_of_named_files(lab, mmrl):
    template, rewards = lab.folder / "mine.jinja", lab.folder / "mine.py"
    template.write_text((lab.model / "chat_template.jinja").read_text())
    rewards.write_text("def mine(prompts, completions): return [float(len(text)) for text in completions]\n")
    settings = [f"model.chat_template={template}", f"rewards=[{{name: mine, function: '{rewards}:mine'}}]"]

    def resumed(*options):
        code, lines = mmrl("train", lab.config, *settings, *options)
        assert code == 0
        return [line for line in lines if "different settings" in line]

    assert resumed() == []
    template.write_text(template.read_text() + "{# another #}")
    rewards.write_text(rewards.read_text() + "# another\n")
    (warning,) = resumed("trainer.steps=3", "--resume")
    assert "contents of model.chat_template " in warning
    assert "contents of rewards.0.function " in warning
    assert "contents of data" not in warning
    assert resumed("trainer.steps=3", "--resume") == []
