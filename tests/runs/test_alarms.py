"""Alarms of a run: means over its first and its latest steps, kept over an interruption."""

import json
import math

from mmrl.runs.run_log import STEPS, WINDOW, Alarm, AlarmTracks, Track


def test_a_track_has_the_means_of_the_first_and_the_latest_steps():
    track = Track()
    for step in range(STEPS - 1):
        track.add(step)
    assert math.isnan(track.start)
    assert math.isnan(track.now)
    for step in range(STEPS - 1, 3 * WINDOW):
        track.add(step)
    assert (track.start, track.now) == (2.0, 3 * WINDOW - 3.0)
    assert (len(track.first), len(track.latest)) == (STEPS, WINDOW)


def test_alarms_resume_where_they_were():
    def check(here, there):
        return f"{here.now:g}" if here.now > 2 * here.start else ""

    alarms, tracks, values = {"high": Alarm(("a", "b"), check)}, AlarmTracks(), [1, math.nan, 1, 1, 1, 1, 2, 4, 6]
    found = []
    for value in values:
        found.append(tracks.due(alarms, {"a": value}))
        resumed = AlarmTracks()
        resumed.load_state_dict(json.loads(json.dumps(tracks.state_dict())))
        tracks = resumed
    assert found == [{}] * 8 + [{"high": "2.8"}]
    assert tracks.due({}, {"a": 3}) == {}
