import base64
import io
import json
import math
import xml.etree.ElementTree

import numpy as np
import pytest
from PIL import Image, ImageDraw

from mmrl.report.curves import by_kind, chart_title, subjects
from mmrl.report.page import write_report
from mmrl.report.report_tables import unit_of
from mmrl.runs.records import SampleRecord, write_samples
from mmrl.runs.tracking import Tracker, metric_definitions
from tests.report.pages import Page, log_evaluation

HOSTILE = '</div><script>alert("1")</script> & <answer>5</answer>'

PROMPT = "<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def scene(left, right):
    image = Image.new("RGB", (84, 56), (90, 120, 150))
    draw = ImageDraw.Draw(image)
    for x, digit in ((22, left), (58, right)):
        draw.text((x, 20), str(digit), fill=(250, 240, 200))
    return image


def question(index):
    text = "<|vision_start|>" + "<|image_pad|>" * 12 + f"<|vision_end|>What is {index} + {index + 1}?"
    return PROMPT.format(text)


def records(skill, samples, rng):
    found = []
    for task in range(8):
        right = rng.random(samples) < skill
        for good in right:
            value = 2 * task + 1 if good else int(rng.integers(20))
            found.append(
                SampleRecord(
                    id=f"add-{task}",
                    prompt=question(task),
                    response=f"<think>{task} plus {task + 1}</think><answer>{value}</answer>",
                    answer=str(2 * task + 1),
                    images=[scene(task, task + 1)],
                    reward=float(good) + 0.1,
                    terms={"format": 1.0, "number": float(good)},
                    advantage=None if samples == 1 else float(good - right.mean()),
                    finish="eos",
                    correct=bool(good),
                )
            )
    return found


def step_metrics(step, steps, rng):
    progress = step / steps
    return {
        "reward/mean": 0.3 + 0.5 * progress + 0.05 * rng.normal(),
        "reward/std": 0.4,
        "reward/format": 0.9 + 0.1 * progress,
        "reward/number": 0.25 + 0.5 * progress + 0.05 * rng.normal(),
        "reward/errors": float(step == 3),
        "reward/zero_variance_groups": 0.25,
        "response/length_mean": 24 + 4 * progress + rng.normal(),
        "response/length_max": 48.0,
        "response/finished_fraction": 0.97,
        "loss/total": -0.02 * progress + 0.01 * rng.normal(),
        "loss/policy": 0.01 * rng.normal(),
        "loss/kl": 0.002 * progress,
        "policy/kl_ref": 0.05 * progress,
        "policy/kl_old": 0.001,
        "policy/entropy": 1.2 - 0.7 * progress,
        "policy/ratio_mean": 1.0,
        "policy/ratio_max": 1.3,
        "policy/clip_fraction_low": 0.01,
        "policy/clip_fraction_high": 0.02,
        "papo/kl_masked": 0.3 + progress,
        "optim/lr": 1e-4,
        "optim/grad_norm": 1 + abs(rng.normal()),
        "optim/skipped": 0.0,
        "time/rollout": 1.5,
        "time/score": 0.1,
        "time/update": 0.9,
        "time/step": 2.6,
        "tokens/per_second": 900 + 30 * rng.normal(),
        "tokens/total": 2000.0 * step,
        "samples/total": 64.0 * step,
    }


def make_run(folder, steps=40, start=0.35, end=0.72):
    rng = np.random.default_rng(0)
    tracker = Tracker(folder, strict=True)
    for step in range(steps + 1):
        if step:
            tracker.log(step, step_metrics(step, steps, rng))
        if step % (steps // 4) == 0:
            skill = start + (end - start) * step / steps
            tag = "before" if step == 0 else "after" if step == steps else "during"
            log_evaluation(tracker, step, tag, skill)
            write_samples(folder, step, "eval", records(skill, 1, rng))
    write_samples(folder, steps, "train", records(0.5, 4, rng))
    tracker.close()
    result = {
        "status": "done",
        "recipe": "papo",
        "objective": "grpo",
        "objective_formula": "A = (r - mean) / (std + 1e-06); ratio < 1.2",
        "steps": steps,
        "optimiser_steps": 2 * steps,
        "samples": 64 * steps,
        "tokens": 2000 * steps,
    }
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "config.yaml").write_text("recipe: papo\ntrainer:\n  steps: 40\n  note: <b>bold</b>\n")
    return folder


def make_sft(folder):
    tracker = Tracker(folder, strict=True)
    for step in range(1, 21):
        tracker.log(step, {"loss/nll": 3 / step, "loss/total": 3 / step, "time/step": 0.5, "optim/lr": 1e-3})
    for step, tag, value in ((0, "before", 0.01), (20, "after", 0.34)):
        log_evaluation(tracker, step, tag, value)
        write_samples(folder, step, "eval", records(value, 1, np.random.default_rng(1)))
    tracker.close()
    (folder / "result.json").write_text(json.dumps({"status": "done", "recipe": "sft", "steps": 20}))
    return folder


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "papo")


@pytest.fixture(scope="module")
def page(run_dir):
    return Page(write_report(run_dir).read_text(encoding="utf-8"))


def test_page_is_whole_and_needs_nothing_from_outside(run_dir, page):
    assert page.open == []
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    assert not {"link", "iframe"} & set(page.tags)
    assert page.tags.count("script") == 1
    assert not any("src" in attributes for tag, attributes in page.attributes if tag == "script")
    assert all(source.startswith("data:image/") for source in page.sources())
    assert "url(" not in text
    assert "@import" not in text
    assert not list(run_dir.glob("*.partial"))


def test_every_embedded_image_opens(page):
    kinds = {"png": 0, "svg+xml": 0}
    for source in page.sources():
        kind, _, data = source.removeprefix("data:image/").partition(";base64,")
        kinds[kind] += 1
        content = base64.b64decode(data, validate=True)
        if kind == "png":
            assert Image.open(io.BytesIO(content)).size == (84, 56)
        else:
            assert xml.etree.ElementTree.fromstring(content).tag.endswith("svg")
    assert kinds["png"] == 6 + 8  # six tasks of rollouts, eight questions before and after
    assert kinds["svg+xml"] >= 11


def test_headline_shows_both_ends_with_intervals_and_change(page):
    assert "before training 35.0% [30.0, 40.0]" in page.text
    assert "after training 72.0% [67.0, 77.0] +37.0 [+29.9, +44.1]" in page.text
    assert "greedy change sampled change" in page.text


def test_sections_are_there(page):
    shown = " ".join(page.words)
    for section in ("Run summary", "Curves", "Before and after", "Sample rollouts", "Configuration"):
        assert section in shown
    for chart in ("Accuracy on test", "Reward terms", "Entropy", "Loss terms", "Gradient norm", "Seconds by stage"):
        assert chart in shown
    assert "papo · grpo" in shown
    assert "A = (r - mean) / (std + 1e-06); ratio < 1.2" in shown
    assert "note: <b>bold</b>" in shown


def test_rollouts_are_grouped_and_carry_rewards_and_advantages(page):
    text = page.text
    assert "The first 6 of the 8 tasks stored at step 40, without selection." in text
    assert "sample reward format number advantage finish" in text
    assert "What is 0 + 1?" in text
    assert "<|image_pad|>×12" in text
    assert "<think>0 plus 1</think>" in text


def test_every_header_cell_has_its_scope_and_every_table_a_caption(page):
    scopes = [attributes.get("scope") for tag, attributes in page.attributes if tag == "th"]
    assert set(scopes) == {"row", "col"}  # and rowgroup, where a table has groups
    assert page.tags.count("caption") == page.tags.count("table") > 2
    assert page.tags.count("main") == 1


def test_before_and_after_are_side_by_side(page):
    text = page.text
    assert "before training (step 0)" in text
    assert "after training (step 40)" in text
    assert "✓ correct" in text
    assert "✗ incorrect" in text


def test_a_chain_starts_the_headline_with_the_first_run(tmp_path):
    sft, run = make_sft(tmp_path / "sft"), make_run(tmp_path / "papo")
    text = Page(write_report(run, chain=[sft]).read_text(encoding="utf-8")).text
    rows = ["before sft 1.0%", "after sft 34.0%", "before papo 35.0%", "after papo 72.0%"]
    places = [text.index(row) for row in rows]
    assert places == sorted(places)
    columns = ["before sft (step 0)", "before papo (step 0)", "after papo (step 40)"]
    assert all(column in text for column in columns)
    assert write_report(run, before=sft) == run / "report.html"
    again = Page((run / "report.html").read_text(encoding="utf-8")).text
    assert "before sft 1.0%" in again


def test_supervised_run_has_a_report_without_rewards(tmp_path):
    text = Page(write_report(make_sft(tmp_path / "sft")).read_text(encoding="utf-8")).text
    assert "Loss terms" in text
    assert "Before and after" in text
    assert "Reward" not in text
    assert "Sample rollouts" not in text


def test_empty_folder_gets_a_report_that_says_so(tmp_path):
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "has not finished" in page.text
    assert "metrics.jsonl does not contain any steps" in page.text
    assert page.open == []


def test_a_folder_of_evaluations_shows_the_newest_of_each_split(tmp_path):
    rows = [
        {"step": 0, "tag": "evaluate", "split": split, "n": 50, "accuracy/first": value}
        for split, value in (("web", 0.25), ("mobile", 0.75), ("web", 0.5))
    ]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = SampleRecord("a", "find it", "[1, 2]", outputs=[scene(1, 2)], correct=False)
    write_samples(tmp_path, 0, "eval", [shown])
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "Nothing was trained in this run" in text
    assert "has not finished" not in text
    assert "evaluated 50.0% 0 50" in text
    assert "evaluated 75.0% 0 50" in text
    assert "25.0%" not in text
    assert "evaluated (step 0)" in text
    assert "The same tasks in images" in text


@pytest.mark.parametrize("content", ["{", "[]", "null", ""])
def test_damaged_result_is_ignored(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    assert "has not finished" in write_report(tmp_path).read_text(encoding="utf-8")


def test_values_of_another_type_in_a_result_are_left_out(tmp_path):
    result = {"status": ["done"], "recipe": 3, "steps": "many", "optimiser_steps": {}, "samples": [1], "tokens": 7}
    result["optimiser_steps_without_gradient"] = "some"
    (tmp_path / "result.json").write_text(json.dumps(result))
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "decisions 7" in text
    assert "optimiser steps" not in text


def test_a_metric_without_a_name_has_no_legend(tmp_path):
    for step in (1, 2):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "": 0.5 * step}) + "\n")
    assert "2 steps logged" in Page(write_report(tmp_path).read_text(encoding="utf-8")).text


def test_all_text_of_the_run_is_escaped(tmp_path):
    record = SampleRecord(
        id=HOSTILE,
        prompt=HOSTILE,
        response=HOSTILE + "\x00\x1b \ud800",
        answer=HOSTILE,
        images=[scene(1, 2)],
        reward=1.0,
        terms={"<i>": 1.0},
        finish="<u>",
    )
    for step, split in ((0, "eval"), (5, "eval"), (5, "train")):
        folder = tmp_path / "samples" / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        row = {**vars(record), "images": []}
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    tracker = Tracker(tmp_path)
    tracker.log(1, {"reward/mean": 0.1, "reward/<img src=x>": 0.5})
    tracker.evaluation(0, "before", "<s>split</s>", {"n": 3, "accuracy/<q>": 0.5})
    result = {"status": HOSTILE, "recipe": HOSTILE, "objective": "x", "objective_formula": HOSTILE}
    (tmp_path / "result.json").write_text(json.dumps(result))
    (tmp_path / "config.yaml").write_text(f"a: {HOSTILE}\n")
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert page.open == []
    assert not {"answer", "i", "u", "s", "b", "q"} & set(page.tags)
    assert page.tags.count("script") == 1  # the page's own
    assert all(source.startswith("data:") for source in page.sources())
    assert page.text.count(HOSTILE) >= 8
    assert "\x00" not in page.text


def test_gaps_and_missing_intervals_are_drawn(tmp_path):
    tracker = Tracker(tmp_path)
    for step in range(1, 8):
        tracker.log(step, {"reward/mean": math.nan if step == 4 else 0.1 * step, "optim/grad_norm": math.inf})
    for step in (0, 7):
        tracker.evaluation(step, "during", "test", {"accuracy/greedy": 0.5 + step / 100})
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "57.0%" in text
    assert "+7.0" in text
    assert "nan" not in text.lower()
    assert "Gradient norm" not in text


def test_later_evaluations_of_a_finished_run_do_not_move_its_headline(tmp_path):
    tracker = Tracker(tmp_path)
    tracker.evaluation(0, "before", "test", {"accuracy/greedy": 0.2})
    tracker.evaluation(9, "after", "test", {"accuracy/greedy": 0.6})
    tracker.evaluation(9, "evaluate", "test", {"accuracy/greedy": 0.9})
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "60.0%" in text
    assert "90.0%" not in text


def test_the_number_of_decisions_is_named_by_domain():
    named = {"vlm": "Response length", "aepo": "Response length", "masked": "Response length"}
    named |= {
        "agent": "Tokens per episode",
        "robot_ppo": "Decisions per sample",
        "diffusion_nft": "Decisions per sample",
    }
    for recipe, title in (named | {"my_module:Recipe:Config": "Decisions per sample"}).items():
        assert chart_title("Decisions per sample", recipe) == title
    assert chart_title("optim") == "Optimiser"
    names = ["response/length_mean", "response/length_max"]
    assert ("Decisions per sample", names) in [*subjects(names)]
    for recipe in ("vlm", "agent", "robot_ppo", "srpo", "flow_grpo", ""):
        known = metric_definitions(recipe)
        assert {unit_of(known[name]) for name in names} == {"decisions"}
        assert [*by_kind(names, known.get)] == ["counts"]
