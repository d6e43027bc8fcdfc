"""SEED-GRPO with a judge of meanings: smaller updates if responses differ in meaning (arXiv 2505.12346).

`meaning.by` decides which answers of a question mean the same:

* `entailment`: a natural language inference model finds that each follows from the other, the question in front of both
  (Kuhn et al., arXiv 2302.09664; Farquhar et al., Nature 630, 2024). With `meaning.strict: false` it is enough that
  neither contradicts the other and not both are neutral.
* `embedding`: the cosine of their sentence embeddings is at least `meaning.threshold`.
* `exact`: equal strings, as in the objective `seed_grpo` alone.

An answer joins the first cluster whose first answer means the same. Texts are the final answers that rewards read, or
whole responses (`meaning.text: response`). The advantage `entropy_damped` turns clusters into entropies, and so may any
other block that reads answers.

Differences from jlko/semantic_uncertainty semantic_entropy.py: there a text that fits several clusters ends in the last
of them, here it stays in the first; both agree where meaning the same is transitive. Class names are read from the
model, where the code counts on those of DeBERTa's MNLI models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmrl.core.loss import Metric
from mmrl.core.payload import to_device
from mmrl.core.rollouts import ANSWER, Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from mmrl.hub.compat import LOADING_ERRORS, ensure_torchvision, quiet_transformers
from mmrl.rewards.answers import Chat, completion_text, normalise, read_answer
from mmrl.runs.export import foreign_model
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.data.task import VlmTask, question_text
from mmrl.vlm.vlm_config import VlmConfig
from mmrl.vlm.vlm_recipe import VlmRecipe

Same = Callable[[int, Sequence[int]], list[bool]]
"""Whether each of some texts means the same as one text; texts by number."""


@dataclass
class MeaningSettings:
    """Which responses to a question mean the same."""

    by: str = choice("entailment", ("entailment", "embedding", "exact"))
    """Judge of meanings."""
    model: str = ""
    """Folder or hub id of the judge: a model with a classification head for entailment (the papers use
    microsoft/deberta-v2-xlarge-mnli), an encoder for embedding."""
    text: str = rare(choice("answer", ("answer", "response")))
    """Texts to compare: final answers (if a response has one), or whole responses."""
    strict: bool = rare(True)
    """entailment: require entailment in both directions; otherwise require no contradiction and not both neutral."""
    with_question: bool = rare(True)
    """entailment: put the question in front of both texts."""
    threshold: float = bounded(0.9, at_least=-1, at_most=1)
    """embedding: minimum cosine similarity of texts that mean the same."""
    batch: int = rare(bounded(32, at_least=1))
    """Texts, or pairs of texts, per batch of the judge."""


@dataclass
class SemanticEntropyConfig(VlmConfig):
    """A SEED-GRPO run with a judge of meanings."""

    meaning: MeaningSettings = field(default_factory=MeaningSettings)
    """Judge of meanings."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="seed_grpo"))
    """Objective to optimise, with a block that reads responses."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        exact = self.meaning.by == "exact"
        if exact == bool(self.meaning.model):
            told = (
                "it is not used while meaning.by is exact" if exact else (f"meaning.by {self.meaning.by} needs a model")
            )
            raise ValueError(
                f"meaning.model is {self.meaning.model!r}, but {told}; set a folder or hub id, or use meaning.by: exact"
            )
        if "answers" not in make_objective(self.objective).needs:
            raise ValueError(
                f"no block of objective '{self.objective.preset}' reads responses, so meanings would have no effect; "
                "use objective.preset=seed_grpo, or recipe: vlm"
            )


def clusters(number: int, same: Same) -> list[int]:
    """Cluster of each of `number` texts: the cluster whose first text means the same, or a new one.

    Source: Kuhn et al., arXiv 2302.09664, algorithm 1.
    """
    found = [-1] * number
    for first in range(number):
        if found[first] >= 0:
            continue
        found[first] = max(found) + 1
        # the texts left over are compared with the first one of each cluster, never with each other
        others = [other for other in range(first + 1, number) if found[other] < 0]
        for other, equal in zip(others, same(first, others) if others else [], strict=True):
            found[other] = found[first] if equal else -1
    return found


class Judge:
    """A frozen transformers model that decides which texts mean the same.

    Args:
        settings: What it is, and how it is asked.

    Raises:
        UserError: The model cannot be loaded, or is none for this.
    """

    auto = "AutoModel"
    what = "an encoder"

    def __init__(self, settings: MeaningSettings) -> None:
        ensure_torchvision()
        import transformers

        self.settings = settings
        name = foreign_model(settings.model, self.what)
        try:
            with quiet_transformers():
                loader: Any = getattr(transformers, self.auto)
                loaded = loader.from_pretrained(name, output_loading_info=True, trust_remote_code=False)
                self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except LOADING_ERRORS as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"meaning.model: no {self.auto} can be loaded from {settings.model!r}: {type(error).__name__}: {reason}"
            ) from error
        self.model, report = loaded
        # the first token's layer is not read of encoders; a head without weights would be drawn at random
        if missing := sorted(key for key in report["missing_keys"] if not key.startswith("pooler.")):
            raise UserError(
                f"meaning.model {settings.model!r} lacks weights such as {missing[0]}; it is not an {self.auto}"
            )
        self.tokenizer.split_special_tokens = True  # an answer that spells a control token means characters
        self.model.eval().requires_grad_(False)

    def same(self, texts: Sequence[str], question: str) -> Same:
        """The same-meaning relation between texts that answer one question."""
        raise NotImplementedError

    def read(self, *texts: Sequence[str]) -> Any:
        """Outputs for texts, or for pairs of texts, and their attention mask; texts that are too long are truncated."""
        # RoBERTa counts positions from 2
        positions = getattr(self.model.config, "max_position_embeddings", 514) - 2
        limit = min(self.tokenizer.model_max_length, positions)
        given = self.tokenizer(*map(list, texts), return_tensors="pt", padding=True, truncation=True, max_length=limit)
        with torch.no_grad():
            return self.model(**given.to(self.model.device)), given["attention_mask"]

    def batches(self, number: int) -> list[range]:
        """Indices of texts to read in one batch."""
        size = self.settings.batch
        return [range(start, min(start + size, number)) for start in range(0, number, size)]


class Embeddings(Judge):
    """Texts mean the same if their embeddings are near: means of the last states over tokens, normalised."""

    def same(self, texts: Sequence[str], question: str) -> Same:
        """See `Judge`; every text is read once."""
        rows = torch.cat([self.embedded([texts[i] for i in part]) for part in self.batches(len(texts))])
        near = rows @ rows.T >= self.settings.threshold
        return lambda first, others: [bool(near[first, other]) for other in others]

    def embedded(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors (n, H) float32 on the CPU."""
        output, mask = self.read(texts)
        states, weight = output.last_hidden_state.float(), mask[..., None].float()
        mean = (states * weight).sum(1) / weight.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(mean, dim=-1).cpu()


class Entailment(Judge):
    """Texts mean the same if each follows from the other."""

    auto = "AutoModelForSequenceClassification"
    what = "a model for natural language inference"

    def __init__(self, settings: MeaningSettings) -> None:
        super().__init__(settings)
        classes = self.model.config.id2label
        names = {str(name).casefold(): int(number) for number, name in classes.items()}
        # binary models name the rest not_entailment
        self.entails = next((number for name, number in names.items() if name.startswith("entail")), None)
        self.contradicts = next((number for name, number in names.items() if name.startswith("contradict")), None)
        if self.entails is None or (self.contradicts is None and not settings.strict):
            wanted = "entailment" if settings.strict else "entailment and contradiction"
            raise UserError(
                f"meaning.model {settings.model!r} classifies into {', '.join(map(str, classes.values()))}, but "
                f"{wanted} must be among the classes in its config.json; use a model for language inference"
            )

    def same(self, texts: Sequence[str], question: str) -> Same:
        """See `Judge`."""
        asked = [f"{question} {text}" if self.settings.with_question else text for text in texts]
        return lambda first, others: self._equivalent(asked[first], [asked[other] for other in others])

    def _equivalent(self, first: str, others: Sequence[str]) -> list[bool]:
        there, back = self.verdicts([first] * len(others), others), self.verdicts(others, [first] * len(others))
        pairs = list(zip(there, back, strict=True))
        if self.settings.strict:
            return [one == other == self.entails for one, other in pairs]
        # not both neutral: without a contradiction, one of them is entailed
        return [self.contradicts not in pair and self.entails in pair for pair in pairs]

    def verdicts(self, premises: Sequence[str], hypotheses: Sequence[str]) -> list[int]:
        """Most likely class of each pair."""
        parts = [([premises[i] for i in part], [hypotheses[i] for i in part]) for part in self.batches(len(premises))]
        return [int(found) for part in parts for found in self.read(*part)[0].logits.argmax(-1).tolist()]


JUDGES: dict[str, type[Judge]] = {"entailment": Entailment, "embedding": Embeddings}


class SemanticEntropyRecipe(VlmRecipe):
    """SEED-GRPO, or another objective that reads responses, with a judge of meanings."""

    config: SemanticEntropyConfig

    def __init__(self, config: SemanticEntropyConfig) -> None:
        settings = config.meaning
        # before the policy, whose loading takes longer
        self.judge = JUDGES[settings.by](settings) if settings.by in JUDGES else None
        super().__init__(config)

    def _block_inputs(
        self, rollouts: Rollouts, tasks: Sequence[VlmTask], prompts: Sequence[Chat], tokens: Sequence[list[int]]
    ) -> dict[str, Tensor]:
        """Answer numbers (B,) are those of clusters of meanings."""
        found = super()._block_inputs(rollouts, tasks, prompts, tokens)
        texts = VlmPayload.of(rollouts).texts
        if self.config.meaning.text == "answer":
            texts = [
                completion_text(text) if (own := read_answer(text, prompt, require_block=False)) is None else own
                for text, prompt in zip(texts, prompts, strict=True)
            ]
        members: dict[int, list[int]] = {}
        for row, group in enumerate(rollouts.host.group.tolist()):
            members.setdefault(group, []).append(row)
        numbers = torch.zeros(len(texts), dtype=torch.int64)
        for rows in members.values():
            numbers[rows] = torch.tensor(self.meanings([texts[row] for row in rows], question_text(tasks[rows[0]])))
        self.noted["meaning/clusters"] = Metric(
            torch.stack([numbers, rollouts.host.group]).unique(dim=1).shape[1], len(members)
        )
        return found | {ANSWER: to_device(numbers, rollouts.mask.device)}

    def meanings(self, texts: Sequence[str], question: str) -> list[int]:
        """Cluster of each text; the judge sees equal strings as one text."""
        first: dict[str, str] = {}
        for text in texts:
            first.setdefault(normalise(text), text)
        cluster = list(range(len(first)))
        if self.judge is not None and len(first) > 1:
            self.judge.model.to(self.policy.device)
            cluster = clusters(len(first), self.judge.same(list(first.values()), question))
        of_text = dict(zip(first, cluster, strict=True))
        return [of_text[normalise(text)] for text in texts]

    def describe(self) -> str:
        """The objective's formula, and which responses mean the same."""
        own = self.config.meaning
        how = {
            "entailment": f"each {own.text} follows from the other by {own.model}",
            "embedding": f"the cosine of each {own.text}'s embeddings by {own.model} is at least {own.threshold:g}",
            "exact": "their strings are equal",
        }
        return f"{super().describe()}\nwhere answers are the same if {how[own.by]}"
