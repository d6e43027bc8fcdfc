"""What several processes log of a step, and how a run ends that learned nothing."""

import json
import logging
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from mmrl.core.loss import Metric
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import Tally
from mmrl.errors import RunError
from mmrl.training import processes, scoring, trainer
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.training.rollers import scored
from mmrl.training.scoring import EveryRewardFailedError, score_everywhere
from mmrl.training.trainer import RunCounts, over_processes
from tests.training.toy import ToyRecipe

NAN = math.nan


def ranks(monkeypatch, *others, module=trainer):
    """This process is the first; the others have said these things."""
    monkeypatch.setattr(module, "from_all", lambda mine: [mine, *others])


def test_shares_of_processes_are_merged_by_their_kind(monkeypatch):
    other = {
        "mean": Metric(6.0, 3.0),
        "sum": Metric.summed(2.0),
        "max": Metric(5.0, 1.0, "max"),
        "theirs": Metric(1.0, 2.0),
    }
    ranks(monkeypatch, (True, other, {"constant": 3.0}))
    own = {"mean": Metric(torch.tensor(0.0), 1), "sum": Metric.summed(1.0), "max": Metric(7.0, 1.0, "max")}
    found = over_processes(own | {"constant": 3.0})
    assert found == {"mean": 1.5, "sum": 3.0, "max": 7.0, "theirs": 0.5, "constant": 3.0}


def test_rows_that_are_there_for_company_do_not_count(monkeypatch):
    ranks(monkeypatch, (True, {"mean": Metric(1.0, 1.0)}, {}))
    assert over_processes({"mean": Metric(0.0, 3.0)}, teaches=False) == {"mean": 1.0}
    ranks(monkeypatch, (False, {"mean": Metric(1.0, 1.0)}, {}))
    assert over_processes({"mean": Metric(0.0, 3.0)}, teaches=False) == {"mean": 0.25}


def test_a_number_on_which_processes_disagree_is_named_once(monkeypatch, caplog):
    trainer._warn_of.cache_clear()
    ranks(monkeypatch, (True, {}, {"mine": 2.0, "nothing": NAN, "rounded": 1.0 + 1e-6, "theirs": 4.0}))
    numbers = {"mine": 1.0, "nothing": NAN, "rounded": 1.0}
    with caplog.at_level(logging.WARNING, logger="mmrl"):
        found = [over_processes(numbers), over_processes(numbers)][-1]
    assert (found["mine"], found["rounded"], found["theirs"]) == (1.0, 1.0, 4.0)
    (record,) = caplog.records
    assert "metric mine differs between the processes" in record.getMessage()


def test_counts_of_other_processes_are_added_once(monkeypatch):
    recipe = SimpleNamespace(added={"skipped": Tally(loaded=2), "seen": Counter(), "fresh": []})
    counts = RunCounts(recipe)
    recipe.added["skipped"]["image"] += 1
    ranks(monkeypatch, {"skipped": {"loaded": 0, "image": 3}, "seen": {"episodes": 4}})
    counts.share()
    assert recipe.added["skipped"] == {"loaded": 2, "image": 4}  # what both have loaded is the same
    assert recipe.added["seen"] == {"episodes": 4}
    recipe.added["seen"].clear()
    counts.begin()
    ranks(monkeypatch, {"skipped": {"loaded": 0, "image": 0}, "seen": {"episodes": 1}})
    counts.share()
    assert (recipe.added["skipped"]["image"], recipe.added["seen"]["episodes"]) == (4, 1)


def test_a_process_whose_rewards_all_fail_does_not_end_a_run_in_which_others_have_some(monkeypatch):
    rows = Rollouts(torch.zeros(1, dtype=torch.int64), torch.ones(1, 1), torch.zeros(1, 1), torch.full((1,), NAN))

    def fails():
        raise EveryRewardFailedError("judge/timeout", rows)

    ranks(monkeypatch, True, module=scoring)
    assert score_everywhere(fails) is rows
    ranks(monkeypatch, False, module=scoring)
    with pytest.raises(EveryRewardFailedError, match="all rewards of this step failed: judge/timeout"):
        score_everywhere(fails)
    with pytest.raises(RunError, match="known"):  # where workers have scored them
        score_everywhere(lambda: rows, RunError("known"))
    monkeypatch.setattr(scoring, "from_all", processes.from_all)
    with pytest.raises(EveryRewardFailedError):
        score_everywhere(fails)


def test_a_stage_sees_rows_that_no_reward_could_score():
    """Its columns must also be in the rows of a process whose rewards all failed."""
    rows = Rollouts(torch.zeros(1, dtype=torch.int64), torch.ones(1, 1), torch.zeros(1, 1), torch.full((1,), NAN))

    def fails(rollouts, step):
        raise EveryRewardFailedError("judge/timeout", rollouts)

    def added(policy, rollouts, streams, step):
        return rollouts.replace(extras=rollouts.extras | {"added": torch.ones(1)})

    stage = SimpleNamespace(scored=added)
    recipe = SimpleNamespace(score=fails, stages=[stage], policy=None)
    streams = Streams(0)
    with pytest.raises(EveryRewardFailedError, match="judge/timeout") as failed:
        scored(recipe, streams.noted(rows), streams, Step())
    assert failed.value.rollouts.extras["added"].tolist() == [1.0]


@pytest.mark.parametrize("kind", ["drop", "resample"])
def test_a_run_without_an_optimiser_step_says_why_nothing_was_learned(make_trainer, kind):
    tries = {"max_tries": 2} if kind == "resample" else {}
    trainer = make_trainer(filter={"kind": kind, "low": 2.0} | tries, steps=2)
    result = trainer.run()
    groups = 2 * 3 * (2 if kind == "resample" else 1)
    assert (result["status"], result["optimiser_steps"]) == ("nothing_learned", 0)
    reason = f"took no step in 2 steps, because objective.filter '{kind}' kept none of {groups} groups"
    assert reason in result["reason"]
    assert reason in trainer.log.warnings.said["nothing_learned"]
    assert "mean reward is not strictly between 2 and inf" in result["reason"]
    written = json.loads((trainer.run_dir / "result.json").read_text())
    assert (written["status"], written["reason"]) == ("nothing_learned", result["reason"])


class Unscored(ToyRecipe):
    own_loss = ""

    def score(self, rollouts, step):
        return rollouts


def test_a_run_without_a_reward_says_so(make_trainer):
    result = make_trainer(recipe=Unscored, steps=2).run()
    assert result["reason"] == (
        "nothing was learned: the optimiser took no step in 2 steps, because none of 24 samples could be scored"
    )


def test_a_run_that_learns_is_done(make_trainer):
    result = make_trainer(steps=1).run()
    assert (result["status"], "reason" in result) == ("done", False)


def test_runs_of_one_process_may_differ_in_precision():
    from mmrl.training.processes import make_accelerator

    assert make_accelerator("bf16").mixed_precision == "bf16"
    assert make_accelerator("none").mixed_precision == "no"
