"""Verdicts of several verifiers on sampled flows, as numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError
from mmrl.fields import bounded, choice
from robotics.flow3d.check.geometric import GeometricLimits, GeometricVerifier
from robotics.flow3d.check.opening import VerifierConfig, open_verifier
from robotics.flow3d.check.outcome import render_outcome
from robotics.flow3d.check.verdict import PlanFacts, Verdict, Verifier, judged
from robotics.flow3d.geometry import FloatArray
from robotics.flow3d.given import FixedFlow
from robotics.flow3d.plan_result import PlanFailed, PlanRound
from robotics.flow3d.planner_config import PlannerConfig
from robotics.flow3d.prediction import Predictor

if TYPE_CHECKING:
    from robotics.flow3d.check.oracle import SceneOracle
    from robotics.flow3d.clip import FlowClip

VALUES = ("ok", "score")
JUDGES = ("oracle", "geometric", "vlm", "endpoint", "always")
BLIND = ("oracle", "geometric", "always")
"""Verifiers that need no rendered outcome."""


@dataclass
class WeightedVerifierConfig(VerifierConfig):
    """One of several verifiers, and its weight in the reward."""

    kind: str = choice("oracle", JUDGES, or_function=True)
    """oracle: the criterion of the suite's scenes on the predicted final pose; geometric; vlm: a local model; endpoint:
    one behind a chat server; always; or module:function(**options) that returns a `Verifier`."""
    weight: float = bounded(1.0, finite=True)
    """Factor of its value in the reward."""
    value: str = choice("ok", VALUES)
    """ok: 1 for an accepted flow, else 0; score: the verifier's score of 0 to 1."""
    name: str = ""
    """Name in metrics; empty = the kind or function."""
    options: dict[str, Any] = field(default_factory=dict)
    """geometric: fields of `GeometricLimits`; arguments of the function; none for the others."""

    def validate(self) -> None:
        """Raise ValueError for options that are not used."""
        super().validate()
        if self.options and self.kind != "geometric" and ":" not in self.kind:
            raise ValueError(f"verifiers: {self.kind} has no options; only geometric and your own functions have")
        unknown = sorted(set(self.options) - set(GeometricLimits.__dataclass_fields__))
        if unknown and self.kind == "geometric":
            known = ", ".join(GeometricLimits.__dataclass_fields__)
            raise ValueError(f"verifiers: geometric has no option {unknown[0]}; it has {known}")

    @property
    def label(self) -> str:
        """Name in metrics."""
        return self.name or self.kind.rpartition(":")[2]

    def value_of(self, verdict: Verdict) -> float:
        """The verdict as a number; NaN where it could not be judged."""
        if verdict.ok is None:
            return float("nan")
        return float(verdict.ok) if self.value == "ok" else verdict.score


class FlowJudge:
    """Judges sampled flows with several verifiers."""

    def __init__(self, configs: Sequence[WeightedVerifierConfig], config: PlannerConfig | None = None) -> None:
        names = [each.label for each in configs]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"several verifiers are named {', '.join(doubled)}; give them different names")
        self.configs, self.config = list(configs), config or PlannerConfig()
        self._oracle: SceneOracle | None = None
        self._renders = any(each.kind not in BLIND for each in configs)
        self._verifiers = {each.label: self._opened(each) for each in configs}

    def judge(self, clip: FlowClip, flows: FloatArray) -> list[dict[str, Verdict]]:
        """Verdicts by verifier on each of the flows (K, T, N, N, 4) of a clip."""
        verifiers = {name: verifier_of(clip) for name, verifier_of in self._verifiers.items()}
        return [self._verdicts(verifiers, clip, flow) for flow in flows]

    def check(self, clip: FlowClip) -> None:
        """Raise UserError for a clip that a verifier cannot judge."""
        for verifier_of in self._verifiers.values():
            verifier_of(clip)

    def values(self, verdicts: Sequence[dict[str, Verdict]]) -> dict[str, list[float]]:
        """Values of the verdicts by verifier, without weights."""
        return {each.label: [each.value_of(found[each.label]) for found in verdicts] for each in self.configs}

    def close(self) -> None:
        """Free the scenes."""
        if self._oracle is not None:
            self._oracle.close()

    def _verdicts(self, verifiers: dict[str, Verifier], clip: FlowClip, flow: FloatArray) -> dict[str, Verdict]:
        seen = clip.observation
        predictor = Predictor(FixedFlow(flow, clip.points), self.config)
        try:
            mask = predictor.mask(seen)
        except PlanFailed as failed:  # a fault of the observation, not of the flow
            return dict.fromkeys(verifiers, Verdict(None, 0.0, f"{failed.failure}: {failed.detail}"))
        found = predictor.predict(PlanRound(seen, clip.points, mask), 0)
        if found.motion is None:
            return dict.fromkeys(verifiers, Verdict(False, 0.0, f"{found.failure}: {found.detail}"))
        motion = found.motion
        after = render_outcome(seen, mask, motion.T_t_0_world[-1], self.config.renderer) if self._renders else seen.rgb
        facts = PlanFacts(motion, self.config.support_z_m)
        return {name: judged(each, seen.rgb, after, seen.instruction, facts) for name, each in verifiers.items()}

    def _opened(self, config: WeightedVerifierConfig) -> Callable[[FlowClip], Verifier]:
        if config.kind == "oracle":
            from robotics.flow3d.check.oracle import SceneOracle

            self._oracle = self._oracle or SceneOracle()
            return self._oracle.of
        verifier = _open(config)
        return lambda clip: verifier


def _open(config: WeightedVerifierConfig) -> Verifier:
    if ":" in config.kind:
        from mmrl.rewards.loading import load_function

        made: Verifier = load_function(config.kind, what="verifiers.kind")(**config.options)
        return made
    if config.kind == "geometric":
        return GeometricVerifier(GeometricLimits(**config.options), reachable=False)
    verifier = open_verifier(config)
    assert verifier is not None
    return verifier
