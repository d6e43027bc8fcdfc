import importlib
import json

import pytest

from benchmarks.diffusion import comparisons as diffusion
from benchmarks.harness import BenchOptions
from diffusion.toy.pipelines.tiny import build_tiny_sd3
from mmrl.errors import UserError
from tests.diffusion.builders import CAPTIONS, SIZES


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory):
    """Every comparison at its quick size, with the arms in this process instead of separate ones."""

    def in_process(title, arms, options):
        runs = {}
        for arm in arms:
            module, _, name = arm.function.partition(":")
            asked = json.loads(json.dumps({"repetitions": 1, "device": "cpu", **arm.options}))
            found = json.loads(json.dumps(getattr(importlib.import_module(module), name)(asked)))
            runs[arm.name] = found | {"blocks": [{key: found[key] for key in ("cpu_s", "wall_s")}]}
        return runs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusion, "run_arms", in_process)
        # collecting the garbage of a test process takes longer than most quick arms
        patch.setattr("gc.collect", lambda: 0)
        return diffusion.compare(BenchOptions(quick=True, folder=tmp_path_factory.mktemp("bench")))


def counts(comparisons, name):
    return {arm: run["counts"] for arm, run in comparisons[name]["arms"].items()}


@pytest.mark.slow
def test_every_comparison_ends_with_its_checks_passed(comparisons):
    assert tuple(comparisons) == diffusion.NAMES
    for name, found in comparisons.items():
        assert not found["failed"], (name, found["checks"])
        assert found["ratios"]
        assert all(entry["median"] > 0 for entry in found["ratios"].values())
    json.dumps(comparisons)


@pytest.mark.slow
def test_rollouts_compute_the_same_latents_with_fewer_text_rows(comparisons):
    found = counts(comparisons, "rollout")
    steps, halves = diffusion.QUICK["steps"], 2
    assert {run["forward_rows"] for run in found.values()} == {steps * halves}
    assert found["pipeline"]["text_rows"] * 4 == 2 * 2
    assert found["text of each image"]["text_rows"] * 4 == 4 + 1
    assert found["shared"]["text_rows"] * 4 == 2
    assert found["shared"]["transformer_calls"] == 2 * steps
    assert found["shared, group at once"]["transformer_calls"] == steps
    assert "latents of the pipeline" in comparisons["rollout"]["checks"]


def test_each_prompt_is_embedded_once(comparisons):
    found = counts(comparisons, "encoding")
    assert found["each image"]["text_rows"] == 1
    assert found["each prompt"]["text_rows"] == pytest.approx(1 / diffusion.QUICK["images"])
    assert found["each prompt"]["text_encoder_mb"] > 0


def test_a_detached_half_costs_no_backward_rows(comparisons):
    found = counts(comparisons, "guidance")
    assert (found["one call"]["transformer_calls"], found["two calls"]["transformer_calls"]) == (2, 4)
    assert found["train, detached after"]["train_rows"] == 2
    assert (found["train, no graph"]["train_rows"], found["train, no graph"]["forward_rows"]) == (1, 1)


def test_stacked_draws_are_one_call(comparisons):
    found = counts(comparisons, "stacking")
    assert (found["each draw"]["transformer_calls"], found["stacked"]["transformer_calls"]) == (6, 1)
    assert found["each draw"]["train_rows"] == found["stacked"]["train_rows"] == 6
    assert found["stacked"]["transformer_calls"] == 1


@pytest.mark.slow
def test_recipe_passes_at_published_sizes_are_those_counted_by_hand(tmp_path):
    from benchmarks.diffusion.arms import recipe_arm

    folder = build_tiny_sd3(tmp_path / "sd3", corpus=CAPTIONS, sizes=SIZES)
    options = diffusion.QUICK | {"steps": 10, "rows": 1, "model": str(folder), "device": "cpu", "repetitions": 1}
    rows = {way: recipe_arm(options | {"way": way})["counts"] for way in ("flow-grpo", "flow-grpo-fast", "awm")}
    # a row with a graph costs three, its forward and a backward pass of two
    cost = {way: found["forward_rows"] + 3 * found["train_rows"] for way, found in rows.items()}
    assert cost == {"flow-grpo": 92, "flow-grpo-fast": 36, "awm": 44}


@pytest.mark.parametrize(
    ("options", "culprit"), [({"only": ["speed"]}, "--only speed"), ({"against": "trl"}, "--against trl")]
)
def test_unknown_comparisons_and_libraries_are_refused(options, culprit):
    with pytest.raises(UserError, match=culprit):
        diffusion.compare(BenchOptions(quick=True, **options))


def test_an_arm_that_failed_fails_its_comparison_and_no_other(monkeypatch):
    def broken(title, arms, options):
        return {arm.name: {"error": "out of memory", "blocks": []} for arm in arms}

    monkeypatch.setattr(diffusion, "run_arms", broken)
    found = diffusion.compare(BenchOptions(quick=True, model="anywhere"))
    assert all(entry["failed"] for entry in found.values())
    assert not found["rollout"]["checks"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_step_of_awm_evaluates_other_rows_than_one_of_flow_grpo(comparisons):
    found = counts(comparisons, "steps")
    steps = diffusion.STEP_QUICK["steps"]
    # guided, so two rows a step; all steps but the last are trained, against the negative and two rows of the reference
    assert found["flow_grpo"]["train_rows"] == steps - 1
    assert found["flow_grpo"]["forward_rows"] == 2 * steps + 3 * (steps - 1)
    # six noisy versions of each image through policy, reference and moving average
    assert found["awm"]["train_rows"] == 6
    assert found["awm"]["forward_rows"] == steps + 2 * 6


def test_the_medium_model_has_the_size_of_the_released_one():
    import torch

    from diffusion.toy.pipelines.tiny import TinySd3Sizes, _transformer

    with torch.device("meta"):
        transformer = _transformer(TinySd3Sizes(**diffusion.MEDIUM_MODEL))
    assert sum(weight.numel() for weight in transformer.parameters()) == pytest.approx(2.24e9, rel=0.01)
    assert transformer.config.dual_attention_layers == tuple(range(13))
