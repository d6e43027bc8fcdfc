"""ArCHer in the recipe: contexts of stored turns, new answers to them, and advantages for the actor."""

import pytest
import torch

from mmrl.agents.environments.environment import ActionConfig
from mmrl.agents.methods.digirl_critics import CriticTraining, Fitter, label_episodes
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.agents.rollout.episodes import AgentPayload
from mmrl.contrib.agents.archer import (
    ArcherConfig,
    ArcherRecipe,
    ArcherSettings,
    UtteranceCritic,
    answer_of,
    context_of,
    critic_loss,
    read_answers,
)
from mmrl.errors import UserError
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams, make_accelerator
from mmrl.training.recipe import Step
from tests.agents.runs import by_length, run_config
from tests.rounding import assert_equal_up_to_rounding


def config(folder, model, history=0, **settings) -> ArcherConfig:
    critic = CriticTraining(hidden=16, updates=3, batch_steps=8)
    parts = {
        "recipe": "archer",
        "conversation": ConversationConfig(system="Walk.", history_images=history),
        "archer": ArcherSettings(**({"turns": 6, "warmup_steps": 1, "critic": critic} | settings)),
    }
    made = run_config(ArcherConfig, folder, model, steps={"samples_per_task": 2}, **parts)
    made.validate()
    return made


@pytest.fixture
def make(tmp_path, folder, monkeypatch, closing):
    monkeypatch.setattr(ActionConfig, "parse", by_length)

    return lambda **options: closing(ArcherRecipe(config(tmp_path, folder, **options)))


@pytest.mark.parametrize("history", [0, 1])
def test_a_turn_is_answered_in_the_context_that_it_had(make, history):
    recipe = make(history=history)
    groups = recipe.run_groups(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
    data = label_episodes(recipe.policy, [e for own in groups for e in own], gamma=1.0, rows=3)
    turns = [(e, turn) for e in data.episodes for turn in range(e.trajectory.turns)]
    assert max(turn for _, turn in turns) > 0
    with torch.no_grad():
        read = recipe.policy.last_states([context_of(*turn) for turn in turns])
    assert_equal_up_to_rounding(data.state, read)
    assert sum(len(answer_of(*turn)) for turn in turns) == sum(len(e.trajectory.sampled_ids) for e in data.episodes)


def test_answers_are_told_apart_by_their_tokens(make):
    recipe = make()
    with torch.no_grad():
        groups = recipe.run_groups(recipe.policy, recipe.train_tasks[:1], Streams(0), Step())
        context, answers = context_of(groups[0][0], 0), [[3, 4, 5], [3, 7, 5]]
        state, answered = read_answers(recipe.policy, [context] * 2, answers)
    table, size = recipe.policy.network.get_input_embeddings().weight, recipe.policy.width
    written = torch.stack([table[torch.tensor(ids)].detach().mean(0) for ids in answers])
    centred = written - written.mean(1, keepdim=True)
    expected = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
    assert_equal_up_to_rounding(answered[:, size:], expected)
    assert_equal_up_to_rounding(state[0], state[1])


def test_critics_learn_from_inputs_that_hardly_differ():
    generator = torch.Generator().manual_seed(0)
    state = 3 + 0.02 * torch.randn(256, 8, generator=generator)
    answered = 3 + 0.02 * torch.randn(256, 16, generator=generator)
    goal = ((state[:, 0] - 3) * (answered[:, 0] - 3)).sign().clamp(min=0).expand(2, -1)
    critic = UtteranceCritic(8, 32)
    fitter = Fitter(critic, CriticTraining(learning_rate=3e-3, max_grad_norm=1.0))
    critic.fit_scale(state, answered)
    mean, std = critic.mean.clone(), critic.std.clone()
    critic.fit_scale(2 * state, answered)
    assert torch.equal(critic.mean, mean)
    assert torch.equal(critic.std, std)
    for _ in range(150):
        q, v = critic(state, answered)
        fitter.step(critic_loss(q, v, goal, goal))
    with torch.no_grad():
        q, v = critic(state, answered)
    assert float((q - goal).square().mean()) < 0.1, "a quarter without what they are scaled by"
    assert torch.equal(critic.value(state), v)


def test_the_critics_warm_up_and_then_weigh_new_answers(make):
    recipe = make()
    untrained = recipe.average.v[0][0].weight.clone()
    for number in range(2):
        with torch.no_grad():
            rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:2], Streams(number), Step(number, 2))
        rollouts = recipe.score(rollouts, Step(number, 2))
        batch = recipe.advantages(rollouts, make_accelerator(), Step(number, 2))
        if number == 0:
            assert batch.reward.isnan().all()
            assert not torch.equal(recipe.average.v[0][0].weight, untrained)
    assert batch.num_rows == batch.num_groups == 6
    assert recipe.noted["archer/stored"] == 8
    known = {e.trajectory.turns for e in AgentPayload.of(batch).episodes}
    assert known == {1}, "a row is one new answer"
    for row in range(6):
        assert len(batch.advantage[row][batch.mask[row] > 0].unique()) == 1
    assert float(batch.advantage[:, 0].mean()) == pytest.approx(recipe.noted["archer/advantage"], rel=1e-4)
    logp = recipe.scores(recipe.policy, batch, frozenset({"logp"})).logp.detach()
    assert torch.allclose(logp * batch.mask, batch.logp_old, atol=1e-4), "rows are scored as they were sampled"


def test_what_archer_does_not_take_is_refused(tmp_path, folder):
    made = config(tmp_path, folder)
    made.objective = ObjectiveConfig(preset="grpo")
    with pytest.raises(UserError, match="archer's critics compute the advantages"):
        made.validate()
