"""Gains of information: the probability of a true answer before each turn, read behind what the agent read."""

from functools import partial

import pytest
import torch

from mmrl.agents.agent_recipe import AgentRecipe
from mmrl.agents.environments.agent_tasks import TaskSetConfig
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.agents.rollout.episodes import AgentPayload
from mmrl.agents.rollout.gains import add_gains, contexts_before_turns
from mmrl.contrib.rows.agentic import TurnNormalised
from mmrl.errors import UserError
from mmrl.training.objectives import ObjectiveConfig
from mmrl.vlm.data.prompt import join_prompts
from mmrl.vlm.engine.rows import text_prompt
from tests.agents.test_recipe import make_config, roll

OBJECTIVE = ObjectiveConfig(preset="information_gain", advantage={"before": "So: "}, kl={"coef": 0.0})


pytestmark = pytest.mark.usefixtures("every_answer_acts")


def with_answers(config, **options):
    config.data = TaskSetConfig(seeds=4, options=options)
    return config


@pytest.mark.parametrize("kept", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_gain_is_the_change_of_the_answers_probability(tmp_path, folder, kept):
    conversation = ConversationConfig(system="Walk. {actions}", history_images=kept)
    config = make_config(tmp_path, folder, objective=OBJECTIVE, conversation=conversation)
    _, scored, _, recipe = roll(with_answers(config, answer="sum"), tasks=1)
    policy, gains = recipe.policy, scored.extras["information_gain"]
    encode = partial(policy.processor.tokenizer.encode, add_special_tokens=False)
    for row, episode in enumerate(AgentPayload.of(scored).episodes):
        values = []
        for context in contexts_before_turns(episode):
            read = join_prompts([context, text_prompt(torch.tensor(encode("So: ")))])
            logp = []
            for token in encode("sum"):
                with torch.no_grad():
                    logp.append(float(policy.next_logp(policy.last_states([read]), 1.0)[0, token]))
                read = join_prompts([read, text_prompt(torch.tensor([token]))])
            values.append(torch.tensor(logp).mean().exp())
        assert len(values) == episode.trajectory.turns
        last = episode.trajectory.last_tokens()
        torch.testing.assert_close(gains[row, last[:-1]], torch.stack(values).diff(), rtol=1e-3, atol=1e-7)
        assert int((gains[row] != 0).sum()) == len(values) - 1
    assert torch.isfinite(recipe.objective.compute_advantages(scored).advantage).all()


def test_an_answer_that_does_not_fit_leaves_no_result(tmp_path, folder):
    rollouts, _, _, recipe = roll(
        with_answers(make_config(tmp_path, folder, objective=OBJECTIVE), answer="sum"), tasks=1
    )
    episode = AgentPayload.of(rollouts).episodes[0]
    add_gains([episode], TurnNormalised(before="no " * 300), recipe.policy, lambda x: torch.zeros_like(x.mask), 4)
    assert (episode.ending, episode.has_result) == ("overflow", False)


def test_tasks_without_an_answer_are_refused(tmp_path, folder):
    config = make_config(tmp_path, folder, objective=OBJECTIVE)
    with pytest.raises(UserError, match=r"\(entry 'answer'\), but task/0 has None there; expected a text"):
        AgentRecipe(config)
