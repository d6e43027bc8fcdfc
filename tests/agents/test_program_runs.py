"""Episodes and runs of agent programs with a tiny model: tokens as sampled, branches, tools, settings, faults."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe, AgentRewardConfig
from mmrl.agents.environments.agent_tasks import AgentTask, TaskSetConfig
from mmrl.agents.environments.chat_endpoint import read_request
from mmrl.agents.environments.environment import ActionConfig
from mmrl.agents.rollout.chat_writer import SETTINGS, ChatWriter, check_settings
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.agents.rollout.episodes import AgentPayload, EpisodeConfig
from mmrl.agents.rollout.gains import contexts_before_turns
from mmrl.agents.rollout.runner import EpisodeRunner
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.rewards import RewardConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import NoUsableTasksError, Step
from mmrl.training.run import train
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from tests.agents.call_templates import CHATS
from tests.agents.my_agents import ADD, user
from tests.agents.runs import run_config
from tests.agents.test_programs import AGENTS
from tests.agents.test_tool_runs import hermes, model_with, scripted
from tests.rounding import assert_equal_up_to_rounding


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return model_with(tmp_path_factory.mktemp("qwen") / "model", CHATS["qwen3"])


def make_config(folder, model, program, *, tools=False, kwargs=None, workers=1, **parts) -> AgentConfig:
    usual = {
        "conversation": ConversationConfig(tools=tools),
        "actions": ActionConfig(),
        "sampler": SamplerConfig(max_new_tokens=6, temperature=1.5),
        "data": TaskSetConfig(seeds=2),
    }
    steps = {"tasks_per_step": 1, "samples_per_task": 2} | parts.pop("steps", {})
    config = run_config(
        AgentConfig, folder, model, f"{AGENTS}:{program}", kwargs, workers, steps=steps, **usual | parts
    )
    config.validate()
    return config


def roll(config):
    with contextlib.closing(AgentRecipe(config)) as recipe:
        rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:1], Streams(0), Step())
        with torch.no_grad():
            logp = recipe.scores(recipe.policy, rollouts, frozenset({"logp"})).logp
        return recipe, rollouts, recipe.score(rollouts, Step()), logp


def prompts_of(recipe, episode):
    """What the model had read before each of its turns, as text with control tokens."""
    tokenizer = recipe.policy.processor.tokenizer
    return [tokenizer.decode(context.input_ids) for context in contexts_before_turns(episode)]


def answers_of(episode):
    """Sampled tokens by turn."""
    steps = episode.trajectory
    return [
        [
            token
            for token, turn, sampled in zip(steps.ids, steps.turn, steps.sampled, strict=True)
            if sampled and turn == k
        ]
        for k in range(steps.turns)
    ]


def test_sampled_tokens_stay_and_rewritten_history_branches(tmp_path, qwen, monkeypatch):
    sampled = []
    answers = EpisodeRunner._answers

    def noted(self, running, turns, greedy):
        found = answers(self, running, turns, greedy)
        sampled.extend(answer.ids for answer in found.values())
        return found

    monkeypatch.setattr(EpisodeRunner, "_answers", noted)
    recipe, rollouts, scored, logp = roll(make_config(tmp_path, qwen, "branching"))
    # every prompt is what the sampler had read: the update scores the tokens as they were sampled
    assert_equal_up_to_rounding(logp, rollouts.logp_old)
    episodes = AgentPayload.of(rollouts).episodes
    assert [ids for episode in episodes for ids in answers_of(episode)] == sampled
    tokenizer = recipe.policy.processor.tokenizer
    for row, episode in enumerate(episodes):
        assert (episode.trajectory.turns, episode.total, episode.ending) == (6, 0.25, "terminated")
        # one row, each answer trained once, all with the reward of the episode
        assert int(rollouts.mask[row].sum()) == sum(map(len, answers_of(episode)))
        assert float(scored.reward[row]) == 0.25
        first, helper, second, third, other, rewritten = prompts_of(recipe, episode)
        one, _, two, *_ = (tokenizer.decode(ids) for ids in answers_of(episode))
        asked = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nWhat comes next?<|im_end|>\n"
        assert helper == f"{asked}<|im_start|>assistant\n"
        # behind the first answer, with the tokens as sampled, then behind the second, and behind the first again
        for whole, before, question in (
            (second, first + one, "Go on."),
            (third, second + two, "And on."),
            (other, first + one, "Count backwards."),
        ):
            assert whole.startswith(before)
            rest = whole[len(before) :].removeprefix("<|im_end|>")
            assert rest == f"\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        # the program has rewritten the answer
        assert "(left out)" in rewritten
        assert one not in rewritten
        assert (len(episode.trajectory.contexts), len(episode.trajectory.inserts)) == (4, 1)


def test_images_of_requests_are_seen_where_they_were_sent(tmp_path, folder, monkeypatch):
    # which drops the images once they are scored
    monkeypatch.setattr("mmrl.agents.monitor.EpisodeRewards.score", lambda self, episodes, state: None)
    rewards = [RewardConfig(name="mmrl.agents.monitor:episode_return", isolate=False)]
    _, rollouts, _, logp = roll(make_config(tmp_path, folder, "looking", rewards=rewards))
    assert_equal_up_to_rounding(logp, rollouts.logp_old)
    for episode in AgentPayload.of(rollouts).episodes:
        (insert,), (context,) = episode.trajectory.inserts, episode.trajectory.contexts
        for prompt in (episode.prompt, insert.prompt, context.prompt):
            assert prompt.has_vision
            assert prompt.text.count("<|image_pad|>") == 1
        assert [int(own.mean()) for own in episode.transcript.images] == [40, 200, 200]


def test_calls_come_back_parsed_and_results_follow_the_sampled_call(tmp_path, qwen, monkeypatch):
    call = f"So.\n{hermes('add', a=2, b=0)}\n{hermes('multiply', a=1)}"
    scripted(monkeypatch, (f"{call}<|im_end|>", "eos"), ("<think>\nTwo.\n</think>\n\nIt is 2.<|im_end|>", "eos"))
    config = make_config(tmp_path, qwen, "adder", tools=True)
    _, rollouts, _, _ = roll(config)
    assert config.actions.setting()["format"] == "native"
    for episode in AgentPayload.of(rollouts).episodes:
        assert (episode.total, episode.success, episode.calls) == (1.0, True, 2)
        # unknown tools are the program's to answer, and count
        assert episode.errors == ["unknown_tool", ""]
        (insert,) = episode.trajectory.inserts
        results = "<tool_response>\n2\n</tool_response>\n<tool_response>\nno such tool\n</tool_response>"
        assert insert.prompt.text == f"\n<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n"
        assert '"name": "add"' in episode.prompt.text
        assert not episode.trajectory.contexts


def test_a_reply_says_how_the_answer_ended(tmp_path, qwen, closing):
    recipe = closing(AgentRecipe(make_config(tmp_path, qwen, "adder", tools=True)))
    policy, writer = recipe.policy, recipe.writer(recipe.policy)
    observation = read_request({"messages": [user("2 + 0?")], "tools": [ADD]})
    add = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    for text, finish, ending, error, content, calls in (
        ("<think>\nSo.\n</think>\n\nIt is 2.<|im_end|>", "eos", "stop", None, "It is 2.", []),
        (f"Hm.\n{hermes('add', a=1, b=2)}<|im_end|>", "eos", "tool_calls", None, "Hm.", [add]),
        # nothing of an answer that was cut is a call
        (f"{hermes('add', a=1, b=2)}\nAnd", "length", "length", "cut", f"{hermes('add', a=1, b=2)}\nAnd", []),
        # arguments that do not fit are the program's to answer, and a call that nobody can read is text
        (
            f"{hermes('add', a='x')}<|im_end|>",
            "eos",
            "tool_calls",
            "bad_arguments",
            "",
            [add | {"arguments": '{"a": "x"}'}],
        ),
        ("<tool_call>2</tool_call><|im_end|>", "eos", "stop", "invalid_json", "<tool_call>2</tool_call>", []),
    ):
        conversation = writer.begin(AgentTask("t"), observation)
        ids = policy.processor.tokenizer.encode(text, add_special_tokens=False)
        writer.answer(conversation, ids)
        parsed = writer.parse(conversation, recipe.config.actions, ids, policy.turns.decode([ids])[0], finish)
        (action,) = parsed.actions
        reply = action.arguments
        assert parsed.error == error
        assert (reply["content"], reply["finish_reason"]) == (content, ending)
        assert [{"name": call["name"], "arguments": call["arguments"]} for call in reply["tool_calls"]] == calls
        assert reply["reasoning"] == ("So." if "So." in text else "")
        assert reply["completion_tokens"] == len(ids)
        assert reply["prompt_tokens"] == len(conversation.parts[0].prompt)
    # without tools; as in the API, the stop string is not part of the text
    writer = ChatWriter(policy, ConversationConfig(), SamplerConfig(stop=["."]))
    conversation = writer.begin(AgentTask("t"), read_request({"messages": [user("2 + 0?")]}))
    ids = policy.processor.tokenizer.encode("It is 2.", add_special_tokens=False)
    writer.answer(conversation, ids)
    (action,) = writer.parse(conversation, ActionConfig(format="text"), ids, "It is 2.", "stop").actions
    assert (action.arguments["content"], action.arguments["finish_reason"]) == ("It is 2", "stop")
    again = read_request({"messages": [user("2 + 0?"), {"role": "assistant", "content": "It is 2"}, user("Sure?")]})
    assert writer.follow(conversation, again).text.endswith(
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert writer.cut(conversation) is None


def test_control_tokens_anywhere_in_a_request_are_characters(tmp_path, qwen, closing):
    recipe = closing(AgentRecipe(make_config(tmp_path, qwen, "adder", tools=True)))
    writer, tokenizer = recipe.writer(recipe.policy), recipe.policy.processor.tokenizer

    def prompt_of(word):
        call = {"id": "c1", "function": {"name": "add", "arguments": json.dumps({"a": word})}}
        own = {"role": "assistant", "content": word, "reasoning_content": word, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "c1", "content": word}
        request = read_request({"messages": [user(word), own, result], "tools": [ADD]})
        return writer.begin(AgentTask("t"), request).parts[0].prompt

    plain, marked = prompt_of("x"), prompt_of("x<|im_end|>")
    assert marked.text.count("<|im_end|>") - plain.text.count("<|im_end|>") == 5
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert marked.input_ids.tolist().count(end) == plain.input_ids.tolist().count(end)


def test_reward_functions_get_the_messages(tmp_path, qwen, monkeypatch):
    seen = []
    judge = "mmrl.agents.monitor:episode_return"
    monkeypatch.setattr("mmrl.agents.monitor.EpisodeRewards.score", lambda self, episodes, state: seen.extend(episodes))
    config = make_config(tmp_path, qwen, "branching", rewards=[RewardConfig(name=judge, isolate=False)])
    roll(config)
    transcript = seen[0].transcript
    assert transcript.prompt == [{"role": "user", "content": "Count from 0."}]
    said = [turn["content"] for turn in transcript.completion if turn["role"] == "assistant"]
    assert said[:5] == seen[0].answers[:5]
    others = [turn["content"] for turn in transcript.completion if turn["role"] != "assistant"]
    assert others == [
        "You help.",
        "What comes next?",
        "Go on.",
        "And on.",
        "Count backwards.",
        "Count from 0.",
        "Where were you?",
    ]


def test_programs_that_fail_are_left_out_and_counted(tmp_path, qwen):
    config = make_config(tmp_path, qwen, "faulty", kwargs={"fault": "sometimes"}, workers=2)
    with contextlib.closing(AgentRecipe(config)) as recipe:
        groups = recipe.run_groups(recipe.policy, recipe.train_tasks[:2], Streams(0), Step())
        assert [[episode.task.seed for episode in group] for group in groups] == [[0, 0]]
        assert (recipe.pool.counts["raised"], recipe.pool.counts["dropped"]) == (2, 2)
    config = make_config(tmp_path, qwen, "faulty", kwargs={"fault": "never asks"})
    with pytest.raises(NoUsableTasksError, match="without a request to the model"):
        roll(config)


def test_a_request_must_not_contradict_the_sampler(tmp_path, qwen):
    with pytest.raises(UserError, match=r"temperature=0\.7, but the run samples with 1\.5; .* sampler\.temperature"):
        roll(make_config(tmp_path, qwen, "faulty", kwargs={"fault": "hot"}))
    with pytest.raises(UserError, match=r"has tools; set conversation\.tools: true"):
        roll(make_config(tmp_path, qwen, "adder"))
    sampler = SamplerConfig(max_new_tokens=8, stop=["\n"])
    check_settings({name: read(sampler) for name, read in SETTINGS.items()}, sampler)
    check_settings({"stop": "\n", "max_tokens": 4096, "max_completion_tokens": 8}, sampler)
    for settings, message in (
        ({"max_tokens": 4}, r"max_tokens=4, but the run samples up to 8 tokens"),
        ({"n": 2}, "n=2, but the run samples with 1"),
        ({"tool_choice": "required"}, "tool_choice='required'"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template_kwargs": {}}, "does not take"),
    ):
        with pytest.raises(UserError, match=message):
            check_settings(settings, sampler)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"actions": ActionConfig(format="json")}, r"actions\.format has no effect"),
        ({"actions": ActionConfig(max_invalid=2), "tools": True}, r"actions\.max_invalid has no effect"),
        (
            {"conversation": ConversationConfig(system="Act.", history_images=1)},
            r"conversation\.system, conversation\.h",
        ),
    ],
)
def test_options_without_effect_are_refused(tmp_path, qwen, parts, message):
    with pytest.raises(UserError, match=message):
        AgentRecipe(make_config(tmp_path, qwen, "adder", **parts))


def test_turns_beyond_the_limit_truncate(tmp_path, qwen):
    kwargs = {"folder": str(tmp_path)}
    config = make_config(tmp_path, qwen, "lasting", kwargs=kwargs, episode=EpisodeConfig(max_turns=2))
    _, rollouts, _, _ = roll(config)
    assert [episode.ending for episode in AgentPayload.of(rollouts).episodes] == ["truncated", "truncated"]
    assert "the episode is over" in Path(tmp_path, "0").read_text()


@pytest.mark.slow
def test_a_program_trains(tmp_path, qwen):
    run_dir = train(
        RECIPES["agent"],
        make_config(
            tmp_path,
            qwen,
            "walker",
            workers=2,
            steps={"samples_per_task": 4},
            reward=AgentRewardConfig(format=0.1),
            eval_data={"held_out": TaskSetConfig(seeds=1, first_seed=10)},
        ),
    )
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["episode/turns"] == 2
        assert row["optim/grad_norm"] > 0
    assert rows[0]["policy/ratio_mean"] == 1.0
