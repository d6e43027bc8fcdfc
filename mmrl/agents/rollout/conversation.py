"""The prompts of an episode: system turn, first observation with the instruction, and an observation per turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from PIL import Image

from mmrl.agents.environments.actions import FORMATS, ActionConfig
from mmrl.agents.environments.environment import Observation
from mmrl.agents.environments.tasks import AgentTask
from mmrl.fields import bounded
from mmrl.vlm.data.prompt import Prompt, join_prompts
from mmrl.vlm.data.task import ImageSource, VlmTask
from mmrl.vlm.engine.policy import VlmPolicy
from mmrl.vlm.engine.rows import text_prompt

OMITTED = "[picture left out]"
"""Replaces an image that has left the history."""


@dataclass
class ConversationConfig:
    """How an episode is written as a conversation."""

    system: str = "You act in an environment. {manual}\nActions:\n{actions}"
    """System turn; {manual} is replaced by the manual of the action format and {actions} by the environment's actions,
    a line each. Empty = no system turn."""
    history_images: int = bounded(0, at_least=0)
    """Images that are kept: older ones are omitted, their text stays. 0 = all. A window costs time: once it is full,
    every turn is read from the beginning."""

    def system_text(self, actions: ActionConfig, known: Mapping[str, str]) -> str:
        """The system turn."""
        listed = "\n".join(f"- {name}: {about}" if about else f"- {name}" for name, about in known.items())
        return self.system.replace("{manual}", FORMATS[actions.format].manual).replace("{actions}", listed).strip()


@dataclass
class _Part:
    """An observation or an answer."""

    prompt: Prompt
    """Its tokens, with all images."""
    observation: Observation | None = None
    """None for an answer."""
    note: str = ""
    """Text before the observation's text."""
    answered: bool = True


@dataclass
class Conversation:
    """One episode's conversation so far."""

    task: AgentTask
    parts: list[_Part] = field(default_factory=list)
    num_omitted: int = 0
    """Images that the window has omitted so far."""

    @property
    def num_images(self) -> int:
        """Images shown so far."""
        return sum(len(part.observation.images) for part in self.parts if part.observation is not None)


class Writer:
    """Writes conversations for a policy; an observation that occurs in several of them is encoded once."""

    def __init__(self, policy: VlmPolicy, config: ConversationConfig, system: str) -> None:
        self._policy, self._config, self._system = policy, config, system
        self._turns: dict[tuple[object, ...], Prompt] = {}

    def begin(self, task: AgentTask, observation: Observation, prompt: Prompt | None = None) -> Conversation:
        """Start a conversation."""
        first = self._first(task, observation, observation.images) if prompt is None else prompt
        return Conversation(task, [_Part(first, observation)])

    def answer(self, conversation: Conversation, ids: list[int]) -> None:
        """Append the tokens of an answer."""
        conversation.parts.append(_Part(text_prompt(torch.tensor(ids, dtype=torch.int64))))

    def follow(self, conversation: Conversation, observation: Observation, note: str = "") -> Prompt:
        """Append the next observation."""
        last = conversation.parts[-1].prompt.input_ids
        answered = bool(last[-1] == self._policy.processor.tokenizer.eos_token_id)
        prompt = self._turn(conversation.task, observation, observation.images, note, answered)
        conversation.parts.append(_Part(prompt, observation, note, answered))
        return prompt

    def cut(self, conversation: Conversation) -> Prompt | None:
        """The conversation as one prompt without its oldest images; None where the window omits no further one."""
        keep = self._config.history_images
        excess = conversation.num_images - keep
        if not keep or excess <= conversation.num_omitted:
            return None
        conversation.num_omitted = excess
        return join_prompts([self._without(conversation, number, excess) for number in range(len(conversation.parts))])

    def _without(self, conversation: Conversation, number: int, excess: int) -> Prompt:
        """A part without those of its images that are among the first `excess` of the conversation."""
        part = conversation.parts[number]
        if part.observation is None:
            return part.prompt
        seen = sum(len(p.observation.images) for p in conversation.parts[:number] if p.observation is not None)
        gone = min(max(excess - seen, 0), len(part.observation.images))
        if not gone:
            return part.prompt
        kept = part.observation.images[gone:]
        if number == 0:
            return self._first(conversation.task, part.observation, kept)
        return self._turn(conversation.task, part.observation, kept, part.note, part.answered)

    def _first(self, task: AgentTask, observation: Observation, images: tuple) -> Prompt:
        messages = [{"role": "system", "content": self._system}] if self._system else []
        turn = _user_turn(observation, len(images), task.instruction)
        return self._policy.encode(VlmTask(task.id, [*messages, turn], _as_sources(images)))

    def _turn(self, task: AgentTask, observation: Observation, images: tuple, note: str, answered: bool) -> Prompt:
        seen = tuple((image.shape, blake2b(image.tobytes()).digest()) for image in images)
        key = (note, observation.text, len(observation.images), answered, seen)
        if key not in self._turns:  # one object, so that its images pass the vision tower once, too
            turn = VlmTask(task.id, [_user_turn(observation, len(images), note)], _as_sources(images))
            self._turns[key] = self._policy.encode_turn(turn, answered=answered)
        return self._turns[key]


def _user_turn(observation: Observation, kept: int, front: str) -> dict[str, object]:
    text = "\n".join(filter(None, (front, observation.text)))
    omitted = [{"type": "text", "text": f"{OMITTED}\n"}] * (len(observation.images) - kept)
    images = [{"type": "image"}] * kept
    return {"role": "user", "content": [*omitted, *images, {"type": "text", "text": text}]}


def _as_sources(images: tuple) -> list[ImageSource]:
    return [Image.fromarray(image) for image in images]
