"""The policy update: its constants (old and reference log-probabilities) and its optimiser steps."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mmrl.core.blocks.advantage import group_sum
from mmrl.core.blocks.credit import CriticAdvantage
from mmrl.core.blocks.filter import KeepAll
from mmrl.core.loss import Denominators, Metric, PolicyOutputs, count, merge_metrics, metric_values, plain_metrics
from mmrl.core.objectives.objective import Objective
from mmrl.core.payload import sum_of_bits, to_host
from mmrl.core.rollouts import COLLISION, KEEPS_OLD, SAMPLED, Rollouts
from mmrl.errors import RunError
from mmrl.files import replaced
from mmrl.runs.folder import DONE, NOTHING_LEARNED
from mmrl.runs.run_log import RunLog, stopwatch
from mmrl.training.optimizer import (
    FACTOR,
    LossScale,
    actor_weights,
    check_precision,
    divide,
    learning_rate_factor,
    load_optimizer,
    make_optimizer,
    to_natural_steps,
)
from mmrl.training.processes import (
    HeapTrimmer,
    all_ranks,
    deal,
    make_generator,
    merge_lists,
    sum_gradients,
)
from mmrl.training.recipe import (
    Passes,
    Recipe,
    Reference,
    Step,
    old_in_update,
    rows_under_mask,
    scores_before_update,
    shared_prefix,
)
from mmrl.training.sharding import clip, gather_state, is_part, local, scatter_state, shards_of

LOGGER = logging.getLogger("mmrl")
BOOTSTRAP = "bootstrap_mask"
"""Key of `Rollouts.extras` (B, T): 1 at the decision whose value bootstraps an episode cut off by a time limit."""
MAX_NONFINITE = 10
"""Number of skipped optimiser steps after which the run stops because it has diverged."""


def update_constants(
    recipe: Recipe[Any, Any], policy: nn.Module, reference: Reference, rollouts: Rollouts, step: Step
) -> Rollouts:
    """Add the constants of an update: old log-probabilities, values, reference log-probabilities, those of terms.

    The old policy is the policy before the update. If a step has a single optimiser step, the policy in the loss *is*
    the old policy, so `old_in_update` uses its log-probabilities: the ratio is exactly 1 and a forward pass is saved.
    Several optimiser steps need a pass before the first of them, unless the log-probabilities of the sampler are used
    (`trainer.old_logp: sampler`).

    Gradient: none flows; everything here is a constant of the update.
    """
    recipe.reference = reference  # an exact divergence is scored in the loss
    # all passes are without gradient and in chunks of micro_batch rows
    passes = Passes(policy, recipe.scores_in_chunks)
    # a constant that a term brings along needs no pass
    provided = frozenset().union(*(term.provides(step) for term in recipe.terms))
    if not recipe.supervised:
        if recipe.keeps_both_logps:
            # before the old pass replaces logp_old by the trainer's own scores
            rollouts = rollouts.replace(logp_rollout=rollouts.logp_old)
        rollouts = _old_pass(recipe, passes, rollouts, provided)
    # a pass of the reference costs as much as one of the policy, so a term may provide it
    if scores_reference(recipe) and "logp_ref" not in provided:
        with stopwatch("ref_logp"):
            scores = reference.score(lambda module: recipe.scores_in_chunks(module, rollouts, frozenset({"logp"})))
        rollouts = rollouts.replace(logp_ref=scores.logp)
    # last: terms may read old and reference log-probabilities
    for term in recipe.terms:
        rollouts = term.prepare(passes, rollouts, step)
    return rollouts


def scores_reference(recipe: Recipe[Any, Any]) -> bool:
    """Whether the loss needs reference log-probabilities; an exact divergence is computed in the loss instead."""
    objective = recipe.objective
    return objective is not None and objective.needs_reference and "logp_ref" in objective.needs


def needs_reference(recipe: Recipe[Any, Any]) -> bool:
    """Whether the trainer keeps a reference policy for a recipe."""
    if recipe.objective is None or not recipe.objective.needs_reference:
        return False
    # asked for the last step: a term may provide it in the first steps only, as a critic's warm-up does
    last = Step(recipe.config.trainer.steps - 1, recipe.config.trainer.steps)
    return not any("logp_ref" in term.provides(last) for term in recipe.terms)


def _old_pass(recipe: Recipe[Any, Any], passes: Passes, rollouts: Rollouts, provided: frozenset[str]) -> Rollouts:
    objective = recipe.objective
    if not scores_before_update(recipe, provided):
        return rollouts
    # the critic's values come from the same pass, even if log-probabilities are the sampler's
    asks_critic = objective.needs_values and "values" not in provided
    asks_entropy = "entropy_old" in objective.needs
    asked = {"values": asks_critic, "entropy": asks_entropy, COLLISION: COLLISION in objective.needs}
    outputs = frozenset({"logp"} | {name for name, wanted in asked.items() if wanted})
    # a time limit is not the end of the task: GAE needs the value of the state after the last decision
    bootstraps = asks_critic and BOOTSTRAP in rollouts.extras and _bootstraps(objective.advantage)
    mask, seen = rollouts.mask, rollouts
    if bootstraps:
        # unscored rows have no reward to bootstrap
        bootstrap = rollouts.extras[BOOTSTRAP] * rollouts.scored[:, None]
        # policies score decisions under the mask only, so the last state is put under it for this one pass
        seen = rollouts.replace(mask=mask + bootstrap)
    with stopwatch("old_logp"):
        scores = passes.scores(seen, outputs)
    found = rollouts.replace(values=scores.values, entropy=scores.entropy if asks_entropy else rollouts.entropy)
    if scores.collision is not None:
        found = found.replace(extras=found.extras | {COLLISION: scores.collision})
    if not recipe.keeps_sampled_logp and "logp_old" not in provided:
        found = found.replace(logp_old=scores.logp)
    if not bootstraps:
        return found
    assert scores.values is not None
    # a truncated row without a last state to evaluate has an unknown value, not 0
    unknown = (rollouts.extras["truncated"] > 0) & (bootstrap.sum(1) == 0)
    value = (scores.values * bootstrap).sum(1).masked_fill(unknown, math.nan)
    return found.replace(
        # the bootstrap decision is no decision of the policy: its score is removed again
        values=scores.values * mask,
        logp_old=torch.where(mask > 0, found.logp_old, 0.0),
        extras=found.extras | {"bootstrap_value": value},
    )


def _bootstraps(advantage: object) -> bool:
    return isinstance(advantage, CriticAdvantage) and advantage.truncation == "bootstrap"


def describe_nonfinite(minibatch: Rollouts, loss: Tensor | None, policy: nn.Module) -> str | None:
    """Describe the first non-finite number, checking causes before effects; None if all are finite."""
    names = ("advantage", "logp_old", "logp_rollout", "logp_ref", "values", "returns")
    fields = {name: getattr(minibatch, name) for name in names}
    fields |= {f"extras[{name!r}]": value for name, value in minibatch.extras.items()}
    checks = [
        # padding and unscored rows may hold NaN
        (f"rollouts.{name}", _visible(value, minibatch.mask)[minibatch.scored])
        for name, value in fields.items()
        if value is not None
    ]
    # inputs, then weights, then the loss, then gradients: a NaN spreads in this direction
    checks += [(f"weight {name}", parameter.detach()) for name, parameter in policy.named_parameters()]
    if loss is not None:
        checks.append(("loss", loss.detach().reshape(1)))
    checks += [(f"gradient of {n}", p.grad) for n, p in policy.named_parameters() if p.grad is not None]
    # the local part is enough: a NaN that is in no part of this process is reported by another
    for name, value in ((name, local(value)) for name, value in checks):
        bad = ~torch.isfinite(value)
        if bool(bad.any()):
            first = bad.nonzero()[0].tolist()
            return f"{int(bad.sum())} of {value.numel()} entries of {name} are NaN or infinite, the first at {first}"
    return None


def save_failure(folder: Path, step: int, rank: int, minibatch: Rollouts, cause: str, extra: dict[str, Any]) -> Path:
    """Save the rows of a failed optimiser step of one process for inspection."""
    folder.mkdir(parents=True, exist_ok=True)
    ending = f"-rank-{rank}.pt" if rank else ".pt"
    # numbered: several minibatches of a step may fail
    path = folder / f"step-{step:06d}-{len(list(folder.glob('*.pt')))}{ending}"
    with replaced(path) as draft:
        torch.save({"cause": cause, "step": step, "rollouts": minibatch.to("cpu"), **extra}, draft)
    return path


def _visible(value: Tensor, mask: Tensor) -> Tensor:
    # per-row fields have no padding
    if value.ndim == 1:
        return value
    return torch.where(mask.bool(), value, torch.zeros_like(value))


def weights_digest(weights: Iterable[nn.Parameter]) -> list[int]:
    """Sum of the bits of each weight, on the host."""
    return [int(found) for found in to_host([sum_of_bits(local(weight.detach())) for weight in weights])]


class Updates(Protocol):
    """Turns the rollouts of a step into a better policy; `Recipe.updates` may name another class than `Updater`."""

    optimiser_step: int
    """Optimiser steps of the policy, or of the critic if it alone is trained."""
    skipped: int
    """Optimiser steps that were skipped because of numbers that are not finite."""
    waited: int
    """Optimiser steps that were not taken because nothing had a gradient."""

    @property
    def moved(self) -> bool:
        """Whether any trained weight differs from the start of the run; all processes must call it."""
        ...

    def update(self, rollouts: Rollouts, step: Step, *, teaches: bool = True) -> dict[str, float]:
        """Take the optimiser steps of a rollout step, unless a filter left nothing here; returns metrics."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """State of optimisers and counters; all processes must call it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        ...


class Updater:
    """Owns the optimiser and turns the rollouts of a step into updates of the policy."""

    def __init__(
        self,
        recipe: Recipe,
        accelerator: Accelerator,
        reference: Reference,
        failures: Path,
        heap: HeapTrimmer | None = None,
    ) -> None:
        self.recipe = recipe
        self.config = recipe.config.trainer
        self.accelerator = accelerator
        self.reference = reference
        self.failures = failures
        self.heap = heap or HeapTrimmer(enabled=False)
        # on bfloat16 there is no scale: its exponent is as wide as float32's
        self.scale = LossScale(enabled=self.config.mixed_precision == "fp16")
        # for evaluation, since the loop adds up the gradients of the processes itself: no data-parallel wrapper
        self.policy = accelerator.prepare_model(recipe.policy, evaluation_mode=True)
        # before the optimiser is made, which then holds moments for parts only
        divide(recipe, accelerator, reference)
        optimizer = make_optimizer(recipe.policy, self.config, recipe.trust_region)
        check_precision(optimizer)
        self.optimizer = accelerator.prepare_optimizer(optimizer)
        self._trained = [parameter for parameter in recipe.policy.parameters() if parameter.requires_grad]
        actor = actor_weights(recipe.policy)
        self._learning = self._trained if recipe.critic_only else actor
        # a sum of bits, not a copy of the weights
        self._at_start = weights_digest(self._learning)
        self.shards = shards_of(recipe.policy)
        if self.shards is not None:
            self.shards.gather()  # whole but within an optimiser step
        self.optimiser_step = 0
        self.skipped = 0
        self.waited = 0
        self._moves = False

    def update(self, rollouts: Rollouts, step: Step, *, teaches: bool = True) -> dict[str, float]:
        """Take all optimiser steps of one rollout step; without `teaches`, a filter left nothing of these rows."""
        # dropout acts in the update alone
        self.policy.train()
        taken: list[dict[str, float]] = []
        # per rollout step: its old policy is the one that this update starts from
        self._moves = False
        for epoch in range(self.config.epochs):
            minibatches = self._minibatches(rollouts, step, epoch, teaches=teaches)
            # a filter may leave fewer groups than minibatches
            self.waited += self.config.minibatches_per_step - len(minibatches)
            for minibatch in minibatches:
                metrics = self._optimiser_step(minibatch, step)
                taken.extend([metric_values(metrics)] if metrics is not None else [])
                self.heap.trim()
        counts = {"optim/skipped": float(self.skipped), "optim/without_gradient": float(self.waited)}
        counts |= {"optim/lr": self._current_rate()} | self.scale.metrics()
        # means over the optimiser steps of this rollout step
        return _over_steps(taken) | counts | _clipped_at_start(taken, rollouts)

    @property
    def moved(self) -> bool:
        """Whether any policy weight differs from the start of the run; all processes must call it.

        The critic does not count, unless the recipe trains only the critic.
        """
        # bits and not values: the smallest change counts, and NaN equals itself
        return not all_ranks(weights_digest(self._learning) == self._at_start, self.accelerator)

    def state_dict(self) -> dict[str, Any]:
        """Optimiser state and counters, complete in the first process; all processes must call it."""
        return {
            # collective, so every process calls it even if it does not write
            "optimizer": gather_state(self.optimizer, keep=self.accelerator.is_main_process),
            "optimiser_step": self.optimiser_step,
            "skipped": self.skipped,
            "waited": self.waited,
            "loss_scale": self.scale.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        load_optimizer(self.optimizer, scatter_state(self.optimizer, state["optimizer"]), scheduled=True)
        self.optimiser_step = int(state["optimiser_step"])
        # resumed counters keep schedules and logs of the interrupted run
        self.skipped = int(state["skipped"])
        self.waited = int(state.get("waited", 0))
        self.scale.load_state_dict(state.get("loss_scale", {}))

    def _minibatches(self, rollouts: Rollouts, step: Step, epoch: int, *, teaches: bool) -> list[Rollouts | None]:
        """Whole groups for each optimiser step, split as one process would; None if this process has none."""
        number = self.config.minibatches_per_step
        if number == 1:
            # no shuffling: a single minibatch holds every group
            return [rollouts]
        # keyed by step and epoch, not by process: all processes cut the same shuffled order
        generator = make_generator(self.recipe.config.seed, "minibatch", step.number, epoch)
        nowhere = all_ranks(not teaches, self.accelerator)
        # rows that are only logged take no place in a minibatch, unless that is all there is anywhere
        groups = rollouts.num_groups if teaches or nowhere else 0
        places = None if rollouts.places is None else rollouts.places[:groups]
        parts = deal([1] * groups, number, generator, self.accelerator, places)
        return [rollouts.select_groups(part) if len(part) else None for part in parts]

    def _optimiser_step(self, minibatch: Rollouts | None, step: Step) -> dict[str, Metric] | None:
        """Take one optimiser step, unless there is nothing to learn; None if it was skipped.

        Denominators are counted over the whole minibatch and all processes, before groups are skipped and before it is
        split into micro-batches. So neither changes the result: the micro-batches add up to the same loss.
        """
        counts = [] if minibatch is None else [count_denominators(self.recipe, minibatch)]
        # a process without rows adds nothing, but has to take part in the sum
        denominators = Denominators.total(merge_lists(counts, self.accelerator))
        # AdamW would move the weights by momentum alone
        if denominators.tokens == 0 or self._waits(minibatch):
            # counted apart from skipped steps, which are faults
            self.waited += 1
            return {"update/zero_advantage_groups": Metric(1.0)}
        self._set_rate()
        # the loss is divided by these denominators, which are the same on every process
        loss, metrics = self._accumulate(minibatch, denominators, step)
        taken = self._apply(minibatch, loss, step)
        if self.shards is not None:
            # also after a skipped step: sampling needs whole weights
            self.shards.gather()
        if taken is None:
            return None
        # as numbers: tensors of different devices cannot be added
        metrics = merge_metrics(merge_lists([plain_metrics(metrics)], self.accelerator))
        return metrics | {"optim/grad_norm": Metric.summed(taken)}

    def _apply(self, minibatch: Rollouts | None, loss: Tensor, step: Step) -> float | None:
        """Take an optimiser step with the accumulated gradients; returns their norm, or None if it was skipped."""
        with stopwatch("optimizer"):
            # before the norm is taken, which max_grad_norm and the log mean without the scale of fp16
            self.scale.unscale(self._trained)
            self._complete_gradients()
            # after summing over processes, so all of them clip by the same norm
            # weights without a gradient were used by no micro-batch of any process
            used = [p for p in self.policy.parameters() if p.grad is not None]
            norm, loss_value = clip(used, self.config.max_grad_norm, loss)
        # one process cannot skip alone: its weights would differ from then on
        if not all_ranks(math.isfinite(loss_value) and math.isfinite(norm), self.accelerator):
            # a finite loss with an infinite gradient: the scale was too large, which is no fault of the batch
            if self.scale.can_shrink and all_ranks(math.isfinite(loss_value), self.accelerator):
                self._on_overflow(step.number)
            else:
                self._on_nonfinite(minibatch, loss, step.number)
            return None
        # counted only after all processes have agreed that the step is finite
        self.scale.keep()
        with stopwatch("optimizer"):
            # replaces the gradients by the natural step that the optimiser then takes
            to_natural_steps(self.recipe, self.policy, minibatch, self._trained, self.accelerator)
            self.optimizer.step()
            torch.clear_autocast_cache()  # it holds copies of the weights, and does not see that they have changed
            self.optimizer.zero_grad()
            # an EMA reference moves once an optimiser step, after the weights
            self.reference.update()
        self.optimiser_step += 1
        self._moves = True
        return norm

    def _waits(self, minibatch: Rollouts | None) -> bool:
        """Whether to take no step because no group, in any process, has a gradient."""
        find: Callable[[Rollouts], Tensor]
        # a term with a tiny gradient without advantages, which AdamW would scale to a whole step
        if any(term.gradient == "with_signal" for term in self.recipe.terms):
            find = groups_with_advantage
        elif not self.recipe.supervised and self.config.skip_steps_without_gradient:
            find = functools.partial(groups_with_gradient, self.recipe)
        else:
            return False
        # a vote: a process without a gradient must step if any other has one
        return all_ranks(minibatch is None or not bool(find(minibatch).any()), self.accelerator)

    def _live(self, minibatch: Rollouts | None) -> Rollouts | None:
        """Rows that need a forward pass, of at least one group over all processes: weights in use get a gradient."""
        if self.recipe.supervised or not self.config.skip_zero_advantage_groups:
            return minibatch
        # no rows are no groups
        live = torch.zeros(0) if minibatch is None else groups_with_gradient(self.recipe, minibatch)
        # asked before the early returns below: every process must take part in the vote
        if all_ranks(not bool(live.any()), self.accelerator):
            # all groups are without a gradient: the longest one still gives every weight a gradient of 0
            live = self._longest(minibatch)
        if minibatch is None or not bool(live.any()):
            return None
        found = minibatch if bool(live.all()) else minibatch.select_groups(live)
        # a term, or a loss of the recipe's own, may read rows without a trained decision; denominators are counted
        reads = self.recipe.terms or self.recipe.own_loss or compares_rows(self.recipe)
        rows = None if reads else rows_under_mask(found)
        return found if rows is None else found.select(rows)

    def _longest(self, minibatch: Rollouts | None) -> Tensor:
        """Mask (N,) of the group with the most trained decisions over all processes; the first one in case of ties."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        found: list[tuple[float, int]] = []
        if minibatch is not None:
            trained = group_sum(minibatch.loss_mask.sum(1), minibatch.group, minibatch.num_groups).tolist()
            # without recorded places, those of `shard`: ties are broken alike for any number of processes
            places = minibatch.places or range(rank, rank + world * len(trained), world)
            found = [(-number, place) for number, place in zip(trained, places, strict=True)]
        # most decisions first (hence the minus), then the earliest place
        first = min(merge_lists(found, self.accelerator))
        return torch.tensor([each == first for each in found])

    def _settled(self, live: Rollouts | None) -> Rollouts | None:
        """Add what the clip rule needs to know about the whole optimiser step; all processes must call it.

        Before the policy has moved all ratios are 1, which saves a pass.
        """
        recipe, parts = self.recipe, []
        if recipe.objective is None or not recipe.objective.surveys:
            return live
        if self._moves or recipe.keeps_sampled_logp:
            if live is not None:
                with stopwatch("forward"):
                    # current scores of the rows, without gradient; they are scored again with gradient below
                    logp = recipe.scores_in_chunks(self.policy, live, frozenset({"logp"})).logp
                parts = [recipe.objective.survey(PolicyOutputs(logp), old_in_update(recipe, live, logp)).cpu()]
            # outside the branch above: a process without rows takes part with an empty list
            parts = merge_lists(parts, self.accelerator)
        return None if live is None else recipe.objective.settled(parts, live)

    def _accumulate(
        self, minibatch: Rollouts | None, denominators: Denominators, step: Step
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Sum the gradients of all micro-batches and processes; returns the loss and metrics of this process."""
        # a process without rows contributes 0
        losses = [torch.zeros((), device=self.accelerator.device)]
        parts: list[dict[str, Metric]] = []
        live = self._settled(self._live(minibatch))
        if minibatch is not None:
            groups, used = minibatch.num_groups, 0 if live is None else live.num_groups
            # of the groups of this minibatch, before any is skipped
            parts = [{"update/zero_advantage_groups": Metric(groups - used, groups)}]
        if live is not None:
            # 0 means one chunk
            most = self.config.micro_batch or live.num_rows
            chunks = list(self.recipe.micro_batches(live, most, whole_groups=compares_rows(self.recipe)))
            # opened around all chunks of the minibatch: they may share the forward pass of a prompt
            with shared_prefix(self.recipe.policy, chunks) as shared:
                for chunk in chunks:
                    with stopwatch("forward"):
                        output = self.recipe.loss(self.policy, chunk, denominators, step)
                    with stopwatch("backward"):
                        self.accelerator.backward(self.scale.scaled(output.loss))
                    # detached, so that the graph of each chunk is freed after its backward pass
                    losses.append(output.loss.detach())
                    parts.append(output.metrics)
                with stopwatch("backward"):
                    # the prompt's graph waits for the gradients that all chunks send into it, and runs once
                    shared.backward()
        with stopwatch("backward"):
            if self.shards is not None:
                # sums, not means: each loss is divided by the counts of all processes already
                self.shards.sum_gradients()
            # sharded weights have been summed above
            sum_gradients([weight for weight in self._trained if not is_part(weight)], self.accelerator)
        return torch.stack(losses).sum(), merge_metrics(parts)

    def _complete_gradients(self) -> None:
        """Set a zero gradient on weights that were trained before but are not used by this minibatch.

        AdamW would skip them, but a skipped group might have used them. This way their momentum decays in both cases.
        """
        for parameter in self._trained:
            # weights that never had a gradient have no moments, and stay out of the optimiser
            if parameter.grad is None and parameter in self.optimizer.state:
                parameter.grad = torch.zeros_like(parameter)

    def _on_overflow(self, step: int) -> None:
        """Skip the step on every process because loss scaling may have made the gradient infinite."""
        self.optimizer.zero_grad()
        before = self.scale.value
        self.scale.shrink()
        LOGGER.warning(
            "step %d: a gradient overflows in fp16; optimiser step skipped, loss scale %g instead of %g",
            step,
            self.scale.value,
            before,
        )

    def _on_nonfinite(self, minibatch: Rollouts | None, loss: Tensor, step: int) -> None:
        # a process whose rows are fine reports that another one has the cause
        found = None if minibatch is None else describe_nonfinite(minibatch, loss, self.recipe.policy)
        cause = found or "another process reported it"
        self.optimizer.zero_grad()
        try:
            kept = "this process had no rows in this step"
            if minibatch is not None:
                file = save_failure(
                    self.failures, step, self.accelerator.process_index, minibatch, cause, {"loss": float(loss)}
                )
                kept = f"batch saved to {file}"
        except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
            kept = f"the batch could not be saved: {error}"
        self.skipped += 1
        message = f"step {step}: {cause}; {kept}"
        # the saved batch holds the cause, so the run can end here
        if self.config.on_nonfinite == "stop":
            raise RunError(message)
        if self.skipped > MAX_NONFINITE:
            raise RunError(f"{message}; {self.skipped} optimiser steps have been skipped, more than {MAX_NONFINITE}")
        LOGGER.warning("%s; optimiser step skipped", message)

    def _set_rate(self) -> None:
        rate = self.config.learning_rate * learning_rate_factor(self.config, self.optimiser_step, self.waited)
        # parameters of a critic may have another rate than the policy
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get(FACTOR, 1.0)

    def _current_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def unscored(rollouts: Rollouts) -> Rollouts:
    """Return rollouts without rewards, so that they have no gradient and are not counted in denominators."""
    return rollouts.replace(reward=torch.full_like(rollouts.reward, math.nan))


def with_sampled(recipe: Recipe[Any, Any], rollouts: Rollouts) -> Rollouts:
    """Rows that keep their mask in `extras` if advantages also read rows that will leave the update."""
    objective = None if recipe.supervised else recipe.objective
    if not isinstance(objective, Objective) or objective.compares == "rewards":
        return rollouts
    return rollouts.replace(extras=rollouts.extras | {SAMPLED: rollouts.mask})


def count_denominators(recipe: Recipe[Any, Any], minibatch: Rollouts) -> Denominators:
    """Count the denominators of an optimiser step's loss on this process."""
    counts = count(minibatch.loss_mask) if recipe.objective is None else recipe.objective.denominators(minibatch)
    # terms of the loss count what they are divided by themselves
    own = {name: number for term in recipe.terms for name, number in term.counts(minibatch).items()}
    return dataclasses.replace(counts, others={**counts.others, **own})


def groups_with_gradient(recipe: Recipe[Any, Any], minibatch: Rollouts) -> Tensor:
    """CPU mask (N,) of the groups that can have a gradient; the update may skip the others.

    True for all groups if a part of the loss does not vanish with the advantages: a KL, entropy or value term, a term
    of the method, or a loss that replaces the objective's.
    """
    # a term may train on groups without an advantage
    always = any(term.gradient != "never" for term in recipe.terms)
    if recipe.supervised or recipe.own_loss or always or recipe.objective.regularised:
        return torch.ones(minibatch.num_groups, dtype=torch.bool)
    return groups_with_advantage(minibatch)


def groups_with_advantage(minibatch: Rollouts) -> Tensor:
    """CPU mask (N,) of the groups with a non-zero advantage; true for all before advantages are computed."""
    if minibatch.advantage is None:
        return torch.ones(minibatch.num_groups, dtype=torch.bool)
    moved = ((minibatch.advantage != 0) & (minibatch.loss_mask > 0)).any(1)
    return group_sum(moved.long(), minibatch.group, minibatch.num_groups).cpu() > 0


def has_advantage(rollouts: Rollouts) -> bool:
    """Whether any trained decision has a non-zero advantage."""
    return rollouts.advantage is not None and bool(groups_with_advantage(rollouts).any())


def compares_rows(recipe: Recipe[Any, Any]) -> bool:
    """Whether the loss of a row depends on the rest of its group, which must then stay in one micro-batch."""
    return recipe.objective is not None and recipe.objective.compares_rows


def _clipped_at_start(taken: list[dict[str, float]], rollouts: Rollouts) -> dict[str, float]:
    """Fraction of decisions clipped before the policy has moved; empty if there are none."""
    # the first optimiser step: in later ones the policy has moved
    first = next((metrics for metrics in taken if "policy/ratio_mean" in metrics), {})
    share = sum(first.get(f"policy/clip_fraction_{side}", 0.0) for side in ("low", "high"))
    # replayed rows have other old log-probabilities, so that being clipped at the start is no sign of a fault
    return {"policy/clipped_at_start": share} if share and KEEPS_OLD not in rollouts.extras else {}


def _over_steps(taken: list[dict[str, float]]) -> dict[str, float]:
    """Mean over optimiser steps; maximum for names that end in "_max"."""
    # dict.fromkeys keeps the order in which names first occur
    names = dict.fromkeys(name for metrics in taken for name in metrics)
    columns = {name: [metrics[name] for metrics in taken if name in metrics] for name in names}
    return {n: max(values) if n.endswith("_max") else sum(values) / len(values) for n, values in columns.items()}


def outcome(recipe: Recipe[Any, Any], updater: Updates, log: RunLog, steps: int) -> dict[str, str]:
    """Status of a run at its last step; if it learned nothing, also the reason, which is logged as a warning.

    Every process calls it.
    """
    learning = "critic" if recipe.critic_only else "policy"
    # 0 optimiser steps in 0 steps is no failure
    if steps and not updater.optimiser_step:
        causes = "; ".join(_causes(recipe, updater, log)) or recipe.no_signal
        reason = f"nothing was learned: the optimiser took no step in {steps} steps, because {causes}"
        log.warnings.say(steps, NOTHING_LEARNED, f"{reason}; check the samples in the report and their rewards")
        return {"status": NOTHING_LEARNED, "reason": reason}
    warmup = recipe.config.trainer.warmup_steps
    if steps and updater.optimiser_step < warmup:
        log.warnings.say(
            steps,
            "warm_up",
            f"the learning rate never reached its peak: the run took {updater.optimiser_step} optimiser steps, "
            f"fewer than trainer.warmup_steps ({warmup}); set trainer.warmup_steps=0 to try a short run",
        )
    if steps and not updater.moved:
        log.warnings.say(
            steps,
            "nothing_moved",
            f"no weight of the {learning} changed in {steps} steps, although the optimiser took "
            f"{updater.optimiser_step}; check the rewards and the learning rate",
        )
    return {"status": DONE}


def _causes(recipe: Recipe[Any, Any], updater: Updates, log: RunLog) -> Iterator[str]:
    """Reason why no optimiser step was taken, from the run's counts."""
    totals = log.totals
    if updater.skipped:
        yield f"{updater.skipped} were skipped because of non-finite numbers"
    if totals["groups"] and totals["unscored"] == totals["rows"]:
        yield f"none of {totals['rows']} samples could be scored"
    elif not recipe.supervised and not totals["kept"] and not isinstance(recipe.objective.filter, KeepAll):
        chosen = recipe.objective.filter
        yield f"objective.filter '{chosen.kind}' kept none of {totals['groups']} groups ({chosen.formula()})"
