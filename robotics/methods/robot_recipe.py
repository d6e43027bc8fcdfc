"""Base of the robot recipes: simulator, policy, episodes as rollouts, and evaluation.

An episode is a row. Its decisions are the action tokens (or control or denoising steps) of its chunks in order, or with
`logp_level: chunk` the chunks themselves. Those of control steps that were not executed have mask 0. A row whose
environment failed takes its whole group out of the update; both are counted.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diffusion.models.ema import EMAWeights
from mmrl.core.blocks.turns import DURATION
from mmrl.core.loss import Metric
from mmrl.core.objectives.objective import Objective, PolicyOutputs
from mmrl.core.payload import to_device, to_host
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import Stateful, Tally
from mmrl.errors import UserError
from mmrl.fields import choice, rare
from mmrl.rewards.reward_loading import named_digests, source_digest
from mmrl.runs.dry_run import model_follows
from mmrl.runs.export import Exported
from mmrl.runs.run_log import metric_label
from mmrl.training.evaluation import held_out_tasks
from mmrl.training.objectives import ObjectiveConfig, check_objective, make_objective
from mmrl.training.processes import SimCounts, Streams
from mmrl.training.recipe import LossTerm, NoUsableTasksError, Passes, Recipe, Step, opening
from mmrl.training.settings import RunConfig, TrainerConfig
from robotics.episodes.collect import ActingSettings, Episodes, run_episodes, swap_layouts
from robotics.episodes.episode_evaluation import (
    JUDGED,
    PROTOCOLS,
    ReplayVideos,
    RobotEvaluationConfig,
    RobotMeasure,
    judged_counts,
)
from robotics.episodes.payload import (
    EpisodePayload,
    EpisodeSetConfig,
    about_episode,
    episode_id,
    list_episodes,
    own_draw,
)
from robotics.methods import SCORES
from robotics.policies.base.action_policy import ActionPolicy, PolicyInputs, open_policy
from robotics.policies.base.saved import is_saved_policy
from robotics.policies.policy_card import describe_policy, users_policy
from robotics.policies.policy_loading import (
    ActionPolicyConfig,
    bounds_of,
    check_fit,
    check_interface,
    load_action_policy,
)
from robotics.rewards.judged_sim import SuccessConfig, open_run_sim
from robotics.sim.episodes import EpisodeSpec, RobotSim
from robotics.sim.interface import interface_of, seen_part
from robotics.sim.opening import SimConfig


class OldPolicy(LossTerm):
    """A copy of the trained weights, refreshed before each update.

    Raises:
        UserError: the policy's decisions are not Gaussians of fixed noise.
    """

    name = "old_policy"
    gradient = "never"

    def __init__(self, policy: ActionPolicy) -> None:
        if not policy.has_means:
            raise UserError(
                "the objective needs the exact divergence from the policy before the update, which is only "
                "available for model.kind flow with noise: fixed"
            )
        self._policy = policy
        self._weights = EMAWeights(policy)

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Copy the weights."""
        self._weights.copy_()
        return rollouts

    def means(self, *inputs: Any) -> Tensor:
        """Means of decisions under the copy; before the policy's own pass, whose graph must not see a swap."""
        with torch.no_grad(), self._weights.applied():
            means: Tensor = self._policy("means", *inputs)
        return means


LOGGER = logging.getLogger("mmrl")
LEVELS = ("token", "chunk")
DRAWING = ("tabletop", "gymnasium")
"""Simulators that support `sim.randomization`."""
ENOUGH = 8
"""Number of solved episodes, and of others, whose rewards are compared."""
SHOWN_TASKS = 12
"""Maximum number of tasks for which success is reported per task in every step."""


@dataclass
class RobotParts:
    """Policy, simulator and evaluation of a robot run; inherit from this before the configuration of a run."""

    model: ActionPolicyConfig = field(default_factory=ActionPolicyConfig)
    """The policy."""
    sim: SimConfig = field(default_factory=SimConfig)
    """The simulator of the episodes."""
    success: SuccessConfig = rare(field(default_factory=SuccessConfig))
    """Who decides that an episode has succeeded."""
    eval_data: dict[str, EpisodeSetConfig] = field(default_factory=dict)
    """Initial states for evaluation by name; the first split gives the headline metrics."""
    acting: ActingSettings = field(default_factory=ActingSettings)
    """Sampling and execution of actions."""

    def check_parts(self, evaluation: RobotEvaluationConfig, sets: Mapping[str, EpisodeSetConfig]) -> None:
        """Check that the parts fit together, given all sets of initial states; raises ValueError."""
        idle = [name for name, data in sets.items() if data.randomized]
        # other simulators draw by themselves, so only these two can be known to draw nothing
        if idle and self.sim.kind in DRAWING and not self.sim.randomization.active():
            raise ValueError(f"{idle[0]}.randomized is true, but sim.randomization has no ranges; set one there")
        if self.acting.ensemble and not evaluation.greedy:
            raise ValueError(
                f"acting.ensemble is {self.acting.ensemble}, which only applies to greedy evaluation, but "
                "evaluation.greedy is false; change one of them"
            )
        if self.acting.ensemble and evaluation.delay.active:
            raise ValueError(
                f"acting.ensemble is {self.acting.ensemble}, which predicts a chunk at every control step, so "
                "evaluation.delay does not apply; set one of them only"
            )

    def held_out(self) -> dict[str, EpisodeSetConfig]:
        """Sets of evaluation by their keys."""
        return {f"eval_data.{name}": data for name, data in self.eval_data.items()}


@dataclass
class RobotConfig(RobotParts, RunConfig):
    """A run of a robot policy in a simulator."""

    compares_samples: ClassVar[bool] = True
    """Whether advantages compare the episodes of an initial state."""
    scored_outputs: ClassVar[tuple[str, ...]] = SCORES
    """Scores of the recipe in addition to log-probabilities."""

    data: EpisodeSetConfig = field(default_factory=EpisodeSetConfig)
    """Initial states for training."""
    logp_level: str = rare(choice("token", LEVELS))
    """token: every action token (or control or denoising step) is a decision; chunk: a whole chunk is one decision,
    with the sum of their log-probabilities."""
    evaluation: RobotEvaluationConfig = field(default_factory=RobotEvaluationConfig)
    """Evaluation over fixed initial states."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="grpo"))
    """The objective."""
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(old_logp="auto"))
    """Batch sizes, optimiser and guards; the sampled log-probabilities are exact in float32, so no second pass is
    needed."""

    @property
    def compared_samples(self) -> int | None:
        """Episodes that advantages compare; None if they compare none."""
        return self.trainer.samples_per_task if self.compares_samples else None

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        objective = make_objective(self.objective)
        check_objective(objective, self.scored_outputs, self.compared_samples, old_logp=self.trainer.old_logp)
        self.check_parts(self.evaluation, {"data": self.data} | self.held_out())


class RobotDomain:
    """Simulator, policy, evaluation and reports of recipes for robots."""

    config: Any
    policy: ActionPolicy
    train_tasks: Sequence[Any]
    eval_tasks: Mapping[str, Sequence[EpisodeSpec]]
    parts: dict[str, Stateful]
    added: dict[str, Any]
    opened: ExitStack

    def open(self, config: Any, policy: ActionPolicy | None, sim: RobotSim | None) -> None:
        """Open simulator and policy, unless they are given, and list the initial states.

        Raises:
            UserError: one of them cannot be used, or they do not fit together.
        """
        self.sim: RobotSim = self.wrapped(open_run_sim(config.sim, config.success) if sim is None else sim)
        with opening(self.opened) as opened:
            opened.callback(self.sim.close)
            self._fit(config, policy)
        self.broken = Tally()
        self.sim_counts = SimCounts(self.sim, Path(config.output_dir))
        # parts are saved in checkpoints, `added` is summed over processes
        self.parts |= {"broken": self.broken, "counts": self.sim_counts}
        # counts of one step: cleared when they are reported
        self._seen: Counter[str] = Counter()
        self.added |= {"seen": self._seen, "counts": self.sim_counts}
        names = list(dict.fromkeys(getattr(task, "task", "") for task in self.train_tasks))
        self._shown_tasks = names if 1 < len(names) <= SHOWN_TASKS else []
        self.code = {name: source_digest(spec) for name, spec in _users_parts(config).items()}
        options = {"sim": {"options": config.sim.options}, "model": {"options": getattr(config.model, "options", {})}}
        self.code |= named_digests(options)

    def wrapped(self, sim: RobotSim) -> RobotSim:
        """The simulator as the recipe needs it."""
        return sim

    def _fit(self, config: Any, policy: ActionPolicy | None) -> None:
        """List the initial states, and load a policy that fits the simulator."""
        known, splits = self.sim.tasks(), self.sim.layouts()
        # evaluation sets are nominal by default; without any randomisation, draw 0 is that scene
        randomizes = bool(config.sim.randomization.active())
        self.train_tasks = self.load_train_tasks()
        self.eval_tasks = held_out_tasks(
            config, lambda data, _: list_episodes(data, known, splits, randomized=not randomizes)
        )
        self.check_data()
        # a dry run of data and simulator ends here, before the policy is loaded
        model_follows(self)
        self.policy = load_action_policy(config.model, self.sim, config.seed) if policy is None else policy
        # sizes and cameras first; `check_interface` compares what the numbers mean
        check_fit(self.policy, self.sim, config.model.accept_other)
        # for policies that act in the environment's own units, and for their cards
        self.policy.action_bounds = bounds_of(self.sim)
        self.policy.interface = seen_part(interface_of(self.sim), self.policy)
        if config.acting.n_action_steps > self.policy.chunk:
            raise UserError(
                f"acting.n_action_steps is {config.acting.n_action_steps}, but the policy's chunk has "
                f"{self.policy.chunk} steps"
            )
        config.evaluation.delay.check(self.policy, config.acting.n_action_steps)

    def check_data(self) -> None:
        """Reject data that does not fit the simulator, before the policy is loaded."""

    def load_train_tasks(self) -> Sequence[Any]:
        """Initial states for training."""
        return list_episodes(self.config.data, self.sim.tasks(), self.sim.layouts())

    def measures(self, policy: ActionPolicy, split: str, step: Step) -> list[RobotMeasure]:
        """Success over fixed initial states, overall and of each task."""
        check_interface(policy, self.sim, self.config.model.accept_other)  # of a checkpoint that was loaded meanwhile
        measures = [self._measure(policy, split, protocol, step) for protocol in PROTOCOLS]
        return [measure for measure in measures if measure.repeats]

    def describe_row(self, rollouts: Rollouts, row: int) -> dict[str, Any] | None:
        """Last image and ending of an episode."""
        return about_episode(rollouts, row)

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Success (also per task if there are few) and length of the step's episodes, and failures so far."""
        # copied and cleared at once, so that a step is never counted twice
        seen = Counter(self._seen)
        self._seen.clear()
        # NaN and not 0: a step whose episodes all failed has no success rate
        count = seen.get("episodes", 0) or math.nan
        found: dict[str, float | Metric] = {f"episode/{name}": seen[name] / count for name in ("success", "steps")}
        for name in self._shown_tasks:
            runs = seen.get(f"episodes/{name}", 0) or math.nan
            found[f"episode/success/{metric_label(name)}"] = seen.get(f"success/{name}", 0) / runs
        self.broken["episodes"] += int(seen.get("failed", 0))
        if compared := seen.get("compared", 0):
            found |= {f"judged/{name}": seen[name] / compared for name in JUDGED}
        return found | {"sim/episodes_failed": float(self.broken["episodes"])} | self.sim_counts.metrics()

    @classmethod
    def export(cls, config: Any, checkpoint: Path, output: Path) -> Exported:
        """Write a self-contained policy folder; a user-defined module is copied as it was saved."""
        model = checkpoint / "model"
        if not is_saved_policy(model):
            # a module of the user's own is saved in a form that only its class can read
            shutil.copytree(model, output, dirs_exist_ok=True)
            return users_policy(config)
        policy = open_policy(model)
        policy.export(output)
        return describe_policy(config, policy, checkpoint.parents[1], output)

    def _measure(self, policy: ActionPolicy, split: str, protocol: str, step: Step) -> RobotMeasure:
        config, run_dir = self.config, Path(self.config.output_dir)
        # one set of videos per evaluation: each costs an episode's rendering
        headline = protocol == "greedy" and split == next(iter(self.eval_tasks))
        videos = ReplayVideos(
            sim=self.sim,
            config=config.sim,
            folder=run_dir / "videos",
            label=f"step-{step.number:06d}-{split}",
            count=config.evaluation.videos,
            fps=config.evaluation.fps,
            size=config.evaluation.video_size,
            chunk=policy.chunk,
        )
        return RobotMeasure(
            policy=policy,
            sim=self.sim,
            protocol=protocol,
            evaluation=config.evaluation,
            acting=config.acting,
            seed=config.seed,
            split=split,
            run_dir=run_dir,
            conditions={"code": self.code, "precision": config.trainer.mixed_precision},
            others=swap_layouts(self.eval_tasks[split]) if config.evaluation.swapped else {},
            videos=videos if headline else None,
        )

    def _note(self, payload: EpisodePayload) -> None:
        # one transfer to the host for all of them
        true = [] if payload.true_success is None else [payload.true_success]
        columns = [column.tolist() for column in to_host([payload.failed, payload.success, payload.lengths, *true])]
        if true:
            pairs = [pair for failed, *pair in zip(columns[0], columns[1], columns.pop(), strict=True) if not failed]
            self._seen.update(judged_counts([verdict for verdict, _ in pairs], [own for _, own in pairs]))
        # rows of a group are consecutive, so row // size is its initial state
        size = len(columns[0]) // len(payload.episodes)
        for row, (failed, success, steps) in enumerate(zip(*columns, strict=True)):
            if failed:
                if not self.broken["episodes"] and not self._seen["failed"]:
                    reason = payload.reasons[row]
                    LOGGER.warning("an environment failed; its group is excluded from the update: %s", reason)
                self._seen["failed"] += 1
                continue
            task = payload.episodes[row // size].task
            self._seen.update({f"episodes/{task}": 1, "episodes": 1, "steps": steps})
            self._seen.update({f"success/{task}": int(success), "success": int(success)})


class RobotRecipe(RobotDomain, Recipe[ActionPolicy, Any]):
    """Runs, scores and evaluates episodes of a robot policy; the loss is the objective's."""

    config: RobotConfig
    policy: ActionPolicy
    samples_as_it_scores: ClassVar[bool] = True

    def __init__(self, config: RobotConfig, policy: ActionPolicy | None = None, sim: RobotSim | None = None) -> None:
        super().__init__(config)
        self.objective = self.make_objective()
        self.open(config, policy, sim)
        self._starts_differ = False
        self._earned: dict[bool, list[float]] | None = {True: [], False: []}
        self.old = OldPolicy(self.policy) if "kl_old" in self.objective.needs else None
        self.terms = [] if self.old is None else [self.old]

    def make_objective(self) -> Objective:
        """The objective of the configuration."""
        return make_objective(self.config.objective)

    @abstractmethod
    def rewards(self, rollouts: Rollouts, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """Total reward (B,) and its terms, NaN if an episode cannot be scored; failed rows are masked later."""

    def rollout(self, policy: ActionPolicy, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Run G episodes from each initial state."""
        size = self.config.trainer.samples_per_task
        each = self.config.sim.randomization.per == "episode"
        # with `per: episode`, each sample of a group has its own draw of the randomisation
        repeated = [own_draw(task, member) if each else task for task in tasks for member in range(size)]
        episodes = run_episodes(
            policy,
            self.sim,
            repeated,
            self.config.acting,
            # one seed per episode, so an episode does not depend on the wave it runs in
            streams.seeds(len(tasks), size).tolist(),
            record=self.needs_every_frame,
            timed="durations" in self.objective.needs,
        )
        # one entry per group: the payload is indexed by `group`, while `run_episodes` has one per row
        episodes.payload = dataclasses.replace(episodes.payload, episodes=list(tasks))
        group = torch.arange(len(tasks)).repeat_interleave(size)
        self._note(episodes.payload)
        # draws per episode differ on purpose
        if size > 1 and "samples" in self.objective.advantage.needs and not each:
            self._starts_differ = self._starts_differ or self._warn_of_unequal_starts(episodes.payload, group)
        rollouts = self.pack(episodes, group, policy)
        # after `_note`, so that failures are counted even if the step is thrown away
        check_usable(rollouts)
        return rollouts

    def _warn_of_unequal_starts(self, payload: EpisodePayload, group: Tensor) -> bool:
        found = payload.unequal_starts(group)
        if found is not None:
            LOGGER.warning(
                "the episodes of %s do not start from the same state: %s differs. Advantages are computed as if "
                "they did. The environment probably uses random numbers that reset(seed) does not control, such as "
                "np.random.default_rng()",
                *(episode_id(payload.episodes[int(group[found[0]])]), found[1]),
            )
        return found is not None

    def pack(self, episodes: Episodes, group: Tensor, policy: ActionPolicy) -> Rollouts:
        """Rollouts of finished episodes, whose groups are `group` (B,)."""
        return pack_episodes(episodes, group, policy, self.config.logp_level)

    def _note_earnings(self, earned: dict[bool, list[float]], payload: EpisodePayload, reward: Tensor) -> None:
        """Say once if solved episodes earn less than others, as where a success ends the pay of every step."""
        rows = zip(*(part.tolist() for part in to_host([payload.success, payload.failed, reward])), strict=True)
        for success, failed, value in rows:
            if not failed and math.isfinite(value):
                earned[success].append(value)
        if min(map(len, earned.values())) < ENOUGH:
            return
        solved, others = (sum(earned[success]) / len(earned[success]) for success in (True, False))
        if solved < others:
            LOGGER.warning(
                "solved episodes earned %.3g on average, and the others %.3g, so a policy learns to avoid success: it "
                "ends an episode that would go on paying. Reward success by more, use rewards that are at most 0, or "
                "set end_at_success: false in sim.options.settings",
                *(solved, others),
            )
        self._earned = None

    @property
    def own_term(self) -> str:
        """Kind of the environment's own reward: a potential of the state if the simulator says so, else rewards."""
        return "potential" if getattr(self.sim, "potential_rewards", False) else "return"

    def own_reward(self, payload: EpisodePayload) -> Tensor:
        """(B,) reward of an episode as its environment defines it: the last potential, or the sum over all steps."""
        return payload.last_reward if self.own_term == "potential" else payload.returns

    def refuse_returns(self, where: str) -> None:
        """Reject sums of a potential, which reward staying near the goal; `where` begins the message."""
        if self.own_term == "potential":
            raise UserError(
                f"{where}: the rewards of this simulator are potentials of the state, so their sum over control "
                "steps rewards staying near the goal rather than reaching it"
            )

    @property
    def needs_every_frame(self) -> bool:
        """Whether the reward needs an image of every control step."""
        return False

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Rewards of the episodes; NaN, without a gradient, for a group with a failed environment."""
        payload = EpisodePayload.of(rollouts)
        # a failed episode has no reward, and without it the group's mean would be biased
        whole = ~_in_failed_group(rollouts.group, payload.failed)
        reward, terms = self.rewards(rollouts, step)
        if self._earned is not None and self.own_term == "return" and payload.chunk_returns is not None:
            self._note_earnings(self._earned, payload, reward)
        unknown = torch.full_like(reward, float("nan"))
        terms = {"success": payload.success.float(), **terms}
        return rollouts.replace(
            reward=torch.where(whole, reward, unknown),
            reward_terms={name: torch.where(whole, values, unknown) for name, values in terms.items()},
        )

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Log-probability and entropy of each decision, at the sampling temperature."""
        inputs, decisions, place = self.scored_chunks(rollouts)
        # the sampling temperature: with another one the ratio would not start at 1
        temperature = self.config.acting.temperature
        # before the policy's pass, whose graph must not see other weights
        means = self.old.means(inputs, decisions) if self.old is not None and "kl_old" in outputs else None
        # through `forward`, as the policy may be wrapped for distributed training
        logp, entropy = policy("log_probs", inputs, decisions, temperature)
        found = PolicyOutputs(self.spread(logp, *place))
        if means is not None:
            moved = policy("divergence", inputs, decisions, means, temperature)
            found = dataclasses.replace(found, kl_old=self.spread(moved, *place))
        if "entropy" not in outputs:
            return found
        if entropy is None:
            raise UserError("the objective needs entropies, but log_probs of this policy returns only logp")
        return dataclasses.replace(found, entropy=self.spread(entropy, *place))

    def scored_chunks(self, rollouts: Rollouts) -> tuple[PolicyInputs, Tensor, tuple[Tensor, Tensor, Tensor, int]]:
        """Inputs and decisions (M, ...) of the chunks that count, and their positions for `spread`."""
        payload = EpisodePayload.of(rollouts)
        rows, chunks = _chunks_that_count(payload, rollouts.host.mask, self.policy, self.config.logp_level)
        if not len(rows):  # all failed; one masked chunk is scored, for a loss with a gradient
            rows = chunks = torch.zeros(1, dtype=torch.int64)
        groups = rollouts.host.group[rows].tolist()
        rows, chunks = to_device(rows, rollouts.mask.device), to_device(chunks, rollouts.mask.device)
        place = (rows, chunks, payload.steps, rollouts.mask.shape[1])
        return _inputs(payload, groups, rows, chunks), payload.decisions[rows, chunks], place

    def spread(self, values: Tensor, rows: Tensor, chunks: Tensor, steps: Tensor, width: int) -> Tensor:
        """(M, D) values of chunks as (B, T) decisions."""
        if self.config.logp_level == "chunk":
            # a chunk's likelihood counts only decisions that were executed
            executed_mask = self.policy.executed_mask(steps[rows, chunks])
            values = (values * executed_mask).sum(1, keepdim=True)
        # zeros where nothing was scored: the mask excludes them from every mean
        out = values.new_zeros(*steps.shape, values.shape[1])
        # `index_put` keeps the gradient; the cut undoes padding to whole chunks
        return out.index_put((rows, chunks), values).flatten(1)[:, :width]


def _users_parts(config: RobotConfig) -> dict[str, str]:
    """Settings that name user code."""
    named = {"sim.kind": config.sim.kind, "sim.env": config.sim.env, "model.kind": config.model.kind}
    return {name: spec for name, spec in named.items() if ":" in spec}


def pack_episodes(episodes: Episodes, group: Tensor, policy: ActionPolicy, level: str = "token") -> Rollouts:
    """Rollouts of B finished episodes, whose `payload.episodes` has one entry per group; `level` is `logp_level`."""
    payload, logp = episodes.payload, episodes.logp
    # (B, C, D) 1 for decisions of executed control steps
    mask = policy.executed_mask(payload.steps)
    # summed over executed decisions only: the rest of the chunk did nothing
    if level == "chunk":
        logp, mask = (logp * mask).sum(-1, keepdim=True), (payload.steps > 0)[..., None].float()
    # a failed environment has executed steps, but they earned nothing known
    mask = torch.where(payload.failed[:, None, None], 0.0, mask)
    seconds = payload.seconds
    return Rollouts(
        group=to_device(group, mask.device),
        mask=mask.flatten(1),
        # 0 and not the sampled value where masked, as everywhere in `Rollouts`
        logp_old=(logp * mask).flatten(1),
        reward=torch.full((len(group),), float("nan"), device=mask.device),
        payload=payload,
        # seconds of a chunk, for objectives that weight decisions by their duration
        extras={} if seconds is None else {DURATION: seconds[..., None].expand_as(mask).flatten(1)},
    )


def _chunks_that_count(
    payload: EpisodePayload, mask: Tensor, policy: ActionPolicy, level: str
) -> tuple[Tensor, Tensor]:
    """Rows and chunks, (M,) each, with a decision under the mask."""
    each = policy.decisions if level == "token" else 1
    # micro-batches are trimmed to their longest row, in whole decisions and not in whole chunks
    missing = payload.steps.shape[1] * each - mask.shape[1]
    whole = nn.functional.pad(mask, (0, missing)).unflatten(1, (payload.steps.shape[1], each))
    rows, chunks = torch.nonzero((whole > 0).any(2), as_tuple=True)
    return rows, chunks


def _inputs(payload: EpisodePayload, groups: Sequence[int], rows: Tensor, chunks: Tensor) -> PolicyInputs:
    """Observations before M chunks of groups (M,), without a past: see `ActionPolicy.past` for why none is needed."""
    return PolicyInputs(
        images=None if payload.images is None else payload.images[rows, chunks],
        views=None if payload.views is None else payload.views[rows, chunks],
        state=payload.states[rows, chunks],
        instructions=tuple(payload.episodes[number].instruction for number in groups),
    )


def _in_failed_group(group: Tensor, failed: Tensor) -> Tensor:
    """(B,) bool, rows of groups with an episode whose environment failed."""
    failures = torch.zeros(len(group), dtype=torch.int64, device=group.device).index_add_(0, group, failed.long())
    return failures[group] > 0


def check_usable(rollouts: Rollouts) -> None:
    """Raise NoUsableTasksError if every group has an episode whose environment failed."""
    payload = EpisodePayload.of(rollouts)
    if bool(_in_failed_group(rollouts.group, payload.failed).all()):
        reasons = sorted({reason for reason in payload.reasons if reason})
        reason = "; ".join(reasons) or "no reason given"
        raise NoUsableTasksError(f"every group had a failed environment: {reason}", rollouts)
