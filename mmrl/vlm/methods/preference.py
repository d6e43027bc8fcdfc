"""Preference optimisation of a vision-language model on given pairs: DPO and related losses.

    L = mean over pairs [l(h)] + coef * NLL of the preferred answers,
    h = (logp_w - logp_ref_w) - (logp_l - logp_ref_l)

with l of the objective (`mmrl list objectives`; DPO: -log sigmoid(beta h)). A pair is a group of two rows, so its
prompt with its images is computed once for both sides, in the policy's pass and in the reference's. The reference is
the model at the start: a frozen copy, the model with a new adapter off, or log-probabilities computed in advance. KTO,
whose loss does not compare the two sides, also learns from single answers with a label: groups of one row.

Differences from TRL's trainer: answers are never truncated, a pair that does not fit is left out and counted; losses
are means over the optimiser step, not over micro-batches. Defaults: beta 0.1, learning rate 1e-6, as in TRL.

Source: Rafailov et al., DPO, arXiv 2305.18290; huggingface/trl trl/trainer/dpo_trainer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from mmrl.core.blocks.preference import BASELINE, CHOSEN, SCORE, DecisionScore
from mmrl.core.loss import Denominators
from mmrl.core.objectives.objective import LossOutput, PolicyOutputs
from mmrl.core.objectives.pairwise import PreferenceObjective
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded, rare
from mmrl.runs.records import SampleRecord
from mmrl.training.evaluation import Measure
from mmrl.training.objectives import PreferenceConfig, check_pair_batches, check_preference, make_preference
from mmrl.training.processes import Streams, merge_in_order
from mmrl.training.recipe import LossTerm, NoUsableTasksError, Passes, Recipe, Step, start_kind
from mmrl.training.settings import ReferenceConfig
from mmrl.training.supervised import SupervisedRecipe
from mmrl.vlm.data.dataset import LoadedTasks
from mmrl.vlm.data.prompt import Prompt, VlmPayload
from mmrl.vlm.data.task import TaskError, VlmTask, task_images
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.methods.pairs import (
    PairColumns,
    PairMeasure,
    has_labels,
    has_sides,
    keep_pairs,
    marks_of,
    sides_of,
    tokenise_sides,
)
from mmrl.vlm.methods.sft import GivenAnswersConfig, given_answers
from mmrl.vlm.vlm_recipe import Questions, VlmDomain


class StartScores:
    """Log-probabilities of both responses of each pair under the initial policy, in a table by question.

    The reference of held-out pairs, and of training pairs where it is computed ahead. A table is filled once, before
    the first update, and is part of every checkpoint.
    """

    def __init__(self) -> None:
        self._tables: dict[str, dict[str, list[Tensor]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tables

    def fill(
        self,
        name: str,
        policy: VlmPolicy,
        tasks: Sequence[VlmTask],
        make_pairs: Callable[[Sequence[VlmTask]], Rollouts | None],
        score: Callable[[VlmPolicy, Rollouts], Tensor],
        batch: int,
    ) -> None:
        """Score the pairs of a dataset.

        Args:
            name: of the table.
            policy: as it is at the start.
            tasks: questions with both sides.
            make_pairs: rollouts of some questions, without the unusable ones; None if none can be used.
            score: log-probabilities (B, T) of rollouts, without gradient.
            batch: questions scored together.
        """
        table: dict[str, list[Tensor]] = {}
        # a reference is a constant, so nothing of this pass is kept
        with torch.no_grad():
            for start in range(0, len(tasks), batch):
                rollouts = make_pairs(tasks[start : start + batch])
                if rollouts is not None:
                    table |= _by_question(rollouts, score(policy, rollouts))
        self._tables[name] = table

    def of(self, name: str, rollouts: Rollouts) -> Tensor:
        """Log-probabilities (B, T) of the rows of some pairs, 0 after each response."""
        table = self._tables[name]
        payload = VlmPayload.of(rollouts)
        found = torch.zeros_like(rollouts.logp_old)
        # rows of a group come in the order of its sides, the preferred one first
        placed: dict[int, int] = {}
        for row, group in enumerate(rollouts.group.tolist()):
            side = placed.get(group, 0)
            placed[group] = side + 1
            values = table[payload.tasks[group].id][side].to(found.device)
            found[row, : len(values)] = values
        return found

    def state_dict(self) -> dict[str, Any]:
        """The tables, each as the ids and lengths of its pairs and all numbers in one row."""
        # one large tensor instead of thousands of small ones
        state: dict[str, Any] = {}
        for name, table in self._tables.items():
            sides = [side for pair in table.values() for side in pair]
            numbers = torch.cat(sides) if sides else torch.zeros(0)
            state[name] = {"ids": list(table), "lengths": [len(side) for side in sides], "logp": numbers}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self._tables = {}
        for name, saved in state.items():
            # split back by length; two sides a pair
            sides = list(saved["logp"].split(saved["lengths"]))
            pairs = zip(saved["ids"], sides[::2], sides[1::2], strict=True)
            self._tables[name] = {key: [chosen, rejected] for key, chosen, rejected in pairs}


def _by_question(rollouts: Rollouts, logp: Tensor) -> dict[str, list[Tensor]]:
    tasks = VlmPayload.of(rollouts).tasks
    lengths = rollouts.lengths.tolist()
    table: dict[str, list[Tensor]] = {task.id: [] for task in tasks}
    for row, group in enumerate(rollouts.group.tolist()):
        # in float32 on the CPU: the tables of a large data set do not belong on a GPU
        table[tasks[group].id].append(logp[row, : lengths[row]].float().cpu())
    return table


TRAINING = "data"
SIDES = ("chosen", "rejected")


@dataclass
class PreferenceRunConfig(GivenAnswersConfig):
    """A run on pairs of responses. A held-out split with both columns measures pairs; with rewards, also responses."""

    chosen_key: str = rare("chosen")
    """Column with the preferred response: a text, or chat turns."""
    rejected_key: str = rare("rejected")
    """Column with the rejected response."""
    completion_key: str = rare("completion")
    """Column with the response in rows with one labelled response instead of a pair; only used by the loss kto."""
    label_key: str = rare("label")
    """Column with the label of a labelled response, true if the response is desirable."""
    chosen_score_key: str = rare("score_chosen")
    """Column with the preferred response's score; only used by losses that read scores, such as sppo."""
    rejected_score_key: str = rare("score_rejected")
    """Column with the rejected response's score."""
    max_side_tokens: int | None = rare(bounded(None, at_least=1))
    """Maximum response length in tokens; pairs with a longer response are skipped and counted. Default: the model's
    positions minus the prompt."""
    objective: PreferenceConfig = field(default_factory=PreferenceConfig)
    """Loss to minimise."""
    precompute_reference: bool = False
    """Compute the reference's log-probabilities of all training pairs once before the first step, instead of in each
    step. No copy of the model is then kept."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """The policy that responses are compared with."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        objective = make_preference(self.objective)
        # a micro-batch of one row would cut every pair in two
        check_pair_batches(self.trainer.micro_batch)
        check_preference(objective, ("kl_baseline",))
        if isinstance(objective.score, DecisionScore):
            raise ValueError(
                "objective.score is 'decision', which compares two responses token by token and only applies to "
                "noisy versions of images; use sum or mean"
            )
        if self.chosen_key == self.rejected_key:
            raise ValueError(f"chosen_key and rejected_key are both '{self.chosen_key}'; use two different columns")
        unread: tuple[str, ...] = () if objective.needs_scores else ("chosen_score_key", "rejected_score_key")
        unread += ("completion_key", "label_key") if objective.loss.paired or objective.needs_scores else ()
        for name in unread:
            if getattr(self, name) != getattr(PreferenceRunConfig, name):
                raise ValueError(
                    f"{name} is set, but the loss '{objective.loss.kind}' does not use this column; remove it"
                )
        if self.precompute_reference and not objective.needs_reference:
            raise ValueError("precompute_reference is true, but the objective has no reference; remove it")
        if "kl_baseline" in objective.needs:
            # answers to other questions change from step to step, and cannot be scored ahead
            if self.precompute_reference:
                raise ValueError(
                    f"precompute_reference is true, but the loss '{objective.loss.kind}' also compares responses to "
                    "other questions of the step with the reference; remove precompute_reference"
                )
            # a question alone has no answer to another one
            if self.trainer.tasks_per_step < 2:
                raise ValueError(
                    f"trainer.tasks_per_step is 1, but the loss '{objective.loss.kind}' uses responses to other "
                    "questions of the step; use at least 2"
                )
        # an average of weights changes with the run
        if self.precompute_reference and self.reference.kind not in ("auto", "frozen", "adapter"):
            raise ValueError(
                f"precompute_reference is true, but reference.kind is '{self.reference.kind}'; only the initial model "
                "can be precomputed; use auto"
            )

    @property
    def columns(self) -> PairColumns:
        """Names of the columns of a pair."""
        objective = make_preference(self.objective)
        scores = (self.chosen_score_key, self.rejected_score_key) if objective.needs_scores else None
        single = None if objective.loss.paired or objective.needs_scores else (self.completion_key, self.label_key)
        return PairColumns(self.chosen_key, self.rejected_key, scores, single)


class PreferenceRecipe(VlmDomain, SupervisedRecipe[VlmPolicy, VlmTask]):
    """A preference objective on given pairs; see the module."""

    config: PreferenceRunConfig
    objective: PreferenceObjective

    def __init__(self, config: PreferenceRunConfig) -> None:
        super().__init__(config)
        self.columns = config.columns
        self.objective = make_preference(config.objective)
        # rewards only measure here: nothing is trained on them
        self.open(config, Questions(), config.scoring, trains_on_rewards=False)
        self.start_scores = self.parts["start_scores"] = StartScores()
        if config.precompute_reference:
            self.terms = [*self.terms, StartReference(self.start_scores)]
        if "kl_baseline" in self.objective.needs:
            self.terms = [*self.terms, MismatchedAnswers(self)]

    def check_data(self) -> None:
        """Reject held-out questions for which nothing would be measured; raises UserError."""
        config = self.config
        for split, tasks in self.eval_tasks.items():
            if not config.scoring.rewards and not has_sides(tasks, self.columns):
                raise UserError(
                    f"eval_data.{split} has no columns '{config.chosen_key}' and '{config.rejected_key}', and "
                    "evaluation.rewards is empty, so nothing would be measured; provide pairs, or rewards such as "
                    "exact"
                )

    def prepare_tasks(self, loaded: LoadedTasks, *, training: bool) -> LoadedTasks:
        """Read both responses to each question, or its labelled one; a held-out split may contain only questions."""
        if training or has_sides(loaded.tasks, self.columns) or has_labels(loaded.tasks, self.columns):
            return keep_pairs(loaded, self.columns)
        return loaded

    def batch(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Tokenise both responses of each pair; pairs that do not fit are skipped and counted."""
        # with the policy before its first update
        self._fill_start_scores(policy, step)
        pairs = self.pairs_of(policy, tasks)
        if pairs is None:
            raise NoUsableTasksError(f"none of {len(tasks)} pairs could be used; skipped so far: {dict(self.skipped)}")
        # in the order of the tasks, without those that were left out
        return streams.among(tasks, VlmPayload.of(pairs).tasks).noted(pairs)

    def pairs_of(self, policy: VlmPolicy, tasks: Sequence[VlmTask]) -> Rollouts | None:
        """Questions as groups of two rows, the preferred response first, or of one row; None if none can be used."""
        kept: list[tuple[VlmTask, Prompt]] = []
        ids: list[list[int]] = []
        for task, prompt in zip(*self.encode(policy, tasks, allow_none=True), strict=True):
            try:
                ids += tokenise_sides(policy, task, prompt, self.columns, self.config.max_side_tokens)
                kept.append((task, prompt))
            except TaskError as error:
                self.skipped.note(error)
        if not kept:
            return None
        usable, prompts = [task for task, _ in kept], [prompt for _, prompt in kept]
        # side by side in the order in which ids were made
        texts = [side for task in usable for side in sides_of(task, self.columns)]
        rollouts = given_answers(policy, usable, prompts, texts, ids)
        device = rollouts.mask.device
        marks = [mark for task in usable for mark in marks_of(task, self.columns)]
        extras = {CHOSEN: torch.tensor(marks, device=device)}
        if self.columns.scores is not None:
            scores = [float(task.columns[name]) for task in usable for name in self.columns.scores]
            extras[SCORE] = torch.tensor(scores, device=device)
        return rollouts.replace(extras=extras)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Log-probabilities at temperature 1, because the responses were not sampled at another temperature."""
        return policy(rollouts, outputs=outputs)

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Mean pair loss."""
        scores = self.scores(policy, minibatch, self.loss_outputs)
        output = self.objective.step_loss(scores, minibatch, denominators)
        return self.plus_terms(output, policy, minibatch, scores, denominators, step)

    def measures(self, policy: VlmPolicy, split: str, step: Step) -> list[Measure[VlmTask]]:
        """Held-out pairs and, with rewards, the responses to their questions."""
        self._fill_start_scores(policy, step)
        measures = super().measures(policy, split, step) if self.config.scoring.rewards else []
        if has_sides(self.eval_tasks[split], self.columns):
            pairs = PairMeasure(
                make_pairs=lambda tasks: self.held_out_pairs(policy, split, tasks),
                logp=lambda rollouts: self.logp(policy, rollouts),
                objective=self.objective,
                batch_tasks=self.config.evaluation.batch_tasks,
            )
            measures.append(pairs)
        return measures

    def held_out_pairs(self, policy: VlmPolicy, split: str, tasks: Sequence[VlmTask]) -> Rollouts | None:
        """Held-out pairs with the reference's log-probabilities; None if none can be used."""
        rollouts = self.pairs_of(policy, tasks)
        if rollouts is None or not self.objective.needs_reference:
            return rollouts
        return rollouts.replace(logp_ref=self.start_scores.of(split_table(split), rollouts))

    def logp(self, policy: nn.Module, rollouts: Rollouts) -> Tensor:
        """Log-probabilities (B, T) without gradient, in micro-batches."""
        return self.scores_in_chunks(policy, rollouts, frozenset({"logp"})).logp

    def records(self, rollouts: Rollouts, limit: int) -> list[SampleRecord]:
        """Both responses of some pairs with their implicit rewards under the current policy."""
        # whole pairs, since a side alone shows nothing
        shown = rollouts.select_groups(torch.arange(min(max(limit // 2, 1), rollouts.num_groups)))
        payload, counted = VlmPayload.of(shown), [0, 0]
        numbers = self.objective.pair_numbers(self.objective.pairs(self.logp(self.policy, shown), shown))
        images = [task_images(task, self.policy.layout.patch_size) for task in payload.tasks]
        found = []
        for text, mark, group in zip(payload.texts, shown.extras[CHOSEN].tolist(), shown.group.tolist(), strict=True):
            side = int(mark < 0.5)
            place, counted[side] = counted[side], counted[side] + 1
            reward = numbers.get(f"rewards/{SIDES[side]}")
            found.append(
                SampleRecord(
                    id=payload.tasks[group].id,
                    prompt=payload.prompts[group].text,
                    response=text,
                    answer=sides_of(payload.tasks[group], self.columns)[0]
                    if shown.num_rows > shown.num_groups
                    else None,
                    images=images[group],
                    reward=None if reward is None else float(reward[place]),
                    terms={"logp": float(numbers[f"logps/{SIDES[side]}"][place]), "preferred": mark},
                )
            )
        return found

    def _fill_start_scores(self, policy: VlmPolicy, step: Step) -> None:
        """Score held-out pairs, and training pairs that are computed ahead, with the policy before its first update."""
        if not self.objective.needs_reference:
            return
        splits = {split_table(name): tasks for name, tasks in self.eval_tasks.items() if has_sides(tasks, self.columns)}
        wanted = ({TRAINING: self.train_tasks} if self.config.precompute_reference else {}) | splits
        # the questions that cannot be used are counted when they are drawn, not here
        skipped = self.skipped.state_dict()
        # with the adapter off the model is the start at any time, so that splits may be added later
        without_adapter = policy.has_adapter and "adapter" in (self.config.reference.kind, start_kind(policy))
        for name, tasks in wanted.items():
            if name in self.start_scores:
                continue
            if step.number and not without_adapter:
                raise UserError(
                    f"{name} was not part of the run when it started, but its pairs are compared with the model at "
                    "that time; start a new run with it"
                )
            batch = self.config.evaluation.batch_tasks
            with policy.disable_adapter() if without_adapter else nullcontext():
                self.start_scores.fill(name, policy, tasks, lambda part: self.pairs_of(policy, part), self.logp, batch)
        self.skipped.load_state_dict(skipped)  # they are counted where they are drawn


class StartReference(LossTerm):
    """Log-probabilities of the reference that were computed once, before the first step."""

    name = "start_reference"
    gradient = "never"

    def __init__(self, scores: StartScores) -> None:
        self.start_scores = scores

    def provides(self, step: Step) -> frozenset[str]:
        """The reference's log-probabilities."""
        return frozenset({"logp_ref"})

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Look up the log-probabilities."""
        return rollouts.replace(logp_ref=self.start_scores.of(TRAINING, rollouts))


class MismatchedAnswers(LossTerm):
    """The baseline of KTO: mean log-ratio of each response for the next question in the step.

    The answers are those of the step, as in the paper; it is computed once, before the update.
    """

    name = "mismatched_answers"
    gradient = "never"

    def __init__(self, recipe: Recipe[VlmPolicy, VlmTask]) -> None:
        self.recipe = recipe

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Add the baseline, the same for all rows in all processes."""
        # on the host and in float64: the mean over processes should not depend on their number
        ratios: list[float] = []
        others = mismatched(rollouts, self.recipe.policy.positions)
        if others is not None:
            policy = passes.scores(others, frozenset({"logp"})).logp
            reference = self.recipe.reference
            assert reference is not None
            scored = reference.score(lambda module: passes.run(module, others, frozenset({"logp"}), None)).logp
            # summed or averaged like the answers that it is subtracted from
            objective: Any = self.recipe.objective
            values, valid = objective.score((policy - scored).double(), others.mask)
            ratios = values[valid].tolist()
        # collective: a process without a fitting row takes part too
        everywhere = gather_object(ratios)
        baseline = sum(everywhere) / max(len(everywhere), 1)
        self.recipe.noted["kto/baseline"] = baseline
        row = torch.full_like(rollouts.reward, baseline)
        return rollouts.replace(extras=rollouts.extras | {BASELINE: row})


def mismatched(rollouts: Rollouts, positions: int) -> Rollouts | None:
    """Questions with the responses to the step's previous one, the first with those to the last; None if no row fits.

    All processes must call it: the previous question is another process's.
    """
    payload, each = VlmPayload.of(rollouts), rollouts.num_rows // rollouts.num_groups
    places = rollouts.places or list(range(rollouts.num_groups))
    answers = payload.sampled_tokens(rollouts.host.mask)
    own = [(place, (place, answers[each * group : each * (group + 1)])) for group, place in enumerate(places)]
    # tokens alone travel; each process keeps its prompts and images
    step = merge_in_order(own)
    if len(step) < 2:
        return None
    before = {place: given for (place, _), (_, given) in zip(step, [step[-1], *step[:-1]], strict=True)}
    rows = [torch.tensor(row, dtype=torch.int64) for place in places for row in before[place]]
    ids, mask = (pad_sequence(part, batch_first=True) for part in (rows, [torch.ones(len(row)) for row in rows]))
    # a longer prompt may leave too little room for another question's answer
    prompt = torch.tensor([len(prompt) for prompt in payload.prompts])[rollouts.host.group]
    fits = torch.nonzero(prompt + mask.sum(1) <= positions).flatten()
    ids, mask = ids.to(payload.response_ids.device), mask.to(rollouts.mask)
    given = replace(payload, response_ids=ids, texts=[""] * len(rows))
    found = Rollouts(rollouts.group, mask, torch.zeros_like(mask), rollouts.reward, payload=given)
    return found.select(fits) if len(fits) else None


def split_table(split: str) -> str:
    """Name of a held-out split among the start scores."""
    return f"eval_data.{split}"
