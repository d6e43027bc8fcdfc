"""Evaluation of a model as a critic: `evaluation.self_critic` and `evaluation.revision`, with their measures."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mmrl.fields import rare
from mmrl.training.evaluation import Measure
from mmrl.vlm.critic.revision import RevisionConfig, RevisionMeasure
from mmrl.vlm.critic.self_critic import SelfCriticConfig, SelfCriticMeasure
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.vlm_config import AnswerScoring, ExtraMeasures, VlmEvaluationConfig
from mmrl.vlm.vlm_evaluation import AnswerMeasure


@dataclass
class CriticEvaluationConfig(VlmEvaluationConfig):
    """Evaluation of responses (greedy and sampled, overall and by data column) and of the model as a critic."""

    self_critic: SelfCriticConfig | None = rare(None)
    """Best of n: the model chooses among its own answers, compared with majority vote, a single answer and the best
    available one. Default: not measured."""
    revision: RevisionConfig | None = rare(None)
    """The model criticises answers, which are then revised one or more times. Default: not measured."""

    def check_extra_measures(self, splits: Collection[str], rewards: Sequence[object]) -> None:
        """See `VlmEvaluationConfig`."""
        for key, part in (("self_critic", self.self_critic), ("revision", self.revision)):
            if part is None:
                continue
            if not rewards:
                raise ValueError(
                    f"evaluation.{key} is set, but rewards is empty, so answers cannot be scored; add a reward such "
                    "as exact"
                )
            if unknown := sorted(set(part.splits) - set(splits)):
                known = ", ".join(splits) or "none"
                raise ValueError(
                    f"evaluation.{key}.splits contains unknown splits: {', '.join(unknown)}; splits of eval_data: "
                    f"{known}"
                )

    def extra_measures(self) -> ExtraMeasures:
        """See `VlmEvaluationConfig`; loads the frozen reasoner if there is one."""
        choosing, revising = self.self_critic, self.revision
        frozen = None if revising is None or revising.reasoner is None else load_policy(revising.reasoner)

        def measures(answers: AnswerMeasure) -> list[Measure[VlmTask]]:
            found: list[Measure[VlmTask]] = []
            if choosing is not None and answers.split in (choosing.splits or [answers.split]):
                found.append(SelfCriticMeasure(answers, choosing))
            if revising is not None and answers.split in (revising.splits or [answers.split]):
                reasoner = answers.policy if frozen is None else frozen.to(answers.policy.device)
                found.append(RevisionMeasure(answers, revising, reasoner))
            return found

        return measures


@dataclass
class ScoringEvaluationConfig(AnswerScoring, CriticEvaluationConfig):
    """Evaluation of responses in runs that do not sample or score any during training."""
