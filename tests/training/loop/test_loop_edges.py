"""Edge cases of a run: kills between two writes, full disks, unexpected NaN, mixed precision."""

import dataclasses
import json
import weakref

import pytest
import torch
from safetensors import SafetensorError

from mmrl.errors import RunError
from mmrl.training import update
from mmrl.training.evaluation import Evaluation
from mmrl.training.settings import CheckpointConfig, EvaluationConfig, ReferenceConfig
from tests.training.conftest import weights


def accuracies(trainer, monkeypatch, *values):
    """Have the trainer's evaluations report these accuracies, one after another."""
    left = list(values)
    monkeypatch.setattr(
        trainer.recipe, "evaluate", lambda *_: Evaluation({"accuracy/greedy": left.pop(0), "n": 1.0}), raising=True
    )


def test_every_pass_of_a_step_runs_in_the_same_precision(make_trainer, monkeypatch):
    trainer = make_trainer(minibatches_per_step=3)
    monkeypatch.setattr(trainer.accelerator, "autocast", lambda: torch.autocast("cpu", torch.bfloat16))
    seen = []
    scores = trainer.recipe.scores

    def watched(policy, *rest):
        seen.append((policy is trainer.reference.copy, torch.is_autocast_enabled("cpu")))
        return scores(policy, *rest)

    monkeypatch.setattr(trainer.recipe, "scores", watched)
    trainer.train_step()
    assert {of_reference for of_reference, _ in seen} == {True, False}
    assert all(mixed for _, mixed in seen)


def test_cause_of_a_nan_gradient_is_the_parameter_that_has_it(make_trainer, tmp_path):
    trainer = make_trainer("nan", on_nonfinite="stop", max_grad_norm=1.0)
    trainer.policy.shared.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(RunError, match="4 of 4 entries of gradient of shared"):
        trainer.train_step()


def test_cause_in_a_recipes_own_tensor_is_named(make_trainer, monkeypatch):
    trainer = make_trainer("extras", on_nonfinite="stop")
    loss = trainer.recipe.loss

    def weighted(policy, minibatch, denominators, step):
        output = loss(policy, minibatch, denominators, step)
        return dataclasses.replace(output, loss=output.loss * minibatch.extras["own"].sum())

    advantages = trainer.recipe.advantages

    def with_own_tensor(rollouts, accelerator, step):
        own = torch.ones(rollouts.num_rows)
        own[2] = float("inf")
        return advantages(rollouts, accelerator, step).replace(extras={"own": own})

    monkeypatch.setattr(trainer.recipe, "loss", weighted)
    monkeypatch.setattr(trainer.recipe, "advantages", with_own_tensor)
    with pytest.raises(RunError, match=r"1 of 12 entries of rollouts\.extras\['own'\] .* first at \[2\]"):
        trainer.train_step()


def test_full_disk_does_not_hide_a_nan(make_trainer, monkeypatch, caplog):
    trainer = make_trainer(poison_step=0)

    def no_space(*_):
        raise RuntimeError("file write failed")

    monkeypatch.setattr(torch, "save", no_space)
    trainer.train_step()
    assert trainer.updater.skipped == 1
    assert "1 of 1 entries of loss are NaN" in caplog.text
    assert "could not be saved: file write failed" in caplog.text


def test_graph_of_a_micro_batch_is_let_go_after_its_backward_pass(make_trainer, monkeypatch):
    trainer = make_trainer(micro_batch=3)
    alive, loss = [], trainer.recipe.loss

    def watched(*arguments):
        assert all(ref() is None for ref in alive[:-1])  # the loop's own variable still holds the last one
        output = loss(*arguments)
        alive.append(weakref.ref(output.loss))
        return output

    monkeypatch.setattr(trainer.recipe, "loss", watched)
    trainer.train_step()
    assert len(alive) == 6  # three groups of four rows, each in two parts


def test_metrics_travel_between_processes_without_tensors(make_trainer, monkeypatch):
    sent = []
    monkeypatch.setattr(update, "merge_lists", lambda items, _: sent.extend(items) or items)
    make_trainer().train_step()
    metrics = sent[-1]
    assert {type(number) for metric in metrics.values() for number in (metric.total, metric.weight)} == {float}


@pytest.mark.parametrize("error", [RuntimeError("file write failed"), SafetensorError("I/O error: os error 28")])
def test_full_disk_as_torch_and_safetensors_report_it(make_trainer, monkeypatch, caplog, error):
    trainer = make_trainer("full")
    trainer.train_step()

    def no_space(folder):
        raise error

    monkeypatch.setattr(trainer.policy, "save_pretrained", no_space)
    trainer.save()
    assert trainer.log.failed_checkpoints == 1
    assert str(error) in caplog.text
    assert list(trainer.saver.checkpoints.folder.iterdir()) == []


def test_unknown_accuracy_is_never_the_best(make_trainer, monkeypatch):
    options = {"evaluation": EvaluationConfig(every=1), "checkpoint": CheckpointConfig(every=1)}
    trainer = make_trainer("nan_best", steps=3, **options)
    accuracies(trainer, monkeypatch, 0.1, float("nan"), 0.5, 0.4)
    result = trainer.run()
    assert result["best_checkpoint"] == {"step": 2, "metric": "accuracy/greedy", "value": 0.5}


def test_unknown_numbers_are_null_in_the_result(make_trainer, monkeypatch, tmp_path):
    trainer = make_trainer("null", steps=1)
    accuracies(trainer, monkeypatch, float("nan"), float("nan"))
    trainer.run()
    text = (tmp_path / "null/result.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["last_evaluation"]["all"]["accuracy/greedy"] is None


def test_best_that_cannot_be_noted_does_not_end_the_run(make_trainer, monkeypatch, caplog):
    trainer = make_trainer(steps=1)

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.saver.checkpoints, "mark_best", no_space)
    assert trainer.run()["status"] == "done"
    assert "No space left" in caplog.text


def test_kill_between_checkpoint_and_best_is_made_up_for(make_trainer, monkeypatch):
    options = {"steps": 2, "evaluation": EvaluationConfig(every=1), "checkpoint": CheckpointConfig(every=1)}
    killed = make_trainer("killed", **options)
    accuracies(killed, monkeypatch, 0.1, 0.7)

    def kill(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(killed.saver, "note_best", kill)
        with pytest.raises(KeyboardInterrupt):
            killed.run()
    resumed = make_trainer("killed", **options)
    accuracies(resumed, monkeypatch, 0.3)
    resumed.resume()
    assert resumed.step == 1
    assert resumed.run()["best_checkpoint"]["step"] == 1


def test_deleted_checkpoint_is_not_the_best_any_more(make_trainer):
    trainer = make_trainer(checkpoint=CheckpointConfig(every=1))
    trainer.train_step()
    trainer.save()
    trainer.saver.checkpoints.mark_best(1, "accuracy/greedy", 0.9)
    assert trainer.saver.checkpoints.best()["value"] == 0.9
    trainer.saver.checkpoints.path(1).rename(trainer.run_dir / "elsewhere")
    assert trainer.saver.checkpoints.best() is None


def test_run_killed_before_its_first_checkpoint_resumes_from_the_beginning(make_trainer, tmp_path, caplog):
    whole = make_trainer("whole")
    whole.run()
    killed = make_trainer("killed")
    killed.train_step()
    (tmp_path / "killed/checkpoints/.partial-step-000004").mkdir(parents=True)
    resumed = make_trainer("killed")
    resumed.resume()
    assert "restarts from the beginning" in caplog.text
    result = resumed.run()
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    assert result["samples"] == 4 * 12


def test_reference_of_a_deleted_run_is_not_taken_for_that_of_the_new_one(make_trainer, tmp_path):
    options = {"reference": ReferenceConfig(kind="frozen"), "steps": 1}
    old = make_trainer("run", **options)
    with torch.no_grad():
        old.reference.copy.table.fill_(7.0)
    old.run()
    for entry in old.saver.checkpoints.folder.rglob("*"):
        entry.unlink() if entry.is_file() else None
    new = make_trainer("run", **options)
    new.run()
    saved = torch.load(new.saver.checkpoints.path(1) / "reference/weights.pt")
    assert bool((saved["table"] == 0).all())
