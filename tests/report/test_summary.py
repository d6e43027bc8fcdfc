"""The opening of a report, its contents, its script, and what keeps it small."""

import base64
import hashlib
import json
import re
from importlib import resources

import numpy as np
import pytest
from PIL import Image

from mmrl.report import gallery
from mmrl.report.folder import read_run
from mmrl.report.page import facts, method, outcome, short_outcome, write_report
from mmrl.runs.records import Outcome, SampleRecord, write_outcomes, write_samples
from mmrl.runs.statistics import paired_difference
from mmrl.runs.tracking import Tracker
from tests.report.pages import Page, log_evaluation

RESULT = {"status": "done", "recipe": "vlm", "objective": "grpo", "seconds": 145.0, "host": "here", "device": "cpu"}


def make_run(folder, before, after, hints, result=RESULT):
    """A run whose outcomes of every question are given, with a column `hint`."""
    tracker = Tracker(folder)
    for step, scores in ((0, before), (9, after)):
        outcomes = [Outcome(f"q{n}", {"accuracy/greedy": score}) for n, score in enumerate(scores)]
        for outcome_, hint in zip(outcomes, hints, strict=True):
            outcome_.parts = {"hint": hint}
        write_outcomes(folder, step, "test", outcomes)
        tracker.evaluation(step, "during", "test", {"n": len(scores), "accuracy/greedy": float(np.mean(scores))})
    if result:
        (folder / "result.json").write_text(json.dumps(result))
    return read_run(folder)


def test_the_first_sentence_names_change_interval_and_what_became_worse(tmp_path):
    before, after = [0.0] * 30 + [1.0] * 20, [1.0] * 30 + [0.0] * 10 + [1.0] * 10
    run = make_run(tmp_path, before, after, ["none"] * 30 + ["right"] * 20)
    mean, low, high, *_ = paired_difference(after, before)
    said = outcome([run])
    assert said[0] == (
        f"GRPO raised held-out accuracy (greedy) from 40.0 to 80.0% (+{100 * mean:.1f} points, "
        f"95% interval {100 * low:+.1f} to {100 * high:+.1f})."
    )
    assert said[1] == "Worse: hint = right (-50)."
    assert short_outcome([run]) == "accuracy 40.0 → 80.0%"


@pytest.mark.parametrize(
    "config",
    [
        "{data: {layouts: 16, first: 0, split: train}, eval_data: {test: {layouts: 8, first: 0, split: train}}}",
        "{data: {first_seed: 0}, eval_data: {test: {first_seed: 0, seen: true}}}",
        "{grounding: {seen: [test]}}",
    ],
)
def test_tasks_of_the_training_are_not_called_held_out(tmp_path, config):
    (tmp_path / "config.yaml").write_text(config)
    run = make_run(tmp_path, [0.0] * 40, [1.0] * 40, ["a", "b"] * 20)
    assert outcome([run])[0].startswith("GRPO raised accuracy (greedy) on training tasks from 0.0 to 100.0%")
    assert dict(facts(run))["evaluated training tasks"] == "test"
    page = Page(write_report(tmp_path).read_text())
    assert "Accuracy on training tasks, test" in page.text
    assert "eld-out" not in page.text


def test_other_states_of_the_same_tasks_are_held_out(tmp_path):
    (tmp_path / "config.yaml").write_text("{data: {layouts: 9, first: 0}, eval_data: {test: {layouts: 9, first: 9}}}")
    run = make_run(tmp_path, [0.0] * 40, [1.0] * 40, ["a", "b"] * 20)
    assert outcome([run])[0].startswith("GRPO raised held-out accuracy (greedy) from")


@pytest.mark.parametrize(
    ("after", "words"),
    [
        ([1.0] * 20 + [0.0] * 20, "GRPO did not clearly change held-out accuracy (greedy): from 50.0 to 50.0%"),
        ([0.0] * 40, "GRPO lowered held-out accuracy (greedy) from 50.0 to 0.0%"),
    ],
)
def test_the_verb_is_that_of_the_interval(tmp_path, after, words):
    run = make_run(tmp_path, [1.0] * 20 + [0.0] * 20, after, ["a", "b"] * 20)
    assert outcome([run])[0].startswith(words)


@pytest.mark.parametrize(
    ("after", "first", "second"),
    [
        (0.4, "lowered held-out accuracy (greedy) from 50.0 to 40.0%", "Better: sampled (+20)."),
        (0.7, "raised held-out accuracy (greedy) from 50.0 to 70.0%", "Better as well: sampled (+20)."),
    ],
)
def test_other_protocols_that_rose_are_named(tmp_path, after, first, second):
    tracker = Tracker(tmp_path)
    for step, greedy, sampled in ((0, 0.5, 0.1), (9, after, 0.3)):
        ends = {"accuracy/greedy": greedy, "accuracy/sampled": sampled}
        bounds = {
            f"{name}/{end}": value + d for name, value in ends.items() for end, d in (("low", -0.02), ("high", 0.02))
        }
        tracker.evaluation(step, "during", "test", {"n": 400.0, **ends, **bounds})
    said = outcome([read_run(tmp_path)])
    assert said[0].startswith(f"So far training {first}")
    assert said[1:] == [second]


def test_groups_that_lost_nothing_are_counted(tmp_path):
    run = make_run(tmp_path, [0.0] * 20, [1.0] * 20, ["a", "b"] * 10)
    assert outcome([run])[1] == "None of the 2 groups of tasks became clearly worse."


def test_groups_that_were_evaluated_once_did_not_change(tmp_path):
    make_run(tmp_path, [0.0] * 20, [1.0] * 20, ["a", "b"] * 10)
    file = tmp_path / "evaluations.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[-1])
    said = outcome([read_run(tmp_path)])
    assert said
    assert "groups of tasks" not in " ".join(said)


def test_a_run_under_way_says_so_far_and_an_empty_one_nothing(tmp_path):
    run = make_run(tmp_path / "a", [0.0] * 20, [1.0] * 20, ["a", "b"] * 10, result=None)
    assert outcome([run])[0].startswith("So far training raised")
    (tmp_path / "b").mkdir()
    assert outcome([read_run(tmp_path / "b")]) == []


@pytest.mark.parametrize(
    ("recipe", "objective", "name"),
    [("vlm", "grpo", "GRPO"), ("papo", "grpo", "PAPO"), ("flow_grpo", "flow_grpo", "flow_grpo"), ("", "", "")],
)
def test_a_method_has_the_name_that_readers_know(tmp_path, recipe, objective, name):
    (tmp_path / "result.json").write_text(json.dumps({"recipe": recipe, "objective": objective}))
    assert method(read_run(tmp_path)) == name


def test_a_method_is_spelled_as_its_paper_does(tmp_path):
    for objective, formula, name in (
        ("gigpo", "gigpo: Feng et al., GiGPO, arXiv 2505.10978\n  A = 0", "GiGPO"),
        ("flow_grpo", "flow_grpo: Liu et al., Flow-GRPO, arXiv 2505.05470", "Flow-GRPO"),
        ("grpo", "grpo: Shao et al., DeepSeekMath\n  as in GrPo", "GRPO"),
    ):
        result = {"recipe": "agent", "objective": objective, "objective_formula": formula}
        (tmp_path / "result.json").write_text(json.dumps(result))
        assert method(read_run(tmp_path)) == name


def test_facts_name_model_data_time_machine_versions_and_command(tmp_path):
    folder = tmp_path / "my run"
    folder.mkdir()
    tracker = Tracker(folder)
    tracker.log(7, {"reward/mean": 0.5})
    tracker.close()
    result = {**RESULT, "steps": 1400, "processes": 2, "versions": {"mmrl-suite": "1.2", "torch": "2.13"}}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "config.yaml").write_text("model: {path: runs/tiny}\ndata: {path: tasks.jsonl}\n")
    found = dict(facts(read_run(folder)))
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", found.pop("date"))
    assert found == {
        "model": "runs/tiny",
        "data": "tasks.jsonl",
        "steps": "1,400",
        "time": "2 min 25 s",
        "machine": "here, cpu, 2 processes",
        "versions": "mmrl-suite 1.2, torch 2.13",
        "command to repeat": f"mmrl train '{folder}/config.yaml' 'output_dir={folder}-again'",
    }


@pytest.mark.parametrize("settings", ["", "[1, 2]", "a: [", "model: 3\ndata: null\n"])
def test_odd_configurations_leave_facts_out(tmp_path, settings):
    (tmp_path / "config.yaml").write_text(settings)
    assert "model" not in dict(facts(read_run(tmp_path)))


def page_of(folder):
    return Page(write_report(folder).read_text(encoding="utf-8"))


def test_the_contents_list_leads_to_sections_and_the_tab_names_the_run(tmp_path):
    folder = tmp_path / "digits"
    tracker = Tracker(folder)
    for step, value in ((0, 0.25), (9, 0.75)):
        log_evaluation(tracker, step, "during", value)
    page = page_of(folder)
    links = [attributes["href"] for tag, attributes in page.attributes if tag == "a"]
    sections = {f"#{attributes['id']}" for tag, attributes in page.attributes if tag == "section"}
    assert "#accuracy" in links
    assert set(links) <= sections
    assert page.tags.count("nav") == 1
    assert "digits · accuracy 25.0 → 75.0%" in page.text


def test_only_the_script_of_the_page_may_run(tmp_path):
    text = write_report(tmp_path).read_text(encoding="utf-8")
    script = text.partition("<script>")[2].partition("</script>")[0]
    assert script.strip() == resources.files("mmrl.report").joinpath("report.js").read_text().strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search('Content-Security-Policy" content="([^"]*)"', text)[1]
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "innerHTML" not in script


def sample(name, image=None):
    images = [] if image is None else [image]
    return SampleRecord(name, "what?", "that", images=images, reward=1.0, advantage=0.0)


def test_rollouts_of_several_steps_fold_and_the_last_is_open(tmp_path):
    for step in (1, 5, 9):
        write_samples(tmp_path, step, "train", [sample(f"task-{step}")])
    page = page_of(tmp_path)
    steps = [found for tag, found in page.attributes if tag == "details" and "data-step" in found]
    assert [found["data-step"] for found in steps] == ["1", "5", "9"]
    assert ["open" in found for found in steps] == [False, False, True]
    assert all(f"task-{step}" in page.text for step in (1, 5, 9))


def test_pictures_of_earlier_steps_are_left_out_where_the_page_would_grow(tmp_path, monkeypatch):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8))
    for step in (1, 5, 9):
        write_samples(tmp_path, step, "train", [sample("task", noise)])
    assert len(gallery.sample_gallery(tmp_path)) == 3
    (source,) = gallery.sample_gallery(tmp_path)[0]["tasks"][0]["images"]
    assert source.startswith("data:image/jpeg")
    monkeypatch.setattr(gallery, "ROLLOUT_BYTES", 2 * len(source) + 9)
    assert [shown["step"] for shown in gallery.sample_gallery(tmp_path)] == [5, 9]


def test_videos_beyond_what_a_page_holds_are_named_only(tmp_path, monkeypatch):
    folder = tmp_path / "videos"
    folder.mkdir()
    for number, size in enumerate((60, 60, 30)):
        (folder / f"step-00000{number and 9}-{number}.mp4").write_bytes(b"x" * size)
    monkeypatch.setattr(gallery, "VIDEO_BYTES", 100)
    assert [video["source"] is not None for video in gallery.videos_of(tmp_path)] == [True, False, True]


def test_the_page_links_point_clouds_of_the_first_and_last_evaluation_from_where_it_is(tmp_path):
    folder = tmp_path / "run" / "clouds"
    folder.mkdir(parents=True)
    for step in (0, 10, 20):
        (folder / f"step-{step:06d}-arms-place red-3.html").write_text("<p>")
    (folder / "notes.html").write_text("<p>")
    found = gallery.clouds_of(folder.parent, tmp_path / "run" / "report.html")
    assert [each["link"] for each in found] == [
        "clouds/step-000000-arms-place%20red-3.html",
        "clouds/step-000020-arms-place%20red-3.html",
    ]
    assert found[0]["title"] == "step 000000 arms place red 3"
    elsewhere = gallery.clouds_of(folder.parent, tmp_path / "pages" / "one.html")
    assert elsewhere[0]["link"] == "../run/clouds/step-000000-arms-place%20red-3.html"
    assert gallery.clouds_of(tmp_path / "nothing", tmp_path / "report.html") == []
