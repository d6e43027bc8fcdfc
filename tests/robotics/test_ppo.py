"""PPO with a critic of the full state: rewards by chunk, values, saving and learning on a point on a line."""

import math

import pytest
import torch

from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.training.optimizer import FACTOR, make_optimizer
from mmrl.training.processes import Streams
from mmrl.training.recipe import Reference, Step
from mmrl.training.run import train
from mmrl.training.update import count_denominators, update_constants
from robotics.episodes.payload import EpisodePayload
from robotics.methods.ppo import (
    ChunkRewardConfig,
    ChunkWeights,
    CriticConfig,
    PolicyWithCritic,
    RobotPpoConfig,
    RobotPpoRecipe,
    StateCritic,
    chunk_rewards,
    critic_inputs,
    shuffled_successes,
)
from robotics.policies.base.action_policy import ActionPolicy, open_policy
from robotics.policies.base.action_statistics import ActionRange
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig
from tests.robotics.policies.builders import make_small
from tests.robotics.test_robot_recipes import grpo, trainer


def ppo(tmp_path, **changes):
    settings = {"trainer": trainer(tasks_per_step=12, samples_per_task=1, epochs=2, minibatches_per_step=2)}
    return grpo(tmp_path, RobotPpoConfig, "robot_ppo", **(settings | changes))


def prepared(recipe, tasks=6):
    with torch.no_grad():
        rollouts = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:tasks], Streams(0), Step()), Step())
    rollouts = update_constants(recipe, recipe.policy, Reference("none", recipe.policy), rollouts, Step())
    return recipe.objective.compute_advantages(rollouts)


def episodes():
    """A success in its second chunk, a failure of three, and a broken one."""
    steps = torch.tensor([[2, 1, 0], [2, 2, 2], [0, 0, 0]])
    zeros = torch.zeros(3, 3)
    nan = float("nan")
    return EpisodePayload(
        episodes=[EpisodeSpec("right", "go right", layout) for layout in range(3)],
        states=torch.arange(18.0).reshape(3, 3, 2),
        decisions=zeros,
        steps=steps,
        success=torch.tensor([True, False, False]),
        terminated=torch.tensor([True, False, False]),
        failed=torch.tensor([False, False, True]),
        last_reward=torch.tensor([1.0, 0.4, nan]),
        last_state=torch.zeros(3, 2),
        chunk_returns=torch.tensor([[0.4, 1.0, 0.0], [0.3, 0.8, 0.9], [nan, nan, nan]]),
        chunk_last_rewards=torch.tensor([[0.3, 1.0, 0.0], [0.2, 0.5, 0.4], [nan, nan, nan]]),
    )


def test_chunks_are_paid_for_success_for_the_potential_and_for_all_rewards():
    found = chunk_rewards(episodes(), ChunkWeights(2.0, 0.0, 1.0))
    torch.testing.assert_close(found, torch.tensor([[0.3, 2.7, 0.0], [0.2, 0.3, -0.1], [0.0, 0.0, 0.0]]))
    found = chunk_rewards(episodes(), ChunkWeights(1.0, 0.0, 0.0))
    torch.testing.assert_close(found, torch.tensor([[0.0, 1.0, 0.0], [0.0] * 3, [0.0] * 3]))
    found = chunk_rewards(episodes(), ChunkWeights(0.0, 2.0, 0.0))
    torch.testing.assert_close(found, torch.tensor([[0.8, 2.0, 0.0], [0.6, 1.6, 1.8], [0.0] * 3]))


def test_shuffled_successes_stay_within_a_task_and_spare_broken_episodes():
    state = torch.arange(4).repeat_interleave(50)  # states 0 and 2 are of one task, 1 and 3 of the other
    success, failed = state <= 1, torch.arange(200) % 10 == 0
    tasks = [("left", "right")[index % 2] for index in state.tolist()]
    found = shuffled_successes(success, failed, tasks, torch.Generator().manual_seed(0))
    assert torch.equal(found[failed], success[failed])
    for task in (0, 1):
        rows = (state % 2 == task) & ~failed
        assert found[rows].sum() == success[rows].sum() == 45
        assert 11 < found[rows & (state == task)].sum() < 34  # 22.5 expected, standard deviation 2.4


def test_a_control_with_true_progress_is_refused(tmp_path):
    for name in ("environment", "potential"):
        config = ppo(tmp_path, reward=ChunkRewardConfig(**{name: 0.5}))
        config.shuffle_success = True
        with pytest.raises(ValueError, match=rf"shuffle_success .* reward\.{name} is 0\.5"):
            config.validate()


@pytest.mark.parametrize(
    ("given", "kind", "weights"),
    [
        ({}, "tabletop", (1, 0, 0)),
        ({}, "gymnasium", (0, 1, 0)),
        ({"success": 2.0}, "gymnasium", (2, 0, 0)),
        ({"success": 0.0, "potential": 1.0}, "gymnasium", (0, 0, 1)),
    ],
)
def test_weights_left_out_are_those_of_the_simulator_or_zero(given, kind, weights):
    assert ChunkRewardConfig(**given).weights(kind) == weights


def test_the_control_pays_as_many_successes_and_counts_the_real_ones(tmp_path):
    paid, counted = {}, {}
    for shuffle in (False, True):
        recipe = RobotPpoRecipe(ppo(tmp_path / str(shuffle), shuffle_success=shuffle))
        rollouts = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:12], Streams(0), Step()), Step())
        paid[shuffle] = rollouts.extras["decision_reward"].sum(1) > 0
        counted[shuffle] = EpisodePayload.of(rollouts).success
    assert torch.equal(counted[False], counted[True])
    assert 0 < paid[False].sum() == paid[True].sum() < 12
    assert not torch.equal(paid[False], paid[True])


def test_the_control_does_not_favour_episodes_that_end_early(tmp_path):
    recipe = RobotPpoRecipe(ppo(tmp_path, shuffle_success=True))
    gamma, last = recipe.objective.advantage.gamma, math.ceil(recipe.sim.horizon / recipe.policy.chunk) - 1
    lengths = set()
    for seed in range(8):
        rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:12], Streams(seed), Step())
        rollouts = recipe.score(rollouts, Step(seed))
        steps = EpisodePayload.of(rollouts).steps
        rewards = rollouts.extras["decision_reward"].reshape(*steps.shape, -1).sum(-1)
        returns = (rewards * gamma ** torch.arange(steps.shape[1])).sum(1)
        won = returns > 0
        lengths |= set((steps > 0).sum(1)[won].tolist())
        torch.testing.assert_close(returns[won], torch.full((int(won.sum()),), gamma**last))
    assert len(lengths) > 1


def test_critic_reads_states_time_and_task():
    found = critic_inputs(episodes(), torch.tensor([0, 1, 2]), ["left", "right"], horizon=8)
    assert found.shape == (3, 3, 5)
    torch.testing.assert_close(found[1, 2], torch.tensor([10.0, 11.0, 0.5, 0.0, 1.0]))


@pytest.mark.parametrize("source", ["sampler", "recompute"])
def test_values_of_both_sources_of_old_log_probs_are_those_of_the_update(tmp_path, source):
    config = ppo(tmp_path)
    config.trainer.old_logp = source
    recipe = RobotPpoRecipe(config)
    rollouts = prepared(recipe)
    scores = recipe.scores(recipe.policy, rollouts, frozenset({"logp", "values"}))
    kept = rollouts.mask > 0
    torch.testing.assert_close(scores.values[kept].detach(), rollouts.values[kept], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scores.logp[kept].detach(), rollouts.logp_old[kept], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "chunk"])
def test_all_decisions_of_a_chunk_share_the_advantage_of_gae(tmp_path, level):
    recipe = RobotPpoRecipe(ppo(tmp_path, logp_level=level))
    recipe.objective = recipe.objective.override({"scaling": {"whiten": "none"}})
    rollouts = prepared(recipe)
    gamma, lam = 0.99, 0.95
    each = recipe.policy.decisions if level == "token" else 1
    for row in range(rollouts.num_rows):
        trained = rollouts.mask[row].reshape(-1, each)
        values = rollouts.values[row].reshape(-1, each)[:, 0].tolist()
        rewards = (rollouts.extras["decision_reward"][row] * rollouts.mask[row]).reshape(-1, each).sum(1).tolist()
        count, carry = int((trained.sum(1) > 0).sum()), 0.0
        for chunk in reversed(range(count)):  # the definition, with value 0 after the last chunk
            after = values[chunk + 1] if chunk + 1 < count else 0.0
            carry = rewards[chunk] + gamma * after - values[chunk] + gamma * lam * carry
            found = rollouts.advantage[row].reshape(-1, each)[chunk][trained[chunk] > 0]
            torch.testing.assert_close(found, torch.full_like(found, carry), rtol=1e-4, atol=1e-5)


def test_the_value_loss_moves_the_critic_and_not_the_policy(tmp_path):
    recipe = RobotPpoRecipe(ppo(tmp_path))
    rollouts = prepared(recipe)
    scores = recipe.scores(recipe.policy, rollouts, frozenset({"logp", "values"}))
    recipe.objective.critic_loss(scores, rollouts, count_denominators(recipe, rollouts)).loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in recipe.policy.critic.parameters())
    assert all(weight.grad is None for weight in recipe.policy.policy.parameters())


@pytest.mark.parametrize(
    ("critic", "rate"),
    [(CriticConfig(), 2e-4), (CriticConfig(learning_rate=3e-3), 3e-3), (CriticConfig(learning_rate=2e-5), 2e-5)],
)
def test_the_critic_has_its_own_rate(tmp_path, critic, rate):
    config = ppo(tmp_path, critic=critic)
    config.trainer.learning_rate = 2e-5
    recipe = RobotPpoRecipe(config)
    optimizer = make_optimizer(recipe.policy, config.trainer)
    of = {id(p): config.trainer.learning_rate * g.get(FACTOR, 1.0) for g in optimizer.param_groups for p in g["params"]}
    assert all(of[id(weight)] == pytest.approx(rate) for weight in recipe.policy.critic.parameters())
    assert all(of[id(weight)] == pytest.approx(2e-5) for weight in recipe.policy.policy.parameters())


def test_a_run_learns_and_its_policy_opens_without_the_critic(tmp_path):
    # ten times the policy's rate of 0.02 throws the critic about, and success with it
    config = ppo(
        tmp_path, reward=ChunkRewardConfig(success=1.0, potential=1.0), critic=CriticConfig(learning_rate=5e-3)
    )
    config.trainer.steps = 12
    run_dir = train(find_recipe("robot_ppo"), config)
    successes = [row["episode/success"] for row in metrics_of(run_dir)]
    assert successes[0] < 0.6
    assert min(successes[-4:]) > 0.9  # 1 from the seventh step on with each of eight seeds
    values = [row["loss/value"] for row in metrics_of(run_dir)]
    assert values[-1] < values[0] / 2
    assert all(row["critic/explained"] <= 1 for row in metrics_of(run_dir))
    assert (run_dir / "checkpoints" / "step-000012" / "model" / "critic" / "model.safetensors").is_file()


def metrics_of(run_dir):
    import json

    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "episode/success" in row]


def test_policy_and_critic_are_saved_together(tmp_path):

    policy = PolicyWithCritic(make_small(), StateCritic(4, 8, seed=1))
    policy.critic.fit_scale(torch.randn(9, 4))
    policy.save_pretrained(tmp_path)
    again = PolicyWithCritic(make_small(), StateCritic(4, 8, seed=2))
    again.load_weights(tmp_path)
    inputs = torch.randn(3, 4)
    assert torch.equal(policy.values(inputs), again.values(inputs))
    assert type(open_policy(tmp_path)) is type(policy.policy)
    with pytest.raises(UserError, match="do not fit"):
        PolicyWithCritic(make_small(), StateCritic(5, 8)).load_weights(tmp_path)


def test_a_policy_with_a_critic_is_described_as_the_policy_alone():
    policy = make_small()
    policy.views, policy.past, policy.cameras = 2, 3, ("front", "wrist", "top")
    policy.action_bounds = policy.action_range = ActionRange((-2.0,), (2.0,))
    both = PolicyWithCritic(policy, StateCritic(4, 8))
    for name in ActionPolicy.__annotations__:
        assert getattr(both, name) == getattr(policy, name), name


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        ({"environment": 1.0}, UserError, r"reward\.environment is 1; use reward\.potential: .* potentials"),
        ({"success": 0.0}, ValueError, r"reward\.environment and reward\.potential are all 0"),
    ],
)
def test_rewards_that_cannot_be_summed_are_refused(tmp_path, reward, error, message):
    with pytest.raises(error, match=message):
        RobotPpoRecipe(ppo(tmp_path, reward=ChunkRewardConfig(**reward)))


@pytest.mark.parametrize("options", [{"end_at_success": False}, {"settings": {"end_at_success": False}}])
def test_a_success_that_does_not_end_the_episode_is_not_paid(options):
    sim = SimConfig(kind="gymnasium", options=options)
    ChunkRewardConfig(environment=1.0).check_end(sim)
    ChunkRewardConfig(success=1.0).check_end(SimConfig(kind="gymnasium", options={"settings": {"renderer": "egl"}}))
    with pytest.raises(ValueError, match=r"paid at the end of an episode, but sim\.options has end_at_success: false"):
        ChunkRewardConfig(success=1.0).check_end(sim)
