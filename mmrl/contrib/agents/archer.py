"""ArCHer (Zhou et al., arXiv 2402.19446; public code YifeiZhou02/ArCHer): an actor of tokens, critics of utterances.

Episodes are stored. In every step of the run, turns of stored episodes are drawn, and the policy samples a new answer
to each: a ~ pi(s).

1. The critics, two heads Q(s, u) and two heads V(s), learn from the drawn turns (s, u, r, s'); any policy may have
   written u. Q is fitted to r + gamma V'(s'), without V' if the episode is over, and V to Q'(s, a). Q' and V' are
   averages of the critics' weights, which move by `tau` after each of their updates (`targets`, `critic_loss`).
2. The actor learns the new answers, with one advantage for all tokens of an answer: min Q(s, a) - min V(s). The loss is
   the mean over answers of - advantage * the sum of their log-probabilities, without ratio and KL.

Differences from the public code: the critics read states of the policy as it was at the start, instead of a RoBERTa
that is trained with them: the state before the answer, and the means over its tokens of states and of embeddings, all
scaled to deviation 1 in the first step. States of the policy itself would change under the critics. One draw of turns
and one new answer of each serve all updates of the critics in a step, and the actor, where the code draws again for
every update; what would be several draws is a larger `turns`. A turn is read with all of its context, not the last 512
tokens. The code's optional baseline of tokens is not here.

Every process holds all stored episodes and the same critics; answering and reading the turns is shared between them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn.functional import layer_norm, mse_loss

from mmrl.agents.agent_recipe import AgentConfig, AgentRecipe, check_rewards
from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.methods.arpo import Fresh, ReplayBuffer, ReplayConfig
from mmrl.agents.methods.digirl import EPISODES
from mmrl.agents.methods.digirl_critics import CriticTraining, Fitter, perceptron
from mmrl.agents.rollout.episodes import Episode, Trajectory, pack_episodes, pack_groups
from mmrl.agents.rollout.storage import Record, restore_episode, store_episode
from mmrl.core.payload import to_device, to_host
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded, rare
from mmrl.runs.run_log import stopwatch
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import Streams, check_shares, make_generator, stream_seed
from mmrl.training.recipe import LossTerm, Reference, Step, start_kind
from mmrl.training.settings import RunConfig
from mmrl.vlm.data.prompt import Prompt, join_prompts
from mmrl.vlm.engine.rows import text_prompt
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import Samples, sample
from mmrl.vlm.model.model_config import CriticSettings

SMALLEST_STD, LARGEST_INPUT = 1e-6, 5.0
"""The minimum standard deviation by which a critic's inputs are divided, and the bound of the scaled inputs."""
ROWS = 32
"""Turns answered and read together."""


def default_critic() -> CriticTraining:
    """The training of the public code."""
    return CriticTraining(learning_rate=2e-5, updates=50, batch_steps=256, max_grad_norm=1.0)


def default_objective() -> ObjectiveConfig:
    """Mean over responses of the sum of their tokens' log-probabilities, weighted by the advantage."""
    return ObjectiveConfig(preset="sft", aggregation={"kind": "sequence_sum"})


@dataclass
class UtteranceSettings:
    """Turns, critics and their targets; the defaults are those of the public code."""

    gamma: float = bounded(0.95, at_least=0, at_most=1)
    """Discount per turn."""
    tau: float = bounded(0.1, above=0, at_most=1)
    """Step of the averaged critics towards the current critics after each update; 1 copies them."""
    warmup_steps: int = bounded(20, at_least=0)
    """Number of initial steps in which only the critics learn."""
    turns: int = bounded(256, at_least=1)
    """Turns drawn in a step, with replacement, for critics and actor; a multiple of the number of processes."""
    critic: CriticTraining = field(default_factory=default_critic)
    """The critics."""


@dataclass
class ArcherSettings(UtteranceSettings):
    """The store, the critics and their targets."""

    capacity: int = bounded(10000, at_least=1)
    """Maximum number of stored episodes; the oldest is removed first."""
    memory_mb: int = rare(bounded(4096, at_least=1))
    """Maximum size of the stored episodes in 10^6 bytes, in each process."""


@dataclass
class ArcherConfig(AgentConfig):
    """An ArCHer run; the actor has `trainer.epochs` x `trainer.minibatches_per_step` updates a step, 3 in the code."""

    archer: ArcherSettings = field(default_factory=ArcherSettings)
    """The store, the critics and their targets."""
    objective: ObjectiveConfig = field(default_factory=default_objective)
    """Fixed: policy gradient with the critics' advantages."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        RunConfig.validate(self)
        check_critics(self, "archer")


def check_critics(config: AgentConfig, name: str) -> None:
    """Reject settings that conflict with the critics of the recipe `name`; raises ValueError."""
    config.check_parts(config.trainer.learning_rate)
    check_rewards(config, name)
    if config.objective != default_objective():
        raise UserError(f"{name}'s critics compute the advantages; remove objective, or use recipe: agent")
    if config.model.critic != CriticSettings():
        raise UserError(f"remove model.critic: {name} uses {name}.critic")


class UtteranceCritic(nn.Module):
    """Two heads Q(s, a) and two heads V(s), on states (n, S) before responses and on responses (n, 2 S).

    Source: YifeiZhou02/ArCHer archer/models/critic.py.
    """

    mean: Tensor
    std: Tensor
    fitted: Tensor

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.size = size
        self.q = nn.ModuleList([perceptron(3 * size, hidden, 1) for _ in range(2)])
        self.v = nn.ModuleList([perceptron(size, hidden, 1) for _ in range(2)])
        self.register_buffer("mean", torch.zeros(3 * size))
        self.register_buffer("std", torch.ones(3 * size))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))

    def fit_scale(self, state: Tensor, answered: Tensor) -> None:
        """Standardise by (n, S) states and (n, 2 S) answers; later calls change nothing.

        States differ little between turns compared with what they share; heads barely learn from unscaled ones.
        """
        if bool(self.fitted):
            return
        both = torch.cat([state, answered], -1)
        std = both.std(0, correction=0)
        self.mean.copy_(both.mean(0))
        self.std.copy_(torch.where(std > SMALLEST_STD, std, 1.0))
        self.fitted.fill_(True)

    def forward(self, state: Tensor, answered: Tensor) -> tuple[Tensor, Tensor]:
        """Q and V, each (2, n)."""
        both = ((torch.cat([state, answered], -1) - self.mean) / self.std).clamp(-LARGEST_INPUT, LARGEST_INPUT)
        q, v = [head(both) for head in self.q], [head(both[:, : self.size]) for head in self.v]
        return torch.stack(q)[..., 0], torch.stack(v)[..., 0]

    def value(self, state: Tensor) -> Tensor:
        """V (2, n)."""
        return self(state, state.new_zeros(len(state), 2 * self.size))[1]


def targets(q: Tensor, next_v: Tensor, reward: Tensor, done: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Targets of Q(s, u) and V(s), each (2, n), head by head.

    Args:
        q: (2, n) averaged critics' Q(s, a) of the policy's own answers.
        next_v: (2, n) their V(s').
        reward: (n,) of the turn.
        done: (n,) 1 where the episode is over after it.
        gamma: discount.

    Source: YifeiZhou02/ArCHer archer/algorithms/archer/trainer.py, critic_loss.
    """
    return reward + (1 - done) * next_v * gamma, q


def critic_loss(q: Tensor, v: Tensor, q_target: Tensor, v_target: Tensor) -> Tensor:
    """Sum over the heads of the mean squared errors of Q and V, all (2, n)."""
    return 2 * (mse_loss(q, q_target) + mse_loss(v, v_target))


def utterance_advantages(q: Tensor, v: Tensor) -> Tensor:
    """Advantage min Q(s, a) - min V(s) of answers, (n,), from two heads each, (2, n).

    Source: YifeiZhou02/ArCHer archer/algorithms/archer/trainer.py, update.
    """
    return q.min(0).values - v.min(0).values


def move_average(average: nn.Module, critic: nn.Module, tau: float) -> None:
    """Move the averaged weights towards those of the critic by `tau`."""
    with torch.no_grad():
        for old, new in zip(average.parameters(), critic.parameters(), strict=True):
            old.lerp_(new, tau)


@dataclass
class Turns:
    """n drawn turns, as constants."""

    state: Tensor
    """(n, S) float32, the reader's state before the answer."""
    stored: Tensor
    """(n, 2 S) of the stored answer."""
    own: Tensor
    """(n, 2 S) of the policy's new answer."""
    next_state: Tensor
    """(n, S) before the next answer; arbitrary if the episode is over."""
    reward: Tensor
    """(n,)."""
    done: Tensor
    """(n,)."""
    known: Tensor
    """(n,) return from the turn on if that is the target of Q; NaN otherwise."""


@dataclass(frozen=True)
class Drawn:
    """A turn of a stored episode."""

    record: Record
    turn: int
    on_policy: bool = False
    """Whether the policy itself ran the episode, so that its return is the target of Q."""


class AnswersAnew(LossTerm):
    """The new responses of a step need no old log-probabilities; adds nothing to the loss."""

    name = "answers_anew"
    gradient = "never"

    def provides(self, step: Step) -> frozenset[str]:
        """Nothing: no term compares with an old policy."""
        return frozenset({"logp_old"})


class ArcherRecipe(AgentRecipe):
    """Off-policy critics of utterances, and an actor; see the module."""

    config: Any

    def __init__(self, config: Any) -> None:
        settings = self.settings = self.settings_of(config)
        check_shares(f"{config.recipe}.turns", settings.turns)
        super().__init__(config)
        # critics that read the policy's own states would chase an input that moves
        self.start = Reference(start_kind(self.policy), self.policy)
        self.terms = [*self.terms, AnswersAnew()]
        self.store = self._make_store()
        # every process draws the same first weights, and the global generator stays as it was
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(config.seed, "critics"))
            critic = UtteranceCritic(self.policy.width, settings.critic.hidden)
        self.critic = Fitter(critic, settings.critic)
        self.average = copy.deepcopy(critic)
        self.parts |= {"episodes": self.store, "critic": self.critic, "average": self.average}
        self._fresh: list[Fresh] = []
        self.added["fresh"] = self._fresh

    @staticmethod
    def settings_of(config: Any) -> Any:
        """The method's options."""
        return config.archer

    def rollout(self, policy: VlmPolicy, tasks: Sequence[AgentTask], streams: Streams, step: Step) -> Rollouts:
        """Run G episodes of each task, to be stored."""
        groups = self.run_groups(policy, tasks, streams, step)
        kept = streams.among(tasks, [group[0].task for group in groups])
        # the place gives the order of storing, which must be the same in every process (see `push_all`)
        for place, own in zip(kept.places, groups, strict=True):
            valid = [store_episode(episode) for episode in own if episode.has_result]
            self._fresh.append(((streams.draw, place), (EPISODES, valid)))
        return kept.noted(pack_groups(groups, policy))

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Store the episodes, answer drawn turns, train the critics, and return the responses with their advantages."""
        self.store.push_all(self._fresh, step.number)
        with accelerator.autocast():
            with stopwatch("critic"):
                mine, turns = self._draw(step)
                advantage = self._train_critics(turns, step)
            self.noted |= {"archer/stored": float(len(self.store)), "archer/advantage": float(advantage.mean())}
            if step.number < self.settings.warmup_steps:
                # an unscored row is not trained
                nothing = torch.full_like(rollouts.reward, math.nan)  # only the critics learn
                return rollouts.replace(reward=nothing, advantage=torch.zeros_like(rollouts.mask))
            process = PartialState()
            # critics answered all drawn turns; the actor trains those that `_draw` sampled in this process
            own = advantage[process.process_index :: process.num_processes]
            batch = pack_episodes(mine, range(len(mine)), self.policy)
        own = to_device(own.to(batch.mask.dtype), batch.mask.device)
        total = to_device(torch.tensor([episode.total for episode in mine]), batch.mask.device)
        return batch.replace(reward=total, advantage=own[:, None] * batch.mask)

    def describe(self) -> str:
        """The losses of actor and critics."""
        settings = self.settings
        return (
            "archer: minimise - mean over answers of A * sum_t logp_t,  A = min Q(s, a) - min V(s),  a ~ pi(s)\n"
            f"  critics: Q(s, u) -> r + {settings.gamma:g} V'(s'),  V(s) -> Q'(s, a),  "
            f"averages move by {settings.tau:g}"
        )

    def _alone(self, rollouts: Rollouts, reward: Tensor) -> Tensor:
        """Episodes are never compared with their group."""
        return torch.zeros_like(reward, dtype=torch.bool)

    def _make_store(self) -> ReplayBuffer:
        return ReplayBuffer(ReplayConfig(size=self.settings.capacity, memory_mb=self.settings.memory_mb))

    def _choose(self, step: Step, generator: torch.Generator) -> list[Drawn]:
        """Turns of all stored episodes, each as likely as the others, with replacement."""
        return draw_turns(self.store.stored(EPISODES), self.settings.turns, generator)

    def _draw(self, step: Step) -> tuple[list[Episode], Turns]:
        """This process's new answers as episodes of one turn, and all drawn turns as the critics read them."""
        generator = make_generator(self.config.seed, "turns", step.number)
        drawn = self._choose(step, generator)
        # drawn for all turns in every process, so that answers do not depend on the number of processes
        uniform = torch.rand(len(drawn), self.config.sampler.max_new_tokens, generator=generator)
        process = PartialState()
        mine = list(range(process.process_index, len(drawn), process.num_processes))
        episodes, found = list[Episode](), list[tuple[int, Tensor]]()
        for start in range(0, len(mine), ROWS):
            chunk = mine[start : start + ROWS]
            anew, columns = self._read([drawn[row] for row in chunk], uniform[chunk])
            episodes += anew
            found += list(zip(chunk, columns, strict=True))
        if process.num_processes > 1:
            found = list(gather_object(found))
        # gathered rows come process by process, but the critics' random batches index one common order
        found.sort(key=lambda entry: entry[0])
        table, size = torch.stack([columns for _, columns in found]), self.policy.width
        *states, of_turn = table.split([size, 2 * size, 2 * size, size, 3], -1)
        return episodes, Turns(*states, *of_turn.unbind(-1))

    def _read(self, chosen: Sequence[Drawn], uniform: Tensor) -> tuple[list[Episode], list[Tensor]]:
        """New answers to turns of episodes; states, reward, end and known return of each in one row, (6 S + 3,)."""
        stored = [(restore_episode(each.record), each.turn) for each in chosen]
        contexts = [context_of(*turn) for turn in stored]
        drawn = sample(self.policy, contexts, 1, self.config.sampler, uniform)
        given = [answer_of(*turn) for turn in stored]
        # without padding: `read_answers` takes means over real tokens
        own = [row[mask > 0].tolist() for row, mask in zip(*to_host([drawn.response_ids, drawn.mask]), strict=True)]
        # after the last turn any context does: `done` removes its value from the target
        after = [
            context_of(episode, turn + 1) if turn + 1 < episode.trajectory.turns else context
            for (episode, turn), context in zip(stored, contexts, strict=True)
        ]

        def read(reader: Any) -> list[Tensor]:
            (state, answered), (_, stored_answer) = (read_answers(reader, contexts, ids) for ids in (own, given))
            return to_host([state, stored_answer, answered, reader.last_states(after).float()])

        assert self.start is not None
        with self.start.to(self.policy.device).whole():
            states = self.start.score(read)
        reward = torch.tensor([episode.rewards[turn] for episode, turn in stored])
        done = torch.tensor([float(turn + 1 == episode.trajectory.turns) for episode, turn in stored])
        known = torch.tensor(
            [
                discounted(episode.rewards[turn:], self.settings.gamma) if each.on_policy else math.nan
                for each, (episode, turn) in zip(chosen, stored, strict=True)
            ]
        )
        of_turn = torch.stack([reward, done, known], -1)
        columns = torch.cat([*states, of_turn], -1)
        turns = zip(contexts, own, _logp(drawn), stored, drawn.texts, drawn.finish, strict=True)
        return [
            _one_turn(context, ids, logp, whole, answers=[text], finish=finish)
            for context, ids, logp, (whole, _), text, finish in turns
        ], list(columns)

    def _train_critics(self, turns: Turns, step: Step) -> Tensor:
        """Some updates of the critics, the same on every process; returns the advantages of the new answers."""
        settings = self.settings
        generator = make_generator(self.config.seed, "critics", step.number)
        critic = self.critic.critic
        for each in (critic, self.average):
            each.fit_scale(turns.state, turns.stored)
        # the critics are float32 on the CPU, whatever the precision of the run
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            for _ in range(settings.critic.updates):
                rows = torch.randint(len(turns.reward), (settings.critic.batch_steps,), generator=generator)
                batch = Turns(**{name: value[rows] for name, value in vars(turns).items()})
                with torch.no_grad():
                    own_q, _ = self.average(batch.state, batch.own)
                    next_v = self.average.value(batch.next_state)
                q_goal, v_goal = targets(own_q, next_v, batch.reward, batch.done, settings.gamma)
                # returns of on-policy turns need no bootstrapping (HNPG)
                q_goal = torch.where(batch.known.isnan(), q_goal, batch.known)
                q, v = critic(batch.state, batch.stored)
                self.noted["archer/critic_loss"] = self.critic.step(critic_loss(q, v, q_goal, v_goal))
                move_average(self.average, critic, settings.tau)
        # after the updates, by the critics themselves: the actor never sees the averages
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            q, v = critic(turns.state, turns.own)
        self.noted |= {"archer/q": float(q.mean()), "archer/v": float(v.mean())}
        self.noted["archer/advantage_std"] = float(utterance_advantages(q, v).std())
        return utterance_advantages(q, v)


def draw_turns(
    records: Sequence[Record], count: int, generator: torch.Generator, *, on_policy: bool = False
) -> list[Drawn]:
    """Draw turns of stored episodes uniformly with replacement."""
    all_of_them = [Drawn(record, turn, on_policy) for record in records for turn in range(record["turns"])]
    return [all_of_them[number] for number in torch.randint(len(all_of_them), (count,), generator=generator).tolist()]


def discounted(rewards: Sequence[float], gamma: float) -> float:
    """Sum of the rewards, each discounted by the turns before it."""
    return sum(gamma**later * reward for later, reward in enumerate(rewards))


def read_answers(
    reader: VlmPolicy, contexts: Sequence[Prompt], answers: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """States (n, S) before answers, and (n, 2 S) the means over their tokens of states and of embeddings.

    Last states encode the next token and barely distinguish answers, hence the means.
    """
    # a state is that before a token, so a further one lets the last of the answer be read
    rows = [_one_turn(prompt, [*ids, ids[-1]]) for prompt, ids in zip(contexts, answers, strict=True)]
    read = reader.states(pack_episodes(rows, range(len(rows)), reader)).float()
    own = read.split([len(ids) + 1 for ids in answers])
    table = reader.network.get_input_embeddings().weight
    written = torch.stack([table[to_device(torch.tensor(list(ids)), table.device)].float().mean(0) for ids in answers])
    states, means = torch.stack([part[0] for part in own]), torch.stack([part[1:].mean(0) for part in own])
    return states, torch.cat([means, layer_norm(written, written.shape[1:])], -1)


def context_of(episode: Episode, turn: int) -> Prompt:
    """Everything that the policy reads before its answer in a turn."""
    steps = episode.trajectory
    assert episode.prompt is not None
    # the turn's own observation precedes its first sampled token
    end = next(at for at, own in enumerate(steps.turn) if own == turn and steps.sampled[at])
    start, first = 0, episode.prompt
    # a context replaces all that was read before it, so the last one up to the answer counts
    for context in steps.contexts:
        if context.start <= end:
            start, first = context.start, context.prompt
    parts, at = [first], start
    for insert in (insert for insert in steps.inserts if start <= insert.start < end):
        # tokens between two inserts are earlier answers
        parts += [text_prompt(torch.tensor(steps.ids[at : insert.start]))] if insert.start > at else []
        parts, at = [*parts, insert.prompt], insert.stop
    return join_prompts([*parts, text_prompt(torch.tensor(steps.ids[at:end]))] if end > at else parts)


def answer_of(episode: Episode, turn: int) -> list[int]:
    """Tokens that the policy sampled in a turn."""
    steps = episode.trajectory
    columns = zip(steps.ids, steps.turn, steps.sampled, strict=True)
    return [token for token, own, sampled in columns if own == turn and sampled]


def _logp(drawn: Samples) -> list[list[float]]:
    logp, mask = to_host([drawn.logp, drawn.mask])
    return [row[own > 0].tolist() for row, own in zip(logp, mask, strict=True)]


def _one_turn(
    context: Prompt, ids: Sequence[int], logp: Sequence[float] | None = None, whole: Episode | None = None, **said: Any
) -> Episode:
    """An answer as a one-turn episode, with the return of the `whole` episode that its turn belongs to."""
    trajectory, whole = Trajectory(), whole or Episode(AgentTask(""))
    trajectory.add_turn(ids, [0.0] * len(ids) if logp is None else logp)
    # one sampled turn, but total and success of the whole episode, which metrics read
    own = Episode(whole.task, context, trajectory, [float(whole.total)], ending="terminated", success=whole.success)
    return replace(own, **said)
