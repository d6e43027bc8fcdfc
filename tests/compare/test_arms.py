import json

import pytest

from mmrl.comparison import figures
from mmrl.errors import UserError


def test_lower_can_be_better(lab):
    sweep = {"values": [0.01, 0.1], "seeds": [11]}
    result = lab.run(higher_is_better=False, sweep=sweep, seeds=[1, 2])
    assert result["sweep"]["chosen"]["papo"] == 0.1
    assert result["differences"]["papo"]["wins"] == 0
    assert result["differences"]["papo"]["mean"] == pytest.approx(0.05)


def test_split_and_secondary_metrics(lab):
    result = lab.run(split="hard", secondary_metrics=["n", "policy/entropy", "missing"])
    assert result["arms"]["grpo"]["values"]["1"] == pytest.approx(0.41)
    secondary = result["arms"]["grpo"]["secondary"]
    assert secondary["n"]["mean"] == 9
    assert secondary["policy/entropy"]["values"] == {"1": 2.0, "2": 3.0, "3": 4.0}
    assert secondary["missing"]["n"] == 0
    assert "no finished run has the secondary metric 'missing'" in lab.lines
    lab.run(split="hard", secondary_metrics=["optim/entropy"])
    hint = "did you mean 'policy/entropy'?"
    assert f"no finished run has the secondary metric 'optim/entropy'; {hint}" in lab.lines


def test_a_secondary_metric_of_another_task_set(lab):
    result = lab.run(split="test", secondary_metrics=["hard/accuracy/greedy", "nowhere/accuracy/greedy"])
    arm = result["arms"]["grpo"]
    assert arm["values"]["2"] == pytest.approx(0.52)
    assert arm["secondary"]["hard/accuracy/greedy"]["values"]["2"] == pytest.approx(0.42)
    assert arm["secondary"]["nowhere/accuracy/greedy"]["n"] == 0


def test_an_arm_may_call_the_metrics_otherwise(lab):
    arms = {"papo": {"overrides": {"gain": 0.05, "metric_name": "success/own"}}, "grpo": None}
    arms["papo"]["metrics"] = {"accuracy/greedy": "success/own"}
    result = lab.run(arms=arms, split="test", secondary_metrics=["hard/accuracy/greedy"])
    assert result["differences"]["papo"]["mean"] == pytest.approx(0.05)
    assert result["differences"]["papo"]["n"] == 3
    assert result["arms"]["papo"]["secondary"]["hard/accuracy/greedy"]["values"]["1"] == pytest.approx(0.46)


def test_an_arm_may_read_the_runs_of_another(lab):
    arms = {"rule": {"runs_of": "papo", "metrics": {"accuracy/greedy": "n"}}, "papo": {}, "grpo": {}}
    result = lab.run(arms=arms, sweep={"values": [0.01, 0.1], "seeds": [11]})
    assert result["arms"]["rule"]["values"] == {"1": 9, "2": 9, "3": 9}
    assert result["arms"]["papo"]["values"]["1"] == pytest.approx(0.51)
    assert result["sweep"]["chosen"]["rule"] == 0.01
    assert set(result["sweep"]["arms"]) == {"papo", "grpo"}
    assert lab.starts("runs/papo/seed-1") == ["fresh"]
    assert not (lab.output / "runs/rule").exists()
    assert not any("have already finished" in line for line in lab.lines)


def test_an_arm_may_represent_the_start(lab, monkeypatch):
    drawn = []
    whole = figures.comparison_figure
    monkeypatch.setattr(figures, "comparison_figure", lambda *views: drawn.append(views[1]) or whole(*views))
    arms = {"start": {"runs_of": "papo", "reads": "start"}, "papo": {"overrides": {"gain": 0.05}}, "grpo": {}}
    result = lab.run(arms=arms, split="test", secondary_metrics=["hard/accuracy/greedy", "policy/entropy"])
    assert result["arms"]["start"]["values"] == pytest.approx({"1": 0.1, "2": 0.1, "3": 0.1})
    assert result["arms"]["start"]["secondary"]["hard/accuracy/greedy"]["mean"] == pytest.approx(0.0)
    # that of the last step belongs to the trained policy
    assert result["arms"]["start"]["secondary"]["policy/entropy"]["n"] == 0
    assert result["arms"]["papo"]["secondary"]["policy/entropy"]["n"] == 3
    assert result["arms"]["papo"]["values"]["1"] == pytest.approx(0.56)
    assert not (lab.output / "runs/start").exists()
    assert {arm: list(band.places) for arm, band in drawn[-1].items()} == {"papo": [0, 5, 10], "grpo": [0, 5, 10]}


def test_the_reward_of_the_steps_is_the_curve_of_runs_with_few_evaluations(lab, monkeypatch):
    drawn = []
    whole = figures.comparison_figure
    monkeypatch.setattr(figures, "comparison_figure", lambda *views: drawn.append(views) or whole(*views))
    lab.run(overrides={"few": 1})
    _, curves, _, title = drawn[-1]
    assert title == "mean reward of the training samples: mean and range of seeds"
    assert curves.keys() == {"papo", "grpo"}
    band = curves["papo"]
    assert list(band.places) == [1, 5, 10]
    # the seeds are 1, 2 and 3, and the reward of a step is the step times the seed
    assert (list(band.low), list(band.mean), list(band.high)) == ([1, 5, 10], [2, 10, 20], [3, 15, 30])
    assert band.seeds == 3


def test_an_arm_without_its_own_metric_has_no_value(lab):
    arms = {"papo": {}, "grpo": {}, "rule": {"runs_of": "papo", "metrics": {"accuracy/greedy": "accuracy/ruel"}}}
    result = lab.run(arms=arms, seeds=[1])
    assert result["arms"]["rule"]["values"] == {"1": None}
    (failure,) = result["failures"]
    assert failure["reason"].startswith("'accuracy/ruel' is not a number in its last evaluation, which has: accuracy/g")


def test_an_arm_may_call_the_metrics_of_its_steps_otherwise(lab):
    arms = {"papo": {}, "other": {"runs_of": "papo", "metrics": {"reward/mean": "policy/entropy"}}}
    common = {"arms": arms, "baseline": "papo", "seeds": [1, 2]}
    result = lab.run(**common, metric="reward/mean", metric_over="steps")
    assert result["arms"]["other"]["values"] == {"1": 2.0, "2": 3.0}
    result = lab.run(**common, secondary_metrics=["reward/mean"])
    assert result["arms"]["other"]["secondary"]["reward/mean"]["values"] == {"1": 2.0, "2": 3.0}


def test_a_secondary_metric_without_a_number_at_the_end_is_not_that_of_the_step(lab):
    lab.edit("file.write(json.dumps(record)", 'record["reward/mean"] = None; file.write(json.dumps(record)')
    result = lab.run(seeds=[1], secondary_metrics=["reward/mean"])
    assert result["arms"]["papo"]["secondary"]["reward/mean"]["n"] == 0


def test_an_arm_that_reads_the_start_has_no_costs_and_does_not_collapse(lab):
    lab.edit("file.write(json.dumps(record)", 'record["cost/samples"] = step; file.write(json.dumps(record)')
    arms = {"papo": {}, "grpo": {}, "start": {"runs_of": "grpo", "reads": "start"}}
    sections = {
        "work": {"costs": {"images": {"cost/samples": 1}}, "target": 0.3},
        "at": {"cost": "images"},
        "collapse": {"metric": "accuracy/greedy"},
    }
    result = lab.run(arms=arms, seeds=[1], **sections)
    assert result["arms"]["start"]["mean"] == pytest.approx(0.1)
    for found in (result["work"]["costs"]["images"], result["at"], result["collapse"]):
        assert set(found["arms"]) == {"papo", "grpo"}
    assert set(result["at"]["differences"]) == {"papo"}
    with pytest.raises(UserError, match=r"arms\.start reads the start, which costs nothing"):
        lab.run(arms=arms, baseline="start", **sections)


def test_sections_that_an_arm_nests_keep_what_all_arms_share(lab):
    shared = {"trainer": {"steps": 3, "samples_per_task": 4}, "evaluation": {"every": 2}}
    arms = {"high": {"overrides": {"trainer": {"learning_rate": 0.02}, "evaluation": None}}, "plain": {}}
    lab.run(arms=arms, baseline="plain", overrides=shared, seeds=[1])
    settings = json.loads((lab.output / "runs/high/seed-1/settings.json").read_text())
    assert (settings["trainer.steps"], settings["trainer.samples_per_task"]) == ("3", "4")
    assert settings["trainer.learning_rate"] == "0.02"
    assert "evaluation.every" not in settings


def test_losses_are_not_compared_as_if_more_were_better(lab):
    sweep = {"values": [0.1], "seeds": [11], "metric": "loss/nll"}
    with pytest.raises(UserError, match=r"`sweep\.metric` loss/nll is better; set `sweep\.higher_is_better: false`"):
        lab.run(sweep=sweep)
    with pytest.raises(UserError, match="set `higher_is_better: false`"):
        lab.run(metric="held_out/loss/nll")


def test_sections_without_a_setting_are_empty_and_the_margin_is_null(lab):
    result = lab.run(seeds=[1])
    assert (result["margin"], result["work"], result["sweep"]) == (None, {}, {})
