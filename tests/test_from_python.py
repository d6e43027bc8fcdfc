"""The programs of docs/from_python.md run as they stand, on tiny models in the place of large ones."""

import re
from pathlib import Path

import pytest

from mmrl import Run
from mmrl.vlm.toy.digits import build_model
from mmrl.vlm.toy.tiny_generic import build_tiny_generic
from tests.programs import run_program

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/from_python.md").read_text(encoding="utf-8")
BLOCKS = [block for block in re.findall(r"```python notest\n(.*?)```", PAGE, re.DOTALL) if "train(" in block]
SHORT = "num_generations=2, tasks_per_step=2, max_new_tokens=4, steps=2"


def run_block(tmp_path, marker, changes, blocks=BLOCKS):
    (block,) = [block for block in blocks if marker in block]
    for old, new in changes.items():
        assert old in block
        block = block.replace(old, new)
    (tmp_path / "program.py").write_text(block)
    return run_program(["program.py"], tmp_path)


def test_text(tmp_path):
    build_tiny_generic(tmp_path / "tiny", corpus=["Write the number in words one two three"])
    output = run_block(tmp_path, "words.", {'"smollm2"': '"tiny"', "steps=8": SHORT})
    assert "accuracy/greedy" in output
    assert len(Run(tmp_path / "runs/grpo").metrics) == 2


def test_the_lines_of_the_readme(tmp_path):
    build_tiny_generic(tmp_path / "tiny", corpus=["Answer with JSON like name is years old"])
    blocks = re.findall(r"```python notest\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    short = {'"smollm2"': '"tiny"', '"steps": 8': '"steps": 2', '"max_new_tokens": 40': '"max_new_tokens": 4'}
    short |= {"rows[240:280]": "rows[240:244]"}
    output = run_block(tmp_path, "train(", short, blocks)
    assert "accuracy/sampled" in output
    assert (tmp_path / "my-model/config.json").is_file()


@pytest.mark.slow
def test_questions_about_images(tmp_path):
    build_model(str(tmp_path / "tiny"))
    model = {'"Qwen/Qwen2.5-VL-3B-Instruct"': '"tiny"', "steps=40": SHORT}
    run_block(tmp_path, "Which colour?", model)
    assert Run(tmp_path / "runs/papo").config.model.lora.rank == 16


@pytest.mark.slow
def test_images(tmp_path):
    pytest.importorskip("diffusers")
    from diffusion.toy.shapes.building import build_pipeline

    build_pipeline(str(tmp_path / "tiny"))
    short = "steps=2, num_generations=2, tasks_per_step=2, max_sequence_length=1"
    model = {'"stabilityai/stable-diffusion-3.5-medium"': '"tiny"', "options={": 'options={"sampler.steps": 4, '}
    run_block(tmp_path, "stable-diffusion", model | {"steps=40": short})
    assert len(Run(tmp_path / "runs/awm").metrics) == 2


@pytest.mark.slow
def test_an_agent(tmp_path):
    build_tiny_generic(tmp_path / "tiny", corpus=["Say a word with the letter"])
    run_block(tmp_path, "class Guess", {'"smollm2"': '"tiny"', "steps=8": SHORT})
    assert Run(tmp_path / "runs/gigpo").config.objective.preset == "gigpo"


@pytest.mark.slow
def test_a_robot(tmp_path):
    pytest.importorskip("mujoco")
    run_block(tmp_path, "class Driver", {})
    found = Run(tmp_path / "runs/grpo").metrics
    assert found[-1]["reward/mean"] > found[0]["reward/mean"]


def test_the_other_programs_use_names_that_exist():
    from inspect import signature

    from mmrl import compare, evaluate, train

    named = {"train": train, "compare": compare, "evaluate": evaluate}
    for name, arguments in re.findall(r"\b(train|compare|evaluate)\(([^()]*)\)", PAGE):
        keys = set(re.findall(r"\b(\w+)=", arguments)) - {"steps", "model", "data", "eval_data", "reward"}
        known = set(signature(named[name]).parameters)
        assert keys - known <= {"learning_rate", "lora", "dtype", "max_turns"}
