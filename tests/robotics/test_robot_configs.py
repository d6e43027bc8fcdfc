"""Every file under configs/robotics loads, and those of the tabletop take two steps; the demo's do in test_demo."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

from mmrl.config import load_run
from mmrl.training.run import last_model, train
from robotics.policies.base.action_policy import open_policy
from robotics.policies.gaussian import GaussianActionPolicy
from robotics.policies.policy_loading import OPTIONS
from tests.robotics.tiny_runs import TWO_STEPS, save_tiny_policy

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "robotics").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_loads(path):
    entry, config = load_run(path)
    assert entry.target.startswith("robotics.")
    assert config.eval_data


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_options_of_a_new_policy_are_those_of_its_kind(path):
    """A policy that needs another run's cannot be opened here, but a wrong option would end its run."""
    _, config = load_run(path)
    model = getattr(config, "model", None)
    spec = OPTIONS.get(getattr(model, "kind", ""))
    if spec is None or model.path:
        return
    module, name = spec.split(":")
    known = {field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))} | {"vlm"}
    assert set(model.options) <= known


@pytest.mark.slow
def test_sparse_and_dense_grpo_take_two_steps(tmp_path, backend):
    texts = ["touch the red cube", "push the red cube into the blue zone"]
    policy = save_tiny_policy(tmp_path / "policy", texts)
    for reward in ("sparse", "potential"):
        overrides = [*TWO_STEPS, f"output_dir={tmp_path / reward}", f"model.path={policy}", f"reward={reward}"]
        entry, config = load_run(CONFIGS[0].with_name("tabletop_grpo.yaml"), overrides)
        run_dir = train(entry, config)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
        assert [row["step"] for row in rows] == [1, 2]
        assert all(0 <= row["reward/potential"] < 1 for row in rows)


@pytest.mark.slow
def test_the_demo_with_a_gaussian_head_takes_two_steps(tmp_path, backend, monkeypatch):
    monkeypatch.setattr("mmrl.report.page.write_report", lambda run_dir: None)
    size = "model.options.encoder={width: 32, heads: 2, layers: 1, channels: 8, keypoints: 4}"
    small = ["demonstrations.build_options.tasks=[reach]", "demonstrations.build_options.episodes=2", size]
    small += [f"demonstrations.path={tmp_path / 'demonstrations'}", "demonstrations.build_options.image_size=32"]
    steps = ["sim.image_size=32", "sim.workers=1", "trainer.steps=2", "eval_data={}", "tracking.quiet=true"]
    entry, config = load_run(
        CONFIGS[0].with_name("demo_robot_gaussian_clone.yaml"),
        [*small, *steps, "trainer.tasks_per_step=8", f"output_dir={tmp_path / 'clone'}"],
    )
    assert config.model.kind == "gaussian"
    clone = train(entry, config)
    overrides = [*steps, f"model.path={last_model(clone)}", f"output_dir={tmp_path / 'ppo'}", "sim.horizon=8"]
    overrides += ["trainer.tasks_per_step=2", "trainer.minibatches_per_step=1"]
    entry, config = load_run(CONFIGS[0].with_name("demo_robot_gaussian_ppo.yaml"), overrides)
    run_dir = train(entry, config)
    assert isinstance(open_policy(last_model(run_dir)), GaussianActionPolicy)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.slow
def test_clone_and_srpo_take_two_steps(tmp_path, backend):
    demonstrations = f"demonstrations.path={tmp_path / 'demonstrations'}"
    small = ["demonstrations.build_options.tasks=[reach]", "demonstrations.build_options.episodes=2"]
    size = "model.options.encoder={width: 32, heads: 2, layers: 1, channels: 8, keypoints: 4}"
    shrunk = [demonstrations, *small, "demonstrations.build_options.image_size=32", size, "trainer.tasks_per_step=8"]
    steps = ["sim.image_size=32", "sim.workers=1", "trainer.steps=2", "eval_data={}", "tracking.quiet=true"]
    entry, config = load_run(
        CONFIGS[0].with_name("tabletop_clone.yaml"), [*shrunk, *steps, f"output_dir={tmp_path / 'clone'}"]
    )
    clone = train(entry, config)
    latent = [f"latent.path={tmp_path / 'encoder'}", f"latent.build_options.data={tmp_path / 'demonstrations'}"]
    latent += ["latent.build_options.steps=2", "latent.build_options.batch=2"]
    sizes = ["trainer.tasks_per_step=2", "trainer.samples_per_task=2", "trainer.minibatches_per_step=1"]
    overrides = [*latent, *sizes, *steps, f"model.path={last_model(clone)}", f"output_dir={tmp_path / 'srpo'}"]
    entry, config = load_run(CONFIGS[0].with_name("tabletop_srpo.yaml"), [*overrides, "sim.horizon=8"])
    rows = [json.loads(line) for line in (train(entry, config) / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
