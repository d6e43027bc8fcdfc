"""TAPO: tools in tags, the reward of whole texts, and results that are read but not trained."""

import pytest
import torch

from mmrl.agents.agent_recipe import AgentRecipe
from mmrl.agents.environments.agent_tasks import TaskSetConfig
from mmrl.agents.environments.env_pool import EnvironmentConfig
from mmrl.agents.environments.environment import Action
from mmrl.contrib.agents.tapo import (
    ENDS,
    TaggedTools,
    edit_distance,
    final_answer,
    score_answer,
    score_text,
    tapo_preset,
)
from mmrl.contrib.agents.toy_lookup import FRUIT, Lookup, build_model, search
from mmrl.errors import UserError
from mmrl.recipes import find_recipe
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from tests.golden.numbers import load

FILE = load("tapo")


@pytest.mark.parametrize("number", range(len(FILE.inputs["texts"])))
def test_the_reward_is_that_of_the_public_code(number):
    row = FILE.inputs["texts"][number]
    assert score_text(row["text"], row["truth"], row["source"]) == pytest.approx(FILE.peers[0]["scores"][number])


def test_the_edit_distance_counts_single_characters():
    assert [edit_distance(*pair) for pair in (("kitten", "sitting"), ("", "abc"), ("a", "a"))] == [3, 3, 0]


def test_what_cannot_be_scored_is_refused():
    with pytest.raises(ValueError, match="the source 'math' is unknown; use default, gsm8k"):
        score_answer("1", "1", "math")
    with pytest.raises(ValueError, match="the correct answer 'many' of source calculator is not a number"):
        score_answer("1", "many", "calculator")
    assert final_answer("<code>1</code><answer>2</answer>", tools=["search"]) is None
    assert final_answer("") is None, "on which the public code fails"


def say(environment, text):
    return environment.step(Action("say", {"text": text}))


def test_a_search_is_answered_and_an_answer_ends_the_episode():
    lookup = Lookup()
    assert lookup.reset({}, 0) == "plum?"
    assert say(lookup, "<search>plum</search>") == (f"<response>{search('plum')}</response>", 0.0, False, {})
    assert say(lookup, f"<answer>{search('plum')}</answer>") == ("", 1.0, True, {"success": True})


def test_turns_after_the_last_call_must_answer():
    lookup = Lookup(calls=2)
    lookup.reset({}, 0)
    assert say(lookup, "<search>coal</search>")[0] == "<response>Nothing was found.</response>"
    assert say(lookup, "plum")[0].startswith("This turn has no effect, as it ends with none of <search>, <answer>")
    assert say(lookup, "<search>plum</search>") == ("", -1.0, True, {"success": False})


def broken(query):
    raise OSError("no line")


def test_an_error_of_a_tool_is_text_for_the_policy():
    tools = TaggedTools(f"{__file__}:broken")
    tools.reset({"question": "?", "answer": ["a", "b"]}, 0)
    assert say(tools, "<search>x</search>")[0] == "<response>OSError: no line</response>"
    assert say(tools, "<answer>b</answer>")[1] == 1.0


def test_programs_run_in_the_sandbox(monkeypatch):
    from mmrl.workers.run_code import CodeResult

    results = [
        CodeResult(0, "42\n", "", 0.1),
        CodeResult(1, "", "ZeroDivisionError: x", 0.1),
        CodeResult(-9, "", "", 5, "timeout"),
    ]
    monkeypatch.setattr("mmrl.contrib.agents.tapo.run_code", lambda source, timeout_s: results.pop(0))
    tools = TaggedTools()
    tools.reset({"question": "?", "answer": "42"}, 0)
    shown = [say(tools, "<code>print(6 * 7)</code>")[0] for _ in range(3)]
    assert shown == [f"<response>{text}</response>" for text in ("42", "ZeroDivisionError: x", "timeout")]


def test_tools_and_tasks_are_checked():
    with pytest.raises(UserError, match="neither search nor code is set"):
        TaggedTools(code=False)
    with pytest.raises(UserError, match="a task needs a question and an answer; found question"):
        TaggedTools().reset({"question": "?"}, 0)


def test_what_a_tool_returned_is_not_trained(tmp_path, monkeypatch, closing):
    config = tapo_preset()
    assert find_recipe("tapo").load_defaults().objective.preset == config.objective.preset == "tapo"
    config.recipe, config.output_dir = "tapo", str(tmp_path / "run")
    config.model.path = str(build_model(tmp_path / "model", hidden=16, layers=1))
    config.environment = EnvironmentConfig(factory="mmrl.contrib.agents.toy_lookup:Lookup", isolate=False)
    config.data, config.conversation.system = TaskSetConfig(seeds=len(FRUIT)), ""
    config.trainer.samples_per_task, config.sampler.max_new_tokens = 4, 3
    config.validate()
    recipe = closing(AgentRecipe(config))
    tags = recipe.policy.processor.tokenizer.convert_tokens_to_ids(["<search>", "plum", "</search>"])
    monkeypatch.setattr("mmrl.agents.rollout.turns.TurnSampler.sample", forced(recipe.policy, tags))
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:1], Streams(0), Step())
    price = recipe.policy.processor.tokenizer.convert_tokens_to_ids([search("plum")])[0]
    shown = (rollouts.payload.response_ids == price) & (rollouts.turn > 0)
    assert shown.any()
    assert not rollouts.mask[shown].any()
    trained = rollouts.payload.response_ids[rollouts.mask > 0]
    assert set(trained.tolist()) == set(tags)
    scored = recipe.score(rollouts, Step())
    assert scored.reward.tolist() == [-1.0] * 4, "a search where an answer is due"
    assert set(rollouts.turn[rollouts.mask > 0].tolist()) == {0, 1, 2}
    assert set(ENDS) <= set(config.sampler.stop)


def forced(policy, ids):
    """A sampler that writes the same tokens in every turn."""
    from mmrl.vlm.engine.vlm_sampler import Samples

    def sample(self, rows, uniforms):
        count = len(rows)
        tokens = torch.tensor([ids] * count)
        for row in rows.tolist():
            self.give(row, ids)
        ones = torch.ones(tokens.shape)
        texts = policy.turns.decode([ids] * count)
        return Samples(tokens, ones, -ones, ["stop"] * count, texts, ones)

    return sample
