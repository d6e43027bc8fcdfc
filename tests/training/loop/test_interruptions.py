"""Runs that end early: kills at chosen points and signals, then a resume that ends like an uninterrupted run."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.config import load_run
from mmrl.errors import RunStopped, UserError
from mmrl.runs.checkpoint import Checkpoints
from mmrl.runs.folder import has_begun
from mmrl.runs.records import read_warnings
from mmrl.training.run import train
from mmrl.training.saving import RunSaver
from mmrl.training.trainer import Trainer
from tests.faults.sameness import differences
from tests.programs import Program, wait_until

CONFIG = """
recipe: tests.training.toy:ToyRecipe:ToyConfig
trainer: {steps: 6, tasks_per_step: 3, samples_per_task: 4, learning_rate: 0.05, epochs: 2}
evaluation: {every: 2}
checkpoint: {every: 3, keep: 0}
tracking: {quiet: true, tensorboard: false}
"""
WITHOUT_TIME = ("time/", "tokens/per_second", "memory/", "cost/seconds")


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text(CONFIG)
    return path


def run(config, folder, *words, resume=False, **options):
    entry, filled = load_run(config, [f"output_dir={config.parent / folder}", *words])
    return train(entry, filled, resume=resume, **options)


def lines(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "time" and not k.startswith(WITHOUT_TIME)} for row in rows]


def forget_extra(stopped, whole):
    """Remove the checkpoint written at the stop, which an uninterrupted run does not have."""
    for checkpoint in stopped.glob("checkpoints/step-*"):
        if not (whole / "checkpoints" / checkpoint.name).exists():
            shutil.rmtree(checkpoint)


def run_and_kill(config, folder, place, count, **options):
    """Train in a child process that kills itself after a given number of calls of a method."""
    owner, _, name = place.partition(".")
    owner = {"Trainer": Trainer, "RunSaver": RunSaver, "Checkpoints": Checkpoints}[owner]
    method, passed = getattr(owner, name), []

    def killed(*arguments, **keywords):
        if len(passed) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        passed.append(1)
        return method(*arguments, **keywords)

    def work():
        setattr(owner, name, killed)
        run(config, folder, **options)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(timeout=600)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("place", "count"),
    [
        ("Trainer.train_step", 0),  # after the first evaluation
        ("Trainer._log_step", 0),  # in the first step
        ("RunSaver.save", 0),
        ("Trainer.evaluate", 2),
        ("RunSaver.note_best", 0),  # between checkpoint and best.json
        ("Checkpoints._put", 1),  # a whole checkpoint that has no name yet
        ("RunSaver.save", 1),  # between the last evaluation and the last checkpoint
        ("Trainer._finish", 0),  # before result.json
    ],
)
def test_killed_run_resumes_and_nothing_is_lost_or_written_twice(config, place, count):
    whole = run(config, "whole")
    killed = config.parent / "killed"
    run_and_kill(config, "killed", place, count)
    with pytest.raises(UserError, match="already contains a run"):
        run(config, "killed")
    run(config, "killed", resume=True)
    assert differences(whole, killed) == []
    assert not list(killed.rglob(".partial-*"))
    assert not (killed / "run.lock").exists()


@pytest.mark.parametrize("place", ["Checkpoints.forget_old", "Checkpoints.mark_best"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_kill_before_old_checkpoints_are_removed_leaves_none_of_them(config, place, count):
    config.write_text(CONFIG.replace("every: 3, keep: 0", "every: 1, keep: 1"))
    whole = run(config, "whole")
    run_and_kill(config, "killed", place, count)
    assert differences(whole, run(config, "killed", resume=True)) == []
    assert len(list(whole.glob("checkpoints/step-*"))) <= 2


def test_results_without_a_checkpoint_are_moved_aside_never_cut(config, caplog):
    folder = run(config, "run", "trainer.steps=2", "checkpoint.every=0")
    before = {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "evaluations.jsonl", "result.json")}
    for path in sorted(folder.glob("checkpoints/**/*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    run(config, "run", "trainer.steps=2", "checkpoint.every=0", resume=True)
    (aside,) = (folder / "earlier").iterdir()
    assert {name: (aside / name).read_bytes() for name in before} == before
    assert (aside / "samples/step-000001/train.jsonl").is_file()
    assert f"restarts from the beginning; its files were moved to {aside}" in caplog.text
    assert [row["step"] for row in lines(folder / "metrics.jsonl")] == [1, 2]


def test_evaluation_by_hand_does_not_make_a_run(config):
    folder = config.parent / "run"
    assert main(["evaluate", str(config), f"output_dir={folder}"]) == 0
    assert not has_begun(folder)
    run(config, "run")
    assert [row["tag"] for row in lines(folder / "evaluations.jsonl")] == [
        "evaluate",
        *["before", *["during"] * 2, "after"],
    ]


def test_evaluation_by_hand_keeps_the_warnings_of_the_run(config, capsys):
    """An evaluation of the configuration writes into the same folder, perhaps while the run goes on."""
    folder = run(config, "run")
    (folder / "warnings.jsonl").write_text('{"step": 1, "kind": "logged", "message": "of the run"}\n')
    assert main(["evaluate", str(config), f"output_dir={folder}"]) == 0
    assert "of the run" in read_warnings(folder)
    assert f"`mmrl report {folder}` adds this evaluation to the run's report" in capsys.readouterr().out


def test_unreadable_lines_are_kept_in_a_copy(config, caplog):
    folder = run(config, "run")
    path = folder / "metrics.jsonl"
    text = path.read_text().replace('{"step": 2,', '{"step" 2,')
    path.write_text(text)
    run(config, "run", "trainer.steps=7", resume=True)
    (copy,) = folder.glob("metrics.jsonl.unreadable-*")
    assert copy.read_text() == text
    assert "has 1 lines that cannot be read" in caplog.text
    assert [row["step"] for row in lines(path)] == [1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("step", ['"3"', "[3]", "1.5", "null", "-1"])
def test_odd_steps_in_results_are_one_line(config, step, capsys):
    folder = run(config, "run")
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        good = (folder / name).read_text()
        (folder / name).write_text(good + f'{{"step": {step}}}\n')
        with pytest.raises(UserError, match=f"{name}: a line has the step"):
            run(config, "run", "trainer.steps=7", resume=True)
        assert main(["report", str(folder)]) == 2
        (folder / name).write_text(good)
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": "high"}\n')
    assert main(["report", str(folder)]) == 2
    assert "step 1 has reward/mean 'high'; expected a number" in capsys.readouterr().err


def start(config, folder, *words):
    return Program(["-m", "mmrl.cli", "train", str(config), f"output_dir={config.parent / folder}", *words])


def wait_for_step(folder, step):
    deadline = time.monotonic() + 600
    path = folder / "metrics.jsonl"
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().count("\n") >= step:
            return
        time.sleep(0.02)
    pytest.fail("the run did not come that far")


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGHUP, signal.SIGINT))]
)
def test_signal_ends_the_run_after_the_step_with_a_checkpoint(config, signum):
    config.write_text(CONFIG.replace("steps: 6", "steps: 300").replace("every: 3", "every: 0"))
    process = start(config, "stopped")
    wait_for_step(config.parent / "stopped", 4)
    process.send_signal(signum)
    code, _, errors = process.wait()
    assert code == 128 + signum
    first, last = errors.splitlines()
    assert f"{signum.name}: stopping after this step" in first
    (checkpoint,) = (config.parent / "stopped/checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert f"stopped after step {step} of 300; the newest checkpoint is from step {step}; continue with: " in last
    assert last.endswith("--resume")
    assert len(lines(config.parent / "stopped/metrics.jsonl")) == step
    steps = f"trainer.steps={step + 6}"  # as many as there are would take long
    whole, resumed = run(config, "whole", steps), run(config, "stopped", steps, resume=True)
    forget_extra(resumed, whole)
    assert differences(whole, resumed) == []


def stop_in_step_two(config, monkeypatch):
    """Stop a run after its second step, before the evaluation that is due then."""
    train_step = Trainer.train_step

    def stopped_in_step_two(self):
        if self.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        train_step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", stopped_in_step_two)
        with pytest.raises(RunStopped, match="stopped after step 2"):
            run(config, "stopped")
    assert [row["step"] for row in lines(config.parent / "stopped/evaluations.jsonl")] == [0]


def test_stop_between_step_and_evaluation_makes_the_evaluation_up(config, monkeypatch):
    whole = run(config, "whole")
    stop_in_step_two(config, monkeypatch)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # the handlers are the caller's again
    resumed = run(config, "stopped", resume=True)
    forget_extra(resumed, whole)
    assert differences(whole, resumed) == []


@pytest.mark.parametrize("by_hand", [False, True])
def test_kill_after_an_evaluation_that_was_made_up_writes_it_once(config, monkeypatch, by_hand):
    whole = run(config, "whole")
    stop_in_step_two(config, monkeypatch)
    run_and_kill(config, "stopped", "Trainer.train_step", 0, resume=True)
    records = config.parent / "stopped/evaluations.jsonl"
    assert [row["step"] for row in lines(records)] == [0, 2]
    if by_hand:  # as `mmrl evaluate` does; such a row stays
        with records.open("a") as file:
            file.write(json.dumps({"step": 2, "tag": "evaluate", "split": "other"}) + "\n")
    resumed = run(config, "stopped", resume=True)
    assert sorted(row["step"] for row in lines(records)) == [0, 2, *[2] * by_hand, 4, 6]
    forget_extra(resumed, whole)
    assert by_hand or differences(whole, resumed) == []


def test_stop_in_the_first_evaluation_keeps_it(config, monkeypatch):
    from tests.training.toy import ToyRecipe

    whole = run(config, "whole")
    evaluate = ToyRecipe.evaluate

    def stopped(self, *arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ToyRecipe, "evaluate", stopped)
        with pytest.raises(RunStopped, match="stopped after step 0"):
            run(config, "stopped")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "run", lambda trainer: None)
        stopped = run(config, "stopped", resume=True)
    assert (stopped / "checkpoints/step-000000").is_dir()
    assert not (stopped / "checkpoints/best.json").exists()  # its weights are untrained
    resumed = run(config, "stopped", resume=True)
    forget_extra(resumed, whole)
    assert differences(whole, resumed) == []


STUCK = """
import math, sys, time
from pathlib import Path
from mmrl.training import trainer
from tests.training.toy import ToyRecipe, main

trainer.ECHO_S = math.inf

def stuck(self, rollouts, step):
    while True:
        with open(sys.argv[1] + ".rounds", "a") as rounds:
            rounds.write(".")
        if Path(sys.argv[1] + ".late").exists():
            trainer.ECHO_S = 0.0
        time.sleep(0.02)

ToyRecipe.score = stuck
main()
"""


def test_second_ctrl_c_ends_at_once_without_a_traceback(config):
    process = Program(["-c", STUCK, str(config), f"output_dir={config.parent / 'run'}"])
    rounds = Path(f"{config}.rounds")
    wait_until(lambda: rounds.exists())

    def wait_rounds():
        """Two further rounds: signals that were sent before have been handled."""
        before = rounds.stat().st_size
        wait_until(lambda: rounds.stat().st_size > before + 1 or not process.running())

    process.send_signal(signal.SIGINT)
    wait_rounds()
    process.send_signal(signal.SIGINT)  # the echo of a launcher
    wait_rounds()
    assert process.running()
    Path(f"{config}.late").touch()
    wait_rounds()
    process.send_signal(signal.SIGINT)
    code, _, errors = process.wait()
    assert code == 130
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "mmrl: stopped immediately"
    run(config, "run", resume=True)


def test_second_run_in_a_folder_is_refused_and_the_first_continues(config):
    config.write_text(CONFIG.replace("steps: 6", "steps: 400"))
    first = start(config, "run")
    wait_for_step(config.parent / "run", 2)
    for words in ([], ["--resume"]):
        code, _, errors = start(config, "run", *words).wait()
        assert code == 2
        assert f"is in use by process {first.pid} on" in errors
        assert errors.count("\n") == 1
    first.send_signal(signal.SIGTERM)
    first.wait()
    steps = [row["step"] for row in lines(config.parent / "run/metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))


def test_checkpoints_come_by_time_and_do_not_choose_the_best(config, monkeypatch):
    words = ["checkpoint.every=0", "checkpoint.minutes=0.0000001"]
    monkeypatch.setattr("mmrl.training.saving.LARGEST_SHARE", 1e9)
    folder = run(config, "often", *words)
    assert len(list(folder.glob("checkpoints/step-*"))) == 6
    assert json.loads((folder / "checkpoints/best.json").read_text())["step"] == 6
    monkeypatch.setattr("mmrl.training.saving.LARGEST_SHARE", 1e-9)  # writing takes long
    assert len(list(run(config, "slow", *words).glob("checkpoints/step-*"))) == 2
    assert len(list(run(config, "never", "checkpoint.every=0", "checkpoint.minutes=0").glob("checkpoints/step-*"))) == 1


def test_damaged_checkpoint_is_refused_and_the_last_good_one_taken_on_request(config):
    whole = run(config, "whole")
    folder = run(config, "run")
    weights = folder / "checkpoints/step-000006/model/weights.pt"
    data = bytearray(weights.read_bytes())
    data[-400] ^= 1
    weights.write_bytes(data)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"weights\.pt has changed.*step 3 is intact: add --from-last-good"):
        run(config, "run", "seed=0", "trainer.steps=9", resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    run(config, "run", resume=True, from_last_good=True)
    assert (folder / "checkpoints/damaged-step-000006/state.pt").is_file()
    (folder / "checkpoints/damaged-step-000006").rename(config.parent / "damaged")
    assert differences(whole, folder) == []


def test_refused_resume_leaves_the_configuration(config, monkeypatch):
    from tests.training.toy import ToyRecipe

    folder = run(config, "run")
    text = (folder / "config.yaml").read_text()
    monkeypatch.setattr(ToyRecipe, "data_digest", lambda self: "other")
    with pytest.raises(UserError, match="made with different training tasks: their number"):
        run(config, "run", "trainer.steps=9", resume=True)
    assert (folder / "config.yaml").read_text() == text


def test_state_that_does_not_fit_the_configuration_is_one_line(config, monkeypatch):
    from tests.training.toy import ToyPolicy, ToyRecipe

    run(config, "run")

    def another(self, settings, init=ToyRecipe.__init__):
        init(self, settings)
        self.policy = ToyPolicy(5)

    monkeypatch.setattr(ToyRecipe, "__init__", another)
    with pytest.raises(UserError, match="does not match this configuration: RuntimeError") as refused:
        run(config, "run", "trainer.steps=9", resume=True)
    assert "\n" not in str(refused.value)
