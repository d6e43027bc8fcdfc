import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmrl.errors import UserError
from mmrl.training.recipe import Reference, make_reference
from mmrl.training.settings import CheckpointConfig, ReferenceConfig
from tests.training.conftest import weights
from tests.training.toy import WORDS, ToyPolicy, ToyRecipe


class TowerPolicy(ToyPolicy):
    """Its bias passes a frozen layer, which copies share."""

    def __init__(self, tasks):
        super().__init__(tasks)
        self.tower = nn.Linear(WORDS, WORDS, bias=False)
        nn.init.eye_(self.tower.weight)
        self.tower.requires_grad_(False)

    def __deepcopy__(self, memo):
        copied = type(self).__new__(type(self))
        memo |= {id(self): copied, id(self.tower): self.tower}
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def bias(self):
        return self.tower(self.shared)


class TowerRecipe(ToyRecipe):
    def __init__(self, config):
        super().__init__(config)
        self.policy = TowerPolicy(6)


@pytest.fixture(params=["frozen", "ema"])
def options(request):
    return {
        "recipe": TowerRecipe,
        "reference": ReferenceConfig(kind=request.param, ema_decay=0.5 if request.param == "ema" else 0.99),
    }


def test_shared_weights_stay_untouched_and_the_others_are_the_references_own(make_trainer, options):
    trainer = make_trainer(**options)
    reference = trainer.reference.copy
    assert reference.tower.weight is trainer.policy.tower.weight
    version = trainer.policy.tower.weight._version
    for _ in range(2):
        trainer.train_step()
    assert trainer.policy.tower.weight._version == version  # not even by writing the same numbers
    assert torch.equal(trainer.policy.tower.weight, torch.eye(WORDS))
    moved = bool((reference.table != 0).any())
    assert moved == (trainer.reference.kind == "ema")
    assert not torch.equal(reference.table, trainer.policy.table)


def test_moving_average_of_a_policy_with_a_shared_layer(make_trainer):
    trainer = make_trainer(recipe=TowerRecipe, reference=ReferenceConfig(kind="ema", ema_decay=0.5))
    average = [torch.zeros_like(trainer.policy.table), torch.zeros_like(trainer.policy.shared)]
    for _ in range(3):
        trainer.train_step()
        for mean, value in zip(average, (trainer.policy.table, trainer.policy.shared), strict=True):
            mean.lerp_(value.detach(), 0.5)
    torch.testing.assert_close(trainer.reference.copy.table.detach(), average[0])
    torch.testing.assert_close(trainer.reference.copy.shared.detach(), average[1])


def test_resume_with_a_shared_layer_is_bitwise(make_trainer, options):
    options |= {"steps": 5, "checkpoint": CheckpointConfig(every=1)}
    whole = make_trainer("whole", **options)
    whole.run()
    stopped = make_trainer("stopped", **options)
    for _ in range(2):
        stopped.train_step()
    stopped.save()
    folder = stopped.saver.checkpoints.latest()
    for part in ("model", "reference"):  # each can be read on its own
        assert torch.equal(torch.load(folder / part / "weights.pt")["tower.weight"], torch.eye(WORDS))
    resumed = make_trainer("stopped", **options)
    resumed.resume()
    assert resumed.reference.copy.tower.weight is resumed.policy.tower.weight
    assert torch.equal(resumed.reference.copy.table, stopped.reference.copy.table)
    resumed.run()
    for first, second in zip(weights(whole), weights(resumed), strict=True):
        assert torch.equal(first, second)


def from_folder(make_trainer, path, name, **options):
    trainer = make_trainer(name, steps=5, reference=ReferenceConfig(kind="frozen"), **options)
    trainer.config.model = SimpleNamespace(path=str(path))
    return trainer


def test_a_checkpoint_does_not_repeat_the_model_that_the_run_started_from(make_trainer, tmp_path):
    whole = from_folder(make_trainer, tmp_path, "whole")
    whole.run()
    stopped = from_folder(make_trainer, tmp_path, "stopped")
    stopped.train_step()
    stopped.save()
    folder = stopped.saver.checkpoints.latest()
    assert not list(folder.parent.parent.rglob("reference"))
    resumed = from_folder(make_trainer, tmp_path, "stopped")
    resumed.resume()
    assert torch.equal(resumed.reference.copy.table, stopped.reference.copy.table)
    resumed.run()
    for first, second in zip(weights(whole), weights(resumed), strict=True):
        assert torch.equal(first, second)
    assert not list(folder.parent.parent.rglob("reference"))


def test_a_model_of_mmrl_setup_is_a_folder_too(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_MODELS", str(tmp_path / "models"))
    (tmp_path / "models/smollm2").mkdir(parents=True)
    trainer = from_folder(make_trainer, tmp_path, "run")
    trainer.config.model.path = "smollm2"
    trainer.train_step()
    trainer.save()
    assert not list(trainer.saver.checkpoints.latest().parent.parent.rglob("reference"))


def test_a_start_that_has_changed_is_refused_before_anything_else_changes(make_trainer, tmp_path):
    stopped = from_folder(make_trainer, tmp_path, "stopped")
    stopped.train_step()
    stopped.save()
    other = from_folder(make_trainer, tmp_path, "stopped", recipe=TowerRecipe)
    before = weights(other)
    with pytest.raises(UserError, match="is no longer the model that this run started from and compares with"):
        other.resume()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(other), strict=True))


def test_a_start_that_is_in_no_folder_is_written(make_trainer, tmp_path):
    trainer = from_folder(make_trainer, tmp_path / "gone", "run")
    trainer.train_step()
    trainer.save()
    assert (trainer.saver.checkpoints.latest() / "reference/weights.pt").is_file()


def test_weights_that_a_copy_shares_have_to_be_frozen():
    class Careless(TowerPolicy):
        def __init__(self):
            super().__init__(2)
            self.tower.requires_grad_(True)

    with pytest.raises(RuntimeError, match=r"tower\.weight"):
        make_reference(ReferenceConfig(kind="frozen"), Careless(), needed=True)


def test_a_copy_of_the_start_that_somebody_keeps_serves_the_kl_term_too():
    policy = TowerPolicy(2)
    start = Reference("frozen", policy)
    assert make_reference(ReferenceConfig(kind="auto"), policy, needed=True, start=start) is start
    assert make_reference(ReferenceConfig(kind="auto"), policy, needed=False, start=start).kind == "none"
    assert make_reference(ReferenceConfig(kind="ema", ema_decay=0.9), policy, needed=True, start=start) is not start
