"""Numbers of the observations before turns, and the advantages that compare turns by them."""

import time

import numpy as np
import pytest
import torch

from mmrl.agents.environments.environment import ActionConfig, Observation
from mmrl.agents.environments.environment_service import EnvironmentService
from mmrl.agents.rollout.episodes import AgentPayload, number_observation
from mmrl.agents.rollout.storage import restore_episode, store_episode
from mmrl.training.objectives import ObjectiveConfig
from mmrl.workers.wire import encode
from tests.agents.runs import by_length
from tests.agents.test_recipe import make_config, roll

PICTURE = np.zeros((2, 3, 3), np.uint8)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ((Observation("a", (PICTURE,)), {}), (Observation("a", (PICTURE.copy(),)), {"other": 1}), True),
        ((Observation("a", (PICTURE,)), {}), (Observation("b", (PICTURE,)), {}), False),
        ((Observation("a", (PICTURE,)), {}), (Observation("a", (PICTURE + 1,)), {}), False),
        ((Observation("a", (PICTURE,)), {}), (Observation("a", (PICTURE.reshape(3, 2, 3),)), {}), False),
        ((Observation("a", (PICTURE,)), {}), (Observation("a", (PICTURE, PICTURE)), {}), False),
        ((Observation("step 1"), {"anchor": "hall"}), (Observation("step 2"), {"anchor": "hall"}), True),
        ((Observation("a"), {"anchor": "hall"}), (Observation("a"), {"anchor": "attic"}), False),
    ],
)
def test_equal_observations_have_one_number(one, other, same):
    assert (number_observation(*one) == number_observation(*other)) == same


def test_turns_from_the_same_place_are_compared(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(ActionConfig, "parse", by_length)
    config = make_config(tmp_path, folder, objective=ObjectiveConfig(preset="gigpo", kl={"coef": 0.0}))
    _, scored, _, recipe = roll(config)
    episodes, mask = AgentPayload.of(scored).episodes, scored.mask > 0
    found = {}
    for row, episode in enumerate(episodes):
        acted = [by_length(None, answer).error is None for answer in episode.answers]
        for turn in range(episode.trajectory.turns):
            (anchor,) = set(scored.extras["anchor"][row, mask[row] & (scored.turn[row] == turn)].tolist())
            found.setdefault((episode.task.id, sum(acted[:turn])), set()).add(anchor)
    assert all(len(numbers) == 1 for numbers in found.values()), "an answer that did not act leaves the state"
    assert len(found) == len(set.union(*found.values())) == 6, "three places in each of two corridors"
    assert restore_episode(store_episode(episodes[0])).anchors == episodes[0].anchors
    advantage = recipe.objective.compute_advantages(scored).advantage
    assert torch.isfinite(advantage).all()
    assert (advantage[~mask] == 0).all()


def test_turns_weigh_as_much_as_their_time(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(ActionConfig, "parse", by_length)
    config = make_config(tmp_path, folder, objective=ObjectiveConfig(weight={"kind": "duration"}))
    _, scored, _, recipe = roll(config)
    mask = scored.mask > 0
    for row, episode in enumerate(AgentPayload.of(scored).episodes):
        assert min(episode.seconds) > 0
        assert restore_episode(store_episode(episode)).seconds == episode.seconds
        for turn, seconds in enumerate(episode.seconds):
            own = scored.extras["duration"][row, mask[row] & (scored.turn[row] == turn)]
            assert own.tolist() == pytest.approx([seconds] * len(own))
    weight = recipe.objective.compute_advantages(scored).extras["weight"]
    assert float(weight[mask].mean()) == pytest.approx(1, rel=1e-5)


def test_an_environment_says_how_long_it_worked():
    class Slow:
        def step(self, action):
            time.sleep(0.03)
            return Observation("done"), 1.0, True, False, {}

    body, arrays = encode({"name": "a", "arguments": {}, "text": ""})
    fields, _ = EnvironmentService(Slow()).answer({"kind": "step", "body": body}, arrays)
    assert 0.03 <= fields["seconds"] < 5
