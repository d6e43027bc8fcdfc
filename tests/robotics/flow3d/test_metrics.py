"""Metrics and the reward on examples that were computed by hand."""

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.flow3d.metrics import flow_metrics
from robotics.flow3d.reward.following import FlowProgress, flow_distances, flow_progress_reward


def test_errors_are_distances_in_metres():
    true = np.zeros((2, 2, 3))
    predicted = true.copy()
    predicted[0, 0] = [0.03, 0.04, 0.0]  # 5 cm, not within it
    predicted[1, 0] = [0.0, 0.0, 0.02]
    predicted[1, 1] = [0.0, 0.1, 0.0]
    found = flow_metrics(predicted, true, np.array([[1.0, 1.0], [1.0, 0.2]]))
    assert found == pytest.approx(
        {"ade_m": 0.17 / 4, "fde_m": 0.06, "ade_visible_m": 0.07 / 3, "fde_visible_m": 0.02, "acc_5cm": 0.5}
    )
    assert flow_metrics(predicted, true)["ade_visible_m"] == pytest.approx(0.17 / 4)
    hidden = flow_metrics(predicted, true, np.zeros((2, 2)))
    assert np.isnan([hidden["ade_visible_m"], hidden["fde_visible_m"]]).all()
    with pytest.raises(UserError, match=r"\(2, 2, 3\) and true flow \(1, 2, 3\)"):
        flow_metrics(predicted, true[:1])


def line_flow(frames=4, step_m=0.1):
    """Two points, 1 m apart, that move along x by 10 cm per frame."""
    start = np.array([[0.0, 0, 0], [0, 1, 0]])
    return start + np.arange(frames + 1)[:, None, None] * np.array([step_m, 0, 0])


def test_reward_is_progress_less_distance():
    frames = line_flow()
    now = frames[2] + [0.0, 0.0, 0.03]
    reward, reached = flow_progress_reward(now, frames)
    assert reached == 2
    assert reward == pytest.approx(2 / 4 - 5 * 0.03)
    assert flow_progress_reward(now, frames, success=True)[0] == pytest.approx(2 / 4 - 0.15 + 1)
    assert flow_progress_reward(now, frames, beta_per_m=1.0)[0] == pytest.approx(0.5 - 0.03)


def test_what_was_reached_is_never_taken_back():
    progress = FlowProgress(line_flow())
    assert progress.step(line_flow()[3]) == pytest.approx(3 / 4)
    assert progress.step(line_flow()[1]) == pytest.approx(0 - 5 * 0.2), "back by two frames"
    assert progress.reached == 3
    assert progress.step(line_flow()[4]) == pytest.approx(1 / 4)
    assert progress.step(line_flow()[4]) == pytest.approx(0)


def test_ties_go_to_the_first_frame_and_a_still_object_earns_nothing():
    still = np.repeat(line_flow()[:1], 5, axis=0)
    assert flow_progress_reward(still[0], still) == (0.0, 0)


def test_only_visible_points_count():
    frames, now = line_flow(), line_flow()[1]
    now[1] += 9.0
    np.testing.assert_allclose(flow_distances(now, frames, np.array([1.0, 0.0])), [0.1, 0, 0.1, 0.2, 0.3])
    assert flow_distances(now, frames)[1] > 1
    np.testing.assert_allclose(flow_distances(now, frames, np.zeros(2)), flow_distances(now, frames))
    with pytest.raises(UserError, match=r"\(2, 3\) and frames \(5, 3, 3\)"):
        flow_distances(now, np.zeros((5, 3, 3)))
