import dataclasses
import json
import math
from contextlib import nullcontext

import matplotlib.colors
import numpy as np
import pytest
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from PIL import Image

from mmrl.comparison import plans as run_status
from mmrl.comparison.experiment import ExperimentConfig, FigureConfig, StoredArm, StoredConfig, load_experiment
from mmrl.comparison.figures import (
    GREY,
    LABEL_GAP,
    Band,
    _draw_differences,
    _name_ends,
    comparison_figure,
    stored_figure,
    work_figure,
)
from mmrl.comparison.plans import plan_lines
from mmrl.comparison.results import ArmResult, Comparison, Difference, comparison_lines
from mmrl.comparison.run import run_experiment
from mmrl.comparison.summary import plan_comparison, summarise
from mmrl.errors import UserError
from mmrl.report.charts import COLOURS
from mmrl.runs.statistics import verdict

COSTS = {
    "model_evaluations": {"cost/forward_rows": 1, "cost/train_rows": 3},
    "images": {"cost/samples": 1},
    "seconds": {"cost/seconds": 1},
}
EXPERIMENT = {
    "name": "less work",
    "base": "base.yaml",
    "arms": {"flow": None, "awm": {"overrides": {"a": 1}}},
    "baseline": "flow",
    "seeds": [1, 2],
    "metric": "heldout/eye",
    "work": {"metric": "score/shapes", "costs": COSTS},
}
# per 100 samples: rows without gradient, rows with gradient, seconds
SPENT = {"flow": (1000.0, 400.0, 20.0), "awm": (1000.0, 100.0, 10.0), "third": (1000.0, 400.0, 20.0)}
# seed 1: the target is 0.4; flow meets it at 200 samples, awm 80% of the way to 100.
# seed 2: the target is 0.3; flow passes it at 60 samples before it falls back, awm meets it at 200.
FLOW = {1: [0.0, 0.2, 0.4], 2: [0.0, 0.5, 0.3]}
AWM = {1: [0.0, 0.5, 0.6], 2: [0.0, 0.1, 0.3]}


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


class Lab:
    """An experiment file and finished runs whose evaluations are written by hand."""

    def __init__(self, folder):
        self.folder, self.output = folder, folder / "out"
        (folder / "base.yaml").write_text("recipe: papo\n")

    def experiment(self, **changes):
        content = {key: value for key, value in {**EXPERIMENT, **changes}.items() if value is not None}
        path = self.folder / "experiment.yaml"
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(content)))
        return load_experiment(path)

    def fill(self, curves, experiment, **columns):
        for arm, by_seed in plan_comparison(experiment, self.output).items():
            for seed, plan in by_seed.items():
                if seed not in curves[arm]:
                    continue
                run_status.mark(plan)
                lines = []
                for index, value in enumerate(curves[arm][seed]):
                    row = {"score/shapes": value, "heldout/eye": 0.5, "diversity/latent": 1.0 - value if value else 1.0}
                    lines.append(json.dumps({**record(arm, index), **row, **{k: v[index] for k, v in columns.items()}}))
                (plan.run_dir / "evaluations.jsonl").write_text("\n".join(lines))
                (plan.run_dir / "result.json").write_text('{"status": "done"}')

    def summary(self, curves, columns=None, **changes):
        experiment = self.experiment(**changes)
        self.fill(curves, experiment, **(columns or {}))
        return summarise(experiment, self.output).as_dict()

    def report(self):
        lines = []
        run_experiment(self.folder / "experiment.yaml", self.output, only_report=True, announce=lines.append)
        return lines


def record(arm, index):
    forward, train, seconds = (index * share for share in SPENT[arm])
    costs = {"cost/forward_rows": forward, "cost/train_rows": train, "cost/seconds": seconds}
    return {"step": 5 * index, "tag": "during", "split": "test", "cost/samples": 100.0 * index, **costs}


def test_crossings_and_ratios_by_hand(lab):
    work = lab.summary({"flow": FLOW, "awm": AWM})["work"]
    assert work["targets"] == {1: 0.4, 2: 0.3}
    images = work["costs"]["images"]
    assert images["arms"]["flow"]["needed"] == pytest.approx({1: 200.0, 2: 60.0})
    assert images["arms"]["awm"]["needed"] == pytest.approx({1: 80.0, 2: 200.0})
    ratio = images["ratios"]["awm"]
    assert ratio["per_seed"][1] == pytest.approx([2.5, 2.5])
    assert ratio["per_seed"][2] == pytest.approx([0.3, 0.3])
    assert ratio["ratio"] == pytest.approx(math.sqrt(0.75))
    # two logs: their standard error is half their distance, t_1 = 12.7062
    reach = 12.706204736 * (math.log(2.5) - math.log(0.3)) / 2
    assert ratio["low"] == pytest.approx(math.sqrt(0.75) * math.exp(-reach))
    assert ratio["high"] == pytest.approx(math.sqrt(0.75) * math.exp(reach))
    assert (ratio["n"], ratio["never"], ratio["missing_seeds"]) == (2, [], [])


def test_costs_are_weighted_sums_of_counters(lab):
    costs = lab.summary({"flow": FLOW, "awm": AWM})["work"]["costs"]
    # 100 samples cost flow 1000 + 3 * 400 = 2200 and awm 1000 + 3 * 100 = 1300
    assert costs["model_evaluations"]["arms"]["flow"]["needed"][1] == pytest.approx(4400.0)
    assert costs["model_evaluations"]["arms"]["awm"]["needed"][1] == pytest.approx(1040.0)
    assert costs["model_evaluations"]["ratios"]["awm"]["per_seed"][1] == pytest.approx([4400 / 1040] * 2)
    assert costs["seconds"]["ratios"]["awm"]["per_seed"][1] == pytest.approx([5.0, 5.0])


def test_a_seed_without_a_crossing_bounds_the_ratio_from_above(lab):
    summary = lab.summary({"flow": FLOW, "awm": {1: AWM[1], 2: [0.0, 0.1, 0.2]}})
    images = summary["work"]["costs"]["images"]
    assert images["arms"]["awm"]["never"] == [2]
    assert images["arms"]["awm"]["needed"][2] is None
    assert images["arms"]["awm"]["spent"] == {2: 200.0}
    assert (images["arms"]["awm"]["reached"], images["arms"]["awm"]["n"]) == (1, 2)
    ratio = images["ratios"]["awm"]
    assert ratio["per_seed"][2] == pytest.approx([0.0, 0.3])  # 60 over more than 200
    assert math.isnan(ratio["ratio"])
    assert ratio["at_least"] == 0.0
    assert ratio["at_most"] == pytest.approx(math.sqrt(2.5 * 0.3))
    line = next(line for line in lab.report() if line.startswith("  images"))
    assert line.split() == ["images", "awm", "at", "most", "0.866x", "1", "of", "2", "2", "of", "2"]
    assert (
        json.loads((lab.output / "comparison.json").read_text())["work"]["costs"]["images"]["ratios"]["awm"]["ratio"]
        is None
    )


def test_a_baseline_that_never_arrives_bounds_it_from_below(lab):
    work = {**EXPERIMENT["work"], "target": 0.45}
    summary = lab.summary({"flow": {1: FLOW[1], 2: [0.0, 0.1, 0.2]}, "awm": {1: AWM[1], 2: [0.0, 0.9, 0.9]}}, work=work)
    ratio = summary["work"]["costs"]["images"]["ratios"]["awm"]
    assert ratio["baseline_never"] == [1, 2]
    # more than 200 samples over 90 and over 50
    assert ratio["at_least"] == pytest.approx(math.sqrt(200 / 90 * 200 / 50))
    assert ratio["at_most"] == math.inf
    assert any("at least 2.98x" in line and "0 of 2" in line for line in lab.report())


def test_where_neither_or_each_in_turn_arrives_nothing_is_claimed(lab):
    work = {**EXPERIMENT["work"], "target": 0.45}
    summary = lab.summary({"flow": FLOW, "awm": {1: AWM[1], 2: [0.0, 0.1, 0.2]}}, work=work)
    ratio = summary["work"]["costs"]["images"]["ratios"]["awm"]
    assert (ratio["never"], ratio["baseline_never"]) == ([2], [1])
    assert (ratio["at_least"], ratio["at_most"]) == (0.0, math.inf)
    assert any(line.split()[:3] == ["images", "awm", "unknown"] for line in lab.report())


def test_a_target_met_before_training_gives_no_ratio_and_is_said(lab):
    collapsed = {1: FLOW[1], 2: [0.5, 0.4, 0.3]}
    summary = lab.summary({"flow": collapsed, "awm": {1: AWM[1], 2: [0.5, 0.6, 0.7]}})
    images = summary["work"]["costs"]["images"]
    assert images["arms"]["awm"]["at_first_evaluation"] == [2]
    assert images["ratios"]["awm"]["per_seed"][2] == [0.0, math.inf]
    assert "  images, awm: the first evaluation already reaches the target for seeds 2" in lab.report()


def test_the_target_can_be_the_mean_of_the_last_evaluations(lab):
    work = {**EXPERIMENT["work"], "baseline_last": 2}
    summary = lab.summary({"flow": FLOW, "awm": AWM}, work=work)
    assert summary["work"]["targets"] == pytest.approx({1: 0.3, 2: 0.4})
    images = summary["work"]["costs"]["images"]
    assert images["arms"]["flow"]["needed"] == pytest.approx({1: 150.0, 2: 80.0})
    assert images["arms"]["awm"]["never"] == [2]
    assert any("mean of the last 2 evaluations" in line for line in lab.report())
    too_many = lab.summary({"flow": FLOW, "awm": AWM}, work={**work, "baseline_last": 9})
    assert (
        "its curve has 3 points, but `work.baseline_last` requires the mean of 9" in too_many["failures"][0]["reason"]
    )
    assert too_many["work"]["costs"]["images"]["ratios"]["awm"]["missing_seeds"] == [1, 2]


def test_the_target_can_be_a_share_of_the_final_value(lab):
    work = {**EXPERIMENT["work"], "baseline_share": 0.75}
    summary = lab.summary({"flow": FLOW, "awm": AWM}, work=work)
    assert summary["work"]["targets"] == pytest.approx({1: 0.3, 2: 0.225})
    assert summary["work"]["costs"]["images"]["arms"]["awm"]["needed"][1] == pytest.approx(60.0)
    assert any("75% of flow's final value" in line for line in lab.report())


def test_the_baseline_can_be_charged_for_its_whole_run(lab):
    flat = {1: [0.4, 0.4, 0.4], 2: [0.3, 0.3, 0.3]}  # has its final value from the start
    work = {**EXPERIMENT["work"], "baseline_spends": "all"}
    summary = lab.summary({"flow": flat, "awm": AWM}, work=work)
    images = summary["work"]["costs"]["images"]
    assert images["ratios"]["awm"]["per_seed"] == {1: pytest.approx([200 / 80] * 2), 2: pytest.approx([1.0, 1.0])}
    assert any("for flow the cost of its whole run" in line for line in lab.report())


def step_rows(values):
    """Steps of 10 samples and 2 seconds."""
    rows = [
        {"step": number, "episode/success": value, "samples/total": 10.0 * number, "time/step": 2.0}
        for number, value in enumerate(values, start=1)
    ]
    return "\n".join(map(json.dumps, rows)) + "\n"


def test_the_metric_can_be_the_mean_over_the_steps_and_work_a_running_mean_of_them(lab):
    """Success 0.1, 0.3, 0.3, 0.5 has means of two of 0.2, 0.3, 0.4 at 20, 30 and 40 episodes; 0.25 is met at 25."""
    costs = {"episodes": {"cost/samples": 1}, "seconds": {"cost/seconds": 1}}
    experiment = lab.experiment(
        metric="episode/success", metric_over="steps", work={"target": 0.25, "steps": 2, "costs": costs}
    )
    lab.fill({"flow": FLOW, "awm": AWM}, experiment)
    steps = {("flow", 1): [0.1, 0.3, 0.3, 0.5], ("flow", 2): [0.1] * 4, ("awm", 1): [0.3] * 4}
    for arm, by_seed in plan_comparison(experiment, lab.output).items():
        for seed, plan in by_seed.items():
            (plan.run_dir / "metrics.jsonl").write_text(step_rows(steps.get((arm, seed), [math.nan])))
    summary = summarise(experiment, lab.output).as_dict()
    assert summary["arms"]["flow"]["values"] == pytest.approx({1: 0.3, 2: 0.1})
    assert summary["differences"]["awm"]["per_seed"] == pytest.approx({1: 0.0}, abs=1e-12)
    needed = {cost: found["arms"]["flow"]["needed"] for cost, found in summary["work"]["costs"].items()}
    assert needed["episodes"][1] == pytest.approx(25)
    assert needed["seconds"][1] == pytest.approx(5)
    work = {"target": 0.25, "steps": 9, "costs": costs}
    long = lab.experiment(metric="episode/success", metric_over="steps", work=work)
    reasons = [failure["reason"] for failure in summarise(long, lab.output).as_dict()["failures"]]
    assert any("work.steps is 9, but the run logged 4 steps" in reason for reason in reasons)
    assert summary["work"]["costs"]["episodes"]["arms"]["flow"]["never"] == [2]
    (failure,) = summary["failures"]
    assert "'episode/success' is not a number in any of its steps" in failure["reason"]


def test_lower_can_be_better(lab):
    def mirrored(arm):
        return {seed: [1 - value for value in values] for seed, values in arm.items()}

    curves = {"flow": mirrored(FLOW), "awm": mirrored(AWM)}
    summary = lab.summary(curves, work={**EXPERIMENT["work"], "higher_is_better": False})
    needed = summary["work"]["costs"]["images"]["arms"]["awm"]["needed"]
    assert needed == pytest.approx({1: 80.0, 2: 200.0})


def test_failed_runs_and_runs_without_counters_are_missing_by_name(lab):
    summary = lab.summary({"flow": FLOW, "awm": {1: AWM[1]}})
    ratio = summary["work"]["costs"]["images"]["ratios"]["awm"]
    assert (ratio["n"], ratio["missing_seeds"]) == (1, [2])
    assert ratio["ratio"] == pytest.approx(2.5)
    assert math.isnan(ratio["low"])
    assert "  images, awm: no pair for seeds 2" in lab.report()
    broken = lab.summary({"flow": FLOW, "awm": AWM}, columns={"cost/train_rows": [0.0, None, 5.0]})
    assert {failure["run"] for failure in broken["failures"]} >= {"runs/awm/seed-1", "runs/flow/seed-2"}
    assert "cost 'model_evaluations': 'cost/train_rows' is not a number" in broken["failures"][0]["reason"]
    falling = lab.summary({"flow": FLOW, "awm": AWM}, columns={"cost/seconds": [0.0, 9.0, 5.0]})
    assert "decreases between consecutive evaluations" in falling["failures"][0]["reason"]


def test_values_at_the_cost_that_every_arm_has_spent(lab):
    summary = lab.summary({"flow": FLOW, "awm": AWM}, at={"cost": "model_evaluations"})
    at = summary["at"]
    assert at["costs"] == {1: 2600.0, 2: 2600.0}  # all that awm spent; flow is 400 of 2200 past its second evaluation
    flow = {1: 0.2 + 0.2 * 400 / 2200, 2: 0.5 - 0.2 * 400 / 2200}
    assert at["arms"]["flow"]["values"] == pytest.approx(flow)
    assert at["arms"]["awm"]["values"] == pytest.approx({1: 0.6, 2: 0.3})
    difference = at["differences"]["awm"]
    gains = [0.6 - flow[1], 0.3 - flow[2]]
    assert difference["mean"] == pytest.approx(np.mean(gains))
    assert difference["high"] == pytest.approx(np.mean(gains) + 12.706204736 * abs(gains[0] - gains[1]) / 2)
    assert difference["wins"] == 1
    assert any(line.startswith("score/shapes at equal model_evaluations") for line in lab.report())


def test_values_at_a_given_cost_leave_out_arms_that_did_not_spend_it(lab):
    summary = lab.summary({"flow": FLOW, "awm": AWM}, at={"cost": "model_evaluations", "value": 3300})
    assert summary["at"]["arms"]["flow"]["values"] == pytest.approx({1: 0.3, 2: 0.4})
    assert summary["at"]["arms"]["awm"]["values"] == {1: None, 2: None}
    assert summary["at"]["differences"]["awm"]["missing_seeds"] == [1, 2]


def test_equal_cost_is_that_of_the_finished_arms_of_each_seed(lab):
    arms = {**EXPERIMENT["arms"], "third": {"overrides": {"a": 2}}}
    curves = {"flow": FLOW, "awm": AWM, "third": {2: [0.0, 0.1]}}
    summary = lab.summary(curves, arms=arms, at={"cost": "images"})
    assert summary["at"]["costs"] == {1: 200.0, 2: 100.0}
    assert summary["at"]["arms"]["flow"]["values"] == pytest.approx({1: 0.4, 2: 0.5})


def test_collapsed_runs_are_counted_and_unknown_ones_listed(lab):
    columns = {"heldout/eye": [0.8, 0.9, 0.39]}
    summary = lab.summary(
        {"flow": FLOW, "awm": {1: AWM[1]}}, columns=columns, collapse={"metric": "heldout/eye", "below": 0.5}
    )
    flow, awm = (summary["collapse"]["arms"][arm] for arm in ("flow", "awm"))
    assert (flow["share"], flow["collapsed"], flow["n"]) == (1.0, [1, 2], 2)
    assert flow["kept"] == pytest.approx({1: 0.39 / 0.8, 2: 0.39 / 0.8})
    assert awm["missing_seeds"] == [2]
    assert "  awm: 1 of 1; unknown for seeds 2" in lab.report()
    milder = lab.summary({"flow": FLOW, "awm": AWM}, columns=columns, collapse={"metric": "heldout/eye", "below": 0.48})
    assert milder["collapse"]["arms"]["flow"]["share"] == 0.0


@pytest.mark.parametrize(
    ("columns", "metric", "reason"),
    [
        ({}, "heldout/ear", "'heldout/ear' is not a number in its first or last evaluation, which has: cost/"),
        ({"heldout/eye": [-0.1, 0.2, 0.3]}, "heldout/eye", "starts at -0.1, for which a fraction is meaningless"),
        ({"step": [5, 10, 15]}, "heldout/eye", "no evaluation before training"),
    ],
)
def test_a_share_of_nothing_is_refused_by_name(lab, columns, metric, reason):
    summary = lab.summary({"flow": FLOW, "awm": AWM}, columns=columns, collapse={"metric": metric})
    assert reason in summary["failures"][0]["reason"]
    assert summary["collapse"]["arms"]["flow"]["share"] is None
    assert len(summary["failures"]) == 4


def test_secondary_metrics_come_from_the_last_evaluation(lab):
    summary = lab.summary(
        {"flow": FLOW, "awm": AWM},
        secondary_metrics=["diversity/latent", "heldout/eye", "cost/samples"],
        metric="score/shapes",
    )
    secondary = summary["arms"]["awm"]["secondary"]
    assert secondary["diversity/latent"]["values"] == pytest.approx({1: 0.4, 2: 0.7})
    assert secondary["heldout/eye"]["mean"] == 0.5
    assert secondary["cost/samples"]["values"] == {1: 200.0, 2: 200.0}


def test_without_the_sections_nothing_is_added(lab):
    summary = lab.summary({"flow": FLOW, "awm": AWM}, work=None)
    assert (summary["work"], summary["at"], summary["collapse"]) == ({}, {}, {})
    lab.report()
    assert not (lab.output / "work.png").exists()


def test_the_figure_has_one_panel_per_cost(lab):
    lab.summary({"flow": FLOW, "awm": AWM})
    lab.report()
    assert Image.open(lab.output / "work.png").size[0] > 1500


def test_bands_are_the_mean_of_joined_lines_where_all_seeds_have_costs():
    runs = [([0.0, 10.0, 20.0], [0.0, 1.0, math.nan]), ([0.0, 4.0, 30.0], [0.0, 0.8, 0.8])]
    figure = work_figure("x", "score", {"seconds": {"a": runs, "b": []}, "images": {"a": runs, "b": runs}}, [0.5, 0.7])
    seconds, images = figure.axes
    mean, target = seconds.lines
    assert mean.get_xdata() == pytest.approx([0.0, 4.0, 10.0])
    assert mean.get_ydata() == pytest.approx([0.0, 0.6, 0.9])
    assert target.get_ydata() == pytest.approx([0.6, 0.6])
    assert images.lines[0].get_color() == mean.get_color() != images.lines[1].get_color()
    assert (seconds.get_xlabel(), images.get_xlabel(), seconds.get_ylabel()) == ("seconds", "images", "score")


def test_shares_are_drawn_in_per_cent_and_their_differences_in_points():
    arms = {name: ArmResult({1: value}, mean=value, n=1) for name, value in (("old_one", 0.25), ("new", 0.5))}
    differences = {"new": Difference({1: 0.25}, [], 0, mean=0.25, low=0.125, high=0.375, n=1)}
    comparison = Comparison(
        *("done", "", "a_name", "", "accuracy/greedy", True, "old_one", [1], None), arms, differences, None, None, None
    )
    curves = {"new": Band.of([([0, 5, 9], [25, 25, 50])])}
    figure = comparison_figure(comparison, curves, None, "right")
    pairs, values, bands = figure.axes
    assert figure.get_suptitle() == "a name"
    assert values.get_title(loc="left") == "accuracy, greedy, %"
    assert sorted(float(x) for dots in values.collections[::2] for x, _ in dots.get_offsets()) == [25, 50]
    assert not values.lines  # arms have no order that a line could follow
    assert pairs.get_title(loc="left") == "difference from old one in points"
    assert [25.0] in [list(line.get_xdata()) for line in pairs.lines]
    rows = [text.get_text() for text in pairs.get_yticklabels()]
    assert rows == ["old one\nbaseline", "new\n+25.0 (+12.5 to +37.5)"]
    assert [list(line.get_ydata()) for line in bands.lines] == [[25, 25, 50]]
    assert bands.get_title(loc="left") == "right"
    assert [text.get_text() for text in bands.texts] == ["new (1 seeds)"]
    plain = comparison_figure(dataclasses.replace(comparison, metric="score/graded"), curves)
    assert plain.axes[1].get_title(loc="left") == "score/graded"
    look = FigureConfig("New beats old.", {"old_one": "the old way"}, "right answers, %", ["new"])
    told = comparison_figure(dataclasses.replace(comparison, metric="recall/x"), curves, look)
    assert told.get_suptitle() == "New beats old."
    pairs, values, _ = told.axes
    assert [text.get_text().partition("\n")[0] for text in pairs.get_yticklabels()] == ["the old way", "new"]
    assert values.get_title(loc="left") == "right answers, %"
    assert sorted(float(x) for dots in values.collections[::2] for x, _ in dots.get_offsets()) == [25, 50]
    colours = [tuple(dots.get_facecolor()[0][:3]) for dots in values.collections[::2]]
    assert colours == [matplotlib.colors.to_rgb(GREY), matplotlib.colors.to_rgb(COLOURS[1])]


def test_a_control_far_from_the_claim_is_an_arrow_and_leaves_the_scale_to_it():
    axes = Figure().subplots()
    near, far = (Difference({1: mean}, [], 0, mean=mean, low=mean, high=mean, n=1) for mean in (2.0, -60.0))
    colours = dict.fromkeys(("base", "new", "control"), "red")
    _draw_differences(axes, list(colours), {"new": near, "control": far}, colours, ["new"])
    assert axes.get_xlim() == pytest.approx((-0.16, 2.16))
    arrows = [line for line in axes.lines if line.get_marker() == "<"]
    assert [list(line.get_ydata()) for line in arrows] == [[2]]
    _draw_differences(axes, list(colours), {"new": near, "control": far}, colours, [])
    assert axes.get_xlim()[0] < -60


def test_an_arm_near_the_claim_is_on_its_scale():
    axes = Figure().subplots()
    claim, other = (Difference({}, [], 0, mean=mean, low=mean - 1, high=mean + 1) for mean in (2.0, -2.0))
    _draw_differences(axes, ["new", "other"], {"new": claim, "other": other}, {"new": "red", "other": "red"}, ["new"])
    assert axes.get_xlim() == pytest.approx((-3.48, 3.48))


def test_titles_of_neighbouring_panels_do_not_overlap():
    rows = {"old": StoredArm(5.0, seeds=[4.0, 6.0]), "new": StoredArm(9.0, [4.0, 2.0, 6.0], [8.0, 10.0])}
    look = FigureConfig(
        labels={"old": "SFT on the responses of the teacher"},
        unit="sampled responses that are right, %",
        stored=StoredConfig(arms=rows),
    )
    figure = stored_figure(ExperimentConfig("x", baseline="old", seeds=[1, 2], metric="score/x", figure=look))
    figure.draw_without_rendering()
    left, right = (panel._left_title.get_window_extent() for panel in figure.axes[:2])
    assert left.x1 < right.x0


def test_a_figure_of_stored_numbers_needs_no_runs():
    rows = {
        "old": StoredArm(30.0, seeds=[20.0, 40.0]),
        "new": StoredArm(33.0, [1.0, 5.0], [24.0, 42.0], [[0, 10, 9, 12], [1, 33, 24, 42]]),
        "start": StoredArm(10.0),
    }
    look = FigureConfig("New beats old.", unit="right, %", stored=StoredConfig(curves_title="reward", arms=rows))
    experiment = ExperimentConfig("x", baseline="old", seeds=[1, 2], metric="score/x", figure=look)
    pairs, values, bands = stored_figure(experiment).axes
    assert [list(line.get_ydata()) for line in bands.lines] == [[10, 33]]
    assert [text.get_text() for text in bands.texts] == ["new (2 seeds)"]
    assert bands.get_title(loc="left") == "reward"
    assert [text.get_text() for text in pairs.get_yticklabels()] == [
        "old\nbaseline",
        "new\n+3.0 (+1.0 to +5.0)",
        "start\n",
    ]
    assert [float(x) for x, _ in pairs.collections[0].get_offsets()] == pytest.approx([4, 2])
    assert [text.get_text() for text in values.texts] == ["30.0", "33.0", "10.0"]
    assert values.get_title(loc="left") == "right, %"


def test_names_at_the_ends_of_curves_do_not_overlap():
    axes = Figure().subplots()
    axes.set_ylim(0, 1)
    _name_ends(axes, [(0.5, "b", "red"), (0.49, "a", "blue"), (0.9, "c", "green")])
    heights = {text.get_text(): text.xy[1] for text in axes.texts}
    assert heights == pytest.approx({"a": 0.49, "b": 0.49 + LABEL_GAP, "c": 0.9})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"work": {"costs": {}}}, r"`work\.costs` is empty"),
        ({"work": {"costs": {"images": {}}}}, r"`work\.costs\.images` is empty; add weights of cost/samples"),
        (
            {"work": {"costs": {"images": {"cost/sample": 1}}}},
            "an unknown counter 'cost/sample'; did you mean 'cost/samples'",
        ),
        ({"work": {"costs": {"images": {"cost/samples": 0}}}}, "must be positive"),
        ({"work": {"costs": {"images": 3}}}, r"work"),
        ({"work": {"costs": COSTS, "target": "final"}}, r"`work\.target` is 'final'; allowed: baseline_final or a"),
        ({"work": {"costs": COSTS, "target": math.nan}}, "work.target is nan; must be finite"),
        ({"work": {"costs": COSTS, "target": True}}, r"work\.target"),
        ({"work": {"costs": COSTS, "targt": 1}}, "did you mean 'work.target'"),
        ({"work": {"costs": COSTS, "baseline_spends": "some"}}, "work.baseline_spends is 'some'; allowed: reach, all"),
        ({"work": {"costs": COSTS, "baseline_share": 0.0}}, r"must be in \(0, 1\]"),
        ({"work": {"costs": COSTS, "baseline_share": 0.9, "target": 0.5}}, "it has no effect while work.target is 0.5"),
        ({"work": {"costs": COSTS, "baseline_last": 0}}, r"work\.baseline_last is 0; must be at least 1"),
        ({"work": {"costs": COSTS, "baseline_last": 2, "target": 0.5}}, "it has no effect while work.target is 0.5"),
        ({"at": {"cost": "image"}}, r"`at\.cost` is 'image'; costs of `work`: model_evaluations, images, seconds"),
        ({"at": {"cost": "images", "value": "end"}}, r"`at\.value` is 'end'; allowed: min_of_arms_final or a number"),
        ({"at": {"cost": "images"}, "work": None}, "`at` requires `work`"),
        ({"at": {"value": 3}}, r"'at\.cost' must be given"),
        ({"collapse": {"metric": "heldout/eye", "below": 1.5}}, r"collapse\.below is 1\.5; must be in \(0, 1\]"),
        ({"collapse": {"below": 0.5}}, r"'collapse\.metric' must be given"),
        ({"metric_over": "all"}, "metric_over is 'all'; allowed: last_evaluation, steps"),
        (
            {"metric_over": "steps", "arms": {"flow": None, "s": {"runs_of": "flow", "reads": "start"}}},
            "arms.s reads the",
        ),
        ({"work": {"costs": COSTS, "steps": -1}}, r"work\.steps is -1; must be at least 0"),
    ],
)
def test_bad_sections_are_refused_by_name(lab, changes, message):
    with pytest.raises(UserError, match=message):
        lab.experiment(**changes)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.01, 0.09, "holds"),
        (-0.02, 0.02, "no effect within the margin"),
        # not zero, but nothing that matters
        (0.01, 0.02, "no effect within the margin"),
        (-0.02, 0.09, "inconclusive"),
        (-0.09, -0.01, "negative"),
        (math.nan, math.nan, "inconclusive"),
    ],
)
def test_a_margin_tells_no_effect_from_too_few_seeds(low, high, expected):
    assert verdict(low, high, 0.03) == expected


def test_a_comparison_with_a_margin_has_a_verdict_for_each_arm(lab):
    plan = {"prepare_minutes": 6, "run_minutes": 9, "sweep": {"values": [1, 2], "seeds": [5]}}
    experiment = lab.experiment(margin=0.03, metric="score/shapes", work=None)
    lab.fill({"flow": FLOW, "awm": {1: [0.0, 0.42], 2: [0.0, 0.315]}}, experiment)
    comparison = summarise(experiment, lab.output)
    assert comparison.differences["awm"].mean == pytest.approx(0.0175)
    # two seeds, 1.5 and 2 points: the interval is as wide as +-5 points
    assert comparison.differences["awm"].verdict == "inconclusive"
    assert list(comparison_lines(comparison))[-1].endswith("2 wins in 2 pairs: inconclusive")
    first, second = plan_lines(lab.experiment(margin=0.03, **plan))
    assert first == "plan: 0 preparation(s), 4 runs of the sweep, 4 of the comparison; about 1.3 CPU hours"
    assert second == "margin: a difference in heldout/eye matters from 0.03 on"
    # the whole runs' steps are those of the configuration
    (lab.folder / "base.yaml").write_text("recipe: awm\ntrainer: {steps: 30}\n")
    short = {**plan, "sweep": {**plan["sweep"], "overrides": {"trainer.steps": 15}}}
    (line,) = plan_lines(lab.experiment(**short))
    assert line.endswith("about 1.0 CPU hours")


def test_a_finding_may_be_rounded(lab):
    """-1.00 to 4.96 points are no effect within a margin of 5, also where they are written with one decimal."""
    finding = {"about": ["grpo"], "arm": "awm", "difference": 2.0, "low": -1.0, "high": 5.0}
    for verdict_of, allowed in (("no effect within the margin", True), ("inconclusive", True), ("holds", False)):
        evidence = {"page": "page", "setting": "setting", "findings": [finding | {"verdict": verdict_of}]}
        with nullcontext() if allowed else pytest.raises(UserError, match="is 'inconclusive', not 'holds'"):
            lab.experiment(margin=0.05, run_minutes=1, evidence=evidence)


def test_the_verdict_of_a_finding_is_that_of_its_margin(lab):
    finding = {"about": ["grpo"], "arm": "awm", "difference": 0.5, "low": -1, "high": 2, "verdict": "inconclusive"}

    def evidence_of(verdict):
        return {"page": "page", "setting": "setting", "findings": [finding | {"verdict": verdict}]}

    evidence = evidence_of("inconclusive")
    with pytest.raises(UserError, match="is 'no effect within the margin', not 'inconclusive'"):
        lab.experiment(margin=0.03, run_minutes=1, evidence=evidence)
    with pytest.raises(UserError, match="requires `run_minutes`"):
        lab.experiment(margin=0.03, evidence=evidence_of("no effect within the margin"))
    with pytest.raises(UserError, match="needs `margin`"):
        lab.experiment(run_minutes=1, evidence=evidence)
