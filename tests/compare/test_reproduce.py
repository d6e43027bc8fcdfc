"""Findings stored in an experiment's file, and their repetition on fresh seeds."""

import json
from types import SimpleNamespace

import pytest
from scipy import stats

from mmrl.cli import main
from mmrl.comparison.evidence import FindingConfig
from mmrl.comparison.experiment import load_experiment
from mmrl.comparison.figures import supported
from mmrl.comparison.reproduce import chosen, evidence_of, findings_by_subject, listed, reproduce, smaller
from mmrl.comparison.results import Difference
from mmrl.errors import UserError
from mmrl.fields import check_config
from tests.fitting import experiments_with, measured_experiments

FOUND = {"about": ["papo"], "arm": "papo", "difference": 5.0, "low": 4.0, "high": 6.0, "verdict": "holds"}
SWEEP = {"values": [0.001, 0.01], "seeds": [91]}


def evidence(chosen=None, **changes):
    return {"page": "lab", "setting": "a lab", "chosen": chosen or {}, "findings": [{**FOUND, **changes}]}


def stored(lab, **changes):
    """Folder with the lab's experiment alone."""
    folder = lab.folder / "experiments"
    folder.mkdir(exist_ok=True)
    lab.write(base=str(lab.folder / "base.yaml"), **{"run_minutes": 1, **changes}).rename(folder / "experiment.yaml")
    return folder


def again(lab, name="experiment", seeds=1, **changes):
    lab.lines.clear()
    folder = stored(lab, **changes)
    return reproduce(name, lab.output, seeds=seeds, folder=folder, command=lab.command, say=lab.lines.append)


def test_fresh_seeds_at_the_chosen_values_are_compared_with_the_stored_interval(lab):
    content = evidence({"papo": 0.01, "grpo": 0.01})
    assert again(lab, "papo", 2, sweep=SWEEP, evidence=content)
    settings = json.loads((lab.output / "runs/papo/seed-201/settings.json").read_text())
    assert float(settings["trainer.learning_rate"]) == 0.01
    assert sorted(path.name for path in (lab.output / "runs/papo").iterdir()) == ["seed-201", "seed-202"]
    assert not (lab.output / "sweep").exists()
    assert any("+5.0 points over 2 fresh seeds; stored +5.0 points (+4.0 to +6.0) over 3 seeds" in x for x in lab.lines)
    assert lab.lines[-1].startswith("papo: reproduced; 1 of 1 differences lie within")
    assert again(lab, "papo", 2, sweep=SWEEP, evidence=content)
    assert "4 of 4 runs have already finished" in lab.lines


def test_a_result_outside_the_interval_is_not_reproduced(lab):
    assert not again(lab, evidence=evidence(difference=9.0, low=8.5, high=9.5))
    assert "outside" in lab.lines[-2]
    assert lab.lines[-1].startswith("experiment: not reproduced; 0 of 1")


@pytest.mark.parametrize("name", experiments_with("evidence"))
def test_an_experiment_is_sound_when_reduced_to_its_findings(name):
    experiment = measured_experiments()[name]
    subjects = [found[name] for found in findings_by_subject({name: experiment}).values()]
    for findings in [evidence_of(experiment).findings, *subjects]:
        check_config(smaller(experiment, findings, 2))


@pytest.mark.parametrize(
    ("mean", "changes", "title"),
    [(0.05, {}, "It helps"), (0.07, {}, ""), (None, {}, ""), (0.05, {"metric": "policy/entropy"}, "")],
)
def test_a_figure_claims_only_what_its_runs_show(mean, changes, title, lab):
    figure = {"claim": "It helps"}
    file = stored(lab, evidence=evidence(**changes), figure=figure, secondary_metrics=["policy/entropy"])
    experiment = load_experiment(file / "experiment.yaml")
    found = SimpleNamespace(baseline="grpo", differences={"papo": Difference({}, [], 0, mean=mean)})
    assert supported(experiment, found).claim == title


@pytest.mark.slow
def test_values_that_are_not_stored_are_swept_again(lab):
    assert again(lab, sweep=SWEEP, evidence=evidence({"papo": 0.01}))
    assert (lab.output / "sweep/grpo").is_dir()


def test_the_range_for_fresh_seeds_is_the_prediction_interval_of_their_mean():
    values = [0.3, -0.2, 0.5, 0.1]
    mean = sum(values) / 4
    t = stats.t.interval(0.95, 3, mean, stats.sem(values))
    found = FindingConfig(["papo"], "papo", difference=mean, low=t[0], high=t[1])
    spread = stats.t.ppf(0.975, 3) * stats.tstd(values) * (1 / 4 + 1 / 2) ** 0.5
    assert found.expected(4, 2) == pytest.approx((mean - spread, mean + spread))
    assert found.expected(4, 10**9) == pytest.approx(t)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"about": ["papoo"]}, "evidence about 'papoo', which is not an objective or a recipe; did you mean 'papo'"),
        ({"arm": "papi"}, "evidence.findings: arm 'papi' is not in the experiment; did you mean 'papo'"),
        ({"against": "grop"}, "arm 'grop' is not in the experiment; did you mean 'grpo'"),
        ({"arm": "grpo"}, "compares arm 'grpo' with itself"),
        ({"metric": "accuracy/gredy"}, "metric 'accuracy/gredy' is not in the experiment"),
        ({"verdict": "true"}, "evidence.findings.*verdict"),
        ({"low": -1.0}, r"\+5.0 points \(-1.0 to \+6.0\) with margin 0.01 is 'inconclusive', not 'holds'"),
        ({"verdict": "holds in part", "low": -0.5}, "is 'inconclusive', not 'holds in part'"),
        ({"verdict": "negative"}, "is 'holds', not 'negative'"),
        ({"verdict": "negative", "metric": "policy/entropy"}, "the verdict 'negative' contradicts"),
        ({"high": 4.5}, "5 is not between 4 and 4.5"),
        ({"about": []}, "a finding on arm 'papo' has an empty `about`"),
    ],
)
def test_a_finding_that_cannot_be_right_is_refused(changes, message, lab):
    with pytest.raises(UserError, match=message):
        load_experiment(lab.write(run_minutes=1, evidence=evidence(**changes), secondary_metrics=["policy/entropy"]))


def test_an_unknown_arm_with_a_chosen_value_is_refused(lab):
    with pytest.raises(UserError, match=r"evidence.chosen: arm 'gropo' is not in the experiment"):
        load_experiment(lab.write(run_minutes=1, evidence=evidence({"gropo": 1})))


def test_a_name_without_an_experiment_names_the_nearest(lab, capsys):
    folder = stored(lab, evidence=evidence())
    with pytest.raises(UserError, match="no experiment has measured 'pappo'; did you mean 'papo'"):
        chosen("pappo", folder)
    stored(lab)
    with pytest.raises(UserError, match="no experiment has measured 'papo'"):
        chosen("papo", folder)
    assert main(["reproduce"]) == 2
    assert "give an experiment, objective or recipe" in capsys.readouterr().err
    assert main(["reproduce", "papo", "--seeds", "0"]) == 2


def test_what_was_measured_is_listed_with_minutes(lab):
    (line,) = listed(stored(lab, evidence=evidence(), prepare_minutes=3, run_minutes=2))
    assert line.split() == ["experiment", "11", "min", "papo"]


def test_a_lower_metric_can_be_the_better_one(lab):
    path = lab.write(run_minutes=1, evidence=evidence(difference=-2.0, low=-3.0, high=-1.0, higher_is_better=False))
    check_config(load_experiment(path).evidence)
