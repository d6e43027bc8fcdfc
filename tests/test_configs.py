"""Every file under configs/ builds its recipe and takes two steps, on a tiny model and a handful of questions.

The default tests do this for one file of each recipe; `test_readme.py` loads the others.
"""

import dataclasses
import inspect
import json
from pathlib import Path

import pytest

from mmrl.comparison.experiment import load_experiment
from mmrl.comparison.plans import plan_arm_run, plan_preparations
from mmrl.config import load_run
from mmrl.entries import load_target
from mmrl.rewards.reward_loading import load_function
from mmrl.training.run import train
from mmrl.vlm.toy.countdown import build_problems
from mmrl.vlm.toy.signs import build_model
from mmrl.vlm.toy.tiny import build_tiny_vlm
from tests.fitting import first_of_each_recipe, fitting, group_size
from tests.vlm.builders import CORPUS
from tests.vlm.pairs import write_pairs
from tests.vlm.runs import write_questions

CONFIGS = Path(__file__).parents[1] / "configs"
VLM = sorted([*CONFIGS.glob("vlm/*.yaml"), *CONFIGS.glob("text/*.yaml")])
RUNS = [path for path in VLM if "recipe: tspo" not in path.read_text()]
PICKS = [path for path in VLM if path not in RUNS]
SMALL = [
    "trainer.steps=2",
    "trainer.tasks_per_step=2",
    "trainer.minibatches_per_step=1",
    "trainer.warmup_steps=0",
    "trainer.learning_rate=1e-3",
    "trainer.skip_steps_without_gradient=false",  # a tiny random model earns nothing
    "sampler.max_new_tokens=5",
    "evaluation.max_tasks=2",
    "tracking.quiet=true",
    "tracking.tensorboard=false",
    "tracking.strict=true",
    "model.dtype=float32",
    "trainer.mixed_precision=none",
    "model.min_pixels=null",
    "model.max_pixels=null",
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    models = {
        family: build_tiny_vlm(root / family, family=family, corpus=CORPUS) for family in ("qwen2_5_vl", "qwen3_vl")
    }
    return models | {"text": build_model(root / "text", mask=True)}


@pytest.mark.parametrize("path", first_of_each_recipe(RUNS))
def test_config_builds_and_takes_two_steps(path, tmp_path, tiny):
    text = path.parent.name == "text"
    family = "text" if text else "qwen3_vl" if "qwen3" in path.stem else "qwen2_5_vl"
    _, whole = load_run(path)
    pairs = whole.recipe == "preference"
    if text:
        counted = "count" in whole.data.build_options
        build = load_target(whole.data.build) if counted else build_problems
        questions = build(tmp_path / "data.jsonl", **(whole.data.build_options if counted else {}) | {"count": 6})
    else:
        questions = (
            write_pairs(tmp_path / "data") if pairs else write_questions(tmp_path / "data", text_only_last=False)
        )
    overrides = [*SMALL, f"output_dir={tmp_path / 'run'}", f"data.path={questions}", f"model.path={tiny[family]}"]
    overrides += [f"eval_data.{name}.path={questions}" for name in whole.eval_data]
    overrides += [group_size(whole, 2)]
    if hasattr(whole, "hierarchy"):
        overrides.append("hierarchy.budgets=[8, 16]")
    revision = getattr(whole.evaluation, "revision", None)
    if revision is not None and revision.reasoner is not None:
        overrides.append(f"evaluation.revision.reasoner.path={tiny[family]}")
    if whole.recipe == "masked":
        overrides += ["sampler.block=5", "sampler.steps=5", "inpainting.replacements=1"]
    if whole.recipe == "masked_sft":  # whose answers are longer than five tokens
        overrides += ["sampler.max_new_tokens=20", "sampler.block=20", "sampler.steps=5"]
    if getattr(whole, "teacher", None) is not None:
        overrides.append(f"teacher.path={tiny[family]}")
    entry, config = load_run(path, fitting(whole, overrides))
    run_dir = train(entry, config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    # a filter may leave no group of these tiny steps, and then no loss
    assert all(row.get("loss/total", 0.0) is not None for row in rows)


@pytest.mark.parametrize("path", PICKS, ids=lambda path: path.stem)
def test_config_of_picks_builds_and_takes_two_steps(path, tmp_path):
    _, whole = load_run(path)
    overrides = [
        f"output_dir={tmp_path / 'run'}",
        f"features.path={tmp_path / 'clip'}",
        f"features.cache={tmp_path / 'features'}",
        "features.build_options={width: 16, hidden: 16, layers: 1, steps: 1, examples: 1}",
        "trainer.steps=2",
        "trainer.tasks_per_step=2",
        "trainer.samples_per_task=2",
        "trainer.skip_steps_without_gradient=false",
        "tracking.quiet=true",
        "tracking.tensorboard=false",
        "tracking.strict=true",
    ]
    for key in ("data", *(f"eval_data.{name}" for name in whole.eval_data)):
        overrides += [f"{key}.path={tmp_path / key}.jsonl", f"{key}.build_options.count=2"]
        overrides += [f"{key}.build_options.frames=24", f"{key}.build_options.decoys=0"]
    if whole.answerer.kind == "vlm":
        reader = build_tiny_vlm(tmp_path / "reader", corpus=CORPUS)
        overrides += [f"answerer.model.path={reader}", "answerer.sampler.max_new_tokens=3"]
    entry, config = load_run(path, overrides)
    run_dir = train(entry, config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["loss/total"] is not None for row in rows)


# Supervised runs differ less from seed to seed than reinforcement learning does; the demo's settings are no methods; 60
# steps of a pretrained model take 20 minutes.
FIVE_SEEDS = (
    "demo_robot_changes",
    "flow3d_cross_embodiment",
    "flow3d_extracted",
    "flow3d_parameterisation",
    "flow3d_pretraining",
    "flow3d_verdict",
    "smollm2_entropy",
)


# Arms that sample further answers for values train on fewer; what is equal are the tokens of both.
EQUAL_TOKENS = ("segment_spo",)
# They continue another experiment, at rates of its sweep.
GIVEN_RATES = ("smollm2_lora_rates",)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("experiments/*.yaml")), ids=lambda path: path.stem)
def test_experiment_is_valid_and_fair(path, tmp_path):
    experiment = load_experiment(path)
    least = 5 if path.stem in FIVE_SEEDS else 8
    assert len(experiment.seeds) >= least
    assert (experiment.sweep is None) == (path.stem in GIVEN_RATES)
    assert experiment.budget
    for plan in plan_preparations(experiment, tmp_path):
        check_build_options(load_run(plan.config, plan.overrides)[1])
    steps, samples = set(), []
    for name in experiment.arms:
        arm = experiment.source(name)
        value = experiment.sweep and experiment.sweep.values[0]
        plan = plan_arm_run(experiment, tmp_path, arm, experiment.seeds[0], value)
        _, config = load_run(plan.config, plan.overrides)
        check_build_options(config)
        steps.add(config.trainer.steps)
        samples.append(config.trainer.tasks_per_step * getattr(config.trainer, "samples_per_task", 1))
    assert len(steps) == 1
    if path.stem in EQUAL_TOKENS:
        return
    assert max(samples) <= 1.1 * min(samples)  # an arm that adds traces of its own starts from a little less


def check_build_options(config):
    """Options that an experiment merges from several files are parameters of the function that gets them."""
    for section in sections(config):
        if getattr(section, "build", None) and section.build_options:
            inspect.signature(load_function(section.build, what="build")).bind("path", **section.build_options)


def sections(config):
    yield config
    parts = config.values() if isinstance(config, dict) else vars(config).values()
    for part in parts:
        if isinstance(part, dict) or dataclasses.is_dataclass(part):
            yield from sections(part)


def test_a_file_that_configurations_build_is_the_same_for_all():
    """A file that is there is not built again, so another configuration would get what the first one wrote."""
    built = {}
    for path in RUNS:
        _, config = load_run(path)
        for part in (config.model, getattr(config, "data", None), *getattr(config, "eval_data", {}).values()):
            if getattr(part, "build", None) and part.path:
                first, how = built.setdefault(str(part.path), (path, (part.build, dict(part.build_options))))
                assert how == (part.build, dict(part.build_options)), f"{first.name} and {path.name}: {part.path}"
