"""Every file under configs/agents builds its recipe and takes two steps, on a tiny model in a small grid."""

import json
import re
from pathlib import Path

import pytest

from mmrl.config import load_run
from mmrl.training.run import train
from tests.fitting import first_of_each_recipe, fitting, group_size

RUNS = sorted((Path(__file__).parents[2] / "configs/agents").glob("*.yaml"))
SMALL = [
    "trainer.steps=2",
    "trainer.tasks_per_step=2",
    "trainer.minibatches_per_step=1",
    "trainer.warmup_steps=0",
    "trainer.learning_rate=1e-3",
    "trainer.skip_steps_without_gradient=false",  # a tiny random model earns nothing
    "environment.workers=1",
    f"environment.factory={Path(__file__).with_name('small_grid.py')}:small_grid",
    "environment.adapter.action_names=[up, down, left, right]",
    "episode.max_turns=2",
    "data.seeds=4",
    "sampler.max_new_tokens=5",
    "evaluation.max_tasks=1",
    "tracking.quiet=true",
    "tracking.tensorboard=false",
    "tracking.strict=true",
    "model.dtype=float32",
]
RECORDED = [
    "digirl.build_options={count: 4, size: 3, min_distance: 1, max_steps: 4}",
    "digirl.offline_steps=1",
    "digirl.warmup_steps=0",
    "digirl.batch_episodes=2",
    "digirl.threshold=-2",
    "trainer.epochs=1",
]


@pytest.mark.parametrize("path", first_of_each_recipe(RUNS))
def test_config_builds_and_takes_two_steps(path, tmp_path, tiny_folders):
    _, whole = load_run(path)
    # these have an environment of free texts, the small grid's actions cannot be written
    own = ("environment.factory", "environment.adapter") if whole.actions.format == "text" else ()
    overrides = [each for each in SMALL if not each.startswith(own)] if own else SMALL
    overrides = [*overrides, f"output_dir={tmp_path / 'run'}", f"model.path={tiny_folders['qwen2_5_vl']}"]
    overrides += [group_size(whole, 2)]
    if whole.recipe == "tapo":  # a tiny random model earns -1 in every row
        overrides += ["objective.filter.kind=none"]
    if hasattr(whole, "branching"):
        overrides += ["branching.initial=1"]
    if hasattr(whole, "digirl"):
        overrides += [f"digirl.path={tmp_path / 'experts'}", *RECORDED]
    if hasattr(whole, "hnpg"):
        overrides += [f"hnpg.path={tmp_path / 'recorded'}", "hnpg.turns=4", "hnpg.critic={hidden: 8, updates: 2}"]
        overrides += ["hnpg.build_options.count=4", "hnpg.region.iterations=2", "trainer.learning_rate=1"]
        overrides += ["trainer.max_grad_norm=0"]
    if hasattr(whole, "archer"):
        overrides += ["archer.warmup_steps=0", "archer.turns=4", "archer.critic={hidden: 8, updates: 2}"]
    entry, config = load_run(path, fitting(whole, overrides))
    rows = [json.loads(line) for line in (train(entry, config) / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["loss/total"] is not None for row in rows)


def test_the_example_of_the_documents_trains(tmp_path, tiny_folders, monkeypatch):
    text = (Path(__file__).parents[2] / "docs/agent_methods.md").read_text()
    blocks = dict(re.findall(r"```(?:python|yaml)\n# (my_guess\.py|my_guess\.yaml)\n(.*?)```", text, re.DOTALL))
    assert sum(bool(line.strip()) for block in blocks.values() for line in block.splitlines()) <= 20
    monkeypatch.chdir(tmp_path)
    for name, block in blocks.items():
        Path(name).write_text(block)
    small = [f"model.path={tiny_folders['qwen2_5_vl']}", "trainer.steps=2", "environment.workers=2"]
    run = train(*load_run(Path("my_guess.yaml"), [*small, "model.dtype=float32", "trainer.learning_rate=1e-3"]))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    assert (run / "report.html").is_file()
