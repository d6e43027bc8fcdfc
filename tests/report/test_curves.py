import json
import re
from importlib import resources

import pytest

from mmrl.report import curves
from mmrl.report.charts import COLOURS, INK, INK_ON_DARK, Chart, interval_chart, line_chart
from mmrl.report.page import write_report
from mmrl.report.report_tables import readable_name
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
        "Simulators over steps",
        "Srpo, correlations over steps",
        "Srpo, counts over steps",
        "Srpo, shares over steps",
    ]


def test_a_replay_buffer_has_charts_for_counts_megabytes_and_ratios(tmp_path):
    tracker = Tracker(tmp_path)
    for step in (1, 2, 3):
        counts = {"replay/stored": 4.0 * step, "replay/injected": 1.0 * step, "replay/evicted": 2.0 * step}
        tracker.log(step, {**counts, "replay/memory_mb": 9.0 * step, "replay/ratio/stored": 1 + 0.01 * step})
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert headings_of(page) == [f"Replay buffer, {kind} over steps" for kind in ("counts", "megabytes", "values")]


def test_the_success_of_a_task_is_not_drawn_over_the_length_of_episodes(tmp_path):
    tracker = Tracker(tmp_path)
    for step in (1, 2, 3):
        shares = {"episode/success": 0.1 * step, "episode/success/push": 0.2 * step}
        tracker.log(step, {"episode/steps": 60.0 - step, **shares})
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert headings_of(page) == ["Episode, counts over steps", "Episode, shares over steps"]


def test_the_learning_rate_is_drawn_as_it_was(tmp_path, monkeypatch):
    drawn = {}

    def draw(series, *, unit, log_scale, smooth):
        drawn.update(dict.fromkeys(series, smooth))
        return Chart(b"<svg/>")

    monkeypatch.setattr("mmrl.report.curves.line_chart", draw)
    tracker = Tracker(tmp_path)
    for step in range(1, 101):
        tracker.log(step, {"optim/lr": 1.0 / step, "optim/grad_norm": 1.0 + step})
    write_report(tmp_path)
    assert drawn == {"learning rate": False, "gradient norm": True}
    rates = [0.0] * 50 + [1.0] * 50
    assert line_chart({"lr": (range(100), rates)}, smooth=False).svg != line_chart({"lr": (range(100), rates)}).svg


def test_shares_are_in_per_cent_and_seconds_and_megabytes_have_their_units(tmp_path, monkeypatch):
    units = {}

    def draw(series, *, unit="", **_):
        units[", ".join(series)] = unit
        return Chart(b"<svg/>")

    monkeypatch.setattr(curves, "line_chart", draw)
    tracker = Tracker(tmp_path)
    for step in (1, 2, 3):
        shares = {"reward/zero_variance_groups": 0.1 * step, "policy/clip_fraction_low": 0.01 * step}
        others = {"memory/peak_mb": 9.0 * step, "policy/entropy": 1.0 / step, "time/decode": 0.1 * step}
        tracker.log(step, shares | others)
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert units == {
        "groups with equal rewards": "%",
        "by the lower bound": "%",
        "peak memory": "MB",
        "entropy": "nats",
        "decode": "s",
    }
    assert "Groups without a learning signal" in page.text
    share = {"a": ([1, 2], [0.25, 0.75])}
    assert line_chart(share, unit="%").svg != line_chart(share).svg


def luminance(colour):
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_lines_and_text_of_charts_have_the_contrast_that_wcag_asks_for():
    style = resources.files("mmrl.report").joinpath("report.css").read_text()
    light, dark = re.findall("--card: (#[0-9a-f]{6})", style)
    assert all(contrast(colour, card) >= 3 for colour in COLOURS for card in (light, dark))
    assert contrast(INK, light) >= 4.5
    assert contrast(INK_ON_DARK, dark) >= 4.5
    chart = line_chart({"a": ([1, 2], [0.25, 0.75])}).svg.decode()
    assert f'[style*="fill: {INK}"] {{ fill: {INK_ON_DARK} !important }}' in chart
    assert f"fill: {INK}" in chart.partition("</style>")[2]


def test_curves_differ_by_a_mark_as_well_as_by_colour():
    chart = line_chart({str(number): ([1, 2, 3], [number] * 3) for number in range(8)}).svg.decode()
    marks = dict(re.findall(r'<path id="(m[0-9a-f]+)" d="([^"]*)" style="stroke: #', chart))
    assert len({outline for outline in marks.values() if outline.rstrip().endswith("z")}) == 8  # ticks have no area


def test_a_chart_tells_where_its_axis_lies():
    chart = interval_chart({"greedy": ([0, 100], [0.2, 0.4], [0.1, 0.3], [0.3, 0.5])}, (0.0, 1.0))
    left, top, width, height = chart.box
    assert 0 < left < 0.3
    assert 0.5 < width <= 1 - left
    assert top >= 0
    assert 0.5 < height <= 1 - top
    assert chart.limits[0] <= 0 < 100 <= chart.limits[1]


def test_charts_of_accuracy_have_one_scale_and_an_alternative_text_with_values(tmp_path, monkeypatch):
    scales = []

    def draw(series, limits):
        scales.append(limits)
        return Chart(b"<svg/>", (0.1, 0.1, 0.8, 0.8), (0.0, 9.0))

    monkeypatch.setattr(curves, "interval_chart", draw)
    tracker = Tracker(tmp_path)
    for step, whole, easy in ((0, 0.25, 0.5), (9, 0.5, 0.875)):
        tracker.evaluation(step, "during", "test", {"accuracy/greedy": whole, "accuracy/greedy/level=1": easy})
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert len(scales) == 2
    assert scales[0] == scales[1]
    assert scales[0][0] < 0.25 < 0.875 < scales[0][1]
    texts = [attributes["alt"] for tag, attributes in page.attributes if tag == "img"]
    assert texts[0] == "Accuracy on test over steps: greedy from 25% to 50%"
    values = [json.loads(found["data-values"]) for _, found in page.attributes if "data-values" in found]
    assert values[0] == {
        "box": [0.1, 0.1, 0.8, 0.8],
        "limits": [0.0, 9.0],
        "unit": "%",
        "axis": "step",
        "curves": [["greedy", [[0, 25.0], [9, 50.0]]]],
    }


def test_long_curves_are_thinned_and_keep_their_last_value():
    steps = list(range(1, 1001))
    held = json.loads(curves._values(Chart(b""), {"a": (steps, [float(step) for step in steps])}, "", "step"))
    points = held["curves"][0][1]
    assert len(points) <= curves.HOVERED
    assert points[-1] == [1000, 1000.0]
    assert points[0][0] < 10


@pytest.mark.parametrize(
    ("metric", "among", "name"),
    [
        ("reward/zero_variance_groups", (), "groups with equal rewards"),
        ("policy/kl_ref", (), "from the reference"),
        ("reward/my_format", ("reward/exact",), "my format"),
        ("sim/crashed", ("sim/crashed", "data/skipped"), "simulators crashed"),
        ("papo/kl_masked", ("papo/kl_masked",), "KL masked"),
    ],
)
def test_names_in_legends_are_words(metric, among, name):
    assert readable_name(metric, among) == name
