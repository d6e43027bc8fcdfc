"""Flow with some points held still."""

import numpy as np

from robotics.flow3d.closed_loop.flow_episodes import StillPoints


class Moving:
    encoding = "of the model"

    def predict(self, observation, points, samples=1, seed=0):
        moved = np.concatenate([points + 10.0, np.zeros((*points.shape[:2], 1))], -1)
        return np.tile(moved, (samples, 5, 1, 1, 1))


def test_a_share_of_the_points_does_not_move_in_any_frame_or_sample():
    points = np.random.default_rng(0).uniform(1, 2, (4, 4, 3))
    flow = StillPoints(Moving(), 0.2).predict(None, points, samples=2, seed=7)
    assert flow.shape == (2, 5, 4, 4, 4)
    still = (flow[..., :3] == points).all(-1)
    assert (still == still[0, 0]).all()
    assert still[0, 0].sum() == 3  # a fifth of 16
    assert (flow[still][:, 3] == 1).all()
    np.testing.assert_array_equal(flow[~still], Moving().predict(None, points, 2)[~still])


def test_the_seed_chooses_the_points_and_the_encoding_is_passed_on():
    points, model = np.ones((4, 4, 3)), StillPoints(Moving(), 0.25)
    first, same, other = (model.predict(None, points, 1, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, same)
    assert not np.array_equal(first, other)
    assert model.encoding == "of the model"
