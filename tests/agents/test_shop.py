"""Tools of a shop, cloned in the model's own format: what experts write, the chat templates given, and the task."""

import json
from pathlib import Path

import pytest
import transformers

from mmrl.agents.environments.action_formats import SAY
from mmrl.agents.environments.environment import Action, ActionConfig
from mmrl.agents.environments.experts import run_expert
from mmrl.agents.environments.native_calls import OK, read_native
from mmrl.agents.methods.clone import AgentCloneConfig, AgentCloneRecipe, CloneEvaluationConfig
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.agents.rollout.episodes import AgentPayload
from mmrl.agents.rollout.tool_template import write_call
from mmrl.agents.toy.shop import FORMS, ITEMS, Shop
from mmrl.errors import UserError
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.settings import BaseTrainerConfig
from mmrl.vlm.engine.vlm_policy import load_policy, read_turns
from mmrl.vlm.engine.vlm_sampler import AnswerSampling
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.toy.countdown import build_model
from tests.agents.call_templates import CHATS, tool
from tests.agents.runs import run_config

ADD = tool("add", a="integer", b="integer")
TEMPLATES = {"hermes": "hermes", "qwen3_coder": "qwen_xml", "llama_json": "llama_json"}


def file_of(name: str) -> str:
    return f"configs/templates/{name}.jinja"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model whose own template has no tools."""
    folder = tmp_path_factory.mktemp("model")
    build_model(folder, tokens=["<|im_start|>", "<|im_end|>"], max_positions=4096)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.save_pretrained(folder)
    file = folder / "generation_config.json"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": end}))
    return folder


def other_ends(name: str) -> bool:
    """Whether a call ends with a token of its own."""
    return any(word in name for word in ("glm", "gemma", "gpt"))


@pytest.mark.parametrize("name", [name for name in CHATS if not other_ends(name)])
def test_an_experts_call_is_written_as_the_template_writes_it(name):
    chat = CHATS[name]
    turns = chat.turns()
    text = write_call(turns, [ADD], chat.format, Action("add", {"a": 17, "b": 4}))
    (call,) = read_native(text, chat.format, [ADD], prompt_end="", ends=turns.ends).calls
    assert (call.status, call.name, call.arguments) == (OK, "add", {"a": 17, "b": 4})
    assert not any(end in text for end in turns.ends)
    assert write_call(turns, [ADD], chat.format, Action(SAY, {"text": "21"})) == "21"


@pytest.mark.parametrize("name", [name for name in CHATS if other_ends(name)])
def test_calls_that_end_differently_from_answers_are_refused(name):
    chat = CHATS[name]
    with pytest.raises(UserError, match="it ends a call with another token than an answer"):
        write_call(chat.turns(), [ADD], chat.format, Action("add", {"a": 17, "b": 4}))


def test_arguments_that_would_be_read_differently_are_refused():
    chat = next(chat for name, chat in CHATS.items() if chat.format == "hermes")
    with pytest.raises(UserError, match=r"the call add.* would be read differently"):
        write_call(chat.turns(), [ADD], "hermes", Action("add", {"a": "seventeen", "b": 4}))


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_templates_given_describe_tools_in_their_format(template, model):
    policy = load_policy(ModelConfig(path=str(model), chat_template=file_of(template)))
    text = write_call(policy.turns, Shop().tools, TEMPLATES[template], Action("price", {"item": "cup"}))
    calls = read_native(text, TEMPLATES[template], Shop().tools, prompt_end="", ends=policy.turns.ends).calls
    assert [(call.status, call.name, call.arguments) for call in calls] == [(OK, "price", {"item": "cup"})]


def test_a_chat_template_is_saved_with_the_model(model, tmp_path):
    policy = load_policy(ModelConfig(path=str(model), chat_template=file_of("hermes")))
    policy.save_pretrained(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.chat_template == Path(file_of("hermes")).read_text()


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "is not a file"), ("{% if %}", "cannot be rendered: TemplateSyntaxError"), ("{{ 1 / 0 }}", "ZeroDivision")],
)
def test_a_chat_template_that_cannot_be_used_is_named(content, problem, model, tmp_path):
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=rf"model.chat_template: {file}.*{problem}"):
        read_turns(ModelConfig(path=str(model), chat_template=str(file)))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_clone_learns_the_experts_calls_and_its_last_answer(template, model, tmp_path, closing):
    config = run_config(
        AgentCloneConfig,
        tmp_path,
        model,
        "mmrl.agents.toy.shop:Shop",
        {},
        workers=1,
        recipe="agent_clone",
        conversation=ConversationConfig(system="", tools=True),
        actions=ActionConfig(),
        trainer=BaseTrainerConfig(steps=1, tasks_per_step=2, learning_rate=1e-3),
        evaluation=CloneEvaluationConfig(videos=0, sampler=AnswerSampling(max_new_tokens=5)),
    )
    config.model.chat_template = file_of(template)
    config.validate()
    recipe = closing(AgentCloneRecipe(config))
    rollouts = recipe.batch(recipe.policy, recipe.train_tasks[:2], Streams(0), Step(0))
    payload, tokenizer = AgentPayload.of(rollouts), recipe.policy.processor.tokenizer
    assert rollouts.reward.tolist() == [1.0, 1.0]
    for row, episode in enumerate(payload.episodes):
        trained = tokenizer.decode(payload.response_ids[row][rollouts.mask[row] > 0])
        turns = trained.split(tokenizer.eos_token)
        calls = [read_native(turn, TEMPLATES[template], Shop().tools).calls for turn in turns[:3]]
        assert [[call.name for call in turn] for turn in calls] == [["price"], ["multiply"], []]
        product = calls[1][0].arguments
        assert turns[2:] == [str(product["a"] * product["b"]), ""]
        read = tokenizer.decode(payload.response_ids[row])
        assert f"{product['b']}" in read.partition(turns[1])[0]  # the price came from the tool
        assert episode.success
        assert episode.calls == 2


def test_random_actions_have_no_arguments_for_tools(model, tmp_path):
    config = run_config(AgentCloneConfig, tmp_path, model, "mmrl.agents.toy.shop:Shop", {}, recipe="agent_clone")
    config.conversation, config.actions = ConversationConfig(system="", tools=True), ActionConfig()
    config.random_actions = 0.5
    with pytest.raises(ValueError, match="random_actions draws actions without arguments"):
        config.validate()


def test_only_the_tools_know_the_price():
    episodes = [run_expert(Shop(), {"split": "test"}, seed, None) for seed in range(40)]
    assert all(episode.success and len(episode.turns) == 3 for episode in episodes)
    # the same question has other prices in other episodes
    asked = [(turn.observation.text, episode.turns[0].action) for episode in episodes for turn in episode.turns[:1]]
    assert len({text for text, _ in asked}) > 20
    assert not set(ITEMS["train"]) & set(ITEMS["test"])
    assert not set(FORMS["train"]) & set(FORMS["test"])
    shop = Shop()
    shop.reset({}, 0)
    assert shop.step(Action(SAY, {"text": "12"}))[1] == 0.0


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (Action("price", {"item": "moon"}), "no_such_item"),
        (Action("price", {}), "bad_arguments"),
        (Action("multiply", {"a": "x", "b": 2}), "bad_arguments"),
        (Action("divide", {"a": 4, "b": 2}), "unknown_tool"),
    ],
)
def test_calls_that_fail_are_results_with_a_kind(action, kind):
    shop = Shop()
    shop.reset({"split": "train"}, 3)
    text, reward, ended, info = shop.step(action)
    assert (reward, ended) == (0.0, False)
    assert kind in info.values()
    assert text


def test_another_split_is_an_error():
    with pytest.raises(UserError, match="split is 'all'; it must be train or test"):
        Shop().reset({"split": "all"}, 0)
