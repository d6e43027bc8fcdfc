import math

import pytest
from PIL import Image

from mmrl.report.charts import Chart, panel_chart
from mmrl.report.page import write_report
from mmrl.runs.records import SampleRecord, write_samples
from mmrl.runs.tracking import Tracker
from tests.report.pages import Page, headings_of


@pytest.fixture
def no_charts(monkeypatch):
    for name in ("line_chart", "panel_chart"):
        monkeypatch.setattr(f"mmrl.report.curves.{name}", lambda *args, **options: Chart(b"<svg/>"))


def log_images(tracker, step, score, judge, diversity, cost=True, split="held_out"):
    metrics = {"n": 54.0, "diversity/latent": diversity, "distance/base": 4e-7 * step, "unscored": 0.0}
    for name, value in (("score/graded", score), ("heldout/strict", judge)):
        metrics |= {name: value, f"{name}/low": value - 0.03, f"{name}/high": value + 0.03}
    if cost:
        metrics |= {"cost/samples": 96.0 * step, "cost/seconds": 0.5 * step}
        metrics |= {"cost/forward_rows": 10.0 * step, "cost/train_rows": 6.0 * step}
    tracker.evaluation(step, "during", split, metrics)


def image_run(folder, *points, cost=True, reward=True):
    tracker = Tracker(folder, strict=True)
    for step, point in enumerate(points):
        if step and reward:
            tracker.log(step, {"reward/mean": 0.1, "cost/forward_rows": 10.0, "cost/train_rows": 6.0})
        log_images(tracker, step, *point, cost=cost)
        drawn = [Image.new("RGB", (32, 32), (step, prompt, 9)) for prompt in range(2)]
        kept = [
            SampleRecord(id=f"p{prompt}", prompt=f"{prompt} squares", response="", outputs=[image], reward=0.5)
            for prompt, image in enumerate(drawn)
        ]
        write_samples(folder, step, "eval", kept)
        write_samples(folder, step, "train", kept)
    tracker.close()
    return Page(write_report(folder).read_text(encoding="utf-8"))


@pytest.mark.usefixtures("no_charts")
def test_scores_judges_and_diversity_stand_before_and_after_with_changes(tmp_path):
    page = image_run(tmp_path, (0.376, 0.167, 1.02), (0.4, 0.15, 1.0), (0.446, 0.116, 0.9))
    assert page.open == []
    assert "held_out change before training step 0, 54 tasks after training step 2, 54 tasks" in page.text
    optimised = "optimised graded +0.070 [+0.028, +0.112] 0.376 [0.346, 0.406] 0.446 [0.416, 0.476]"
    judged = "not optimised, held out strict -0.051 [-0.093, -0.009] 0.167 [0.137, 0.197] 0.116 [0.086, 0.146]"
    moved = "other changes diversity/latent -0.120 1.020 0.900 distance/base +8.0e-07 0.000 8.0e-07"
    assert f"{optimised} {judged} {moved}" in page.text
    assert "Held-out accuracy" not in page.text
    tones = [attributes["class"] for tag, attributes in page.attributes if tag == "span" and "class" in attributes]
    assert [tone for tone in tones if tone in ("good", "bad")] == ["good", "bad"]


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (
            (0.446, 0.116, 0.9),
            "graded rose from 0.376 to 0.446, while the held-out reward strict fell from 0.167 to 0.116.",
        ),
        ((0.446, 0.167, 0.51), "graded rose from 0.376 to 0.446, while diversity fell by 50%."),
        ((0.38, 0.1, 0.51), "while the held-out reward strict fell from 0.167 to 0.100 and diversity fell by 50%."),
        ((0.446, 0.16, 0.75), None),  # within the judge's interval, and 26% less diversity
        ((0.37, 0.1, 0.4), None),  # everything fell: not what the reward rewards
    ],
)
@pytest.mark.usefixtures("no_charts")
def test_a_score_that_rises_at_the_cost_of_judges_or_diversity_is_pointed_at(tmp_path, after, words):
    text = image_run(tmp_path, (0.376, 0.167, 1.02), after).text
    assert ("Possible reward hacking on held_out" in text) == (words is not None)
    assert words is None or words in text


@pytest.mark.usefixtures("no_charts")
def test_supervised_runs_are_not_suspected_of_reward_hacking(tmp_path):
    page = image_run(tmp_path, (0.0, 1.6, 1.5), (0.2, 1.1, 0.9), reward=False)
    assert "Held-out scores" in page.text
    assert "hacking on" not in page.text


def test_an_evaluation_without_measurements_is_accepted(tmp_path):
    nan = math.nan
    text = image_run(tmp_path, (0.3, nan, nan), (nan, 0.2, 1.0)).text
    assert "hacking on" not in text
    assert "nan" not in text.lower()


def test_scores_are_drawn_over_images_seconds_and_model_evaluations(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("mmrl.report.curves.panel_chart", lambda *args: drawn.append(args) or panel_chart(*args))
    page = image_run(tmp_path, (0.3, 0.2, 1.0), (0.4, 0.1, 0.9), (0.5, 0.1, 0.8))
    axes = {axis: next(iter(series.values()))[0] for series, axis in drawn}
    assert axes == {
        "images": [0, 96, 192],
        "seconds": [0, 0.5, 1],
        "model evaluations": [0, 10 + 3 * 6, 2 * (10 + 3 * 6)],
        "step": [0, 1, 2],
    }
    assert drawn[0][0]["strict (not optimised)"][1:] == ((0.2, 0.1, 0.1), (0.17, 0.07, 0.07), (0.23, 0.13, 0.13))
    assert list(drawn[3][0]) == ["diversity latent", "distance base"]
    assert "rows without gradient + 3 × rows with gradient" in page.text
    assert not [title for title in page.sources() if not title.startswith("data:image/")]
    headings = headings_of(page)
    assert "Scores and held-out rewards on held_out by seconds" in headings
    assert "Cost over steps" not in headings


@pytest.mark.usefixtures("no_charts")
def test_scores_without_costs_are_drawn_over_steps(tmp_path):
    page = image_run(tmp_path, (0.3, 0.2, 1.0), (0.4, 0.1, 0.9), cost=False)
    headings = headings_of(page)
    assert headings[:2] == [
        "Scores and held-out rewards on held_out over steps",
        "Diversity and distance on held_out over steps",
    ]


@pytest.mark.usefixtures("no_charts")
def test_images_of_a_run_are_shown_sharp_and_once(tmp_path):
    page = image_run(tmp_path, (0.3, 0.2, 1.0), (0.4, 0.1, 0.9))
    shown = [attributes for tag, attributes in page.attributes if tag == "img" and "png" in attributes["src"]]
    assert len(shown) == 2 * 2 + 2 * 2  # two prompts before and after, and two rollouts of each of two steps
    assert {(image["class"], image["width"], image["height"]) for image in shown} == {("pixelated", "96", "96")}
    assert "image-rendering: pixelated" in " ".join(page.words)
    assert "prompt before training (step 0) after training (step 1) 0 squares reward 0.5 reward 0.5" in page.text
    assert "Before and after on the same tasks" not in page.text
    assert "sample reward" not in page.text
    assert "the prompt as the model saw it" not in page.text
