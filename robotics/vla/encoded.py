"""Base of the policies on the observation encoder: building, saving and loading."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Self

from mmrl.errors import UserError
from robotics.vla.encoder import EncoderConfig, ObservationEncoder
from robotics.vla.policy import ActionPolicy
from robotics.vla.saved import make_config, read_config, read_statistics, read_weights, write_config, write_weights
from robotics.vla.statistics import StateStatistics
from robotics.vla.vocabulary import Vocabulary

VOCABULARY_FILE = "vocabulary.json"


class EncodedPolicy(ActionPolicy):
    """A policy with an `ObservationEncoder`, made as `cls(config, vocabulary, seed)`.

    The seed is that of the weights; the global generator is not used. A number out of range raises UserError.
    """

    kind: ClassVar[str]
    """Row of `robotics.vla.policy.SAVED_POLICIES`."""
    config_class: ClassVar[type[Any]]
    """Dataclass of the configuration; it has a field `encoder`."""
    config: Any
    vocabulary: Vocabulary
    encoder: ObservationEncoder

    @classmethod
    def build(cls, config: Any, instructions: Iterable[str], seed: int = 0) -> Self:
        """Make a policy with the words of some instructions as its vocabulary."""
        return cls(config, Vocabulary.from_texts(instructions), seed)  # type: ignore[call-arg]

    def scale_states(self, statistics: StateStatistics) -> None:
        self.encoder.scale_states(statistics)

    def save_pretrained(self, path: Path | str) -> None:
        folder = Path(path)
        write_config(folder, self.kind, self.config, self.statistics)
        self.vocabulary.save(folder / VOCABULARY_FILE)
        write_weights(self, folder)

    def load_weights(self, path: Path | str) -> None:
        self.vocabulary.check_same(Path(path) / VOCABULARY_FILE)
        read_weights(self, Path(path))
        self.statistics = read_statistics(Path(path))

    @classmethod
    def from_pretrained(cls, path: Path | str) -> Self:
        """Load what `save_pretrained` wrote."""
        entries = read_config(Path(path))
        kind = entries.pop("kind", None)
        if kind != cls.kind:
            raise UserError(f"{path} holds a policy of kind {kind!r}, not {cls.kind!r}")
        encoder = make_config(EncoderConfig, entries.pop("encoder", {}), f"encoder in {path}")
        config = make_config(cls.config_class, entries | {"encoder": encoder}, str(path))
        policy = cls(config, Vocabulary.load(Path(path) / VOCABULARY_FILE))  # type: ignore[call-arg]
        policy.load_weights(path)
        return policy
