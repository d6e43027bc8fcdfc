"""Configurations of `mmrl init`: they load with the user's values, and nothing is overwritten unasked."""

import pytest

from mmrl.cli import main
from mmrl.cli.starters import STARTERS
from mmrl.config import load_run

RECIPES = {"grpo": "vlm", "text": "vlm", "robot": "robot_clone", "screens": "aepo", "video": "tspo"}


@pytest.mark.parametrize("name", STARTERS)
def test_a_starter_loads_as_it_is(name, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    assert main(["init", name, str(file)]) == 0
    assert f"mmrl train {file} --dry-run" in capsys.readouterr().out
    entry, config = load_run(file)
    assert (entry.name, config.output_dir) == (RECIPES.get(name, name), "runs/mine")


@pytest.mark.parametrize("name", STARTERS)
def test_model_and_data_are_taken_as_texts(name, tmp_path):
    model, data = ("gaussian" if name == "robot" else 'my "model"'), "${my}/data: #1"
    assert main(["init", name, str(tmp_path / "a.yaml"), f"--model={model}", f"--data={data}"]) == 0
    config = load_run(tmp_path / "a.yaml")[1]
    places = {"robot": "demonstrations.path", "agent": "environment.factory"}
    part, key = places.get(name, "data.path").split(".")
    assert getattr(getattr(config, part), key) == data
    owner = config.answerer if name == "video" else config
    assert (owner.model.kind if name == "robot" else owner.model.path) == model
    assert name != "agent" or config.environment.kwargs == {}


def test_only_the_example_environment_gets_its_arguments(tmp_path):
    main(["init", "agent", str(tmp_path / "a.yaml"), "--data", "mmrl.agents.toy.grid:GridWorld"])
    assert load_run(tmp_path / "a.yaml")[1].environment.kwargs["text"] is True


def test_a_file_is_overwritten_only_on_demand(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    assert main(["init", "papo", str(file)]) == 2
    assert "--force overwrites it" in capsys.readouterr().err
    assert file.read_text() == "mine"
    assert main(["init", "papo", str(file), "--force"]) == 0
    assert "recipe: papo" in file.read_text()
