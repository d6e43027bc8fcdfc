"""Train the model behind your own agent program, which talks to an OpenAI-compatible endpoint."""

import json
import tempfile
import urllib.request
from pathlib import Path

from mmrl import train
from mmrl.vlm.toy.digits import build_model


def chat(endpoint, messages):
    """As `OpenAI(**endpoint).chat.completions.create(...)`, without the package openai."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {endpoint['api_key']}"}
    request = urllib.request.Request(f"{endpoint['base_url']}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]


def write(task, endpoint):
    """The program: a function of a task and the endpoint that returns the reward of its episode."""
    messages = [{"role": "user", "content": "Write vowels."}]
    for _ in range(2):
        messages += [chat(endpoint, messages), {"role": "user", "content": "More."}]
    text = "".join(message["content"] for message in messages[1::2])
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


folder = Path(tempfile.mkdtemp(prefix="own-agent-program-"))
build_model(str(folder / "model"))

run = train(
    "grpo",
    model=folder / "model",
    env=write,
    data=5,  # seeds
    steps=15,
    tasks_per_step=4,
    samples_per_task=8,
    max_new_tokens=8,
    learning_rate=1e-2,
    output_dir=folder / "run",
)
first, last = run.metrics[0], run.metrics[-1]
print(f"mean reward in the first step: {first['reward/mean']:.2f}, in the last: {last['reward/mean']:.2f}")
