"""The configurations of Meta-World take steps; without its environment they are skipped."""

import json
from pathlib import Path

import pytest

from mmrl.config import load_run
from mmrl.errors import UserError
from mmrl.training.run import last_model, train
from robotics.sim.suite_setup import suite_python

SUITES = Path(__file__).parents[2] / "configs" / "suites"
SMALL = ["sim.workers=1", "sim.horizon=16", "sim.tasks=[reach]", "eval_data={}", "tracking.quiet=true"]
STEPS = ["trainer.steps=2", "trainer.warmup_steps=0"]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    try:
        suite_python("metaworld")
    except UserError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("metaworld")
    demonstrations = ["demonstrations.build_options.episodes=1", f"demonstrations.path={folder / 'demonstrations'}"]
    sim = ["demonstrations.build_options.sim.tasks=[reach]", "demonstrations.build_options.sim.workers=1"]
    own = [*demonstrations, *sim, *SMALL, *STEPS, "trainer.tasks_per_step=8", f"output_dir={folder / 'clone'}"]
    return last_model(train(*load_run(SUITES / "metaworld_clone.yaml", own)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "srpo", "ppo"])
def test_metaworld_takes_two_steps(name, clone, tmp_path):
    samples = 1 if name == "ppo" else 2
    sizes = ["data.layouts=4", "trainer.tasks_per_step=2", f"trainer.samples_per_task={samples}"]
    own = [
        *SMALL,
        *STEPS,
        *sizes,
        "trainer.minibatches_per_step=1",
        f"model.path={clone}",
        f"output_dir={tmp_path / 'run'}",
    ]
    run_dir = train(*load_run(SUITES / f"metaworld_{name}.yaml", own))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["sim/raised"] == 0 for row in rows)
