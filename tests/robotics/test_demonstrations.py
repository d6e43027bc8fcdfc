"""Demonstrations of the tabletop's experts: executing them, writing them, and reading them for cloning."""

import numpy as np
import pytest

from mmrl.errors import UserError
from robotics.data import EpisodeWriter, LeRobotReader, robot_features
from robotics.data.features import ACTION, EXECUTED, FULL_STATE
from robotics.episodes.demonstrations import DemonstrationConfig, Demonstrations, Transition, load_demonstrations
from robotics.offpolicy.prior import PriorConfig, prior_records
from robotics.offpolicy.transitions import TransitionForm
from robotics.scenes.batch import BatchSettings, TabletopBatch
from robotics.scenes.experts import Expert
from robotics.sim.episodes import EpisodeSpec
from robotics.toy.tabletop_demos import build_demonstrations, run_experts

pytest.importorskip("mujoco", reason="needs pip install 'mmrl-suite[sim]'")

BLIND = BatchSettings(image_size=None, state="proprio")


def reach(count, task="reach"):
    return [EpisodeSpec(task, f"do {task}", layout) for layout in range(count)]


class Watched(TabletopBatch):
    """Records the actions that it receives and the full state at that time."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.told = []

    def step_chunk(self, actions, record=()):
        self.told.append((self.live.copy(), self.full_state().copy(), np.asarray(actions)[:, 0].copy()))
        return super().step_chunk(actions, record)


def test_experts_succeed_and_stop_there():
    with TabletopBatch(["reach", "push"], settings=BLIND) as sim:
        episodes = [*reach(3), *reach(2, "push")]
        found = run_experts(sim, episodes)
        assert [one.success for one in found] == [True] * 5
        for one in found:
            assert len(one.states) == len(one.actions) < sim.horizon
            assert one.states[0].shape == (10,)
            assert one.images == []
            assert np.abs(one.actions).max() <= 1
        sim.reset(episodes[:1])  # what was recorded does the task again
        assert sim.step_chunk(np.stack(found[0].actions)[None]).success.tolist() == [True]


def test_noise_moves_the_arm_but_is_not_recorded():
    expert = Expert("reach")
    with Watched(["reach"], settings=BLIND) as sim:
        found = run_experts(sim, reach(2), noise=0.4, seed=5)
        taken = [0, 0]
        distance = []
        for rows, states, told in sim.told:
            for row, state, action in zip(rows.tolist(), states, told, strict=True):
                recorded = found[row].actions[taken[row]]
                np.testing.assert_array_equal(recorded, expert.act(state))
                assert action[-1] == recorded[-1]  # nobody shakes the gripper
                distance.append(np.abs(action[:-1] - recorded[:-1]))
                taken[row] += 1
        assert taken == [len(one.actions) for one in found]
        spread = np.concatenate(distance)
        assert 0.05 < spread.mean() < 0.4
        assert np.abs([action for _, _, action in sim.told for action in action]).max() <= 1


def test_noise_may_come_in_a_share_of_the_steps_only():
    with Watched(["reach"], settings=BLIND) as sim:
        found = run_experts(sim, reach(12), noise=1.0, seed=5, noise_share=0.2)
        taken, shaken = [0] * 12, []
        for rows, _, told in sim.told:
            for row, action in zip(rows.tolist(), told, strict=True):
                shaken.append(bool(np.abs(action - found[row].actions[taken[row]]).max() > 1e-6))
                taken[row] += 1
    count = len(shaken)
    assert abs(np.mean(shaken) - 0.2) < 4 * np.sqrt(0.2 * 0.8 / count)
    with pytest.raises(UserError, match=r"noise_share is 1\.5"):
        build_demonstrations("unused", noise_share=1.5)


def test_noise_follows_from_the_seed():
    def states(seed):
        with TabletopBatch(["reach"], settings=BLIND) as sim:
            return np.concatenate([np.stack(one.states) for one in run_experts(sim, reach(2), 0.3, seed)])

    np.testing.assert_array_equal(states(1), states(1))
    assert not np.array_equal(states(1)[:4], states(2)[:4])


def test_two_demonstrations_are_written(tmp_path, backend):
    folder = build_demonstrations(str(tmp_path / "demos"), episodes=2, image_size=32, first_layout=4)
    reader = LeRobotReader(folder)
    assert len(reader) == 2
    assert reader.cameras == ["front"]
    with TabletopBatch(["reach"], settings=BLIND) as sim:
        told = sim.tasks()["reach"]
        seen = run_experts(sim, [EpisodeSpec("reach", told, layout) for layout in (4, 5)])
    for number, one in enumerate(seen):
        episode = reader.episode(number)
        np.testing.assert_array_equal(episode.state, np.stack(one.states))
        np.testing.assert_array_equal(episode.action, np.stack(one.actions))
        assert episode.success is True
        assert episode.task == told
        assert episode.images["front"].shape == (len(one.states), 32, 32, 3)
        assert episode.images["front"].std() > 0
    assert [path.name for path in tmp_path.iterdir()] == ["demos"]


def test_full_states_and_executed_actions_are_written_on_request(tmp_path):
    folder = tmp_path / "demos"
    options = {"episodes": 2, "image_size": 0, "noise": 0.4, "seed": 5, "full": True}
    reader = LeRobotReader(build_demonstrations(str(folder), **options))
    assert reader.info["features"][ACTION]["info"]["noise"] == 0.4
    with Watched(["reach"], settings=BLIND) as sim:
        run_experts(sim, reach(2), noise=0.4, seed=5)
    taken, compared = [0] * 2, 0
    for rows, states, told in sim.told:
        for row, state, action in zip(rows.tolist(), states, told, strict=True):
            extra = reader.episode(row).extra
            np.testing.assert_array_equal(extra[EXECUTED][taken[row]], action)
            np.testing.assert_array_equal(extra[FULL_STATE][taken[row]], state)
            taken[row], compared = taken[row] + 1, compared + 1
    assert compared == sum(map(len, reader)) > 10
    form = TransitionForm(state=10, full=22, chunk=1, action=5)
    with TabletopBatch(["reach"], settings=BLIND) as sim:
        records = prior_records(PriorConfig(path=str(folder)), form, sim)
    joined = {name: np.concatenate([episode.extra[name] for episode in reader]) for name in (EXECUTED, FULL_STATE)}
    np.testing.assert_array_equal(records["actions"][:, 0], joined[EXECUTED])
    np.testing.assert_array_equal(records["full"], joined[FULL_STATE])


def test_demonstrations_load_for_cloning(tmp_path):
    build_demonstrations(str(tmp_path / "demos"), tasks=["reach", "push"], episodes=1, image_size=0)
    found = load_demonstrations(DemonstrationConfig(path=str(tmp_path / "demos"), camera=""))
    assert len(found.actions) == 2
    assert found.images is None
    assert len(set(found.instructions)) == 2
    assert found.observations(found.transitions[:3]).images is None
    assert found.num_transitions == len(found.transitions)
    assert found.statistics().size == 5
    assert found.state_statistics().size == 10


def test_missing_data_is_built_once(tmp_path):
    about = {"episodes": 1, "image_size": 0}
    build = "robotics.toy.tabletop_demos:build_demonstrations"
    config = DemonstrationConfig(path=str(tmp_path / "demos"), build=build, build_options=about, camera="")
    first = load_demonstrations(config)
    written = (tmp_path / "demos" / "meta" / "info.json").stat().st_mtime_ns
    again = load_demonstrations(config)
    np.testing.assert_array_equal(first.actions[0], again.actions[0])
    assert (tmp_path / "demos" / "meta" / "info.json").stat().st_mtime_ns == written
    with pytest.raises(UserError, match=r"demos already exists"):
        build_demonstrations(str(tmp_path / "demos"), **about)


def test_half_written_data_is_not_taken_for_the_whole(tmp_path, monkeypatch):
    import robotics.toy.tabletop_demos as demos

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demos, "run_experts", killed)
        with pytest.raises(KeyboardInterrupt):
            build_demonstrations(str(tmp_path / "demos"), episodes=1, image_size=0)
    assert not (tmp_path / "demos").exists()
    build_demonstrations(str(tmp_path / "demos"), episodes=1, image_size=0)
    assert len(LeRobotReader(tmp_path / "demos")) == 1


def give_up(monkeypatch):
    monkeypatch.setattr(Expert, "act", lambda self, state, info=None: np.zeros(5, np.float32))


def test_failures_are_written_only_where_requested(tmp_path, monkeypatch):
    import robotics.toy.tabletop_demos as demos

    experts = demos.run_experts

    def every_second_fails(*arguments):
        found = experts(*arguments)
        for one in found[1::2]:
            one.success = False
        return found

    monkeypatch.setattr(demos, "run_experts", every_second_fails)
    build_demonstrations(str(tmp_path / "kept"), episodes=3, image_size=0, keep_failures=True)
    build_demonstrations(str(tmp_path / "left"), episodes=3, image_size=0)
    assert [episode.success for episode in LeRobotReader(tmp_path / "kept")] == [True, False, True]
    assert [episode.success for episode in LeRobotReader(tmp_path / "left")] == [True, True]


def test_no_success_at_all_is_an_error(tmp_path, monkeypatch):
    give_up(monkeypatch)
    with pytest.raises(UserError, match=r"no demonstration of reach succeeded; try noise below 0\.2"):
        build_demonstrations(str(tmp_path / "demos"), episodes=1, image_size=0, noise=0.2)
    assert not (tmp_path / "demos").exists()


@pytest.mark.parametrize(("option", "message"), [({"tasks": ["fly"]}, "fly"), ({"arm": "octopus"}, "octopus")])
def test_what_does_not_exist_is_named(tmp_path, option, message):
    with pytest.raises(UserError, match=message):
        build_demonstrations(str(tmp_path / "demos"), image_size=0, **option)


def test_chunks_repeat_the_last_action_and_say_so():
    actions = [np.arange(4, dtype=np.float32)[:, None], np.float32([[9], [8]])]
    found = Demonstrations([np.zeros((4, 1)), np.zeros((2, 1))], actions, None, ["a", "b"])
    assert found.transitions == [
        Transition(0, 0),
        Transition(0, 1),
        Transition(0, 2),
        Transition(0, 3),
        Transition(1, 0),
        Transition(1, 1),
    ]
    chunks, mask = found.chunks([Transition(0, 0), Transition(0, 2), Transition(1, 1)], 3)
    assert chunks[..., 0].tolist() == [[0, 1, 2], [2, 3, 3], [8, 8, 8]]
    assert mask.tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]


def test_an_instruction_may_change_within_an_episode(tmp_path):
    with EpisodeWriter(tmp_path, 10, robot_features(1, 1)) as writer:
        writer.add_episode(np.zeros((3, 1)), np.zeros((3, 1)), None, ["open", "open", "close"], True)
        writer.add_episode(np.zeros((2, 1)), np.zeros((2, 1)), None, "push", True)
    found = load_demonstrations(DemonstrationConfig(path=str(tmp_path), camera=""))
    assert found.instructions == ["open", "push"]
    seen = found.observations(found.transitions).instructions
    assert seen == ("open", "open", "close", "push", "push")
    before = found.digest()
    found.changing_instructions[0][1] = "close"
    assert found.digest() != before


def test_an_entry_that_hardly_acts_is_named_before_its_quantiles_delete_it(caplog):
    actions = np.linspace(-1, 1, 200, dtype=np.float32)[:, None].repeat(3, 1)
    actions[:, 1], actions[:, 2] = 0.0, 0.5  # rarely and never
    actions[:2, 1] = 1.0
    found = Demonstrations([np.zeros((200, 1), np.float32)], [actions], None, ["go"])
    with caplog.at_level("WARNING", "mmrl"):
        found.statistics()
    said = "entries [1] of the actions stay within a fiftieth of their range in 98% of the frames (entry 1 is in 0 to 1"
    assert said in caplog.text
    caplog.clear()
    found.statistics([1])
    assert not caplog.text


def test_an_entry_that_always_acts_a_little_and_rarely_much_is_named_for_what_its_quantiles_clip(caplog):
    actions = np.linspace(-0.009, 0.009, 200, dtype=np.float32)[:, None]
    actions[100] = 1.0  # in one frame of 200; the others act, within a fiftieth of the range
    found = Demonstrations([np.zeros((200, 1), np.float32)], [actions], None, ["go"])
    with caplog.at_level("WARNING", "mmrl"):
        scaled = found.statistics().normalise(actions)
    assert "entries [0] of the actions stay within a fiftieth of their range in 98% of the frames" in caplog.text
    assert "clips them in the remaining frames" in caplog.text
    assert scaled[100] == 1.0
    assert len(np.unique(scaled[(actions > -0.008) & (actions < 0.008)])) > 100  # what it does in the others is kept
