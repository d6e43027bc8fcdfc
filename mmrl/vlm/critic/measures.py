"""What an evaluation measures of a model as a critic, as `evaluation.self_critic` and `evaluation.revision` ask."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mmrl.training.loop.evaluation import Measure
from mmrl.vlm.critic.choice_measure import SelfCriticMeasure
from mmrl.vlm.critic.revision_measure import RevisionMeasure
from mmrl.vlm.evaluation import AnswerMeasure, VlmEvaluationConfig
from mmrl.vlm.models import load_policy
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.task import VlmTask


def check_critic_splits(evaluation: VlmEvaluationConfig, splits: Collection[str], rewards: Sequence[object]) -> None:
    """Refuse measures of splits that there are not, or that nothing can score; raises ValueError."""
    for key in ("self_critic", "revision"):
        part = getattr(evaluation, key)
        if part is None:
            continue
        if not rewards:
            raise ValueError(f"evaluation.{key} is set, but rewards is empty: answers could not be scored; add exact")
        if unknown := sorted(set(part.splits) - set(splits)):
            known = ", ".join(splits) or "none"
            raise ValueError(f"evaluation.{key}.splits names {', '.join(unknown)}; splits of eval_data: {known}")


def load_reasoner(evaluation: VlmEvaluationConfig) -> VlmPolicy | None:
    """The frozen model that answers and revises; None where it is the trained one, or nothing is revised."""
    revision = evaluation.revision
    return None if revision is None or revision.reasoner is None else load_policy(revision.reasoner)


def critic_measures(answers: AnswerMeasure, reasoner: VlmPolicy | None) -> list[Measure[VlmTask]]:
    """What is measured of a held-out split beside its answers."""
    found: list[Measure[VlmTask]] = []
    choosing, revising = answers.evaluation.self_critic, answers.evaluation.revision
    if choosing is not None and answers.split in (choosing.splits or [answers.split]):
        found.append(SelfCriticMeasure(answers, choosing))
    if revising is not None and answers.split in (revising.splits or [answers.split]):
        policy = answers.policy if reasoner is None else reasoner.to(answers.policy.device)
        found.append(RevisionMeasure(answers, revising, policy))
    return found
