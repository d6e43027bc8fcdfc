"""Flow as tensors and back, and the grids of query points."""

import numpy as np
import pytest

from robotics.flow3d.clip import TARGETS, VISIBILITIES, FlowEncoding, frame_indices, grid_in_box, grid_in_mask

SIZE = (80, 60)


def a_flow(rng, frames=5, side=3):
    low, high = [0, 0, 0.5, 0], [SIZE[0], SIZE[1], 1.2, 1]
    return rng.uniform(low, high, (2, frames, side, side, 4)), rng.uniform(low[:3], high[:3], (2, side, side, 3))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("visibility", VISIBILITIES)
def test_decoding_is_the_inverse_of_encoding(target, visibility):
    flow, points = a_flow(np.random.default_rng(0))
    encoding = FlowEncoding(num_frames=5, grid=3, z_min_m=0.4, z_max_m=1.3, target=target, visibility=visibility)
    written = encoding.encode(flow, points, SIZE)
    assert written.shape == (2, encoding.channels, 5, 3, 3)
    assert written.dtype == np.float32
    expected = flow if visibility == "channel" else np.concatenate([flow[..., :3], np.ones_like(flow[..., 3:])], -1)
    np.testing.assert_allclose(encoding.decode(written, points, SIZE), expected, atol=2e-5)


def test_the_numbers_of_the_public_code():
    encoding = FlowEncoding(num_frames=1, grid=1, visibility="ones")
    flow = np.array([64.0, 192.0, 0.375, 0.0]).reshape(1, 1, 1, 4)
    written = encoding.encode(flow, np.zeros((1, 1, 3)), (256, 256))
    assert written.ravel().tolist() == [-0.5, 0.5, -0.5, 1.0]  # 2 u / W - 1, 2 v / H - 1, 2 z / 1.5 - 1, 1


def test_depth_beyond_the_range_is_clipped_and_positions_are_not():
    encoding = FlowEncoding(num_frames=1, grid=1, visibility="none")
    written = encoding.encode(np.array([-10.0, 500, 9, 1]).reshape(1, 1, 1, 4), np.zeros((1, 1, 3)), (100, 100))
    np.testing.assert_allclose(written.ravel(), [-1.2, 9.0, 1.0], rtol=1e-6)


def test_a_range_of_depths_must_not_be_empty():
    with pytest.raises(ValueError, match="must be greater"):
        FlowEncoding(z_min_m=1.0, z_max_m=1.0).validate()


def test_frames_are_spread_over_a_clip():
    assert frame_indices(41, 8).tolist() == [0, 5, 10, 15, 20, 25, 30, 35, 40]
    assert frame_indices(10, 4).tolist() == [0, 2, 4, 6, 9]
    assert frame_indices(2, 4).tolist() == [0, 0, 0, 0, 1]


def test_a_grid_has_rows_first():
    grid = grid_in_box((10, 20, 30, 60), 3)
    assert grid[0, 2].tolist() == [30, 20]
    assert grid[2, 0].tolist() == [10, 60]


def test_a_grid_in_a_mask_lies_on_the_object():
    v, u = np.mgrid[0:40, 0:50]
    ring = (np.hypot(u - 25, v - 20) < 15) & (np.hypot(u - 25, v - 20) > 9)
    points = grid_in_mask(ring, 4)
    columns, rows = np.floor(points[..., 0]).astype(int), np.floor(points[..., 1]).astype(int)
    assert ring[rows, columns].all()
    assert (points[:, 0, 0] < points[:, -1, 0]).all()
    assert (points[0, :, 1] < points[-1, :, 1]).all()
