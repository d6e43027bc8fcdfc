"""`python -m benchmarks` on the command line: JSON alone on standard output, exit codes, messages."""

import json

import pytest

import benchmarks.vlm.comparisons as vlm
from benchmarks import ROOMS
from benchmarks.__main__ import main
from benchmarks.harness import check, comparison


def test_standard_output_is_the_json_and_the_file_too(tmp_path, capsys):
    out = tmp_path / "new" / "result.json"
    arguments = ["vlm", "--quick", "--only", "generation", "--folder", str(tmp_path), "--out", str(out)]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result == json.loads(out.read_text())
    assert set(result) == {"bench", "settings", "versions", "machine", "comparisons", "failed"}
    assert list(result["comparisons"]) == ["generation"]
    assert (result["settings"]["blocks"], result["settings"]["quick"]) == (1, True)
    assert result["versions"]["torch"]
    assert result["machine"]["cores"] >= 1
    assert "== generation ==" in captured.err


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (3.0, 1)])
def test_a_failed_check_is_exit_1_and_the_result_is_still_printed(value, code, monkeypatch, capsys):
    monkeypatch.setattr(vlm, "compare", lambda options: {"x": comparison({}, checks={"c": check(value, 2.0)})})
    assert main(["vlm"]) == code
    captured = capsys.readouterr()
    assert json.loads(captured.out)["failed"] == (["x"] if code else [])
    assert ("FAILED" in captured.err) == bool(code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vlm", "--only", "updates"], "--only updates: unknown comparison; available: equality, update"),
        (["vlm", "--threads", "-2"], "--threads is -2; must be at least 1"),
        (["sim", "--against", "trl"], "--against is an option of the vlm benchmarks"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(arguments, message, capsys):
    assert main([*arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("room", ROOMS)
def test_the_command_knows_every_domain(room, capsys):
    assert main([room, "--threads", "-2"]) == 2
    assert "--threads is -2" in capsys.readouterr().err
