import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from diffusion.data.prompts import DiffusionTask
from diffusion.methods import ddpo
from diffusion.methods.ddpo import DdpoRecipe, PromptHistory
from diffusion.sampling.trajectories import DiffusionPayload
from mmrl.core.rollouts import PLACE, Rollouts
from mmrl.training.recipe import Step
from tests.shares import in_shares


def numpy_advantages(rollouts, buffer_size, min_count):
    """The tracker's rule on all rollouts so far, without a deque: the last rewards of the prompt."""
    prompts, rewards = rollouts[-1]
    earlier = [pair for batch in rollouts for pair in zip(*batch, strict=True)]
    result = []
    for prompt, reward in zip(prompts, rewards, strict=True):
        own = [r for p, r in earlier if p == prompt][-buffer_size:]
        basis = np.array(own if len(own) >= min_count else rewards, dtype=np.float64)
        result.append((reward - basis.mean()) / (basis.std() + 1e-6))
    return np.array(result)


def test_advantages_are_those_of_the_rule_over_many_rollouts():
    rng = np.random.default_rng(0)
    history, rollouts = PromptHistory(buffer_size=5, min_count=4), []
    for _ in range(6):
        rollouts.append((rng.choice(["a", "b", "c"], 8).tolist(), rng.normal(size=8).tolist()))
        prompts, rewards = rollouts[-1]
        found = history.normalise(prompts, torch.tensor(rewards, dtype=torch.float64))
        assert found.dtype == torch.float64
        np.testing.assert_allclose(found.numpy(), numpy_advantages(rollouts, 5, 4), rtol=1e-9)


def test_a_short_buffer_compares_with_the_rollout_by_hand():
    history = PromptHistory(buffer_size=2, min_count=2)
    first = history.normalise(["a", "b"], torch.tensor([1.0, 3.0]))
    assert first.tolist() == pytest.approx([-1.0, 1.0], rel=1e-5)
    # "a" now has 1 and 5, mean 3 and deviation 2; "c" is new and sees the rollout's 5 and 9.
    second = history.normalise(["a", "c"], torch.tensor([5.0, 9.0]))
    assert second.tolist() == pytest.approx([1.0, 1.0], rel=1e-5)
    assert history.state_dict() == {"rewards": {"a": [1.0, 5.0], "b": [3.0], "c": [9.0]}}


def test_a_saved_history_continues_unchanged():
    whole = PromptHistory(4, 3)
    whole.normalise(list("aabbc"), torch.rand(5, generator=torch.Generator().manual_seed(0)))
    resumed = PromptHistory(4, 3)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    rewards = torch.rand(5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(whole.normalise(list("abcab"), rewards), resumed.normalise(list("abcab"), rewards))
    assert whole.state_dict() == resumed.state_dict()
    shorter = PromptHistory(2, 2)
    shorter.load_state_dict(whole.state_dict())
    assert all(shorter.state_dict()["rewards"][p] == kept[-2:] for p, kept in whole.state_dict()["rewards"].items())


def test_rewards_that_could_not_be_computed_count_nowhere():
    rewards = torch.tensor([1.0, float("nan"), 3.0, 2.0])
    found = PromptHistory(4, 4).normalise(["a", "a", "a", "b"], rewards)
    kept = torch.tensor([0, 2, 3])
    assert found[1] == 0
    torch.testing.assert_close(found[kept], PromptHistory(4, 4).normalise(["a", "a", "b"], rewards[kept]))
    numbers = PromptHistory(4, 4).normalise(["a", "a", "a", "b"], rewards.tolist())
    torch.testing.assert_close(numbers.float(), found)
    nothing = PromptHistory(4, 4).normalise(["a", "b"], torch.full((2,), float("nan")))
    assert nothing.tolist() == [0, 0]


def test_equal_rewards_give_no_advantage():
    history = PromptHistory(8, 2)
    assert history.normalise(["a"] * 3, torch.full((3,), 0.1)).abs().max() < 1e-6


def test_rewards_of_other_prompts_are_refused():
    with pytest.raises(ValueError, match=r"shape \(2,\); must be \(1,\)"):
        PromptHistory().normalise(["a"], torch.ones(2))


def drawn(prompts, rewards, places):
    """Two images of each of the prompts at these places of a step."""
    own = [number for place in places for number in (2 * place, 2 * place + 1)]
    rows, ones = len(own), torch.ones(len(own), 1)
    tasks = [DiffusionTask(f"row {place}", prompts[place]) for place in places]
    payload = DiffusionPayload(tasks, torch.zeros(rows, 1, 1, 1), np.zeros((rows, 1, 1, 3), np.uint8), ones)
    group = torch.arange(len(places)).repeat_interleave(2)
    extras = {PLACE: torch.tensor(places).repeat_interleave(2)}
    return Rollouts(group, ones, 0 * ones, torch.tensor([rewards[number] for number in own]), payload, extras=extras)


def test_the_latest_rewards_of_a_prompt_do_not_depend_on_the_number_of_processes(monkeypatch):
    """The prompt is drawn four times in the step, and its buffer holds the last two images."""
    prompts, rewards = ["cat"] * 4, [0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0]

    def estimated(places):
        history = PromptHistory(2, 2)
        recipe = SimpleNamespace(history=history, objective=SimpleNamespace(scaling=SimpleNamespace(clip=None)))
        found = DdpoRecipe.estimate(recipe, drawn(prompts, rewards, places), None, Step())
        return history.state_dict()["rewards"], found.advantage.view(-1, 2)

    kept, whole = estimated([0, 1, 2, 3])
    assert kept == {"cat": [13.0, 21.0]}
    # three processes: the first one has the places 0 and 3
    shares = in_shares(monkeypatch, ddpo, lambda rank: estimated(list(range(rank, 4, 3))), 3)
    for rank, (own, advantage) in enumerate(shares):
        assert own == kept
        assert torch.equal(advantage, whole[rank::3])
