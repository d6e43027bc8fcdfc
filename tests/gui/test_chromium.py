"""Without a browser, errors and `mmrl doctor` name what to install, and a program that is not a browser."""

import pytest

from mmrl.errors import UserError
from mmrl.gui.browser import browser as chromium
from mmrl.gui.browser.doctor import check_browser


def test_without_a_browser_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(chromium.EXECUTABLE_VARIABLE, raising=False)
    monkeypatch.setattr(chromium, "MAC_PROGRAMS", ())
    monkeypatch.setattr(chromium.importlib.util, "find_spec", lambda name: object())
    assert chromium.find_chromium() is None
    with pytest.raises(UserError, match=r"apt-get install .*chromium.*MMRL_CHROMIUM"):
        chromium.require_chromium()
    with pytest.raises(UserError, match="the option `executable` is '/no/chrome'"):
        chromium.require_chromium("/no/chrome")
    monkeypatch.setattr(chromium.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'mmrl-suite\[gui\]'"):
        chromium.require_chromium()


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_doctor_says_what_to_install_for_screens():
    found = by_name(check_browser(lambda: None))["program"]
    assert found.state == "note"
    assert "apt-get install" in found.advice
    assert "only mmrl.gui needs it" in found.advice


def test_doctor_reports_a_program_that_does_not_run(tmp_path):
    program = tmp_path / "chrome"
    program.write_text("#!/bin/sh\necho this is a shim for snap >&2\nexit 1\n")
    program.chmod(0o755)
    found = by_name(check_browser(lambda: str(program)))["program"]
    assert (found.state, "exit status 1" in found.found) == ("warn", True)


def test_doctor_reports_a_wrong_variable(monkeypatch):
    monkeypatch.setenv(chromium.EXECUTABLE_VARIABLE, "/no/chrome")
    found = by_name(check_browser())["program"]
    assert (found.state, "'/no/chrome'" in found.advice) == ("warn", True)


def test_doctor_shows_the_version(tmp_path):
    program = tmp_path / "chrome"
    program.write_text("#!/bin/sh\necho Chromium 1.2.3\n")
    program.chmod(0o755)
    found = by_name(check_browser(lambda: str(program)))["program"]
    assert (found.state, found.found) == ("ok", f"Chromium 1.2.3 ({program})")
