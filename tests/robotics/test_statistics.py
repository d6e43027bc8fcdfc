import dataclasses
import json

import numpy as np
import pytest
import torch

from mmrl.errors import UserError
from robotics.methods.latents import StateLatent, StateSettings
from robotics.policies.base.action_statistics import ActionStatistics, StateStatistics, libero_gripper
from robotics.policies.base.encoder import StateScale

ACTIONS = np.random.default_rng(0).normal([0.0, 5.0, 0.0], [1.0, 0.1, 1.0], (1000, 3))
ACTIONS[:, 2] = (ACTIONS[:, 2] > 0).astype(float)
LEROBOT = {
    "action": {
        "min": [-3.0, 0.0],
        "max": [3.0, 1.0],
        "mean": [0.0, 0.5],
        "std": [1.0, 0.5],
        "q01": [-2.0, 0.0],
        "q99": [2.0, 1.0],
    },
    "observation.state": {"mean": [1.0, 2.0], "std": [2.0, 0.0]},
}


def by_hand(**changes) -> ActionStatistics:
    low, high = np.array([-2.0, 0.0]), np.array([2.0, 1.0])
    return ActionStatistics(
        **{"q01": low, "q99": high, "minimum": low, "maximum": high, "mean": low, "std": high} | changes,
        mask=np.array([True, False]),
    )


def test_quantiles_become_plus_and_minus_one():
    statistics = by_hand()
    actions = np.array([[-2.0, 0.0], [0.0, 1.0], [1.0, 0.3], [2.0, 7.0], [9.0, -7.0]])
    expected = [[-1.0, 0.0], [0.0, 1.0], [0.5, 0.3], [1.0, 7.0], [1.0, -7.0]]
    np.testing.assert_allclose(statistics.normalise(actions), expected, atol=1e-8)


def test_unnormalise_is_openvlas_formula():
    statistics = ActionStatistics.from_arrays(ACTIONS, mask=[True, True, False])
    x = np.random.default_rng(1).uniform(-1, 1, (4, 5, 3))
    q01, q99 = np.quantile(ACTIONS, 0.01, axis=0), np.quantile(ACTIONS, 0.99, axis=0)
    expected = np.where([True, True, False], 0.5 * (x + 1) * (q99 - q01 + 1e-8) + q01, x)
    np.testing.assert_allclose(statistics.unnormalise(x), expected, rtol=1e-12)


def test_the_two_are_inverse_within_the_quantiles_and_clip_outside():
    statistics = ActionStatistics.from_arrays(ACTIONS, mask=[True, True, False])
    back = statistics.unnormalise(statistics.normalise(ACTIONS))
    inside = ACTIONS.clip(statistics.q01, statistics.q99)
    np.testing.assert_allclose(back[:, :2], inside[:, :2], atol=1e-6)
    np.testing.assert_array_equal(back[:, 2], ACTIONS[:, 2])


def test_a_constant_entry_is_scaled_to_zero_and_restored():
    statistics = ActionStatistics.from_arrays(np.stack([np.full(10, 3.0), np.arange(10.0)], 1))
    scaled = statistics.normalise(np.array([[3.0, 4.5], [3.1, 4.5]]))
    np.testing.assert_array_equal(scaled[:, 0], 0)
    np.testing.assert_allclose(statistics.unnormalise(scaled)[:, 0], 3.0, atol=1e-7)


@pytest.mark.parametrize("method", ["normalise", "unnormalise"])
def test_tensors_and_arrays_agree_and_keep_their_dtype(method):
    statistics = ActionStatistics.from_arrays(ACTIONS, mask=[True, True, False])
    given = ACTIONS[:50].astype(np.float32)
    array = getattr(statistics, method)(given)
    tensor = getattr(statistics, method)(torch.from_numpy(given))
    assert array.dtype == np.float32
    assert tensor.dtype == torch.float32
    np.testing.assert_allclose(array, tensor.numpy(), atol=1e-6)


def test_lerobot_statistics():
    statistics = ActionStatistics.from_lerobot(LEROBOT, mask=[True, False])
    np.testing.assert_array_equal(statistics.minimum, [-3, 0])
    np.testing.assert_array_equal(statistics.q99, [2, 1])
    np.testing.assert_allclose(statistics.normalise(np.array([1.0, 0.25])), [0.5, 0.25], atol=1e-8)


def test_what_lerobot_statistics_lack_is_named():
    with pytest.raises(UserError, match=r"no feature 'actions'.*action, observation.state"):
        ActionStatistics.from_lerobot(LEROBOT, key="actions")
    old = {"action": {name: value for name, value in LEROBOT["action"].items() if not name.startswith("q")}}
    with pytest.raises(UserError, match=r"q01, q99.*from_arrays"):
        ActionStatistics.from_lerobot(old)


def test_saved_numbers_are_restored_bit_for_bit(tmp_path):
    statistics = ActionStatistics.from_arrays(ACTIONS, mask=[True, True, False])
    statistics.save(tmp_path / "s.json")
    loaded = ActionStatistics.load(tmp_path / "s.json")
    for name, value in vars(statistics).items():
        np.testing.assert_array_equal(getattr(loaded, name), value)
        assert getattr(loaded, name).dtype == value.dtype


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), (json.dumps({"q01": [1]}), "expected")])
def test_damaged_files_are_named(tmp_path, text, message):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(UserError, match=message):
        ActionStatistics.load(tmp_path / "s.json")
    with pytest.raises(UserError, match=r"statistics file .* not found"):
        ActionStatistics.load(tmp_path / "other.json")


@pytest.mark.parametrize("bad", [np.zeros((0, 2)), np.zeros(3), np.array([[1.0, np.nan]])])
def test_statistics_of_nothing_or_nan_are_refused(bad):
    with pytest.raises(UserError):
        ActionStatistics.from_arrays(bad)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="the same shape"):
        by_hand(q01=np.zeros(3))
    with pytest.raises(ValueError, match="2 entries"):
        by_hand().normalise(np.zeros((4, 1)))


def test_liberos_gripper_is_flipped_and_made_binary():
    actions = np.array([[0.3, 1.0], [0.3, 0.0], [0.3, 0.7], [0.3, 0.2]])
    expected = [[0.3, -1.0], [0.3, 1.0], [0.3, -1.0], [0.3, 1.0]]
    np.testing.assert_array_equal(libero_gripper(actions), expected)
    np.testing.assert_array_equal(libero_gripper(torch.from_numpy(actions)).numpy(), expected)


COLUMNS = {
    "constant": [0.3, 0.3, 0.3, 0.3],
    "quantiles equal": [0.3] * 400 + [0.9],
    "locked at 0": [0.0, 0.0],
    "almost constant": [0.3, 0.3 + 1e-12],
    "two values": [0.0, 1.0, 1.0, 0.0],
}


@pytest.mark.parametrize("bounds", ["q99", "min_max"])
@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.float32])
def test_a_column_that_hardly_differs_has_a_defined_result_in_both_directions(name, bounds, kind):
    """As actions of demonstrations, and as OpenVLA's folders have their actions and states, by quantiles or ends."""
    column = np.array(COLUMNS[name])[:, None]
    found = ActionStatistics.from_arrays(column)
    if bounds == "min_max":
        found = dataclasses.replace(found, q01=found.minimum, q99=found.maximum)
    values = torch.tensor(column, dtype=kind) if isinstance(kind, torch.dtype) else column.astype(kind)
    scaled = found.normalise(values)
    back = found.unnormalise(scaled)
    assert np.isfinite(np.asarray(scaled)).all()
    assert np.abs(np.asarray(scaled)).max() <= 1
    usual = np.abs(column - np.median(column)) < 1e-6 if name == "quantiles equal" and bounds == "q99" else column < 9
    np.testing.assert_allclose(np.asarray(back)[usual], column[usual], atol=1e-6)
    if name in ("constant", "locked at 0"):
        assert not np.asarray(scaled).any()


def test_states_that_never_change_are_only_shifted_and_stay_bounded():
    scale = StateScale(2)
    scale.set(StateStatistics.from_arrays([[0.3, 0.0], [0.3, 1.0]]))
    found = scale(torch.tensor([[0.3, 0.0], [0.4, 1.0], [1e6, 0.5]]))
    torch.testing.assert_close(found[:, 0], torch.tensor([0.0, 0.1, 10.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(found[:, 1], torch.tensor([-1.0, 1.0, 0.0]))
    latent = StateLatent(StateSettings(mean=[0.3, 0.5], std=[0.0, 0.5]))
    assert np.isfinite(latent._prepare(None, np.array([[0.3, 0.0], [0.4, 1.0]], np.float32))).all()


def test_entries_that_hardly_move_are_named_and_divided_by_a_minimum():
    states = np.random.default_rng(0).normal(size=(500, 4)) * [1.0, 0.5, 0.001, 0.0]
    found = StateStatistics.from_arrays(states)
    assert found.quiet() == [2]
    np.testing.assert_allclose(found.at_least(0.05).std, [*found.std[:2], 0.05, 0.0])
    assert found.at_least(0.0).std.tolist() == found.std.tolist()
    assert StateStatistics.from_arrays(np.ones((3, 2))).quiet() == []
