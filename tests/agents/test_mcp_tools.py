"""Tools of MCP servers: read from the servers, called in a session of the episode, their errors as text."""

import base64
import importlib.util
import io
import re
import socket
import subprocess
import sys
import time
import traceback
from collections import Counter
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image

from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe
from mmrl.agents.environments.agent_tasks import AgentTask, TaskSetConfig
from mmrl.agents.environments.env_pool import EnvironmentConfig, EnvPool
from mmrl.agents.environments.environment import Action, ActionConfig, ParsedAnswer
from mmrl.agents.environments.mcp_tools import McpEnvironment
from mmrl.agents.monitor import count_episodes, episode_metrics
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.agents.rollout.episodes import Episode
from mmrl.errors import RunError, UserError
from mmrl.runs.tracking import describe_metric
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.settings import TrainerConfig
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.model.model_config import ModelConfig
from tests.agents.kills import play_with_kills
from tests.agents.test_tools import with_tools

REWARD = f"{Path(__file__).with_name('my_tools.py')}:reward"
SERVER = {"command": sys.executable, "args": [str(Path(__file__).with_name("mcp_server.py"))]}
TASK = {"question": "Count to 3.", "answer": 3}
FACTORY = "mmrl.agents.environments.mcp_tools:McpEnvironment"
real = pytest.mark.skipif(importlib.util.find_spec("mcp") is None, reason="mcp is not installed")


class FakeError(Exception):
    """As `mcp.MCPError`."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class FakeClient:
    """As `mcp.Client`, in this process; `target` is its list of tools, with what each call gives."""

    tools = (("add", "Add."), ("look", None))
    opened = 0
    alive = True
    result = None

    def __init__(self, target, mode, read_timeout_seconds):
        self.target, self.mode = target, mode

    async def __aenter__(self):
        if self.mode == "legacy" and getattr(self.target, "command", "") == "modern":
            raise FakeError(-32022, "unsupported protocol version")
        if getattr(self.target, "command", "") == "broken":
            raise BaseExceptionGroup("tasks", [FakeError(-32000, "Connection closed")])
        FakeClient.opened += 1
        return self

    async def __aexit__(self, *exception):
        FakeClient.opened -= 1
        if not self.alive:
            raise ConnectionError("gone")

    async def list_tools(self, cursor):
        tools = self.tools[:1] if cursor is None else self.tools[1:]
        found = [
            SimpleNamespace(name=name, description=about, input_schema={"type": "object"}) for name, about in tools
        ]
        return SimpleNamespace(tools=found, next_cursor="2" if cursor is None else None)

    async def call_tool(self, name, arguments, timeout_s):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def send_ping(self):
        if not self.alive:
            raise FakeError(-32000, "Connection closed")
        if self.mode == "auto":
            raise FakeError(-32601, "Method not found")


@pytest.fixture
def fake(monkeypatch):
    """The package mcp with `FakeClient`."""
    pytest.importorskip("anyio", reason="anyio is not installed")
    module = ModuleType("mcp")
    module.__spec__ = ModuleSpec("mcp", None)
    module.Client, module.StdioServerParameters = FakeClient, lambda **options: SimpleNamespace(**options)
    monkeypatch.setitem(sys.modules, "mcp", module)
    for name, value in (("opened", 0), ("alive", True), ("result", None), ("tools", FakeClient.tools)):
        monkeypatch.setattr(FakeClient, name, value)
    return FakeClient


def result(*content, is_error=False, structured=None):
    return SimpleNamespace(content=list(content), is_error=is_error, structured_content=structured)


def text(words):
    return SimpleNamespace(type="text", text=words)


def test_tools_are_those_that_the_servers_list(fake, closing):
    env = closing(McpEnvironment({"one": SERVER}, REWARD))
    assert env.actions == {"add": "Add.", "look": ""}
    described = {"name": "add", "description": "Add.", "parameters": {"type": "object"}}
    assert env.tools[0] == {"type": "function", "function": described}
    chosen = closing(
        McpEnvironment({"one": {**SERVER, "tools": ["add"]}, "two": {**SERVER, "tools": ["look"]}}, REWARD)
    )
    assert list(chosen.actions) == ["add", "look"]


@pytest.mark.parametrize(
    ("servers", "said"),
    [
        (
            {"one": SERVER, "two": SERVER},
            r"servers\.two: 'add' is also a tool of one; list the tools to use in",
        ),
        ({"one": {**SERVER, "tools": ["fly"]}}, r"servers\.one\.tools: there is no 'fly'; the server has: add, look"),
        ({"one": {"type": "http"}}, r"servers\.one has no `command` and no `url`; found type"),
        (
            {"one": {"url": "http://x", "args": []}},
            r"'args' is no entry of a server with `url`; its entries: url,",
        ),
        ({"one": {**SERVER, "args": "a b"}}, r"servers\.one\.args is 'a b'; expected a list of texts"),
        ({"one": {**SERVER, "env": {"A": 1}}}, r"servers\.one\.env is \{'A': 1\}; expected a mapping of texts"),
    ],
)
def test_servers_that_are_described_wrongly_are_named(fake, servers, said):
    with pytest.raises(UserError, match=said):
        McpEnvironment(servers, REWARD)
    assert fake.opened == 0, "what was started has ended"


def test_each_episode_has_a_session_and_ends_with_an_answer(fake, closing):
    env = closing(McpEnvironment({"one": SERVER}, REWARD))
    first = env._clients["one"]
    assert env.reset(TASK, 0) == "Count to 3."
    assert env._clients["one"] is first, "the session in which the tools were listed is not wasted"
    assert env.step(Action("say", {"text": "It is 3."}))[1:3] == (1.0, True)
    env.reset(TASK, 0)
    assert env._clients["one"] is not first
    assert fake.opened == 1
    fake.alive = False
    env.reset(TASK, 0)
    with pytest.raises(UserError, match="a text as its question; found prompt"):
        env.reset({"prompt": "x"}, 0)


def test_later_protocols_are_spoken_and_servers_that_do_not_start_are_named(fake, closing):
    assert closing(McpEnvironment({"one": {"command": "modern"}}, REWARD))._clients["one"].mode == "auto"
    with pytest.raises(RunError, match="the MCP server one does not start: Connection closed") as caught:
        McpEnvironment({"one": {"command": "broken"}}, REWARD)
    assert "Connection closed" not in "".join(traceback.format_exception(caught.value)).partition("RunError")[0]


def test_results_are_texts_and_images_or_notes(fake, closing):
    content = io.BytesIO()
    Image.new("RGB", (3, 2)).save(content, "PNG")
    image = SimpleNamespace(type="image", data=base64.b64encode(content.getvalue()).decode(), mime_type="image/png")
    resource = SimpleNamespace(type="resource", resource=SimpleNamespace(text="inside"))
    link = SimpleNamespace(type="resource_link", name="log", uri="file:///log")
    audio = SimpleNamespace(type="audio", data="", mime_type="audio/wav")
    env = closing(McpEnvironment({"one": SERVER}, REWARD))
    env.reset(TASK, 0)
    fake.result = result(text("5"), image, resource, link, audio)
    seen, reward, ended, info = env.step(Action("look"))
    assert seen["text"] == "5\ninside\n[log: file:///log]\n[audio of type audio/wav, which cannot be shown]"
    assert [shown.size for shown in seen["images"]] == [(3, 2)]
    assert (reward, ended, info) == (0.0, False, {})
    env.show_images = False
    seen = env.step(Action("look"))[0]
    assert "[image of type image/png, which cannot be shown]" in seen["text"]
    assert seen["images"] == []
    fake.result = result(structured={"n": 5})
    assert env.step(Action("add"))[0]["text"] == '{"n": 5}'
    broken = SimpleNamespace(type="image", data="!!", mime_type="image/png")
    env.show_images, fake.result = True, result(broken)
    assert env.step(Action("add"))[0]["text"].startswith("[an image that cannot be read: ")


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (result(text("no luck"), is_error=True), "tool_error"),
        (FakeError(-32602, "no luck"), "bad_arguments"),
        (FakeError(-32001, "no luck"), "timeout"),
        (FakeError(-32603, "no luck"), "server_error"),
        (RuntimeError("no luck"), "server_error"),
    ],
)
def test_errors_of_a_living_server_are_texts_with_a_kind(fake, closing, given, kind):
    env = closing(McpEnvironment({"one": SERVER}, REWARD))
    env.reset(TASK, 0)
    fake.result = given
    assert env.step(Action("add")) == ("no luck", 0.0, False, {"action_error": "no luck", "tool_error": kind})
    assert env.step(Action("fly"))[3]["tool_error"] == "unknown_tool"


def test_an_error_without_a_text_is_one_all_the_same(fake, closing):
    env = closing(McpEnvironment({"one": SERVER}, REWARD))
    env.reset(TASK, 0)
    fake.result = result(is_error=True)
    text, _, _, info = env.step(Action("add"))
    assert text == info["action_error"] == "add failed without a message"


def test_a_server_that_is_gone_is_no_mistake_of_the_agent(fake, closing):
    env = closing(McpEnvironment({"one": SERVER}, REWARD))
    env.reset(TASK, 0)
    fake.result, fake.alive = FakeError(-32001, "timed out"), False
    with pytest.raises(RunError, match="the MCP server one was lost in a call of add: timed out"):
        env.step(Action("add"))


def test_tool_errors_are_counted_by_kind():
    seen = Counter()
    lost = Episode(AgentTask("b"), ending="failed", tool_errors={"timeout": 9})
    done = Episode(AgentTask("a"), ending="terminated", tool_errors={"timeout": 1, "tool_error": 2}, answers=[""] * 4)
    count_episodes(seen, [done, lost])
    metrics = episode_metrics(seen)
    assert metrics["episode/tool_errors/timeout"] == 0.25
    assert metrics["episode/tool_errors/tool_error"] == 0.5
    assert describe_metric("episode/tool_errors/timeout") is not None


@pytest.mark.skipif(importlib.util.find_spec("mcp") is not None, reason="mcp is installed")
def test_a_missing_package_is_named():
    with pytest.raises(UserError, match=re.escape("pip install 'mmrl-suite[mcp]'")):
        McpEnvironment({"one": SERVER}, REWARD)


@real
@pytest.mark.slow
def test_a_server_of_this_machine(tmp_path):
    config = EnvironmentConfig(
        FACTORY, {"servers": {"one": SERVER}, "reward": REWARD, "call_timeout_s": 3.0}, workers=2
    )
    with EnvPool(config, tmp_path) as pool:
        assert pool.actions["add"] == "Add to the count."
        schema = next(tool["function"] for tool in pool.tools if tool["function"]["name"] == "fail")["parameters"]
        assert schema["required"] == ["text"]
        for _ in range(2):
            pool.reset({row: AgentTask("t", TASK) for row in (0, 1)})
            assert pool.step({0: Action("add", {"by": 2}), 1: Action("add")})[0].observation.text == "2"
            assert pool.step({0: Action("add"), 1: Action("add")})[1].observation.text == "2"
        (image,) = pool.step({0: Action("picture")})[0].observation.images
        assert image.shape == (2, 3, 3)
        pool.show_images = False
        pool.reset({0: AgentTask("t", TASK)})
        assert pool.step({0: Action("picture")})[0].observation.images == ()
        found = {}
        for name, arguments in (("fail", {"text": "x"}), ("add", {"by": "x"}), ("sleep", {"seconds": 4}), ("fly", {})):
            found[name] = pool.step({0: Action(name, arguments)})[0].info["tool_error"]
        assert found == {"fail": "tool_error", "add": "tool_error", "sleep": "timeout", "fly": "unknown_tool"}
        # one that hangs, and says nothing within two limits of a call
        turn = pool.step({0: Action("stop")})[0]
        assert turn.failure.kind == "raised"
        assert "the MCP server one was lost in a call of stop" in turn.failure.reason
        assert pool.step({1: Action("say", {"text": "3"})})[1].reward == 1.0


@real
@pytest.mark.slow
def test_a_server_that_runs_elsewhere(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"x-key": "abc"}}
    config = EnvironmentConfig(
        FACTORY, {"servers": {"one": server}, "reward": REWARD, "call_timeout_s": 3.0}, workers=1
    )
    with pytest.raises(RunError, match="the MCP server one does not start"):
        EnvPool(config)
    command = [SERVER["command"], *SERVER["args"], str(port)]

    def serve():
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as attempt:
                if attempt.connect_ex(("127.0.0.1", port)) == 0:
                    return process
            time.sleep(0.1)
        raise AssertionError("the server does not start")

    process = serve()
    try:
        with EnvPool(config, tmp_path) as pool:
            pool.reset({0: AgentTask("t", TASK)})
            assert pool.step({0: Action("add")})[0].observation.text == "1"
            # a server that was started again has lost the state of the episode
            process.kill()
            process.wait()
            process = serve()
            assert "the MCP server one was lost" in pool.step({0: Action("add")})[0].failure.reason
            assert pool.reset({0: AgentTask("t", TASK)})[0].failure is None
            assert pool.step({0: Action("say", {"text": "3"})})[0].reward == 1.0
    finally:
        process.kill()
        process.wait()


@real
@pytest.mark.slow
def test_an_agent_that_cannot_see_gets_notes_and_its_errors_are_counted(tmp_path, language_model, monkeypatch, closing):
    moves = [Action("picture"), Action("fail", {"text": "x"}), Action("say", {"text": "3"})]

    def one_move_a_turn(self, text, cut=False, tools=()):
        turns.append(text)
        return ParsedAnswer((moves[min((len(turns) - 1) // 2, 2)],))

    turns = []
    monkeypatch.setattr(ActionConfig, "parse", one_move_a_turn)
    config = AgentConfig(
        output_dir=str(tmp_path / "run"),
        model=ModelConfig(path=str(language_model)),
        environment=EnvironmentConfig(FACTORY, {"servers": {"one": SERVER}, "reward": REWARD}, workers=2),
        data=TaskSetConfig(seeds=1, options=TASK),
        conversation=ConversationConfig(system="", tools=True),
        actions=ActionConfig(format="tool_call"),
        sampler=SamplerConfig(max_new_tokens=3),
        trainer=TrainerConfig(tasks_per_step=1, samples_per_task=2),
    )
    recipe = closing(AgentRecipe(config))
    with_tools(recipe.policy)
    for episode in recipe.run_groups(recipe.policy, recipe.train_tasks, Streams(0), Step())[0]:
        assert (episode.ending, episode.total, episode.tool_errors) == ("terminated", 1.0, {"tool_error": 1})
        assert "[image of type image/png, which cannot be shown]" in episode.trajectory.inserts[0].prompt.text


@real
@pytest.mark.slow
def test_no_episode_is_lost_or_blamed_on_the_policy_if_servers_and_workers_are_killed():
    def victim(row, turn, generator):
        # the server, or the worker that started it
        return int(generator.choice(turn.observation.text.split()))

    config = EnvironmentConfig(FACTORY, {"servers": {"one": SERVER}, "reward": REWARD}, workers=4)
    with EnvPool(config) as pool:
        last = Action("say", {"text": "3"})
        endings = play_with_kills(pool, TASK, Action("processes"), Action("add"), last, victim, kills=100)
        counts = pool.counts
    assert endings["failed"] == endings["killed"] >= 100
    assert endings["success"] + endings["failed"] == endings["played"]
    assert counts["dropped"] == endings["failed"]
    assert counts["raised"] > 20
    assert counts["crashed"] > 20
