"""`mmrl doctor RUN`: its findings in a run folder, and its advice."""

import json
import shutil

import pytest

from mmrl.cli import main
from mmrl.cli.doctor import check_run
from mmrl.config import load_run
from mmrl.runs.folder import RunLock
from mmrl.training.run import train

CONFIG = """
recipe: tests.training.toy:ToyRecipe:ToyConfig
trainer: {steps: 4, tasks_per_step: 3, samples_per_task: 4}
checkpoint: {every: 1, keep: 0}
tracking: {quiet: true, tensorboard: false}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "toy.yaml").write_text(CONFIG)
    return train(*load_run(folder / "toy.yaml", [f"output_dir={folder / 'run'}"]))


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def findings(run):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    found = {finding.name: finding for finding in check_run(run)}
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    return found


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_finished_run_is_sound(run, capsys):
    found = findings(run)
    assert {finding.state for finding in found.values()} == {"ok"}
    assert found["metrics.jsonl"].found == "steps 1 to 4"
    assert found["resume"].found == "the run is finished"
    assert main(["doctor", str(run)]) == 0
    assert "the run is sound: 0 failures, 0 warnings, 0 notes" in capsys.readouterr().out


def test_interrupted_run_can_be_resumed_with_the_command_that_is_given(run):
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints/step-000004")
    found = findings(run)
    assert found["resume"].found == "continues from step 3"
    program, *words = found["resume"].advice.split()
    assert program == "mmrl"
    assert main(words) == 0
    assert findings(run)["resume"].found == "the run is finished"


def test_damaged_checkpoint_is_named_and_the_suggested_command_works(run, capsys):
    (run / "result.json").unlink()
    flip(run / "checkpoints/step-000004/model/weights.pt")
    found = findings(run)
    assert found["step-000004"].state == "fail"
    assert "model/weights.pt has changed" in found["step-000004"].found
    assert found["resume"].found == "continues from step 3, the newest intact checkpoint"
    assert main(["doctor", str(run)]) == 1
    assert "something in the run is damaged" in capsys.readouterr().out
    assert main(found["resume"].advice.split()[1:]) == 0
    assert findings(run)["checkpoints"].found == "1 set aside"
    for folder in run.glob("checkpoints/step-*"):
        flip(folder / "state.pt")
    (run / "result.json").unlink()
    assert findings(run)["resume"].state == "fail"


def test_run_without_a_checkpoint(run):
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints")
    assert findings(run)["resume"].found == "no checkpoint: the run would start from the beginning"


def test_a_run_of_a_python_program_is_continued_by_the_program(run):
    config = run / "config.yaml"
    config.write_text(config.read_text() + "\n# function: given:right\n")
    assert (
        findings(run)["resume"].advice
        == "to train longer: run its Python program again with resume=True and more steps"
    )
    (run / "result.json").unlink()
    assert findings(run)["resume"].advice == "run its Python program again with resume=True"
    config.unlink()
    assert "--resume" in findings(run)["resume"].advice


def test_lock_of_a_running_process(run):
    assert findings(run)["lock"].state == "ok"
    with RunLock(run):
        found = findings(run)["lock"]
    assert (found.state, "in use by process" in found.found) == ("warn", True)


@pytest.mark.parametrize(
    ("file", "text", "state", "said"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"step": 3}\n{"step": 3}\n', "warn", "1 missing, 1 written twice"),
        ("metrics.jsonl", '{"step": 1}\n{"ste', "ok", "steps 1 to 1"),
        ("metrics.jsonl", '{"step": "one"}\n', "fail", "cannot be used"),
        ("config.yaml", "recipe: [", "fail", "cannot be used"),
        ("checkpoints/best.json", "[]", "fail", "cannot be used"),
        ("checkpoints/best.json", '{"step": 9, "metric": "a", "value": 1}', "warn", "does not exist"),
        ("result.json", "{", "fail", "cannot be used"),
    ],
)
def test_odd_files_are_findings(run, file, text, state, said, capsys):
    (run / file).write_text(text)
    found = [finding for finding in check_run(run) if said in finding.found]
    assert [finding.state for finding in found] == [state]
    assert main(["doctor", str(run), "--json"]) == (1 if state == "fail" else 0)
    assert json.loads(capsys.readouterr().out)["usable"] is (state != "fail")


def test_folder_that_is_not_a_run(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
