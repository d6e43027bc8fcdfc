"""How a served policy reads observations and chooses actions."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmrl.fields import bounded


@dataclass
class ServeConfig:
    """Options of `mmrl serve`."""

    temperature: float = bounded(0.0, at_least=0)
    """Spread of sampled actions; 0 = the most likely ones, as `greedy` evaluates."""
    seed: int = 0
    """Seed of the random numbers of policies that draw some."""
    max_batch: int = bounded(8, at_least=1)
    """Observations that the policy answers at once where so many wait; 1 = one after the other."""
    image_key: str = "observation/image"
    """Entry of a message with the camera image. Nested entries are joined with `/`."""
    view_keys: list[str] = field(default_factory=lambda: ["observation/wrist_image"])
    """Entries with the images of further cameras, in the order in which the policy sees them; extra ones are not
    read."""
    state_key: str = "observation/state"
    """Entry with the robot's state."""
    prompt_key: str = "prompt"
    """Entry with the instruction."""
    prompt: str = ""
    """Instruction for messages without one; empty = they are refused."""
    log_every_s: float = bounded(60.0, above=0)
    """Seconds between the lines with latencies."""

    def validate(self) -> None:
        """Check that the entries have different names; raises ValueError."""
        keys = (self.image_key, self.state_key, self.prompt_key, *self.view_keys)
        if len(set(keys)) < len(keys) or not all(keys):
            raise ValueError(
                f"image_key, state_key, prompt_key and view_keys are {', '.join(map(repr, keys))}; name each entry once"
            )
