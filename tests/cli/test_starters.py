"""Configurations of `mmrl init`: they load with the user's values, and nothing is overwritten unasked."""

import json

import pytest

from mmrl.cli import main
from mmrl.cli.starters import STARTERS
from mmrl.config import load_run
from mmrl.rewards.reward_loading import load_function

RECIPES = {"grpo": "vlm", "text": "vlm", "robot": "robot_clone", "screens": "aepo", "video": "tspo"}


@pytest.mark.parametrize("name", STARTERS)
def test_a_starter_loads_as_it_is(name, tmp_path, capsys):
    file = tmp_path / "my runs" / "mine.yaml"
    file.parent.mkdir()
    assert main(["init", name, str(file)]) == 0
    # a line for the shell
    assert f"mmrl train '{file}' --dry-run" in capsys.readouterr().out
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


def write_rows(file, *answers, column="answer"):
    rows = [{"question": f"Number {place}?", column: answer, "unit": "m"} for place, answer in enumerate(answers)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def own_model(folder):
    """Overrides that put a tiny model in the place of the starter's."""
    options = "{corpus: [Number of what], hidden: 32, layers: 1}"
    build = "mmrl.vlm.toy.tiny_generic:build_tiny_generic"
    return [f"model.path={folder}", f"model.build={build}", f"model.build_options={options}"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_without_an_answer_get_a_function_to_fill_in(tmp_path, monkeypatch, capsys, device):
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path / "rows.jsonl", 3, 4, column="metres")
    assert main(["init", "text", "mine.yaml", "--data", data, "--device", device]) == 0
    assert "mine_rewards.py; fill in its function" in capsys.readouterr().out
    [reward] = load_run("mine.yaml")[1].rewards
    assert (reward.name, reward.function) == ("score", "mine_rewards.py:score")
    assert "def score(completions, metres, unit, **columns):" in (tmp_path / "mine_rewards.py").read_text()
    assert main(["train", "mine.yaml", "--dry-run", *own_model(tmp_path / "tiny")]) == 0
    assert "data: " in capsys.readouterr().out
    # what was filled in stays
    (tmp_path / "mine_rewards.py").write_text(
        "def score(completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    (tmp_path / "mine.yaml").unlink()
    assert main(["init", "text", "mine.yaml", "--data", data]) == 0
    assert "[1.0]" in (tmp_path / "mine_rewards.py").read_text()


@pytest.mark.parametrize("name", ["text", "grpo", "papo"])
def test_an_own_reward_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", name, "a.yaml", "--reward", "my_rewards.py:places"]) == 0
    config = load_run("a.yaml")[1]
    assert [(reward.name, reward.function) for reward in config.rewards] == [("places", "my_rewards.py:places")]
    assert config.accuracy_reward in ("", "places")
    assert config.data.format_prompt is None


def test_an_own_reward_passes_the_dry_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path / "rows.jsonl", 3, 4, column="metres")
    (tmp_path / "my_rewards.py").write_text(
        "def near(completions, metres, **columns):\n    return [0.0] * len(metres)\n"
    )
    assert main(["init", "text", "a.yaml", "--data", data, "--reward", "my_rewards.py:near"]) == 0
    assert main(["train", "a.yaml", "--dry-run", *own_model(tmp_path / "tiny")]) == 0


@pytest.mark.parametrize("column", ["scores", "zip", "text", "row", "metres"])
def test_the_reward_to_fill_in_takes_every_column(column, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path / "rows.jsonl", 3, 4, column=column)
    assert main(["init", "text", "a.yaml", "--data", data]) == 0
    (term,) = load_run("a.yaml")[1].rewards
    assert load_function(term.function)(["x", "y"], unit=["m", "m"], **{column: [3, 4]}) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("answers", "reward"), [([3, "\\frac12"], "math"), (["A", "(b)"], "choice"), (["red", "in Paris"], "exact")]
)
def test_the_built_in_reward_fits_the_answers(answers, reward, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path / "rows.jsonl", *answers)
    assert main(["init", "text", "a.yaml", "--data", data]) == 0
    assert [term.name for term in load_run("a.yaml")[1].rewards] == [reward]
    assert main(["train", "a.yaml", "--dry-run", *own_model(tmp_path / "tiny")]) == 0


def test_the_text_starter_suits_the_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = {}
    for device in ("cpu", "cuda"):
        assert main(["init", "text", f"{device}.yaml", "--device", device]) == 0
        model = load_run(f"{device}.yaml")[1].model
        found[device] = (model.path, model.dtype, model.gradient_checkpointing, model.lora.enabled)
    assert found["cpu"] == ("smollm2", "float32", False, False)
    assert found["cuda"][1:] == ("bfloat16", True, True)


def test_a_starter_without_rewards_takes_none(tmp_path, capsys):
    assert main(["init", "robot", str(tmp_path / "a.yaml"), "--reward", "my_rewards.py:near"]) == 2
    assert "--reward is for papo, grpo, text, sft; robot has no configurable rewards" in capsys.readouterr().err
