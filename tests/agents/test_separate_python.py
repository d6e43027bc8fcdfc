"""Environments in another Python."""

import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.agents.environments import separate_python
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.env_pool import EnvironmentConfig, EnvPool
from mmrl.agents.environments.environment import Action
from mmrl.agents.environments.separate_python import environment_python, setup_separate
from mmrl.errors import UserError
from mmrl.fields import check_config

FAKES = Path(__file__).with_name("fake_envs.py")


@pytest.mark.slow
def test_an_environment_runs_in_another_interpreter(tmp_path, monkeypatch):
    # elsewhere, so that the interpreter does not find this package in the working folder
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python.parents[1])], check=True)
    config = EnvironmentConfig(f"{FAKES}:Fake", workers=1, python=str(python))
    with pytest.raises(UserError, match=r"environment\.python: .*bare/bin/python has no numpy; install it there"):
        EnvPool(config)
    folder = next((python.parents[1] / "lib").glob("python*/site-packages"))
    import numpy

    (folder / "packages.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")
    with EnvPool(config) as pool:
        begun = pool.reset({0: AgentTask("t", {}, 3)})[0]
        assert begun.observation.text == "seed 3"
        assert pool.step({0: Action("go")})[0].reward == 1.0
        assert pool.step({0: Action("raise")})[0].failure.reason == "ValueError: the door is stuck"


def test_interpreters_are_paths_or_names_of_installed_environments(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_ENVIRONMENTS", str(tmp_path))
    assert environment_python(sys.executable) == sys.executable
    with pytest.raises(UserError, match=f"not installed in {tmp_path}/browsergym; install it with `mmrl setup"):
        environment_python("browsergym")
    with pytest.raises(UserError, match="'nopython', which is neither an interpreter nor one of: browsergym"):
        environment_python("nopython")
    with pytest.raises(ValueError, match=r"environment\.python"):
        check_config(EnvironmentConfig("a:b", python=sys.executable, isolate=False), "environment")


def test_setup_installs_a_package_and_imports_it(tmp_path, monkeypatch):
    commands, said = [], []
    monkeypatch.setenv("MMRL_ENVIRONMENTS", str(tmp_path))
    monkeypatch.setattr(separate_python, "run_apart", commands.append)
    monkeypatch.setattr("mmrl.workers.interpreters.run_apart", commands.append)
    python = setup_separate("browsergym", said.append)
    assert python == tmp_path / "browsergym" / "bin" / "python"
    assert [command[1] for command in commands] == ["-m", "-m", "-c"]
    assert "browsergym-core==0.14.3" in commands[1]
    assert "set environment.python: browsergym" in said[-1]
