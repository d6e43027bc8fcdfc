"""Settings of SRPO's progress reward, and the presets from which the more consequential ones come."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mmrl.fields import bounded, choice, rare

EPS_MODES = ("per_sqrt_dim", "absolute")
INVALID = ("nan", "zero")
REFERENCES = ("task", "initial_state")
NORM_NAMES = ("minmax", "zscore", "absolute", "initial")


@dataclass(frozen=True)
class ProgressForm:
    """Values of a preset; the fields are those of `ProgressSettings`."""

    references: str
    memory: int
    norm: str
    eps_mode: str
    invalid: str


@dataclass
class ProgressSettings:
    """How distances become rewards; null takes the preset's value."""

    preset: str = choice("task", lambda: PRESETS)
    """published: the released code, bit for bit; task: the same with a radius of clustering that finds clusters;
    initial_state: references of the same initial state, remembered, and progress since the episode's first frame, for
    initial states that come back."""
    references: str | None = rare(choice(None, REFERENCES))
    """A failure is compared with the successes of its task or of its initial state; null = the preset's."""
    task_fallback: bool = rare(False)
    """Whether failures of an initial state of which no success is known are compared with the successes of its task,
    those of other initial states; for `references: initial_state`."""
    memory: int | None = rare(bounded(None, at_least=0))
    """Latest successes of a task or initial state that are kept as references for later batches, 0 for those of the
    batch only; null = the preset's (initial_state 32, else 0)."""
    norm: str | None = choice(None, NORM_NAMES)
    """minmax over the failures with common references (code), zscore over them (paper), absolute against the successes'
    own spread, or initial against the distance of the episode's own first frame; null = the preset's (initial_state
    initial, else minmax)."""
    alpha: float = bounded(0.6, above=0, below=1)
    """Largest reward of a failure; below 1, so that a near success is worth less than a success."""
    steepness: float = rare(bounded(10.0, above=0, finite=True))
    """Slope of the sigmoid over the normalised distance; norms minmax and absolute."""
    offset: float = rare(bounded(0.5, finite=True))
    """Normalised distance with a reward of alpha / 2; norms minmax and absolute."""
    eps: float = rare(bounded(0.5, above=0, finite=True))
    """Radius of DBSCAN over the standardised successes; see `eps_mode`."""
    eps_mode: str | None = rare(choice(None, EPS_MODES))
    """per_sqrt_dim multiplies `eps` by the root of the number of entries that vary; absolute uses it unchanged; null =
    the preset's (published absolute, else per_sqrt_dim)."""
    min_samples: int = rare(bounded(2, at_least=1))
    """Successes within the radius, itself included, that make a success a core point of a cluster."""
    squared: bool = rare(False)
    """Whether distances are squared before they are normalised."""
    invalid: str | None = rare(choice(None, INVALID))
    """Reward of a trajectory that could not be embedded: nan (left out and counted) or zero (released code); null = the
    preset's (published zero, else nan)."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        if self.task_fallback and self.form.references != "initial_state":
            raise ValueError(
                f"task_fallback is set, but references are those of the {self.form.references} already; use it with "
                "references: initial_state"
            )

    @property
    def form(self) -> ProgressForm:
        """The preset with the fields that are set here."""
        preset = PRESETS[self.preset]
        names = [entry.name for entry in fields(ProgressForm)]
        own = {name: getattr(self, name) for name in names}
        return ProgressForm(**{name: getattr(preset, name) if value is None else value for name, value in own.items()})


PRESETS: dict[str, ProgressForm] = {
    "published": ProgressForm("task", 0, "minmax", "absolute", "zero"),
    "task": ProgressForm("task", 0, "minmax", "per_sqrt_dim", "nan"),
    "initial_state": ProgressForm("initial_state", 32, "initial", "per_sqrt_dim", "nan"),
}
