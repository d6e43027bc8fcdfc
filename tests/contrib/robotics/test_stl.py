"""Signal temporal logic: formulas, robustness against rtamt, plans, and episodes that are rewarded by a formula."""

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.contrib.stl import ground, parse, subgoals
from robotics.contrib.stl_sim import StlSim, open_stl
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig, open_sim
from tests.golden.numbers import load
from tests.robotics.line_sim import LineSim

FILE = load("stl")
(PEER,) = FILE.peers
X = "abc"


@pytest.mark.parametrize("number", range(len(FILE.inputs["formulas"])))
def test_robustness_is_that_of_rtamt(number):
    signals = {name: np.array(FILE.inputs[name]) for name in "xyz"}
    found = parse(FILE.inputs["formulas"][number], list("xyz")).robustness(signals)
    known = FILE.inputs["known"][number]
    np.testing.assert_allclose(found[:known], PEER["robustness"][number], atol=1e-12)


def test_robustness_by_hand():
    x, y = [0.0, 2.0, 1.0, 3.0], [5.0, 4.0, -1.0, 2.0]

    def rho(text, **defined):
        return parse(text, ["x", "y"], defined).robustness({"x": x, "y": y})[0]

    assert rho("x > 1") == -1.0
    assert rho("always(y > -2)") == 1.0
    assert rho("eventually[2:3](x > 1 and y > 1)") == 1.0, "min(3 - 1, 2 - 1) at step 3"
    assert rho("until[1:3](y > 0, x > 2)") == 0.0, "x is 2 at step 1, and y falls to -1 before x is 3"
    assert rho("until[1:3](y > 0, x > 1)") == 1.0
    assert rho("implies(x > 1, y > 9)") == 1.0, "max(1 - 0, 5 - 9)"
    assert rho("0 < norm(x, y) < 6") == 1.0
    assert rho("always[0:9](gap < 6)", gap="abs(x - y)") == 1.0, "the last values are held"
    assert rho("not eventually[0:2](x > 3)") == 1.0
    assert rho("min(x, y) + 2 * max(x, y, 1) - -1 > 11 / 1") == 0.0


FORMULAS = (
    "eventually[1:4](a > 0)",
    "always[2:5](a > 0)",
    "until[0:4](a > 0, b > 0)",
    "eventually[0:3](a > 0 and eventually[1:3](b > 0)) and always(c > -1)",
    "always[0:4](eventually[0:2](a > 0))",
    "eventually[0:2](always[0:2](a > 0 or b > 0)) or eventually[0:5](c > 0.8)",
    "until[1:4](eventually[0:1](a > 0), b > 0)",
    "implies(a > 0, eventually[0:3](b > 0))",
)


@pytest.mark.parametrize("text", FORMULAS)
def test_the_best_plan_of_a_trace_has_its_robustness_and_no_plan_exceeds_it(text):
    formula = parse(text, list(X))
    goals, rng = subgoals(formula), np.random.default_rng(0)
    plans = {ground(formula, goals, 8, rng) for _ in range(4000)}
    for _ in range(5):
        signals = dict(zip(X, rng.uniform(-1, 1, (3, 9)), strict=True))
        margins = np.stack([goal.robustness(signals) for goal in goals], 1)
        whole = formula.robustness(signals)[0]
        best = max(plan.robustness(margins) for plan in plans)
        assert best == pytest.approx(whole)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x >", "formula 'x >' cannot be read"),
        ("x", "formula: 'x' is not a formula; use a comparison"),
        ("x == 1", "'x' uses == or a similar comparison"),
        ("speed > 1", "unknown signal speed; available: near, x, y"),
        ("near > 1", "the signal near is defined in terms of itself: near -> near"),
        ("sometimes[0:2](x > 1)", r"is not one of implies\(p, q\), always"),
        ("always[3:1](x > 1)", "'always\\[3:1\\]' is not a valid window"),
        ("always[0:1.5](x > 1)", "is not a valid window; its bounds must be whole control steps"),
        ("always[2](x > 1)", "is not an operator; write it with a window"),
        ("until[0:2](x > 1)", "is not one of"),
        ("x.real > 1", "'x.real' is not a number"),
        ("__import__('os') > 1", "is not a number"),
        ("not until(x > 1, y > 1)", "`not` around an `until` cannot be planned"),
    ],
)
def test_what_is_no_formula_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse(text, ["x", "y"], {"near": "near + 1"})


NEAR = {"gap": "abs(state_0 - state_1)"}


def specs(*layouts):
    return [EpisodeSpec("right", "go right", layout) for layout in layouts]


def walk(sim, action=1.0, chunk=1):
    results = []
    while len(sim.live):
        results.append(sim.step_chunk(np.full((len(sim.live), chunk, 1), action)))
    return results


@pytest.mark.parametrize("chunk", [1, 3, 12])
@pytest.mark.parametrize("action", [1.0, 0.1])
def test_robustness_agrees_with_the_success_of_the_task(chunk, action):
    sim, plain = StlSim(LineSim(), "eventually(gap < 0.1)", NEAR), LineSim()
    sim.reset(specs(1, 2, 3))
    plain.reset(specs(1, 2, 3))
    earned, solved, own = np.zeros(3), np.zeros(3, bool), np.zeros(3, bool)
    for found, wanted in zip(walk(sim, action, chunk), walk(plain, action, chunk), strict=True):
        np.testing.assert_array_equal(found.rows, wanted.rows)
        np.testing.assert_array_equal(found.steps, wanted.steps)
        np.testing.assert_array_equal(found.observation.state, wanted.observation.state)
        np.testing.assert_array_equal(found.truncated, wanted.truncated)
        earned[found.rows] += found.rewards.sum(1)
        solved[found.rows] |= found.success
        own[wanted.rows] |= wanted.success
    np.testing.assert_array_equal(solved, own)
    np.testing.assert_array_equal(earned > 0, own)
    assert [sim.robustness(row) for row in range(3)] == pytest.approx(earned)


def test_rows_that_fail_have_no_reward_and_frames_are_those_of_every_step():
    sim = StlSim(LineSim(breaks=[2]), "always(state_0 < 9)")
    sim.reset(specs(1, 2))
    first = sim.step_chunk(np.zeros((2, 3, 1)), record=[0])
    assert first.frames[0].shape == (3, 32, 32, 3)
    second = sim.step_chunk(np.zeros((2, 3, 1)))
    assert second.failed.tolist() == [False, True]
    assert np.isnan(second.rewards[1]).all()
    assert second.steps.tolist() == [3, 0]
    assert sim.describe() == {"simulator": "line", "horizon": 12, "formula": "always(state_0 < 9)"}
    assert sim.tasks() == LineSim().tasks()


def test_a_formula_fits_the_episodes():
    with pytest.raises(UserError, match="looks 13 control steps ahead, but an episode has 12"):
        StlSim(LineSim(), "eventually[0:13](state_0 > 1)")
    with pytest.raises(UserError, match=r"sim\.options\.formula is missing"):
        open_stl(SimConfig(kind="robotics.contrib.stl_sim:open_stl"))
    options = {"kind": "tests.robotics.line_sim:open_line", "formula": "eventually(gap < 0.1)", "signals": NEAR}
    sim = open_stl(SimConfig(kind="robotics.contrib.stl_sim:open_stl", options=options))
    assert isinstance(sim, StlSim)
    sim.close()


def test_the_reward_agrees_with_the_success_of_a_task_in_mujoco():
    touch = {"gap": "norm(grip_x - first_x, grip_y - first_y, grip_z - first_z)"}
    config = SimConfig(kind="tabletop", tasks=["reach"], state="full", image_size=0, horizon=25, workers=1)
    plain, sim = open_sim(config), StlSim(open_sim(config), "eventually(gap < 0.035)", touch)
    episodes = [EpisodeSpec("reach", "", layout) for layout in range(6)]
    for each in (plain, sim):
        each.reset(episodes)
    earned, solved = np.zeros(6), np.zeros((2, 6), bool)
    while len(sim.live):
        at = np.array([sim._traces[row][-1] for row in sim.live.tolist()])
        # half of the rows go to the cube
        ways = np.clip(40 * (at[:, 10:13] - at[:, :3]), -1, 1) * (sim.live % 2 == 0)[:, None]
        actions = np.concatenate([ways, np.zeros((len(ways), 2))], 1)[:, None]
        for number, each in enumerate((plain, sim)):
            result = each.step_chunk(actions)
            solved[number, result.rows] |= result.success
        earned[result.rows] += result.rewards.sum(1)
    plain.close()
    sim.close()
    assert solved[0].tolist() == [True, False] * 3
    np.testing.assert_array_equal(solved[1], solved[0])
    np.testing.assert_array_equal(earned > 0, solved[0])
