"""Episodes and runs with tool calls in the formats of released models, their answers given instead of sampled."""

import json
import math
from pathlib import Path

import pytest
import transformers

from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe
from mmrl.agents.environments.agent_tasks import TaskSetConfig
from mmrl.agents.environments.env_pool import EnvironmentConfig
from mmrl.agents.environments.environment import ActionConfig
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.agents.rollout.episodes import EpisodeConfig
from mmrl.agents.rollout.runner import EpisodeRunner, _Answer
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.runs.tracking import TrackingConfig
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.run import dry_run, train
from mmrl.training.settings import TrainerConfig
from mmrl.vlm.data.turn_template import as_call, call_id
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.toy.countdown import build_model
from tests.agents.call_templates import CHATS, SHORT, TEXTS, ToolChat, tool
from tests.agents.test_tools import OPTIONS, TASK

ADD = tool("add", a="integer", b="integer")


def model_with(folder: Path, chat: ToolChat) -> Path:
    """A tiny model with a chat template of tools."""
    build_model(folder, tokens=chat.special, max_positions=4096)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [*chat.special]})
    tokenizer.chat_template = chat.template
    tokenizer.eos_token = chat.stops[0]
    tokenizer.save_pretrained(folder)
    file = folder / "generation_config.json"
    stops = tokenizer.convert_tokens_to_ids([*chat.stops])
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": stops}))
    return folder


def make_config(folder: Path, model: Path, **parts) -> AgentConfig:
    usual = {
        "conversation": ConversationConfig(system="", tools=True),
        "actions": ActionConfig(),
        "episode": EpisodeConfig(max_turns=4),
        "sampler": SamplerConfig(max_new_tokens=8),
        "trainer": TrainerConfig(steps=2, tasks_per_step=1, samples_per_task=2),
    }
    return AgentConfig(
        recipe="agent",
        output_dir=str(folder / "run"),
        model=ModelConfig(path=str(model)),
        environment=EnvironmentConfig(
            "mmrl.agents.environments.tools:ToolEnvironment", OPTIONS, workers=1, isolate=False
        ),
        data=TaskSetConfig(seeds=2, options=TASK),
        tracking=TrackingConfig(quiet=True, tensorboard=False, strict=True),
        **usual | parts,
    )


def scripted(monkeypatch, *answers):
    """Let episodes give these answers, (text with control tokens, finish) a turn; a function gives a row its text."""

    def given(self, running, turns, greedy):
        found = {}
        for row, slot in running.items():
            text, finish = answers[slot.episode.trajectory.turns]
            text = text(row) if callable(text) else text
            ids = self._policy.processor.tokenizer.encode(text, add_special_tokens=False)
            turns.give(row, ids)
            found[row] = _Answer(ids, [-1.0] * len(ids), self._policy.turns.decode([ids])[0], finish)
        return found

    monkeypatch.setattr(EpisodeRunner, "_answers", given)


def hermes(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return model_with(tmp_path_factory.mktemp("qwen") / "model", CHATS["qwen3"])


def episodes_of(recipe):
    return recipe.run_groups(recipe.policy, recipe.train_tasks[:1], Streams(0), Step())[0]


def test_every_call_gets_its_result_in_order(tmp_path, qwen, monkeypatch, closing):
    calls = "\n".join(
        (hermes("add", a=2, b=1), hermes("add", a="x", b=1), hermes("<|im_end|>"), hermes("add", a=20, b=2))
    )
    scripted(
        monkeypatch, (f"Hm.\n{calls}<|im_end|>", "eos"), (hermes("add", a=1, b=1), "length"), ("5<|im_end|>", "eos")
    )
    recipe = closing(AgentRecipe(make_config(tmp_path, qwen)))
    assert recipe.tool_template.format == recipe.writer(recipe.policy).native == "hermes"
    for episode in episodes_of(recipe):
        assert (episode.ending, episode.total, episode.errors) == ("terminated", 1.0, ["bad_arguments", "cut", ""])
        # two calls and what is said at the end; nothing of the response that was cut
        assert (episode.calls, episode.refused, episode.unreadable) == (2, 0, 1)
        first, second = (insert.prompt.text for insert in episode.trajectory.inserts)
        results = [
            "3",
            "Error: the argument a of add is 'x'; expected integer.",
            "Error: there is no tool '<|im_end|>'; the tools are: add, fail.",
            "22",
        ]
        shown = "\n".join(f"<tool_response>\n{result}\n</tool_response>" for result in results)
        assert first == f"\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
        # a name that the model made up ends no turn
        end = recipe.policy.eos_ids[0]
        assert episode.trajectory.inserts[0].prompt.input_ids.tolist().count(end) == 1
        told = "Nothing was executed: the answer was cut at the limit of its length."
        assert second == f"<|im_end|>\n<|im_start|>user\n{told}<|im_end|>\n<|im_start|>assistant\n"


def test_an_episode_ends_after_several_invalid_turns(tmp_path, qwen, monkeypatch, closing):
    bad, good, cut = (
        ("<tool_call><|im_end|>", "eos"),
        (f"{hermes('add', a=1, b=1)}<|im_end|>", "eos"),
        ("<tool_", "length"),
    )
    scripted(monkeypatch, bad, good, bad, cut, bad, bad)
    config = make_config(tmp_path, qwen, actions=ActionConfig(max_invalid=2), episode=EpisodeConfig(max_turns=6))
    recipe = closing(AgentRecipe(config))
    for episode in episodes_of(recipe):
        assert episode.errors == ["unclosed", "", "unclosed", "cut", "unclosed"]
        assert (episode.ending, episode.reason) == ("unreadable", "2 turns in a row had an error: the call has no end")
    config.reward.format, config.reward.invalid_turn = 0.5, -0.25
    scored = recipe.score(recipe.rollout(recipe.policy, recipe.train_tasks[:1], Streams(0), Step()), Step())
    assert scored.reward.tolist() == [-0.5 * 4 - 0.25 * 3] * 2
    config.actions.on_parse_error = "terminate"
    for episode in episodes_of(recipe):
        assert (episode.ending, episode.errors, episode.reason) == ("unreadable", ["unclosed"], "the call has no end")


def test_calls_that_can_be_executed_are_played_as_before(tmp_path, qwen, monkeypatch, closing):
    """`tool_call`, which reads the same calls without a template, gives the same tokens and rewards."""
    calls = "\n".join((hermes("add", a=2, b=1), hermes("fail", text="x")))
    script = (f"<think>\nSo.\n</think>\n\n{calls}<|im_end|>", "eos"), ("It is 5.<|im_end|>", "eos")
    rows = []
    for actions in (ActionConfig(), ActionConfig(format="tool_call", max_actions=8)):
        scripted(monkeypatch, *script)
        recipe = closing(AgentRecipe(make_config(tmp_path, qwen, actions=actions)))
        names = ("rewards", "answers", "anchors", "calls", "refused", "ending", "errors", "last")
        rows.append(
            [
                (episode.trajectory.ids, episode.trajectory.sampled, [getattr(episode, name) for name in names])
                for episode in episodes_of(recipe)
            ]
        )
    assert rows[0] == rows[1]
    assert rows[0][0][2][0] == [0.0, 1.0]


def test_a_run_is_refused_before_its_weights_are_read(tmp_path, monkeypatch):
    model = model_with(tmp_path / "model", CHATS["qwen3_5_think"])
    (model / "model.safetensors").unlink()
    config = make_config(tmp_path, model, actions=ActionConfig(format="tool_call"))
    with pytest.raises(UserError, match=r"in the format hermes, but the chat template of .* in the format qwen_xml"):
        AgentRecipe(config)
    # the run itself would get as far as the weights
    config.actions = ActionConfig()
    lines = list(dry_run(RECIPES["agent"], config))
    assert "  tool calls: format qwen_xml, several per turn" in lines
    assert any(line.startswith("chat template: a response ends at <|im_end|>") for line in lines)
    config.model = ModelConfig(path=str(tmp_path / "later"), build="mmrl.vlm.toy.countdown:build_model")
    assert f"chat template: {tmp_path}/later is not on this machine yet, so it is checked by the run" in list(
        dry_run(RECIPES["agent"], config)
    )


def answer_of(chat: ToolChat) -> tuple[str, str, str]:
    """A call as the template writes it, up to the token that ends a response; start and end of an answer."""
    turns = chat.turns()
    called = as_call("add", {"a": 2, "b": 1}, "functions.add:0" if chat.format == "kimi" else call_id(0))
    if chat.template in {SHORT[name].template for name in TEXTS}:
        called["function"]["arguments"] = json.dumps(called["function"]["arguments"])
    _, body = turns.write_calls([called], [ADD])
    places = [body.index(stop) + len(stop) for stop in chat.stops if stop in body]
    body = body[: min(places)] if places else f"{body}{turns.ends[0]}"
    # some prompts open a thought
    start = "So.\n</think>\n\n" if turns.parts.begin.rstrip().endswith("<think>") else ""
    return body, start, turns.parts.close


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gptoss" else pytest.mark.slow) for name in CHATS]
)
def test_a_model_of_every_format_trains_with_a_call_in_each_episode(tmp_path, name, monkeypatch):
    chat, seen = CHATS[name], []
    call, start, end = answer_of(chat)
    scripted(monkeypatch, (call, "eos"), (lambda row: f"{start}{'5' if row % 2 else '4'}{end}", "eos"))
    run = EpisodeRunner.run

    def recorded(self, *given, **options):
        seen.append(run(self, *given, **options))
        return seen[-1]

    monkeypatch.setattr(EpisodeRunner, "run", recorded)
    config = make_config(tmp_path, model_with(tmp_path / "model", chat))
    config.environment.workers = 2
    run_dir = train(RECIPES["agent"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["episode/calls"], row["episode/unreadable"], row["episode/success"]) == (0.5, 0.0, 0.5)
        assert row["optim/grad_norm"] > 0
        assert math.isfinite(row["optim/grad_norm"])
    for episode in (episode for episodes in seen for episode in episodes):
        assert episode.trajectory.turns == 2
        (insert,) = episode.trajectory.inserts
        assert insert.prompt.text.count("3") == 1, "the result of the call, once"
