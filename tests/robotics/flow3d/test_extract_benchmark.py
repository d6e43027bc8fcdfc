"""The comparison of extractors: scores of one video, and the table of made-up rows."""

import numpy as np
import pytest
from PIL import Image

from benchmarks.robotics.flow3d_extractors import BACKENDS, compare_extractors, draw, summary, table

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")


def made(iou, median_cm, refused=False):
    errors = dict.fromkeys(("median_px", "median_cm", "final_rotation_deg", "final_translation_cm"), median_cm)
    known = {"backend": "b", "size_px": 64, "noise": 0.01, "precision": iou, "refused": refused, "cpu_s": 1.0}
    return known | errors | {"iou": iou, "lost": median_cm is None}


def test_rows_are_summed_up_and_drawn(tmp_path):
    rows = [made(0.9, 1.0), made(0.6, 3.0), made(0.0, None, refused=True), made(0.5, 4.0)]
    (found,) = summary(rows)
    assert (found["videos"], found["found"], found["refused"], found["lost"]) == (4, 0.5, 0.25, 0.25)
    assert (found["iou"], found["median_cm"]) == (0.55, 3.0)
    assert table(rows).splitlines()[2].startswith("| b | 64 | 1% | 0.50 | 0.25 | 0.55 |")
    draw(rows, tmp_path / "x.png")
    assert np.asarray(Image.open(tmp_path / "x.png")).std() > 10


def test_a_video_is_judged_by_every_backend(backend):
    rows = compare_extractors((64,), (0.0,))
    first, second = next(rows), next(rows)
    rows.close()
    assert [first["backend"], second["backend"]] == list(BACKENDS)
    assert (first["actor"], first["task"], first["size_px"]) == ("hand", "place_red", 64)
    assert first["precision"] > 0.9
    assert first["median_cm"] < second["median_cm"]
