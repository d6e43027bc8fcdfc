"""The bridge to Stable-Baselines3 step by step against `DummyVecEnv`, or a stand-in of its documented contract."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'")
from gymnasium.vector import SyncVectorEnv

from mmrl.errors import UserError
from mmrl.workers import PoolVectorEnv, VectorSettings
from tests.workers.test_vector import same
from tests.workers.vec_envs_of_sb3 import DummyVecEnv, GymnasiumVecEnv, VecEnv
from tests.workers.vector_envs import Walk

WALK, ROWS = f"{Path(__file__).with_name('vector_envs.py')}:walk", 8


def pooled(mode="SameStep", **kwargs):
    return PoolVectorEnv(WALK, ROWS, kwargs=kwargs, autoreset_mode=mode, settings=VectorSettings(workers=2))


def plain(value):
    """Single numbers of NumPy as Python's, and plain dictionaries; a vector environment does not keep their types."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return value.item() if isinstance(value, np.generic) else value


@pytest.mark.parametrize("nested", [False, True])
def test_steps_are_those_of_dummy_vec_env_also_when_solved_in_the_last_step_allowed(nested):
    options = {"limit": 3, "nested": nested}
    ours, theirs = GymnasiumVecEnv(pooled(**options)), DummyVecEnv([partial(Walk, **options)] * ROWS)
    assert isinstance(ours, VecEnv)
    both = cut = 0
    try:
        for env in (ours, theirs):
            env.seed(3)
            env.set_options({"shift": 0.5})
        same(ours.reset(), plain(theirs.reset()))
        assert ours.reset_infos == theirs.reset_infos
        for step in range(12):
            moves = np.random.default_rng(step).uniform(0, 1, (ROWS, 2)).astype(np.float32)
            seen, rewards, dones, infos = ours.step(moves)
            wanted = theirs.step(moves)
            same(seen, plain(wanted[0]))
            assert rewards.dtype == wanted[1].dtype == np.float32
            np.testing.assert_array_equal(rewards, wanted[1])
            np.testing.assert_array_equal(dones, wanted[2])
            assert ours.reset_infos == theirs.reset_infos
            for mine, other in zip(map(plain, infos), map(plain, wanted[3]), strict=True):
                same(mine, other)
                high = mine.get("terminal_observation") is not None and mine["steps"] == 3
                both += high and not mine["TimeLimit.truncated"]
                cut += mine["TimeLimit.truncated"]
        assert both, "no episode was solved in the last step that is allowed"
        assert cut, "no episode was cut"
    finally:
        ours.close()
        theirs.close()


def test_attributes_and_methods_reach_the_environments_that_are_named(closing):
    env = closing(GymnasiumVecEnv(pooled()))
    env.reset()
    env.set_attr("limit", 9, indices=[0, 2])
    assert env.get_attr("limit") == [9, 5, 9, 5, 5, 5, 5, 5]
    env.set_attr("size", [1, 2])  # one value, although it is a list
    assert env.get_attr("size", indices=1) == [[1, 2]]
    assert env.env_method("add", 2) == [2] * ROWS
    with pytest.raises(
        UserError, match=r"env_method\('add'\) with indices \[0\]: the method can only be called on all"
    ):
        env.env_method("add", 2, indices=[0])
    env._options = [{"shift": row} for row in range(ROWS)]
    with pytest.raises(UserError, match="the environments have different options"):
        env.reset()


def test_another_autoreset_mode_is_refused():
    envs = SyncVectorEnv([Walk])
    with pytest.raises(UserError, match=r"the autoreset mode is .*NEXT_STEP.*; .* requires autoreset_mode='SameStep'"):
        GymnasiumVecEnv(envs)
