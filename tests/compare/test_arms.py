import pytest

from mmrl.comparison import figures


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
