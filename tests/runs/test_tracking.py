import io
import itertools
import json
import math
import re
import sys
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

import mmrl
from mmrl.errors import UserError
from mmrl.recipes import EVALUATIONS, all_recipes, metric_tables
from mmrl.runs.folder import MOVED
from mmrl.runs.metrics import METRICS
from mmrl.runs.records import JsonLines, read_jsonl
from mmrl.runs.tracking import (
    ConsoleSink,
    TensorBoardSink,
    Tracker,
    TrackingConfig,
    build_tracker,
    describe_metric,
    metric_definitions,
    read_evaluations,
    read_metrics,
    tensorboard_installed,
)

STEP = {"reward/mean": 0.5, "loss/total": -0.01, "tokens/per_second": 812.0, "time/step": 2.0, "time/rollout": 1.5}


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def test_every_record_is_on_disk_when_log_returns(tmp_path):
    tracker = Tracker(tmp_path, strict=True)
    tracker.log(1, STEP)
    record = json.loads(lines(tmp_path / "metrics.jsonl")[0])
    assert record["step"] == 1
    assert record["reward/mean"] == 0.5
    assert record["time"] > 1.6e9


def test_numbers_that_are_not_finite_become_null_and_are_read_as_nan(tmp_path):
    Tracker(tmp_path).log(1, {"reward/mean": math.nan, "loss/total": math.inf, "reward/std": 0.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert '"reward/mean": null' in text
    assert "Infinity" not in text
    record = read_metrics(tmp_path)[0]
    assert math.isnan(record["reward/mean"])
    assert math.isnan(record["loss/total"])
    assert record["reward/std"] == 0.0


def test_evaluations_carry_step_tag_and_split(tmp_path):
    tracker = Tracker(tmp_path, strict=True)
    tracker.evaluation(0, "before", "test", {"n": 4, "accuracy/greedy": 0.25, "accuracy/greedy/low": 0.05})
    tracker.evaluation(0, "before", "train", {"n": 4, "accuracy/greedy": 0.5})
    tracker.evaluation(8, "after", "test", {"n": 4, "accuracy/greedy": 0.75})
    assert [r["step"] for r in read_evaluations(tmp_path, split="test")] == [0, 8]
    assert [r["split"] for r in read_evaluations(tmp_path, tag="before")] == ["test", "train"]


def test_resume_leaves_no_duplicate_steps(tmp_path):
    tracker = Tracker(tmp_path)
    for step in range(1, 8):
        tracker.log(step, {"reward/mean": step / 10})
    tracker.evaluation(5, "during", "test", {"n": 1})
    tracker.evaluation(7, "during", "test", {"n": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rewa')  # the writer was killed here
    resumed = Tracker(tmp_path)
    resumed.truncate_after(5)
    resumed.log(6, {"reward/mean": 0.66})
    assert [json.loads(line)["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert read_metrics(tmp_path)[-1]["reward/mean"] == 0.66
    assert [r["step"] for r in read_evaluations(tmp_path)] == [5]


def test_appending_after_a_torn_line_starts_its_own_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "x"', encoding="utf-8")
    JsonLines(path).append({"step": 3})
    assert [json.loads(line) for line in lines(path)] == [{"step": 1}, {"step": 3}]


def test_a_line_torn_inside_a_character_is_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}\n{"text": "\xe2\x82')
    assert read_jsonl(path) == [{"step": 1}]
    assert read_jsonl(tmp_path / "missing.jsonl") == []


def test_the_later_record_of_a_step_wins(tmp_path):
    tracker = Tracker(tmp_path)
    for value in (0.1, 0.2):
        tracker.log(3, {"reward/mean": value})
        tracker.evaluation(3, "during", "test", {"n": value})
    assert [r["reward/mean"] for r in read_metrics(tmp_path)] == [0.2]
    assert [r["n"] for r in read_evaluations(tmp_path)] == [0.2]


def test_strict_tracker_refuses_an_undefined_metric(tmp_path):
    tracker = Tracker(tmp_path, strict=True)
    with pytest.raises(ValueError, match=r"loss/polcy.*did you mean loss/policy"):
        tracker.log(1, {"loss/polcy": 1.0})
    with pytest.raises(ValueError, match="accuracy"):
        tracker.evaluation(1, "during", "test", {"accuracy": 1.0})
    assert not (tmp_path / "metrics.jsonl").exists()
    Tracker(tmp_path, strict=True, definitions={"grip/force_n": "Newtons."}).log(1, {"grip/force_n": 2.0})


def test_patterns_match_one_name_part():
    table = metric_definitions()
    assert describe_metric("reward/format") == table["reward/<term>"]
    assert describe_metric("reward/mean") == table["reward/mean"]
    assert describe_metric("accuracy/greedy") == table["accuracy/<greedy|sampled>"]
    assert describe_metric("accuracy/geometric") == table["accuracy/<verifier>"]
    assert describe_metric("accuracy/geometric", metric_definitions("papo")) is None
    assert describe_metric("score/geometric", metric_definitions("flow3d_awm")) == table["score/<verifier>"]
    assert describe_metric("score/aesthetic", metric_definitions("flow_grpo")) == table["score/<reward>"]
    assert describe_metric("reward/a/b") is None
    assert describe_metric("xreward/format") is None


def test_ends_of_intervals_and_parts_of_the_data_follow_any_metric():
    assert describe_metric("success/greedy/low") == "Lower end of the 95% interval of success/greedy."
    found = describe_metric("n/hint=wrong")
    assert found == "Tasks with a result in the evaluation, for hint=wrong."
    assert describe_metric("accuracy/greedy/hint=a=b/high").startswith("Upper end")
    assert describe_metric("nothing/low") is None
    assert describe_metric("accuracy/greedy/hint") is None


@pytest.mark.parametrize("recipe", ["", *all_recipes(), *EVALUATIONS])
def test_no_name_fits_two_patterns_equally(recipe):
    """If two patterns match one name, one of them is more specific; only two packages may define the same pattern."""
    owners = {name: number for number, table in enumerate([METRICS, *metric_tables(recipe)]) for name in table}
    for first, second in itertools.combinations(owners, 2):
        parts = [[values(part) for part in pattern.split("/")] for pattern in (first, second)]
        if len(parts[0]) == len(parts[1]) and all(meet(*pair) for pair in zip(*parts, strict=True)):
            narrower = [{within(*pair) for pair in zip(*order, strict=True)} for order in (parts, parts[::-1])]
            same = narrower[0] == narrower[1] and 0 < owners[first] < owners[second]
            assert same or [found == {True} for found in narrower].count(True) == 1, (first, second)


def values(part):
    """Texts that a part of a pattern fits; None for any."""
    places = re.split("<(.+?)>", part)
    if any("|" not in place for place in places[1::2]):
        return None
    return {"".join(texts) for texts in itertools.product(*(place.split("|") for place in places))}


def meet(first, second):
    return first is None or second is None or bool(first & second)


def within(first, second):
    return second is None or (first is not None and first <= second)


def test_every_metric_has_one_sentence():
    for name, sentence in metric_definitions().items():
        assert re.fullmatch(r"[A-Z0-9k].*\.", sentence), name
        assert ". " not in sentence, name
        assert not sentence.startswith("The same"), name  # it stands alone under a chart


FOREIGN = {
    "mmrl": "denois latent velocit robot gripper",
    "diffusion": "token answer question response episode robot gripper simulator",
    "robotics": "denois latent prompt question answer response token",
}
"""Words of other domains by the package of a recipe."""
NAMED_FOR_A_DOMAIN = ("accuracy", "terms", "success", "episode", "sim", "tokens", "memory", "rollers")
"""Families of shared metrics whose names say what they are about."""


@pytest.mark.parametrize("recipe", ["", "my_module:Recipe:Config", *all_recipes(), *EVALUATIONS])
def test_the_sentences_of_shared_metrics_have_no_word_of_another_domain(recipe):
    known = (all_recipes() | EVALUATIONS).get(recipe)
    words = FOREIGN[known.target.partition(".")[0]] if known else " ".join(FOREIGN.values())
    table = metric_definitions(recipe)
    shared = [name for name in METRICS if not name.startswith(NAMED_FOR_A_DOMAIN)]
    assert {"policy/entropy", "loss/nll", "n", "skipped", "data/skipped"} <= {*shared}
    found = {name: table[name] for name in shared if re.search(rf"\b({'|'.join(words.split())})", table[name])}
    assert not found


@pytest.mark.parametrize("recipe", [*all_recipes(), *EVALUATIONS])
def test_a_recipe_has_no_metrics_of_packages_that_its_own_does_not_build_on(recipe):
    room = (all_recipes() | EVALUATIONS)[recipe].target.partition(".")[0]
    others = {"mmrl": ("diversity/latent", "flow/ade_cm"), "diffusion": ("papo/gamma", "flow/ade_cm")}
    found = metric_definitions(recipe)
    assert not [name for name in others.get(room, ("papo/gamma", "episode/calls")) if name in found]


def test_every_metric_that_the_code_names_is_defined():
    named = (name for name in metric_definitions() if "/" in name and not name.startswith("data"))
    families = sorted({name.split("/")[0] for name in named})
    literal = re.compile(rf'"((?:{"|".join(families)})/[a-z_0-9/]+)"')
    root = Path(mmrl.__file__).parent
    named = {name for path in root.rglob("*.py") for name in literal.findall(path.read_text(encoding="utf-8"))}
    named -= {*MOVED}  # paths in a run's folder
    assert "loss/total" in named
    assert not sorted(name for name in named if describe_metric(name.rstrip("/")) is None)


def test_every_metric_of_the_tables_is_emitted_somewhere():
    root = Path(mmrl.__file__).parents[1]
    files = [path for top in ("mmrl", "diffusion", "robotics") for path in (root / top).rglob("*.py")]
    source = "".join(p.read_text(encoding="utf-8") for p in files if p.name not in ("entries.py", "metrics.py"))
    words = set(re.findall(r"\w+", source))
    composed = tuple(re.findall(r'f"(\w+/\w+)\{', source))
    for name in metric_definitions():
        last = name.rpartition("/")[2]
        assert "<" in last or last in words or name.startswith(composed), name


def test_console_shows_plain_lines_without_a_terminal():
    stream = io.StringIO()
    console = ConsoleSink(120, stream=stream)
    console.log(7, {**STEP, "policy/kl_ref": 0.00123, "policy/entropy": 1.5})
    accuracy = {"n": 400, "accuracy/greedy": 0.5, "accuracy/greedy/low": 0.45, "accuracy/greedy/high": 0.55}
    console.evaluation(7, "during", "test[a]", accuracy)
    console.close()
    header, line, evaluation = stream.getvalue().splitlines()
    assert header.split() == ["step", "reward", "loss", "KL", "entropy", "dec/s", "seconds"]
    assert line.split() == [*["7/120", "0.5000", "-0.0100", "1.23e-03", "1.500", "812", "2.00"], "(rollout", "1.50)"]
    assert evaluation == "evaluation at step 7 (during, test[a] of 400 tasks): greedy 50.0% [45.0, 55.0]"
    assert "\x1b" not in stream.getvalue()


def test_console_line_of_an_image_evaluation_keeps_intervals_for_what_is_optimised():
    stream = io.StringIO()
    metrics = {"n": 54, "score/graded": 0.376, "score/graded/low": 0.35, "score/graded/high": 0.4}
    for name, value in (("strict", 0.1674), ("vendor.aesthetic", 5.25)):
        metrics |= {f"heldout/{name}": value, f"heldout/{name}/low": value - 0.1, f"heldout/{name}/high": value + 0.1}
    metrics |= {"diversity/latent": 1.024, "distance/base": 0.5, "cost/samples": 96.0}
    ConsoleSink(9, stream=stream).evaluation(3, "during", "held_out", metrics)
    assert stream.getvalue() == (
        "evaluation at step 3 (during, held_out of 54 tasks): graded 0.376 [0.350, 0.400]; "
        "held out: strict 0.167, vendor.aesthetic 5.250; diversity 1.02\n"
    )


def test_console_columns_stay_aligned_when_values_are_missing(monkeypatch):
    now = itertools.count(0.0, 20.0)
    monkeypatch.setattr("mmrl.runs.tracking.time.monotonic", lambda: next(now))
    stream = io.StringIO()
    console = ConsoleSink(3, stream=stream)
    console.log(1, {**STEP, "policy/kl_old": 1e-5, "policy/entropy": 0.2})
    console.log(2, {"time/step": 1.0})
    console.log(3, {**STEP, "policy/entropy": 0.2})
    header, *rows = stream.getvalue().splitlines()
    assert {len(row.split("(")[0].rstrip()[:48]) for row in rows} == {48}
    assert [row.split()[1:6].count("-") for row in rows] == [0, 5, 1]
    assert header.index("dec/s") + len("dec/s") == rows[0].index("812") + len("812")


def test_console_has_no_columns_for_what_a_run_does_not_measure(monkeypatch):
    now = itertools.count(0.0, 20.0)
    monkeypatch.setattr("mmrl.runs.tracking.time.monotonic", lambda: next(now))
    stream = io.StringIO()
    console = ConsoleSink(3, stream=stream)
    supervised = {"loss/total": 2.0, "tokens/per_second": 300.0, "time/rollout": 0.0, "time/batch": 0.5}
    console.log(1, supervised)
    console.log(2, supervised)
    console.log(3, {**supervised, "policy/entropy": 1.0})  # such as the first step after a critic's warm-up
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert lines[0] == ["step", "loss", "dec/s", "seconds"]
    assert lines[1] == ["1/3", "2.0000", "300", "(batch", "0.50)"]
    assert lines[3] == ["step", "loss", "entropy", "dec/s", "seconds"]
    assert len(lines) == 5


def test_console_shows_an_agents_episodes_and_their_faults_once_there_are_any(monkeypatch):
    now = itertools.count(0.0, 20.0)
    monkeypatch.setattr("mmrl.runs.tracking.time.monotonic", lambda: next(now))
    stream = io.StringIO()
    console = ConsoleSink(2, stream=stream)
    calm = {
        **{f"episode/{name}": 0.25 for name in ("success", "return", "turns", "calls", "unreadable")},
        **{"episode/refused": 0.0, "episode/cut": 0.0, "env/overflow": 0.0, "env/failed": 0.0, "time/step": 1.0},
    }
    faults = {"episode/refused": 0.5, "episode/cut": 0.75, "env/overflow": 3.0, "env/failed": 1.0}
    seconds = {"time/env_step_p50": 0.12, "time/env_step_p90": 1.5}
    errors = {"episode/tool_errors/timeout": 0.125, "episode/tool_errors/http": 0.0}
    console.log(1, calm)
    console.log(2, calm | faults | seconds | errors)
    lines = [line.split() for line in stream.getvalue().splitlines()]
    names = ["success", "return", "turns", "calls", "invalid"]
    assert lines[0] == ["step", *names, "seconds"]
    assert lines[2] == ["step", *names, "refused", "cut", "overflow", "failed", "seconds"]
    assert lines[3][1:10] == ["0.25", "0.250", "0.2", "0.25", "0.25", "0.50", "0.75", "3", "1"]
    assert " ".join(lines[3][10:]) == "1.00, environment step 0.12 (p90 1.5), tool errors timeout 0.12"


@pytest.mark.parametrize(
    ("every", "seconds", "shown"),
    [
        (10, 20.0, ["1/25", "10/25", "20/25", "25/25"]),
        (1, 4.0, ["1/25", "4/25", "7/25", "10/25", "13/25", "16/25", "19/25", "22/25", "25/25"]),
    ],
)
def test_console_shows_every_nth_step_at_most_every_10_seconds_and_the_time_left(monkeypatch, every, seconds, shown):
    stream, now = io.StringIO(), itertools.count(0.0, seconds)
    monkeypatch.setattr("mmrl.runs.tracking.time.monotonic", lambda: next(now))
    console = ConsoleSink(25, every=every, stream=stream)
    for step in range(1, 26):
        console.log(step, {})
    lines = stream.getvalue().splitlines()[1:]
    assert [line.split()[0].rstrip(",") for line in lines] == shown
    left = timedelta(seconds=seconds * (25 - int(shown[1].split("/")[0])))
    assert lines[1].endswith(f", {left} left")
    assert [line.endswith("left") for line in lines] == [False, *[True] * (len(shown) - 2), False]


def test_quiet_console_shows_nothing():
    stream = io.StringIO()
    console = ConsoleSink(2, quiet=True, stream=stream)
    console.log(1, STEP)
    console.evaluation(1, "during", "test", {})
    console.close()
    assert stream.getvalue() == ""


def test_terminal_gets_a_bar_with_the_time_left(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    console = ConsoleSink(4, stream=stream)
    console.truncate_after(1)
    console.log(2, STEP)
    console.close()
    assert "2/4" in stream.getvalue()
    assert "left" in stream.getvalue()
    assert "0.5000" in stream.getvalue()


@pytest.mark.skipif(not tensorboard_installed(), reason="tensorboard is optional")
def test_tensorboard_gets_every_scalar_once_after_a_resume(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    counter = event_file_writer.AtomicCounter(9)  # of this second's files number 10 would come before 9
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)
    sink = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        sink.log(step, {"reward/mean": step / 10})
    sink.truncate_after(1)
    sink.log(2, {"reward/mean": 0.9})
    sink.evaluation(2, "during", "test", {"accuracy/greedy": 0.75})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("reward/mean")] == [(1, 0.1), (2, 0.9)]
    assert events.Scalars("test/accuracy/greedy")[0].value == 0.75


def test_tensorboard_requested_but_missing_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.runs.tracking.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install tensorboard"):
        build_tracker(TrackingConfig(tensorboard=True), tmp_path, total_steps=3)
    build_tracker(TrackingConfig(quiet=True), tmp_path, total_steps=3).log(1, STEP)


class Service:
    """wandb, whose `init` returns an open run unless told otherwise, or trackio, which ends one of the same context."""

    def __init__(self):
        self.calls = []
        self.current = ContextVar("current", default=None)
        self.run = None

    def init(self, reinit=None, **options):
        if self.run is not None and reinit != "create_new":
            return self.run
        if self.current.get() is not None:
            self.current.get().finish()
        self.calls.append(("init", options))
        name = options["name"]
        run = SimpleNamespace(
            log=lambda values, step: self.calls.append((name, values, step)),
            finish=lambda: self.calls.append((name, "finish")),
        )
        self.current.set(run)
        return run


@pytest.mark.parametrize("open_run", [False, True])
@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_service_gets_a_run_of_its_own(tmp_path, monkeypatch, package, open_run):
    service = Service()
    monkeypatch.setitem(sys.modules, package, service)
    if open_run:
        own = service.init(name="own")
        service.run = own if package == "wandb" else None
        service.current.set(own if package == "trackio" else None)
        service.calls.clear()
    config = TrackingConfig(quiet=True, tensorboard=False, **{package: "digits"})
    tracker = build_tracker(config, tmp_path / "papo", total_steps=2, run_config={"seed": 4})
    tracker.log(1, {"reward/mean": 0.5})
    tracker.evaluation(1, "during", "test", {"accuracy/greedy": 0.25})
    tracker.close()
    assert service.calls == [
        ("init", {"project": "digits", "name": "papo", "config": {"seed": 4}}),
        ("papo", {"reward/mean": 0.5}, 1),
        ("papo", {"test/accuracy/greedy": 0.25}, 1),
        ("papo", "finish"),
    ]
    assert service.current.get() is (own if open_run and package == "trackio" else None)


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_configured_service_that_is_missing_is_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"pip install {package}"):
        build_tracker(TrackingConfig(tensorboard=False, **{package: "digits"}), tmp_path, total_steps=2)
