"""Experiment files that cannot be used."""

import pytest

EXPERIMENT = """
name: ab
baseline: a
seeds: [1, 2]
metric: accuracy/greedy
base: run.yaml
arms:
  a: {}
  b: {overrides: {trainer.learning_rate: 1.0e-4}}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: ab", "name: [", "is not valid YAML"),
        ("baseline: a", "basline: a", "unknown key 'basline'; did you mean 'baseline'"),
        ("baseline: a", "baseline: c", "`baseline` is 'c'; arms: a, b"),
        ("metric: accuracy/greedy\n", "", "'metric' must be given"),
        ("seeds: [1, 2]", "seeds: [one]", "'seeds[0]'"),
        ("seeds: [1, 2]", "seeds: []", "`seeds` is empty"),
        ("base: run.yaml", "base: nowhere.yaml", "file nowhere.yaml not found"),
        ("trainer.learning_rate", "trainer.learning_rat", "run runs/b/seed-1 would be rejected"),
        ("1.0e-4", "quick", "'trainer.learning_rate': Value 'quick'"),
        (
            "name: ab",
            "name: ab\ncollapse: {metric: accuracy/greedy}\noverrides: {evaluation.at_start: false}",
            "before training, but evaluation.at_start of runs/a/seed-1 is false",
        ),
    ],
)
def test_compare_with_a_bad_experiment_file(old, new, message, lab, refused):
    path = lab.folder / "ab.yaml"
    assert old in EXPERIMENT
    path.write_text(EXPERIMENT.replace(old, new))
    assert message in refused("compare", path, "--output", lab.folder / "compared")
    assert message in refused("compare", path, "--output", lab.folder / "compared", "--plan")
    assert not (lab.folder / "compared").exists()


def test_compare_of_nothing(lab, refused):
    assert "experiment file not found" in refused("compare", lab.folder / "nowhere.yaml")
    assert "unknown key 'recipe'" in refused("compare", lab.config, "--output", lab.folder / "compared")


TWO_ARMS = """
name: two
base: {config}
arms: {{a: , b: }}
baseline: a
seeds: [1]
metric: accuracy/greedy
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seeds: [[1]]", "seeds"),
        ("seeds: [{a: 1}]", "seeds"),
        ("seeds: [1, null]", "seeds"),
        ("seeds: 1", "seeds"),
        ("seeds: [1.5]", "seeds"),
        ("seeds: ['${nope}']", "seeds"),
        (f"base: {'x' * 400}", "base: file"),
        ("base: [a]", "base"),
        ("arms: [a, b]", "arms"),
        ("arms: {a: 1, b: 2}", "arms"),
        ("metric: [a]", "metric"),
        ("jobs: many", "jobs"),
        ("sweep: [1]", "sweep"),
        ("sweep: {values: [1], seeds: [[2]]}", "sweep.seeds"),
        ("work: {costs: {images: [1]}}", "work.costs"),
        ("secondary_metrics: [[a]]", "secondary_metrics"),
        ('name: "\\0"', "name"),
    ],
)
def test_experiments_that_cannot_be_read(line, message, lab, refused):
    key = line.partition(":")[0]
    kept = [old for old in TWO_ARMS.format(config=lab.config).splitlines() if not old.startswith(f"{key}:")]
    path = lab.folder / "experiment.yaml"
    path.write_text("\n".join([*kept, line]))
    assert message in refused("compare", path, "--output", lab.folder / "compared")
    assert not (lab.folder / "compared").exists()
