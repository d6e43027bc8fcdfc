"""`mmrl train CONFIG --dry-run` reads the data of every recipe with the code of the run, and loads no model for it."""

import json
import uuid
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.recipes import RECIPES, find_recipe
from mmrl.runs.dry_run import model_follows
from mmrl.training.run import _open_recipe, read_data
from tests.contracts.domains import domain_of

QUICK = ("vlm", "tspo", "masked", "agent", "aepo", "awm", "diffusion_dpo", "flow_pretrain", "flow3d", "robot_clone")
"""A recipe of each way to open data; the others are tried with the slow tests."""


def make(name, folder):
    domain = domain_of(name)
    for module in domain.needs:
        pytest.importorskip(module)
    return domain.make_config(name, folder)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_every_recipe_reads_its_data_and_loads_no_model(name, tmp_path, monkeypatch):
    config = make(name, tmp_path)
    loaders = (
        "mmrl.vlm.vlm_recipe",
        "mmrl.agents.agent_recipe",
        "mmrl.vlm.tspo.tspo_recipe",
        "diffusion.diffusion_recipe",
    )
    for place in (*(f"{module}.load_policy" for module in loaders), "robotics.methods.robot_recipe.load_action_policy"):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("a dry run loads no model"))
    lines = read_data(find_recipe(name), config)
    assert lines
    assert lines[0].startswith("data: ")
    assert not (tmp_path / "run").exists()


def changed(path):
    """A new path in the folder of a file, which other tests share and whose rows name its neighbours."""
    return Path(path).with_name(f"changed-{uuid.uuid4().hex}{Path(path).suffix}")


def rewrite(config, change):
    rows = [json.loads(line) for line in Path(config.data.path).read_text().splitlines()]
    for number, row in enumerate(rows):
        change(number, row)
    config.data.path = str(changed(config.data.path))
    Path(config.data.path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def without_arrays(data, name):
    stored = dict(np.load(data.path))
    stored.pop(name)
    data.path = str(changed(data.path))
    np.savez(data.path, **stored)


def without_answer(config):
    rewrite(config, lambda number, row: row.pop("answer") if number == 1 else None)


def without_completion(config):
    rewrite(config, lambda number, row: row.pop("completion", None))


def half_fractions(config):
    def halve(number, row):
        if number % 2:
            width, height = row["original_wh"]
            row["bbox"] = [value / side for value, side in zip(row["bbox"], (width, height) * 2, strict=True)]

    rewrite(config, halve)


def tasks_with_a_typo(config):
    file = Path(config.output_dir).with_name("tasks.jsonl")
    file.write_text('{"task": "walk", "sead": 3}\n')
    config.data.file, config.data.options = str(file), {}


def recorded_without_answers(config):
    config.hnpg.path = str(Path(config.output_dir).with_name("recorded-badly"))
    Path(config.hnpg.path).mkdir()
    (Path(config.hnpg.path) / "episodes.jsonl").write_text('{"turns": [{"text": "hello"}], "reward": 1}\n')


def too_long_prompts(config):
    config.data.on_bad_row = "error"
    config.data.path = str(changed(config.data.path))
    Path(config.data.path).write_text("a red circle " * 60 + "\n")


def pairs_without_a_side(config):
    without_arrays(config.pairs, "chosen")


def images_without_captions(config):
    without_arrays(config.images, "captions")


def needles_beyond_the_video(config):
    rewrite(config, lambda number, row: row.update(needle=[[900.0, 901.0]]))


def clips_of_another_kind(config):
    config.data.function = "builtins:list"


def a_task_that_the_simulator_lacks(config):
    config.data.tasks = ["left", "sideways"]


def actions_of_another_length(config):
    from robotics.sim.opening import SimConfig

    config.sim = SimConfig(kind="tabletop", tasks=["reach"], horizon=4)


def no_such_file(config):
    config.data.path = str(Path(config.data.path).with_name("elsewhere.jsonl"))


BAD = {
    "text": ("vlm", without_answer, "no answer in column"),
    "missing": ("vlm", no_such_file, "file not found"),
    "masked": ("masked_sft", without_completion, "no text in column 'completion'"),
    "screens": ("aepo", half_fractions, "fractions"),
    "agents": ("agent", tasks_with_a_typo, "unknown entry sead"),
    "recorded": ("hnpg", recorded_without_answers, "each turn must have an answer"),
    "prompts": ("awm", too_long_prompts, "would drop"),
    "pairs": ("diffusion_dpo", pairs_without_a_side, "chosen"),
    "images": ("flow_pretrain", images_without_captions, "captions"),
    "videos": ("tspo", needles_beyond_the_video, "needle"),
    "flow": ("flow3d", clips_of_another_kind, "no clips"),
    "episodes": ("robot_grpo", a_task_that_the_simulator_lacks, "sideways"),
    "demonstrations": ("robot_clone", actions_of_another_length, "entries, but the simulator's have"),
}


@pytest.mark.parametrize("room", BAD)
def test_a_dry_run_refuses_the_tables_that_the_run_refuses(room, tmp_path):
    name, spoil, said = BAD[room]
    config = make(name, tmp_path)
    spoil(config)
    with pytest.raises(UserError, match=said) as dry:
        read_data(find_recipe(name), config)
    with pytest.raises(UserError) as real:
        _open_recipe(find_recipe(name), config)
    assert str(dry.value) == str(real.value)


def test_outside_a_dry_run_the_model_follows():
    assert model_follows(SimpleNamespace(stages=())) is None
