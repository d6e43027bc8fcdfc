import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mmrl.core.loss import Denominators
from mmrl.errors import RunError, UserError
from mmrl.training import update
from mmrl.training.optimizer import learning_rate_factor
from mmrl.training.processes import make_accelerator
from mmrl.training.recipe import Reference, Step
from mmrl.training.settings import CheckpointConfig, ReferenceConfig, TrainerConfig
from mmrl.training.trainer import TaskStream
from mmrl.training.update import count_denominators, update_constants
from tests.training.conftest import weights

ROOT = Path(__file__).parents[3]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    "preset", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo"]
)
def test_every_objective_learns_the_table(make_trainer, preset):
    trainer = make_trainer(preset=preset, steps=60, tasks_per_step=6, samples_per_task=8, learning_rate=0.3)
    result = trainer.run()
    assert result["first_evaluation"]["all"]["accuracy/greedy"] < 0.5
    assert result["last_evaluation"]["all"]["accuracy/greedy"] > 0.9


def test_two_runs_end_with_equal_bits(make_trainer):
    options = {"epochs": 2, "minibatches_per_step": 3, "micro_batch": 5}
    first, second = make_trainer(**options), make_trainer(**options)
    first.run()
    second.run()
    assert same(weights(first), weights(second))
    other = make_trainer(seed=1, **options)
    other.run()
    assert not same(weights(first), weights(other))


@pytest.mark.parametrize("kind", ["auto", "ema"])
def test_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(make_trainer, kind):
    options = {
        "steps": 6,
        "epochs": 2,
        "schedule": "cosine",
        "reference": ReferenceConfig(kind=kind, ema_decay=0.5 if kind == "ema" else 0.99),
    }
    whole = make_trainer("whole", **options)
    whole.run()
    part = make_trainer("part", **options)
    for _ in range(3):
        part.train_step()
    part.save()
    part.train_step()  # work after the checkpoint is lost with the process
    resumed = make_trainer("part", **options)
    resumed.resume()
    assert resumed.step == 3
    result = resumed.run()
    assert same(weights(whole), weights(resumed))
    assert result["samples"] == 6 * 12


def test_a_resumed_run_takes_its_new_optimiser_settings(make_trainer):
    make_trainer("run", steps=2).run()
    resumed = make_trainer("run", steps=4, weight_decay=0.5, betas=[0.5, 0.9], adam_eps=1e-3)
    resumed.resume()
    groups = resumed.updater.optimizer.param_groups
    assert {group["weight_decay"] for group in groups} <= {0.5, 0.0}
    assert groups[0]["weight_decay"] == 0.5
    assert {(*group["betas"], group["eps"]) for group in groups} == {(0.5, 0.9, 1e-3)}
    assert resumed.updater.optimizer.state, "the moments are those of the run"


def test_environment_variables_of_accelerate_do_not_scale_gradients(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    accelerator = make_accelerator()
    assert accelerator.gradient_accumulation_steps == 1
    layer = torch.nn.Linear(1, 1)
    assert accelerator.prepare_model(layer) is layer


def test_an_ema_reference_of_low_precision_weights_is_refused():
    with pytest.raises(UserError, match="ema requires float32"):
        Reference("ema", torch.nn.Linear(1, 1).bfloat16(), 0.9)


def test_a_run_that_ends_within_its_warm_up_warns(make_trainer):
    trainer = make_trainer(steps=2, warmup_steps=50)
    trainer.run()
    assert "the learning rate never reached its peak" in trainer.log.warnings.said["warm_up"]


@pytest.mark.slow
def test_killed_process_resumes_with_equal_bits(tmp_path):
    config = tmp_path / "toy.yaml"
    config.write_text(
        "recipe: tests.training.toy:ToyRecipe:ToyConfig\n"
        "trainer: {steps: 400, tasks_per_step: 3, samples_per_task: 4, learning_rate: 0.05, epochs: 2}\n"
        "checkpoint: {every: 5, keep: 2}\n"
        "tracking: {quiet: true, tensorboard: false}\n"
    )
    command = [sys.executable, "-m", "tests.training.toy", str(config)]

    def start(folder: str, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, f"output_dir={tmp_path / folder}", *words], cwd=ROOT)

    assert start("whole").wait(timeout=600) == 0
    victim = start("killed")
    deadline = time.monotonic() + 600
    while len(list((tmp_path / "killed" / "checkpoints").glob("step-*"))) < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(int.from_bytes(os.urandom(1), "big") / 500)  # a random step
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not (tmp_path / "killed" / "result.json").exists()
    assert start("killed", "--resume").wait(timeout=600) == 0
    last = "checkpoints/step-000400/model/weights.pt"
    first, second = (torch.load(tmp_path / name / last) for name in ("whole", "killed"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    steps = [json.loads(line)["step"] for line in (tmp_path / "killed" / "metrics.jsonl").open()]
    assert steps == list(range(1, 401))


def test_micro_batches_change_nothing(make_trainer):
    gradients = []
    for size in (0, 1, 5, 12):
        trainer = make_trainer(micro_batch=size, max_grad_norm=0.0)
        rollouts, _ = trainer.collect()
        rollouts = update_constants(trainer.recipe, trainer.policy, trainer.reference, rollouts, Step())
        rollouts = trainer.recipe.advantages(rollouts, trainer.accelerator, Step())
        trainer.updater.optimizer.zero_grad = lambda: None  # keep the gradient for a look
        trainer.updater.update(rollouts, Step(0))
        gradients.append(trainer.policy.table.grad.clone())
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-6, atol=1e-8)
    assert gradients[0].abs().max() > 0


def test_first_update_has_ratio_exactly_one(make_trainer):
    trainer = make_trainer()
    rollouts, _ = trainer.collect()
    rollouts = trainer.recipe.advantages(
        update_constants(trainer.recipe, trainer.policy, trainer.reference, rollouts, Step()),
        trainer.accelerator,
        Step(),
    )
    metrics = trainer.updater.update(rollouts, Step(0))
    assert metrics["policy/ratio_mean"] == 1.0
    assert metrics["policy/ratio_max"] == 1.0


@pytest.mark.parametrize("policy", ["skip", "stop"])
def test_nan_loss_is_named_saved_and_skipped_or_stops(make_trainer, policy, tmp_path):
    trainer = make_trainer("nan", poison_step=1, on_nonfinite=policy)
    trainer.train_step()
    before = weights(trainer)
    if policy == "stop":
        with pytest.raises(RunError, match="1 of 1 entries of loss are NaN"):
            trainer.train_step()
    else:
        trainer.train_step()
        assert trainer.updater.skipped == 1
    assert same(before, weights(trainer))
    (saved,) = (tmp_path / "nan" / "failures").glob("*.pt")
    assert "loss" in torch.load(saved, weights_only=False)["cause"]


def test_too_many_skipped_steps_stop_the_run(make_trainer, monkeypatch):
    monkeypatch.setattr(update, "MAX_NONFINITE", 0)
    trainer = make_trainer(poison_step=0)
    with pytest.raises(RunError, match="1 optimiser steps have been skipped, more than 0"):
        trainer.train_step()


def test_unscored_rows_have_no_gradient_and_are_counted(make_trainer):
    trainer = make_trainer(fail_reward_every=4)
    rollouts, metrics = trainer.collect()
    assert metrics["reward/errors"] == 3
    rollouts = trainer.recipe.advantages(rollouts, trainer.accelerator, Step())
    assert bool((rollouts.advantage[::4] == 0).all())
    assert count_denominators(trainer.recipe, rollouts).rows == 9


@pytest.mark.parametrize(("kind", "groups"), [("none", 3), ("drop", None), ("resample", 3)])
def test_group_filters(make_trainer, kind, groups):
    tries = {"max_tries": 50} if kind == "resample" else {}
    trainer = make_trainer(filter={"kind": kind} | tries, samples_per_task=2)
    with torch.no_grad():
        trainer.policy.table[::2, :, 0] = 50.0  # every second task always draws word 0: no variance
    rollouts, metrics = trainer.collect()
    varied = [float(rollouts.reward[rollouts.group == g].std()) > 0 for g in range(rollouts.num_groups)]
    if kind == "none":
        assert not all(varied)
        assert metrics["reward/zero_variance_groups"] > 0
    else:
        assert all(varied)
    if groups is not None:
        assert rollouts.num_groups == groups


def test_full_disk_keeps_older_checkpoints_and_continues(make_trainer, monkeypatch, caplog):
    trainer = make_trainer("full", steps=3, checkpoint=CheckpointConfig(every=1, keep=0))
    trainer.train_step()
    trainer.save()

    def no_space(folder):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.saver, "write_parts", no_space)
    trainer.train_step()
    trainer.save()
    assert trainer.log.failed_checkpoints == 1
    assert trainer.saver.checkpoints.steps() == [1]
    assert [path.name for path in trainer.saver.checkpoints.folder.iterdir()] == ["step-000001"]
    assert "No space left" in caplog.text
    with pytest.raises(RunError, match="No space left"):
        trainer.run()


def test_reference_kinds_are_checked(make_trainer):
    with pytest.raises(UserError, match=r"reference\.kind is none"):
        make_trainer(reference=ReferenceConfig(kind="none"))
    with pytest.raises(UserError, match="no LoRA adapter"):
        make_trainer(reference=ReferenceConfig(kind="adapter"))


def test_frozen_reference_stays_and_ema_moves(make_trainer):
    frozen = make_trainer(reference=ReferenceConfig(kind="frozen"))
    ema = make_trainer(reference=ReferenceConfig(kind="ema", ema_decay=0.75))
    for trainer in (frozen, ema):
        trainer.train_step()
    assert bool((frozen.reference.copy.table == 0).all())
    torch.testing.assert_close(ema.reference.copy.table, 0.25 * ema.policy.table)


def test_resume_with_other_data_is_refused(make_trainer):
    trainer = make_trainer("data")
    trainer.train_step()
    trainer.save()
    other = make_trainer("data")
    other.tasks = other.saver.tasks = TaskStream([1, 2], seed=0)
    with pytest.raises(UserError, match="made with 6 training tasks, but now there are 2"):
        other.resume()


def test_schedule_factors():
    config = TrainerConfig(steps=10, learning_rate=1.0, schedule="linear", warmup_steps=2, final_learning_rate=0.2)
    assert learning_rate_factor(config, 0) == pytest.approx(0.5)
    assert learning_rate_factor(config, 2) == pytest.approx(1.0)
    assert learning_rate_factor(config, 6) == pytest.approx(0.6)
    assert learning_rate_factor(config, 10) == pytest.approx(0.2)
    assert learning_rate_factor(config, 4, waited=2) == pytest.approx(0.6)  # of 10 steps, 6 are over
    assert learning_rate_factor(config, 0, waited=2) == pytest.approx(0.5)  # the warm-up has not begun
    config.schedule = "cosine"
    assert learning_rate_factor(config, 6) == pytest.approx(0.6)
    assert learning_rate_factor(config, 4) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + 2**-0.5))


def test_task_stream_visits_each_task_once_an_epoch():
    stream = TaskStream(list(range(5)), seed=3)
    order = stream.next(12)
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5))
    assert order[:5] != order[5:10]
    resumed = TaskStream(list(range(5)), seed=3)
    resumed.load_state_dict({"position": 7, "size": 5})
    assert resumed.next(5) == order[7:12]


def test_denominators_are_counted_over_the_optimiser_step(make_trainer):
    trainer = make_trainer(minibatches_per_step=3)
    rollouts, _ = trainer.collect()
    parts = [count_denominators(trainer.recipe, part) for part in rollouts.minibatches(3, None)]
    whole = Denominators.total(parts)
    assert (whole.tokens, whole.rows) == (36, 12)


@pytest.mark.parametrize("kind", ["drop", "resample"])
def test_a_step_whose_groups_are_all_filtered_out_leaves_the_policy_alone(make_trainer, kind):
    """Their KL must not train it either, as it does not where only some of the groups are left out."""
    tries = {"max_tries": 2} if kind == "resample" else {}
    trainer = make_trainer(filter={"kind": kind, "low": 2.0} | tries)
    assert trainer.recipe.objective.regularised
    with torch.no_grad():
        trainer.policy.table[..., 0] += 0.5  # away from the reference, so that the KL has a gradient
    before = trainer.policy.table.detach().clone()
    trainer.train_step()
    assert torch.equal(trainer.policy.table.detach(), before)
    assert trainer.updater.optimiser_step == 0
