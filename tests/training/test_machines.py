"""Runs on several machines: two network namespaces with host names and folders of their own stand for two."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mmrl.errors import UserError
from mmrl.training import machines
from mmrl.training.machines import Watch, in_first_process
from mmrl.training.processes import make_accelerator

ROOT = Path(__file__).parents[2]
CONFIG = """
recipe: tests.training.toy:ToyRecipe:ToyConfig
trainer: {steps: 2, tasks_per_step: 4, samples_per_task: 4}
checkpoint: {every: 1, keep: 0}
tracking: {quiet: true, tensorboard: false}
"""
OWN = """
from tests.training.toy import ToyConfig, ToyRecipe

class Recipe(ToyRecipe):
    def __init__(self, config):
        super().__init__(config)
        self.train_tasks = {tasks}
"""
ADDRESSES = ("10.203.7.1", "10.203.7.2")


def test_a_process_that_failed_or_fell_silent_is_named_with_its_stage(monkeypatch):
    for name, seconds in (("BEAT_S", 0.05), ("SILENCE_S", 0.3), ("GRACE_S", 0.0)):
        monkeypatch.setattr(machines, name, seconds)
    store = torch.distributed.HashStore()
    one, failing, silent = (Watch(store, rank, 3) for rank in range(3))
    failing.start()
    failing.stage = lambda: "rollout of step 7"
    failing._thread.join(0.2)
    assert one._look(10.0) is None
    failing.close("failed", "ValueError: no cup")
    assert one.culprit().endswith("at rollout of step 7, failed: ValueError: no cup")
    assert one.culprit().startswith("process 1 of 3 on ")
    failing._write("done")
    assert "process 2 of 3" in (found := one.culprit())
    assert "at starting, has not sent a heartbeat for 0 s" in found
    silent._write("done")
    assert one.culprit() is None


def test_one_process_needs_no_other():
    def refuse() -> None:
        raise UserError("taken")

    assert in_first_process(None, lambda: 3) == in_first_process(make_accelerator(), lambda: 3) == 3
    with pytest.raises(UserError, match="taken"):
        in_first_process(make_accelerator(), refuse)


class Hosts:
    """Two machines that see each other over a cable, each with a folder."""

    def __init__(self, folder: Path) -> None:
        self.names = tuple(f"mmrl-{os.getpid()}-{side}" for side in "ab")
        self.folders = tuple(folder / side for side in "ab")
        links = [f"mmrl{os.getpid()}{side}" for side in "ab"]
        for name, own in zip(self.names, self.folders, strict=True):
            run("ip", "netns", "add", name)
            own.mkdir()
            (own / "toy.yaml").write_text(CONFIG)
        run("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(self.names, links, ADDRESSES, strict=True):
            run("ip", "link", "set", link, "netns", name, "name", "cable")
            for words in (("addr", "add", f"{address}/24", "dev", "cable"), ("link", "set", "cable", "up")):
                run("ip", "-n", name, *words)
            run("ip", "-n", name, "link", "set", "lo", "up")

    def start(self, side: int, *words: str, program: tuple[str, ...] = ("-m", "mmrl.cli")) -> subprocess.Popen:
        torchrun = f"{sys.executable} -m torch.distributed.run --nnodes 2 --nproc_per_node 1 --node_rank {side}"
        command = f"{torchrun} --master_addr {ADDRESSES[0]} --master_port 29533 {' '.join(program)}"
        command = f"hostname host-{'ab'[side]} && exec {command} train toy.yaml output_dir=run {' '.join(words)}"
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[side], "unshare", "--uts", "sh", "-c", command],
            cwd=self.folders[side],
            env=variables | {"ACCELERATE_USE_CPU": "true"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def both(self, *words: str) -> tuple[list[int], list[str]]:
        members = [self.start(side, *words) for side in (0, 1)]
        texts = [member.communicate(timeout=200)[0] for member in members]
        return [member.returncode for member in members], texts

    def close(self) -> None:
        for name in self.names:
            for process in run("ip", "netns", "pids", name).split():
                os.kill(int(process), signal.SIGKILL)
            run("ip", "netns", "del", name)


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts(tmp_path):
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    try:
        made = Hosts(tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr}")
    yield made
    made.close()


def weights(folder: Path, step: int) -> dict:
    return torch.load(folder / f"run/checkpoints/step-{step:06}/model/weights.pt")


def alone(folder: Path, *words: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "toy.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "mmrl.cli", "train", "toy.yaml", "output_dir=run", *words]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_two_machines_with_disks_of_their_own_train_and_resume_as_one_process(hosts, tmp_path):
    one = alone(tmp_path / "one", "trainer.steps=4")
    for steps, words in ((2, ()), (4, ("trainer.steps=4", "--resume"))):
        codes, texts = hosts.both(*words)
        assert codes == [0, 0], texts
        for name, value in weights(one, steps).items():
            torch.testing.assert_close(weights(hosts.folders[0], steps)[name], value, rtol=1e-5, atol=1e-6)
        written = [path for path in (hosts.folders[1] / "run").rglob("*") if path.is_file()]
        assert not written, "the second machine keeps nothing of the run"
    assert f"host-a writes {hosts.folders[0] / 'run'}; host-b in {hosts.folders[1]} reads" in texts[0]
    assert json.loads((hosts.folders[0] / "run/result.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_a_folder_that_is_taken_is_refused_on_both_machines(hosts):
    alone(hosts.folders[0])
    codes, texts = hosts.both()
    assert 0 not in codes
    assert all("run already contains a run" in text for text in texts), texts


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_process_that_is_lost_ends_the_other_with_its_name_and_stage(how, hosts):
    program = (str(ROOT / "tests/training/impatient.py"),)
    members = [hosts.start(side, "trainer.steps=1000000", program=program) for side in (0, 1)]
    rows = hosts.folders[0] / "run/metrics.jsonl"
    ends = time.monotonic() + 120
    while not (rows.is_file() and len(rows.read_text().splitlines()) > 3):
        assert time.monotonic() < ends, [member.poll() for member in members]
        time.sleep(0.2)
    if how == "cut off":
        run("ip", "-n", hosts.names[1], "link", "set", "cable", "down")
    else:
        ranks = run("ip", "netns", "pids", hosts.names[1]).split()
        ranks = [pid for pid in ranks if "torch.distributed.run" not in Path(f"/proc/{pid}/cmdline").read_text()]
        for pid in ranks:
            os.kill(int(pid), signal.SIGKILL)
    since = time.monotonic()
    text = members[0].communicate(timeout=100)[0]
    assert members[0].returncode != 0
    assert time.monotonic() - since < 60
    assert "process 1 of 2 on host-b, at " in text, text
    assert " of step " in text.partition("process 1 of 2 on host-b, at ")[2][:60]
    assert members[1].wait(timeout=100) != 0


@pytest.mark.slow
def test_other_training_data_on_one_machine_are_refused(hosts):
    for folder, tasks in zip(hosts.folders, ([0, 1, 2, 3], [0, 1, 2, 4]), strict=True):
        (folder / "toy.yaml").write_text(CONFIG.replace("tests.training.toy:ToyRecipe:", "own:Recipe:"))
        (folder / "own.py").write_text(OWN.format(tasks=tasks))
    codes, texts = hosts.both()
    assert 0 not in codes
    assert "the training data on host-b differ from those on host-a" in texts[0], texts
