"""Verifiers: acceptance, rejection, and no exception from any input."""

import json

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.flow3d.geometry import make_pose
from robotics.flow3d.plan.result import (
    AlwaysVerifier,
    GeometricLimits,
    GeometricVerifier,
    PlanFacts,
    PredicateVerifier,
    Verdict,
    judged,
)
from robotics.flow3d.plan.vlm import ChatEndpoint, LocalModel, VlmVerifier, read_verdict
from robotics.flow3d.rigid_motion import ObjectMotion, RigidFit

PICTURE = np.zeros((56, 56, 3), np.uint8)
GOOD = {"object_moved": "the mug, onto the pad", "matches_task": True, "confidence": 0.9, "what_is_wrong": ""}


def facts(ways=((0, 0, 0.1), (0.1, 0.1, 0.1), (0.12, 0.1, 0.07)), turn_rad=0.0, rmse=0.001, reachable=None):
    points = np.random.default_rng(0).uniform(-0.03, 0.03, (20, 3)) + np.array([0.5, 0.0, 0.04])
    c, s = np.cos(turn_rad), np.sin(turn_rad)
    R = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1.0]])
    centre = points.mean(0)
    T = np.stack([make_pose(R, centre - R @ centre + np.array(way, dtype=float)) for way in ways])
    fit = RigidFit(T, np.ones((len(T), 20)), np.full(len(T), rmse), np.zeros(len(T), bool))
    return PlanFacts(ObjectMotion(T, points, fit), 0.0, reachable)


def ask(verifier, meta=None):
    return judged(verifier, PICTURE, PICTURE, "place the mug on the red pad", meta or facts())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"rmse": 0.02}, "not one rigid motion"),
        ({"ways": ((0, 0, -0.05),)}, "through the support"),
        ({"ways": tuple((0.1 * step, 0, 0.1) for step in range(12))}, "out of the workspace; still moving at the end"),
        ({"ways": ((0, 0, 0.1), (0.2, 0, 0.1))}, "still moving at the end"),
        ({"ways": ((0, 0, 0.02),), "turn_rad": 1.2}, "turns too fast"),
        ({"ways": ((0, 0, 0.002),)}, "hardly moves"),
        ({"reachable": lambda: False}, "out of reach with every grasp"),
    ],
)
def test_geometry_names_what_is_wrong(change, reason):
    verdict = ask(GeometricVerifier(), facts(**change))
    assert verdict.ok == (not reason)
    assert verdict.reason == (reason or "all checks hold")
    assert verdict.score == 1.0 if verdict.ok else 0.5 < verdict.score < 1.0


def test_the_score_of_geometry_grows_as_a_check_comes_nearer_to_holding():
    rmse = [ask(GeometricVerifier(), facts(rmse=value)).score for value in (0.01, 0.02, 0.04)]
    assert rmse[0] == 1.0
    assert rmse[0] > rmse[1] > rmse[2]
    free = GeometricLimits(below_support_m=0.0, least_motion_m=0.0)
    assert ask(GeometricVerifier(free), facts(ways=((0, 0, 0.0005),))).ok
    assert ask(GeometricVerifier(free), facts(ways=((0, 0, -0.05),))).reason == "through the support"


def test_reachability_is_not_asked_of_a_plan_that_fails_anyway_or_where_it_is_off():
    asked = []
    meta = facts(rmse=1.0, reachable=lambda: asked.append(1))
    ask(GeometricVerifier(), meta)
    assert asked == []
    assert ask(GeometricVerifier(GeometricLimits(), reachable=False), facts(reachable=lambda: False)).ok


def test_predicates_see_the_final_motion():
    meta = facts()
    assert ask(PredicateVerifier(lambda T: T[0, 3] > 0.1), meta) == Verdict(True, 1.0, "the predicate holds")
    assert ask(PredicateVerifier(lambda T: T[0, 3] > 0.2), meta).ok is False
    assert ask(AlwaysVerifier()).ok


def test_what_a_verifier_raises_is_a_verdict():
    broken = ask(PredicateVerifier(lambda T: T["pose"]))
    assert broken.ok is None
    assert broken.reason.startswith("PredicateVerifier failed: IndexError")

    class Wordy:
        def verify(self, *_):
            return "yes"

    assert ask(Wordy()).reason == "Wordy returned 'yes', not a verdict"


@pytest.mark.parametrize("fence", ["{}", " {} \n", "```json\n{}\n```", "```\n{}\n```"])
def test_good_answers_are_read(fence):
    assert read_verdict(fence.format(json.dumps(GOOD))) == Verdict(True, 0.9, "the mug, onto the pad")
    bad = {**GOOD, "matches_task": False, "what_is_wrong": "it lies on the green pad"}
    verdict = read_verdict(fence.format(json.dumps(bad)))
    assert (verdict.ok, verdict.reason) == (False, "it lies on the green pad")
    assert verdict.score == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("answer", "culprit"),
    [
        ("I'm sorry, I can't help with that.", "no JSON"),
        ("", "no JSON"),
        ("[" * 5000, "no JSON"),
        ("[true]", "no JSON object"),
        (json.dumps({**GOOD, "matches_task": "yes"}), "matches_task is 'yes'"),
        (json.dumps({**GOOD, "confidence": 90}), "confidence is 90"),
        (json.dumps({**GOOD, "confidence": True}), "confidence is True"),
        (json.dumps({**GOOD, "confidence": float("nan")}), "confidence is nan"),
        (json.dumps({"matches_task": True, "confidence": 1}), "object_moved is None"),
        ("Sure! " + json.dumps(GOOD), "no JSON"),
    ],
)
def test_nonsense_is_rejected_with_no_confidence(answer, culprit):
    verdict = read_verdict(answer)
    assert (verdict.ok, verdict.score) == (False, 0.0)
    assert f"unusable response ({culprit})" in verdict.reason


def test_endpoint_sees_both_images_and_the_task(chat_server, monkeypatch):
    url, requests, answers = chat_server.url, chat_server.requests, chat_server.answers
    answers += [{"content": json.dumps(GOOD)}] * 2
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("MY_KEY", "secret")
    assert ask(VlmVerifier(ChatEndpoint(url, "judge"))) == Verdict(True, 0.9, "the mug, onto the pad")
    assert ask(VlmVerifier(ChatEndpoint(url, "judge", api_key_env="MY_KEY"))).ok
    first, second = requests
    system, user = first.body["messages"]
    assert "plan of a robot" in system["content"]
    assert [part["type"] for part in user["content"]] == ["image_url", "image_url", "text"]
    assert "Task: place the mug on the red pad" in user["content"][2]["text"]
    assert (first.key, second.key) == (None, "Bearer secret")


def test_endpoint_that_refuses_stalls_or_fails_gives_a_verdict(chat_server):
    url, answers = chat_server.url, chat_server.answers
    verifier = VlmVerifier(ChatEndpoint(url, "judge", timeout_s=0.5))
    for answer, start in (
        ({"content": None, "refusal": "not allowed"}, "refused: "),
        ({"content": None}, "refused: "),
        (2.0, "timeout: "),
        (503, "down: "),
        ((200, "[]"), "down: "),
    ):
        answers.append(answer)
        verdict = ask(verifier)
        assert (verdict.ok, verdict.score) == (None, 0.0)
        assert verdict.reason.startswith(start), verdict.reason
    assert ask(VlmVerifier(ChatEndpoint("http://127.0.0.1:9/v1", "judge"))).reason.startswith("down: ")
    with pytest.raises(UserError, match="endpoint: url is 'here'"):
        VlmVerifier(ChatEndpoint("here", "judge"))


def test_a_model_of_the_suite_is_asked_with_both_images(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="needs pip install 'mmrl-suite[vlm]'")
    from mmrl.vlm.engine.vlm_policy import load_policy
    from mmrl.vlm.model.model_config import ModelConfig
    from mmrl.vlm.toy.tiny import build_tiny_vlm

    folder = build_tiny_vlm(tmp_path / "vlm", corpus=["place the mug on the red pad", json.dumps(GOOD)])
    policy = load_policy(ModelConfig(path=str(folder)))
    tasks, encode = [], policy.encode
    monkeypatch.setattr(policy, "encode", lambda task: tasks.append(task) or encode(task))
    verdict = ask(VlmVerifier(LocalModel(policy, max_new_tokens=4)))
    assert (verdict.ok, verdict.score) == (False, 0.0), "random weights write no JSON"
    assert "unusable response (no JSON)" in verdict.reason
    assert len(tasks[0].images) == 2
    policy.config.max_prompt_tokens = 3
    unasked = ask(VlmVerifier(LocalModel(policy, max_new_tokens=4)))
    assert unasked.ok is None
    assert "cannot read the question" in unasked.reason
