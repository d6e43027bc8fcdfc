import json
from types import SimpleNamespace

import pytest

from mmrl.comparison import run as compare
from mmrl.comparison.plans import sweep_label
from mmrl.comparison.run import run_experiment
from mmrl.errors import RunError, UserError


def test_the_sweep_chooses_a_value_for_each_arm(lab):
    sweep = {"values": [0.001, 0.01, 0.1], "seeds": [11, 12]}
    result = lab.run(sweep=sweep, seeds=[1, 2])
    assert result["sweep"]["chosen"] == {"papo": 0.01, "grpo": 0.01}
    rows = result["sweep"]["arms"]["grpo"]["rows"]
    assert [row["mean"] for row in rows] == pytest.approx([0.606, 0.615, 0.525])
    assert rows[0]["values"] == pytest.approx({"11": 0.601, "12": 0.611})
    assert result["sweep"]["arms"]["grpo"]["at_edge"] is False
    assert result["arms"]["papo"]["chosen"] == {"trainer.learning_rate": 0.01}
    settings = json.loads((lab.output / "runs/papo/seed-1/settings.json").read_text())
    assert settings["trainer.learning_rate"] == "0.01"


def test_a_shared_sweep_chooses_the_value_of_the_best_mean_over_arms(lab):
    arms = {"papo": {"overrides": {"best": 0.005}}, "grpo": {}}
    sweep = {"values": [0.001, 0.01], "seeds": [11, 12]}
    assert lab.run(arms=arms, sweep=sweep, seeds=[1])["sweep"]["chosen"] == {"papo": 0.001, "grpo": 0.01}
    result = lab.run(arms=arms, sweep={**sweep, "shared": True}, seeds=[1])
    assert result["sweep"]["chosen"] == {"papo": 0.01, "grpo": 0.01}
    assert {arm: result["arms"][arm]["chosen"]["trainer.learning_rate"] for arm in arms} == {"papo": 0.01, "grpo": 0.01}
    assert lab.starts("sweep/papo/0.001/seed-11") == ["fresh"]  # the runs of the sweep are the same


def test_a_shared_sweep_leaves_out_values_that_an_arm_did_not_finish(lab):
    sweep = {"values": [0.01, 0.1], "seeds": [11, 12], "shared": True}
    arms = {"papo": {"overrides": {"trouble12": "crash"}}, "grpo": {}}
    with pytest.raises(RunError, match="no value of the sweep finished for all arms"):
        lab.run(arms=arms, sweep=sweep)


def test_a_sweep_goes_on_beyond_an_edge_until_its_best_value_is_inside(lab):
    """0.01 is best: an arm that starts above it comes down to it, one that starts around it tries nothing more."""
    sweep = {"values": [0.1, 1.0], "seeds": [11], "extend": 3}
    result = lab.run(sweep=sweep, seeds=[1])
    assert result["sweep"]["chosen"] == {"papo": 0.01, "grpo": 0.01}
    assert [row["value"] for row in result["sweep"]["arms"]["papo"]["rows"]] == [0.1, 1.0, 0.01, 0.001]
    assert result["sweep"]["arms"]["papo"]["at_edge"] is False
    # as often as the file allows, and it says that a better value may be outside
    short = lab.run(sweep={**sweep, "extend": 1}, seeds=[1])["sweep"]["arms"]["papo"]
    assert ([row["value"] for row in short["rows"]], short["at_edge"]) == ([0.1, 1.0, 0.01], True)
    said = "papo: chose trainer.learning_rate=0.01"
    assert f"{said} (the smallest tried)" in lab.lines
    lab.run(sweep={**sweep, "values": [0.001, 0.01], "extend": 0}, seeds=[1])
    assert f"{said} (the largest tried)" in lab.lines


def test_a_sweep_goes_on_to_smaller_rates_while_no_rate_ends_better_than_the_start(lab):
    """Runs start at 0.1, and only rates below 0.15 end above it, though the best of the file's is inside its range."""
    lab.edit('+ float(settings.get("gain", 0))', "- 0.5 + (0.1 if rate < 0.15 else -0.7 if 0.3 < rate < 0.5 else -1)")
    sweep = {"values": [0.2, 0.4, 0.8], "seeds": [11], "overrides": {"few": 1, "best": 0.1}}
    rows = lab.run(sweep={**sweep, "extend": 2}, seeds=[1])["sweep"]["arms"]["papo"]["rows"]
    assert [row["value"] for row in rows] == [0.2, 0.4, 0.8, 0.1, 0.05]
    assert {row["start"] for row in rows} == {0.1}
    assert "papo: also tries trainer.learning_rate=0.1, since no value ends better than the start" in lab.lines
    lab.run(sweep={**sweep, "extend": 0}, seeds=[1])
    end = "papo: chose trainer.learning_rate=0.4; it ends worse than the start: -0.89 against 0.1"
    assert end in lab.lines


def test_a_sweep_stops_before_a_value_that_is_not_allowed(lab, monkeypatch):
    """Without it, the rejected run would end the whole comparison."""

    def load(plan):
        if any(text.startswith("trainer.learning_rate=2") for text in plan.overrides):
            raise UserError("trainer.learning_rate is 2; must be at most 1")
        return SimpleNamespace(rollers=None)

    command = lab.command
    monkeypatch.setattr(compare, "train_command", command)
    monkeypatch.setattr(compare, "_load", load)
    sweep = {"values": [0.5, 1.0], "seeds": [11], "extend": 2}
    path = lab.write(overrides={"best": 4}, sweep=sweep, seeds=[1])
    run_experiment(path, lab.output, command=command, announce=lab.lines.append)
    papo = lab.result()["sweep"]["arms"]["papo"]
    assert ([row["value"] for row in papo["rows"]], papo["at_edge"]) == ([0.5, 1.0], True)
    assert any("papo: the sweep stops before trainer.learning_rate=2.0" in line for line in lab.lines)
    assert lab.result()["failures"] == []


@pytest.mark.parametrize("change", [{"values": [0.1]}, {"values": ["a", "b"]}, {"shared": True}])
def test_a_sweep_that_cannot_go_on_says_so(lab, change):
    with pytest.raises(UserError, match=r"sweep\.extend"):
        lab.run(sweep={"values": [0.1, 1.0], "seeds": [11], "extend": 1, **change}, seeds=[1])


def test_a_control_takes_the_value_that_another_arm_was_tuned_to(lab):
    """Tuned by itself, an arm without a signal takes the rate that changes least."""
    arms = {"papo": {"overrides": {"best": 0.005}}, "grpo": {}, "control": {"value_of": "papo"}}
    sweep = {"values": [0.001, 0.01], "seeds": [11]}
    result = lab.run(arms=arms, sweep=sweep, seeds=[1, 2])
    assert result["sweep"]["chosen"] == {"papo": 0.001, "grpo": 0.01, "control": 0.001}
    assert result["arms"]["control"]["chosen"] == {"trainer.learning_rate": 0.001}
    assert set(result["sweep"]["arms"]) == {"papo", "grpo"}
    assert not (lab.output / "sweep/control").exists()
    assert "plan: 0 preparation(s), 4 runs of the sweep, 6 of the comparison" in lab.lines


@pytest.mark.parametrize(
    ("control", "sweep"),
    [("papo", None), ("nobody", {}), ("control", {}), ("other", {}), ("papo", {"shared": True})],
)
def test_an_arm_that_cannot_take_a_value_says_so(lab, control, sweep):
    arms = {"papo": {}, "grpo": {}, "control": {"value_of": control}, "other": {"value_of": "papo"}}
    sweep = None if sweep is None else {"values": [0.1, 1.0], "seeds": [11], **sweep}
    with pytest.raises(UserError, match=r"arms\.(control|other)\.value_of"):
        lab.run(arms=arms, sweep=sweep)


def test_runs_of_the_sweep_may_be_shorter(lab):
    sweep = {"values": [0.001, 0.01], "seeds": [11], "overrides": {"trainer": {"steps": 1}}}
    result = lab.run(sweep=sweep, seeds=[1, 2], overrides={"trainer.steps": 3})
    assert result["sweep"]["overrides"] == {"trainer": {"steps": 1}}
    short = json.loads((lab.output / "sweep/papo/0.01/seed-11/settings.json").read_text())
    long = json.loads((lab.output / "runs/papo/seed-1/settings.json").read_text())
    assert (short["trainer.steps"], long["trainer.steps"]) == ("1", "3")


@pytest.mark.slow
def test_the_sweep_survives_failed_runs_and_says_when_nothing_is_left(lab):
    sweep = {"values": [0.01, 0.1], "seeds": [11, 12]}
    arms = {"papo": {"overrides": {"trouble11": "crash"}}, "grpo": {}}
    result = lab.run(arms=arms, sweep=sweep)
    assert result["sweep"]["arms"]["papo"]["rows"][0]["values"] == pytest.approx({"11": None, "12": 0.62})
    assert result["sweep"]["arms"]["papo"]["at_edge"] is True
    assert len(result["failures"]) == 2
    with pytest.raises(RunError, match="sweep finished for arm 'papo'"):
        lab.run(arms=arms, sweep={**sweep, "seeds": [11]})
    assert lab.result()["status"] == "failed"


def test_long_values_have_short_folders_of_their_own():
    labels = {sweep_label("arm", "x" * 300 + end, 1) for end in "ab"}
    assert len(labels) == 2
    assert all(len(part) <= 100 for label in labels for part in label.split("/"))


def test_values_that_differ_in_punctuation_have_folders_of_their_own(lab):
    values = ["{{ content }}?", "{{ content }}!", "日本", "中国"]
    assert len({sweep_label("arm", value, 1) for value in values}) == 4
    assert sweep_label("arm", 1e-5, 1) == "sweep/arm/1e-05/seed-1"
    with pytest.raises(UserError, match="read alike"):
        lab.run(sweep={"values": [1, "1"], "seeds": [11]})


def test_a_value_whose_bad_seed_failed_is_not_chosen_for_the_mean_of_the_others(lab):
    lab.edit(
        'if trouble == "crash"',
        'if (seed, settings.get("trainer.learning_rate")) in ((12, "0.02"), (13, "0.01"), (13, "0.02"))',
    )
    sweep = {"values": [0.01, 0.02], "seeds": [12, 19]}
    result = lab.run(sweep=sweep, seeds=[1])
    rows = result["sweep"]["arms"]["papo"]["rows"]
    assert rows[1]["mean"] > rows[0]["mean"]
    assert result["sweep"]["chosen"] == {"papo": 0.01, "grpo": 0.01}
    lab.run(sweep={**sweep, "seeds": [13, 19]}, seeds=[1])
    assert any("papo: chose" in line and "no value has all of its seeds" in line for line in lab.lines)


def test_a_sweep_by_another_metric_is_judged_by_that_metric(lab):
    """Less of it is better, and the experiment's metric is missing in the runs of the sweep."""
    lab.edit("file.write(json.dumps(record)", 'record["flow/ade"] = abs(rate - 0.01); file.write(json.dumps(record)')
    sweep = {"values": [0.04, 0.01], "seeds": [11], "metric": "flow/ade", "higher_is_better": False}
    result = lab.run(sweep={**sweep, "overrides": {"metric_name": "accuracy/other"}}, seeds=[1])
    assert result["sweep"]["chosen"] == {"papo": 0.01, "grpo": 0.01}
    assert result["failures"] == []
    with pytest.raises(RunError, match="'flow/adee' is not a number in its last evaluation"):
        lab.run(sweep={**sweep, "metric": "flow/adee"}, seeds=[1])


def test_null_and_lists_are_values_like_others(lab):
    result = lab.run(sweep={"parameter": "objective.clip.dual", "values": [None, 3.0], "seeds": [11]}, seeds=[1])
    assert result["sweep"]["chosen"] == {"papo": None, "grpo": None}
    assert json.loads((lab.output / "runs/papo/seed-1/settings.json").read_text())["objective.clip.dual"] == "null"
    result = lab.run(sweep={"parameter": "data.tasks", "values": [["a"], ["b"]], "seeds": [11]}, seeds=[1])
    assert result["sweep"]["chosen"] == {"papo": ["a"], "grpo": ["a"]}


def test_a_sweep_over_whole_numbers_goes_on_in_whole_numbers(lab):
    lab.edit('float(settings.get("trainer.learning_rate", 0.01))', 'int(settings["trainer.samples_per_task"])')
    sweep = {"parameter": "trainer.samples_per_task", "values": [3, 5], "seeds": [11], "extend": 4}
    rows = lab.run(sweep=sweep, seeds=[1])["sweep"]["arms"]["papo"]
    assert ([row["value"] for row in rows["rows"]], rows["at_edge"]) == ([3, 5, 2, 1], True)
