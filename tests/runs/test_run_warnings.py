"""One-time warnings of a run: constant rewards, equal groups, an SRPO reward without agreement."""

import json
import logging
import math

import pytest
import torch

from mmrl.core.rollouts import Rollouts
from mmrl.rewards.reward_config import RewardResult
from mmrl.runs.records import LoggedWarnings, read_warnings
from mmrl.runs.run_log import PATIENCE, RunWarnings
from mmrl.training.scoring import RewardErrors


def batch(rewards, group_size=2, **terms):
    rows = len(rewards)
    return Rollouts(
        group=torch.arange(rows) // group_size,
        mask=torch.ones(rows, 3),
        logp_old=torch.zeros(rows, 3),
        reward=torch.tensor(rewards),
        reward_terms={name: torch.tensor(values) for name, values in terms.items()},
    )


def run(folder, batches, metrics=({},), warnings=None, first=1):
    warnings = warnings or RunWarnings(folder)
    rows = []
    for number, rollouts in enumerate(batches):
        warnings.watch([rollouts])
        rows.append(warnings.step(first + number, metrics[number % len(metrics)]))
    return warnings, rows


def test_equal_groups_are_said_once_with_a_count(tmp_path, caplog):
    steps = [batch([0.0, 0.0, 1.0, 1.0]), batch([1.0, 1.0, 0.0, 0.0])] * PATIENCE
    _, rows = run(tmp_path, steps)
    assert rows[PATIENCE - 2] == {}
    assert rows[PATIENCE - 1] == {"warnings/equal_groups": PATIENCE}
    assert rows[-1] == {"warnings/equal_groups": 2 * PATIENCE}
    (message,) = read_warnings(tmp_path)
    assert f"for {PATIENCE} steps the samples of every task have had equal rewards" in message
    assert [record.getMessage() for record in caplog.records] == [f"step {PATIENCE}: {message}"]


@pytest.mark.parametrize("variety", ["", "more noise (sampler.noise_level)"])
def test_equal_groups_of_a_sampler_without_temperature(tmp_path, variety):
    warnings = RunWarnings(tmp_path, variety=variety)
    run(tmp_path, [batch([0.0, 0.0, 1.0, 1.0])] * PATIENCE, warnings=warnings)
    (message,) = read_warnings(tmp_path)
    assert "temperature" not in message
    assert (
        f"more samples_per_task, {variety}{', ' if variety else ''}easier or harder tasks or a more fine-grained"
        in message
    )


def test_rewards_that_are_compared_by_themselves_are_watched_by_themselves(tmp_path):
    """With GDPO terms that add up to a constant tell samples from one another."""
    apart = batch([1.0, 1.0, 1.0, 1.0], a=[0.2, 0.8, 0.4, 0.6], b=[0.8, 0.2, 0.6, 0.4])
    warnings = RunWarnings(tmp_path / "apart", compared=("a", "b"))
    assert not any(run(tmp_path / "apart", [apart] * PATIENCE, warnings=warnings)[1])
    equal = [batch([1.0] * 4, a=[x, x, y, y], b=[y, y, x, x]) for x, y in [(0.2, 0.8), (0.4, 0.6)]] * PATIENCE
    warnings = RunWarnings(tmp_path / "equal", compared=("a", "b"))
    assert "warnings/equal_groups" in run(tmp_path / "equal", equal[:PATIENCE], warnings=warnings)[1][-1]


@pytest.mark.parametrize("advantages", ["elsewhere", "all_the_same"])
def test_equal_groups_that_teach_are_not_complained_of(tmp_path, advantages):
    """Such as those of a critic, and those of an estimator that compares turns."""
    warnings = RunWarnings(tmp_path, compared=() if advantages == "elsewhere" else ("reward",))
    for number in range(2 * PATIENCE):
        warnings.watch([batch([0.0, 0.0, 1.0, 1.0])])
        assert warnings.sees_equal_groups is (advantages == "all_the_same")
        warnings.forget_equal_groups()
        assert warnings.step(number, {}) == {}


def test_answers_that_are_all_cut_are_said_once(tmp_path):
    steps = [batch([0.0, 1.0, 1.0, 0.0])] * (2 * PATIENCE)
    _, rows = run(
        tmp_path / "some",
        steps,
        [{"response/finished_fraction": 0.0}] * (PATIENCE - 1) + [{"response/finished_fraction": 0.1}],
    )
    assert not any(rows)
    run(tmp_path, steps, [{"response/finished_fraction": 0.0}])
    (message,) = read_warnings(tmp_path)
    assert f"for {PATIENCE} steps every response was cut off" in message


def test_a_step_that_differs_starts_the_count_again(tmp_path):
    equal, differs = batch([0.0, 0.0, 1.0, 1.0]), batch([0.0, 1.0, 1.0, 1.0])
    _, rows = run(tmp_path, [*[equal] * (PATIENCE - 1), differs, *[equal] * (PATIENCE - 1)])
    assert not any(rows)
    assert read_warnings(tmp_path) == []


def test_a_constant_reward_is_named_with_its_value(tmp_path):
    values = [0.0, 1.0, 1.0, 0.0]
    _, rows = run(tmp_path, [batch(values, exact=values, format=[0.5, 0.5, math.nan, 0.5])] * PATIENCE)
    assert rows[-1] == {"warnings/constant_format": PATIENCE}
    (message,) = read_warnings(tmp_path)
    assert f"reward 'format' was 0.5 for all {3 * PATIENCE} samples of {PATIENCE} steps" in message
    assert "unless this is its best value, check the samples" in message


def test_a_constant_total_is_reported_instead_of_equal_groups(tmp_path):
    run(tmp_path, [batch([0.0] * 4)] * PATIENCE)
    (message,) = read_warnings(tmp_path)
    assert "the total reward was 0 for all" in message


def test_single_samples_are_no_equal_groups(tmp_path):
    run(tmp_path, [batch([0.0, 1.0, 2.0, 3.0], group_size=1)] * PATIENCE)
    assert read_warnings(tmp_path) == []


@pytest.mark.parametrize(("values", "said"), [((0.3, -0.3, 0.1), True), ((0.5, 0.4, math.nan), False)])
def test_little_agreement_of_srpo(values, said, tmp_path):
    metrics = [{"srpo/agreement": value} for value in values]
    run(tmp_path, [batch([0.0, 1.0, 0.5, 1.0])] * (2 * PATIENCE), metrics)
    assert [("srpo/agreement was" in message) for message in read_warnings(tmp_path)] == [True] * said


@pytest.mark.parametrize(("shares", "said"), [((1.0,), True), ((1.0, 1.0, 0.9), False), ((math.nan,), False)])
def test_successes_that_never_cluster(shares, said, tmp_path):
    metrics = [{"srpo/noise_fraction": share} for share in shares]
    _, rows = run(tmp_path, [batch([0.0, 1.0, 0.5, 1.0])] * (2 * PATIENCE), metrics)
    assert [("srpo/noise_fraction is 1" in message) for message in read_warnings(tmp_path)] == [True] * said
    assert rows[-1] == ({"warnings/all_noise": 2 * PATIENCE} if said else {})


def test_a_resumed_run_logs_the_same_as_an_uninterrupted_one(tmp_path):
    steps = [batch([1.0] * 4)] * (PATIENCE + 3)
    _, whole = run(tmp_path / "whole", steps)
    cut = PATIENCE - 2
    warnings, rows = run(tmp_path / "cut", steps[:cut])
    state = warnings.state_dict()
    run(tmp_path / "cut", steps[cut:], warnings=warnings, first=cut + 1)  # went on before it was killed
    resumed = RunWarnings(tmp_path / "cut")
    resumed.load_state_dict(state)
    resumed.truncate_after(cut)
    _, rest = run(tmp_path / "cut", steps[cut:], warnings=resumed, first=cut + 1)
    assert [*rows, *rest] == whole
    assert read_warnings(tmp_path / "cut") == read_warnings(tmp_path / "whole")


def test_a_term_that_is_only_logged_may_be_constant(tmp_path):
    values = [0.0, 1.0, 1.0, 0.0]
    batches = [batch(values, exact=values, lines=[0.0] * 4)] * PATIENCE
    assert run(tmp_path / "a", batches)[1][-1] == {"warnings/constant_lines": PATIENCE}
    quiet = RunWarnings(tmp_path / "b", only_logged=["lines"])
    assert run(tmp_path / "b", batches, warnings=quiet)[1][-1] == {}


def test_what_is_logged_during_a_run_is_kept_and_counted_once(tmp_path):
    """Warnings before the folder is the run's own, later ones with their step, and those of one form together."""
    logger = logging.getLogger("mmrl")
    (tmp_path / "warnings.jsonl").write_text('{"step": 1, "kind": "logged", "message": "of a run before"}\n')
    with LoggedWarnings() as logged:
        logger.warning("prompt %d is long", 3)
        logger.info("not a warning")
        logged.write_to(tmp_path, lambda: 7)
        logger.warning("prompt %d is long", 4)
        logger.error("disk full")
        run(tmp_path, [batch([0.0, 0.0, 1.0, 1.0])] * PATIENCE)
    logger.warning("after the run")
    found = read_warnings(tmp_path)
    assert found[:2] == ["prompt 3 is long (and 1 more of this kind)", "disk full"]
    assert len(found) == 3
    assert "equal rewards" in found[2]
    steps = [json.loads(line)["step"] for line in (tmp_path / "warnings.jsonl").read_text().splitlines()]
    assert steps == [0, 7, 7, PATIENCE]
    with LoggedWarnings() as logged:
        logged.write_to(tmp_path, keep=True)
        logger.warning("of the resumed run")
    assert read_warnings(tmp_path)[-1] == "of the resumed run"
    assert len(read_warnings(tmp_path)) == 4


def test_a_warning_that_cannot_be_kept_neither_ends_the_run_nor_prints_a_traceback(tmp_path, capsys):
    (tmp_path / "warnings.jsonl").mkdir()
    with LoggedWarnings() as logged:
        logged.write_to(tmp_path, keep=True)
        logging.getLogger("mmrl").error("disk full")
    assert "Logging error" not in capsys.readouterr().err


def test_failures_of_rewards_and_other_warnings_are_listed_each_by_itself(tmp_path, caplog):
    why = {"short/nan": "returned nan", "100%/raised": "ValueError: boo (mine.py:3)"}
    result = RewardResult([math.nan], {}, dict.fromkeys(why, 1), why, {"100%/raised": "Traceback:\n  ValueError: boo"})
    with LoggedWarnings() as logged:
        logged.write_to(tmp_path)
        RewardErrors().warn(result)
        for text in ("one thing", "another"):
            logging.getLogger("mmrl").warning("%s", text)
    assert read_warnings(tmp_path) == [
        "reward short/nan failed: returned nan",
        "reward 100%/raised failed: ValueError: boo (mine.py:3)",
        "one thing",
        "another",
    ]
    assert "  Traceback:" in caplog.messages
