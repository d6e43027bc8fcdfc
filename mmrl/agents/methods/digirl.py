"""DigiRL (Bai et al., arXiv 2406.11896; public code DigiRL-agent/digirl): filtered likelihood with two critics.

Episodes, recorded ones and the run's own, are stored. In every step of the run

1. the critics learn from all stored episodes: the instruction critic whether an episode succeeds, by the text of its
   first prompt; the step critic whether it succeeds from a step on, by everything read up to then;
2. an instruction filter keeps the episodes that ended best, or best against what the instruction critic expected
   (`keep_best`): tasks that are mastered surprise no more and fade out, which is an automatic curriculum;
3. a step filter keeps the steps whose doubly robust advantage is large enough (`paper_advantages`, `code_advantages`);
4. the policy's likelihood of the kept steps is raised: L = - mean over the steps of a batch of [kept] * sum of their
   tokens' log-probs. A dropped step counts as 0 in the mean. There are no importance weights and no KL.

The first `offline_steps` steps run no episodes and filter by reward only, as the public code does; then each step adds
`tasks_per_step` x `samples_per_task` episodes. `method: filtered_cloning` is the baseline: filter by reward, all steps.

Differences from the public code: the critics read the policy's own states, as constants, instead of RoBERTa and BLIP-2;
a step is a turn that has seen all turns before it; the state behind the last step is not read, so V is 0 there and the
step critic has no target there; a batch holds whole episodes, all of their steps; no episodes are held back for
validation, as `eval_data` does that; gradients are averaged. Where the public code and the paper part, `advantage` and
`threshold` choose; `min_score` closes a gap of both (see `keep_best`).

Every process holds all stored episodes and the same critics; reading the episodes is shared between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn

from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe, check_rewards
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.methods.arpo import Fresh, ReplayBuffer, ReplayConfig
from mmrl.agents.methods.digirl_critics import (
    DigirlCriticConfig,
    Fitter,
    InstructionCritic,
    LabelledEpisodes,
    StepCritic,
    instruction_loss,
    label_episodes,
    step_loss,
)
from mmrl.agents.rollout.episodes import AgentPayload, pack_episodes, pack_groups
from mmrl.agents.rollout.storage import RecordedFolder, read_recorded, restore_episode, store_episode
from mmrl.core.loss import Denominators, Metric, mean_metric
from mmrl.core.objectives.objective import LossOutput
from mmrl.core.payload import to_device, to_host
from mmrl.core.returns import turn_starts
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import SET, bounded, choice, only_with, rare
from mmrl.files import expanded
from mmrl.hub.building import BuiltPath, build_if_missing
from mmrl.runs.run_log import stopwatch
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams, check_shares, make_generator, stream_seed
from mmrl.training.recipe import LossTerm, Step, opening
from mmrl.training.settings import RunConfig
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.model.model_config import CriticSettings

METHODS, ADVANTAGES = ("digirl", "filtered_cloning"), ("paper", "code")


@dataclass
class DigirlSettings(BuiltPath):
    """Which episodes and steps to learn from."""

    method: str = choice("digirl", METHODS)
    """digirl, or filtered_cloning: keep episodes by reward, learn from all of their steps, no critics."""
    path: str | None = field(default=None, kw_only=True)  # type: ignore[assignment]
    """Folder of recorded episodes to start from; see mmrl.agents.rollout.storage."""
    offline_steps: int = only_with(bounded(0, at_least=0), path=SET)
    """Number of initial steps that run no episodes."""
    warmup_steps: int = only_with(bounded(0, at_least=0), method="digirl")
    """Number of initial steps that train only the critics."""
    gamma: float = rare(only_with(bounded(0.5, at_least=0, at_most=1), method="digirl"))
    """Discount of the returns that the step critic predicts."""
    advantage: str = rare(only_with(choice("paper", ADVANTAGES), method="digirl", step_filter=True))
    """Advantage of a step: doubly robust (paper), or V(s') - V(s) - 0.05 + r + return (code)."""
    lam: float = rare(
        only_with(bounded(0.5, at_least=0, at_most=1), method="digirl", step_filter=True, advantage="paper")
    )
    """Weight of the final reward in the paper's advantage; raised to the number of steps until the end."""
    threshold: str | int | float = rare(only_with("auto", method="digirl", step_filter=True))
    """Threshold that the advantage of a step must exceed: 1/H (H is the number of steps in its episode), a number, or
    auto (1/H for the paper's advantage, 0 for the code's)."""
    step_filter: bool = rare(only_with(True, method="digirl"))
    """Whether steps are filtered."""
    instruction_filter: bool = rare(True)
    """Whether episodes are filtered."""
    quantile: float = only_with(bounded(0.9, at_least=0, at_most=1), instruction_filter=True)
    """Keep episodes whose score is at least this quantile of all episodes."""
    min_score: float | None = only_with(None, instruction_filter=True)
    """Additional lower bound on the score of a kept episode: a reward while offline, an advantage afterwards; null =
    none."""
    clamp: bool = rare(True)
    """Whether to clamp token probabilities to [0.001, 0.99]; outside of it a token has no gradient."""
    batch_episodes: int = bounded(16, at_least=1)
    """Episodes per optimiser step, drawn with replacement; a multiple of the number of processes."""
    capacity: int = bounded(1000, at_least=1)
    """Maximum number of stored episodes; the oldest is removed first. Each step reads all of them once."""
    memory_mb: int = rare(bounded(4096, at_least=1))
    """Maximum size of the stored episodes in 10^6 bytes, in each process."""
    critic: DigirlCriticConfig = only_with(field(default_factory=DigirlCriticConfig), method="digirl")
    """The critics."""

    @property
    def has_critics(self) -> bool:
        """Whether there are critics."""
        return self.method == "digirl"

    def step_rule(self) -> str:
        """The threshold of steps without auto."""
        automatic = "1/H" if self.advantage == "paper" else "0"
        return automatic if self.threshold == "auto" else str(self.threshold)

    def validate(self) -> None:
        """Check that the options fit together; raises ValueError."""
        step_threshold(self.step_rule(), 1)


@dataclass
class DigirlConfig(AgentConfig):
    """A DigiRL run; each step has `trainer.epochs` x `trainer.minibatches_per_step` optimiser steps, 20 in the code."""

    digirl: DigirlSettings = field(default_factory=DigirlSettings)
    """Which episodes and steps to learn from."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="sft"))
    """Fixed: likelihood of the kept steps."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        # not that of AgentConfig, whose checks are about advantages and rewards
        RunConfig.validate(self)
        self.check_parts(self.trainer.learning_rate)
        check_rewards(self, "digirl")
        if self.objective != ObjectiveConfig(preset="sft"):
            raise UserError("digirl maximises the likelihood of kept steps; remove objective, or use recipe: agent")
        if self.model.critic != CriticSettings():
            raise UserError("remove model.critic: DigiRL uses digirl.critic")


EPISODES = "episodes"
STEPS = "steps"


class KeptSteps(LossTerm):
    """Counts the steps that the likelihood is averaged over; the episodes of a batch need no old log-probs."""

    name = "kept_steps"
    gradient = "never"

    def provides(self, step: Step) -> frozenset[str]:
        """Nothing: no term compares with an old policy."""
        return frozenset({"logp_old"})

    def counts(self, minibatch: Rollouts) -> dict[str, float]:
        """Steps of the optimiser step, kept or not."""
        return {STEPS: float(turn_starts(minibatch).sum())}


class DigirlRecipe(AgentRecipe):
    """Offline and online filtered likelihood; see the module."""

    config: DigirlConfig

    def __init__(self, config: DigirlConfig) -> None:
        settings = config.digirl
        # before the model is loaded: every process gets an equal part of a batch
        check_shares("digirl.batch_episodes", settings.batch_episodes)
        super().__init__(config)
        self.terms = [*self.terms, KeptSteps()]
        self.store = ReplayBuffer(ReplayConfig(size=settings.capacity, memory_mb=settings.memory_mb))
        size = self.policy.width
        # Seeded apart from the policy: all processes start with equal critics, and no other draw of the run moves.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(config.seed, "critics"))
            self.instruction_critic = Fitter(InstructionCritic(size), settings.critic)
            self.step_critic = Fitter(StepCritic(size, settings.critic.hidden), settings.critic)
        self.parts |= {
            "episodes": self.store,
            "instruction_critic": self.instruction_critic,
            "step_critic": self.step_critic,
        }
        self._fresh: list[Fresh] = []
        # `added` gathers the list over all processes
        self.added["fresh"] = self._fresh
        if self._recorded is not None:
            with opening(self.opened):
                episodes = self._recorded.episodes(self.policy, self.writer(self.policy))
            for episode in episodes:
                self.store.push(EPISODES, store_episode(episode), step=0)

    def check_data(self) -> None:
        """Read the recorded episodes; raises UserError."""
        settings = self.config.digirl
        self._recorded: RecordedFolder | None = None
        if settings.path is not None:
            build_if_missing(settings, "digirl")
            self._recorded = read_recorded(expanded(settings.path))

    def is_offline(self, step: Step) -> bool:
        """Whether this step runs no episodes."""
        return step.number < self.config.digirl.offline_steps

    def rolls_apart(self, step: Step) -> bool:
        """True unless the step runs no episodes."""
        return super().rolls_apart(step) and not self.is_offline(step)

    def rollout(self, policy: VlmPolicy, tasks: Sequence[AgentTask], streams: Streams, step: Step) -> Rollouts:
        """Run G episodes of each task; while offline, draw stored episodes, used only for the step's statistics."""
        if not self.is_offline(step):
            groups = self.run_groups(policy, tasks, streams, step)
            kept = streams.among(tasks, [group[0].task for group in groups])
            # an episode without a result has no reward to filter by
            for place, own in zip(kept.places, groups, strict=True):
                valid = [store_episode(episode) for episode in own if episode.has_result]
                self._fresh.append(((streams.draw, place), (EPISODES, valid)))
            return kept.noted(pack_groups(groups, policy))
        records = self.store.stored(EPISODES)
        drawn = streams.stack(len(tasks), lambda own: torch.randint(len(records), (1,), generator=own), "stored")
        episodes = [restore_episode(records[number]) for number in drawn.tolist()]
        return pack_episodes(episodes, range(len(episodes)), policy)

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Store the step's episodes, train the critics, and return the kept steps with advantage 1."""
        with accelerator.autocast():
            found = self._kept_batch(rollouts, step)
        # without advantages from a batch, all sampled tokens get 1; a NaN reward masks them
        return found if found.advantage is not None else found.replace(advantage=found.mask.clone())

    def _kept_batch(self, rollouts: Rollouts, step: Step) -> Rollouts:
        settings = self.config.digirl
        # Store first: the filters compare the step's own episodes with all others, and the critics learn from them too.
        self.store.push_all(self._fresh, step.number)
        episodes = [restore_episode(record) for record in self.store.stored(EPISODES)]
        with stopwatch("critic"):
            rows = self.config.trainer.micro_batch
            # in chunks, since all stored episodes are read in every step
            data = label_episodes(self.policy, episodes, settings.gamma, rows, read=settings.has_critics)
        self.noted |= {"digirl/stored": float(len(episodes)), "digirl/return": float(data.total.mean())}
        if settings.has_critics:
            with stopwatch("critic"):
                self._train_critics(data, step)
        chosen, steps = self._filter(data, step)
        if step.number < settings.warmup_steps or not bool(chosen.any()):
            return rollouts.replace(reward=torch.full_like(rollouts.reward, math.nan))  # nothing to train on
        return self._batch(data, chosen, steps, step)

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Minus the mean over all steps of the log-probability of the kept ones."""
        assert minibatch.advantage is not None
        scores = self.scores(policy, minibatch, frozenset({"logp"}).union(*(term.outputs for term in self.terms)))
        logp = scores.logp
        # clamped here and not in the objective: the metric keeps the unclamped likelihood
        bounded_logp = clamp_logp(logp) if self.config.digirl.clamp else logp
        mask = minibatch.loss_mask * minibatch.advantage
        # The denominator counts dropped steps as well: a step adds 0 to the mean if it is not kept.
        loss = -torch.where(mask > 0, bounded_logp, 0.0).sum() / denominators.others[STEPS]
        output = LossOutput(
            loss, {"loss/total": Metric.summed(loss.detach()), "loss/nll": mean_metric(-logp.detach(), mask)}
        )
        return self.plus_terms(output, policy, minibatch, scores, denominators, step)

    def describe(self) -> str:
        """The loss and the filters."""
        settings = self.config.digirl
        score = "reward" if not settings.has_critics else "reward - V(instruction)"
        lines = ["digirl: minimise - mean over steps of [kept] * sum_t logp_t", "  episodes: all"]
        if settings.instruction_filter:
            lines[1] = f"  episodes: {score} at least its {settings.quantile:g} quantile"
        if settings.has_critics and settings.step_filter:
            lines.append(f"  steps: advantage ({settings.advantage}) above {settings.step_rule()}")
        return "\n".join(lines)

    def _alone(self, rollouts: Rollouts, reward: Tensor) -> Tensor:
        """Episodes are compared with all that are stored, never with their group."""
        return torch.zeros_like(reward, dtype=torch.bool)

    def _train_critics(self, data: LabelledEpisodes, step: Step) -> None:
        """Some updates of both critics, the same on every process."""
        settings = self.config.digirl.critic
        # Every process draws the same rows from the same data, so the critics stay equal without communication.
        generator = make_generator(self.config.seed, "critics", step.number)
        succeeded, succeeds = (data.total > 0).long(), data.succeeds
        state = data.state
        next_state = data.next_state
        has_next = data.has_next
        instruction, steps_critic = self.instruction_critic, self.step_critic
        # on the CPU in float32, outside autocast: all processes have to compute equal bits
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            for _ in range(settings.updates):
                # with replacement, as in the public code
                rows = torch.randint(len(succeeded), (settings.batch_episodes,), generator=generator)
                loss = instruction_loss(instruction.critic(data.text_state[rows]), succeeded[rows])
                self.noted["digirl/instruction_loss"] = instruction.step(loss)
                rows = torch.randint(len(succeeds), (settings.batch_steps,), generator=generator)
                logits = steps_critic.critic(state[rows]), steps_critic.critic(next_state[rows])
                loss = step_loss(*logits, has_next[rows], succeeds[rows])
                self.noted["digirl/step_loss"] = steps_critic.step(loss)

    def _filter(self, data: LabelledEpisodes, step: Step) -> tuple[Tensor, Tensor]:
        """Masks of the episodes (n,) and of all steps (M,) that are kept."""
        settings = self.config.digirl
        scores, steps = data.total, torch.ones(len(data.reward), dtype=torch.bool)
        if settings.has_critics:
            value = self.instruction_critic.critic.value(data.text_state).double()
            self.noted["digirl/instruction_value"] = float(value.mean())
            # Offline steps filter by reward alone, as the public code does.
            if not self.is_offline(step):
                scores = instruction_advantages(data.total, value)
            if settings.step_filter:
                steps = kept_steps(data, self.step_critic.critic, settings)
        chosen = torch.ones(len(scores), dtype=torch.bool)
        if settings.instruction_filter:
            chosen = keep_best(scores, settings.quantile, settings.min_score)
        counts = torch.tensor(data.counts)
        of_chosen = steps[chosen.repeat_interleave(counts)]
        self.noted["digirl/kept_episodes"] = float(chosen.float().mean())
        if len(of_chosen):
            self.noted["digirl/kept_steps"] = float(of_chosen.float().mean())
        return chosen, steps

    def _batch(self, data: LabelledEpisodes, chosen: Tensor, steps: Tensor, step: Step) -> Rollouts:
        """This process's episodes for the optimiser steps of this step."""
        process = PartialState()
        generator = make_generator(self.config.seed, "batch", step.number)
        count = self.config.digirl.batch_episodes * self.config.trainer.minibatches_per_step
        among = torch.nonzero(chosen).flatten()
        # All processes draw the whole batch and take every n-th episode, so the batch is that of a single process.
        drawn = among[torch.randint(len(among), (count,), generator=generator)].tolist()
        mine = drawn[process.process_index :: process.num_processes]
        rollouts = pack_episodes([data.episodes[number] for number in mine], range(len(mine)), self.policy)
        assert rollouts.turn is not None
        kept = steps.split(data.counts)
        turn, mask = to_host([rollouts.turn, rollouts.mask])
        # Padding has turn -1 and may take any step's value, because the mask sets it to 0.
        own = [kept[number].to(mask)[turn[row].clamp(min=0)] for row, number in enumerate(mine)]
        total = torch.tensor([episode.total for episode in AgentPayload.of(rollouts).episodes])
        reward, advantage = (to_device(x, rollouts.mask.device) for x in (total, torch.stack(own) * mask))
        return rollouts.replace(reward=reward, advantage=advantage)


def kept_steps(data: LabelledEpisodes, critic: StepCritic, settings: DigirlSettings) -> Tensor:
    """Mask (M,) bool of the steps with an advantage above the threshold."""
    value = critic.value(data.state).double()
    # After the last step `next_state` repeats the step's own state, so the value there is replaced by 0.
    after = torch.where(data.has_next, critic.value(data.next_state).double(), 0.0)
    found = []
    columns = (tensor.split(data.counts) for tensor in (value, after, data.reward, data.mc_return))
    for own, following, rewards, returns in zip(*columns, strict=True):
        if settings.advantage == "paper":
            advantage = paper_advantages(own, rewards, settings.lam)
        else:
            advantage = code_advantages(own, following, rewards, returns)
        found.append(advantage > step_threshold(settings.step_rule(), len(own)))
    return torch.cat(found)


def instruction_advantages(total: Tensor, value: Tensor) -> Tensor:
    """Difference between the returns of trajectories and their expected values.

    Args:
        total: (n,) sum of the rewards of each.
        value: (n,) probability of success that the instruction's critic gives.

    Returns:
        (n,) total - value, the value kept between 1e-4 and 1 - 1e-4.

    Source: DigiRL-agent/digirl digirl/algorithms/offpolicy_train_loop.py, label_trajectories and filter_buffer.
    """
    return total - value.clamp(VALUE_MARGIN, 1 - VALUE_MARGIN)


def keep_best(scores: Tensor, quantile: float = 0.9, min_score: float | None = None) -> Tensor:
    """Select the trajectories that score at least a quantile of all.

    If rewards are 0 or 1 and less than 1 - quantile of the trajectories succeed, the quantile of the rewards is 0
    and everything is kept; `min_score` then excludes failures.

    Args:
        scores: (n,) reward or advantage of each.
        quantile: of all scores, interpolated linearly; ties with it are kept.
        min_score: further lower bound on the score; None for no bound, as in the public code.

    Returns:
        (n,) bool.

    Source: DigiRL-agent/digirl digirl/algorithms/offpolicy_train_loop.py, filter_buffer and filterbc_buffer.
    """
    if not len(scores):
        return torch.zeros(0, dtype=torch.bool)
    kept = scores >= torch.quantile(scores.double(), quantile).to(scores.dtype)
    return kept if min_score is None else kept & (scores >= min_score)


def paper_advantages(value: Tensor, rewards: Tensor, lam: float = 0.5) -> Tensor:
    """Doubly robust advantage of each step: the final reward dominates near the end, the critic far from it.

    A_h = lam^(H - h) r_H + (1 - lam^(H - h)) (V(s_{h+1}) + r_h - V(s_h)),  h = 1 .. H

    Args:
        value: (H,) value of the state before each step; that after the last step is not needed, as its weight is 0.
        rewards: (H,) of each step.
        lam: weight of the trajectory's end, between 0 and 1; 0.5 as the discount of the public code.

    Returns:
        (H,).

    Source: DigiRL, arXiv 2406.11896, step-level advantage.
    """
    steps = len(value)
    # lam^(H - h), 1 for the last step
    weight = lam ** torch.arange(steps - 1, -1, -1, dtype=value.dtype, device=value.device)
    # the value after the last step has weight 0, so any number will do
    step_ahead = torch.cat([value[1:], value.new_zeros(1)]) + rewards - value
    return weight * rewards[-1] + (1 - weight) * step_ahead


def code_advantages(value: Tensor, next_value: Tensor, rewards: Tensor, returns: Tensor) -> Tensor:
    """Advantage V(s') - V(s) - 0.05 + r + R of each step as in the public code, (M,) all; steps above 0 are kept.

    The reward of the last step counts twice, in r and in R.

    Source: DigiRL-agent/digirl digirl/algorithms/digirl/trainer.py, actor_loss.
    """
    return next_value - value - CODE_OFFSET + rewards + returns


def step_threshold(rule: str, steps: int) -> float:
    """The smallest advantage of a kept step.

    Args:
        rule: "1/H", or a number.
        steps: H of its trajectory.

    Raises:
        ValueError: it is neither.
    """
    if rule.strip() == "1/H":
        return 1 / steps
    try:
        value = float(rule)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"the step threshold is {rule!r}; expected 1/H, or a number such as 0.05")
    return value


def clamp_logp(logp: Tensor, low: float = 0.001, high: float = 0.99) -> Tensor:
    """Log-probabilities in nats, of any shape, of probabilities clamped to [low, high].

    Gradient: zero if the probability is out of bounds.

    Source: DigiRL-agent/digirl digirl/models/autoui_agent.py, get_log_prob.
    """
    return logp.clamp(math.log(low), math.log(high))


VALUE_MARGIN = 1e-4
"""Instruction values are kept this far from 0 and 1."""
CODE_OFFSET = 0.05
"""The public code subtracts this from every step's advantage."""
