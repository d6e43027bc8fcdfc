"""Every comparison in its quick form, and their arms."""

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import run
from benchmarks.harness import BenchOptions
from benchmarks.report import table
from benchmarks.vlm import equality
from benchmarks.vlm.arms import make_recipe, make_rollouts, rows_apart, step_arm
from benchmarks.vlm.comparisons import NAMES, compare
from benchmarks.vlm.setup import QUICK_SHAPE, Bench
from benchmarks.vlm.workload import GENERIC, Shape, build_model, questions_file, shape_of
from mmrl.errors import UserError
from mmrl.training.recipe import Step

SHAPE = QUICK_SHAPE[1]
HAS_TRL = find_spec("trl") is not None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def found(folder):
    return compare(BenchOptions(quick=True, folder=folder))


@pytest.fixture
def options(folder):
    model = build_model(folder, "qwen2_5_vl", "quick")
    data = questions_file(folder, model, SHAPE)
    shape = dataclasses.asdict(SHAPE)
    return {"model": str(model), "data": str(data), "shape": shape, "device": "cpu", "repetitions": 1}


@pytest.mark.slow
def test_every_comparison_runs_and_every_check_passes(found):
    assert tuple(found) == NAMES
    for name, comparison in found.items():
        assert not comparison["failed"], (name, table({name: comparison}))
        assert all("error" not in entry for entry in comparison["ratios"].values()), name
        assert all(entry["median"] > 0 for entry in comparison["ratios"].values()), name
    json.dumps(found, allow_nan=False)


@pytest.mark.slow
def test_every_arm_reports_times_and_memory_by_stage(found):
    for name in ("update", "step", "papo"):
        for arm in found[name]["arms"].values():
            assert {"total", "forward", "backward"} <= set(arm["cpu_s"]) == set(arm["wall_s"])
            assert set(arm["peak_mb"]) == set(arm["cpu_s"])


@pytest.mark.slow
def test_arms_do_the_work_that_they_are_compared_for(found):
    tokens = [arm["counts"]["completion_tokens"] for arm in found["generation"]["arms"].values()]
    tokens += [arm["counts"]["completion_tokens"] for arm in found["step"]["arms"].values()]
    assert set(tokens) == {SHAPE.completion}
    stages = {arm: set(run["cpu_s"]) for arm, run in found["papo"]["arms"].items()}
    assert {"ref_logp", "masked_logp"} <= stages["shared"]
    assert stages["rows (emulation)"] - stages["shared"] == {"old_logp"}


@pytest.mark.slow
def test_quick_sizes_are_not_judged(found):
    assert not any("minimum" in entry for part in found.values() for entry in part["ratios"].values())


@pytest.mark.slow
def test_the_table_shows_each_comparison(found):
    text = table(found)
    assert all(f"== {name} ==" in text for name in NAMES)
    assert "check equality/shared: log-probs" in text


def test_rows_apart_share_nothing_and_score_the_same(options):
    with make_recipe(options | {"shared_prefix": False}) as recipe:
        rollouts = make_rollouts(recipe, shape_of(options["shape"]), tasks=2)
        apart = rows_apart(rollouts)
        assert apart.num_groups == apart.num_rows == rollouts.num_rows
        assert len({id(prompt) for prompt in apart.payload.prompts}) == apart.num_rows
        with torch.no_grad():
            first, second = (recipe.scores(recipe.policy, rows, frozenset({"logp"})).logp for rows in (rollouts, apart))
        assert torch.allclose(first, second, atol=1e-5)


def test_old_log_probs_are_those_of_another_policy(options):
    with make_recipe(options, old_logp="sampler") as recipe:
        rollouts = make_rollouts(recipe, shape_of(options["shape"]), lengths=[1, 2, 3, 4])
        assert rollouts.lengths.tolist() == [1, 2, 3, 4]
        output = recipe.loss(recipe.policy, rollouts, recipe.objective.denominators(rollouts), Step())
    clipped = [metric.value for name, metric in output.metrics.items() if "clip" in name]
    assert any(value > 0 for value in clipped)


@pytest.mark.parametrize(("layout", "shares"), [("rows", False), ("tower once", False), ("shared", True)])
def test_a_layout_decides_whether_prompts_are_shared(options, layout, shares):
    with make_recipe(options | {"layout": layout}) as recipe:
        assert recipe.policy.shares_prefix is shares


def test_switches_reach_the_configuration(options):
    switched = {"keep_prefill": False, "skip_zero_advantage_groups": False}
    with make_recipe(options | switched) as recipe:
        config = recipe.config
        assert (config.sampler.keep_prefill, config.trainer.skip_zero_advantage_groups) == (False, False)
    with make_recipe(options) as recipe:
        config = recipe.config
        assert (config.sampler.keep_prefill, config.trainer.skip_zero_advantage_groups) == (True, True)


def test_a_language_model_is_measured_without_images(folder):
    model = build_model(folder, "qwen3", "quick")
    options = BenchOptions(quick=True, folder=folder, model=model, only=["step"])
    (step,) = compare(options).values()
    assert not step["failed"]
    assert set(step["arms"]) == {"40:4 mmrl", "40:4 mmrl bf16"}
    assert "40:4 float32 over bf16 autocast time" in step["ratios"]
    with pytest.raises(UserError, match="--only papo needs images"):
        compare(dataclasses.replace(options, only=["papo"]))
    whole = Bench(BenchOptions(folder=folder, model=model))
    assert [name for name, *_ in whole.steps()] == ["62:24", "288:48"]
    assert whole.shapes("4:1")["4:1"].grid == (0, 0)


def test_the_bound_counts_tokens():
    assert Shape((0, 0), 62, 24).bound == pytest.approx(8 * 86 / 254)


@pytest.mark.slow
def test_half_of_the_groups_are_dead_where_skipping_them_is_measured(options, monkeypatch):
    from mmrl.training.update import Updater

    kept = []
    live = Updater._live

    def note(self, minibatch):
        rows = live(self, minibatch)
        kept.append((minibatch.num_groups, rows.num_groups))
        return rows

    monkeypatch.setattr(Updater, "_live", note)
    groups = {"tasks_per_step": 4, "reward": "benchmarks.vlm.workload:half_dead_reward"}
    step_arm(options | groups)
    step_arm(options | groups | {"skip_zero_advantage_groups": False})
    assert kept == [(4, 2)] * 2 + [(4, 4)] * 2


def test_a_difference_in_log_probs_or_gradients_fails_the_check():
    logp = torch.tensor([[-1.0, -2.0]])
    mask = torch.ones_like(logp, dtype=torch.bool)
    truth = equality._Pass(logp, {"visual.w": torch.ones(3), "head": torch.ones(3)})
    off = equality._Pass(logp + 6e-6, {"visual.w": torch.ones(3) * 1.00002, "head": torch.ones(3)})
    verdicts = equality._checks("x", truth, off, mask, 1.0)
    assert [entry["passed"] for entry in verdicts.values()] == [False, False, False]
    assert all(entry["passed"] for entry in equality._checks("x", truth, truth, mask, 1.0).values())
    assert not any(entry["passed"] for entry in equality._checks("x", truth, truth, mask, 100.0).values())
    forgotten = equality._Pass(logp, {"head": torch.ones(3)})
    assert equality._difference(truth, forgotten, "visual") == pytest.approx(1.0)


def test_trl_is_named_with_its_extra_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"--against trl needs TRL.*pip install 'mmrl-suite\[bench\]'"):
        compare(BenchOptions(quick=True, against="trl"))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRL, reason="needs trl")
def test_a_step_of_trl_samples_as_many_tokens_and_is_compared(folder):
    options = BenchOptions(quick=True, folder=folder, only=["step"], against="trl")
    found = compare(options)["step"]
    assert not found["failed"]
    arm = found["arms"][f"{QUICK_SHAPE[0]} trl"]
    assert arm["counts"]["completion_tokens"] == SHAPE.completion
    assert {"generate", "forward", "backward", "optimizer", "update"} <= set(arm["cpu_s"])
    assert arm["cpu_s"]["forward"] + arm["cpu_s"]["backward"] <= arm["cpu_s"]["update"]
    assert {f"{QUICK_SHAPE[0]} {what}" for what in ("time", "memory", "generation", "update")} <= set(found["ratios"])
    assert {f"{family} {QUICK_SHAPE[0]} time" for family in GENERIC} <= set(found["ratios"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": Path("nowhere")}, "--model nowhere is not a model folder"),
        ({"model": Path("nowhere"), "family": "qwen3_vl"}, "--family builds a model"),
        ({"family": "gemma3"}, "--family gemma3 is only supported by --only step"),
        pytest.param(
            {"device": "cuda"},
            "found no usable GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_models_and_devices_that_are_not_there_are_named(given, message):
    with pytest.raises(UserError, match=message):
        compare(BenchOptions(quick=True, **given))


@pytest.mark.parametrize(("field", "value"), [("against", "trl"), ("family", "qwen3_vl"), ("model", "folder")])
def test_options_of_the_vlm_room_are_refused_elsewhere(field, value):
    with pytest.raises(UserError, match=f"--{field} is an option of the vlm benchmarks, not of the sim benchmarks"):
        run("sim", BenchOptions(**{field: value}))
