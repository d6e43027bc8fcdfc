"""Rewards that fail."""

import pytest


@pytest.mark.parametrize(("name", "kind"), [("raises", "raised"), ("hangs", "timeout"), ("gives_nan", "nan")])
def test_a_failing_reward_costs_its_sample_only(name, kind, lab, mmrl, hanging):
    reward = f"{{name: mine, function: '{lab.folder}/rewards.py:{name}', timeout_s: 1}}"
    small = ["trainer.steps=1", "trainer.tasks_per_step=6", "accuracy_reward=exact"]
    code, lines = mmrl("train", lab.config, f"rewards=[{{name: exact, weight: 0}}, {reward}]", *small)
    assert code == 0
    line, *trace = lines
    assert line.startswith(f"mmrl: warning: reward mine/{kind} failed: ")
    assert bool(trace) == (kind == "raised")
    if trace:  # of the user's function alone
        assert trace[0] == "mmrl: warning:   Traceback (most recent call last):"
        assert trace[-1] == "mmrl: warning:   RuntimeError: no answer may be 1"
        assert {line.split('"')[1] for line in trace if "File" in line} == {f"{lab.folder}/rewards.py"}
    (metrics,) = lab.metrics()
    assert metrics["reward/errors"] == metrics[f"reward/errors/mine/{kind}"] == 2
    assert metrics["reward/mean"] == 1.0


def test_a_reward_that_always_fails_ends_the_run(lab, mmrl):
    code, lines = mmrl("train", lab.config, f"rewards=[{{name: '{lab.folder}/rewards.py:always_raises'}}]")
    assert code == 1
    assert lines[-1].startswith("mmrl: run failed: all rewards of this step failed: ")
    assert "always_raises/raised: RuntimeError: out of order (rewards.py:" in lines[-1]


@pytest.mark.parametrize("samples", [1, 2])
def test_a_reward_that_always_fails_ends_the_first_evaluation(samples, lab, mmrl):
    evaluation = ["evaluation.at_start=true", f"evaluation.samples={samples}"]
    code, lines = mmrl("train", lab.config, f"rewards=[{{name: '{lab.folder}/rewards.py:always_raises'}}]", *evaluation)
    assert code == 1
    assert lines[-1].startswith("mmrl: run failed: ")
    assert "RuntimeError: out of order (rewards.py:" in lines[-1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "needs_colour",
            "nor set in its options; a reward gets lists named prompts, completions, answer",
        ),
        (
            "no_prompts",
            "does not take prompts. Rewards are called with prompts, completions and the data columns by name",
        ),
        ("always_raise", "did you mean 'always_raises'"),
    ],
)
def test_a_reward_that_does_not_fit(name, message, lab, refused):
    assert message in refused("train", lab.config, f"rewards=[{{name: '{lab.folder}/rewards.py:{name}'}}]")


def test_workers_of_the_rewards_end_where_the_model_cannot_be_loaded(lab, refused, monkeypatch):
    closed = []
    monkeypatch.setattr("mmrl.rewards.RewardSum.close", lambda rewards: closed.append(rewards))
    assert "model folder" in refused("train", lab.config, f"model.path={lab.folder}/nowhere")
    assert len(closed) == 1
