"""Verifiers built from a configuration, and their verdicts on sampled flows as numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, only_with, rare
from robotics.flow3d.clip import FlowClip
from robotics.flow3d.flow_model import FixedFlow
from robotics.flow3d.geometry import FloatArray, ImageArray
from robotics.flow3d.objects.criteria import CriteriaOutcome
from robotics.flow3d.objects.flow_tasks import FLOW_TASKS
from robotics.flow3d.objects.scene import NOBODY, FlowScene
from robotics.flow3d.plan.planner_config import PlannerConfig
from robotics.flow3d.plan.prediction import Predictor
from robotics.flow3d.plan.rendering import POINTS, REPLAY, render_outcome
from robotics.flow3d.plan.result import (
    AlwaysVerifier,
    GeometricLimits,
    GeometricVerifier,
    PlanFacts,
    PlanFailed,
    PlanRound,
    Verdict,
    Verifier,
    closeness,
    judged,
)

VERIFIERS = ("none", "always", "geometric", "oracle", "vlm", "endpoint")
VALUES = ("ok", "score")
JUDGES = ("oracle", "geometric", "vlm", "endpoint", "always")
BLIND = ("oracle", "geometric", "always")
"""Verifiers that need no rendered outcome."""
NEEDED = ("task", "shape", "layouts", "seed")
"""Entries of `FlowClip.meta` that identify its episode."""


@dataclass
class VerifierConfig:
    """The verifier of predicted outcomes."""

    kind: str = choice("geometric", VERIFIERS)
    """none: no rendering or judgement; always: rendered and accepted; geometric: without a model; oracle: the task's
    criteria on the predicted pose, an upper bound; vlm: a local model; endpoint: a model behind a chat server."""
    path: str = only_with("", kind="vlm")
    """Folder or Hub id of the model; used by vlm."""
    url: str = rare(only_with("", kind="endpoint"))
    """Server address up to /v1; used by endpoint."""
    model: str = only_with("", kind="endpoint")
    """Model name on that server; used by endpoint."""
    timeout_s: float = only_with(bounded(60.0, above=0), kind="endpoint")
    """Time limit for a response in seconds; used by endpoint."""

    def validate(self) -> None:
        """Raise ValueError for a verifier that lacks an option."""
        if self.kind == "vlm" and not self.path:
            raise ValueError("verifier.kind is vlm, but verifier.path is empty; set it to a model")
        if self.kind == "endpoint" and not (self.url and self.model):
            raise ValueError(
                "verifier.kind is endpoint; set verifier.url, such as http://host:8000/v1, and verifier.model"
            )


def open_verifier(config: VerifierConfig) -> Verifier | None:
    """The verifier of a configuration; None for kind none, and for oracle, which depends on the scene."""
    if config.kind == "geometric":
        return GeometricVerifier()
    if config.kind == "always":
        return AlwaysVerifier()
    if config.kind == "vlm":
        from mmrl.vlm.engine.vlm_policy import load_policy
        from mmrl.vlm.model.model_config import ModelConfig
        from robotics.flow3d.plan.vlm import LocalModel, VlmVerifier

        return VlmVerifier(LocalModel(load_policy(ModelConfig(path=config.path))))
    if config.kind == "endpoint":
        from robotics.flow3d.plan.vlm import ChatEndpoint, VlmVerifier

        return VlmVerifier(ChatEndpoint(config.url, config.model, config.timeout_s))
    return None


@dataclass
class WeightedVerifierConfig(VerifierConfig):
    """One of several verifiers, and its weight in the reward."""

    kind: str = choice("oracle", JUDGES, or_function=True)
    """oracle: the criterion of the suite's scenes on the predicted final pose; geometric; vlm: a local model; endpoint:
    a model behind a chat server; always; or module:function(**options) that returns a `Verifier`."""
    weight: float = 1.0
    """Weight of its value in the reward."""
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
            raise ValueError(f"verifiers: {self.kind} takes no options; only geometric and custom functions do")
        unknown = sorted(set(self.options) - set(GeometricLimits.__dataclass_fields__))
        if unknown and self.kind == "geometric":
            known = ", ".join(GeometricLimits.__dataclass_fields__)
            raise ValueError(f"verifiers: geometric has no option {unknown[0]}; it has {known}")

    @property
    def label(self) -> str:
        """Name in metrics."""
        return self.name or self.kind.rpartition(":")[2]

    def value_of(self, verdict: Verdict) -> float:
        """The verdict as a number; NaN if there is none."""
        if verdict.ok is None:
            return float("nan")
        return float(verdict.ok) if self.value == "ok" else verdict.score


class FlowJudge:
    """Judges sampled flows with several verifiers."""

    def __init__(self, configs: Sequence[WeightedVerifierConfig], config: PlannerConfig | None = None) -> None:
        # labels are keys of metrics and verdicts
        names = [each.label for each in configs]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"verifier names must be unique: {', '.join(doubled)}")
        self.configs = list(configs)
        self.config = config or PlannerConfig()
        self._oracle: SceneOracle | None = None
        self._renders = any(each.kind not in BLIND for each in configs)
        if self._renders and self.config.renderer == REPLAY:
            raise UserError(
                f"the renderer {REPLAY} needs a scene, which is not available when judging flows; use {POINTS}"
            )
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
        # the same fit as in planning, so that a reward judges what the planner would do
        found = predictor.predict(PlanRound(seen, clip.points, mask), 0)
        if found.motion is None:
            # a flow without a usable motion is the model's fault, so it counts as rejected
            return dict.fromkeys(verifiers, Verdict(False, 0.0, f"{found.failure}: {found.detail}"))
        motion = found.motion
        # rendering is slow, so it is skipped if no verifier looks at the outcome
        after = render_outcome(seen, mask, motion.T_t_0_world[-1]) if self._renders else seen.rgb
        facts = PlanFacts(motion, self.config.support_z_m)
        return {name: judged(each, seen.rgb, after, seen.instruction, facts) for name, each in verifiers.items()}

    def _opened(self, config: WeightedVerifierConfig) -> Callable[[FlowClip], Verifier]:
        if config.kind == "oracle":
            # one oracle for all clips: its scenes are slow to build
            self._oracle = self._oracle or SceneOracle()
            return self._oracle.of
        verifier = _open(config)
        return lambda clip: verifier


def _open(config: WeightedVerifierConfig) -> Verifier:
    if ":" in config.kind:
        from mmrl.rewards.reward_loading import call_function

        made: Verifier = call_function(config.kind, config.options, what="verifiers.kind")
        return made
    if config.kind == "geometric":
        # no arm is planned for here, so there is no reachability to check
        return GeometricVerifier(GeometricLimits(**config.options), reachable=False)
    verifier = open_verifier(config)
    assert verifier is not None
    return verifier


class CriteriaVerifier:
    """Accepts if all criteria of a task hold; the score is the product of their `closeness`.

    Progress on one criterion raises the score by the same factor regardless of the others. `outcome` takes the object's
    motion (4, 4) to the end of the plan, in the world frame.
    """

    def __init__(self, outcome: Callable[[FloatArray], CriteriaOutcome]) -> None:
        self.outcome = outcome

    def verify(self, before: ImageArray, after: ImageArray, instruction: str, meta: PlanFacts) -> Verdict:
        """Judge the final pose; see `Verifier`."""
        found = self.outcome(meta.motion.T_t_0_world[-1])
        missed = [f"{name}: {found.errors[name]:.1f} tolerances" for name in found.failed]
        score = math.prod(closeness(error) for error in found.errors.values())
        return Verdict(found.success, score, "; ".join(missed) or "all criteria are met")


class SceneOracle:
    """Restores the episode of a clip and checks its task's criteria at a predicted pose of the object."""

    def __init__(self) -> None:
        self._scenes: dict[tuple[str, str, str], FlowScene] = {}

    def of(self, clip: FlowClip) -> CriteriaVerifier:
        """The verifier of a clip, valid until the next call."""
        missing = [name for name in NEEDED if name not in clip.meta]
        if missing or clip.meta["task"] not in FLOW_TASKS:
            raise UserError(
                "the verifier oracle needs clips of the suite's flow scenes; this one, of "
                f"{clip.source or 'no source'}, lacks {', '.join(missing) or 'a known task'} in its metadata; use "
                "geometric, vlm or endpoint"
            )
        scene = self._scene(clip)
        # a copy: the shared scene is reset for the next clip
        start = scene.start.copy()

        return CriteriaVerifier(lambda T_end_world: scene.success(T_end_world @ start))

    def close(self) -> None:
        """Free the scenes."""
        while self._scenes:
            self._scenes.popitem()[1].close()

    def _scene(self, clip: FlowClip) -> FlowScene:
        """The scene in the clip's episode; scenes with the same furniture and shape are shared."""
        meta = clip.meta
        key = FLOW_TASKS[meta["task"]].furniture.name, str(meta["shape"]), str(meta["layouts"])
        if key not in self._scenes:
            self._scenes[key] = FlowScene(task=meta["task"], actor=NOBODY, shape=key[1], layouts=key[2])
        scene = self._scenes[key]
        # scenes are shared between tasks; the task comes before the reset, which places its objects
        scene.give(meta["task"])
        scene.reset(int(meta["seed"]))
        return scene
