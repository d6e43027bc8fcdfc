"""The pool with a different engine: services in this process that answer at once."""

import itertools
import time

import pytest

from mmrl.errors import UserError
from mmrl.workers import Message, Preparation, Request, WorkerFailure, WorkerPool, WorkerSpec, wire
from mmrl.workers.engine import Ending
from mmrl.workers.serve import load_file
from mmrl.workers.worker import Worker
from tests.workers.test_pool import SERVICES, do


class InlineWorker:
    numbers = itertools.count(1)

    def __init__(self, spec):
        self.pid, self.killed, self.inbox, self.ending = next(self.numbers), False, [], None
        self.heard_at, self.loading_at, self.receiving = time.monotonic(), 0.0, False
        self.taken_at = self.heard_at
        file, _, name = spec.service.rpartition(":")
        self.service = getattr(load_file(file, "inline_service"), name)(**spec.options)
        self.inbox.append(Message({"kind": "hello", "id": 0, "body": self.service.hello()}, {}))

    def send(self, fields, arrays=None):
        wire.pack(fields, arrays)
        body = fields["body"]
        if body["do"] == "vanish":
            self.ending = Ending("its machine is gone")
            return
        try:
            result, arrays = self.service.answer(body, arrays or {})
            self.inbox.append(Message({"kind": "result", "id": fields["id"], "body": result}, arrays))
        except Exception as error:
            self.inbox.append(Message({"kind": "error", "id": fields["id"], "body": wire.describe_error(error)}, {}))

    def flush(self):
        pass

    def receive(self):
        found, self.inbox = self.inbox, []
        return found

    def last_output(self):
        return ""

    def ask_to_end(self):
        self.service.close()

    def has_ended(self):
        return self.killed or self.ending is not None

    def kill(self):
        self.killed = True


class InlineEngine:
    def __init__(self):
        self.started = []

    def start(self, spec):
        self.started.append(InlineWorker(spec))
        return self.started[-1]

    def wait(self, timeout_s):
        assert timeout_s <= 1000.0


@pytest.fixture
def engine():
    return InlineEngine()


@pytest.fixture
def pool(engine):
    with WorkerPool(WorkerSpec(f"{SERVICES}:make"), 2, engine=engine) as pool:
        yield pool


def test_requests_are_spread(pool, engine):
    first = Preparation("kept", do("keep", value=1), 1.0)
    answers = pool.map(lambda row: do("echo", value=row), 50, 1.0, preparation=first)
    assert [answer.fields["echo"] for answer in answers] == list(range(50))
    assert [worker.service.kept for worker in engine.started] == [1, 1]


def test_failures_cost_their_own_request(pool, engine):
    names = ["echo", "vanish", "complain", "echo"]
    answers = pool.map(lambda row: do(names[row]), 4, 1.0)
    assert [answer.kind if isinstance(answer, WorkerFailure) else "" for answer in answers] == [
        "",
        "crashed",
        "raised",
        "",
    ]
    assert answers[1].reason == "its machine is gone"
    assert pool.counts["crashed"] == pool.counts["raised"] == 1
    assert {worker.pid for worker in engine.started if not worker.killed} == set(pool.processes())


def test_slots_and_mistakes_of_the_user(pool, engine):
    assert isinstance(pool.start(), Message)
    assert isinstance(pool.ask({0: Request({"do": "echo"}), 1: do("complain")}, 1.0)[1], WorkerFailure)
    with pytest.raises(UserError, match="buy a larger arm"):
        pool.ask({0: do("refuse")}, 1.0)
    assert all(worker.killed for worker in engine.started)


def test_submitted_requests_are_answered_when_they_are_ready(pool, engine):
    assert pool.poll() == {}
    pool.submit(0, do("echo", value=1), 1.0)
    pool.submit(1, do("vanish"), 1.0)
    found = {}
    while len(found) < 2:
        found |= pool.poll()
    assert (found[0].fields["echo"], found[1].kind) == (1, "crashed")
    assert (pool.poll(), engine.started[1].killed, pool.counts["crashed"]) == ({}, True, 1)
    pool.submit(0, do("echo", value=2), 1.0)
    # `ask` and `forget` take the place of what was submitted
    assert pool.ask({0: do("echo", value=3)}, 1.0)[0].fields["echo"] == 3
    pool.submit(0, do("echo", value=4), 1.0)
    pool.forget(0)
    assert pool.poll(0.0) == {}
    pool.submit(1, do("echo", value=5), 1.0, check=lambda request, answer: WorkerFailure("crashed", "not what I asked"))
    assert pool.poll()[1].reason == "not what I asked"


@pytest.mark.parametrize(("receiving", "kinds"), [(False, ["hung"]), (True, [])])
def test_an_answer_that_is_arriving_is_not_late(engine, receiving, kinds):
    """A full pipe makes a worker wait while this process does something else."""
    worker = Worker(engine, WorkerSpec(f"{SERVICES}:make"))
    worker.collect()
    worker.send(do("echo"), 10.0)
    worker.handle.inbox.clear()
    worker._since, worker.handle.taken_at = time.monotonic() - 100, time.monotonic() - 100
    worker.handle.receiving = receiving
    assert [answer.kind for _, answer in worker.collect()] == kinds
