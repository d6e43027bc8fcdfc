"""What objectives remember, and the order of tasks that follows from it, against the authors' code."""

from types import SimpleNamespace

import pytest
import torch

from mmrl.contrib.rows.tracked import phase_weight
from mmrl.core import Rollouts, get
from tests.golden.numbers import assert_agrees, inputs_of, load
from tests.golden.test_tokens import compare


def test_single_stream_prefers_uncertain_tasks_as_its_code_does():
    b, peer = inputs_of("single_stream"), load("single_stream").peers[0]
    objective = get("single_stream")
    state = objective.state()
    for reward in b.before:
        rollouts = Rollouts(b.group, b.mask, b.logp_old, reward, extras={"task": b.group})
        objective.compute_advantages(rollouts, state)
    assert_agrees(objective.order.weights(12, state), peer, "weights")


@pytest.mark.parametrize("peer", load("grpo").peers, ids=["verl", "trl", "far"])
def test_the_loss_of_sec_is_that_of_grpo(peer):
    compare("sec", peer, inputs_of("grpo", peer))


@pytest.mark.parametrize("forgets", [True, False])
def test_the_bandit_of_sec_is_its_code(forgets):
    b, (peer,) = inputs_of("sec"), load("sec").peers
    objective = get("sec")
    objective = objective.override({"order": {"forgets": True}}) if forgets else objective
    state = objective.state([SimpleNamespace(category=name) for name in b.categories])
    for step, (tasks, reward) in enumerate(zip(b.tasks, b.rewards, strict=True)):
        group = torch.arange(4).repeat_interleave(2)
        ones = torch.ones(8, 3, dtype=torch.float64)
        objective.compute_advantages(Rollouts(group, ones, -ones, reward, extras={"task": tasks[group]}), state)
        if step == 1:
            odd = float(state.blocks["order"].q[2])
    bandit = state.blocks["order"]
    assert bandit.names == peer["names"]
    if forgets:
        assert_agrees(bandit.q, peer, "q")
        assert_agrees(torch.softmax(bandit.q / objective.order.temperature, 0), peer, "chances")
    else:
        assert bandit.q[2] == odd == 2 * peer["q"][2] > 0


def test_the_weight_of_a_phase_is_that_of_the_code():
    peer = load("entropy_smoothing").peers[2]
    assert_agrees([phase_weight(step, 15) for step in range(17)], peer, "phase", relative=1e-12)
