"""`mmrl evaluate --verify`: rows are repeated alone, and another row, weight or protocol is found."""

import itertools
import json
import os
import re

import pytest
import torch

from mmrl.cli.program import main
from mmrl.comparison.verify import UNEQUAL, Repeater, chance, power, verify
from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.runs.ledger import read_ledger, write_ledger
from mmrl.runs.records import read_jsonl
from mmrl.training.run import evaluate, train
from mmrl.trust import named_code
from robotics.episodes.episode_evaluation import RobotEvaluationConfig, RobotMeasure
from tests.robotics.test_robot_recipes import grpo, trainer


@pytest.fixture
def said():
    return []


@pytest.fixture
def evaluated(tmp_path):
    """Evaluation of a trained run: 8 initial states, greedy and twice sampled."""
    config = grpo(tmp_path, evaluation=RobotEvaluationConfig(samples=2, batch_tasks=3), trainer=trainer(steps=1))
    run = train(find_recipe("robot_grpo"), config)
    metrics = evaluate(find_recipe("robot_grpo"), config, run)
    return run, metrics


def test_every_row_is_the_same_when_it_is_run_again(evaluated, said):
    run, metrics = evaluated
    ledger = read_ledger(run)
    assert ledger.problems() == []
    assert verify(run / "ledger.jsonl", said.append, 24, (), ()) == 0
    assert said[-1].startswith("24 of 24 rows are the same")
    greedy, sampled = ledger.success_rates()
    right = [row["success"] for row in greedy.rows]
    assert metrics["held_out/success/greedy"] == sum(right) / 8
    low, high = metrics["held_out/success/sampled/low"], metrics["held_out/success/sampled/high"]
    assert f"[{low:.1%}, {high:.1%}], 16 rows from 8 initial states of 1 task" in str(sampled)
    assert verify(run, said.append, 0, (), ()) == 0


def test_a_row_that_was_changed_differs(evaluated, said):
    path = evaluated[0] / "ledger.jsonl"
    rows = read_jsonl(path)
    rows[4]["length"] -= 1
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert verify(path, said.append, 0, [4, 5], ()) == 1
    length = rows[4]["length"]
    assert f"  row 5 (held_out, greedy, right/held_out/4) differs: length {length} -> {length + 1}" in said
    assert said[-1] == "1 of 2 rows are the same: --row 4,5"
    with pytest.raises(UserError, match=r"row 25 does not exist; .* has rows 1 to 24"):
        verify(path, said.append, 0, [25], ())


def test_a_row_that_differs_from_its_own_repetition_says_so(evaluated, said, monkeypatch):
    path, run, drawn = evaluated[0] / "ledger.jsonl", Repeater.run, iter(range(1000, 2000))
    monkeypatch.setattr(Repeater, "run", lambda self, row, **how: run(self, row, **how) | {"length": next(drawn)})
    assert verify(path, said.append, 0, [4], ()) == 1
    assert said[-2] == f"    {UNEQUAL}: length 1000 -> 1002"


def test_a_row_that_names_another_initial_state_or_seed_differs(evaluated, said):
    path = evaluated[0] / "ledger.jsonl"
    rows = read_jsonl(path)
    rows[4] |= {"state": rows[3]["state"], "seed": rows[3]["seed"]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert verify(path, said.append, 0, [4, 5], ()) == 1
    assert "differs: state right/held_out/3 -> right/held_out/4; seed " in said[-2]


def test_rows_that_differ_by_rounding_are_the_same_in_their_batch(evaluated, said, monkeypatch):
    """A policy whose sums depend on what is computed with them, here by the number of episodes."""
    run, alone = RobotMeasure.run, []

    def rounded(self, batch, start):
        rows = run(self, batch, start)
        alone.append(len(batch))
        return [row | {"return": row["return"] + 1e-7 * (len(batch) == 1)} for row in rows]

    monkeypatch.setattr(RobotMeasure, "run", rounded)
    assert verify(evaluated[0], said.append, 0, [4], ()) == 0
    assert alone == [1, 3]
    assert "1 of 1 rows are the same (1 of them only in their original batch, because of rounding)" in said[-1]


def test_another_policy_or_protocol_is_refused(evaluated, said):
    run, _ = evaluated
    about = read_ledger(run).about
    with pytest.raises(UserError, match=rf"the ledger's has {about['sha256']}: seed 0 -> 5; .*bootstrap 0 -> 5"):
        verify(run, said.append, 1, (), ["seed=5"])
    # the weights, and not only their file, whose checksum a checkpoint has anyway
    policy = about["policy"] | {"checkpoint": None}
    (run / "protocol.json").write_text(json.dumps(dict(about) | {"policy": policy}))
    with pytest.raises(UserError, match=rf"the policy here has SHA-256 \w+, but the ledger's has {policy['sha256']}"):
        verify(run, said.append, 1, (), (), named_code(about["config"]))


def test_the_check_says_how_likely_its_sample_shows_false_rows(evaluated, said):
    assert verify(evaluated[0], said.append, 2, (), ()) == 0
    (line,) = (line for line in said if "probability" in line)
    assert line == f"  {power(24, 2)}"
    assert verify(evaluated[0], said.append, 0, [3, 3], ()) == 0
    assert said[-1] == "1 of 1 rows are the same: --row 3"
    assert sum("probability" in line for line in said) == 1


def test_chances_are_those_of_counting_all_samples():
    for count, false, drawn in itertools.product((1, 5, 8), (0, 1, 3), range(6)):
        if false <= count and drawn <= count:
            samples = list(itertools.combinations(range(count), drawn))
            share = sum(any(row < false for row in sample) for sample in samples) / len(samples)
            assert chance(count, false, drawn) == pytest.approx(share)
    # SciPy 1.17.1: 1 - scipy.stats.hypergeom.pmf(0, 250, 5, [10, 111, 112])
    golden = [0.18600197392071316, 0.9485643735365368, 0.9504145759273088]
    assert [chance(250, 5, drawn) for drawn in (10, 111, 112)] == pytest.approx(golden)
    assert power(250, 10) == (
        "10 randomly drawn rows detect a ledger with 5 false of its 250 rows (2%) with a probability of 19%; "
        "--rows 112 would detect it with 95%"
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--verify", "--rows", "-1"], "--rows is -1; {run} has 24 rows, so use 0 to 24"),
        (["--verify", "--rows", "25"], "--rows is 25; {run} has 24 rows, so use 0 to 24"),
        (["--verify", "--rows", "abc"], "argument --rows: invalid int value: 'abc'"),
        (["--verify", "--rows", "1.5"], "argument --rows: invalid int value: '1.5'"),
        (["--verify", "--row", "abc"], "argument --row: expected row numbers such as 4,60, got 'abc'"),
        (["--verify", "--row", "0"], "row 0 does not exist; {run} has rows 1 to 24"),
        (["--rows", "3"], "--rows and --row select rows of a ledger to repeat; they require --verify"),
        (["--row", "3"], "--rows and --row select rows of a ledger to repeat; they require --verify"),
    ],
)
def test_counts_that_no_ledger_has_are_refused(options, problem, tmp_path, capsys):
    measure = {"repeats": 6, "decodings": {"greedy": 1}}
    protocol = {"seed": 0, "splits": {"all": {"tasks": 4, "measures": [measure]}}}
    write_ledger(tmp_path, [], {"protocol": protocol, "policy": {"sha256": "p", "step": 3}})
    assert main(["evaluate", str(tmp_path), *options]) == 2
    assert problem.format(run=tmp_path) in capsys.readouterr().err


HOSTILE = {
    "a builder": lambda config, code: config["model"] | {"kind": "os:system", "options": {"command": code}},
    "a function of the suite that writes files": lambda config, code: config["model"] | {"kind": "mmrl.files:replaced"},
    "a function that a module of the suite imports": lambda config, code: (
        config["model"] | {"kind": "mmrl.files:os.remove"}
    ),
    "a file beside the ledger": lambda config, code: config["model"] | {"kind": f"{code}.py:Policy"},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_ledger_from_elsewhere_runs_no_code_that_is_not_allowed(kind, evaluated, said, tmp_path):
    folder, marker = evaluated[0], tmp_path / "it-ran"
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    about = dict(read_ledger(folder).about)
    about["config"]["model"] = HOSTILE[kind](about["config"], str(folder / "own"))
    (folder / "protocol.json").write_text(json.dumps(about))
    allowed = [name for name, place in named_code(about["config"]).items() if place != "model.kind"]
    name = about["config"]["model"]["kind"]
    with pytest.raises(UserError, match=rf"refers to code that would run here: {re.escape(name)} \(model\.kind\)"):
        verify(folder, said.append, 1, (), (), allowed)
    assert not marker.exists()
    assert "MMRL_RESTRICTED" not in os.environ


def test_the_digest_is_of_every_weight():
    from mmrl.runs.fingerprint import weights_digest

    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    first = weights_digest(module)
    assert first == weights_digest(module)
    for tensor in module.state_dict().values():
        old = tensor.clone()
        tensor.add_(1)
        assert weights_digest(module) != first
        tensor.copy_(old)
    assert weights_digest(module) == first
    assert weights_digest(module.bfloat16()) != first
