"""Python functions as tools of an agent: described by the chat template, called, their exceptions as text."""

from pathlib import Path

import pytest

from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe
from mmrl.agents.environments.agent_tasks import AgentTask, TaskSetConfig
from mmrl.agents.environments.env_pool import EnvironmentConfig, EnvPool
from mmrl.agents.environments.environment import (
    Action,
    ActionConfig,
    CallResult,
    Observation,
    ParsedAnswer,
    as_observation,
)
from mmrl.agents.environments.tools import ToolEnvironment
from mmrl.agents.methods.clone import AgentCloneConfig
from mmrl.agents.methods.digirl import DigirlConfig
from mmrl.agents.rollout.conversation import ConversationConfig, Writer
from mmrl.errors import UserError
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.settings import TrainerConfig
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.model.processor import TextProcessor

TOOLS = f"{Path(__file__).with_name('my_tools.py')}"
OPTIONS = {"functions": [f"{TOOLS}:add", f"{TOOLS}:fail"], "reward": f"{TOOLS}:reward"}
TASK = {"question": "What is 2 + 3?", "answer": 5}


def with_tools(policy: VlmPolicy) -> VlmPolicy:
    """Let the template describe tools and answer in their role, as Qwen's does."""
    described = (
        "{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{ tool.function.name + '(' }}"
        "{{ tool.function.parameters.required | join(',') }}{{ ')\\n' }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endif %}"
    )
    tokenizer = policy.processor.tokenizer
    text_alone = isinstance(policy.processor, TextProcessor)  # which has its tokenizer's template
    for owner in (tokenizer,) if text_alone else (policy.processor, tokenizer):
        if owner.chat_template is not None:
            owner.chat_template = described + owner.chat_template
    return policy


def test_functions_are_called_and_their_exceptions_are_text():
    env = ToolEnvironment(**OPTIONS)
    assert env.actions == {"add": "Add two numbers.", "fail": "Fail with a text."}
    assert env.tools[0]["function"]["parameters"]["properties"]["a"]["type"] == "integer"
    assert env.reset(TASK, 0) == TASK["question"]
    assert env.step(Action("add", {"a": 2, "b": 3})) == ("5", 0.0, False, {})
    for action, kind, text in (
        (Action("fail", {"text": "luck"}), "ValueError", "ValueError: no luck"),
        (Action("add", {"a": 2}), "bad_arguments", "TypeError: missing a required argument: 'b'"),
        (Action("multiply"), "unknown_tool", "There is no tool 'multiply'; the tools are: add, fail."),
    ):
        assert env.step(action) == (text, 0.0, False, {"action_error": text, "tool_error": kind})
    assert env.step(Action("say", {"text": "It is 5."}))[1:3] == (1.0, True)
    assert env.step(Action("say", {"text": "It is 4."}))[1:3] == (0.0, True)
    with pytest.raises(UserError, match="undescribed cannot be described as a tool"):
        ToolEnvironment([f"{TOOLS}:undescribed"], OPTIONS["reward"])
    with pytest.raises(UserError, match="add has the name of another tool, 'add'"):
        ToolEnvironment([f"{TOOLS}:add"] * 2, OPTIONS["reward"])
    with pytest.raises(UserError, match="say has the name of the action of a plain answer"):
        ToolEnvironment([f"{TOOLS}:say"], OPTIONS["reward"])
    with pytest.raises(UserError, match="a text as its question; found prompt"):
        env.reset({"prompt": "x"}, 0)


def test_results_of_every_kind_are_shown_or_named():
    env = ToolEnvironment([f"{TOOLS}:give", f"{TOOLS}:later"], OPTIONS["reward"])
    env.reset(TASK, 0)
    assert env.step(Action("later", {"text": "on"}))[0] == "later on"
    assert env.step(Action("give", {"kind": "date"}))[0] == '{"day": "2026-01-02"}'
    assert env.step(Action("give", {"kind": "numbers"}))[0] == '[[1, 2], {"half": 0.5}]'
    assert env.step(Action("give", {"kind": "table"}))[0] == "[[1.0, 0.0], [0.0, 1.0]]"
    long = env.step(Action("give", {"kind": "long"}))[0]
    assert len(long) == 20_000
    assert "a ... (29007 characters) ... b" in long
    assert long.endswith("the end")
    for kind, error, told in (
        ("generator", "TypeError", "the tool returned a generator"),
        ("object", "TypeError", "the tool returned a object"),
        ("keys", "TypeError", "keys must be str"),
        ("circle", "ValueError", "Circular reference"),
        ("exit", "SystemExit", "2"),
        ("floats", "MalformedError", "mode F"),
        ("album", "MalformedError", "65 images"),
    ):
        text, _, ended, info = env.step(Action("give", {"kind": kind}))
        assert (told in text, ended, info["tool_error"]) == (True, False, error)


def test_images_are_shown_or_named_to_a_model_that_cannot_see():
    env = ToolEnvironment([f"{TOOLS}:give"], OPTIONS["reward"])
    seen = as_observation(env.step(Action("give", {"kind": "pictures"}))[0])
    assert (seen.text, [image.shape for image in seen.images]) == ('a picture\n{"n": 1}', [(2, 3, 3)] * 2)
    env.show_images = False
    note = "[an image, which cannot be shown]"
    assert env.step(Action("give", {"kind": "pictures"}))[0] == f'a picture\n{{"n": 1}}\n{note}\n{note}'


def test_the_pool_passes_the_schemas_on():
    with EnvPool(EnvironmentConfig("mmrl.agents.environments.tools:ToolEnvironment", OPTIONS, workers=1)) as pool:
        assert pool.tools == ToolEnvironment(**OPTIONS).tools
        pool.reset({0: AgentTask("t", TASK)})
        assert pool.step({0: Action("add", {"a": 2, "b": 3})})[0].observation.text == "5"


@pytest.mark.parametrize("kind", ["qwen3_vl", "language"])
def test_the_template_describes_tools_and_results_have_their_role(kind, tiny_folders, language_model):
    plain = load_policy(ModelConfig(path=str(language_model if kind == "language" else tiny_folders[kind])))
    tools = ToolEnvironment(**OPTIONS).tools
    with pytest.raises(UserError, match="chat template does not show tools"):
        Writer(plain, ConversationConfig(tools=True), "", tools).begin(AgentTask("t"), Observation("2 + 3?"))
    asked = VlmTask("t", [{"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]}], tools=tools)
    with pytest.raises(UserError, match="chat template does not show tools"):
        plain.encode(asked)
    policy = with_tools(plain)
    assert "add(a,b)" in policy.encode(asked).text
    writer = Writer(policy, ConversationConfig(tools=True), "", tools)
    conversation = writer.begin(AgentTask("t"), Observation("2 + 3?"))
    assert "# Tools\nadd(a,b)\nfail(text)\n" in conversation.parts[0].prompt.text
    writer.answer(conversation, [7, policy.eos_ids[0]])
    result = Observation("5", results=(CallResult("add", "5", 0),))
    assert "<|im_start|>tool\n5<|im_end|>" in writer.follow(conversation, result).text
    writer.answer(conversation, [7, policy.eos_ids[0]])
    assert "<|im_start|>user\nunreadable" in writer.follow(conversation, Observation(), "unreadable").text


def test_tools_need_a_format_that_reads_calls_of_tools():
    for kind in (AgentConfig, AgentCloneConfig, DigirlConfig):
        config = kind(conversation=ConversationConfig(tools=True), actions=ActionConfig(format="json"))
        with pytest.raises(ValueError, match=r"actions\.format 'json' cannot read them; set actions\.format: native"):
            config.check_parts(1e-6)
        with pytest.raises(ValueError, match="cannot read"):
            config.validate()
        for format in ("tool_call", f"{TOOLS}:reward"):
            config.actions.format = format
            config.check_parts(1e-6)


@pytest.mark.slow
def test_several_calls_of_an_answer_are_all_shown(tmp_path, tiny_folders, monkeypatch, closing):
    def two_calls_then_words(self, text, cut=False, tools=()):
        turns.append(text)
        calls = (Action("add", {"a": 1, "b": 1}), Action("add", {"a": 20, "b": 2}))
        return ParsedAnswer(calls if len(turns) <= 2 else (Action("say", {"text": "5"}),))

    turns = []
    monkeypatch.setattr(ActionConfig, "parse", two_calls_then_words)
    config = AgentConfig(
        output_dir=str(tmp_path / "run"),
        model=ModelConfig(path=str(tiny_folders["qwen3_vl"])),
        environment=EnvironmentConfig("mmrl.agents.environments.tools:ToolEnvironment", OPTIONS, workers=2),
        data=TaskSetConfig(seeds=1, options=TASK),
        conversation=ConversationConfig(system="", tools=True),
        actions=ActionConfig(format="tool_call", max_actions=8),
        sampler=SamplerConfig(max_new_tokens=3),
        trainer=TrainerConfig(tasks_per_step=1, samples_per_task=2),
    )
    recipe = closing(AgentRecipe(config))
    with_tools(recipe.policy)
    episodes = recipe.run_groups(recipe.policy, recipe.train_tasks, Streams(0), Step())[0]
    for episode in episodes:
        assert (episode.ending, episode.total, episode.trajectory.turns) == ("terminated", 1.0, 2)
        assert (
            "<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\n22<|im_end|>" in episode.trajectory.inserts[0].prompt.text
        )
