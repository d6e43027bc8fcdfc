"""TAPO: DAPO on responses that search and run programs along the way, written in tags.

    recipe: tapo
    environment: {kwargs: {search: "my_search.py:search"}}
    data: {file: questions.jsonl}     # rows with task: {question: ..., answer: ..., source: gsm8k}

In each turn the policy thinks in <think> and ends with a <search>, a <code> or an <answer>. The environment answers the
first two in <response>, at most `calls` times; the next turn must give the answer. What the environment writes is part
of the row and not trained, and the length penalty counts the policy's own tokens alone. The reward is that of the whole
text: -1 if it is not made of these tags with an answer at its end, else how right the answer is (`score_answer`).

The preset has the constants of the public code: clip 0.2/0.28, dual clip 10, token mean, no KL, and groups whose
rewards are all equal are sampled again. Add the reward `overlong` with your limits (a buffer of 1,024 tokens there).

Differences from the public code: programs run in the sandbox, and no search engine is part of the suite; a group is
sampled again where its rewards are equal, in the code where its answers are all right or all wrong (they differ for
`nq`, whose answers may be partly right).

Source: Wu et al., TAPO, arXiv 2510.07038; Goer17/TAPO recipe/tapo and verl/utils/reward_score/tool_dapo.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.agents.agent_recipe import AgentConfig, AgentRewardConfig
from mmrl.agents.environments.env_pool import EnvironmentConfig
from mmrl.agents.environments.environment import Action, ActionConfig
from mmrl.agents.rollout.conversation import ConversationConfig
from mmrl.agents.rollout.episodes import EpisodeConfig
from mmrl.errors import UserError
from mmrl.rewards.reward_loading import load_function
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.settings import TrainerConfig
from mmrl.vlm.inference.inference_sampler import EngineSamplerConfig
from mmrl.workers.run_code import run_code

TOOLS = ("search", "code")
ENDS = tuple(f"</{tag}>" for tag in (*TOOLS, "answer"))
RIGHT = 0.9
"""Minimum score (exclusive) for an answer to count as a success."""
MANUAL = """Think inside <think>...</think>. If you lack a fact, ask for it with <search>...</search>; to compute, write
Python that prints its result in <code>...</code>. What they return comes in <response>...</response>. Then give the
answer alone in <answer>...</answer>."""
BLOCK = re.compile(r"\s*<(\w+)>(.*?)</\1>\s*", re.DOTALL)
NUMBERS = {
    word: str(number)
    for number, word in enumerate(
        ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"), 1
    )
}
SOURCES = ("default", "gsm8k", "dapo_math", "deep_math", "nq", "calculator", "complex")


def final_answer(text: str, tools: Sequence[str] = TOOLS) -> str | None:
    """The answer of a text that is made of the tags and ends with one; None if it is not."""
    place, found, tag = 0, None, ""
    text = text.strip()
    while place < len(text):
        block = BLOCK.search(text, place)
        if block is None or (tag := block[1].lower()) not in ("think", "response", "answer", *tools):
            return None
        found = block[2].strip() if tag == "answer" else found
        place = block.end()
    return found if tag == "answer" else None


def score_answer(answer: str, truth: str, source: str = "default") -> float:
    """Score of an answer by the rule of its source.

    Args:
        answer: of the policy; the code's last 100 characters count.
        truth: the right one.
        source: nq: 1 if it holds the truth, else 1 - d where d < 0.5 is the edit distance over the longer length;
            calculator: a number within 1e-3; complex: a number within 5%; others, also aime...: equal texts.

    Returns:
        A score in 0..1.

    Raises:
        ValueError: the source is unknown, or the truth of a number is none.
    """
    answer, truth = _normalised(answer[-100:]), _normalised(truth)
    if source == "nq":
        apart = edit_distance(answer, truth) / max(len(answer), len(truth), 1)
        return 1.0 if truth in answer else 1.0 - apart if apart < 0.5 else 0.0
    if source in ("calculator", "complex"):
        if source == "complex":  # units and words around the number are left out
            answer = "".join(letter for letter in answer if letter.isdigit() or letter in "+-.")
        expected, given = _number(truth), _number(answer)
        if expected is None:
            raise ValueError(f"the correct answer {truth!r} of source {source} is not a number")
        if given is None:
            return 0.0
        gap = abs(given - expected)
        return float(gap < 1e-3 if source == "calculator" else gap < 0.05 * abs(expected))
    if source not in SOURCES and not source.startswith("aime"):
        raise ValueError(f"the source {source!r} is unknown; use {', '.join(SOURCES)} or aime...")
    return float(answer == truth)


def score_text(text: str, truth: str | Sequence[str], source: str = "default", tools: Sequence[str] = TOOLS) -> float:
    """Reward of a whole text: -1 if it is not well-formed, else the best score over the correct answers."""
    answer = final_answer(text, tools)
    if answer is None:
        return -1.0
    return max(score_answer(answer, each, source) for each in ([truth] if isinstance(truth, str) else truth))


def edit_distance(one: str, other: str) -> int:
    """Fewest insertions, deletions and replacements of characters that turn one text into the other (Levenshtein)."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


class TaggedTools:
    """One question per episode, with tools in tags; see the module.

    Args:
        search: `module:function` that returns a text for a query; empty: there is no search.
        code: whether programs can be run.
        calls: turns with tools or without any tag; the turn after them must answer.
        timeout_s: seconds of a program.
        result_chars: most characters of a result that the policy is shown.

    Raises:
        UserError: the search cannot be loaded, or there is no tool.
    """

    def __init__(
        self, search: str = "", code: bool = True, calls: int = 4, timeout_s: float = 5.0, result_chars: int = 4000
    ) -> None:
        self._search = load_function(search, what="search") if search else None
        self._tools = tuple(name for name, there in (("search", self._search), ("code", code)) if there)
        if not self._tools:
            raise UserError("neither search nor code is set; set at least one of them")
        self._tag = re.compile(rf"<({'|'.join((*self._tools, 'answer'))})>(.*?)</\1>", re.DOTALL)
        self._calls, self._timeout_s, self._chars = calls, timeout_s, result_chars

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Ask the question."""
        if not {"question", "answer"} <= task.keys():
            raise UserError(f"a task needs a question and an answer; found {', '.join(task) or 'nothing'}")
        self._task, self._text, self._turns = task, "", 0
        return str(task["question"])

    def step(self, action: Action) -> tuple[str, float, bool, dict[str, Any]]:
        """Answer the first tag of a turn: with the result of a tool, or with the reward."""
        said = str(action.arguments.get("text", ""))
        self._text, self._turns = self._text + said, self._turns + 1
        found = self._tag.search(said)
        name = found[1] if found else ""
        if name == "answer" or self._turns > self._calls:
            truth, source = self._task["answer"], str(self._task.get("source", "default"))
            truths = [str(each) for each in truth] if isinstance(truth, list | tuple) else str(truth)
            reward = score_text(self._text, truths, source, self._tools)
            return "", reward, True, {"success": reward > RIGHT}
        if found is None:
            tags = ", ".join(f"<{name}>" for name in (*self._tools, "answer"))
            return f"This turn has no effect, as it ends with none of {tags}.", 0.0, False, {}
        result = self._called(name, found[2].strip())[: self._chars] or "Nothing was found."
        response = f"\n\n<response>{result}</response>\n\n"
        self._text += response
        return response.strip(), 0.0, False, {}

    def close(self) -> None:
        """Do nothing: there is nothing to free."""

    def _called(self, name: str, content: str) -> str:
        """Result of a tool; an error of the search is text for the policy."""
        if name == "code":
            result = run_code(content, timeout_s=self._timeout_s)
            return (result.stdout if result.succeeded else result.stopped or result.stderr[-500:]).strip()
        assert self._search is not None
        try:
            return str(self._search(content)).strip()
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def tapo_preset() -> AgentConfig:
    """Hyperparameters of the public code (recipe/tapo/examples/tapo_single_node.sh), with the tags' text format."""
    return AgentConfig(
        environment=EnvironmentConfig(factory=f"{__name__}:TaggedTools"),
        objective=ObjectiveConfig(preset="tapo"),
        conversation=ConversationConfig(system=MANUAL),
        actions=ActionConfig(format="text"),
        # an answer that is cut is no text of the form
        reward=AgentRewardConfig(format=1.0),
        episode=EpisodeConfig(max_turns=5, success_above=RIGHT),
        sampler=EngineSamplerConfig(max_new_tokens=1024, stop=list(ENDS)),
        trainer=TrainerConfig(
            tasks_per_step=64, samples_per_task=4, minibatches_per_step=4, learning_rate=1e-6, warmup_steps=10
        ),
    )


def _normalised(text: str) -> str:
    text = text.strip().lower()
    text = NUMBERS.get(text, text)
    return text.replace(",", "") if text.replace(",", "").isdigit() else text


def _number(text: str) -> complex | None:
    try:
        return complex(text)
    except ValueError:
        return None
