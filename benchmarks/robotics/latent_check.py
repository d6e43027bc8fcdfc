"""Scores how well a progress reward ranks a policy's failures, before any training.

    python -m benchmarks.robotics.latent_check configs/robotics/tabletop_srpo.yaml data.layouts=4 --latents
    video,pixels,object

Runs episodes of the configuration's policy from its initial states, splits them at random into batches of training
steps, `--deals` times, and prints for each latent and each form of the reward the agreement with the simulator's own
reward (`srpo/agreement`) and the correlation of the advantages (`srpo/advantage_correlation`), means over steps. The
latent of the configuration's own kind has its settings; others have their defaults. A latent that is fitted to a run's
first step gets further episodes. Needs a simulator whose reward tells failures apart, as the tabletop's does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mmrl.core.objectives.objective import Objective
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.fields import bounded, check_fields
from mmrl.training.processes import Streams, stream_seed
from mmrl.training.recipe import Step
from robotics.episodes.payload import EpisodePayload, episode_id
from robotics.methods.latents import LATENTS, LatentConfig, TrajectoryLatent, make_latent
from robotics.methods.progress import (
    ProgressSettings,
    SuccessMemory,
    advantage_correlation,
    progress_rewards,
    rank_agreement,
)
from robotics.methods.srpo import SrpoConfig, SrpoRecipe

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMS: dict[str, ProgressSettings] = {
    "published": ProgressSettings(preset="published"),
    "task": ProgressSettings(),
    "task, initial": ProgressSettings(norm="initial"),
    "initial_state, minmax": ProgressSettings(preset="initial_state", norm="minmax"),
    "initial_state": ProgressSettings(preset="initial_state"),
    "initial_state, fallback": ProgressSettings(preset="initial_state", task_fallback=True),
}
"""Forms of the reward by name: presets, and one with the norm of another."""


@dataclass(frozen=True)
class CheckOptions:
    """Simulated episodes."""

    episodes: int = bounded(256, at_least=1)
    """Episodes of the policy."""
    deals: int = bounded(10, at_least=1)
    """Random splits of them into batches."""
    seed: int = 0
    """Seed of the episodes and the splits."""


class CheckedEpisode(NamedTuple):
    """The compared parts of an episode."""

    frames: NDArray[np.uint8] | None
    """(F, H, W, 3)."""
    states: NDArray[np.float32]
    """(P, S) of the robot."""
    places: NDArray[np.float32] | None
    """(P, 3) of the object; None if the simulator does not report it."""
    task: str
    state_label: str
    """Name of the initial state."""
    success: bool
    progress: float
    """The simulator's reward at the end."""

    def path(self, latent: TrajectoryLatent) -> NDArray[np.float32]:
        """States that a latent reads; raises UserError if the simulator does not report them."""
        if latent.looks_at == "robot":
            return self.states
        if self.places is None:
            raise UserError("this simulator does not report the object's pose; leave that latent out")
        return self.places


class Score(NamedTuple):
    """Scores of a latent with one form of the reward."""

    agreement: float
    advantage_correlation: float


def check_latents(recipe: SrpoRecipe, kinds: Sequence[str], options: CheckOptions) -> Iterator[tuple[str, str, Score]]:
    """Score latents on episodes of a recipe's policy."""
    check_fields(options, "latent_check")
    unknown = sorted(set(kinds) - set(LATENTS))
    if unknown:
        raise UserError(f"unknown latent {', '.join(unknown)}; available: {', '.join(LATENTS)}")
    own = recipe.config.latent
    latents = {kind: make_latent(own if own.kind == kind else LatentConfig(kind=kind)) for kind in kinds}
    rows = _run(recipe, options.episodes, options.seed, "check")
    first = [] if all(latent.size for latent in latents.values()) else _run(recipe, 1, options.seed, "fit")
    for kind, latent in latents.items():
        if not latent.size:
            latent.fit([row.path(latent) for row in first])
        for form, settings in FORMS.items():
            samples = recipe.config.trainer.samples_per_task
            yield kind, form, score_latent(latent, rows, settings, recipe.objective, samples, options)


def score_latent(
    latent: TrajectoryLatent,
    rows: Sequence[CheckedEpisode],
    settings: ProgressSettings,
    objective: Objective,
    samples: int,
    options: CheckOptions,
) -> Score:
    """Score a latent with one form of the reward, over simulated steps with the memory that they would have."""
    videos, paths = [row.frames for row in rows], [row.path(latent) for row in rows]
    ends = latent.embed(videos, paths)
    starts = latent.embed(
        [None if video is None else video[:1] for video in videos], [path[:1] for path in paths], one_by_one=True
    )
    valid = ends.valid & starts.valid
    labels = [row.task if settings.form.references == "task" else row.state_label for row in rows]
    success, progress = np.array([row.success for row in rows]), np.array([row.progress for row in rows], np.float32)
    found = []
    for deal in range(options.deals):
        memory = SuccessMemory(settings.form.memory)
        for index, groups in _steps(rows, samples, np.random.default_rng([options.seed, deal])):
            names = [labels[row] for row in index]
            outcome = progress_rewards(
                ends.latents[index],
                success[index],
                valid[index],
                names,
                settings,
                memory.references(),
                starts.latents[index],
            )
            memory.add(ends.latents[index], success[index] & valid[index], names)
            failed = ~success[index]
            ranked = failed & np.isfinite(outcome.distance)
            agreement = rank_agreement(outcome.reward[ranked], progress[index][ranked], groups[ranked])
            own, other = (_advantages(objective, reward, groups) for reward in (outcome.reward, progress[index]))
            found.append((agreement, advantage_correlation(own, other, progress[index], failed)))
    columns = np.array(found, float).reshape(-1, 2).T
    return Score(
        *(float(np.mean(column[np.isfinite(column)])) if np.isfinite(column).any() else np.nan for column in columns)
    )


def _run(recipe: SrpoRecipe, count: int, seed: int, purpose: str) -> list[CheckedEpisode]:
    """At least `count` episodes, equally many from the initial states of a step."""
    rows: list[CheckedEpisode] = []
    recipe.policy.eval()
    while len(rows) < count:
        streams = Streams(stream_seed(seed, purpose, len(rows)))
        with torch.no_grad():
            tasks = recipe.train_tasks[: recipe.config.trainer.tasks_per_step]
            rollouts = recipe.rollout(recipe.policy, tasks, streams, Step())
        payload = EpisodePayload.of(rollouts)
        own = recipe.own_reward(payload).tolist()
        for row in range(rollouts.num_rows):
            if not bool(payload.failed[row]):
                rows.append(_episode(payload, row, int(rollouts.group[row]), own[row]))
    return rows


def _episode(payload: EpisodePayload, row: int, group: int, own_reward: float) -> CheckedEpisode:
    start = payload.episodes[group]
    return CheckedEpisode(
        frames=payload.frames_of(row),
        states=payload.path(row),
        places=payload.object_path(row),
        task=start.task,
        state_label=episode_id(start),
        success=bool(payload.success[row]),
        progress=own_reward,
    )


def _steps(
    rows: Sequence[CheckedEpisode], samples: int, draws: np.random.Generator
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Rows and groups of steps with `samples` episodes of every initial state."""
    by_label: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        by_label.setdefault(row.state_label, []).append(place)
    shuffled = [draws.permutation(places) for places in by_label.values()]
    fewest = min(map(len, shuffled))
    if fewest < samples:
        raise UserError(f"an initial state has {fewest} episodes, but a step needs {samples}; run more episodes")
    for start in range(0, fewest - samples + 1, samples):
        yield (
            np.concatenate([places[start : start + samples] for places in shuffled]),
            np.repeat(np.arange(len(shuffled)), samples),
        )


def _advantages(objective: Objective, reward: NDArray[np.float32], groups: NDArray[np.int64]) -> NDArray[np.float32]:
    mask = torch.ones(len(reward), 1)
    batch = Rollouts(torch.from_numpy(groups), mask, torch.zeros_like(mask), torch.from_numpy(reward))
    found = objective.compute_advantages(batch).advantage
    assert found is not None
    return np.asarray(found[:, 0].numpy(), np.float32)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the scores as a table."""
    from mmrl.config import load

    parser = argparse.ArgumentParser(prog="python -m benchmarks.robotics.latent_check", description=__doc__)
    parser.add_argument("config", help="an SRPO configuration that provides the policy, simulator and initial states")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the file's values")
    parser.add_argument("--episodes", type=int, default=CheckOptions.episodes, help="episodes of the policy")
    parser.add_argument("--latents", default="", help="kinds, comma-separated; default: the configuration's own")
    parser.add_argument("--deals", type=int, default=CheckOptions.deals, help="random splits of episodes into batches")
    parser.add_argument("--seed", type=int, default=0, help="seed of the episodes and the splits")
    given = parser.parse_intermixed_args(arguments)
    try:
        config = load(given.config, SrpoConfig, given.overrides)
        recipe = SrpoRecipe(replace(config, eval_data={}))
        options = CheckOptions(given.episodes, given.deals, given.seed)
        kinds = given.latents.split(",") if given.latents else [config.latent.kind]
        sys.stdout.write(f"{'latent':<12} {'reward':<22} agreement  correlation of advantages\n")
        for kind, form, score in check_latents(recipe, kinds, options):
            row = f"{kind:<12} {form:<22} {score.agreement:>9.2f}  {score.advantage_correlation:.2f}"
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
