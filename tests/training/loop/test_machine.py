import os
import signal
import subprocess
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from mmrl.training import processes as machine
from mmrl.workers import memory
from mmrl.workers.engine import WorkerSpec, _variables


@pytest.fixture
def probes(monkeypatch):
    """A machine that reports AMX and has no GPU; yields the list of started probes."""
    monkeypatch.setattr(machine, "_announces_amx", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(machine.LIMIT, "")
    monkeypatch.delenv(machine.LIMIT)
    machine.avoid_refused_instructions.cache_clear()
    started = []
    yield started
    machine.avoid_refused_instructions.cache_clear()


def answer(monkeypatch, probes, code):
    run = lambda command, **_: probes.append(command) or SimpleNamespace(returncode=code)  # noqa: E731
    monkeypatch.setattr(subprocess, "run", run)


def test_refused_instructions_are_avoided(monkeypatch, probes, caplog):
    answer(monkeypatch, probes, -signal.SIGILL)
    machine.avoid_refused_instructions()
    machine.avoid_refused_instructions()
    assert len(probes) == 1
    assert os.environ[machine.LIMIT] == "AVX512_CORE_BF16"
    assert "does not execute them" in caplog.text


def test_a_machine_with_working_features_is_left_alone(monkeypatch, probes):
    answer(monkeypatch, probes, 0)
    machine.avoid_refused_instructions()
    assert len(probes) == 1
    assert machine.LIMIT not in os.environ


def test_a_limit_that_was_set_stays(monkeypatch, probes):
    answer(monkeypatch, probes, -signal.SIGILL)
    monkeypatch.setenv(machine.LIMIT, "AVX2")
    machine.avoid_refused_instructions()
    assert not probes
    assert os.environ[machine.LIMIT] == "AVX2"


def test_training_processes_share_the_cores_of_a_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    found = []
    for processes in ("1", "4", "12"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        found.append(memory.usable_cores())
    assert found == [6, 1, 1]


def test_workers_compute_and_draw_on_the_gpu_of_their_training_process(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory.device_variables() == {}
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    own = _variables(WorkerSpec("mmrl.rewards.worker:Service"))
    assert (own["CUDA_VISIBLE_DEVICES"], own["MUJOCO_EGL_DEVICE_ID"]) == ("1", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert memory.device_variables() == {"CUDA_VISIBLE_DEVICES": "2", "MUJOCO_EGL_DEVICE_ID": "2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert memory.device_variables() == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert memory.device_variables() == {}


def test_processes_wait_for_the_first_one_to_build_models_and_write_checkpoints():
    assert machine.make_accelerator().init_handler.timeout > timedelta(hours=1)
