import math

from mmrl.core.state import DifficultyTracker


def test_difficulty_by_hand():
    tracker = DifficultyTracker(window=4)
    assert tracker.difficulty("new") == 0.0
    tracker.note("easy", [1.0, 1.0])
    tracker.note("hard", [0.0, 0.5])
    assert tracker.recent == [1.0, 1.0, 0.0, 0.5]
    assert tracker.difficulty("hard") == 0.625 - 0.25
    assert tracker.difficulty("easy") == 0.625 - 1.0
    assert tracker.difficulty("new") == 0.0
    tracker.note("hard", [1.0])  # the window moves on, and the question's own mean is that of its last samples
    assert tracker.recent == [1.0, 0.0, 0.5, 1.0]
    assert tracker.difficulty("hard") == 0.625 - 1.0


def test_samples_that_were_not_scored_do_not_count():
    tracker = DifficultyTracker(window=3)
    tracker.note("a", [math.nan, 0.5])
    tracker.note("b", [math.nan, math.inf])
    assert (tracker.recent, tracker.means) == ([0.5], {"a": 0.5})


def test_the_state_is_restored():
    tracker, other = DifficultyTracker(window=3), DifficultyTracker(window=3)
    tracker.note("a", [0.1, 0.2, 0.3, 0.4])
    other.load_state_dict(tracker.state_dict())
    for one in (tracker, other):
        one.note("b", [0.9])
    assert other == tracker
