"""Units of a step in workers: the rows of one process in its order, whatever happens to the workers."""

import dataclasses
import logging
import os
import pickle
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmrl.entries import RecipeEntry
from mmrl.errors import RunError, UserError
from mmrl.fields import check_config
from mmrl.training.processes import SimCounts, Streams, make_accelerator
from mmrl.training.ray_rollers import RayLink, RayRollers, check_processes, open_rollers
from mmrl.training.recipe import NoUsableTasksError, Step
from mmrl.training.rollers import (
    Dealer,
    Hello,
    LocalRollers,
    Lost,
    NotStarted,
    Raised,
    UnitOutcome,
    cut,
    joined,
    sampled,
)
from mmrl.training.rollout_worker import (
    RolloutWorker,
    WorkerJob,
    add_notes,
    begin_notes,
    checksum,
    load_weights,
    notes_since,
    trained_weights,
    versions,
)
from mmrl.training.settings import CheckpointConfig, RollersConfig, TrainerConfig
from tests.training.toy import ToyConfig, ToyRecipe

ENTRY = RecipeEntry("toy", "tests.training.toy:ToyRecipe:ToyConfig", "", "")
TASKS, STREAMS, STEP = [3, 0, 5, 2, 4], Streams(7, [0, 1, 2, 3, 4]), Step(1, 4)


def config() -> ToyConfig:
    return ToyConfig(trainer=TrainerConfig(samples_per_task=4, tasks_per_step=5))


def job(**changes) -> bytes:
    frozen = checksum(ToyRecipe(config()).policy, trained=False)
    return pickle.dumps(dataclasses.replace(WorkerJob(ENTRY, config(), os.getcwd(), versions(), frozen), **changes))


def worker() -> RolloutWorker:
    found = RolloutWorker()
    assert isinstance(found.open(job()), Hello)
    return found


class Crew:
    """Workers in this process that answer last come, first served; some are lost."""

    def __init__(self, lost: Counter[int] | None = None, answers: list | None = None) -> None:
        self.lost, self.starts = lost or Counter(), list(answers or ())
        self.workers: dict[int, RolloutWorker] = {}
        self.queue: list[tuple[int, object]] = []
        self.asked: list[int] = []
        self.weights, self.sent = None, []

    def start(self) -> int:
        number = len(self.workers) + 1
        self.workers[number] = worker()
        self.queue.append((number, self.starts.pop(0) if self.starts else Hello("here", "cpu")))
        return number

    def ask(self, number: int) -> None:
        self.asked.append(number)
        self.queue.append((number, Hello("here", "cpu")))

    def send(self, number: int, unit) -> None:
        assert number not in [worker for worker, _ in self.queue], "a worker has one unit at a time"
        place = unit.streams.places[0]
        self.sent.append((number, place))
        if self.lost[place]:
            self.lost[place] -= 1
            self.queue.append((number, Lost("killed")))
            return
        if self.weights is not None:
            self.workers[number].load(*self.weights)
        self.queue.append((number, self.workers[number].work(unit)))

    def wait(self):
        return self.queue.pop()


def test_rows_come_back_in_order_with_equal_bits_also_after_losses():
    recipe = ToyRecipe(config())
    with torch.no_grad():
        recipe.policy.table.normal_(generator=torch.Generator().manual_seed(0))
    local = LocalRollers(recipe, make_accelerator())
    expected = local.score(local.rollout(TASKS, STREAMS, STEP), STREAMS, STEP)
    crew = Crew(Counter({1: 2, 3: 1}))
    crew.weights = trained_weights(recipe.policy), checksum(recipe.policy, trained=True)
    dealer = Dealer(crew, 2, tries=3)
    found = joined(list(dealer.run(cut(TASKS, STREAMS, STEP, 1))))
    assert found.payload.tasks == TASKS
    assert torch.equal(found.payload.ids, expected.payload.ids)
    assert torch.equal(found.logp_old, expected.logp_old)
    assert torch.equal(found.reward, expected.reward)
    assert torch.equal(found.group, expected.group)
    assert dealer.again == 3
    assert [place for _, place in crew.sent if place == 1] == [1, 1, 1]


def test_a_unit_that_is_cut_here_is_the_unit_of_a_worker():
    recipe = ToyRecipe(config())
    whole, units = LocalRollers(recipe, make_accelerator()), LocalRollers(recipe, make_accelerator(), 2)
    expected, found = (each.score(each.rollout(TASKS, STREAMS, STEP), STREAMS, STEP) for each in (whole, units))
    assert torch.equal(found.reward, expected.reward)
    assert recipe.seen_tasks == [TASKS, TASKS[:2], TASKS[2:4], TASKS[4:]]


def test_a_unit_that_loses_every_worker_is_left_out_and_the_others_stay():
    outcomes = list(Dealer(Crew(Counter({2: 9})), 2, tries=3).run(cut(TASKS, STREAMS, STEP, 1)))
    assert [outcome.lost for outcome in outcomes] == [False, False, True, False, False]
    assert joined(outcomes).payload.tasks == [3, 0, 2, 4]


def test_a_step_whose_units_are_all_lost_ends_the_run():
    outcomes = list(Dealer(Crew(Counter(dict.fromkeys(range(5), 9))), 2, tries=2).run(cut(TASKS, STREAMS, STEP, 1)))
    with pytest.raises(RunError, match="2 rollout workers were lost on the same tasks; the last one: killed"):
        joined(outcomes)


def test_work_goes_to_workers_that_have_answered_since_a_loss():
    crew = Crew(Counter({0: 1}))
    dealer = Dealer(crew, 3, tries=3)
    while len(dealer._free) < 3:
        dealer.start()
    list(dealer.run(cut(TASKS[:1], Streams(7), STEP, 1)))
    assert sorted(crew.asked) == sorted({1, 2, 3} - {crew.sent[0][0]})


def test_workers_that_do_not_start_end_the_run():
    with pytest.raises(RunError, match="4 rollout workers in a row were lost; the last one: no memory"):
        Dealer(Crew(answers=[Lost("no memory")] * 9), 1, tries=3).start()
    with pytest.raises(UserError, match="no module 'lost'"):
        Dealer(Crew(answers=[NotStarted("no module 'lost'")]), 1, tries=3).start()
    with pytest.raises(ZeroDivisionError):
        Dealer(Crew(answers=[Raised(ZeroDivisionError(), "")]), 1, tries=3).start()


class TrialCrew(Crew):
    """Workers that run trials with the weights that the rollers have put."""

    def __init__(self, lost: Counter[int]) -> None:
        super().__init__(lost)
        self.numbers, self.references = (0, 0), (None, None)

    def send(self, number: int, unit) -> None:
        place = unit.tasks[0].index
        self.sent.append((number, place))
        if self.lost[place]:
            self.lost[place] -= 1
            self.queue.append((number, Lost("killed")))
            return
        self.workers[number].load(*self.references[0])
        self.queue.append((number, self.workers[number].work(unit)))


def ray_rollers(recipe: ToyRecipe, lost: Counter[int], monkeypatch) -> RayRollers:
    """Rollers whose Ray is this process."""
    errors = SimpleNamespace(ObjectStoreFullError=MemoryError, OutOfDiskError=OSError)
    ray = SimpleNamespace(put=lambda content: content, exceptions=errors)
    monkeypatch.setitem(sys.modules, "ray", ray)
    for name, stand_in in (("_connect", lambda *_: RayLink(owned=False)), ("_check_room", lambda _: None)):
        monkeypatch.setattr(f"mmrl.training.ray_rollers.{name}", stand_in)
    monkeypatch.setattr("mmrl.training.ray_rollers.RayCrew", lambda *_: TrialCrew(lost))
    config = dataclasses.replace(recipe.config, rollers=RollersConfig(engine="ray"))
    return RayRollers(recipe, config, make_accelerator(), Path(), ENTRY)


def test_an_evaluation_in_workers_has_the_numbers_of_one_process(monkeypatch):
    recipe = ToyRecipe(config())
    with torch.no_grad():
        recipe.policy.table.normal_(generator=torch.Generator().manual_seed(0))
    expected = LocalRollers(recipe, make_accelerator()).evaluate("all", STEP).metrics
    assert 0 < expected["accuracy/greedy"] < 1
    rollers = ray_rollers(recipe, Counter({2: 2}), monkeypatch)
    assert rollers.evaluate("all", STEP).metrics == expected
    with torch.no_grad():
        recipe.policy.table[torch.arange(6), :, torch.arange(6) % 4] = 9.0
    assert rollers.evaluate("all", STEP).metrics == {"n": 6.0, "accuracy/greedy": 1.0}


def test_an_evaluation_counts_the_trials_that_no_worker_ends(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # the folder of the run is that of the program
    found = ray_rollers(ToyRecipe(config()), Counter({4: 9}), monkeypatch).evaluate("all", STEP)
    assert found.metrics["lost"] == 2
    assert found.metrics["n"] == 4
    with pytest.raises(RunError, match="no rollout worker has completed a trial of all"):
        ray_rollers(ToyRecipe(config()), Counter(dict.fromkeys(range(6), 9)), monkeypatch).evaluate("all", STEP)


@pytest.mark.parametrize("ask", [lambda r: r.evaluate("all", STEP), lambda r: r.rollout(TASKS, STREAMS, STEP)])
def test_a_full_object_store_says_what_to_enlarge(ask, monkeypatch):
    rollers = ray_rollers(ToyRecipe(config()), Counter(), monkeypatch)

    def full(content):
        raise MemoryError("1 GB do not fit")

    rollers._ray.put = full
    with pytest.raises(
        RunError,
        match=r"store is full \(1 GB do not fit\); lower .* start a cluster with a larger one, `ray start --head",
    ):
        ask(rollers)


class Choosy(ToyRecipe):
    """Cannot use odd tasks."""

    def rollout(self, policy, tasks, streams, step):
        usable = [task for task in tasks if not task % 2]
        if not usable:
            raise NoUsableTasksError(f"{tasks} are odd")
        return super().rollout(policy, usable, streams.among(tasks, usable), step)


def test_tasks_that_cannot_be_used_are_left_out_as_in_one_process():
    recipe = Choosy(config())
    outcomes = [sampled(recipe, unit, make_accelerator()) for unit in cut(TASKS, STREAMS, STEP, 1)]
    assert joined(outcomes).payload.tasks == [0, 2, 4]
    with pytest.raises(NoUsableTasksError, match=r"\[3\] are odd"):
        joined(outcomes[:1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"versions": {"torch": "0.1"}}, r"has torch .*, but the training process has 0\.1; install the same version"),
        ({"versions": {"mujoco": "99"}}, "the training process has 99"),
        ({"folder": "/no/such/folder"}, "does not have the folder /no/such/folder, in which the run was started"),
        ({"frozen": 1}, "different frozen weights from the model of the training process"),
    ],
)
def test_a_worker_that_differs_refuses_by_name(changes, reason):
    answer = RolloutWorker().open(job(**changes))
    assert isinstance(answer, NotStarted)
    assert re.search(reason, answer.reason)


def test_a_worker_without_the_users_module_names_it():
    answer = RolloutWorker().open(job().replace(b"mmrl.entries", b"mmrl.emptied"))
    assert isinstance(answer, NotStarted)
    assert "has no module 'mmrl.emptied'; install it on every node" in answer.reason


def test_weights_arrive_whole_or_not_at_all():
    sender, receiver = ToyRecipe(config()).policy, worker()
    with torch.no_grad():
        sender.shared.copy_(torch.tensor([0.5, -1.0, 3.0, 0.0]))
    weights, expected = trained_weights(sender), checksum(sender, trained=True)
    receiver.load(weights, expected)
    assert torch.equal(receiver._recipe.policy.shared, sender.shared)
    damaged = {name: (content.copy(), kind) for name, (content, kind) in weights.items()}
    damaged["shared"][0][0] ^= 1
    with pytest.raises(RunError, match="were damaged on the way"):
        receiver.load(damaged, expected)
    with pytest.raises(RunError, match="trains different weights from the training process: shared"):
        load_weights(sender, {"table": weights["table"]})


def test_a_worker_takes_on_the_type_of_the_weights():
    sender, receiver = ToyRecipe(config()).policy.to(torch.bfloat16), worker()
    receiver.load(trained_weights(sender), checksum(sender, trained=True))
    assert receiver._recipe.policy.table.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
def test_checksum_sees_every_bit(kind):
    layer = torch.nn.Linear(3, 1).to(kind)
    before = checksum(layer, trained=True)
    with torch.no_grad():
        layer.weight[0, 2] = torch.nextafter(layer.weight[0, 2].float(), torch.tensor(9.0)).to(kind) + 0.125
    assert checksum(layer, trained=True) != before
    assert checksum(layer, trained=False) == 0


class Counts:
    def __init__(self) -> None:
        self.counts = Counter(crashed=2)


def test_what_a_recipe_notes_in_a_worker_arrives(tmp_path):
    def noting() -> ToyRecipe:
        recipe = ToyRecipe(config())
        recipe.sim = Counts()
        recipe.added |= {"seen": Counter(), "fresh": [], "counts": SimCounts(recipe.sim, tmp_path)}
        return recipe

    here, there = noting(), noting()
    there.added["seen"]["return"], there.added["seen"]["done"] = -1.0, 4
    before = begin_notes(there)
    there.added["seen"]["return"] -= 2.5
    there.added["seen"]["success"] += 1
    there.added["fresh"].append("episode")
    there.sim.counts["crashed"] += 3
    there.extra_samples, there.noted["agreement"] = 5, 0.5
    here.added["fresh"].append("older")
    for _ in range(2):
        add_notes(here, notes_since(there, before))
    assert here.added["seen"] == {"return": -5.0, "success": 2, "done": 0}
    assert here.added["fresh"] == ["older", "episode", "episode"]
    assert here.added["counts"].metrics() == {"sim/crashed": 8.0}
    assert here.extra_samples == 10
    assert here.noted == {"agreement": 0.5}


def test_what_a_worker_logs_and_writes_is_sent(monkeypatch, caplog):
    receiver = worker()
    rollout = receiver._recipe.rollout

    def noisy(*given):
        logging.getLogger("mmrl").warning("a %s broke", "lamp")
        folder = Path(receiver._recipe.config.output_dir) / "failures"
        folder.mkdir(exist_ok=True)
        (folder / "lamp.txt").write_text("why")
        return rollout(*given)

    monkeypatch.setattr(receiver._recipe, "rollout", noisy)
    outcome = receiver.work(cut(TASKS, STREAMS, STEP, 5)[0])
    assert isinstance(outcome, UnitOutcome)
    assert list(outcome.logs) == [(30, "a lamp broke")]
    assert outcome.files == {"failures/lamp.txt": b"why"}
    assert receiver.work(cut(TASKS, STREAMS, STEP, 5)[0]).files == {"failures/lamp.txt": b"why"}


def test_options_of_workers_need_an_engine_of_workers():
    with pytest.raises(ValueError, match=r"rollers\.overlap is True"):
        check_config(RollersConfig(overlap=True), "rollers")
    with pytest.raises(ValueError, match=r"engine is 'local'; leave it at 0\.0, or set rollers\.engine: ray"):
        check_config(RollersConfig(num_gpus=1.0), "rollers")
    check_config(RollersConfig(unit=2), "rollers")
    recipe = ToyRecipe(config())
    assert isinstance(open_rollers(recipe, recipe.config, make_accelerator(), None), LocalRollers)


def test_processes_that_could_not_use_workers_are_refused_by_name(monkeypatch):
    two = SimpleNamespace(num_processes=2)
    monkeypatch.setattr("mmrl.training.ray_rollers.merge_lists", lambda *_: ["host-a", "host-b"])
    with pytest.raises(UserError, match=r"rollers\.workers is 1; with 2 processes it must be at least that many"):
        check_processes(RollersConfig(engine="ray", workers=1, address="auto"), two)
    with pytest.raises(
        UserError, match=r"processes on host-a, host-b, but a Ray .* only runs on host-a; .*address=auto"
    ):
        check_processes(RollersConfig(engine="ray"), two)
    check_processes(RollersConfig(engine="ray", address="auto"), two)
    check_processes(RollersConfig(workers=1), two)


class Ahead(LocalRollers):
    """Samples what is begun at once, with the weights of then."""

    looks_ahead = True

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.steps: list[tuple[str, int]] = []
        self.begun = None

    def begin(self, tasks, streams, step):
        self.steps.append(("begin", step.number))
        self.begun = tasks, streams, super().rollout(tasks, streams, step)

    def rollout(self, tasks, streams, step):
        self.steps.append(("rollout", step.number))
        if self.begun is None:
            return super().rollout(tasks, streams, step)
        (expected, expected_streams, rollouts), self.begun = self.begun, None
        assert (tasks, streams) == (expected, expected_streams)
        return rollouts


def test_the_next_step_is_begun_before_the_update_unless_a_pause_comes_between(make_trainer):
    trainer = make_trainer(steps=5, checkpoint=CheckpointConfig(every=3))
    trainer.rollers = Ahead(trainer.recipe, trainer.accelerator)
    trainer.run()
    begun = {number for kind, number in trainer.rollers.steps if kind == "begin"}
    assert begun == {1, 2, 4}
    assert [number for kind, number in trainer.rollers.steps if kind == "rollout"] == [0, 1, 2, 3, 4]
    plain = make_trainer(steps=5)
    plain.run()
    assert not torch.equal(plain.policy.table, trainer.policy.table)


def test_a_run_that_looks_ahead_resumes_bit_for_bit(make_trainer):
    def looking_ahead(steps: int):
        trainer = make_trainer("ahead", steps=steps, checkpoint=CheckpointConfig(every=3))
        trainer.rollers = Ahead(trainer.recipe, trainer.accelerator)
        return trainer

    whole = make_trainer("whole", steps=5, checkpoint=CheckpointConfig(every=3))
    whole.rollers = Ahead(whole.recipe, whole.accelerator)
    whole.run()
    looking_ahead(3).run()
    resumed = looking_ahead(5)
    resumed.resume()
    resumed.run()
    assert torch.equal(resumed.policy.table, whole.policy.table)
