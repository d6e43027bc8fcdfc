"""Figures of the documentation as SVG."""

import re
import xml.etree.ElementTree as ElementTree

from matplotlib.figure import Figure

from mmrl.report.charts import COLOURS, INK, INK_ON_DARK, interval_chart, line_chart, save_svg, style_axes


def draw():
    figure = Figure(figsize=(3, 2))
    axes = figure.subplots()
    style_axes(axes)
    axes.plot([0, 1], [0, 1], color=COLOURS[0])
    figure.suptitle("A title")
    return figure


def test_text_and_axes_of_an_svg_follow_the_colour_scheme_and_curves_keep_their_colours(tmp_path):
    save_svg(draw(), tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    ElementTree.fromstring(text)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    assert re.fullmatch(
        rf"svg {{ --ink: {INK}; fill: var\(--ink\) }} "
        rf"@media \(prefers-color-scheme: dark\) {{ svg {{ --ink: {INK_ON_DARK} }} }}",
        style,
    )
    rest = text.replace(style, "")
    assert INK not in rest
    assert "#000000" not in rest
    assert "#ffffff" not in rest  # no background
    assert COLOURS[0] in rest


def test_equal_figures_are_equal_files(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        save_svg(draw(), tmp_path / name / "figure.svg")
    assert (tmp_path / "first/figure.svg").read_bytes() == (tmp_path / "second/figure.svg").read_bytes()


def test_any_number_of_curves_is_drawn():
    points = ([0, 1], [0.1, 0.2], [0.1, 0.2], [0.1, 0.2])
    for drawn in (
        line_chart({f"c{i:02d}": points[:2] for i in range(30)}),
        interval_chart({f"c{i:02d}": points for i in range(30)}),
    ):
        assert len(set(re.findall(r"<!-- (c\d\d) -->", drawn.svg.decode()))) == 30


def test_text_of_users_is_no_formula_and_leaves_a_figure_readable():
    labels = [r"$\foo$", "$10-$20", "a\x1bb", "a\ud800b"]
    points = ([0, 1], [0.1, 0.2], [0.1, 0.2], [0.1, 0.2])
    svg = interval_chart(dict.fromkeys(labels, points)).svg.decode()
    ElementTree.fromstring(svg)
    assert "<!-- $10&#45;$20 -->" in svg or "<!-- $10-$20 -->" in svg
