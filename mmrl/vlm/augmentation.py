"""Options of difficulty-aware augmentation: which questions are made easier or harder in training, and how much."""

from __future__ import annotations

from dataclasses import dataclass

from mmrl.errors import ConfigError
from mmrl.fields import bounded, choice, rare


@dataclass
class AugmentationSettings:
    """Hints for hard questions and noise for easy ones; a scale of 0 switches one off."""

    measure: str = rare(choice("history", ("history", "probe")))
    """Source of a question's own mean reward: history, its last group, so that a question is changed from its second
    time on; probe, samples drawn of it first in every step, which cost as much as others."""
    probe_samples: int = rare(bounded(4, at_least=1))
    """Samples of each question that `measure: probe` draws."""
    window: int = rare(bounded(100, at_least=1))
    """Last samples whose mean reward a question is compared with."""
    hint_scale: float = bounded(1.0, at_least=0, finite=True)
    """Share of a trace that is given for a difficulty of 1, in units of the reward; 0 = no hints."""
    hint_max: float = rare(bounded(0.5, above=0, at_most=1))
    """Largest share of a trace that is given."""
    traces: int = rare(bounded(4, at_least=1))
    """Traces sampled for each hard question with the answer in it; they count in the cost."""
    max_hinted: int = bounded(0, at_least=0)
    """Most questions of a step, in each process, that traces are sampled for, the hardest first; 0 = all hard ones."""
    hint_place: str = choice("question", ("question", "answer"))
    """question: the hint is text of the question; answer: the answer begins with it, which models that follow no
    instructions can use too."""
    hint_template: str = rare("{question} Hint: {hint}")
    """Question with a hint, for `hint_place: question`; {question} stands for the text of the question."""
    answer_template: str = "{question} The answer is {answer}. Explain how to find it."
    """Question that traces are sampled for."""
    think_start: str = rare("<think>")
    """Text that a response's reasoning begins with."""
    think_end: str = rare("</think>")
    """Text that ends it."""
    noise_scale: float = bounded(0.5, at_least=0, finite=True)
    """Standard deviation of the noise, as a share of full contrast, for a difficulty of -1; 0 = no noise."""
    noise_max: float = rare(bounded(0.3, above=0, finite=True))
    """Largest standard deviation of the noise."""

    @property
    def enabled(self) -> bool:
        """Whether anything is changed."""
        return self.hint_scale > 0 or self.noise_scale > 0

    def hint_fraction(self, difficulty: float) -> float:
        """Share of a trace that is given, clip(hint_scale * difficulty, 0, hint_max)."""
        return min(max(self.hint_scale * difficulty, 0.0), self.hint_max)

    def noise_sigma(self, difficulty: float) -> float:
        """Noise of an easy question, clip(noise_scale * |difficulty|, 0, noise_max); 0 for hard ones."""
        return min(max(-self.noise_scale * difficulty, 0.0), self.noise_max)

    def validate(self) -> None:
        """Refuse templates and marks that leave something out; raises ConfigError."""
        for key, name in (("answer_template", "answer"), ("hint_template", "hint")):
            if f"{{{name}}}" not in getattr(self, key):
                raise ConfigError(f"augmentation.{key} is {getattr(self, key)!r}; it must hold {{{name}}}")
        for key in ("think_start", "think_end"):
            if not getattr(self, key):
                raise ConfigError(f"augmentation.{key} is empty; name the text, such as <think> and </think>")
