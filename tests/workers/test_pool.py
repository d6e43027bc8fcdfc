import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mmrl.errors import RunError, UserError
from mmrl.workers import Message, Preparation, Request, WorkerFailure, WorkerPool, WorkerSpec, engine
from tests.programs import wait_until

SERVICES = Path(__file__).with_name("services.py")
COUNTS = {"crashed": 0, "hung": 0, "memory": 0, "raised": 0, "restarted": 0}


@pytest.fixture
def make(closing):
    def build(size=1, function="make", *, max_restarts=None, engine=None, options=None, **spec):
        limits = {"start_timeout_s": 30.0, "closing_s": 0.0}
        spec = WorkerSpec(f"{SERVICES}:{function}", options or {}, purpose="tests", **{**limits, **spec})
        return closing(WorkerPool(spec, size, max_restarts=max_restarts, goal="good answer", engine=engine))

    return build


def do(name, **fields):
    return Request({"do": name, **fields})


def run(pool, names, timeout_s=20.0, **options):
    """Answers to requests by name; a value for echo requests."""
    answers = pool.map(lambda row: do(names[row], value=row), len(names), timeout_s, **options)
    return [answer.fields.get("echo") if isinstance(answer, Message) else answer.kind for answer in answers]


def is_gone(pid):
    """Whether the process ended with all its threads: its first thread may be a zombie while others still end."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except (FileNotFoundError, ProcessLookupError):
        return True


class TestMap:
    @pytest.mark.parametrize("size", [1, 2])
    def test_a_failure_is_charged_to_the_running_request_and_queued_ones_continue(self, make, hanging, size):
        pool = make(size)
        names = ["echo"] * 3 + ["complain"] + ["echo"] * 3 + ["die"] + ["echo"] * 12 + ["sleep", "echo"]
        expected = list(range(len(names)))
        expected[3], expected[7], expected[-2] = "raised", "crashed", "hung"
        answers = pool.map(lambda row: do(names[row], value=row, seconds=60), len(names), 0.7)
        found = [answer.fields["echo"] if isinstance(answer, Message) else answer.kind for answer in answers]
        assert found == expected
        assert (answers[3].reason, answers[3].stage) == ("ValueError: the hinge broke", "answer")
        assert "in complain" in answers[3].evidence
        assert answers[7].reason == "killed by SIGKILL; its last output was: the last words"
        assert (answers[7].exit_code, answers[7].evidence) == (-signal.SIGKILL, "the last words")
        assert (answers[-2].reason, answers[-2].limit_s) == ("no reply within 0.7 s", 0.7)
        assert {**pool.counts, "restarted": 0} == COUNTS | {"crashed": 1, "hung": 1, "raised": 1}

    def test_requests_are_spread_and_workers_start_when_they_are_needed(self, make):
        pool = make(3)
        assert pool.processes() == []
        run(pool, ["echo"])
        assert len(pool.processes()) == 1
        answers = pool.map(lambda row: do("pid", seconds=0.02), 48, 20.0)
        counts = Counter(answer.fields["pid"] for answer in answers)
        assert set(counts) == set(pool.processes())
        assert len(counts) == 3
        assert max(counts.values()) < 40

    def test_a_limit_is_for_each_request_not_for_those_in_front_of_it(self, make):
        answers = make().map(lambda row: do("sleep", seconds=0.5), 8, 3.5)
        assert all(isinstance(answer, Message) for answer in answers)

    def test_the_rest_is_given_up_when_all_together_took_too_long(self, make):
        pool = make()
        pool.start()
        answers = pool.map(lambda row: do("sleep", seconds=0.0 if row < 3 else 600.0), 6, 1000.0, total_s=4.0)
        assert all(isinstance(answer, Message) for answer in answers[:3])
        assert {(answer.kind, answer.stage, answer.limit_s) for answer in answers[3:]} == {("hung", "total", 4.0)}
        assert pool.processes() == []
        assert run(pool, ["echo"]) == [0]

    def test_a_request_that_cannot_be_made_or_sent_costs_itself(self, make):
        def make_request(row):
            if row == 1:
                raise KeyError("no such picture")
            return Request({"do": "echo", "value": row}, {"x": np.array([object()] if row == 3 else [row])})

        answers = make().map(make_request, 5, 20.0)
        assert [answer.fields["echo"] for answer in answers if isinstance(answer, Message)] == [0, 2, 4]
        assert (answers[1].stage, answers[1].reason) == ("send", "KeyError: 'no such picture'")
        assert answers[3].reason.startswith("WireError: array 'x' has dtype object")

    def test_no_requests_start_no_worker(self, make):
        pool = make()
        assert pool.map(lambda row: do("echo"), 0, 1.0) == []
        assert pool.processes() == []

    def test_messages_larger_than_a_pipe_do_not_block_each_other(self, make):
        big = np.arange(300_000, dtype=np.float64)
        answers = make(2).map(lambda row: Request({"do": "echo"}, {"x": big + row}), 40, 20.0)
        for row, answer in enumerate(answers):
            np.testing.assert_array_equal(answer.arrays["x"], big + row)

    def test_a_worker_that_died_while_idle_costs_nothing(self, make):
        pool = make(2)
        run(pool, ["echo"] * 8)
        old = pool.processes()
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: all(map(is_gone, old)))
        assert run(pool, ["echo"] * 8) == list(range(8))
        assert pool.counts["crashed"] == 0

    def test_an_answer_that_is_not_json_is_a_failure(self, make):
        (answer,) = make().map(lambda row: do("not_json"), 1, 20.0)
        assert answer.kind == "raised"
        assert "must be JSON" in answer.reason


class TestPreparation:
    def test_it_comes_first_and_once_for_each_worker(self, make):
        pool = make(2)
        first = Preparation("seven", do("keep", value=7), 20.0)
        answer = pool.prepare(first)
        assert answer.fields["pid"] == pool.processes()[0]
        assert pool.prepare(first) == answer
        for _ in range(2):
            answers = pool.map(lambda row: do("show"), 32, 20.0, preparation=first)
            assert [answer.fields["kept"] for answer in answers] == [7] * 32
        pool.map(lambda row: do("keep", value=9), 1, 20.0)
        answers = pool.map(lambda row: do("show"), 32, 20.0, preparation=first)
        assert {answer.fields["kept"] for answer in answers} <= {7, 9}  # nobody was prepared again
        assert 9 in {answer.fields["kept"] for answer in answers}

    def test_a_failure_of_it_is_that_of_all_requests(self, make):
        answers = make(2).map(lambda row: do("echo"), 20, 20.0, preparation=Preparation("x", do("leave"), 20.0))
        assert {(answer.kind, answer.stage, answer.exit_code) for answer in answers} == {("crashed", "prepare", 7)}

    def test_its_own_time_limit_counts(self, make):
        slow = Preparation("x", do("sleep", seconds=1.5), 20.0)
        assert isinstance(make().map(lambda row: do("echo"), 1, 1.0, preparation=slow)[0], Message)
        failure = make().prepare(Preparation("x", do("sleep", seconds=60), 0.5))
        assert (failure.kind, failure.stage, failure.limit_s) == ("hung", "prepare", 0.5)

    def test_a_worker_that_does_not_start_fails_all_requests(self, make):
        answers = make(function="broken").map(lambda row: do("echo"), 3, 20.0)
        assert {(answer.stage, answer.reason) for answer in answers} == {("start", "OSError: no licence found")}


class TestAsk:
    def test_every_slot_keeps_its_own_state(self, make):
        pool = make(3)
        assert pool.start().fields["name"] == ""
        pool.ask({slot: do("keep", value=slot) for slot in range(3)}, 20.0)
        answers = pool.ask({slot: do("show") for slot in (2, 0)}, 20.0)
        assert {slot: answer.fields["kept"] for slot, answer in answers.items()} == {2: 2, 0: 0}

    def test_three_fail_and_the_others_answer(self, make):
        pool = make(5, heartbeat_timeout_s=20.0)
        pool.start()
        old = pool.processes()
        requests = {0: do("die"), 1: do("echo"), 2: do("sleep", seconds=60), 3: do("complain"), 4: do("echo")}
        answers = pool.ask(requests, 1.5)
        assert [answers[slot].kind if slot in (0, 2, 3) else "" for slot in range(5)] == [
            "crashed",
            "",
            "hung",
            "raised",
            "",
        ]
        assert all(is_gone(old[slot]) for slot in (0, 2, 3))
        assert pool.processes() == [old[1], old[4]]
        assert pool.counts == COUNTS | {"crashed": 1, "hung": 1, "raised": 1}
        pool.start_missing()
        assert pool.counts["restarted"] == 3
        assert all(
            isinstance(answer, Message) for answer in pool.ask(dict.fromkeys(range(5), do("echo")), 20.0).values()
        )

    def test_an_answer_can_be_refused(self, make):
        def check(request, answer):
            return WorkerFailure("raised", "too large") if answer.fields["echo"] > request.fields["most"] else None

        pool = make(2)
        answers = pool.ask({slot: do("echo", value=slot, most=0) for slot in range(2)}, 20.0, check=check)
        assert isinstance(answers[0], Message)
        assert answers[1].reason == "too large"
        assert pool.counts["raised"] == 1
        assert len(pool.processes()) == 1

    def test_a_request_is_tried_again_in_a_fresh_process(self, make, tmp_path):
        pool = make(2, options={"marks": str(tmp_path)})
        answers = pool.ask_with_retries({0: do("once"), 1: do("echo", value=3)}, 20.0, retries=1)
        assert answers[0].fields["pid"] in pool.processes()
        assert answers[1].fields["echo"] == 3
        assert pool.counts == COUNTS | {"crashed": 1, "restarted": 1}
        assert (tmp_path / "first").exists()

    def test_retries_end_with_the_failure(self, make):
        pool = make()
        assert pool.ask_with_retries({0: do("complain")}, 20.0, retries=2)[0].kind == "raised"
        assert pool.counts["raised"] == 3

    def test_restarts_without_end_stop_with_the_last_traceback(self, make):
        message = r"3 restarts without one good answer; the last worker raised: ValueError(.|\n)*in complain"
        with pytest.raises(RunError, match=message):
            make(max_restarts=2).ask_with_retries({0: do("complain")}, 20.0, retries=9)

    def test_a_success_forgives_the_restarts_before_it(self, make):
        pool = make(max_restarts=2)
        for _ in range(3):
            assert pool.ask_with_retries({0: do("complain")}, 20.0, retries=1)[0].kind == "raised"
            pool.note_success()
        assert pool.counts["restarted"] == 5

    def test_a_mistake_of_the_user_closes_the_pool_and_is_raised_as_it_was_said(self, make):
        pool = make(2)
        with pytest.raises(UserError, match=r"^buy a larger arm$"):
            pool.ask({0: do("refuse"), 1: do("echo")}, 20.0)
        assert pool.closed
        assert pool.processes() == []

    def test_the_answer_to_an_interrupted_request_is_not_taken_for_the_next(self, make, monkeypatch):
        pool = make()
        pool.start()
        with monkeypatch.context() as patch:
            patch.setattr(pool._slots, "gather", lambda slots: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                pool.ask({0: do("echo", value="old")}, 20.0)
        assert pool.ask({0: do("echo", value="new")}, 20.0)[0].fields["echo"] == "new"


class TestStart:
    @pytest.mark.parametrize(
        ("function", "options", "reason", "for_user"),
        [
            ("broken", {}, "OSError: no licence found", False),
            ("unusable", {}, "set ARM_FOLDER to where the arms lie", True),
            ("missing", {}, "AttributeError", False),
            ("make", {"nme": "x"}, "TypeError.*nme", False),
        ],
    )
    def test_what_does_not_start_says_why(self, make, function, options, reason, for_user):
        pool = make(2, function, options=options)
        failure = pool.start()
        assert (failure.kind, failure.stage, failure.for_user) == ("raised", "start", for_user)
        assert re.match(reason, failure.reason.replace("\n", " "))
        assert pool.closed

    def test_one_that_does_not_start_is_replaced_later(self, make, tmp_path):
        pool = make(2, options={"marks": str(tmp_path), "flaky": True})
        assert isinstance(pool.start(), Message)
        assert pool.counts == COUNTS | {"crashed": 1}
        assert len(pool.processes()) == 1
        pool.start_missing()
        answers = pool.ask({0: do("echo"), 1: do("echo")}, 20.0)
        assert all(isinstance(answer, Message) for answer in answers.values())
        assert pool.counts["restarted"] == 1

    def test_an_interpreter_that_is_not_there(self, make):
        with pytest.raises(RunError, match=r"cannot start a worker process for tests: .*nowhere"):
            make(python="/nowhere/python").start()


class TestHeartbeat:
    def test_code_that_keeps_pythons_lock_is_found_before_the_time_of_a_call_is_over(self, make, hanging):
        pool = make(heartbeat_timeout_s=1.0)
        pool.start()
        answer = pool.ask({0: do("lock")}, 100.0)[0]
        assert (answer.kind, answer.reason, answer.limit_s) == ("hung", "no heartbeat for 1 s", 1.0)

    def test_without_a_heartbeat_only_the_time_of_a_call_counts(self, make):
        pool = make(heartbeat_timeout_s=None)
        pool.start()
        start = time.monotonic()
        assert pool.ask({0: do("lock")}, 1.5)[0].reason == "no reply within 1.5 s"
        assert time.monotonic() - start >= 1.5

    def test_a_slow_answer_with_a_heartbeat_does_not_count_as_hung(self, make):
        pool = make(heartbeat_timeout_s=5.0)
        pool.start()
        assert isinstance(pool.ask({0: do("sleep", seconds=6.0)}, 60.0)[0], Message)


class TestTrust:
    def test_a_worker_that_writes_without_end_keeps_nobody(self, monkeypatch):
        monkeypatch.setattr(engine.os, "read", lambda fd, count: b"x")
        data, closed = engine._drain(0)
        assert data
        assert not closed

    def test_a_pickle_from_a_worker_is_never_loaded(self, make, tmp_path):
        bomb = tmp_path / "exploded"
        (answer,) = make().map(lambda row: do("write", what="pickle", path=str(bomb)), 1, 20.0)
        assert answer.kind == "crashed"
        assert "something else writes to this pipe" in answer.reason
        assert not bomb.exists()

    @pytest.mark.parametrize(
        "rest", [{}, {"kind": "result"}, {"kind": "result", "body": 3}, {"kind": "error", "body": {}}]
    )
    def test_a_message_that_lacks_something_is_a_crash(self, make, rest):
        message = {"id": 1, **rest}
        (answer,) = make().map(lambda row: do("write", what="message", message=message, path=""), 1, 20.0)
        assert answer.kind == "crashed"
        assert "malformed" in answer.reason

    def test_garbage_is_a_crash_and_the_next_request_has_another_worker(self, make):
        answers = make().map(lambda row: do("echo" if row else "write", what="garbage", path="", value=row), 3, 20.0)
        assert answers[0].kind == "crashed"
        assert [answer.fields["echo"] for answer in answers[1:]] == [1, 2]


class TestProcesses:
    def test_the_same_interpreter_finds_the_same_modules(self, make, monkeypatch, tmp_path):
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
        names = ["numpy", "mmrl.errors", "torch"]
        (answer,) = make().map(lambda row: do("modules", names=names), 1, 20.0)
        assert answer.fields["loaded"] == []  # messages without arrays need no numpy
        assert str(tmp_path) in answer.fields["path"]
        assert str(SERVICES.parent) not in answer.fields["path"]

    def test_another_interpreter_does_not(self, make, monkeypatch, tmp_path):
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
        (answer,) = make(python=sys.executable).map(lambda row: do("modules", names=[]), 1, 20.0)
        assert str(tmp_path) not in answer.fields["path"]
        assert answer.fields["path"][0] == os.getcwd()

    def test_ctrl_c_in_the_terminal_leaves_the_services_to_their_pool(self, make):
        pool = make()
        pool.start()
        os.kill(*pool.processes(), signal.SIGINT)
        assert run(pool, ["echo"]) == [0]
        assert pool.counts == COUNTS

    def test_close_lets_services_close_and_leaves_no_process(self, make, tmp_path):
        pool = make(2, options={"marks": str(tmp_path)}, closing_s=5.0)
        pool.start()
        pids = pool.processes()
        pool.close()
        assert sorted(map(int, (tmp_path / "closed").read_text().split())) == sorted(pids)
        assert all(map(is_gone, pids))
        assert run(pool, ["echo"]) == [0]
        assert not pool.closed

    def test_what_a_worker_started_ends_with_it(self, make, tmp_path):
        run(make(options={"marks": str(tmp_path)}), ["child"])
        child = int((tmp_path / "child").read_text())
        wait_until(lambda: is_gone(child))

    def test_from_several_threads(self, make):
        pool, found = make(2), {}

        def work(number):
            answers = pool.map(lambda row: do("echo", value=[number, row]), 20, 20.0)
            found[number] = [answer.fields["echo"] for answer in answers]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {number: [[number, row] for row in range(20)] for number in range(4)}

    def test_no_worker_outlives_an_owner_whose_fork_holds_its_pipes(self):
        program = f"""
import os, signal, time
from mmrl.workers import Request, WorkerPool, WorkerSpec
pool = WorkerPool(WorkerSpec({str(SERVICES)!r} + ":make"), 2)
pool.start()
fork = os.fork()
if fork == 0:
    os.close(1)
    time.sleep(60)
    os._exit(0)
print(*pool.processes(), fork, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
        *workers, fork = map(int, done.stdout.split())
        try:
            wait_until(lambda: all(map(is_gone, workers)))
            assert not is_gone(fork)
        finally:
            os.kill(fork, signal.SIGKILL)

    def test_a_forked_copy_of_the_owner_ends_nothing(self):
        program = f"""
import os
from mmrl.workers import Message, Request, WorkerPool, WorkerSpec
pool = WorkerPool(WorkerSpec({str(SERVICES)!r} + ":make"), 1)
pool.start()
fork = os.fork()
if fork == 0:
    raise SystemExit(0)
os.waitpid(fork, 0)
print(isinstance(pool.ask({{0: Request({{"do": "echo"}})}}, 20.0)[0], Message))
"""
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
        assert done.stdout.strip() == "True"
