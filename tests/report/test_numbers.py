import math

import pytest

from mmrl.report.charts import moving_average, panel_chart
from mmrl.report.report_tables import derived_numbers, stage_shares


def test_derived_numbers_by_hand():
    metrics = [
        {
            "step": step,
            "reward/mean": reward,
            "reward/errors": 2.0,
            "reward/zero_variance_groups": 0.5,
            "time/step": 4.0,
            "time/rollout": 3.0,
            "time/update": 0.5,
            "tokens/total": 100.0 * step,
            "samples/total": 16.0 * step,
            "data/skipped": 1.0 * step,
        }
        for step, reward in enumerate([0.1, 0.5, math.nan, 0.3], start=1)
    ]
    rows = {name: (value, remark) for name, value, remark in derived_numbers(metrics, {})}
    assert rows["reward at the start"][0] == "0.1"
    assert rows["reward at the end"] == ("0.3", "last step, +0.2 compared with the start")
    assert rows["best reward"] == ("0.5", "step 2")
    assert rows["groups with equal rewards"][0] == "50.0%"
    assert rows["samples"][0] == "64"
    assert rows["time in steps"] == ("16.0 s", "4 s per step")
    assert rows["decisions per second"][0] == "25"
    assert rows["time by stage"] == ("rollout 75.0%", "update 12.5%, other 12.5%")
    assert rows["samples that could not be scored"][0] == "8"
    assert rows["rows skipped"][0] == "4"
    assert "optimiser steps skipped" not in rows
    assert sum(stage_shares(metrics).values()) == pytest.approx(1)
    result = {"steps": 4, "optimiser_steps": 1200, "optimiser_steps_without_gradient": 3}
    rows = {name: (value, remark) for name, value, remark in derived_numbers(metrics, result)}
    assert rows["steps"] == ("4", "1,200 optimiser steps, 3 more skipped because no group had a gradient")


def test_samples_of_one_decision_each_are_called_samples():
    """Images that a success classifier sees are no choices of a policy."""
    metrics = [{"step": 1, "time/step": 4.0, "tokens/total": 100.0, "samples/total": 100.0}]
    rows = {name: value for name, value, _ in derived_numbers(metrics, {"samples": 100, "tokens": 100})}
    assert {name: rows[name] for name in ("samples", "samples per second")} == {
        "samples": "100",
        "samples per second": "25",
    }
    assert not [name for name in rows if "decision" in name]


def test_numbers_of_an_agents_episodes():
    metrics = [
        {
            "step": step,
            "episode/unreadable": 0.1 * step,
            "episode/turns": 2.0,
            "time/env_step_p50": 0.1,
            "time/env_step_p90": 1.5,
            "env/overflow": 3.0 * step,
            "env/failed": 0.0,
            **({"episode/tool_errors/timeout": 0.5} if step == 6 else {}),
        }
        for step in range(1, 8)
    ]
    rows = {name: (value, remark) for name, value, remark in derived_numbers(metrics, {})}
    assert rows["invalid responses"] == ("0.5", "mean of the last 5 steps, 0.3 at first")
    assert rows["turns per episode"][0] == "2"
    assert rows["tool errors per response"] == ("0.1", "timeout 0.1")
    assert rows["environment step"] == ("0.1 s", "median, mean over steps; 90th percentile 1.5 s")
    assert rows["episodes that overflowed"] == ("21", "a turn did not fit in the model's context")
    assert rows["episodes of failed environments"] == ("0", "")
    assert "return" not in rows
    plain = [{"step": 1, "episode/success": 0.5}]
    assert "successful episodes" not in {name for name, *_ in derived_numbers(plain, {})}, "no agent"


def test_moving_average_skips_gaps():
    assert moving_average([1.0, 2.0, 3.0, 4.0], 3) == pytest.approx([1.5, 2.0, 3.0, 3.5])
    gap = moving_average([1.0, math.nan, 3.0, math.nan, math.nan, math.nan], 3)
    assert gap[:4] == pytest.approx([1.0, 2.0, 3.0, 3.0])
    assert math.isnan(gap[5])
    assert moving_average([math.nan, 2.0], 1)[1] == 2.0


def test_panels_have_an_axis_each_and_share_the_horizontal_one():
    unlike = {
        "share": ([0, 1], [0.1, 0.2], [0.0, 0.1], [0.2, 0.3]),
        "bytes": ([0, 1], [900, 800], *[[math.nan] * 2] * 2),
    }
    svg = panel_chart(unlike, "images").svg.decode()
    assert svg.count('<g id="axes_') == 2
    assert svg.count("<!-- images -->") == 1
    for label in unlike:
        assert f"<!-- {label} -->" in svg


def test_videos_of_the_first_and_last_evaluation_are_embedded(tmp_path):
    from mmrl.report.gallery import VIDEO_BYTES, videos_of

    folder = tmp_path / "videos"
    folder.mkdir()
    for step in (0, 10, 20):
        (folder / f"step-{step:06d}-held_out-success-reach-3.mp4").write_bytes(b"film")
    (folder / "step-000020-held_out-failure-reach-4.mp4").write_bytes(b"x" * (VIDEO_BYTES + 1))
    (folder / "notes.mp4").write_bytes(b"")
    videos = videos_of(tmp_path)
    assert [video["title"][:11] for video in videos] == ["step 000000", "step 000020", "step 000020"]
    assert videos[0]["source"] == "data:video/mp4;base64,ZmlsbQ=="
    assert videos[1]["source"] is None
    assert videos_of(tmp_path / "nothing") == []
