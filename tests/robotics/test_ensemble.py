import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.episodes.collect import TemporalEnsemble


def test_ensemble_by_hand():
    ensemble = TemporalEnsemble(rows=1, chunk=3, action_size=1, decay=0.5)
    w = np.exp(-0.5 * np.arange(3))
    assert ensemble.step([[[10], [11], [12]]], [0]).item() == 10
    # of the older chunk the second action, with weight 1; of the new one the first, with exp(-0.5)
    assert ensemble.step([[[20], [21], [22]]], [0]).item() == pytest.approx((w[0] * 11 + w[1] * 20) / w[:2].sum())
    third = (w[0] * 12 + w[1] * 21 + w[2] * 30) / w.sum()
    assert ensemble.step([[[30], [31], [32]]], [0]).item() == pytest.approx(third)
    # the first chunk has run out
    fourth = (w[0] * 22 + w[1] * 31 + w[2] * 40) / w.sum()
    assert ensemble.step([[[40], [41], [42]]], [0]).item() == pytest.approx(fourth)


def act_algorithm(chunks, decay):
    """Algorithm 2 of the paper as in its code: a table of all predictions for all times."""
    steps, size, entries = chunks.shape
    table = np.full((steps, steps + size, entries), np.nan)
    done = []
    for t in range(steps):
        table[t, t : t + size] = chunks[t]
        said = table[:, t][~np.isnan(table[:, t]).any(1)]
        weight = np.exp(-decay * np.arange(len(said)))
        done.append((said * (weight / weight.sum())[:, None]).sum(0))
    return np.array(done)


@pytest.mark.parametrize("decay", [0.0, 0.01, -0.3])
@pytest.mark.parametrize("size", [1, 4])
def test_ensemble_is_the_papers_table(decay, size):
    chunks = np.random.default_rng(0).normal(size=(10, size, 3)).astype(np.float32)
    ensemble = TemporalEnsemble(rows=2, chunk=size, action_size=3, decay=decay)
    found = np.concatenate([ensemble.step(chunk[None], [1]) for chunk in chunks])
    np.testing.assert_allclose(found, act_algorithm(chunks, decay), rtol=1e-5, atol=1e-6)


def test_rows_of_an_ensemble_are_apart_and_reset_alone():
    chunks = np.random.default_rng(0).normal(size=(6, 3, 2, 1)).astype(np.float32)
    ensemble = TemporalEnsemble(rows=3, chunk=2, action_size=1)
    ensemble.step(chunks[0], [0, 1, 2])
    ensemble.step(chunks[1, :1], [1])
    ensemble.reset([0])
    fresh = ensemble.step(chunks[2], [0, 1, 2])
    assert fresh[0] == chunks[2, 0, 0]
    weight = np.exp(-0.01)
    row1 = (chunks[1, 0, 1] + weight * chunks[2, 1, 0]) / (1 + weight)
    row2 = (chunks[0, 2, 1] + weight * chunks[2, 2, 0]) / (1 + weight)
    np.testing.assert_allclose(fresh[1:], np.stack([row1, row2]), rtol=1e-6)


def test_equal_predictions_stay_unchanged():
    ensemble = TemporalEnsemble(rows=1, chunk=5, action_size=2)
    for _ in range(8):
        np.testing.assert_allclose(ensemble.step(np.full((1, 5, 2), 0.3), [0]), 0.3, rtol=1e-6)


def test_wrong_sizes_are_refused():
    with pytest.raises(UserError, match="at least 1"):
        TemporalEnsemble(rows=0, chunk=2, action_size=1)
    with pytest.raises(ValueError, match=r"expected \(1, 2, 1\)"):
        TemporalEnsemble(rows=1, chunk=2, action_size=1).step(np.zeros((1, 3, 1)), [0])
