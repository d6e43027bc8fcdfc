"""Each check of `mmrl doctor` recognises its fault and suggests a fix."""

import json
import re
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from mmrl.cli import doctor, main
from mmrl.cli.doctor import Requirement, release
from mmrl.errors import UserError
from mmrl.findings import Finding

REQUIREMENTS = [Requirement("torch", "2.6", ""), Requirement("peft", "0.17", "vlm"), Requirement("av", "", "vlm")]


def lookup_in(installed):
    def lookup(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    return lookup


def states(findings):
    return {finding.name: finding.state for finding in findings}


def test_requirement_strings():
    lines = [
        "torch>=2.6",
        'transformers>=5.0; extra == "vlm"',
        "torchvision; extra == 'vlm'",
        'mmrl-suite[vlm,diffusion]; extra == "all"',
        'ruff>=0.9; extra == "dev"',
        'jinja2>=3.1,<4; python_version >= "3.11" and extra == "vlm"',
        'open3d>=0.20; sys_platform == "another" and extra == "robotics"',
        'open3d-cpu>=0.20; (sys_platform != "another" or platform_machine == "x") and extra == "robotics"',
    ]
    assert doctor.read_requirements(lines) == [
        Requirement("torch", "2.6", ""),
        Requirement("transformers", "5.0", "vlm"),
        Requirement("torchvision", "", "vlm"),
        Requirement("jinja2", "3.1", "vlm"),
        Requirement("open3d-cpu", "0.20", "robotics"),
    ]


def test_own_metadata_lists_every_room():
    requirements = doctor.read_requirements()
    assert {"", "vlm", "diffusion", "robotics"} <= {requirement.extra for requirement in requirements}
    assert Requirement("omegaconf", "2.3", "") in requirements


@pytest.mark.parametrize(
    ("older", "newer"),
    [("2.5.1", "2.6"), ("0.9", "0.17"), ("", "0.0.1"), ("4.57.1.dev0", "5.0.0rc1"), ("2.6", "2.13.0+cpu")],
)
def test_releases_compare_as_numbers(older, newer):
    assert release(older) < release(newer)


def test_equal_releases_of_different_length():
    assert release("5.0") == release("5.0.0") == release("5.0.0+cu130")


def test_complete_packages_are_fine():
    found = doctor.check_packages(REQUIREMENTS, lookup_in({"torch": "2.6", "peft": "0.17.1", "av": "1"}))
    assert states(found) == {"torch": "ok", "peft [vlm]": "ok", "av [vlm]": "ok"}


def test_missing_base_package_is_a_failure():
    found = doctor.check_packages(REQUIREMENTS, lookup_in({"peft": "1.0", "av": "1"}))
    assert states(found)["torch"] == "fail"
    assert found[0].found == "missing"
    assert "pip install" in found[0].advice


def test_package_below_its_floor():
    found = doctor.check_packages(REQUIREMENTS, lookup_in({"torch": "2.5.1", "peft": "0.16", "av": "1"}))
    assert states(found) == {"torch": "fail", "peft [vlm]": "warn", "av [vlm]": "ok"}
    assert "needs 2.6 or newer" in found[0].advice
    assert "[vlm]" in found[1].advice


def test_no_complete_room_is_a_failure_and_one_complete_room_is_enough():
    requirements = [*REQUIREMENTS, Requirement("mujoco", "3.2", "robotics")]
    nothing = doctor.check_packages(requirements, lookup_in({"torch": "2.6", "peft": "1.0"}))
    assert states(nothing)["rooms"] == "fail"
    robots = doctor.check_packages(requirements, lookup_in({"torch": "2.6", "mujoco": "3.3"}))
    assert states(robots) == {"torch": "ok", "peft [vlm]": "note", "av [vlm]": "note", "mujoco [robotics]": "ok"}


def make_package(folder, name, marker="__init__.py"):
    (folder / name).mkdir(parents=True)
    (folder / name / marker).write_text("")
    return folder


def test_no_clash(tmp_path):
    home = make_package(tmp_path / "suite", "diffusion")
    assert set(states(doctor.check_names(home, [str(home)])).values()) == {"ok"}


@pytest.mark.parametrize("marker", ["__init__.py", "model.py"])
def test_clash_that_hides_the_suite_says_where_and_what_to_do(tmp_path, marker):
    home = tmp_path / "suite"
    other = make_package(tmp_path / "other", "diffusion", marker)
    found = {item.name: item for item in doctor.check_names(home, [str(other)])}
    assert (found["diffusion"].state, found["robotics"].state) == ("warn", "ok")
    assert str(other / "diffusion") in found["diffusion"].found
    assert f"PYTHONPATH={home}" in found["diffusion"].advice


def test_order_of_the_path_decides_who_is_hidden(tmp_path):
    home = make_package(tmp_path / "suite", "diffusion")
    other = make_package(tmp_path / "other", "diffusion")
    first = {item.name: item for item in doctor.check_names(home, [str(home), str(other)])}["diffusion"]
    second = {item.name: item for item in doctor.check_names(home, [str(other), str(home)])}["diffusion"]
    assert (first.state, second.state) == ("ok", "warn")
    assert str(other / "diffusion") in first.found


def test_a_single_file_clashes_too(tmp_path):
    (tmp_path / "robotics.py").write_text("")
    found = {item.name: item for item in doctor.check_names(tmp_path / "suite", [str(tmp_path)])}
    assert str(tmp_path / "robotics.py") in found["robotics"].found


@pytest.mark.parametrize(
    ("answer", "state", "advice"), [("native", "ok", ""), ("patched", "ok", "torchvision"), ("absent", "note", "pip")]
)
def test_states_of_torchvision(answer, state, advice):
    (finding,) = doctor.check_torchvision(lambda: answer)
    assert finding.state == state
    assert {"absent": "not installed"}.get(answer, answer) in finding.found
    assert advice in finding.advice


def test_torchvision_that_cannot_be_imported():
    def broken():
        raise RuntimeError("libtorch.so: undefined\nsymbol")

    (finding,) = doctor.check_torchvision(broken)
    assert (finding.state, finding.found) == ("warn", "RuntimeError: libtorch.so: undefined symbol")
    assert "--no-deps 'torchvision" in finding.advice


def test_missing_render_libraries_name_their_packages():
    found = {item.name: item for item in doctor.check_rendering({"GL": "libGL.so.1"}.get)}
    assert found["GL"].state == "ok"
    assert "libosmesa6" in found["OSMesa"].advice
    assert "libusb-1.0-0" in found["usb-1.0"].advice
    assert found["MuJoCo"].found.endswith("without a screen: none")


def test_backend_without_a_screen():
    found = {item.name: item for item in doctor.check_rendering({"EGL": "libEGL.so.1"}.get)}
    assert found["MuJoCo"].state == "ok"
    assert found["MuJoCo"].found.endswith("without a screen: egl")


def test_disk_that_can_be_written(tmp_path):
    (finding,) = doctor.check_disk(tmp_path / "not" / "there" / "yet")
    assert finding.state in ("ok", "warn")
    assert "GB free" in finding.found
    assert list(tmp_path.iterdir()) == []


def test_disk_that_cannot_be_written(tmp_path):
    blocker = tmp_path / "runs"
    blocker.write_text("a file where the folder should be")
    (finding,) = doctor.check_disk(blocker)
    assert finding.state == "fail"
    assert "output_dir=" in finding.advice


def test_a_check_that_breaks_is_reported_and_the_others_continue(tmp_path, monkeypatch):
    def broken():
        raise OSError("no such device")

    monkeypatch.setattr(doctor, "check_processor", broken)
    found = doctor.check_all(tmp_path)
    assert Finding("cpu", "check", "warn", "OSError: no such device", "the check itself failed") in found
    assert {"python", "torch", "disk"} <= {finding.area for finding in found}


def test_how_a_models_code_is_shut_in():
    (finding,) = doctor.check_sandbox(lambda: None)
    assert (finding.state, finding.found) == ("ok", "model-written code runs in bubblewrap")

    def refuse():
        raise UserError("install bubblewrap")

    (finding,) = doctor.check_sandbox(refuse)
    assert (finding.state, finding.advice) == ("note", "install bubblewrap")


@pytest.mark.parametrize("terminal", [True, False])
def test_table_shows_problems_first_and_wraps_nothing(terminal, capsys, monkeypatch):
    command = "pip install " + "a-very-long-name " * 12
    path = "/a/long/path" * 20
    findings = [
        Finding("disk", "runs", "ok", path),
        Finding("names", "diffusion", "warn", "hidden", "rename it"),
        Finding("torch", "build", "fail", "[missing]", command),
    ]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    doctor.render(findings)
    text = capsys.readouterr().out
    assert ("\033[1;31mfail\033[0m" in text) == terminal
    shown = re.sub("\033.*?m", "", text).splitlines()
    assert [line.split()[0] for line in shown[:3]] == ["fail", "warn", "ok"]
    assert shown[0].endswith("[missing]")
    assert shown[2].endswith(path)
    assert shown[3:7] == ["", "what to do:", f"  torch build: {command}", "  names diffusion: rename it"]
    assert "1 failures, 1 warnings" in text


def test_command_line_exit_code_and_json(tmp_path, monkeypatch, capsys):
    good, bad = Finding("a", "b", "warn", "c"), Finding("a", "b", "fail", "c", "do this")
    for findings, code in (([good], 0), ([good, bad], 1)):
        monkeypatch.setattr(doctor, "check_all", lambda runs_dir, found=findings: found)
        assert main(["doctor", "--json", "--output", str(tmp_path)]) == code
        content = json.loads(capsys.readouterr().out)
        assert content["usable"] is (code == 0)
        assert len(content["findings"]) == len(findings)


def test_this_machine_can_train(capsys, tmp_path):
    assert main(["doctor", "--json", "--output", str(tmp_path)]) == 0
    content = json.loads(capsys.readouterr().out)
    areas = {finding["area"] for finding in content["findings"]}
    assert {
        "python",
        "packages",
        "torch",
        "cpu",
        "torchvision",
        "video",
        "rendering",
        "names",
        "browser",
        "disk",
    } <= areas
