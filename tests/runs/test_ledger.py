"""Ledgers by hand: what cannot be right is found, repeated states count once, impossible rates are refused."""

import json

import pytest

from mmrl.errors import UserError
from mmrl.runs.ledger import COLUMNS, digest, read_ledger, write_ledger
from mmrl.runs.records import read_jsonl, read_outcomes
from mmrl.runs.statistics import wilson_interval, with_interval

MEASURE = {"repeats": 1, "decodings": {"greedy": 1}, "suite": "line", "version": "1", "horizon": 10, "replan": 2}
PROTOCOL = {"seed": 0, "splits": {"all": {"tasks": 4, "digest": "d", "chosen": "layouts=4", "measures": [MEASURE]}}}


def row(index, success=True, **changes):
    scores = {"scores": {"success/greedy": float(success)}, "parts": {"task": "go"}}
    known = {"split": "all", "measure": 0, "index": index, "repeat": 0, "decoding": "greedy", "answer": 0}
    known |= {"task": "go", "state": f"go/{index}", "success": success, "length": 5, "ending": "end", **scores}
    return known | changes


def written(folder, rows, protocol=PROTOCOL):
    write_ledger(folder, rows, {"protocol": protocol, "policy": {"sha256": "p" * 64, "step": 3}})
    return folder / "ledger.jsonl"


def changed(path, number, **changes):
    """The ledger with other values in a row, counted from 1."""
    rows = read_jsonl(path)
    rows[number - 1] |= changes
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return read_ledger(path).problems()


def test_a_row_has_every_column_and_a_trial_without_result_has_a_row(tmp_path):
    path = written(tmp_path, [row(0), row(2, False)])
    rows = read_jsonl(path)
    assert [list(each) for each in rows] == [list(COLUMNS)] * 4
    assert [each["success"] for each in rows] == [True, None, False, None]
    assert {(each["protocol"], each["policy"]) for each in rows} == {(digest(PROTOCOL), "p" * 64)}
    assert [rows[0][name] for name in ("suite", "chosen", "horizon", "replan", "seed")] == [
        "line",
        "layouts=4",
        10,
        2,
        0,
    ]
    assert rows[1]["ending"] == "left out"
    ledger = read_ledger(tmp_path)
    assert ledger.problems() == []
    low, high = wilson_interval(1, 2)
    assert [str(rate) for rate in ledger.success_rates()] == [
        f"all, greedy: 1 of 2 = 50.0% [{low:.1%}, {high:.1%}], 2 rows from 2 initial states of 1 task; "
        "2 without a result"
    ]


def test_questions_are_counted_as_tasks(tmp_path):
    rows = [row(index, task=None) for index in range(PROTOCOL["splits"]["all"]["tasks"])]
    (rate,) = read_ledger(written(tmp_path, rows)).success_rates()
    assert str(rate).endswith(f"{len(rows)} rows from {len(rows)} tasks")


def test_the_report_reads_scores_from_the_ledger(tmp_path):
    written(tmp_path, [row(0), row(1, False)])
    found = read_outcomes(tmp_path, 3, "all")
    assert {name: found[name].scores for name in ("go/0", "go/1")} == {
        "go/0": {"success/greedy": 1.0},
        "go/1": {"success/greedy": 0.0},
    }
    assert found["go/0"].parts == {"task": "go"}
    assert read_outcomes(tmp_path, 4, "all") == {}


@pytest.mark.parametrize(
    ("number", "changes", "problem"),
    [
        (1, {"length": 11}, "row 1: it has 11 steps, more than the horizon of 10"),
        (2, {"length": None}, "row 2: it is a success without a length or an ending"),
        (2, {"ending": ""}, "row 2: it is a success without a length or an ending"),
        (3, {"success": False}, "row 3: success is False, but its success/greedy is 1.0"),
        (3, {"scores": {"accuracy/first": 0.0}}, "row 3: success is True, but its accuracy/first is 0.0"),
        (3, {"success": 0.5}, "row 3: success is 0.5"),
        (4, {"horizon": 20}, "row 4: horizon is 20, but 10 in the protocol"),
        (4, {"policy": "q"}, f"row 4 is from a policy other than {'p' * 64}"),
        (4, {"protocol": "q"}, f"row 4 is from a protocol other than {digest(PROTOCOL)}"),
        (4, {"index": 0}, "rows 1, 4 are duplicated"),
        (4, {"index": 0}, "1 of 4 rows of the protocol are missing: all 3"),
        (
            4,
            {"index": 4},
            "row 4: the protocol does not include split all, measure 0, index 4, repeat 0, decoding greedy",
        ),
    ],
)
def test_what_cannot_be_right_is_found(tmp_path, number, changes, problem):
    path = written(tmp_path, [row(index) for index in range(4)])
    assert any(found.startswith(problem) for found in changed(path, number, **changes))


def test_a_changed_protocol_is_found(tmp_path):
    path = written(tmp_path, [row(index) for index in range(4)])
    protocol = tmp_path / "protocol.json"
    text = protocol.read_text()
    protocol.write_text(text.replace('"seed": 0', '"seed": 1'))
    assert f"not {digest(PROTOCOL)}" in read_ledger(path).problems()[0]
    protocol.write_text("{}")
    with pytest.raises(UserError, match=r"protocol\.json is not a protocol written by `mmrl evaluate`"):
        read_ledger(path)
    protocol.unlink()
    with pytest.raises(UserError, match=r"file not found: .*protocol\.json"):
        read_ledger(path)


@pytest.mark.parametrize(("right", "shown"), [(10, "100.0%"), (5, "50.0%"), (0, "0.0%")])
@pytest.mark.parametrize("decoding", ["greedy", "sampled"])
def test_one_initial_state_ten_times_is_one_piece_of_evidence(tmp_path, right, shown, decoding):
    measure = MEASURE | {"decodings": {decoding: 1}}
    protocol = {"seed": 0, "splits": {"all": PROTOCOL["splits"]["all"] | {"tasks": 10, "measures": [measure]}}}
    rows = [row(index, index < right, decoding=decoding, state="go/0", scores={}) for index in range(10)]
    written(tmp_path, rows, protocol)
    low, high = wilson_interval(right / 10, 1)
    assert str(read_ledger(tmp_path).success_rates()[0]) == (
        f"all, {decoding}: {right} of 10 = {shown} [{low:.1%}, {high:.1%}], 10 rows from 1 initial state of 1 task"
    )
    assert high - low > 0.5


def test_shares_that_are_alike_in_all_states_still_have_an_interval():
    import numpy as np

    found = with_interval("success/sampled", [[1.0] * 4] * 5, np.random.default_rng(0))
    assert (found["success/sampled/low"], found["success/sampled/high"]) == wilson_interval(5, 5)
    found = with_interval("reward", [[2.0] * 4] * 5, np.random.default_rng(0))
    assert (found["reward/low"], found["reward/high"]) == (2.0, 2.0)
