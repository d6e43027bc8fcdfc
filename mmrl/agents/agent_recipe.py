"""Base of the agents' recipes: episodes as rollouts, rewards from the environment, evaluation in episodes.

An episode is a row: its decisions are the tokens that the agent wrote in all turns, and what it was shown in between is
part of the row without being trained. An episode whose environment failed has no result: it is left out of its group
and counted, and never has the reward 0. One whose conversation becomes too long ends before the turn that does not fit.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmrl.agents.agent_evaluation import AgentEvaluationConfig, AgentMeasure, about_episode
from mmrl.agents.entries import SCORES
from mmrl.agents.environments.agent_tasks import AgentTask, TaskSetConfig, check_splits, list_tasks
from mmrl.agents.environments.env_pool import EnvironmentConfig, EnvPool
from mmrl.agents.environments.environment import FORMATS, NATIVE, ActionConfig
from mmrl.agents.monitor import (
    EpisodeRewards,
    agent_alarms,
    check_names,
    count_below_silence,
    count_episodes,
    episode_metrics,
    tabulate_failed_answers,
    tabulate_penalties,
)
from mmrl.agents.rollout.chat_writer import ChatWriter, settle_chat
from mmrl.agents.rollout.conversation import ConversationConfig, Writer
from mmrl.agents.rollout.episodes import (
    AgentPayload,
    Episode,
    EpisodeConfig,
    OverflowConfig,
    pack_groups,
    tabulate_anchors,
    tabulate_durations,
)
from mmrl.agents.rollout.gains import add_gains, check_answers, tabulate_gains
from mmrl.agents.rollout.runner import EpisodeRunner, Fork, check_dropped
from mmrl.agents.rollout.tool_template import (
    PROBE_TOOL,
    ToolTemplate,
    check_plain_calls,
    dropped_thoughts,
    read_template,
)
from mmrl.core.blocks.advantage import group_sum
from mmrl.core.blocks.credit import CriticAdvantage
from mmrl.core.blocks.turns import ANCHOR, DURATION, GAIN, InformationGain
from mmrl.core.loss import Metric
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.payload import to_device
from mmrl.core.rollouts import TOKENS, Rollouts
from mmrl.core.state import Stateful, Tally
from mmrl.errors import UserError
from mmrl.fields import bounded, rare
from mmrl.rewards import RewardConfig, RewardResult
from mmrl.rewards.reward_config import readers_of
from mmrl.rewards.reward_loading import named_digests, source_digest
from mmrl.runs.dry_run import model_follows
from mmrl.runs.export import Exported
from mmrl.runs.run_log import stopwatch
from mmrl.training.evaluation import held_out_tasks
from mmrl.training.objectives import ObjectiveConfig, check_objective, make_objective
from mmrl.training.processes import SimCounts, Streams
from mmrl.training.recipe import LossTerm, NoUsableTasksError, Recipe, Step, opening, reward_state
from mmrl.training.run import count_lines
from mmrl.training.scoring import EveryRewardFailedError, RewardErrors, failure_of
from mmrl.training.settings import RunConfig
from mmrl.vlm.data.turn_template import TurnTemplate
from mmrl.vlm.engine.vlm_export import export_model
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy, read_turns
from mmrl.vlm.engine.vlm_sampler import SamplerConfig
from mmrl.vlm.inference.inference_sampler import EngineSampler, EngineSamplerConfig, check_engine, open_engine
from mmrl.vlm.model.model_config import ModelConfig, check_critic, check_update_precision
from mmrl.vlm.router_loss import router_terms

LOGGER = logging.getLogger("mmrl")
COUNTED = ("overflow", "failed")
"""Endings of episodes that are counted over the whole run."""


@dataclass
class AgentRewardConfig:
    """Reward of an episode."""

    environment: float = rare(1.0)
    """Weight of the environment's reward, turn by turn."""
    format: float = rare(0.0)
    """Penalty for each response that has no readable action, has an invalid tool call or was truncated; 0.5 in ARPO."""
    invalid_turn: float = bounded(0.0, at_most=0)
    """Reward of each invalid turn, at its last token: a response without a readable action or with an invalid tool
    call. Unlike with `format`, truncated responses do not count. -0.1 in GiGPO's public scripts."""


@dataclass
class AgentParts:
    """Model, environment and evaluation of an agent's run; inherit from it before the configuration of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """Model, adapter, precision."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """Environment in which episodes run."""
    eval_data: dict[str, TaskSetConfig] = field(default_factory=dict)
    """Held-out tasks by split; the first one is the headline."""
    conversation: ConversationConfig = field(default_factory=ConversationConfig)
    """Conversation that the agent reads."""
    actions: ActionConfig = field(default_factory=ActionConfig)
    """How actions are parsed from the agent's responses."""
    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    """Limits on the length of episodes."""

    def check_parts(self, learning_rate: float) -> None:
        """Check that they fit together; raises ValueError."""
        check_update_precision(self.model, learning_rate)
        self.conversation.check()
        self.actions.settle(self.conversation.tools)
        if self.episode.overflow.reward and not hasattr(self, "reward"):
            raise ValueError("episode.overflow.reward has no effect in a recipe that learns from no rewards; remove it")
        name = self.actions.name
        if self.conversation.tools and name in FORMATS and name != "tool_call":
            raise ValueError(
                f"conversation.tools makes the chat template ask for tool calls, but actions.format '{name}' cannot "
                "read them; set actions.format: native, tool_call or a custom function"
            )
        self._check_cohort()

    def _check_cohort(self) -> None:
        """Reject cohorts that could not wait less; raises ValueError."""
        cohort, environment = self.episode.cohort, self.environment
        if cohort is not None and cohort > environment.workers:
            raise ValueError(
                f"episode.cohort is {cohort}, but only environment.workers = {environment.workers} episodes run at "
                "once; set at most this number"
            )
        if cohort is not None and not environment.isolate:
            raise ValueError(
                f"episode.cohort is {cohort}, but with environment.isolate: false environments run one after another, "
                "so no cohort could be sampled meanwhile; remove one of the two"
            )


@dataclass
class AgentConfig(AgentParts, RunConfig):
    """A run of an agent in an environment."""

    scored_outputs: ClassVar[tuple[str, ...]] = SCORES
    """Scores of the recipe in addition to log-probabilities."""

    data: TaskSetConfig = field(default_factory=TaskSetConfig)
    """Training tasks."""
    sampler: EngineSamplerConfig = field(default_factory=EngineSamplerConfig)
    """Sampling of a turn; the temperature is also used for scoring."""
    reward: AgentRewardConfig = field(default_factory=AgentRewardConfig)
    """Reward of an episode."""
    rewards: list[RewardConfig] = field(default_factory=list)
    """Reward functions of whole episodes, such as judges. Their values are added to this reward; they receive the
    conversation and the images of all turns."""
    evaluation: AgentEvaluationConfig = field(default_factory=AgentEvaluationConfig)
    """Evaluation on held-out tasks."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Objective that is optimised."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        self.check_parts(self.trainer.learning_rate)
        check_names(self.rewards)
        self.check_objective()

    def check_parts(self, learning_rate: float) -> None:
        """Check that they fit together; raises ValueError."""
        super().check_parts(learning_rate)
        # a plain SamplerConfig samples with the policy
        if self.episode.batching == "dynamic" and getattr(self.sampler, "engine", "own") == "own":
            raise ValueError(
                "episode.batching is dynamic, with which a run does not repeat bit for bit; it needs sampler.engine: "
                "vllm, which does not promise that either. Set episode.cohort to sample while environments work"
            )

    def made_objective(self) -> Any:
        """The objective of the run."""
        # the maximum length of a response, which some objectives divide by
        return make_objective(self.objective, self.sampler.max_new_tokens * self.episode.max_turns)

    def check_objective(self) -> None:
        """Check that model and rewards serve the objective; raises ValueError."""
        objective = make_objective(self.objective)
        own = {"format": self.reward.format, "invalid_turn": self.reward.invalid_turn}
        own["overflow"] = self.episode.overflow.reward
        terms = ("environment", *(name for name, value in own.items() if value), *(each.name for each in self.rewards))
        check_objective(objective, self.scored_outputs, self.trainer.samples_per_task, terms, self.trainer.old_logp)
        check_critic(self.model, objective.needs_values)
        carry = getattr(getattr(objective, "advantage", None), "mask_carry", "")
        if (name := self.conversation.restarts) and carry == "reset":
            raise ValueError(
                "objective.advantage.mask_carry: reset ends the return of a turn at the tokens of the next "
                f"observation, which are no part of the row once conversation.{name} begins a context again; use "
                f"mask_carry: skip, or remove conversation.{name}"
            )


def check_environment(pool: EnvPool, format: str, tools: bool) -> None:
    """Reject a format that cannot express the environment's actions, and missing tools; raises UserError."""
    if tools and not pool.tools and not pool.chat:
        raise UserError(
            f"conversation.tools: {pool.factory} has no `tools`, a list of JSON schemas; see "
            "mmrl.agents.environments.tools"
        )
    if pool.formats is not None and format in FORMATS and format not in pool.formats:
        known = ", ".join(list(pool.actions)[:5]) + ("..." if len(pool.actions) > 5 else "")
        fitting = ", ".join(pool.formats) or "a custom function (module:function)"
        raise UserError(
            f"actions.format is '{format}', which cannot express all actions of {pool.factory} ({known}); formats "
            f"that can: {fitting}"
        )


def preview(config: Any, recipe: Any) -> list[str]:
    """Lines about the tasks of a recipe without its model, and about the chat template if it has tools."""
    lines = count_lines(config, recipe)
    if not config.conversation.tools:
        return lines
    if recipe.tool_template is None:
        return [*lines, f"chat template: {config.model.path} is not on this machine yet, so it is checked by the run"]
    return [*lines, *recipe.tool_template.lines(recipe.turns.ends)]


def check_supervised(config: Any) -> None:
    """Reject options of sampled episodes, which a recipe does not train on; raises ValueError."""
    for key in ("batching", "spare"):
        if getattr(config.episode, key) != getattr(EpisodeConfig(), key):
            raise ValueError(f"{config.recipe} does not train on sampled episodes; remove episode.{key}")


def check_rewards(config: AgentConfig, name: str) -> None:
    """Reject rewards that the recipe `name` does not learn from; raises UserError."""
    for key, default in (("rewards", []), ("reward", AgentRewardConfig())):
        if getattr(config, key) != default:
            raise UserError(f"{name} learns only from the environment's rewards; remove {key}")
    if config.episode.overflow.reward:
        raise UserError(f"{name} learns only from the environment's rewards; remove episode.overflow.reward")


def choose_episodes(group: Sequence[Episode], count: int) -> list[Episode]:
    """The first episodes that their environment did not lose, and lost ones only if there are too few, in order.

    Which ones ended first does not matter, or short episodes would be preferred. Those that outgrew the model's context
    are not replaced, for the same reason.
    """
    # sorting is stable: in both parts by place
    order = sorted(range(len(group)), key=lambda place: group[place].ending == "failed")
    return [group[place] for place in sorted(order[:count])]


class AgentDomain:
    """Model, environments, tasks, evaluation and reports of recipes for agents."""

    config: Any
    policy: VlmPolicy
    train_tasks: Sequence[AgentTask]
    eval_tasks: Mapping[str, Sequence[AgentTask]]
    parts: dict[str, Stateful]
    added: dict[str, Any]
    opened: ExitStack
    terms: Sequence[LossTerm]
    tool_template: ToolTemplate | None = None
    """How the chat template handles tools; None without `conversation.tools`, or before the model is loaded."""
    turns: TurnTemplate
    """The chat template, if there are tools."""

    def open(
        self,
        config: Any,
        sampler: SamplerConfig,
        *,
        rewards: Sequence[RewardConfig] = (),
        value_head: bool = False,
    ) -> None:
        """List tasks, start reward functions and environments, and load the model.

        Raises:
            UserError: one of them cannot be used.
        """
        config.actions.settle(config.conversation.tools)
        self.episode_sampler = sampler
        self.train_tasks = list_tasks(config.data)
        self.eval_tasks = held_out_tasks(config, lambda data, _: list_tasks(data))
        # before anything is started: a test task in training would make every number meaningless
        check_splits(config.data, self.train_tasks, config.eval_data, self.eval_tasks)
        # results name the code of the environment, so that a changed one is another setting
        self.code = source_digest(config.environment.factory)
        # a policy, judge or table that options name is part of the environment, too
        options = {"kwargs": config.environment.kwargs, "adapter": config.environment.adapter}
        self.named = named_digests(options)
        with opening(self.opened) as opened:
            splits = {f"eval_data.{name}": tasks for name, tasks in self.eval_tasks.items()}
            self.rewards = EpisodeRewards(rewards, {"data": self.train_tasks} | splits)
            opened.callback(self.rewards.close)
            self.pool = EnvPool(config.environment)
            opened.callback(self.pool.close)
            if self.pool.chat:
                settle_chat(config.conversation, config.actions)
            check_environment(self.pool, config.actions.name, config.conversation.tools)
            self.check_data()
            # before weights are read, if the model is there
            self._read_template(read_turns(config.model) if config.conversation.tools else None)
            if self.tool_template is not None:
                self._warn_of_dropped_thoughts(self.turns)
            # a dry run ends here, with data, rewards and environments checked
            model_follows(self)
            self.policy = load_policy(config.model, value_head=value_head)
            if self.tool_template is None:
                self._read_template(self.policy.turns)
                self._warn_of_dropped_thoughts(self.policy.turns)
            self.pool.show_images = self.policy.reads_media
            self.terms = router_terms(self)
            self.policy.turns.check_readers(readers_of(rewards, sampler.stop))
            self.policy.check_response_length(sampler.max_new_tokens)
            # options that do not fit the tokenizer are refused before anything runs
            self.writer(self.policy)
            if kept := config.conversation.history_images:
                self.policy.check_reads_media(f"conversation.history_images is {kept}")
        self.env_counts = SimCounts(self.pool, Path(config.output_dir))
        self._totals = Tally()
        self._seen = Counter[str]()
        self.errors = RewardErrors()
        self._failures: list[str] = []
        """Reasons why no episode of a rollout could be scored by the reward functions."""
        # saved in checkpoints
        self.parts |= {"totals": self._totals, "counts": self.env_counts, "errors": self.errors}
        # summed over all processes
        self.added |= {"seen": self._seen, "counts": self.env_counts, "errors": self.errors.step}
        self.added["failures"] = self._failures

    def _read_template(self, turns: TurnTemplate | None) -> None:
        """Check that the chat template writes tools, calls and results as the run reads them; raises UserError."""
        if turns is None or not self.config.conversation.tools:
            return
        given = {NATIVE: None, "tool_call": "hermes"}.get(self.config.actions.name, "")
        # the tools of a program are known once it asks
        self.turns, self.tool_template = turns, read_template(turns, self.pool.tools or [PROBE_TOOL], given)
        if self.config.conversation.drop_thoughts and given is None:
            check_plain_calls(turns)

    def _warn_of_dropped_thoughts(self, turns: TurnTemplate) -> None:
        """Warn if the run keeps thoughts in contexts that a deployed model would read without them."""
        conversation = self.config.conversation
        # a program that sends its own history is told nothing: it decides what the model reads
        if self.pool.chat or conversation.history == "template" or conversation.drop_thoughts:
            return
        if dropped := dropped_thoughts(turns, self.pool.tools if conversation.tools else ()):
            LOGGER.warning(
                "%s drops the thoughts of earlier responses before %s, but with conversation.history: append they stay "
                "in the contexts of this run; a deployed model that thinks reads other contexts than it was trained "
                "on; conversation.history: template trains on those of deployment",
                turns.blame,
                " and ".join(dropped),
            )

    def check_data(self) -> None:
        """Reject tasks, environments and records that the method cannot use, before the model is loaded."""

    def writer(self, policy: VlmPolicy) -> Writer:
        """Writes the conversations of some episodes."""
        conversation = self.config.conversation
        system = conversation.system_text(self.config.actions, self.pool.actions)
        template, turns = self.tool_template, self.config.episode.max_turns
        native = template.format if self.config.actions.format == NATIVE and template else ""
        if self.pool.chat:
            return ChatWriter(policy, conversation, self.config.sampler, native)
        if not conversation.tools:
            return Writer(policy, conversation, system, max_turns=turns, known=self.pool.tools)
        return Writer(
            policy,
            conversation,
            system,
            self.pool.tools,
            native,
            template=template,
            max_turns=turns,
            known=self.pool.tools,
        )

    def run_episodes(
        self,
        policy: VlmPolicy,
        tasks: Sequence[AgentTask],
        seeds: Sequence[int],
        greedy: bool = False,
        video: Sequence[bool] = (),
        *,
        temperature: float | None = None,
        bootstrap_observation: bool = False,
        engine: EngineSampler | None = None,
        forks: Sequence[Fork | None] = (),
        dynamic: bool = False,
        seen: Counter[str] | None = None,
    ) -> list[Episode]:
        """Run an episode of each task; see `EpisodeRunner`. The seconds are added to `seen`."""
        config = self.config
        sampler = self.episode_sampler
        sampler = sampler if temperature is None else replace(sampler, temperature=temperature)
        runner = EpisodeRunner(
            policy,
            self.pool,
            self.writer(policy),
            config.actions,
            sampler,
            config.episode,
            bootstrap_observation=bootstrap_observation,
            # only reward functions read the conversation as text
            transcripts=bool(self.rewards.names),
            engine=engine,
            dynamic=dynamic,
        )
        episodes = runner.run(tasks, seeds, greedy=greedy, video=video, forks=forks)
        if seen is not None:
            seen["rollout_s"] += runner.total_s  # type: ignore[assignment]
            seen["idle_s"] += runner.total_s - runner.sampling_s  # type: ignore[assignment]
        return episodes

    def measures(self, policy: VlmPolicy, split: str, step: Step) -> list[AgentMeasure]:
        """Success on held-out tasks, overall and of each name of a task."""
        config = self.config
        # one split only: videos cost memory for every observation
        recorded = bool(config.evaluation.videos) and split == next(iter(self.eval_tasks))

        def run(tasks: Sequence[AgentTask], seeds: Sequence[int], greedy: bool, video: Sequence[bool]) -> list[Episode]:
            # greedy answers keep the training temperature, at which their log-probabilities are recorded
            temperature = None if greedy else config.evaluation.temperature
            episodes = self.run_episodes(policy, tasks, seeds, greedy, video, temperature=temperature)
            self.add_rewards(episodes, step)
            return episodes

        evaluation, environment = config.evaluation, config.environment
        # everything that a measured success rate depends on; results are only comparable if it is equal
        setting = {
            "suite": PurePath(environment.factory).name,
            "version": self.code,
            # only if there is any, so that earlier evaluations stay comparable
            **({"named": self.named} if self.named else {}),
            "horizon": config.episode.max_turns,
            "environment": {"kwargs": environment.kwargs, "adapter": environment.adapter},
            "success_above": config.episode.success_above,
            # without the default, so that earlier evaluations stay comparable
            **({"overflow": result} if (result := config.episode.overflow.result) != OverflowConfig.result else {}),
            "conversation": asdict(config.conversation),
            "actions": config.actions.setting(),
            "temperature": evaluation.temperature,
        }
        protocols = ["greedy"] * bool(evaluation.greedy) + ["sampled"] * bool(evaluation.samples)
        return [
            AgentMeasure(
                run_episodes=run,
                protocol=protocol,
                evaluation=config.evaluation,
                seed=config.seed,
                split=split,
                setting=setting,
                folder=Path(config.output_dir) / "videos" if recorded and number == 0 else None,
                label=f"step-{step.number:06d}-{split}",
            )
            for number, protocol in enumerate(protocols)
        ]

    def add_rewards(self, episodes: Sequence[Episode], step: Step) -> RewardResult | None:
        """Score episodes with the reward functions; returns None if there is nothing to score."""
        if not self.rewards.names:
            return None
        with stopwatch("score"):
            result = self.rewards.score(episodes, reward_state(self.config, self.train_tasks, step))
        if result is not None:
            self.errors.warn(result)
        return result

    def describe_row(self, rollouts: Rollouts, row: int) -> dict[str, Any]:
        """Texts and images of an episode."""
        return about_episode(AgentPayload.of(rollouts).episodes[row])

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Statistics of the step's episodes, and failures so far."""
        seen = Counter(self._seen)
        self._seen.clear()
        for name in COUNTED:
            self._totals[name] += int(seen[name])
        return {
            **episode_metrics(seen),
            **{f"env/{name}": float(self._totals[name]) for name in COUNTED},
            **self.env_counts.metrics(),
            **self.errors.take(),
        }

    @classmethod
    def export(cls, config: Any, checkpoint: Path, output: Path) -> Exported:
        """Write an ordinary model folder with tokenizer and processor, adapters added into the weights."""
        environment = config.environment.factory
        found = export_model(config, checkpoint, output)
        limits = ["During training an environment wrote the prompts; the snippet above asks a plain question."]
        if options := config.conversation.contexts():
            limits.append(f"It was trained on contexts with {options}; give it the same.")
        return replace(found, facts={**found.facts, "environment": environment}, limits=limits)

    def _note(self, episodes: Sequence[Episode]) -> None:
        overflown = next((episode for episode in episodes if episode.overflows), None)
        # once per run: the counts tell the rest
        if overflown is not None and not self._totals["overflow"] + self._seen["overflow"]:
            kept = "ended before a turn" if overflown.has_result else "has no result"
            LOGGER.warning("an episode %s (overflow): %s", kept, overflown.reason)
        count_episodes(self._seen, episodes)


class AgentRecipe(AgentDomain, Recipe[VlmPolicy, AgentTask]):
    """Runs, scores and evaluates episodes of an agent; the loss is the objective's."""

    config: AgentConfig

    def __init__(self, config: AgentConfig) -> None:
        super().__init__(config)
        self.objective = config.made_objective()
        check_engine(config.sampler, config.rollers)
        if config.episode.spare and type(self).draw_groups is not AgentRecipe.draw_groups:
            raise UserError(f"{config.recipe} chooses the episodes of its groups itself; remove episode.spare")
        if isinstance(self._advantage, InformationGain):
            # before the model is loaded
            check_answers(list_tasks(config.data), self._advantage)
        self.open(config, config.sampler, rewards=config.rewards, value_head=self.objective.needs_values)
        self.alarms = agent_alarms(config, program=self.pool.chat)
        self._engine = open_engine(config.sampler, self.policy)
        self.samples_elsewhere = self._engine is not None
        if self._engine is not None:
            self.opened.callback(self._engine.close)

    def rollout(self, policy: VlmPolicy, tasks: Sequence[AgentTask], streams: Streams, step: Step) -> Rollouts:
        """Run G episodes of each task."""
        groups = self.run_groups(policy, tasks, streams, step)
        # tasks without any result are left out, and their streams with them
        return streams.among(tasks, [group[0].task for group in groups]).noted(pack_groups(groups, policy))

    def run_groups(
        self, policy: VlmPolicy, tasks: Sequence[AgentTask], streams: Streams, step: Step
    ) -> list[list[Episode]]:
        """Run G episodes of each task and score them with the reward functions."""
        if self._engine is not None:
            # the engine samples with the weights of this step
            self._engine.load(policy, step.number)
        groups = self.draw_groups(policy, tasks, streams)
        episodes = [episode for group in groups for episode in group]
        if isinstance(self._advantage, InformationGain):
            with stopwatch("score"):
                rows = self.config.sampler.batch_rows
                add_gains(episodes, self._advantage, policy, lambda x: self._logp(policy, x), rows)
        self._note(episodes)
        count_below_silence(self._seen, episodes, self.config)
        # a group needs one result at least; rows without a result are masked later
        kept = [own for own in groups if any(episode.has_result for episode in own)]
        if not kept:
            reasons = sorted({episode.reason for episode in episodes if episode.reason})
            raise NoUsableTasksError(f"no episode has a result: {'; '.join(reasons[:3])}")
        check_dropped(episodes)
        result = self.add_rewards(episodes, step)
        if result is not None:
            self.errors.count(result)
            self._failures += filter(None, [failure_of(result)])
        return kept

    def draw_groups(self, policy: VlmPolicy, tasks: Sequence[AgentTask], streams: Streams) -> list[list[Episode]]:
        """Run G episodes of each task from its beginning, and spare ones."""
        size, spare = self.config.trainer.samples_per_task, self.config.episode.spare
        seeds = streams.seeds(len(tasks), size).view(len(tasks), size)
        if spare:
            # apart, so that the first G episodes are the same with and without them
            more = streams.seeds(len(tasks), spare, purpose="spare").view(len(tasks), spare)
            seeds = torch.cat([seeds, more], 1)
        repeated = [task for task in tasks for _ in range(size + spare)]
        episodes = self.draw(policy, repeated, seeds.flatten().tolist())
        groups = [episodes[start : start + size + spare] for start in range(0, len(episodes), size + spare)]
        kept = [choose_episodes(own, size) for own in groups]
        # the lost ones that were replaced; spare ones that nobody needs count nowhere
        chosen = {id(episode) for own in kept for episode in own}
        self._note([episode for episode in episodes if episode.ending == "failed" and id(episode) not in chosen])
        return kept

    def draw(
        self, policy: VlmPolicy, tasks: Sequence[AgentTask], seeds: Sequence[int], forks: Sequence[Fork | None] = ()
    ) -> list[Episode]:
        """Run one episode of each task, as training needs it."""
        return self.run_episodes(
            policy,
            tasks,
            seeds,
            bootstrap_observation=self._bootstraps,
            engine=self._engine,
            forks=forks,
            dynamic=self.config.episode.batching == "dynamic",
            seen=self._seen,
        )

    def score(self, rollouts: Rollouts, step: Step) -> Rollouts:
        """Rewards of environment, format and functions; NaN without a result, or if the group has a single result."""
        episodes = AgentPayload.of(rollouts).episodes
        weights = self.config.reward

        def column(values: list[float]) -> Tensor:
            return to_device(torch.tensor(values), rollouts.mask.device)

        total = column([episode.total for episode in episodes])
        failed = tabulate_failed_answers(episodes, rollouts.mask)
        # `0.0 -` instead of a minus sign: no -0.0 in records
        form = torch.where(torch.isnan(total), total, 0.0 - failed.sum(1))
        added = column([episode.added_reward for episode in episodes])
        penalties = tabulate_penalties(episodes, self.config, rollouts.mask)
        # NaN of an episode without a result stays NaN in the sum
        reward = weights.environment * total + weights.format * form + added
        for table in penalties.values():
            reward = reward + table.sum(1)
        alone = self._alone(rollouts, reward)
        terms = {"environment": total} | ({"format": form} if weights.format else {})
        for name, table in penalties.items():
            terms[name] = torch.where(torch.isnan(total), total, table.sum(1))
        for name in self.rewards.names:
            terms[name] = column([episode.terms.get(name, math.nan) for episode in episodes])
        turns = rollouts.extras["decision_reward"] * weights.environment
        # counted from the end: the last sampled token has one sampled token at or after it
        last = rollouts.mask.flip(1).cumsum(1).flip(1) == 1
        at_end = torch.where(last & (rollouts.mask > 0), added.nan_to_num()[:, None], 0.0)
        # format penalties belong to the turn of the answer, added rewards to the end of the episode
        turns = turns + (at_end - weights.format * failed)
        for table in penalties.values():
            turns = turns + table
        extras = {"decision_reward": turns}
        if "overflow" in penalties:
            # the penalty stands for what the critic cannot read: the turn would be masked and not learn from it
            unread = (penalties["overflow"] < 0).any(1) & ~(rollouts.extras["bootstrap_mask"] > 0).any(1)
            extras["truncated"] = rollouts.extras["truncated"].masked_fill(unread, 0.0)
        if "tokens" in self.objective.needs:
            extras[TOKENS] = AgentPayload.of(rollouts).response_ids
        if "anchors" in self.objective.needs:
            assert rollouts.turn is not None
            extras[ANCHOR] = tabulate_anchors(episodes, rollouts.turn)
        if "durations" in self.objective.needs:
            assert rollouts.turn is not None
            extras[DURATION] = tabulate_durations(episodes, rollouts.turn)
        if "information_gain" in self.objective.needs:
            extras[GAIN] = tabulate_gains(episodes, turns)
        scored = rollouts.replace(
            reward=reward.masked_fill(alone, math.nan),
            reward_terms={name: values.masked_fill(alone, math.nan) for name, values in terms.items()},
            extras=rollouts.extras | extras,
        )
        # taken even if they are not raised, or they would count for the next step
        failures = [*self._failures]
        self._failures.clear()
        # a single episode with a finite reward is enough to train on
        if failures and not any(episode.has_result and math.isfinite(episode.added_reward) for episode in episodes):
            raise EveryRewardFailedError(failures[0], scored)
        return scored

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Teacher-forced scores at the sampling temperature, all turns of an episode in one pass."""
        return policy(rollouts, temperature=self.config.sampler.temperature, outputs=outputs)

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Adds the fraction of episodes whose last response was not truncated at the length limit."""
        finished = AgentPayload.of(rollouts).finished_fraction
        return super().step_metrics(rollouts) | {"response/finished_fraction": finished}

    def _logp(self, policy: VlmPolicy, rollouts: Rollouts) -> Tensor:
        return self.scores(policy, rollouts, frozenset({"logp"})).logp

    @property
    def _advantage(self) -> Any:
        """The estimator of advantages; None where the objective compares the two episodes of a pair instead."""
        return getattr(self.objective, "advantage", None)

    @property
    def _bootstraps(self) -> bool:
        """Whether the critic is asked for the value of the states that truncated episodes end in."""
        return isinstance(self._advantage, CriticAdvantage) and self._advantage.truncation == "bootstrap"

    def _alone(self, rollouts: Rollouts, reward: Tensor) -> Tensor:
        """(B,) bool, rows of groups with a single result, which there is nothing to compare with."""
        # critics and raw rewards need no second row
        if "samples" not in getattr(self._advantage, "needs", ()):
            return torch.zeros_like(reward, dtype=torch.bool)
        count = group_sum(torch.isfinite(reward).long(), rollouts.group, rollouts.num_groups)
        return count[rollouts.group] < 2
