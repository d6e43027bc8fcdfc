"""The endpoint and its environment without a model: what a program sends and gets, keys and faults."""

import base64
import importlib.util
import io
import json
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmrl.agents.environments import programs
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.chat_endpoint import ChatEndpoint, RequestError, read_request
from mmrl.agents.environments.env_pool import EnvironmentConfig, EnvPool
from mmrl.agents.environments.environment import Action, MalformedError, as_observation
from mmrl.agents.environments.environment_service import open_environment
from mmrl.agents.environments.programs import REPLY, ProgramEnvironment, count_calls, is_program
from mmrl.errors import UserError
from mmrl.workers.loading import LoadError
from tests.agents.my_agents import ADD, adder, at_once, faulty, lasting, official, repeating, send, user

AGENTS = f"{Path(__file__).with_name('my_agents.py')}"


def said(content="", calls=(), finish="stop", reasoning=""):
    listed = [{"id": f"c{n}", "name": name, "arguments": text} for n, (name, text) in enumerate(calls)]
    counts = {"prompt_tokens": 5, "completion_tokens": 2}
    return Action(
        REPLY, {"content": content, "tool_calls": listed, "finish_reason": finish, "reasoning": reasoning, **counts}
    )


def echo(observation):
    return said(json.loads(observation.request)["messages"][-1]["content"][0]["text"])


@pytest.fixture
def endpoint(closing):
    return closing(ChatEndpoint())


def address(endpoint, key=None):
    return {"base_url": endpoint.base_url, "api_key": key or endpoint.session.key}


def in_background(*given, **named):
    """The reply to a request, once it is there."""
    found = []
    thread = threading.Thread(target=lambda: found.append(send(*given, **named)))
    thread.start()
    return lambda: (thread.join(), found[0])[1]


def test_a_program_with_a_tool_runs_for_two_turns(closing):
    env = closing(ProgramEnvironment(adder))
    first = env.reset({"question": "2 + 3?", "answer": 5}, seed=0)
    assert first.text == "Add.\n2 + 3?"
    request = json.loads(first.request)
    assert [turn["role"] for turn in request["messages"]] == ["system", "user"]
    # without `strict`
    function = {key: ADD["function"][key] for key in ("name", "description", "parameters")}
    assert request["tools"] == [{"type": "function", "function": function}]
    assert request["settings"] == {"tool_choice": "auto", "max_tokens": 4096}
    calls = [("add", '{"a": 2, "b": 3}'), ("other", "{}")]
    assert count_calls(said(calls=calls)) == 2
    second, reward, ended, _ = env.step(said("Hm.", calls, "tool_calls"))
    assert (second.text, reward, ended) == ("5\nno such tool", 0.0, False)
    _, _, own, result, other = json.loads(second.request)["messages"]
    # as templates take it: arguments as a mapping, results with the names of their calls
    assert own["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert own["content"] == [{"type": "text", "text": "Hm."}]
    assert [(turn["name"], turn["tool_call_id"]) for turn in (result, other)] == [("add", "c0"), ("other", "c1")]
    _, reward, ended, info = env.step(said("It is 5."))
    assert (reward, ended, info) == (1.0, True, {"success": True, "finish": "stop"})


def test_a_reply_has_what_clients_read(endpoint):
    body = {"model": "m", "messages": [user("Hi.")]}
    waiting = in_background(address(endpoint), body)
    exchange = endpoint.session.events.get()
    exchange.answer(said("Hello.", [("f", '{"a": 1}')], "tool_calls", "So.").arguments)
    status, found = waiting()
    found = json.loads(found)
    assert (status, found["object"], found["model"]) == (200, "chat.completion", "m")
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    call = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": "Hello.", "reasoning_content": "So.", "tool_calls": [call]}
    assert found["choices"] == [{"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}]
    # streamed: the same in chunks
    waiting = in_background(address(endpoint), body | {"stream": True, "stream_options": {"include_usage": True}})
    endpoint.session.events.get().answer(exchange.reply)
    lines = [line.removeprefix("data: ") for line in waiting()[1].decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    whole, end, usage = map(json.loads, lines)
    assert whole["choices"][0]["delta"] == message | {"tool_calls": [{"index": 0, **call}]}
    assert end["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    assert usage["usage"] == found["usage"]
    # many clients ask for the models first
    with urllib.request.urlopen(f"{endpoint.base_url}/models") as listed:
        assert [model["id"] for model in json.load(listed)["data"]] == ["policy"]


def test_requests_without_the_key_of_the_episode_are_refused(endpoint):
    body, old = {"messages": [user("Hi.")]}, endpoint.session.key
    waiting = in_background(address(endpoint), body)
    exchange = endpoint.session.events.get()
    endpoint.begin()
    # the request of the episode before
    status, text = waiting()
    assert (status, json.loads(text)["error"]["message"]) == (403, "the episode is over")
    assert exchange.reply is None
    for key in (old, "wrong"):
        status, text = send(address(endpoint, key), body)
        assert status == 401
        assert json.loads(text)["error"]["type"] == "authentication_error"
    assert send(address(endpoint), body, "/completions")[0] == 404
    status, text = send(address(endpoint), b"{")
    assert status == 400
    assert "is not JSON" in text.decode()
    assert endpoint.session.events.empty()


def test_a_request_that_is_sent_again_is_answered_once(endpoint):
    body = {"messages": [user("Hi.")]}
    first = in_background(address(endpoint), body)
    exchange = endpoint.session.events.get()
    again = in_background(address(endpoint), body, **{"X-Stainless-Retry-Count": "1"})
    exchange.answer(said("Hello.").arguments)
    assert {json.loads(text)["choices"][0]["message"]["content"] for _, text in (first(), again())} == {"Hello."}
    assert endpoint.session.events.empty()


def test_images_come_as_data_urls():
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    shown = {
        "role": "user",
        "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": url}}],
    }
    found = read_request({"messages": [shown]})
    assert np.array_equal(found.images[0], pixels)
    text, other = json.loads(found.request)["messages"][0]["content"]
    assert (text["text"], other["type"]) == ("See", "image")
    shown["content"][1]["image_url"]["url"] = "https://example.org/a.png"
    with pytest.raises(RequestError, match="only data URLs"):
        read_request({"messages": [shown]})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "no list of messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "one of the roles system, developer"),
        ({"messages": [user("x"), {"role": "assistant", "content": "y"}]}, "the last message is from the assistant"),
        ({"messages": [user([{"type": "input_audio"}])]}, "the type 'input_audio'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "one of the roles system, developer"),
        ({"messages": [user("x")], "stream_options": ["x"]}, r"stream_options is \['x'\]; expected an object"),
        ({"messages": [user("x")], "tools": [{"name": "f"}]}, "a tool is no function with a name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}, user("x")]}, "has no function with a name"),
    ],
)
def test_a_request_that_cannot_be_read_says_why(body, message):
    with pytest.raises(RequestError, match=message):
        read_request(body)


def test_a_body_that_json_or_the_api_does_not_allow_gets_status_400(endpoint):
    for body in (
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"1" * 5000 + b"}",
        {"messages": [{"role": "assistant", "tool_calls": 5}, user("x")]},
    ):
        status, text = send(address(endpoint), body)
        assert (status, "the request is not JSON of the API" in text.decode()) == (400, True)


def test_many_requests_at_the_same_time_keep_their_connections(endpoint):
    body, count = {"messages": [user("Hi.")]}, 100
    waiting = [in_background(address(endpoint), body) for _ in range(count)]
    for _ in range(count):
        endpoint.session.events.get(timeout=30).answer(said("Hello.").arguments)
    assert [status for status, _ in (reply() for reply in waiting)] == [200] * count
    assert endpoint._server.request_queue_size >= count


def test_long_texts_and_halves_of_characters_in_a_request_are_read():
    call = {"function": {"name": "add", "arguments": r'{"a": "\ud83d"}'}}
    found = read_request(
        {"messages": [{"role": "assistant", "tool_calls": [call]}, user("word " * 60_000), user("a \udcff")]}
    )
    assert len(found.text) == 200_000
    assert as_observation(found).request == found.request
    own, long, cut = json.loads(found.request)["messages"]
    assert own["tool_calls"][0]["function"]["arguments"] == {"a": "\ufffd"}
    assert (len(long["content"][0]["text"]), cut["content"][0]["text"]) == (300_000, "a \ufffd")


def test_faults_of_a_program_are_no_rewards(closing):
    for fault, kind, message in (
        ("raises", ValueError, "the tool broke"),
        ("nothing", MalformedError, "returned None; expected a reward"),
        ("no reward", MalformedError, "expected a reward, or a dict with one"),
    ):
        env = closing(ProgramEnvironment(faulty, {"fault": fault}))
        env.reset({}, 0)
        with pytest.raises(kind, match=message):
            env.step(said("x"))
    with pytest.raises(MalformedError, match=r"returned 1\.0 without a request to the model"):
        closing(ProgramEnvironment(faulty, {"fault": "never asks"})).reset({}, 0)
    with pytest.raises(OSError, match="no sandbox"):
        closing(ProgramEnvironment(faulty, {"fault": "raises at once"})).reset({}, 0)


def test_a_program_is_released_when_its_episode_is_over(closing, tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "ENDING_SECONDS", 0.5)
    env = closing(ProgramEnvironment(lasting, {"folder": str(tmp_path)}))
    for seed in (1, 2):
        env.reset({}, seed)
        env.step(said("x"))
    # the second reset has waited for the end of the first program
    assert "status 403" in (tmp_path / "1").read_text()
    stubborn = closing(ProgramEnvironment(lasting, {"folder": str(tmp_path), "stubborn": True}))
    stubborn.reset({}, 3)
    with pytest.raises(RuntimeError, match="goes on"):
        stubborn.reset({}, 4)


def test_requests_at_the_same_time_are_answered_one_after_another(closing):
    env = closing(ProgramEnvironment(at_once))
    seen = env.reset({}, 0)
    seen, _, _, _ = env.step(echo(seen))
    assert env.step(echo(seen))[1:3] == (1.0, True)


def test_equal_requests_at_the_same_time_end_with_the_episode(endpoint):
    waiting = [in_background(address(endpoint), {"messages": [user("Hi.")]}) for _ in range(3)]
    exchanges = [endpoint.session.events.get() for _ in waiting]
    endpoint.session.end()
    assert all(exchange.answered.is_set() for exchange in exchanges)
    assert [reply()[0] for reply in waiting] == [403] * 3


def test_episodes_in_parallel_do_not_mix(tmp_path):
    config = EnvironmentConfig(f"{AGENTS}:repeating", {"turns": 3, "delay": 0.02}, workers=2)
    with EnvPool(config, tmp_path) as pool:
        assert pool.chat
        for start in (1, 3):
            turns = pool.reset({row: AgentTask(f"t/{row}", seed=start + row) for row in (0, 1)})
            while pool.live:
                turns |= pool.step({row: echo(turns[row].observation) for row in pool.live})
            assert [(turns[row].reward, turns[row].failure) for row in (0, 1)] == [(start, None), (start + 1, None)]


@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="openai is not installed")
@pytest.mark.parametrize("stream", [False, True])
def test_the_client_of_openai_understands_the_replies(closing, stream):
    env = closing(ProgramEnvironment(official, {"stream": stream}))
    env.reset({}, 0)
    seen, reward, ended, _ = env.step(said("Hm.", [("add", '{"a": 2, "b": 3}')], "tool_calls"))
    if not stream:
        assert [turn["role"] for turn in json.loads(seen.request)["messages"]] == ["user", "assistant", "tool"]
        _, reward, ended, _ = env.step(echo(seen))
    assert (reward, ended) == (1.0, True)


def test_a_function_of_task_and_endpoint_is_a_program():
    assert is_program(repeating)
    assert not is_program(open_environment)
    with pytest.raises(LoadError, match=r"environment\.kwargs for .*'speed'"):
        open_environment(f"{AGENTS}:repeating", {"speed": 1}, {})
    with pytest.raises(LoadError, match="is an agent program"):
        open_environment(f"{AGENTS}:repeating", {}, {"action_names": []})
    with pytest.raises(UserError, match=r"environment\.isolate: true"):
        EnvPool(EnvironmentConfig(f"{AGENTS}:repeating", isolate=False))
