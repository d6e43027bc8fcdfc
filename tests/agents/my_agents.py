"""Agent programs for tests, which talk to the endpoint with the standard library."""

import base64
import io
import json
import threading
import time
import urllib.error
import urllib.request

import pytest
from PIL import Image

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        "strict": True,
    },
}


def send(endpoint, body, path="/chat/completions", **headers):
    """The status and the body of the reply to a request."""
    headers = {"Authorization": f"Bearer {endpoint['api_key']}"} | headers
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(endpoint["base_url"] + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ask(endpoint, messages, **body):
    """The first choice of the reply."""
    status, found = send(endpoint, {"model": "policy", "messages": messages, **body})
    if status != 200:
        raise RuntimeError(f"status {status}: {found.decode()}")
    return json.loads(found)["choices"][0]


def user(text):
    return {"role": "user", "content": text}


def adder(task, endpoint, turns=4):
    """Answers with a tool; the reward is whether the last answer has the sum."""
    messages = [{"role": "system", "content": "Add."}, user(task.get("question", f"What is 2 + {task['seed']}?"))]
    for _ in range(turns):
        choice = ask(endpoint, messages, tools=[ADD], tool_choice="auto", max_tokens=4096)
        message = choice["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            result = str(arguments["a"] + arguments["b"]) if call["function"]["name"] == "add" else "no such tool"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    right = str(task.get("answer", 2 + task["seed"])) in (message["content"] or "")
    return {"reward": float(right), "success": right, "finish": choice["finish_reason"]}


def branching(task, endpoint):
    """Asks a helper in between, continues twice, asks another question from the beginning, and rewrites its history."""
    first = [user(f"Count from {task['seed']}.")]
    second = [*first, ask(endpoint, first)["message"], user("Go on.")]
    ask(endpoint, [{"role": "system", "content": "You help."}, user("What comes next?")])
    third = [*second, ask(endpoint, second)["message"], user("And on.")]
    ask(endpoint, third)
    ask(endpoint, [*second[:2], user("Count backwards.")])
    ask(endpoint, [*first, {"role": "assistant", "content": "(left out)"}, user("Where were you?")])
    return 0.25


def looking(task, endpoint):
    """Shows an image, then another behind the answer, then only the second with the question."""
    first = [user([{"type": "text", "text": "Look."}, image(40)])]
    second = [*first, ask(endpoint, first)["message"], user([image(200)])]
    ask(endpoint, second)
    ask(endpoint, [user([image(200), {"type": "text", "text": "Look."}])])
    return 1.0


def image(level):
    """A grey image as a part of a message."""
    file = io.BytesIO()
    Image.new("RGB", (56, 56), (level, level, level)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def repeating(task, endpoint, turns=2, delay=0.0):
    """Checks that replies belong to the messages that it sent; needs `echo`, which repeats the last message."""
    messages = []
    for turn in range(turns):
        time.sleep(delay * task["seed"])
        messages.append(user(f"{task['seed']}-{turn}"))
        message = ask(endpoint, messages)["message"]
        assert message["content"] == messages[-1]["content"], (message, messages)
        messages.append(message)
    return float(task["seed"])


async def at_once(task, endpoint):
    """Two requests at the same time."""
    import asyncio

    texts = ["left", "right"]
    found = await asyncio.gather(*(asyncio.to_thread(ask, endpoint, [user(text)]) for text in texts))
    return float([choice["message"]["content"] for choice in found] == texts)


async def official(task, endpoint, stream=False):
    """The client of OpenAI, with a tool, its key and address from the variables."""
    from openai import AsyncOpenAI, AuthenticationError, OpenAI

    with pytest.raises(AuthenticationError, match="not the key of the running episode"):
        OpenAI(**endpoint | {"api_key": "x"}).chat.completions.create(model="p", messages=[user("a")])
    client, messages = AsyncOpenAI(), [user("2 + 3?")]
    if stream:
        chunks = await client.chat.completions.create(model="p", messages=messages, tools=[ADD], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in chunks]
        (call,) = deltas[0].tool_calls
        return float(call.function.name == "add" and deltas[0].content == "Hm.")
    reply = await client.chat.completions.create(model="p", messages=messages, tools=[ADD], max_tokens=64)
    message = reply.choices[0].message
    (call,) = message.tool_calls
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": str(sum(json.loads(call.function.arguments).values())),
    }
    reply = await client.chat.completions.create(model="p", messages=[*messages, message, result], tools=[ADD])
    return float(reply.choices[0].message.content == "5" and reply.usage.total_tokens == 7)


def faulty(task, endpoint, fault="raises"):
    """Fails in the way of `fault`, after a first turn unless it says otherwise; sometimes: for odd seeds."""
    if fault == "never asks":
        return 1.0
    if fault == "raises at once":
        raise OSError("no sandbox")
    ask(endpoint, [user("Hello.")])
    if fault == "raises" or (fault == "sometimes" and task["seed"] % 2):
        raise ValueError("the tool broke")
    if fault == "hot":
        ask(endpoint, [user("Hello.")], temperature=0.7)
    return {"nothing": None, "no reward": {"success": True}, "nan": float("nan"), "sometimes": 1.0}[fault]


def lasting(task, endpoint, folder, stubborn=False):
    """Asks again and again, and writes how that ended."""
    try:
        while True:
            ask(endpoint, [user("More.")])
    except RuntimeError as error:
        with open(f"{folder}/{task['seed']}", "w") as file:
            file.write(str(error))
        if stubborn:
            threading.Event().wait(600)
        raise


def walker(task, endpoint):
    """Pays for the share of vowels, for runs that learn."""
    text = ""
    for _ in range(2):
        text += ask(endpoint, [user(f"Say a vowel. {text}")])["message"]["content"] or ""
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)
