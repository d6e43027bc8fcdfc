"""Files from elsewhere name no code that runs unasked: what is found, refused, known as one's own, and enforced."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.cli.doctor import check_run
from mmrl.config import foreign_run, load_run
from mmrl.errors import UserError
from mmrl.files import CONFIGS
from mmrl.rewards.reward_loading import load_function
from mmrl.trust import ALLOW, check_foreign, is_known, named_code, remember, restricted
from robotics.policies.lerobot.lerobot_server import ServedActionPolicy
from robotics.sim.suites import metaworld
from tests.programs import Program

FOREIGN = """
recipe: vlm
output_dir: runs/x
model: {path: nowhere, build: "os:system"}
data: {path: "touch it-ran", build: "evil.py:make"}
rewards: [{name: exact}, {name: "my rewards.py:f"}]
"""
OWN_FILE = f"{CONFIGS.parent / 'mmrl/files.py'}:os.remove"
NAMED = ["os:system", "evil.py:make", "my rewards.py:f"]


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"build": "os:system"}, ["os:system"]),
        ({"environment": {"factory": "gymnasium:make", "kwargs": {"id": "evil:Env-v0"}}}, ["evil:Env-v0"]),
        ({"environment": {"kwargs": {"functions": ["a.b:f", "/x/my tools.py:g"]}}}, ["a.b:f", "/x/my tools.py:g"]),
        ({"recipe": "evil:Recipe:Config"}, ["evil:Recipe:Config"]),
        ({"sim": {"python": "/tmp/python"}, "rollers": {"address": "10.0.0.1:6379"}}, ["/tmp/python", "10.0.0.1:6379"]),
        ({"data": {"path": "me/${oc.env:SECRET}"}}, ["oc.env:SECRET"]),
        ({"x": {"evil:key": 1}}, ["evil:key"]),
        ({"build": "mmrl.workers.interpreters:run_apart"}, ["mmrl.workers.interpreters:run_apart"]),
        ({"build": "mmrl.vlm.toy.digits:write_atomically"}, ["mmrl.vlm.toy.digits:write_atomically"]),
        ({"build": "mmrl.vlm.toy.digits:build_questions", "factory": "mmrl.agents.toy.grid:GridWorld"}, []),
        ({"system": "Answer: yes", "path": "owner/name", "at": "12:30", "device": "cuda:0", "n": 3, "none": None}, []),
    ],
)
def test_code_that_content_names(content, names):
    assert list(named_code(content)) == names


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: path.stem)
def test_the_suites_own_configurations_name_no_code_outside_it(path):
    import yaml

    names = named_code(yaml.safe_load(path.read_text()))
    assert set(names) <= {"miniworld:MiniWorld-OneRoom-v0"}  # an id of a package that the file says how to install


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("import pathlib\npathlib.Path('it-ran').touch()\n")
    (tmp_path / "config.yaml").write_text(FOREIGN)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "config.yaml"
    assert not (tmp_path / "it-ran").exists()


def test_a_run_folder_from_elsewhere_lists_what_would_run(foreign):
    with pytest.raises(UserError) as refused, foreign_run(foreign):
        pass
    text = str(refused.value)
    assert (
        f"{foreign} was not written by one of your runs and refers to code that would run here: os:system (model"
        in text
    )
    assert "--allow os:system --allow evil.py:make --allow 'my rewards.py:f'" in text


def test_each_name_is_allowed_by_the_command_line_or_the_environment(foreign, monkeypatch):
    with (
        pytest.raises(UserError, match=r"would run here: my rewards\.py:f \(rewards\.1\.name\)\. Read"),
        foreign_run(foreign, allow=NAMED[:2]),
    ):
        pass
    monkeypatch.setenv(ALLOW, "my rewards.py:f;another:name")
    names = check_foreign(load_run(foreign)[1].rewards[1].name, "", "x", [])
    assert list(names) == ["my rewards.py:f"]


def test_a_name_in_an_override_is_ones_own(foreign):
    with pytest.raises(UserError) as refused, foreign_run(foreign, ['rewards=[{name: "mine.py:f"}]']):
        pass
    assert "mine.py" not in str(refused.value)
    assert "os:system" in str(refused.value)


def test_what_a_run_of_this_user_wrote_needs_no_permission(foreign):
    text, content = f"{foreign} of this test", {"build": "os:system"}
    remember(content, text)
    assert is_known(text)
    assert check_foreign(content, text, "x") is None
    assert check_foreign(content, text + " ", "x", ["os:system"]) == content_names(content)
    remember({"build": None}, "no code")
    assert not is_known("no code")  # nothing to allow


def content_names(content):
    return named_code(content).keys()


@pytest.mark.parametrize("name", ["os:system", "mmrl.files:os.remove", "tests.programs:Program", OWN_FILE])
def test_nothing_else_is_loaded_while_a_file_from_elsewhere_is_used(name):
    load_function("os:getcwd")
    with restricted(["os:getpid"]):
        assert load_function("os:getpid") is os.getpid
        load_function("mmrl.vlm.toy.digits:build_questions")
        with pytest.raises(UserError, match=f"thing: {name} is code outside the suite.*add --allow {name}"):
            load_function(name, what="thing")
    load_function("os:getcwd")


def test_factories_of_simulators_are_the_suites_own_files_wherever_it_is_installed(tmp_path):
    """Their workers load them by path, since they run in a Python without this package."""
    inside = Path(metaworld.__file__)
    (tmp_path / "metaworld.py").write_text("def make(): ...")
    outside = os.path.relpath(tmp_path / "metaworld.py", inside.parent)
    with restricted([]):
        assert load_function(f"{inside}:make", what="factory")(["push"]).tasks().keys() == {"push"}
        for place in (tmp_path / "metaworld.py", inside.parent / outside):
            with pytest.raises(UserError, match="is code outside the suite"):
                load_function(f"{place}:make", what="factory")


def test_started_processes_are_held_to_it_too():
    program = "from mmrl.workers.loading import find_function; find_function('os:getcwd')"
    with restricted([]):
        child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "os:getcwd is code outside the suite" in child.stderr


def test_a_recipe_from_elsewhere_is_not_imported(foreign):
    foreign.write_text("recipe: evil:Recipe:Config\n")
    with pytest.raises(UserError, match=r"evil:Recipe:Config \(recipe\)"), foreign_run(foreign):
        pass
    with restricted([]), pytest.raises(UserError, match=r"recipe 'evil:Recipe:Config' cannot be loaded: .*--allow"):
        load_run(foreign)


@pytest.mark.parametrize("words", [("evaluate",), ("export",), ("serve",)])
def test_commands_on_a_run_folder_refuse_and_name_the_option(words, foreign, tmp_path):
    code, _, errors = Program(["-m", "mmrl.cli", *words, str(tmp_path)], tmp_path).wait()
    assert code == 2
    assert "--allow os:system" in errors


def test_an_experiment_from_elsewhere_lists_the_code_of_all_its_runs(foreign, tmp_path):
    arms = "{a: {}, b: {overrides: {accuracy_reward: 'other.py:f'}}}"
    (tmp_path / "e.yaml").write_text(
        f"name: e\nbase: {foreign}\nmetric: accuracy\nseeds: [1, 2]\nbaseline: a\narms: {arms}\n"
    )
    code, _, errors = Program(["-m", "mmrl.cli", "compare", "e.yaml"], tmp_path).wait()
    assert code == 2
    for name in ("os:system", "evil.py:make", "'my rewards.py:f'", "other.py:f"):
        assert f"--allow {name}" in errors


def test_doctor_does_not_load_code_of_a_run(foreign, tmp_path):
    (finding,) = [found for found in check_run(tmp_path) if "os:system" in str(found)]
    assert finding.state == "fail"


def test_the_interpreter_that_a_saved_policy_names_is_not_started(tmp_path):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/it-ran\n")
    program.chmod(0o755)
    entries = {"kind": "lerobot_flow", "folder": str(tmp_path), "python": str(program)}
    (tmp_path / "policy.json").write_text(json.dumps(entries))
    with pytest.raises(UserError, match=rf"policy\.json was not written .* {program} \(python\)"):
        ServedActionPolicy.from_pretrained(tmp_path)
    assert not (tmp_path / "it-ran").exists()
