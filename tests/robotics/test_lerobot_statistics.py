import numpy as np
import pytest

from robotics.data import aggregate_statistics, image_statistics, vector_statistics

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


@pytest.mark.parametrize("kind", [np.float32, np.int64, np.bool_])
def test_vector_statistics_against_numpy(kind):
    values = (np.random.default_rng(0).normal(size=(37, 3)) * 4).astype(kind)
    found = vector_statistics(values)
    np.testing.assert_array_equal(found["min"], values.min(0))
    np.testing.assert_array_equal(found["max"], values.max(0))
    np.testing.assert_allclose(found["mean"], values.astype(float).mean(0))
    np.testing.assert_allclose(found["std"], values.astype(float).std(0))
    assert found["count"].tolist() == [37]
    for name, quantile in QUANTILES.items():
        np.testing.assert_allclose(found[name], np.quantile(values.astype(float), quantile, axis=0))
    assert vector_statistics(values[:, 0])["mean"].shape == (1,)


@pytest.mark.parametrize(("length", "size", "step"), [(9, (7, 11), 1), (250, (4, 6), 1), (3, (20, 330), 2)])
def test_image_statistics_against_numpy(length, size, step):
    frames = np.random.default_rng(1).integers(0, 256, (length, *size, 3), dtype=np.uint8)
    frames[..., 2] //= 3
    # As lerobot samples: all frames up to 100; wide images subsampled to about 150 pixels.
    count = min(length, 100)
    chosen = frames[np.round(np.linspace(0, length - 1, count)).astype(int), ::step, ::step]
    pixels = chosen.reshape(-1, 3) / 255
    found = image_statistics(frames)
    assert found["count"].tolist() == [count]
    expected = {"min": pixels.min(0), "max": pixels.max(0), "mean": pixels.mean(0), "std": pixels.std(0)}
    expected |= {name: np.quantile(pixels, quantile, axis=0) for name, quantile in QUANTILES.items()}
    for name, values in expected.items():
        assert found[name].shape == (3, 1, 1)
        np.testing.assert_allclose(found[name].ravel(), values, atol=1e-12)


def test_aggregated_statistics_are_those_of_all_frames_but_for_quantiles():
    rng = np.random.default_rng(2)
    parts = [rng.normal(shift, scale, (length, 2)) for shift, scale, length in ((0, 1, 5), (3, 2, 11), (-1, 0.1, 1))]
    found, whole = aggregate_statistics([vector_statistics(part) for part in parts]), np.concatenate(parts)
    for name, expected in (
        ("min", whole.min(0)),
        ("max", whole.max(0)),
        ("mean", whole.mean(0)),
        ("std", whole.std(0)),
    ):
        np.testing.assert_allclose(found[name], expected)
    assert found["count"].tolist() == [17]
    weighted = sum(len(part) * np.quantile(part, 0.01, axis=0) for part in parts) / 17
    np.testing.assert_allclose(found["q01"], weighted)
    assert (np.abs(found["q01"] - np.quantile(whole, 0.01, axis=0)) > 0.1).any()
