import json
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from mmrl.comparison.experiment import dotted_overrides, load_experiment
from mmrl.comparison.plans import MARKER, plan_arm_run, plan_preparations, plan_sweep
from mmrl.comparison.reproduce import _written
from mmrl.comparison.run import run_experiment, train_command
from mmrl.config import load_run
from mmrl.errors import RunError, UserError
from tests.compare.lab import EXPERIMENT

PREPARATION = {"config": "base.yaml", "run_dir": "first", "overrides": {"e": r"\${y}"}}


def test_the_record_shows_the_command_that_a_user_would_type(lab):
    path = lab.write()
    with pytest.raises(RunError):
        run_experiment(path, lab.output, only_report=True, announce=lab.lines.append)
    command = lab.result()["arms"]["papo"]["command"]
    assert command.startswith(f"mmrl train {lab.folder}/base.yaml gain=0.05 seed=1 output_dir=")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sedes": [1]}, "unknown key 'sedes'; did you mean 'seeds'"),
        ({"arms": {"papo": {"override": {}}, "grpo": {}}}, "unknown key 'arms.papo.override'"),
        ({"jobs": "many"}, "jobs"),
        ({"metric": None}, "'metric' must be given"),
        ({"baseline": "grop"}, "did you mean 'grpo'"),
        ({"arms": {"grpo": {}}}, "at least two"),
        ({"arms": {"a/b": {}, "grpo": {}}}, "folder name"),
        ({"arms": {"a" * 101: {}, "grpo": {}}}, "is used as a folder name; it has 101 bytes; at most 100 are allowed"),
        ({"arms": {"a": {"runs_of": "b"}, "grpo": {}}}, "arms with runs: grpo"),
        ({"arms": {"a": {"runs_of": "grpo"}, "grpo": {}}}, "set its `metrics`"),
        (
            {"arms": {"a": {"runs_of": "grpo", "overrides": {"gain": 1}}, "grpo": {}}},
            "must not have config or overrides",
        ),
        ({"seeds": []}, "`seeds` is empty"),
        ({"seeds": [1, 1]}, "contains a seed more than once"),
        ({"sweep": {"values": [1.0], "seeds": [3, 4]}}, r"seeds \[3\]"),
        ({"sweep": {"values": [], "seeds": [4]}}, r"sweep\.values"),
        ({"sweep": {"values": [1.0], "seeds": [9], "parameter": "gain"}}, "which `sweep` chooses"),
        (
            {"sweep": {"values": [1.0], "seeds": [9], "overrides": {"trainer": {"learning_rate": 1}}}},
            r"`sweep\.overrides` sets 'trainer\.learning_rate', which `sweep` chooses",
        ),
        ({"overrides": {"seed": 3}}, "sets 'seed'"),
        ({"arms": {"papo": {"overrides": {"output_dir": "x"}}, "grpo": {}}}, "sets 'output_dir'"),
        ({"base": "nowhere.yaml"}, "file nowhere.yaml not found"),
        ({"base": None}, "no `config` and there is no `base`"),
        ({"prepare": [{"config": "nowhere.yaml", "run_dir": "x"}]}, r"prepare\[0\]"),
        ({"jobs": 0}, "at least 1"),
        ({"figure": {"labels": {"grop": "GRPO"}}}, r"`figure\.labels` contains 'grop'; did you mean 'grpo'"),
        ({"figure": {"stored": {"arms": {"x": {"value": 1}}}}}, r"`figure\.stored\.arms` lacks the baseline"),
        ({"figure": {"highlight": ["x"]}}, r"`figure\.highlight` contains 'x'"),
    ],
)
def test_bad_experiment_files_are_refused_before_anything_runs(lab, changes, message):
    with pytest.raises(UserError, match=message):
        lab.run(**changes)
    assert not lab.output.exists()


@pytest.mark.parametrize(
    "value", [3, 0.001, 1e-05, True, None, "text", "true", "3", "1e-3", "a: b", "[x", "#", "", "é", [1, "2", None], {}]
)
def test_overrides_survive_the_command_line(value):
    text = dotted_overrides({"a": {"b": value}}, Path("out"))
    assert OmegaConf.to_container(OmegaConf.from_dotlist(text)) == {"a": {"b": value}}


def test_nested_and_dotted_keys_are_the_same(lab):
    nested = plan_arm_run(load_experiment(lab.write(overrides={"a": {"b": 1, "c": 2}})), lab.output, "grpo", 1)
    dotted = plan_arm_run(load_experiment(lab.write(overrides={"a.b": 1, "a.c": 2})), lab.output, "grpo", 1)
    assert nested == dotted
    assert nested.overrides == ("a.b=1", "a.c=2", "seed=1")


def test_an_arm_may_have_other_data_at_each_seed(lab):
    changes = {"data": {"path": "{output_dir}/kept-{seed}.jsonl", "build_options": {"seed": "{seed}"}}}
    experiment = load_experiment(lab.write(arms={"papo": {"overrides": changes}, "grpo": None}))
    found = OmegaConf.from_dotlist(list(plan_arm_run(experiment, lab.output, "papo", 2).overrides))
    assert found.data.path == str(lab.output / "kept-2.jsonl")
    assert found.data.build_options.seed == 2


def test_the_real_command_trains_with_the_overrides(lab):
    plan = plan_arm_run(load_experiment(lab.write()), lab.output, "papo", 2)
    command = train_command(plan, resume=True)
    config = str(lab.folder / "base.yaml")
    folder = f"output_dir={lab.output}/runs/papo/seed-2"
    assert command == [*[sys.executable, "-m", "mmrl.cli", "train", config, "gain=0.05", "seed=2", folder, "--resume"]]


@pytest.mark.parametrize(
    "value",
    [
        r"Pay \${price}",
        "$",
        "$5 {a}",
        r"C:\dir",
        r"\\\${x}",
        [r"\d \${a}"],
        [{"a": r"\d", "b": None}],
        "{output_dir} #1",
    ],
)
def test_texts_with_dollars_reach_the_runs_of_an_experiment(lab, value):
    """Through the file, its overrides, and the copy that `mmrl reproduce` writes."""
    path = lab.folder / "experiment.yaml"
    content = {**EXPERIMENT, "overrides": {"a": {"b": value}}, "prepare": [PREPARATION], "budget": r"\${5} a run"}
    content |= {"sweep": {"parameter": "c", "values": [r"\${x}"], "seeds": [9], "overrides": {"d": value}}}
    path.write_text(yaml.safe_dump(content))
    wanted = json.loads(json.dumps(value).replace("{output_dir}", str(lab.output)))
    for file in (path, _written(load_experiment(path), lab.folder / "copy")):
        experiment = load_experiment(file)
        assert experiment.budget == "${5} a run"
        (plan, *_) = plan_sweep(experiment, lab.output)
        read = OmegaConf.from_dotlist(list(plan.overrides))
        assert OmegaConf.to_container(read)["a"]["b"] == wanted
        assert OmegaConf.to_container(read)["d"] == wanted
        assert read.c == "${x}"
        (preparation,) = plan_preparations(experiment, lab.output)
        assert OmegaConf.from_dotlist(list(preparation.overrides)).e == "${y}"


def test_what_the_environment_holds_is_in_no_file_of_an_experiment(lab, monkeypatch):
    monkeypatch.setenv("MMRL_TEST_TOKEN", "s3cr3t")
    lab.run(overrides={"token": "${oc.env:MMRL_TEST_TOKEN}"}, seeds=[1], jobs=1)
    files = [path for path in lab.output.rglob("*") if path.is_file()]
    assert [str(path) for path in files if b"s3cr3t" in path.read_bytes()] == []
    assert sum(b"oc.env:MMRL_TEST_TOKEN" in path.read_bytes() for path in files if path.name == MARKER) == 2


def test_the_folder_of_an_experiment_may_have_any_name(lab):
    lab.output = lab.folder / r"out #1: ${x} \${y}"
    (plan, *_) = plan_preparations(load_experiment(lab.write(prepare=[PREPARATION])), lab.output)
    needed = ["model.path=m", "data.path=d", "rewards=[{name: exact}]"]
    _, config = load_run(lab.folder / "base.yaml", [*needed, train_command(plan, resume=False)[-1]])
    assert config.output_dir == str(plan.run_dir)
