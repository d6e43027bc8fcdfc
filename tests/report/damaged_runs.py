"""Run folders with a file that nobody can read. As a program, it reads each with watch and report, in little memory."""

import json
import os
import resource
import sys
import tempfile
import traceback
from pathlib import Path

FILES = (
    *("config.yaml", "metrics.jsonl", "evaluations.jsonl", "result.json", "warnings.jsonl", "run.lock"),
    *(
        "experiment_run.json",
        "comparison.json",
        "failures/first.txt",
        "mmrl-crash-1.txt",
        "outcomes/step-000001/all.jsonl",
    ),
    *("samples/step-000001/eval.jsonl", "samples/step-000001/a.png", "videos/step-000001-all.mp4"),
)
SPARE_BYTES = 600 * 2**20
"""Memory that reading a damaged folder may take."""


def growing():
    """YAML whose aliases stand for 9^9 texts."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    pairs = zip("abcdefgh", "bcdefghi", strict=True)
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in pairs]
    return "\n".join(lines)


def truncated(size):
    def make(path):
        with path.open("wb") as file:
            file.truncate(size)

    return make


def text(content):
    return lambda path: path.write_text(content)


def bomb(path):
    """An image of 40,000 x 40,000 pixels in few bytes."""
    from tests.hub.test_images import png

    path.write_bytes(png(40_000, 40_000))


RECORD = {"step": 1, "tag": "during", "split": "all", "accuracy/greedy": "%s", "reward/mean": 0.5}
WRONG = [
    {"step": 1, "tag": [], "split": {}, "status": {}, "steps": "x", "images": {"a": 1}},
    {"step": 2, "id": "a", "prompt": 1, "response": [], "terms": {"a": "b"}, "images": [1], "message": {}},
    {"id": "a", "scores": {"a": True, "b": []}, "parts": 7},
]


DAMAGES = {
    "a named pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "20 GB of NULs": truncated(20 * 10**9),
    "70 MB in a line": lambda path: path.write_text("{" + "x" * 70_000_000 + "}\n"),
    "YAML that grows": text(growing()),
    "YAML that holds itself": text("trainer: &a\n  steps: 3\n  again: *a\n"),
    "YAML of a wrong date": text("trainer: 2024-99-99\n"),
    "deep brackets": text("[" * 99_999),
    "large numbers": lambda path: path.write_text(json.dumps(RECORD).replace('"%s"', "9" * 301)),
    "records of wrong types": lambda path: path.write_text("".join(json.dumps(row) + "\n" for row in WRONG)),
    "an object of wrong types": text('{"arms": {"a": 7}, "differences": 5, "sweep": [1], "seeds": 2, "metric": []}'),
    "arms of wrong types": text('{"arms": [1], "sweep": {"arms": {"a": {"rows": 3}}, "seeds": [1]}, "trainer": 7}'),
    "noise": lambda path: path.write_bytes(bytes(n * 7919 % 251 for n in range(9000))),
    "an image of 40,000 x 40,000 pixels": bomb,
}


def sound(folder):
    """A run folder with something in each of its files."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, "time": 1000.0 + step, "reward/mean": 0.5} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = {"step": 1, "tag": "during", "split": "all", "accuracy/greedy": 0.5, "n": 4}
    (folder / "evaluations.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "config.yaml").write_text("trainer:\n  steps: 3\n")
    sample = {"id": "a", "prompt": "p", "response": "r", "images": ["a.png"], "outputs": []}
    (folder / "samples/step-000001/eval.jsonl").write_text(json.dumps(sample) + "\n")


def read(folder):
    """Everything that watch, report and doctor read."""
    from mmrl.cli.doctor import _evaluations, _metrics
    from mmrl.cli.watch.folders import WatchedFolders, lines
    from mmrl.report.folder import evaluation_points, read_run
    from mmrl.report.gallery import evaluation_columns, sample_gallery, videos_of
    from mmrl.report.page import facts
    from mmrl.runs.folder import owner_of
    from mmrl.runs.records import read_warnings

    watched = WatchedFolders([folder])
    watched.refresh()
    yield lambda: list(lines(watched))
    yield lambda: [(run.samples(1), run.settings(), run.notes()) for run in watched.runs.values()]
    yield lambda: [facts(run) for run in [read_run(folder)]]
    yield lambda: read_run(folder).settings
    yield lambda: [point.outcomes for point in evaluation_points([read_run(folder)], "all")]
    yield lambda: (sample_gallery(folder), videos_of(folder), evaluation_columns([("run", folder)]))
    yield lambda: read_warnings(folder)
    yield lambda: (owner_of(folder), _metrics(folder), _evaluations(folder))


def checked(name, damage):
    """Sentences and tracebacks of all readers for a folder with one damaged file."""
    from mmrl.errors import UserError

    found = {"name": name, "sentences": [], "tracebacks": ""}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sound(folder)
        (folder / name.partition(": ")[0]).unlink(missing_ok=True)
        damage(folder / name.partition(": ")[0])
        for reader in read(folder):
            try:
                reader()
            except UserError as error:
                found["sentences"].append(str(error))
            except IsADirectoryError:
                pass
            except Exception:
                found["tracebacks"] += traceback.format_exc()
    return found


def cases():
    """Every damage of every file."""
    return {f"{file}: {damage}": make for file in FILES for damage, make in DAMAGES.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sound(Path(scratch))
        for reader in read(Path(scratch)):  # everything is imported before memory is limited
            reader()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, used + SPARE_BYTES))
    for name, make in cases().items():
        sys.stdout.write(json.dumps(checked(name, make)) + "\n")
        sys.stdout.flush()
