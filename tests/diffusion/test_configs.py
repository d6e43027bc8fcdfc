"""Every file under configs/diffusion builds its recipe and takes a step or two, on a tiny model and a few prompts.

Files for a family without a world of its own take a tiny random model of that family.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from diffusion.toy import clips, digits, words
from diffusion.toy.shapes.building import build_prompts
from mmrl.config import load_run
from tests.diffusion.edits import write_edits
from tests.diffusion.families.cases import CASES
from tests.diffusion.runs import MATCHED_RECIPES, TRAJECTORY_RECIPES, build, make_trainer, run_config, tiny_model
from tests.fitting import first_of_each_recipe, fitting, group_size
from tests.programs import run_after_torch

CONFIGS = Path(__file__).parents[2] / "configs/diffusion"
FILES = sorted(CONFIGS.glob("*.yaml"))
FAMILY_OF = {"flux1": "kontext", "flux2_klein": "klein", "qwen_image": "qwen_image", "wan2_1_1_3b": "wan"}
"""Case of the family of files whose names begin so."""
SLOW = ("dppo", "clips_flow_grpo")
"""Ends of the names of further files whose code others go through too."""
SMALL = [
    "trainer.steps=1",
    "trainer.tasks_per_step=2",
    "trainer.minibatches_per_step=1",
    "trainer.warmup_steps=0",
    "trainer.mixed_precision=none",
    "sampler.steps=4",
    "sampler.eval_steps=2",
    "evaluation.max_tasks=2",
    "evaluation.samples=1",
    "evaluation.at_start=false",
    "tracking.quiet=true",
    "tracking.tensorboard=false",
    "tracking.strict=true",
    "model.dtype=float32",
    "model.height=null",
    "model.width=null",
    "model.max_sequence_length=1",
    "heldout_rewards=[{name: jpeg_incompressibility}]",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny pipeline for a configuration's images."""
    folder = tmp_path_factory.mktemp("digits") / "model"
    digits.build_pipeline(str(folder), layers=1, heads=2, text_width=32, pooled_width=16)
    moving = clips.build_pipeline(
        str(folder.parent / "clips"), scans=30, layers=1, heads=2, head_width=12, text_width=16
    )
    spelt = words.build_pipeline(str(folder.parent / "words"), layers=1, heads=2, text_width=32, pooled_width=16)
    return {"digits": folder, "clips": moving, "words": spelt, "shapes": tiny_model()}


def family_of(path):
    """Case of a file's family, or None."""
    return next((CASES[case] for start, case in FAMILY_OF.items() if path.stem.startswith(start)), None)


LARGE = [path for path in FILES if family_of(path) or path.stem.endswith(SLOW)]


def overrides_of(path, whole, folder, models):
    """Paths inside the test's folder and small numbers; prompts that no function builds are captions of shapes."""
    source = whole.images if hasattr(whole, "images") else next(iter(whole.eval_data.values()))
    subject = next((name for name in ("digits", "clips", "words") if name in str(source.build)), "shapes")
    case = family_of(path)
    model = models[subject] if case is None else case.build(folder / "pipeline")
    found = [*SMALL, f"output_dir={folder / 'run'}", f"model.path={model}", "model.build=null"]
    if subject == "clips":
        found += ["images.build_options.scans=30"] if hasattr(whole, "images") else []
        found += ["model.height=12", "model.width=12", "model.max_sequence_length=8"]
    if subject == "words":
        found += ["model.height=16", "model.width=32"]
        found += ["evaluation.rewards=[{name: word_match}]"] if hasattr(whole, "images") else []
    if case is not None:
        sizes = {"height": case.height, "width": case.width, "frames": case.frames, "max_sequence_length": None}
        found += [f"model.{key}={json.dumps(value)}" for key, value in {**sizes, **case.model}.items()]
    if getattr(getattr(whole, "sampler", None), "window", 0):
        found += [f"sampler.window={min(whole.sampler.window, 3)}", "sampler.window_low=0", "sampler.window_high=0"]
    prompts = {"data": whole.data} if hasattr(whole, "data") else {}
    for name, data in {**prompts, **whole.eval_data}.items():
        if data.path and data.build is None:
            build_prompts(str(folder / f"{name}.jsonl"), kinds=["single"])
            if case is not None and case.edits:
                write_edits(folder / f"{name}.jsonl", ["a red circle", "a blue square"], (case.height, case.width))
    # weights and programs that are not there
    if any("path" in reward.options or reward.name == "ocr" for reward in getattr(whole, "rewards", ())):
        stand_in = "word_match" if subject == "words" else "caption_colour"
        found += [f"rewards=[{{name: {'kept' if case is not None and case.edits else stand_in}}}]"]
    if prompts:
        found += [f"data.path={folder / 'data.jsonl'}"]
        found += [group_size(whole, 2), "trainer.skip_steps_without_gradient=false"]  # two images may score alike
    found += [f"eval_data.{name}.path={folder / f'{name}.jsonl'}" for name in whole.eval_data]
    if hasattr(whole, "critic"):
        found += ["critic.warmup_updates=0"]
    if getattr(whole, "states", "") == "trajectory":
        found += ["timesteps.count=2"]  # two of four steps have states that are trained
    if hasattr(whole, "pairs"):
        found += [f"pairs.path={folder / 'pairs.npz'}", f"pairs.build_options.model={models[subject]}"]
        found += ["pairs.build_options.count=6", "pairs.build_options.steps=2", "trainer.steps=2"]
        found += ["filter.keep=3"] if whole.filter.keep else []
    if hasattr(whole, "images"):
        found += [f"images.path={folder / 'images.npz'}"]
        found += ["images.build_options.count=12"] if subject == "shapes" else []
    return fitting(whole, found)


@pytest.mark.parametrize(
    "path",
    [
        *first_of_each_recipe([path for path in FILES if path not in LARGE]),
        *(pytest.param(path, id=path.stem, marks=pytest.mark.slow) for path in LARGE),
    ],
)
def test_config_builds_and_takes_a_step(path, tmp_path, models):
    _, whole = load_run(path)
    _, config = load_run(path, overrides_of(path, whole, tmp_path, models))
    trainer = make_trainer(config, tmp_path)
    result = trainer.run()
    trainer.recipe.close()
    assert result["status"] == "done"
    assert result["optimiser_steps"] == config.trainer.steps
    split = next(iter(whole.eval_data))
    last = result["last_evaluation"][split]
    assert all(math.isfinite(last[name]) for name in ("distance/base", "heldout/jpeg_incompressibility"))


def test_there_are_configurations():
    assert len(FILES) >= 4


@pytest.mark.parametrize("name", [*TRAJECTORY_RECIPES, *MATCHED_RECIPES])
def test_formula_names_the_weights_of_the_run(name, tmp_path):
    config = run_config(name, tmp_path)
    config.objective.kl = {"kind": "full", "coef": 0.125}
    config.validate()
    assert "0.125" in build(config).describe()


def test_importing_the_package_and_listing_its_recipes_loads_no_model_library():
    program = (
        "import sys, diffusion; from mmrl.recipes import RECIPES; dir(diffusion)\n"
        "print('heavy:', *sorted({'torch', 'transformers', 'diffusers', 'sklearn', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "heavy:"


def test_loading_a_configuration_loads_no_model_library():
    files = [str(case.values[0]) for case in first_of_each_recipe(FILES) if not case.marks]
    program = (
        "import sys; from mmrl.config import load_run\n"
        f"[load_run(path) for path in {files!r}]\n"
        "print('heavy:', *sorted({'transformers', 'diffusers', 'sklearn', 'peft'} & set(sys.modules)))"
    )
    assert run_after_torch(program).strip() == "heavy:"
