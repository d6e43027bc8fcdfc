"""Runs of an experiment that have rollout workers share one Ray, which ends with the comparison."""

import json
import os
import signal
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from omegaconf import OmegaConf

from mmrl.comparison.run import SharedRay, run_experiment
from mmrl.training.ray_rollers import RayLink
from mmrl.training.settings import RollersConfig
from tests.programs import ROOT, Program

BASE = {
    "recipe": "robot_ppo",
    "sim": {"kind": "tests.robotics.line_sim:open_line"},
    "model": {"kind": "tests.robotics.line_policies:make_walker", "chunk": 1, "options": {"bias": 0.1}},
    "data": {"tasks": ["right"], "layouts": 20},
    "reward": {"success": 1.0, "potential": 1.0},
    "trainer": {"tasks_per_step": 2, "samples_per_task": 4, "threads": 1},
    "tracking": {"quiet": True, "tensorboard": False},
    "rollers": {"engine": "ray", "workers": 1},
}
EXPERIMENT = {
    "name": "workers",
    "base": "base.yaml",
    "arms": {"slow": {"overrides": {"trainer.learning_rate": 0.01}}, "fast": None},
    "baseline": "fast",
    "seeds": [1],
    "metric": "episode/success",
    "metric_over": "steps",
}


def write(folder, steps):
    OmegaConf.save(OmegaConf.create(BASE | {"trainer": BASE["trainer"] | {"steps": steps}}), folder / "base.yaml")
    OmegaConf.save(OmegaConf.create(EXPERIMENT), folder / "experiment.yaml")
    return folder / "experiment.yaml"


@pytest.mark.slow
def test_two_runs_join_one_ray_that_ends_with_the_comparison(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    starts, start = [], ray.init

    def started(*given, **options):
        starts.append(start(*given, **options))
        return starts[-1]

    monkeypatch.setattr(ray, "init", started)
    before = signal.getsignal(signal.SIGTERM)
    folder = run_experiment(write(tmp_path, 2), tmp_path / "out")
    assert len(starts) == 1
    configs = [OmegaConf.load(folder / f"runs/{arm}/seed-1/config.yaml") for arm in EXPERIMENT["arms"]]
    assert {config.rollers.address for config in configs} == {starts[0].address_info["gcs_address"]}
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == before
    comparison = json.loads((folder / "comparison.json").read_text())
    assert comparison["status"] == "done"
    assert "rollers.address" not in comparison["arms"]["fast"]["command"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_comparison_leaves_no_ray_behind(number, tmp_path):
    pytest.importorskip("ray")
    path = write(tmp_path, 100_000)
    allowed = [word for part in ("sim", "model") for word in ("--allow", BASE[part]["kind"])]
    program = Program(["-m", "mmrl.cli", "compare", str(path), "--output", str(tmp_path / "out"), *allowed])
    steps = [tmp_path / f"out/runs/{arm}/seed-1/metrics.jsonl" for arm in EXPERIMENT["arms"]]
    ends = time.monotonic() + 120
    while not all(file.is_file() and file.stat().st_size for file in steps):
        assert time.monotonic() < ends
        assert program.running()
        time.sleep(0.2)
    children = psutil.Process(program.pid).children(recursive=True)
    names = {child.name() for child in children}
    assert {"raylet", "gcs_server"} <= names
    workers = [child for child in children if "RayWorker" in child.name()]
    assert [worker.nice() for worker in workers] == [psutil.Process().nice()] * 2
    os.kill(program.pid, number)
    assert program.wait()[0] == 128 + number
    _, left = psutil.wait_procs(children, timeout=15)
    assert left == []


def test_no_more_runs_at_a_time_than_the_gpus_hold(monkeypatch):
    starts = []
    monkeypatch.setattr(
        "mmrl.training.ray_rollers.start_ray", lambda cores: starts.append(cores) or RayLink(True, gcs="here:1")
    )
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(cluster_resources=lambda: {"GPU": 4.0}))
    configs = [SimpleNamespace(rollers=RollersConfig("ray", 2, num_gpus=share)) for share in (0.0, 0.5, 1.0)]
    others = [SimpleNamespace(), SimpleNamespace(rollers=RollersConfig("ray", 64, "auto"))]
    shared = SharedRay([*configs, *others], 5)
    assert [shared.arguments(config) for config in others] == [[], []]
    assert (shared.jobs, starts) == (5, [])
    assert [shared.arguments(config) for config in configs] == [["rollers.address=here:1"]] * 3
    assert (shared.jobs, starts) == (2, [10.0])
