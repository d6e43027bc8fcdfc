"""Built-in rewards by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RewardEntry:
    """One row of the table of rewards."""

    function: str
    """`module:function`, imported when it is used."""
    summary: str
    """When the reward is given, in one line."""
    citation: str
    """Source of the rule."""
    isolate: bool = False
    """Whether it must run in worker processes."""


REWARDS: dict[str, RewardEntry] = {
    "format": RewardEntry(
        "mmrl.rewards.answers:format_reward",
        "1 for a non-empty think block followed by an answer block or box, else 0",
        "EasyR1 examples/reward_function/r1v.py; View-R1 examples/scripts/reward_func.py",
    ),
    "choice": RewardEntry(
        "mmrl.rewards.answers:choice_reward",
        "1 for choosing the correct letter of a multiple-choice question, 0 for choosing several",
        "View-R1, arXiv 2506.21655",
    ),
    "number": RewardEntry(
        "mmrl.rewards.answers:number_reward",
        "1 for a single number in the answer that is correct within a tolerance",
        "relaxed numeric accuracy as in ChartQA, arXiv 2203.10244",
    ),
    "exact": RewardEntry(
        "mmrl.rewards.answers:exact_reward",
        "1 for an answer equal to the reference, ignoring case, spaces and closing punctuation",
        "normalised exact match as in SQuAD, arXiv 1606.05250",
    ),
    "math": RewardEntry(
        "mmrl.rewards.maths:maths_reward",
        "1 for an answer mathematically equal to the reference, compared by math-verify in worker processes",
        "huggingface/Math-Verify; PAPO, arXiv 2507.06448",
        isolate=True,
    ),
    "overlong": RewardEntry(
        "mmrl.rewards.answers:overlong_penalty",
        "from 0 down to -1 over the last buffer_tokens before max_tokens",
        "DAPO, arXiv 2503.14476, equation 13",
    ),
    "budget": RewardEntry(
        "mmrl.rewards.budget:budget_reward",
        "for a correct response, higher for fewer tokens and for lengths closer to the column `budget`; else 0",
        "HBPO, arXiv 2507.15844",
    ),
    "winrate": RewardEntry(
        "mmrl.rewards.budget:winrate_reward",
        "mean probability that your function `judge` prefers the response to the others for the same question",
        "Swamy et al., SPO, arXiv 2401.04056",
    ),
    "flawless": RewardEntry(
        "mmrl.vlm.critic.flaws:flawless_reward",
        "1 for a correct answer, 0 if a judge at `url` finds a wrong step in the response, -1 for an incorrect answer",
        "FAPO, arXiv 2510.22543",
        isolate=True,
    ),
    "rubric": RewardEntry(
        "mmrl.vlm.critic.flaws:rubric_reward",
        "score from 0 to 1 from a judge at `url` that uses the column `rubric`, which `recipe: meta_reward` fills",
        "Meta Policy Optimization, arXiv 2504.20157",
        isolate=True,
    ),
    "point": RewardEntry(
        "mmrl.gui.grounding.rewards:point_reward",
        "format plus accuracy of points on a screen: adaptive exploration, any or first; -1 for an invalid format",
        "AEPO (InfiGUI-G1), arXiv 2508.05731",
    ),
    "gui_step": RewardEntry(
        "mmrl.gui.grounding.step_rewards:gui_step_reward",
        "one step on a screen: action, click point or text, and format; presets gui_r1 and ui_r1",
        "GUI-R1, arXiv 2504.10458; UI-R1, arXiv 2503.21620",
    ),
}
