"""SRPO's progress at every look: a simulator whose reward says how close an episode is to successful demonstrations.

Phi_t is the progress reward of `robotics.methods.progress` for the part of the episode up to look t, 1 once it has
succeeded. As a potential it is paid by its increase (`reward.potential`), so that being somewhere pays nothing. The
policy is looked at after each chunk; the control steps before the chunk's last one keep the earlier value.

Source: SRPO, arXiv 2511.15605, which rewards whole episodes only; distances to a goal's latent as a dense reward: XIRL,
    arXiv 2106.03911.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import SET, only_with, rare
from mmrl.files import expanded
from robotics.data import LeRobotReader
from robotics.episodes.dataset_fit import check_state
from robotics.methods.latents import LatentConfig, StateLatent, make_latent
from robotics.methods.progress import ProgressSettings, progress_rewards
from robotics.sim.episodes import ChunkResult, EpisodeSpec, RobotObservation, RobotSim, begin_episodes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass
class PotentialConfig:
    """A potential of the state instead of the environment's own rewards."""

    demonstrations: str = rare("")
    """Folder of a LeRobotDataset of successes: the reward is the progress towards them at each look. Empty = the
    environment's own rewards."""
    camera: str = only_with("front", demonstrations=SET)
    """Camera of the dataset, for a latent of images."""
    latent: LatentConfig = only_with(field(default_factory=lambda: LatentConfig(kind="state")), demonstrations=SET)
    """Latent used to compare episodes, of kind state, video or vjepa2."""
    progress: ProgressSettings = only_with(
        field(default_factory=lambda: ProgressSettings(norm="initial")), demonstrations=SET
    )
    """Conversion of distances to progress, with references of the task and the norm initial."""

    def validate(self) -> None:
        """Check that an episode can be judged by itself; raises ValueError."""
        form = self.progress.form
        if self.demonstrations and (form.norm, form.references) != ("initial", "task"):
            raise ValueError(
                f"potential.progress has the norm {form.norm} with references {form.references}; an unfinished episode "
                "is judged by itself, so only norm: initial with references: task is possible"
            )


class ProgressSim:
    """A `RobotSim` whose rewards are the progress of SRPO; everything else is that of the simulator.

    Args:
        sim: the simulator.
        config: demonstrations, latent and conversion.
        accept_other: facts in which demonstrations and simulator may differ, see `robotics.sim.interface.FACTS`.

    Raises:
        UserError: latent, demonstrations and simulator do not fit, or a task has no successful demonstration.
    """

    potential_rewards = True

    def __init__(self, sim: RobotSim, config: PotentialConfig, accept_other: Collection[str] = ()) -> None:
        self._sim, self._settings = sim, config.progress
        latent_config = config.latent
        if latent_config.kind == "state" and not latent_config.path and not latent_config.options:
            latent_config = replace(latent_config, path=config.demonstrations)
        self._latent = make_latent(latent_config)
        if self._latent.looks_at != "robot":
            raise UserError(
                f"potential.latent.kind is {latent_config.kind}; demonstrations have no poses of the object"
            )
        if self._latent.needs_images and sim.image_size is None:
            raise UserError(
                f"potential.latent.kind is {latent_config.kind}, but there are no images; set sim.image_size"
            )
        if isinstance(self._latent, StateLatent) and self._latent.state_size != sim.state_size:
            raise UserError(
                f"the states of potential.demonstrations have {self._latent.state_size} entries, but those of the "
                f"simulator have {sim.state_size}"
            )
        reader = LeRobotReader(expanded(config.demonstrations))
        if isinstance(self._latent, StateLatent):
            check_state(str(reader.folder), sim, accept_other)
        if self._latent.needs_images and config.camera not in reader.cameras:
            raise UserError(
                f"potential.camera is '{config.camera}', but {reader.folder} has "
                f"{', '.join(reader.cameras) or 'no cameras'}"
            )
        found: dict[str, list[NDArray[np.float32]]] = {text: [] for text in sim.tasks().values()}
        for episode in reader:
            if episode.success and episode.task in found:
                images = episode.images[config.camera] if self._latent.needs_images else None
                found[episode.task] += list(self._latent.embed([images], [episode.state]).latents)
        if missing := [text for text, latents in found.items() if not latents]:
            raise UserError(f"potential.demonstrations has no success of {missing[0]!r}")
        self._references: dict[Hashable, ArrayLike] = {text: np.stack(latents) for text, latents in found.items()}

    @classmethod
    def over(cls, sim: RobotSim, config: PotentialConfig, accept_other: Collection[str] = ()) -> RobotSim:
        """The same, for a simulator that is closed if they do not fit; without demonstrations, the simulator itself."""
        if not config.demonstrations:
            return sim
        try:
            made: Any = cls(sim, config, accept_other)
        except UserError:
            sim.close()
            raise
        opened: RobotSim = made
        return opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sim, name)

    def reset(self, episodes: Sequence[EpisodeSpec], past: int = 0) -> ChunkResult:
        """Begin episodes, see `RobotSim.reset`."""
        result = begin_episodes(self._sim, episodes, past)
        self._texts = [episode.instruction for episode in episodes]
        self._seen: list[list[tuple[NDArray[np.float32], Any]]] = [[] for _ in episodes]
        self._value = np.zeros(len(episodes))
        self._note(result.observation)
        return result

    def step_chunk(self, actions: ArrayLike, record: Collection[int] = ()) -> ChunkResult:
        """Step the live rows; see `RobotSim.step_chunk`."""
        result = self._sim.step_chunk(actions, record)
        self._note(result.observation)
        rows, steps = result.rows, np.arange(result.rewards.shape[1])
        value = np.where(result.success, 1.0, self._progress(rows.tolist()))
        last = steps == result.steps[:, None] - 1
        rewards = np.where(last, value[:, None], np.where(steps < result.steps[:, None], self._value[rows, None], 0.0))
        self._value[rows] = value
        return replace(result, rewards=np.where(result.failed[:, None], np.nan, rewards))

    def _note(self, seen: RobotObservation) -> None:
        for place, row in enumerate(seen.rows.tolist()):
            self._seen[row].append((seen.state[place], None if seen.images is None else seen.images[place]))

    def _progress(self, rows: Sequence[int]) -> NDArray[np.float64]:
        """(L,) progress of the episodes so far; an episode that cannot be embedded keeps its last value."""
        both = [self._embedded([self._seen[row][:end] for row in rows]) for end in (None, 1)]
        valid = both[0].valid & both[1].valid
        latents, first = (np.where(valid[:, None], part.latents, 0) for part in both)
        texts, failures = [self._texts[row] for row in rows], np.zeros(len(rows), bool)
        found = progress_rewards(latents, failures, valid, texts, self._settings, self._references, first).reward
        return np.where(valid, found, self._value[list(rows)])

    def _embedded(self, parts: Sequence[Sequence[tuple[NDArray[np.float32], Any]]]) -> Any:
        images = [np.stack([image for _, image in part]) if self._latent.needs_images else None for part in parts]
        return self._latent.embed(images, [np.stack([state for state, _ in part]) for part in parts], one_by_one=True)
