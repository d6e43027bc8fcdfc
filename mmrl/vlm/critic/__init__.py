"""Models that judge answers: LLaVA-Critic-R1 (which of two is better), Critic-V (which details are wrong) and others.

Builders of their data, rewards and inference by name; importing the package loads none of them.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "mmrl.vlm.critic.critiques": (
        "build_false_answers",
        "build_pairs",
        "critique_score",
        "f1_reward",
        "insert_errors",
        "jaccard_reward",
    ),
    "mmrl.vlm.critic.measures": ("CriticEvaluationConfig",),
    "mmrl.vlm.critic.questions": ("build_questions",),
    "mmrl.vlm.critic.revision": ("PolicyCritic", "Revision", "RevisionConfig", "revise"),
    "mmrl.vlm.critic.self_critic": ("Choice", "SelfCriticConfig", "best_of_n"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
