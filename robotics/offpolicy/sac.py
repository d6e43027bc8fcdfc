"""Soft actor-critic on robots: a policy that learns from a replay of all its episodes.

A step of the run plays `trainer.tasks_per_step` whole episodes, adds their transitions to the replay, and makes
`utd` updates of the critics for each decision of the policy; `robotics.offpolicy.sac_losses` has the formulas. The
first `warmup_steps` control steps act uniformly at random, are learned from later, and are not made up for.

The reward of a control step is

    r_t = w_s [t solved the task] + w_e R_t + w_p (R_t - R_{t-1}),   R_{-1} = R_0,

with R_t the environment's reward; `reward` has the weights. It is computed when a batch is drawn, as is the discount,
so that a resumed run may change both. A time limit is no end: the value of the final observation counts as always. The
actions in the replay are those that were executed.

Episodes end before the policy learns from them, so no episode is open at a checkpoint, and a resumed run equals an
uninterrupted one to the bit, replay included.

The critic reads the simulator's full state if it reports one, and one entry per task if there are several; it is used
in training only. States are standardised once, by the replay at the first update.

Source: SAC, arXiv 1801.01290 and 1812.05905. The defaults are those of DLR-RM/stable-baselines3
    stable_baselines3/sac/sac.py, with these differences: the density of an action is exact; log alpha is bounded; sigma
    approaches its bounds smoothly; the actor sees the critics of the same update; the loss of the critics is a mean
    over them; states are standardised; and updates follow whole episodes, as with its `train_freq=(n, "episode")`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from mmrl.core.objectives.objective import Objective
from mmrl.core.payload import per_decision, to_device, to_host
from mmrl.core.rollouts import Rollouts
from mmrl.errors import RunError, UserError
from mmrl.fields import bounded, choice, rare
from mmrl.runs.fingerprint import content_digest
from mmrl.training.objectives import ObjectiveConfig, make_objective
from mmrl.training.processes import HeapTrimmer, Streams, make_generator
from mmrl.training.recipe import Reference, Step
from mmrl.training.settings import BaseRunConfig, BaseTrainerConfig
from mmrl.training.update import MAX_NONFINITE, weights_digest
from robotics.data.features import ACTION
from robotics.episodes.collect import Episodes, run_episodes
from robotics.episodes.dataset_fit import recorded_features
from robotics.episodes.episode_evaluation import RobotEvaluationConfig
from robotics.episodes.payload import EpisodePayload, EpisodeSetConfig
from robotics.methods.ppo import ChunkRewardConfig, ChunkWeights
from robotics.methods.progress_sim import PotentialConfig, ProgressSim
from robotics.methods.robot_recipe import RobotParts, RobotRecipe, check_usable, pack_episodes
from robotics.offpolicy.prior import PriorConfig, prior_records
from robotics.offpolicy.q_ensemble import QEnsemble
from robotics.offpolicy.replay import Replay
from robotics.offpolicy.sac_learner import NonFiniteError, Rates, SacLearner, SacSettings, over_updates
from robotics.offpolicy.transitions import Experience, TransitionBatch, TransitionFile, TransitionForm, prior_count
from robotics.policies.base.action_policy import ActionPolicy, PolicyInputs
from robotics.policies.base.action_statistics import StateStatistics
from robotics.policies.improved import BaseActs, ImprovedPolicy
from robotics.policies.policy_loading import ActionPolicyConfig
from robotics.policies.squashed import SquashedActionPolicy, UniformPolicy
from robotics.sim.episodes import RobotSim
from robotics.sim.interface import interface_of

LOGGER = logging.getLogger("mmrl")
CRITIC_STATES = ("full", "policy")
WARMUPS = ("random", "policy", "base")
UNUSED = (
    *("minibatches_per_step", "epochs", "micro_batch", "schedule", "warmup_steps", "final_learning_rate"),
    *("weight_decay", "mixed_precision", "sharding", "gathered"),
)
"""Options of the trainer that have no effect here."""


def _trainer() -> BaseTrainerConfig:
    return BaseTrainerConfig(tasks_per_step=1, learning_rate=3e-4, max_grad_norm=0.0)


@dataclass
class RobotSacConfig(RobotParts, BaseRunConfig):
    """A run of soft actor-critic on a robot."""

    model: ActionPolicyConfig = field(default_factory=lambda: ActionPolicyConfig(kind="squashed", chunk=1))
    """The policy, of kind squashed."""
    data: EpisodeSetConfig = field(default_factory=EpisodeSetConfig)
    """Initial states for training."""
    reward: ChunkRewardConfig = field(default_factory=ChunkRewardConfig)
    """Reward of a control step."""
    potential: PotentialConfig = rare(field(default_factory=PotentialConfig))
    """Potential for `reward.potential`, instead of the environment's rewards."""
    sac: SacSettings = field(default_factory=SacSettings)
    """The method."""
    batch: int = bounded(256, at_least=1)
    """Number of transitions of an update."""
    utd: float = bounded(1.0, above=0)
    """Updates of the critics per decision of the policy; fractions are carried over to the next step."""
    warmup_steps: int = bounded(1000, at_least=1)
    """Control steps before the first update, rounded up to whole episodes."""
    warmup: str = choice("random", WARMUPS)
    """Actions of the warm-up: random = uniform; policy = as always, for a policy that was trained before; base = those
    of the frozen base, for model.kind residual and steered."""
    capacity: int = rare(bounded(1_000_000, at_least=1))
    """Number of newest transitions that batches are drawn from. Older ones stay on disk."""
    critic_state: str = rare(choice("full", CRITIC_STATES))
    """What the critics read: full = the simulator's full state if it reports one; policy = the policy's own state."""
    prior: PriorConfig = field(default_factory=PriorConfig)
    """Data of others in each batch."""
    evaluation: RobotEvaluationConfig = field(default_factory=RobotEvaluationConfig)
    """Evaluation over fixed initial states."""
    trainer: BaseTrainerConfig = field(default_factory=_trainer)
    """Episodes per step, optimiser and guards. Adam has no weight decay, and computes in float32."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        self.check_parts(self.evaluation, {"data": self.data} | self.held_out())
        self.reward.check_end(self.sim)
        usual = BaseTrainerConfig()
        for name in UNUSED:
            if getattr(self.trainer, name) != getattr(usual, name):
                raise ValueError(
                    f"trainer.{name} is {getattr(self.trainer, name)!r}, which has no effect in {self.recipe}; leave "
                    f"it at {getattr(usual, name)!r}"
                )
        if self.sim.randomization.per != "group":
            raise ValueError(
                "sim.randomization.per is 'episode', but every episode has its own task here; leave it out"
            )
        if self.acting.n_action_steps or self.acting.scale != "none":
            raise ValueError(
                f"{self.recipe} executes whole chunks of actions in -1..1; leave acting.n_action_steps and "
                "acting.scale out, and set model.chunk to the number of control steps to execute (with a frozen base, "
                "model.options.n_action_steps)"
            )
        if self.sim.image_size and self.model.kind == "squashed" and not self.model.path:
            raise ValueError(
                f"sim.image_size is {self.sim.image_size}, but {self.recipe} learns from states; set sim.image_size=0"
            )
        if self.potential.demonstrations and not self.reward.potential:
            raise ValueError("potential.demonstrations is set, but reward.potential is not; give it a weight")
        if self.potential.demonstrations and self.prior.path:
            raise ValueError(
                "prior.path has the rewards of its environment and not those of potential.demonstrations; remove one"
            )
        if self.sac.demo_bc and not self.prior.path:
            raise ValueError(f"sac.demo_bc is {self.sac.demo_bc:g}, but there are no demonstrations; set prior.path")


@dataclass
class ExperiencePayload(EpisodePayload):
    """Episodes with what a replay stores of them; K control steps of a chunk, A entries of an action."""

    actions: Tensor | None = per_decision(default=None)
    """(B, C, K, A) float32 in -1..1: executed actions, and those of the policy for steps that were not executed."""
    rewards: Tensor | None = per_decision(default=None)
    """(B, C, K) float32, the environment's reward of each control step; 0 where not executed."""


class SacUpdater:
    """Adds the episodes of a step to the replay, and learns from batches of it; see `mmrl.training.update.Updates`."""

    def __init__(
        self,
        recipe: RobotSacRecipe,
        accelerator: Accelerator,
        reference: Reference,
        failures: Path,
        heap: HeapTrimmer | None = None,
    ) -> None:
        self.recipe = recipe
        recipe.open_replay(failures.parent / "replay")
        self.learner = recipe.make_learner()
        self.heap = heap or HeapTrimmer(enabled=False)
        self.optimiser_step = 0
        self.skipped = 0
        self.waited = 0
        self._due = 0.0
        """Updates that are due, of which the fraction is carried over."""
        self._at_start = weights_digest(recipe.policy.parameters())

    @property
    def moved(self) -> bool:
        """Whether any weight of the policy differs from the start of the run."""
        return weights_digest(self.recipe.policy.parameters()) != self._at_start

    def update(self, rollouts: Rollouts, step: Step, *, teaches: bool = True) -> dict[str, float]:
        """Store the episodes, and make the updates that are due."""
        recipe, config = self.recipe, self.recipe.config
        self._due += config.utd * self._store(recipe.experiences(rollouts, step))
        taken: list[dict[str, float]] = []
        if self._due >= 1 and not self.learner.updates:
            recipe.scale(self.learner)
        for number in range(int(self._due)):
            generator = make_generator(config.seed, "replay", step.number, number)
            try:
                taken.append(self.learner.update(recipe.draw(generator), generator))
            except NonFiniteError as error:
                self._skip(error, step)
        self._due -= int(self._due)
        self.optimiser_step = self.learner.actor_updates
        self.heap.trim()
        return over_updates(taken) | self._counts()

    def state_dict(self) -> dict[str, Any]:
        """Critics, temperature, optimisers and counters."""
        counts = {name: getattr(self, name) for name in ("optimiser_step", "skipped", "waited")}
        return {"learner": self.learner.state_dict(), "due": self._due, **counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.learner.load_state_dict(state["learner"])
        self._due = float(state["due"])
        for name in ("optimiser_step", "skipped", "waited"):
            setattr(self, name, int(state[name]))

    def _store(self, episodes: Sequence[Experience]) -> float:
        """Add episodes to the replay; returns their decisions, without those of the warm-up."""
        replay = self.recipe.replay
        before = max(replay.control_steps, self.recipe.config.warmup_steps)
        replay.append(episodes)
        fresh = sum(int(episode.steps.sum()) for episode in episodes)
        if not fresh:
            return 0.0
        # an episode in which the warm-up ends counts in part
        counted = max(0, replay.control_steps - before) / fresh
        return counted * sum(len(episode.steps) for episode in episodes)

    def _skip(self, error: NonFiniteError, step: Step) -> None:
        self.skipped += 1
        message = f"step {step.number}: {error}"
        if self.recipe.config.trainer.on_nonfinite == "stop":
            raise RunError(message) from error
        if self.skipped > MAX_NONFINITE:
            raise RunError(f"{message}; {self.skipped} updates have been skipped, more than {MAX_NONFINITE}") from error
        LOGGER.warning("%s; update skipped", message)

    def _counts(self) -> dict[str, float]:
        replay = self.recipe.replay
        return {
            "replay/transitions": float(len(replay)),
            "replay/control_steps": float(replay.control_steps),
            "sac/updates": float(self.learner.updates),
            "optim/skipped": float(self.skipped),
            "optim/lr": self.learner.rates.learning_rate,
        }


class RobotSacRecipe(RobotRecipe):
    """Episodes into a replay, and batches out of it; see the module."""

    config: Any
    policy: SquashedActionPolicy | ImprovedPolicy
    own_loss = "sac"
    compared: Sequence[str] = ()
    updates = SacUpdater
    watched = False
    """Whether the replay says which actions were an overseer's."""
    replay: Replay

    def __init__(self, config: Any, policy: ActionPolicy | None = None, sim: RobotSim | None = None) -> None:
        if PartialState().num_processes > 1:
            raise UserError(
                f"{config.recipe} has one replay and trains in one process, but {PartialState().num_processes} were "
                "started; start it without a launcher, and use sim.workers for more environments at once"
            )
        super().__init__(config, policy, sim)
        self.weights: ChunkWeights = config.reward.weights(config.sim.kind)
        if self.weights.environment:
            self.refuse_returns(f"reward.environment is {self.weights.environment:g}; use reward.potential")
        if not isinstance(self.policy, SquashedActionPolicy | ImprovedPolicy):
            raise UserError(
                f"{config.recipe} needs a policy that draws actions with a gradient, but this is a "
                f"{type(self.policy).__name__}; set model.kind=squashed, residual or steered, or model.path to such a "
                "policy"
            )
        improved = self.policy if isinstance(self.policy, ImprovedPolicy) else None
        self._check_improved(improved)
        self.tasks = dict(self.sim.tasks())
        full = getattr(self.sim, "full_state_size", 0) if config.critic_state == "full" else 0
        seen = self.policy.config.encoder.state_size or self.sim.state_size
        sizes = (seen, full, self.policy.chunk, self.policy.action_size)
        self.form = TransitionForm(*sizes, self.policy.noise_chosen, self.watched, config.sac.demo_bc > 0)
        # with an overseer, demonstrations earn 0, as they have no interventions
        rewarded = not self.watched and bool(self.weights.environment or self.weights.potential)
        self._prior = (
            prior_records(config.prior, self.form, self.sim, rewarded=rewarded, accept_other=config.model.accept_other)
            if config.prior.path
            else None
        )
        # now, because a run takes the records away
        self._prior_digest = [] if self._prior is None else [content_digest([self._prior])]
        uniform = UniformPolicy(self.policy.chunk, self.policy.action_size)
        self._first = {"random": uniform, "base": improved and BaseActs(improved)}.get(config.warmup)

    def wrapped(self, sim: RobotSim) -> RobotSim:
        """The simulator, with the configured potential as its rewards."""
        return ProgressSim.over(sim, self.config.potential, self.config.model.accept_other)

    def make_objective(self) -> Objective:
        """None of its blocks is used: the loss is that of `SacUpdater`."""
        return make_objective(ObjectiveConfig(preset="sft"))

    def data_digest(self) -> str:
        """Digest of the initial states and the prior data."""
        return content_digest([self.train_tasks, *self._prior_digest])

    @property
    def keeps_sampled_logp(self) -> bool:
        """True: no log-probabilities are compared."""
        return True

    def _check_improved(self, improved: ImprovedPolicy | None) -> None:
        """Check that the settings fit a policy with or without a frozen base."""
        config = self.config
        if improved is None:
            if config.sim.image_size:
                raise UserError(f"{config.recipe} learns from states with this policy; set sim.image_size=0")
            if config.warmup == "base":
                raise UserError("warmup is 'base', but the policy has no frozen base; use random or policy")
            return
        if config.warmup == "random":
            raise UserError("warmup is 'random', but the policy improves a frozen base; use base or policy")
        if config.prior.path:
            raise UserError("prior.path: prior data has no actions of the frozen base, which the head reads; remove it")

    def open_replay(self, folder: Path) -> None:
        """Begin an empty replay in a folder."""
        about = interface_of(self.sim)
        rate = (about.control_hz or 1.0) / self.form.chunk
        # a head on a frozen base reads more than the state
        names = about.state if self.form.state == self.sim.state_size else None
        self.replay = Replay(folder, self.form, rate, names)
        self.replay.features[ACTION] |= {"info": recorded_features(self.sim, {})[ACTION]["info"]}
        self.opened.callback(self.replay.close)
        self.prior = TransitionFile(folder / "prior.bin", self.form) if self._prior is not None else None
        if self.prior is not None and self._prior is not None:
            self.prior.append(self._prior)
            self.opened.callback(self.prior.close)
            self._prior = None

    @property
    def no_signal(self) -> str:  # type: ignore[override]
        """The warm-up."""
        return f"it ended within the {self.config.warmup_steps} control steps of its warm-up (warmup_steps)"

    def warms_up(self) -> bool:
        """Whether the replay is still too small for an update."""
        return self.replay.control_steps < int(self.config.warmup_steps)

    def rollout(self, policy: ActionPolicy, tasks: Sequence[Any], streams: Streams, step: Step) -> Rollouts:
        """Run an episode from each initial state."""
        seeds = streams.seeds(len(tasks), 1).tolist()
        acting = self._first if self._first is not None and self.warms_up() else policy
        episodes = run_episodes(acting, self.sim, list(tasks), self.config.acting, seeds)
        self._note(episodes.payload)
        rollouts = self.pack(episodes, torch.arange(len(tasks)), policy)
        check_usable(rollouts)
        return rollouts

    def pack(self, episodes: Episodes, group: Tensor, policy: ActionPolicy) -> Rollouts:
        """See `RobotRecipe.pack`; with executed actions and the rewards of control steps."""
        payload = episodes.payload
        actions = self._unexecuted(payload)
        rewards = torch.zeros(*payload.steps.shape, self.form.chunk)
        for row, counts in enumerate(payload.steps.tolist()):
            done = 0
            for chunk, count in enumerate(counts):
                executed = episodes.actions[row][done : done + count].clip(-1, 1)
                actions[row, chunk, :count] = to_device(torch.from_numpy(executed), actions.device)
                rewards[row, chunk, :count] = torch.from_numpy(episodes.rewards[row][done : done + count])
                done += count
        found = ExperiencePayload(**vars(payload), actions=actions, rewards=to_device(rewards, actions.device))
        return pack_episodes(dataclasses.replace(episodes, payload=found), group, policy)

    def _unexecuted(self, payload: EpisodePayload) -> Tensor:
        """Actions (B, C, K, A) that the policy chose; zeros if it chose noise."""
        if self.form.noise:
            return torch.zeros(*payload.steps.shape, self.form.chunk, self.form.action, device=payload.steps.device)
        return self.policy.chosen(payload.decisions)

    def rewards(self, rollouts: Rollouts, step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        """Undiscounted return of an episode."""
        payload = EpisodePayload.of(rollouts)
        # differences of the potential add up to its last value, less the first
        own = self.weights.environment * payload.returns + self.weights.potential * payload.last_reward
        return self.weights.success * payload.success + own, {self.own_term: self.own_reward(payload)}

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """None: the update does not weigh the rows of this step."""
        return rollouts

    def experiences(self, rollouts: Rollouts, step: Step) -> list[Experience]:
        """The episodes of a step whose environment did not fail."""
        payload = ExperiencePayload.of(rollouts)
        assert payload.actions is not None
        assert payload.rewards is not None
        names = list(self.tasks)
        full, last = payload.full_states, payload.last_full_state
        seen, last_seen = self.policy.looks(payload.states, payload.decisions), self._last_look(rollouts, step)
        if not self.form.full:
            full, last = seen[..., :0], last_seen[:, :0]
        if full is None or last is None:
            raise UserError("the simulator does not report its full state at the end; set critic_state: policy")
        parts = [seen, last_seen, full, last, payload.actions, payload.rewards, payload.steps]
        # critics of other policies judge the executed actions
        parts += [self.policy.chosen(payload.decisions)] if self.form.noise else []
        states, ends, whole, whole_ends, actions, rewards, steps, *noise = (part.numpy() for part in to_host(parts))
        flags = [part.tolist() for part in to_host([payload.failed, payload.terminated, payload.success])]
        found = []
        for row, (failed, terminated, success) in enumerate(zip(*flags, strict=True)):
            if failed:
                continue
            spec, count = payload.episodes[int(rollouts.host.group[row])], int((steps[row] > 0).sum())
            found.append(
                Experience(
                    states=np.concatenate([states[row, :count], ends[row][None]]),
                    full=np.concatenate([whole[row, :count], whole_ends[row][None]]),
                    actions=actions[row, :count],
                    rewards=rewards[row, :count],
                    steps=steps[row, :count].astype(np.int32),
                    task=names.index(spec.task),
                    instruction=spec.instruction,
                    terminated=terminated,
                    success=success,
                    noise=noise[0][row, :count] if noise else None,
                )
            )
        return found

    def _last_look(self, rollouts: Rollouts, step: Step) -> Tensor:
        """Input (B, V) of the policy's head at the end of each episode."""
        payload = EpisodePayload.of(rollouts)
        texts = tuple(payload.episodes[number].instruction for number in rollouts.host.group.tolist())
        batch = PolicyInputs(payload.last_image, payload.last_state, texts, payload.last_views)
        with torch.no_grad():
            return self.policy.look(batch, make_generator(self.config.seed, "look", step.number))

    def draw(self, generator: torch.Generator) -> TransitionBatch:
        """A batch from the replay and, by the configured ratio, from prior data."""
        config = self.config
        prior = 0 if self.prior is None else prior_count(config.batch, config.prior.ratio)
        parts = [self.replay.index.draw(config.batch - prior, generator, config.capacity)]
        if self.prior is not None:
            parts.append(self.prior.draw(prior, generator))
        return self.batch(np.concatenate(parts), prior)

    def batch(self, records: NDArray[np.void], prior: int = 0) -> TransitionBatch:
        """Transitions on the policy's device, with the run's reward; the last `prior` ones are of prior data."""

        def part(values: NDArray[Any]) -> Tensor:
            return to_device(torch.from_numpy(np.ascontiguousarray(values)), self.policy.device)

        full = "full" if self.form.full else "state"
        return TransitionBatch(
            state=part(records["state"]),
            full=part(records[full]),
            actions=part(records["actions"]),
            rewards=part(step_rewards(records, self.weights)),
            steps=part(records["steps"].astype(np.int64)),
            next_state=part(records["next_state"]),
            next_full=part(records[f"next_{full}"]),
            terminated=part(records["terminated"]),
            task=part(records["task"].astype(np.int64)),
            prior=part(np.arange(len(records)) >= len(records) - prior),
            demonstrated=part(records["demonstrated"]) if self.form.demonstrated else None,
        )

    def inputs(self, states: Tensor, task: Tensor) -> PolicyInputs:
        """The policy's inputs for states (B, S) in tasks (B,)."""
        texts = list(self.tasks.values())
        return PolicyInputs(None, states, tuple(texts[number] for number in task.tolist()))

    def critic_states(self, full: Tensor, task: Tensor) -> Tensor:
        """(B, F), with one entry per task if there are several."""
        if len(self.tasks) == 1:
            return full
        return torch.cat([full, one_hot(task, len(self.tasks)).to(full)], 1)

    def make_learner(self) -> SacLearner:
        """The learner of the run, on the policy's device."""
        config = self.config
        several = len(self.tasks) if len(self.tasks) > 1 else 0
        critics = config.sac.critics
        ensemble = QEnsemble(
            (self.form.full or self.form.state) + several,
            math.prod(self.form.judged),
            critics=critics.count,
            width=critics.width,
            layers=critics.layers,
            norm=critics.layer_norm,
            seed=config.seed,
        )
        trainer = config.trainer
        betas = (trainer.betas[0], trainer.betas[1])
        rates = Rates(trainer.learning_rate, betas, trainer.adam_eps, trainer.max_grad_norm)
        ensemble = ensemble.to(self.policy.device)
        settings = dataclasses.replace(config.sac, actor_every=config.sac.actor_every or max(1, round(config.utd)))
        return SacLearner(self.policy, ensemble, settings, rates, self.inputs, self.critic_states)

    def scale(self, learner: SacLearner) -> None:
        """Standardise states by those of the replay and of prior data; a loaded policy keeps its own scale."""
        records = [self.replay.index.records] + ([] if self.prior is None else [self.prior.records])
        found = {name: np.concatenate([part[name] for part in records]) for name in ("state", "full")}
        if not self.config.model.path:
            self.policy.scale_states(StateStatistics.from_arrays(found["state"]))
        own = StateStatistics.from_arrays(found["full" if self.form.full else "state"])
        tasks = len(self.tasks) if len(self.tasks) > 1 else 0
        # entries of tasks stay 0 and 1
        learner.scale_states(
            StateStatistics(np.concatenate([own.mean, np.zeros(tasks)]), np.concatenate([own.std, np.ones(tasks)]))
        )

    def save_parts(self, folder: Path) -> None:
        """Write the replay."""
        self.replay.save(folder / "replay")

    def load_parts(self, folder: Path) -> None:
        """Continue with the replay of a checkpoint."""
        self.replay.restore(folder / "replay")

    def describe(self) -> str:
        """The losses."""
        sac = self.config.sac
        chosen = f"a subset of {sac.critics.subset}" if sac.critics.subset else "all"
        entropy = " - alpha log pi(a'|o')" if sac.entropy_in_target else ""
        lines = [
            f"{self.config.recipe}: critics minimise mean (Q(s, a) - y)^2",
            f"  y = R + {sac.gamma:g}^h (1 - d) (min Q'(s', a'){entropy}), h of {self.form.chunk} steps executed",
            f"  min over {chosen} of {sac.critics.count} critics",
            f"  actor minimises mean (alpha log pi(a|o) - {sac.actor_values} Q(s, a)), a ~ pi",
            f"  alpha keeps the entropy at {sac.temperature.target_entropy:g} nats per entry of an action",
            *([f"  the actor also imitates demonstrations, with the weight {sac.demo_bc:g}"] if sac.demo_bc else []),
        ]
        return "\n".join(lines)


def step_rewards(records: NDArray[np.void], weights: ChunkWeights) -> NDArray[np.float32]:
    """(B, K) reward of each control step of some transitions; the formula is that of the module."""
    rewards, steps = records["rewards"], records["steps"]
    found = np.float32(weights.environment) * rewards
    if weights.potential:
        earlier = np.concatenate([records["before"][:, None], rewards[:, :-1]], 1)
        found = found + np.float32(weights.potential) * (rewards - earlier)
    # paid by the last executed step
    solved = records["success"][:, None] & (np.arange(rewards.shape[1]) == steps[:, None] - 1)
    return (found + np.float32(weights.success) * solved).astype(np.float32)
