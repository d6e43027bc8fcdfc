"""The programs in examples/ run unchanged, learn, and write the files that they name."""

import re
from pathlib import Path

import pytest

from tests.programs import run_program

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name, folder):
    """Output of a program; its temporary files go into the folder."""
    return run_program([str(EXAMPLES / name)], folder, TMPDIR=str(folder))


def first_and_last(text):
    """The two numbers of `in the first step: a, in the last: b`."""
    first, last = re.search(r"in the first step: (\S+), in the last: (\S+)", text).groups()
    return float(first), float(last)


def test_every_example_is_listed_and_tested():
    programs = sorted(path.name for path in EXAMPLES.glob("*.py"))
    listed = re.findall(r"^- \[(\S+\.py)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.M)
    assert sorted(listed) == programs
    tested = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in programs if f'run("{name}"' not in tested] == []


def test_own_reward(tmp_path):
    text = run("own_reward.py", tmp_path)
    first, last = first_and_last(text)
    assert last > first + 0.05
    assert Path(re.search(r"responses: (\S+)", text)[1]).is_file()


def test_own_objective(tmp_path):
    text = run("own_objective.py", tmp_path)
    assert "minimise  mean -A_it 0.3 tanh(log r_it / 0.3)" in text
    assert float(re.findall(r"mean reward (\S+)", text)[-1]) > 0.9


def test_own_loop(tmp_path):
    shares = [float(share) for share in re.findall(r": (\S+) of the symbols", run("own_loop.py", tmp_path))]
    assert shares[0] < 0.4
    assert shares[-1] > 0.9


def test_own_loop_needs_nothing_of_the_suite_but_the_core():
    text = (EXAMPLES / "own_loop.py").read_text()
    assert re.findall(r"^(?:from|import) (\S+)", text, re.M) == [
        "dataclasses",
        "torch",
        "torch.distributions",
        "mmrl.core",
    ]


@pytest.mark.slow
def test_own_robot_env(tmp_path):
    pytest.importorskip("gymnasium")
    before, after = map(float, re.findall(r"training: success (\S+)", run("own_robot_env.py", tmp_path)))
    assert before < after
    assert after > 0.8


@pytest.mark.slow
def test_own_agent_env(tmp_path):
    first, last = first_and_last(run("own_agent_env.py", tmp_path))
    assert 0 <= first < last <= 1


@pytest.mark.slow
def test_own_agent_program(tmp_path):
    first, last = first_and_last(run("own_agent_program.py", tmp_path))
    assert last > first + 0.05


@pytest.mark.slow
def test_own_image_reward(tmp_path):
    pytest.importorskip("diffusers")
    text = run("own_image_reward.py", tmp_path)
    first, last = first_and_last(text)
    assert last > first + 0.01
    assert Path(re.search(r"images: (\S+)", text)[1]).is_file()


@pytest.mark.slow
def test_evaluate_only(tmp_path):
    text = run("evaluate_only.py", tmp_path)
    assert "held_out/n: 12.000" in text
    assert 0 <= float(re.search(r"held_out/accuracy/greedy: (\S+)", text)[1]) <= 1
    assert Path(re.search(r"answers: (\S+)", text)[1]).is_file()
    assert not list(tmp_path.rglob("checkpoints"))


@pytest.mark.slow
def test_load_result(tmp_path):
    pytest.importorskip("diffusers")
    text = run("load_result.py", tmp_path)
    assert float(re.search(r"base model plus adapter: (\S+)", text)[1]) < 1e-4
    assert "the pipeline generates 32 x 32 pixels" in text
