import pytest

from mmrl.report.folder import read_run
from mmrl.report.gallery import readable_answer
from mmrl.report.page import outcome, write_report
from mmrl.report.report_tables import headline, part_lines, part_tables
from mmrl.runs.metrics import measured
from mmrl.runs.records import Outcome, SampleRecord, write_outcomes, write_samples
from mmrl.runs.statistics import difference_interval, paired_difference, wilson_interval
from mmrl.runs.tracking import Tracker
from tests.report.pages import Page, log_evaluation


def log_outcomes(folder, step, right, hints):
    scores = [Outcome(f"q{n}", {"accuracy/greedy": x, "terms/reads/greedy": 1.0}) for n, x in enumerate(right)]
    for score, hint in zip(scores, hints, strict=True):
        score.parts = {"hint": hint}
    write_outcomes(folder, step, "test", scores)
    low, high = wilson_interval(sum(right), len(right))
    value = sum(right) / len(right)
    metrics = {"n": len(right), "accuracy/greedy": value, "accuracy/greedy/low": low, "accuracy/greedy/high": high}
    Tracker(folder).evaluation(step, "during", "test", metrics | {"accuracy/greedy/hint=wrong": 0.5})


def test_changes_are_those_of_the_same_questions_and_rows_by_column(tmp_path):
    hints = ["wrong"] * 20 + ["none"] * 20
    log_outcomes(tmp_path, 0, [0.0] * 16 + [1.0] * 4 + [1.0] * 20, hints)
    log_outcomes(tmp_path, 9, [0.0] * 4 + [1.0] * 16 + [1.0] * 20, hints)
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    mean, low, high, *_ = paired_difference([1.0] * 12 + [0.0] * 28, [0.0] * 40)
    paired = f"+{100 * mean:.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
    assert f"after training 90.0% [76.9, 96.0] {paired} 9 40" in text
    assert "greedy change" in text  # the parts are no protocols of their own
    assert "hint=wrong change" not in text
    assert (
        f"test, greedy change before training step 0 after training step 9 tasks all {paired} 60.0% [44.6, 73.7]"
        in text
    )
    rows = "none +0.0 [+0.0, +0.0] 100.0% [83.9, 100.0] 100.0% [83.9, 100.0] 20 wrong +60.0 [+36.5, +83.5] 20.0%"
    assert f"by hint {rows}" in text
    assert "other scores reads +0.0 [+0.0, +0.0] 100.0%" in text


def test_a_first_evaluation_after_some_steps_is_not_called_before_training(tmp_path):
    for step in (40, 80):
        log_outcomes(tmp_path, step, [0.0] * 4 + [1.0] * 4, ["none"] * 8)
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "step 40 of training" in text
    assert "before training" not in text


def test_a_number_has_one_interval_on_the_page(tmp_path):
    for step in (0, 9):
        outcomes = [
            Outcome(f"q{n}", {"accuracy/sampled": float(n < 12)}, parts={"hint": "ab"[n // 20]}) for n in range(40)
        ]
        write_outcomes(tmp_path, step, "test", outcomes)
        metrics = {"n": 40, "accuracy/sampled": 0.3, "accuracy/sampled/low": 0.175, "accuracy/sampled/high": 0.45}
        Tracker(tmp_path).evaluation(step, "during", "test", metrics)  # by bootstrap, as of sampled answers
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert text.count("30.0% [17.5, 45.0]") == text.count("30.0% [") == 4


def test_a_mean_of_shares_is_named_and_its_interval_stays_between_0_and_100(tmp_path):
    for step, low in ((0, 0.25), (9, 0.875)):
        values = [low] + [1.0] * 5
        write_outcomes(
            tmp_path,
            step,
            "test",
            [Outcome(f"q{n}", {"accuracy/agent": 1.0, "recall/agent": x}) for n, x in enumerate(values)],
        )
        metrics = {"n": 6, "accuracy/agent": 1.0, "accuracy/agent/low": 0.6, "accuracy/agent/high": 1.0}
        Tracker(tmp_path).evaluation(step, "during", "test", metrics)
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    assert "87.5% [55.4, 100.0] 97.9% [92.6, 100.0] 6" in text


def test_other_questions_have_no_paired_change(tmp_path):
    log_outcomes(tmp_path, 0, [0.0] * 10 + [1.0] * 10, ["wrong"] * 20)
    log_outcomes(tmp_path, 9, [1.0] * 30, ["wrong"] * 30)
    text = Page(write_report(tmp_path).read_text(encoding="utf-8")).text
    change, low, high = difference_interval((1.0, *wilson_interval(30, 30)), (0.5, *wilson_interval(10, 20)))
    assert f"{100 * change:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]" in text


def test_the_start_of_a_run_that_repeats_the_end_of_the_one_before_is_left_out(tmp_path):
    sft, run = tmp_path / "sft", tmp_path / "papo"
    for folder, points in ((sft, ((0, 0.1), (20, 0.4))), (run, ((0, 0.4), (30, 0.6)))):
        tracker = Tracker(folder)
        for step, value in points:
            log_evaluation(tracker, step, "during", value)
    text = Page(write_report(run, chain=[sft]).read_text(encoding="utf-8")).text
    assert "after sft 40.0%" in text
    assert "before papo" not in text
    assert "after papo 60.0% [55.0, 65.0] +20.0" in text


def test_the_gallery_calls_a_model_what_the_tables_call_it(tmp_path):
    sft, run = tmp_path / "sft", tmp_path / "papo"
    for folder, points in ((sft, ((0, 0.1), (20, 0.4))), (run, ((0, 0.4), (30, 0.6)))):
        tracker = Tracker(folder)
        for step, value in points:
            log_evaluation(tracker, step, "during", value)
            write_samples(folder, step, "eval", [SampleRecord("q", "what?", f"{value}")])
    text = Page(write_report(run, chain=[sft]).read_text(encoding="utf-8")).text
    columns = ("before sft (step 0) 0.1", "after sft (step 20) 0.4", "after papo (step 30) 0.6")
    assert [text.count(column) for column in columns] == [1, 1, 1]
    assert "before papo" not in text


def test_a_run_that_changed_nothing_still_shows_its_end(tmp_path):
    sft, run = tmp_path / "sft", tmp_path / "papo"
    for folder, points in ((sft, ((0, 0.1), (20, 0.4))), (run, ((0, 0.4), (30, 0.4)))):
        tracker = Tracker(folder)
        for step, value in points:
            log_evaluation(tracker, step, "during", value)
    text = Page(write_report(run, chain=[sft]).read_text(encoding="utf-8")).text
    assert "after papo 40.0% [35.0, 45.0] +0.0" in text


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("two\nlines, two  words", "two\nlines, two  words"),
        ("\n\n\n \t7\n", "\\n×3␣\\t7\\n"),
        ("7\n\n\n\n8\xa0    9", "7\\n×48\\xa0␣×49"),
        (" " * 40, "␣×40"),
    ],
)
def test_whitespace_that_would_show_as_emptiness_is_written_out(answer, shown):
    assert readable_answer(answer) == shown


def test_the_metric_that_chooses_the_best_checkpoint_comes_first(tmp_path):
    for step, greedy, sampled in ((0, 0.6, 0.1), (8, 0.9, 0.7)):
        numbers = {"n": 9, "accuracy/greedy": greedy, "accuracy/sampled": sampled}
        Tracker(tmp_path).evaluation(step, "during", "test", numbers)
    assert headline([read_run(tmp_path)])[0]["protocols"] == ["greedy", "sampled"]
    (tmp_path / "config.yaml").write_text("checkpoint: {best_metric: accuracy/sampled}\n")
    assert headline([read_run(tmp_path)])[0]["protocols"] == ["sampled", "greedy"]
    assert "from 10.0 to 70.0" in outcome([read_run(tmp_path)])[0]


def test_values_of_a_data_column_with_slashes_are_no_metrics_of_their_own():
    assert measured([{"accuracy/greedy": 0.5, "accuracy/greedy/form=a/b": 1.0}], ("accuracy/",)) == ["accuracy/greedy"]


def test_lines_of_parts_have_every_split_and_the_page_only_those_with_parts(tmp_path):
    log_outcomes(tmp_path, 0, [0.0] * 4 + [1.0] * 4, ["wrong", "none"] * 4)
    plain = [Outcome(f"q{number}", {"accuracy/greedy": float(number < 3)}) for number in range(4)]
    write_outcomes(tmp_path, 0, "plain", plain)
    metrics = {"n": 4, "accuracy/greedy": 0.75, "accuracy/greedy/low": 0.3, "accuracy/greedy/high": 0.95}
    Tracker(tmp_path).evaluation(0, "during", "plain", metrics)
    lines = part_lines([tmp_path])
    assert [line for line in lines if not line.startswith(" ")] == ["test, greedy", "plain, greedy"]
    (shown,) = [line.split() for line in lines[lines.index("plain, greedy") :] if line.split()[0] == "all"]
    assert shown[:3] == ["all", "4", "75.0%"]
    assert [table["split"] for table in part_tables([read_run(tmp_path)])] == ["test"]
