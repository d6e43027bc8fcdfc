"""Actions written in each format, as a model should write them; the readers return exactly these."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.agents.action_readers import SAY, NamedAction
from mmrl.agents.literals import NAME


def write_object(thought: str, actions: Sequence[NamedAction]) -> str:
    """A JSON object with thoughts and action; an action without arguments is its name."""
    plain = [{"name": name, "arguments": dict(arguments)} if arguments else name for name, arguments in actions]
    body = {"thoughts": thought, "action": plain[0] if len(plain) == 1 else plain}
    return json.dumps(body if thought else {"action": body["action"]}, ensure_ascii=False, allow_nan=False)


def write_calls(thought: str, actions: Sequence[NamedAction]) -> str:
    """`Thought: ...` and `Action: name(key=value)`, with a blank line between several."""
    calls = "\n\n".join(_written_call(name, arguments) for name, arguments in actions)
    return f"Thought: {thought}\nAction: {calls}" if thought else f"Action: {calls}"


def write_tags(thought: str, actions: Sequence[NamedAction]) -> str:
    """The thought, and each action between tags; one with arguments as a call."""
    tags = [f"<action>{_written_call(name, arguments) if arguments else name}</action>" for name, arguments in actions]
    return " ".join([thought, *tags] if thought else tags)


def write_text(thought: str, actions: Sequence[NamedAction]) -> str:
    """The text of the one action `say`, without a thought, which would be read as part of it."""
    if thought or [(name, [*arguments]) for name, arguments in actions] != [(SAY, ["text"])]:
        raise ValueError(f"the format text can only say one action {SAY} with the argument text")
    return str(actions[0][1]["text"])


def _written_call(name: str, arguments: Mapping[str, Any]) -> str:
    for word in (name, *arguments):
        if not re.fullmatch(NAME, word):
            raise ValueError(f"{word!r} cannot be written in a call; a name has letters, digits and underscores")
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
