"""A robot's control loop: late and missing chunks, measured delays, stopping, and a served flow policy that is slow."""

import threading
import time
from concurrent.futures import wait

import numpy as np
import pytest

pytest.importorskip("msgpack", reason="needs pip install 'mmrl-suite[serve]'")
pytest.importorskip("websockets", reason="needs pip install 'mmrl-suite[serve]'")

from mmrl.errors import RunError, UserError
from robotics.policies.base.encoder import EncoderConfig
from robotics.policies.flow import FlowActionPolicy, FlowPolicyConfig
from robotics.serving import PolicyClient, RealTimeController, RealTimeSettings, realtime
from robotics.serving.realtime import Watchdog, drive
from tests.robotics.test_serving import StatePolicy, ask, robot, running, seen

METADATA = {"actions": {"shape": [6, 2]}, "control_hz": 10.0, "n_action_steps": 2, "stop": ["zero", "hold"]}


class Policy:
    """Answers when it is let; entry i of chunk n is 10 n + i."""

    def __init__(self):
        self.asked, self.number = [], 0
        self.go = threading.Semaphore(0)

    def infer(self, message):
        self.asked.append(message)
        assert self.go.acquire(timeout=30)
        self.number += 1
        return {"actions": np.repeat(10 * self.number + np.arange(6, dtype=np.float32), 2).reshape(6, 2)}


@pytest.fixture
def policy():
    found = Policy()
    yield found
    for _ in range(20):
        found.go.release()


def control(policy, metadata=METADATA, **settings):
    return RealTimeController(policy.infer, metadata, RealTimeSettings(**settings))


def answer(controller, policy):
    """Let the chunk under way arrive before the next control step."""
    policy.go.release()
    wait([controller._pending], timeout=30)


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def begin(controller, policy):
    assert controller.step({"at": 0}) is None
    answer(controller, policy)


def firsts(controller, count, at=0):
    return [float(controller.step({"at": at})[0]) for _ in range(count)]


def test_the_delay_is_measured(policy):
    with control(policy, mode="naive") as controller:
        begin(controller, policy)
        # entries 0 and 1, then the next chunk is asked for, and the running one goes on
        assert firsts(controller, 4) == [10, 11, 12, 13]
        answer(controller, policy)
        # two actions were executed since: the new chunk takes over at entry 2, and the next one is asked for
        assert firsts(controller, 2) == [22, 23]
        wait_for(lambda: len(policy.asked) == 3)
        assert controller.counts.delays == [2]
    assert controller.counts.seams == [pytest.approx(9 * np.sqrt(2))]
    assert controller.counts.inside == pytest.approx([np.sqrt(2)] * 4)


def test_a_late_chunk_stops_the_arm_and_goes_on_where_it_stood(policy):
    with control(policy, mode="naive") as controller:
        begin(controller, policy)
        assert firsts(controller, 6) == [10, 11, 12, 13, 14, 15]
        # nothing is left: motions stop, positions stay
        for _ in range(3):
            assert controller.step({}).tolist() == [0, 15]
        answer(controller, policy)
        # four actions of the chunk were executed since its observation, and the arm did not move in the stop
        assert firsts(controller, 1) == [24]
        assert (controller.counts.starved, controller.counts.chunks) == (3, 2)


def test_real_time_chunking_sends_the_rest_and_the_largest_delay(policy):
    metadata = METADATA | {"continues_chunks": True}
    with control(policy, metadata) as controller:
        assert controller.mode == "rtc"
        begin(controller, policy)
        firsts(controller, 3)
        answer(controller, policy)
        assert "running" not in policy.asked[0]
        given = policy.asked[1]["running"]
        assert given["actions"][:, 0].tolist() == [12, 13, 14, 15]
        # nothing measured yet: the whole budget of 400 ms
        assert given["delay"] == 4
        firsts(controller, 1)
        assert list(controller._delays) == [4, 1]


def test_blending_is_the_default_without_inpainting(policy):
    with control(policy) as controller:
        begin(controller, policy)
        firsts(controller, 3)
        answer(controller, policy)
        (first,) = firsts(controller, 1)
        assert controller.mode == "blend"
        assert 13 < first < 21


def test_errors_stop_the_arm_and_the_next_request_is_tried(policy, caplog):
    def infer(message):
        if len(policy.asked) == 1:
            policy.asked.append(message)
            raise ConnectionError("gone")
        return Policy.infer(policy, message)

    with RealTimeController(infer, METADATA, RealTimeSettings(mode="naive")) as controller:
        begin(controller, policy)
        firsts(controller, 3)
        wait([controller._pending], timeout=30)
        firsts(controller, 1)
        assert (controller.counts.errors, controller.counts.last_error) == (1, "ConnectionError: gone")
        answer(controller, policy)
        assert firsts(controller, 1) == [21]
        assert "1 errors" in controller.counts.summary()
        assert "no chunk: ConnectionError: gone" in caplog.text


def test_chunks_of_another_shape_are_errors(policy):
    with control(policy, METADATA | {"actions": {"shape": [5, 2]}}, n_action_steps=2) as controller:
        begin(controller, policy)
        controller.step({})
        assert "shape (6, 2)" in controller.counts.last_error


def test_late_and_old_responses_are_counted(policy, monkeypatch, caplog):
    monkeypatch.setattr(realtime, "DISCARD_S", 0.0)
    with control(policy, latency_budget_ms=1e-6) as controller:
        begin(controller, policy)
        assert controller.step({}) is None
        assert (controller.counts.late, controller.counts.discarded, controller.counts.chunks) == (1, 1, 0)
        assert controller.counts.summary().startswith("2 control steps, 0 chunks, 1 late, 1 discarded; latency p50 ")
        assert "after its observation and is not executed (limit: 0 s)" in caplog.text


def test_age_counts_from_the_observation_and_not_from_the_start_of_its_computation(policy, monkeypatch):
    monkeypatch.setattr(realtime, "DISCARD_S", 0.1)
    with control(policy, mode="naive") as controller:
        # a loop that hung after a quick answer
        begin(controller, policy)
        time.sleep(0.15)
        assert controller.step({}) is None
        assert (controller.counts.discarded, controller.counts.chunks) == (1, 0)
        answer(controller, policy)
        assert firsts(controller, 1) == [20]
        # the rest of a running chunk after a pause: stopped, and a new one is asked for
        time.sleep(0.15)
        assert controller.step({}).tolist() == [0, 20]
        wait_for(lambda: len(policy.asked) == 3)
        # a camera that took long to answer
        controller.reset()
        controller.step({}, time.perf_counter() - 0.15)
        policy.go.release()
        answer(controller, policy)
        assert controller.step({}) is None
        assert controller.counts.discarded == 2


def test_a_request_that_waits_behind_one_before_a_reset_is_late_and_old(policy, monkeypatch):
    monkeypatch.setattr(realtime, "DISCARD_S", 0.1)
    with control(policy, latency_budget_ms=100.0) as controller:
        controller.step({"at": "before"})
        wait_for(lambda: len(policy.asked) == 1)
        for at in ("never asked", "after"):
            controller.reset()
            controller.step({"at": at})
        time.sleep(0.15)
        policy.go.release()
        answer(controller, policy)
        assert controller.step({}) is None
        assert [message.get("at") for message in policy.asked[:2]] == ["before", "after"]
        assert (controller.counts.late, controller.counts.discarded, controller.counts.chunks) == (1, 1, 0)


def test_a_drive_begins_without_the_chunk_of_the_last_one(policy):
    for _ in range(40):
        policy.go.release()
    seen, sent = [], []
    with control(policy, METADATA | {"control_hz": 100.0}, mode="naive") as controller:
        drive(lambda: {}, seen.append, controller, steps=8)
        chunks = controller.counts.chunks
        drive(lambda: {}, lambda action: sent.append(float(action[0])), controller, steps=8)
    assert seen
    assert sent[0] >= 10 * (chunks + 1)


def test_observations_are_copied(policy):
    image = np.zeros(2, np.uint8)
    with control(policy) as controller:
        controller.step({"nested": {"image": image}})
        image[:] = 1
        answer(controller, policy)
        assert policy.asked[0]["nested"]["image"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("metadata", "settings", "said"),
    [
        ({"control_hz": None}, {}, "has control_hz"),
        ({"actions": {}}, {}, r"metadata has .*, but not the shape of a chunk of actions"),
        ({"stop": None}, {}, "has stop; state what stops the arm"),
        ({}, {"stop": ["zero"] * 3}, "each of the 2 entries"),
        ({}, {"stop": ["brake"]}, "expected zero or hold"),
        ({}, {"mode": "rtc"}, "cannot continue chunks"),
        ({}, {"mode": "magic"}, "must be one of naive, blend, rtc"),
        ({}, {"n_action_steps": 6}, "leave 0 for the time"),
        ({"actions": {"shape": [1, 2]}}, {}, "train it with model.chunk above 1"),
        ({}, {"latency_budget_ms": 500.0}, "the latency budget is 500 ms. Set a smaller n_action_steps"),
        ({"latency_budget_ms": 500.0}, {}, "the latency budget is 500 ms"),
    ],
)
def test_what_is_unknown_or_too_slow_is_refused(policy, metadata, settings, said):
    with pytest.raises(UserError, match=said):
        control(policy, METADATA | metadata, **settings)


def test_one_word_stops_every_entry(policy):
    with control(policy, stop=["hold"]) as controller:
        assert controller.stop_action() is None
        assert controller.stop == ["hold", "hold"]


def test_the_watchdog_fires_once_a_stall():
    stops = threading.Semaphore(0)
    watchdog = Watchdog(0.05, stops.release)
    try:
        assert not stops.acquire(timeout=0.2), "before the first command nothing moves"
        for number in (1, 2):
            watchdog.feed()
            assert stops.acquire(timeout=30)
            assert not stops.acquire(timeout=0.2)
            assert watchdog.fired == number
    finally:
        watchdog.close()


def test_a_stop_that_fails_is_reported_and_tried_again_at_the_next_stall(caplog):
    tried = threading.Semaphore(0)

    def stop():
        tried.release()
        raise OSError("the bus is gone")

    watchdog = Watchdog(0.05, stop)
    try:
        for _ in range(2):
            watchdog.feed()
            assert tried.acquire(timeout=30)
    finally:
        watchdog.close()
    assert caplog.text.count("could not stop the arm: OSError: the bus is gone") == 2


def test_a_loop_that_hangs_is_stopped(policy):
    sent = []
    policy.go.release()

    def observe():
        if len(sent) >= 2:
            before = len(sent)
            wait_for(lambda: len(sent) > before)  # the stop of the watchdog
            raise RunError("the camera is gone")
        return {}

    with control(policy, METADATA | {"control_hz": 50.0}, mode="naive") as controller:
        with pytest.raises(RunError, match="camera"):
            drive(observe, lambda action: sent.append(action.tolist()), controller, steps=10_000)
        # the stop of the watchdog, and that at the end
        assert sent[-2:] == [[0, sent[-3][1]]] * 2
        assert controller.counts.stalled >= 1


def make_flow():
    encoder = EncoderConfig(image_size=None, state_size=2, width=16, heads=2, layers=1)
    return FlowActionPolicy.build(FlowPolicyConfig(2, 6, hidden=16, encoder=encoder), ["go right"])


def test_a_slow_flow_policy_is_driven_over_a_socket(monkeypatch):
    monkeypatch.setattr(realtime, "DISCARD_S", 60.0)
    policy = make_flow()
    policy.given = []
    act = policy.act

    def slow(*arguments, **options):
        policy.given.append(options.get("previous"))
        time.sleep(0.03)
        return act(*arguments, **options)

    policy.act = slow
    sent = []
    observation = {"observation/state": np.zeros(2, np.float32), "prompt": "go right"}
    with running(policy, stop=["zero"], latency_budget_ms=1.0) as server:
        with PolicyClient(f"ws://127.0.0.1:{server.port}", timeout_s=60.0) as client:
            settings = RealTimeSettings(control_hz=50.0, n_action_steps=2, latency_budget_ms=80.0)
            with RealTimeController(client.infer, client.metadata, settings) as controller:
                for number in range(12):
                    sent.append(controller.step(observation))
                    # answers arrive while one or two actions are executed
                    if number % 3 == 0 and controller._pending is not None:
                        wait([controller._pending], timeout=30)
                counts = controller.counts
        assert server.counts.late == server.counts.answers
        assert "over the latency budget" in server.counts.summary()
    assert (controller.mode, counts.errors) == ("rtc", 0), counts.last_error
    assert counts.chunks >= 2
    assert all(np.shape(action) == (2,) for action in sent[1:])
    guided = [given for given in policy.given if given is not None]
    assert guided
    assert all(given.actions.shape[1] <= 4 and given.limit == 5.0 for given in guided)
    assert min(counts.latency_ms) >= 30


def test_running_chunks_are_read_in_the_units_of_responses():
    policy = make_flow()
    with running(policy) as server, robot(server) as connection:
        assert connection.metadata["continues_chunks"] is True
        first = ask(connection, seen())["actions"]
        free = ask(connection, seen() | {"endpoint": "reset"})
        free = ask(connection, seen())["actions"]
        assert np.array_equal(first, free)
        ask(connection, {"endpoint": "reset"})
        held = np.full((3, 2), 0.2, np.float32)
        guided = ask(connection, seen() | {"running": {"actions": held, "delay": 3}})["actions"]
        assert np.abs(guided[:3] - held).mean() < 0.5 * np.abs(free[:3] - held).mean()
        for wrong, said in (
            ({"actions": held}, "running/delay is nothing"),
            ({"actions": held, "delay": 4}, "in 0..3"),
            ({"actions": held[:, :1], "delay": 1}, "expected finite float32 (n, 2), n in 1..6"),
            ({"delay": 1}, "running/actions is nothing"),
        ):
            assert said in ask(connection, seen() | {"running": wrong})


def test_policies_that_cannot_continue_a_chunk_say_so():
    with running(StatePolicy()) as server, robot(server) as connection:
        reply = ask(connection, seen() | {"running": {"actions": np.zeros((1, 2), np.float32), "delay": 0}})
        assert "cannot inpaint its next chunk" in reply
        assert connection.metadata["continues_chunks"] is False


def test_a_lost_connection_is_opened_again():
    with running(StatePolicy()) as server:
        client = PolicyClient(f"ws://127.0.0.1:{server.port}")
        assert client.infer(seen())["actions"].shape == (3, 2)
        client._connection.close()
        with pytest.raises(Exception, match="1000"):
            client.infer(seen())
        assert client.infer(seen())["actions"].shape == (3, 2)
        with pytest.raises(RunError, match="the server answered: message rejected"):
            client.infer({})
        client.reset()
        client.close()


def test_a_stop_that_does_not_fit_is_refused_before_serving():
    with pytest.raises(UserError, match="stop has 3 entries"), running(StatePolicy(), stop=["zero"] * 3):
        pass


def test_a_stop_declared_by_the_server_reaches_the_robot():
    policy = StatePolicy()
    with running(policy, stop=["zero", "hold"]) as server, PolicyClient(f"ws://127.0.0.1:{server.port}") as client:
        settings = RealTimeSettings(control_hz=20.0, n_action_steps=1)
        with RealTimeController(client.infer, client.metadata, settings) as controller:
            assert controller.stop == ["zero", "hold"]
