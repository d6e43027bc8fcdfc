from mmrl.report.charts import line_chart
from mmrl.report.page import write_report
from mmrl.runs.tracking import Tracker
from tests.report.pages import Page, headings_of


def test_constants_are_named_and_not_drawn_and_a_reward_of_zero_is_named_too(tmp_path):
    tracker = Tracker(tmp_path)
    for step in (1, 2, 3):
        constant = {"reward/mean": 0.0, "policy/entropy": 0.0, "policy/ratio_mean": 1.0}
        tracker.log(step, {**constant, "policy/kl_ref": 0.1 * step})
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert headings_of(page) == ["Divergence from the reference and the sampling policy over steps"]
    assert "Never changed: policy/ratio_mean 1, reward/mean 0." in page.text


def test_counts_and_shares_have_their_own_charts(tmp_path):
    tracker = Tracker(tmp_path)
    for step in (1, 2, 3):
        counts = {"sim/crashed": 20.0 * step, "reward/errors/format/raised": 7.0 * step, "srpo/clusters": 2.0 + step}
        shares = {"srpo/noise_fraction": 0.1 * step, "reward/format": 0.2 * step}
        tracker.log(step, {**counts, **shares, "srpo/agreement": 0.1 * step, "srpo/advantage_correlation": 0.3 * step})
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert headings_of(page) == [
        "Reward terms over steps",
        "sim over steps",
        "srpo, correlations over steps",
        "srpo, counts over steps",
        "srpo, shares over steps",
    ]


def test_a_replay_buffer_has_charts_for_counts_megabytes_and_ratios(tmp_path):
    tracker = Tracker(tmp_path)
    for step in (1, 2, 3):
        counts = {"replay/stored": 4.0 * step, "replay/injected": 1.0 * step, "replay/evicted": 2.0 * step}
        tracker.log(step, {**counts, "replay/memory_mb": 9.0 * step, "replay/ratio/stored": 1 + 0.01 * step})
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert headings_of(page) == [f"replay, {kind} over steps" for kind in ("counts", "megabytes", "values")]


def test_the_success_of_a_task_is_not_drawn_over_the_length_of_episodes(tmp_path):
    tracker = Tracker(tmp_path)
    for step in (1, 2, 3):
        shares = {"episode/success": 0.1 * step, "episode/success/push": 0.2 * step}
        tracker.log(step, {"episode/steps": 60.0 - step, **shares})
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert headings_of(page) == ["episode, counts over steps", "episode, shares over steps"]


def test_the_learning_rate_is_drawn_as_it_was(tmp_path, monkeypatch):
    drawn = {}

    def draw(series, *, log_scale=False, smooth=True):
        drawn.update(dict.fromkeys(series, smooth))
        return b"<svg/>"

    monkeypatch.setattr("mmrl.report.curves.line_chart", draw)
    tracker = Tracker(tmp_path)
    for step in range(1, 101):
        tracker.log(step, {"optim/lr": 1.0 / step, "optim/grad_norm": 1.0 + step})
    write_report(tmp_path)
    assert drawn == {"lr": False, "grad_norm": True}
    rates = [0.0] * 50 + [1.0] * 50
    assert line_chart({"lr": (range(100), rates)}, smooth=False) != line_chart({"lr": (range(100), rates)})
