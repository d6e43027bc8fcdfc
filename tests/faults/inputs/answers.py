"""Damaged answers of a model, a data column, a judge's server or a worker process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults.batches import Kind, Verdict, of_call
from tests.faults.damage import damage_bytes, damage_text, damage_tree, strange_value

__all__ = ["KINDS"]

COMPLETIONS = (
    "<think>3 4</think><answer>7</answer>",
    "<think>so</think>\\boxed{\\frac{1}{2}}",
    "The answer is (B).",
    "<answer>1,234.50 %</answer>",
    "<answer>A. seven</answer>",
    '<tool>{"x": 3}</tool> at (120, 45)',
    "<answer>$\\sqrt{2}$</answer>",
)
ANSWERS: tuple[Any, ...] = ("7", "B", "0.5", "1234.5", 7, 7.5, "\\frac{1}{2}", ["7", "seven"], "(3, 4)")
AGENT_ANSWERS = (
    '{"thoughts": "t", "action": {"name": "drag", "arguments": {"from": [1, 2.5], "to": [3, 4]}}}',
    "Thought: t\nAction: drag(start_box='(1,2)', end_box='(3,4)')\n\ntype(content='it\\'s')",
    "<think>t</think><action>click(point=[1, 2])</action>",
)
IN_PROCESS = ("format", "choice", "number", "exact", "overlong")


def _nothing(folder: Path) -> None:
    return None


def _text(rng: random.Random) -> str:
    text = damage_text(rng, rng.choice(COMPLETIONS))
    if rng.random() < 0.1:
        text = text * rng.choice((2, 100, 3000))
    return str(strange_value(rng)) if rng.random() < 0.1 else text


def _rewards(_: None, rng: random.Random, folder: Path) -> Verdict:
    """Every built-in reward of this process, with a damaged completion and a damaged answer column."""
    from mmrl.rewards import RewardConfig
    from mmrl.rewards.sum import RewardSum

    answer = rng.choice(ANSWERS)
    if rng.random() < 0.5:
        answer = damage_tree(rng, answer) if isinstance(answer, list) else strange_value(rng)
    options = {"overlong": {"max_tokens": 10, "buffer_tokens": 4}}
    configs = [RewardConfig(name=name, options=options.get(name, {})) for name in IN_PROCESS]
    rewards = RewardSum(configs)
    columns = {"answer": [answer, "7"], "completion_lengths": [5, 5]}
    return of_call(lambda: _check(rewards.score(["q", "q"], [_text(rng), COMPLETIONS[0]], columns)))


def _check(result: Any) -> None:
    """A damaged first row does not change the values of the valid second one."""
    numbers = [value for values in result.terms.values() for value in values] + result.total
    assert all(isinstance(value, float) for value in numbers), numbers
    assert result.terms["exact"][1] == 1.0, result
    assert result.terms["format"][1] == 1.0, result


def _maths(_: None, rng: random.Random, folder: Path) -> Verdict:
    """The reward that runs in a worker process."""
    from mmrl.rewards import RewardConfig
    from mmrl.rewards.sum import RewardSum

    rewards = RewardSum([RewardConfig(name="math", timeout_s=5)], workers=1)
    texts = [_text(rng) for _ in range(16)]
    columns = {"answer": [rng.choice(ANSWERS) for _ in texts], "completion_lengths": [5] * len(texts)}

    def score() -> None:
        try:
            assert len(rewards.score(["q"] * len(texts), texts, columns).total) == len(texts)
        finally:
            rewards.close()

    return of_call(score)


def _judge(_: None, rng: random.Random, folder: Path) -> Verdict:
    from diffusion.rewards.remote import read_score

    return of_call(lambda: read_score(damage_text(rng, "It is good.\nFinal Score: 4.5")), skips=(RuntimeError,))


def _messages(_: None, rng: random.Random, folder: Path) -> Verdict:
    """Bytes on the pipe between a pool and a worker."""
    from mmrl.workers import wire

    fields: Any = {"kind": "result", "id": 3, "values": [1.0, None, "x"]}
    fields = damage_tree(rng, fields) if rng.random() < 0.3 else fields
    try:
        data = wire.pack(fields, {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.uint8)})
    except (wire.WireError, TypeError):
        return Verdict("refused", "cannot be packed")
    prefix, header = data[: wire.PREFIX.size], data[wire.PREFIX.size :]
    if rng.random() < 0.5:
        text = damage_text(rng, header.decode(errors="replace")).encode(errors="replace")
        data = wire.PREFIX.pack(wire.MARK, wire.VERSION, len(text), 0) + text
    else:
        data = damage_bytes(rng, prefix + header, head=wire.PREFIX.size)
    return of_call(lambda: list(wire.MessageDecoder().feed(data)), skips=(wire.WireError,))


def _actions(_: None, rng: random.Random, folder: Path) -> Verdict:
    """Texts that an agent may write instead of an action, and damaged actions."""
    from mmrl.agents.environments.environment import FORMATS, PARSE_ERRORS, parse_answer
    from mmrl.workers.wire import encode

    format = rng.choice(list(FORMATS))
    text = damage_text(rng, rng.choice((FORMATS[format].example, *AGENT_ANSWERS)))
    text = text * rng.choice((2, 100, 3000)) if rng.random() < 0.1 else text

    def parse() -> None:
        found = parse_answer(text, format, strict=rng.random() < 0.5, max_actions=3)
        assert (found.error in PARSE_ERRORS) != bool(found.actions), found
        encode([[action.name, dict(action.arguments)] for action in found.actions])

    return of_call(parse)


def _captions(_: None, rng: random.Random, folder: Path) -> Verdict:
    """Captions and their data columns as the image rewards read them."""
    from diffusion.rewards.image_rewards import load_image_rewards

    names = ("shapes_geneval", "caption_colour", "caption_position", "jpeg_incompressibility")
    metadata: Any = {"tag": "counting", "include": [{"class": "circle", "count": 2, "color": "red"}]}
    caption = damage_text(rng, "two red circles left of a blue square")
    columns = {"metadata": [damage_tree(rng, json.loads(json.dumps(metadata)))]}
    image = np.random.RandomState(0).randint(0, 256, (1, 32, 32, 3), np.uint8)

    def score() -> None:
        from mmrl.rewards import RewardConfig
        from mmrl.rewards.sum import RewardSum

        functions = load_image_rewards(names)
        rewards = RewardSum([RewardConfig(name=name) for name in names], functions=functions)
        assert len(rewards.score([caption], list(image), columns).total) == 1

    return of_call(score)


KINDS = (
    Kind("answers", _nothing, _rewards, share=6),
    Kind("answers to math", _nothing, _maths, share=0.1, limit_s=90),
    Kind("answers of a judge", _nothing, _judge, share=1),
    Kind("actions of agents", _nothing, _actions, share=2),
    Kind("captions", _nothing, _captions, share=1.5),
    Kind("messages of workers", _nothing, _messages, share=4),
)
