"""OpenEnv servers: actions by their schema, sessions that are full, lost or slow."""

import base64
import contextlib
import importlib.util
import io
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrl.agents.agent_recipe import check_environment
from mmrl.agents.environments import openenv
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.env_pool import EnvironmentConfig, EnvPool
from mmrl.agents.environments.environment import Action
from mmrl.agents.environments.openenv import OpenEnvEnvironment, ServerError
from mmrl.errors import RunError, UserError
from mmrl.hub.foreign import MalformedError
from tests.agents.kills import play_with_kills

pytest.importorskip("websockets", reason="websockets is not installed")
from websockets.exceptions import ConnectionClosed

from tests.agents.openenv_fake import FakeServer

FACTORY = "mmrl.agents.environments.openenv:OpenEnvEnvironment"
SERVER = Path(__file__).with_name("openenv_server.py")
REPEATED = {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}
real = pytest.mark.skipif(importlib.util.find_spec("openenv") is None, reason="openenv is not installed")


@pytest.fixture
def server():
    with FakeServer() as server:
        yield server


def guess(number, **more):
    return Action("act", {"number": number, **more})


def test_actions_and_observations_are_those_of_the_server(server, closing):
    env = closing(OpenEnvEnvironment(server.url))
    assert env.actions == {"act": "number (integer, the guess); note (string, optional)"}
    parameters = env.tools[0]["function"]["parameters"]
    assert (list(parameters["properties"]), parameters["required"]) == (["number", "note"], ["number"])
    assert env.reset({"top": 5}, 17) == {"text": "guess", "images": []}
    assert server.requests[-1]["data"] == {"seed": 17, "top": 5}
    assert env.step(guess(3)) == ({"text": "1", "images": []}, 0.0, False, {})
    assert env.step(guess(7)) == ({"text": "yes", "images": []}, 1.0, True, {})
    with pytest.raises(UserError, match="set the seed of the task instead"):
        env.reset({"seed": 3}, 1)


def test_the_values_that_an_entry_allows_are_described(closing):
    place = {"type": "object", "properties": {"row": {"type": "integer"}, "next": {"$ref": "#/$defs/Place"}}}
    schema = {
        "properties": {
            "way": {"enum": ["up", "down"], "type": "string"},
            "kind": {"const": "move", "type": "string"},
            "n": {"type": "integer", "minimum": 1, "maximum": 8, "default": 0},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}},
            "tag": {"anyOf": [{"$ref": "#/$defs/Tag"}, {"type": "null"}], "default": None},
            "place": {"$ref": "#/$defs/Place"},
            "any": {},
        },
        "$defs": {"Tag": {"enum": ["a", 1]}, "Place": place},
        "required": ["way"],
    }
    with FakeServer(schema=schema) as server:
        described = closing(OpenEnvEnvironment(server.url)).actions["act"].split("; ")
    assert described[:5] == [
        'way ("up" or "down")',
        'kind ("move", optional)',
        "n (integer, optional, at least 1, at most 8, default 0)",
        'tags (array of "a" or 1, optional)',
        'tag ("a" or 1 or null, optional)',
    ]
    assert described[5].startswith("place (object with row: integer, next: object with row: integer, next: ")
    assert described[6] == "any (any, optional)"


def test_another_action_is_refused_and_a_long_observation_shortened(server, closing):
    env = closing(OpenEnvEnvironment(server.url))
    env.reset({}, 7)
    text, _, _, info = env.step(Action("jump", {"number": 7}))
    assert (text, info["tool_error"]) == ("There is no tool 'jump'; the tools are: act.", "unknown_tool")
    server.shown = {"page": "y" * 250_000}
    seen = env.step(guess(3))[0]["text"]
    assert (len(seen), "characters) ..." in seen) == (200_000, True)


def test_a_proxy_that_has_no_server_yet_is_waited_for(server, closing):
    server.statuses = [503, 502]
    assert closing(OpenEnvEnvironment(server.url)).reset({}, 7)["text"] == "guess"
    for status in (401, 403, 404):
        server.statuses = [status]
        with pytest.raises(RunError, match=f"{server.url} refuses a session: .* {status}"):
            OpenEnvEnvironment(server.url)


def test_an_action_that_does_not_fit_is_the_agents_mistake_and_a_fault_is_the_servers(server, closing):
    env = closing(OpenEnvEnvironment(server.url))
    env.reset({}, 7)
    text, reward, ended, info = env.step(guess("x"))
    assert "rejected: number: Input should be a valid integer. Its entries: number (integer" in text
    assert (reward, ended, info) == (0.0, False, {"action_error": text, "tool_error": "bad_arguments"})
    with pytest.raises(ServerError, match="EXECUTION_ERROR: stuck"):
        env.step(guess(1, note="stuck"))
    with pytest.raises(MalformedError, match="ended an episode in which no step had a reward"):
        env.step(guess(7, note="silent"))


def test_a_response_may_be_the_only_text_that_an_action_needs(server, closing):
    with EnvPool(EnvironmentConfig(FACTORY, {"url": server.url}, workers=1, isolate=False)) as pool:
        with pytest.raises(UserError, match=r"actions.format is 'text', which cannot express"):
            check_environment(pool, "text", tools=False)
        check_environment(pool, "json", tools=True)
    named = closing(OpenEnvEnvironment(server.url, text_key="note"))
    named.reset({}, 7)
    named.step(Action("say", {"text": "hello"}))
    assert server.requests[-1]["data"] == {"note": "hello"}
    with pytest.raises(UserError, match="text_key: 'number' is no text of the server's actions; texts: note"):
        OpenEnvEnvironment(server.url, text_key="number")
    with FakeServer(schema=REPEATED) as echo:
        assert "text" in closing(OpenEnvEnvironment(echo.url)).fitting_formats()


def test_images_and_texts_are_chosen_by_their_keys(server, closing):
    content = io.BytesIO()
    Image.new("RGB", (3, 2)).save(content, "PNG")
    written = base64.b64encode(content.getvalue()).decode()
    server.shown = {
        "plain": written,
        "url": f"data:image/png;base64,{written}",
        "rows": np.zeros((2, 3, 3), int).tolist(),
    }
    keys = list(server.shown)
    env = closing(OpenEnvEnvironment(server.url, image_keys=keys))
    seen = env.reset({}, 7)
    assert seen["text"] == "guess"
    assert [np.asarray(image).shape for image in seen["images"]] == [(2, 3, 3)] * 3
    env.show_images = False
    assert env.reset({}, 7)["images"] == []
    server.shown = {"empty": None, "count": 3}
    for keys, text in ((None, "text: guess\ncount: 3"), (["count"], "count: 3"), ([], "")):
        with contextlib.closing(OpenEnvEnvironment(server.url, text_keys=keys)) as env:
            assert env.reset({}, 7)["text"] == text
    with pytest.raises(MalformedError, match="the observation has no 'screen'; it has: text, empty, count"):
        closing(OpenEnvEnvironment(server.url, image_keys=["screen"])).reset({}, 7)


def test_a_full_server_is_waited_for_and_then_named(server, closing, monkeypatch):
    server.sessions = 1
    first = OpenEnvEnvironment(server.url)
    threading.Timer(0.3, first.close).start()
    second = closing(OpenEnvEnvironment(server.url))
    assert second.reset({}, 7)["text"] == "guess", "the session of the first became free"
    monkeypatch.setattr(openenv, "SLOT_SECONDS", 0.1)
    with pytest.raises(RunError, match=r"no free session \(CAPACITY_REACHED: full\); the server's max_concurrent_envs"):
        OpenEnvEnvironment(server.url)


def test_a_session_that_is_lost_ends_its_episode_only(server, closing):
    env = closing(OpenEnvEnvironment(server.url))
    env.reset({}, 7)
    server.drop()
    with pytest.raises(ConnectionClosed):
        # the next session would be an environment that was never reset
        env.step(guess(1))
    assert env.reset({}, 7)["text"] == "guess"
    assert env.step(guess(1))[0]["text"] == "1"


def test_an_answer_that_does_not_come_is_a_failure(server, closing):
    env = closing(OpenEnvEnvironment(server.url, message_timeout_s=0.2))
    env.reset({}, 7)
    with pytest.raises(RunError, match=r"did not answer a step within 0\.2 s"):
        env.step(guess(1, note="hang"))


def test_addresses_of_something_else_are_named(chat_server, monkeypatch):
    monkeypatch.setattr(openenv, "SLOT_SECONDS", 0.1)
    with pytest.raises(UserError, match="expected one that begins with http:// or https://"):
        OpenEnvEnvironment("localhost:8000")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(RunError, match="is not running or has no free session"):
            OpenEnvEnvironment(f"http://127.0.0.1:{free.getsockname()[1]}")


@pytest.mark.slow
def test_no_episode_is_lost_or_blamed_on_the_policy_if_workers_are_killed(server):
    config = EnvironmentConfig(FACTORY, {"url": server.url}, workers=4)
    with EnvPool(config) as pool:
        moves = (guess(-1), guess(-1), guess(7))
        endings = play_with_kills(pool, {}, *moves, lambda row, *_: pool.processes()[row], kills=100, counted=1, seed=7)
        counts = pool.counts
    assert endings["failed"] == endings["killed"] == counts["crashed"] == counts["dropped"] >= 100
    assert endings["success"] + endings["failed"] == endings["played"]
    assert len(server.running) <= 4


@real
@pytest.mark.slow
def test_a_server_of_the_package(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SERVER), str(port), "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 100
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.1)
        url = f"http://127.0.0.1:{port}"
        with EnvPool(EnvironmentConfig(FACTORY, {"url": url, "text_keys": ["text"]}, workers=2), tmp_path) as pool:
            assert pool.actions == {"act": "number (integer); note (string, optional)"}
            monkeypatch.setattr(openenv, "SLOT_SECONDS", 0.1)
            with pytest.raises(RunError, match="CAPACITY_REACHED"):
                OpenEnvEnvironment(url)
            begun = pool.reset({row: AgentTask("t", {"top": 5}, 7 + row) for row in (0, 1)})
            assert begun[0].observation.text == "guess 0 to 4"
            assert pool.step({0: guess(1), 1: guess(1)})[1].observation.text == "1"
            assert "valid integer" in pool.step({0: guess("x")})[0].info["action_error"]
            found = pool.step({0: guess(2), 1: guess(1, note="stuck")})
            assert (found[0].reward, found[0].terminated) == (1.0, True)
            assert found[1].failure.reason == "ServerError: EXECUTION_ERROR: stuck"
            # killed between two moves: the episodes have no result
            pool.reset({row: AgentTask("t", {}, 7) for row in (0, 1)})
            process.kill()
            process.wait()
            assert {turn.failure.kind for turn in pool.step({0: guess(1), 1: guess(1)}).values()} == {"raised"}
    finally:
        process.kill()
        process.wait()
