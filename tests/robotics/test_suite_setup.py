import sys
from pathlib import Path

import pytest

from mmrl.errors import RunError, UserError
from mmrl.workers import interpreters
from robotics.sim import suite_setup


class TestSetup:
    @pytest.fixture
    def calls(self, monkeypatch):
        made = []

        def run(command):
            made.append(list(command))
            if command[1:3] == ["-m", "venv"]:
                python = interpreters.python_in(Path(command[3]))
                python.parent.mkdir(parents=True, exist_ok=True)
                python.write_text("")
                (Path(command[3]) / "pyvenv.cfg").write_text("")

        monkeypatch.setattr(interpreters, "run_apart", run)
        monkeypatch.setattr(suite_setup, "_check", lambda name, place: "checked")
        return made

    @pytest.mark.parametrize("name", list(suite_setup.RECIPES))
    def test_every_step_runs_in_the_environment_and_is_reported(self, calls, tmp_path, name):
        told = []
        python = suite_setup.setup_suite(name, tmp_path / "new", python="python3", say=told.append)
        assert calls[0] == ["python3", "-m", "venv", str(tmp_path / "new")]
        assert len(calls) == 1 + len(suite_setup.RECIPES[name].steps)
        assert all(call[:4] == [str(python), "-m", "pip", "install"] for call in calls[1:])
        assert told[-2].endswith("checked")
        assert "open_suite" in told[-1]
        assert suite_setup.suite_python(name, tmp_path / "new") == python

    def test_a_folder_of_something_else_is_not_touched(self, calls, tmp_path):
        (tmp_path / "thesis.txt").write_text("")
        with pytest.raises(UserError, match="other than a virtual environment"):
            suite_setup.setup_suite("libero", tmp_path)
        assert calls == []

    def test_torch_is_installed_without_cuda_and_before_its_dependents(self):
        steps = suite_setup.RECIPES["libero"].steps
        assert steps[0] == f"torch==2.13.0 {suite_setup.TORCH_INDEX}"

    def test_a_step_that_fails_shows_its_last_words(self):
        script = "import sys; print('no such wheel', file=sys.stderr); sys.exit(3)"
        with pytest.raises(RunError, match=r"ended with code 3:\n.*no such wheel"):
            interpreters.run_apart([sys.executable, "-c", script])


def test_the_folder_follows_the_variable_then_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MMRL_SUITES", str(tmp_path))
    assert suite_setup.suite_folder("libero") == tmp_path / "libero"
    monkeypatch.delenv("MMRL_SUITES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert suite_setup.suite_folder("metaworld") == tmp_path / "cache" / "mmrl" / "suites" / "metaworld"
    assert suite_setup.suite_folder("metaworld", tmp_path / "here") == tmp_path / "here"


def test_a_suite_that_is_not_there_says_what_to_do(tmp_path):
    with pytest.raises(
        UserError, match="unknown suite 'robocasa'; available: metaworld, gymnasium_robotics, robosuite, libero"
    ):
        suite_setup.open_suite("robocasa")
    with pytest.raises(UserError, match="mmrl sim setup libero"):
        suite_setup.open_suite("libero", folder=tmp_path)
