"""Files that the suite writes: written completely or not at all, whatever interrupts the writer."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmrl.errors import UserError
from mmrl.files import (
    CONFIGS,
    LONGEST_LABEL,
    follow_umask,
    is_file,
    label_problem,
    last_line,
    open_file,
    output_file,
    output_folder,
    own_config,
    parse_json,
    read_file,
    read_json_object,
    read_lines,
    read_text,
    read_yaml,
    remove_drafts,
    replaced,
    shortened_name,
    write_atomically,
    written_by_run,
)

PROJECT = Path(__file__).resolve().parent.parent


def test_a_file_appears_with_its_last_byte(tmp_path):
    path = tmp_path / "new/rows.jsonl"
    with replaced(path) as draft:
        draft.write_text("first")
        assert not path.exists()
        assert draft.suffix == ".jsonl"
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_weights_can_be_read_by_those_that_the_umask_allows(mask, tmp_path):
    before = os.umask(mask)
    try:
        with replaced(tmp_path / "model.safetensors") as draft:
            save_file({"weight": torch.zeros(2)}, draft)
        with replaced(tmp_path / "folder") as draft:
            (draft / "inner").mkdir(parents=True)
            save_file({"weight": torch.zeros(2)}, draft / "inner" / "model.safetensors")
        save_file({"weight": torch.zeros(2)}, tmp_path / "direct.safetensors")
        follow_umask(tmp_path)
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~mask}


@pytest.mark.parametrize("interruption", [OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_writer_leaves_the_file_that_was_there(interruption, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    with pytest.raises(type(interruption)), replaced(path) as draft:  # noqa: PT012
        draft.write_text("half")
        raise interruption
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_replaces_its_files_and_keeps_others(tmp_path):
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    (folder / "mine.txt").write_text("mine")
    (folder / "inner/weights").write_text("old")
    with replaced(folder) as draft:
        (draft / "inner").mkdir(parents=True)
        (draft / "inner/weights").write_text("new")
        (draft / "config").write_text("new")
        assert (folder / "inner/weights").read_text() == "old"
    texts = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert texts == {"mine.txt": "mine", "inner/weights": "new", "config": "new"}
    assert list(tmp_path.iterdir()) == [folder]


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    sub = tmp_path / "videos"
    sub.mkdir()
    writer = (
        "import os, sys; from pathlib import Path; from mmrl.files import replaced\n"
        "with replaced(Path(sys.argv[1])) as draft, replaced(Path(sys.argv[2])) as folder:\n"
        "    draft.write_text('half'); folder.mkdir(); (folder / 'x').touch(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", writer, sub / "a.b.mp4", tmp_path / "model"], cwd=PROJECT)
    kept = [tmp_path / "notes.partial.txt", tmp_path / ".hidden.partial", sub / f".c.{os.getppid()}.partial.mp4"]
    for path in kept:
        path.touch()
    assert len(list(tmp_path.rglob("*.partial*"))) == 2 + len(kept)
    remove_drafts(tmp_path)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)


def test_half_a_surrogate_pair_can_be_written(tmp_path):
    write_atomically(tmp_path / "text", "a\ud800b")
    assert (tmp_path / "text").read_text() == "a\\ud800b"


@pytest.mark.parametrize("path", ["x" * 300, "a\0b", "\ud800.png", "/" + "y/" * 5000])
def test_what_cannot_be_a_path_is_no_file(path):
    assert not is_file(path)


# Files that lie in a folder which is renamed as a whole or is a temporary one, in a device of the system, or a log.
INSIDE_A_DRAFT = {
    "benchmarks/harness.py",
    "benchmarks/measure.py",
    "benchmarks/worker.py",
    "mmrl/files.py",
    "mmrl/report/export.py",
    "mmrl/runs/checkpoint.py",
    "mmrl/vlm/model/network.py",
    "mmrl/workers/run_code.py",
    "mmrl/workers/row_pool.py",
    "benchmarks/vlm/workload.py",
    "mmrl/vlm/data/dataset.py",
    "benchmarks/diffusion/arms.py",
}


def test_every_file_of_the_suite_is_written_through_the_helper():
    """A new `write_text` must go through `write_atomically` or be listed above with its reason."""
    direct = re.compile(
        r"(?<!draft)\.write_(text|bytes)\(|torch\.save\([^)]*(?<!draft)\)|np\.savez?\w*\((?!draft|handle)"
    )
    writers = {
        path.relative_to(PROJECT).as_posix()
        for room in ("mmrl", "diffusion", "robotics")
        for path in (PROJECT / room).rglob("*.py")
        if any(direct.search(line) and "draft" not in line for line in path.read_text(encoding="utf-8").splitlines())
    }
    assert writers - INSIDE_A_DRAFT == {"mmrl/cli/program.py"}  # a traceback that nobody reads while it is written


def test_configurations_of_the_suite_are_found_from_any_folder(tmp_path, monkeypatch):
    name = Path("configs/vlm/digits_sft.yaml")
    monkeypatch.chdir(tmp_path)
    assert own_config(name) == CONFIGS / "vlm/digits_sft.yaml"
    for other in ("vlm/digits_sft.yaml", "configs/vlm/none.yaml"):
        assert own_config(Path(other)) == Path(other)
    name.parent.mkdir(parents=True)
    name.write_text("mine")
    assert own_config(name) == name


def in_the_way(folder):
    """Paths that cannot become an output, with what is said of each."""
    (folder / "file").write_text("")
    (folder / "dangling").symlink_to(folder / "gone")
    (folder / "linked").symlink_to(folder / "file")
    (folder / "round").symlink_to(folder / "round")
    return {
        folder / "dangling": f"is a link to {folder / 'gone'}, which does not exist",
        folder / "dangling/inside": f"{folder / 'dangling'} is a link to {folder / 'gone'}, which does not exist",
        folder / "round": "is a link to",
        folder / "file/inside": f"{folder / 'file'} is not a folder",
        folder / "linked/inside": f"{folder / 'linked'} is not a folder",
        folder / ("x" * 256): "has a name of 256 bytes; file systems allow at most 255",
        folder / ("ä" * 128): "has a name of 256 bytes; file systems allow at most 255",
        folder / "/".join(["x" * 200] * 30): "File name too long",
    }


def test_paths_that_cannot_be_written_are_refused_with_a_reason(tmp_path, monkeypatch):
    paths = in_the_way(tmp_path)
    for kind, own in (
        (output_folder, {tmp_path / "file": "is not a folder", tmp_path / "linked": "is not a folder"}),
        (output_file, {tmp_path: "is a folder", Path("/dev/null"): "is not a regular file"}),
    ):
        for path, message in (paths | own).items():
            with pytest.raises(UserError, match=re.escape(message)):
                kind(path)
    assert output_folder(tmp_path / "a/b") == tmp_path / "a/b"
    assert output_file(tmp_path / "linked") == tmp_path / "linked"
    assert output_folder(".") == Path()
    monkeypatch.setattr(os, "access", lambda place, mode: False)  # the superuser may write anywhere
    for kind in (output_folder, output_file):
        with pytest.raises(UserError, match=f"{tmp_path} cannot be written; choose another path"):
            kind(tmp_path / "a/b")


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, kind in (("pipe", "a named pipe"), ("device", "a device"), (".", "a folder")):
        with pytest.raises(UserError, match=f"is {kind}, not a file"):
            open_file(tmp_path / name)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        with pytest.raises(UserError, match="is a socket, not a file"):
            read_json_object(tmp_path / "socket")
    assert last_line(tmp_path / "pipe").endswith("is a named pipe, not a file)")


def test_a_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "log.txt"
    path.write_bytes(b"one\r\ntwo\n\n")
    assert read_text(path, 10) == "one\ntwo\n\n"
    with pytest.raises(UserError, match=r"log\.txt has 10 bytes; at most 9 are allowed"):
        read_text(path, 9)
    assert last_line(path) == "two"
    # files of /proc have no size
    with pytest.raises(UserError, match="more than 3 bytes"):
        read_text("/proc/self/status", 3)


def test_of_a_long_line_only_its_start_is_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"12345\n" + b"x" * 3_000_000 + b"\n123456\nlast")
    assert list(read_lines(path, longest=6)) == [b"12345\n", b"xxxxxxx", b"123456\n", b"last"]
    path.write_bytes(b"x" * 3_000_000)
    assert list(read_lines(path, longest=6)) == [b"xxxxxxx"]


@pytest.mark.parametrize("text", ["[" * 5000, "[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300, "1" * 301])
def test_json_is_neither_deep_nor_has_it_endless_numbers(text):
    with pytest.raises(ValueError, match=r"nested more than 100 levels deep|a number with 301 digits"):
        parse_json(text)
    with pytest.raises(ValueError, match=r"nested more than 100 levels deep|a number with 301 digits"):
        parse_json(text.encode())


def test_json_that_is_wide_and_not_deep_is_read():
    assert parse_json("[" + ",".join(["[]"] * 500) + "]") == [[]] * 500
    assert parse_json("[" * 100 + "]" * 100)
    assert parse_json(b"9" * 300) == int("9" * 300)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
YAMLS = {
    BOMB: "more than 100000 keys and values, counting those repeated by aliases",
    f"a: &a {'x' * 600_000}\nb: [{', '.join(['*a'] * 20)}]": "more than 100000 keys and values",
    "a: &a [1, *a]": "the anchor &a contains an alias of itself",
    "a: &a {b: {<<: *a}}": "the anchor &a contains an alias of itself",
    "[" * 200 + "]" * 200: "nested more than 100 levels deep",
    "[" * 5000: "nested|nesting depth",
    "a: b: c": "not valid YAML: mapping values are not allowed",
    "a: *b": "not valid YAML: .*undefined alias",
    "a: 2024-99-99": "not valid YAML: month must be in 1..12",
    "? [a]\n: b": "not valid YAML: .*unhashable key",
    "a: !!python/object/apply:os.getpid []": "could not determine a constructor",
    "a: \0": "not valid YAML",
    "- x\n" * 600_000: "bytes; at most",
}


@pytest.mark.parametrize("text", list(YAMLS), ids=range(len(YAMLS)))
def test_yaml_that_grows_or_is_none_is_refused(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=f"config.yaml .*({YAMLS[text]})"):
        read_yaml(tmp_path / "config.yaml")


def test_yaml_with_a_few_aliases_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text("a: &a {b: 1}\nc: {<<: *a, d: 2}\ne: [*a, *a]\n")
    assert read_yaml(tmp_path / "config.yaml") == {"a": {"b": 1}, "c": {"b": 1, "d": 2}, "e": [{"b": 1}, {"b": 1}]}


def test_long_names_are_cut_and_stay_different(tmp_path):
    assert shortened_name("a" * LONGEST_LABEL) == "a" * LONGEST_LABEL
    names = {shortened_name("é漢字" * 90 + end) for end in "ab"} | {shortened_name("x" * 500)}
    assert len(names) == 3
    assert all(LONGEST_LABEL - 3 <= len(name.encode()) <= LONGEST_LABEL for name in names)
    write_atomically(tmp_path / ("漢" * 80 + ".txt"), "text")
    assert [path.name for path in tmp_path.iterdir()] == ["漢" * 80 + ".txt"]


@pytest.mark.parametrize("name", ["", " ", ".hidden", "a/b", "a\\b", "a\0b", "a\nb", "\ud800", "a" * 101, "漢" * 40])
def test_names_that_files_cannot_have_are_told(name):
    assert label_problem(name)
    assert not label_problem("held_out") + label_problem("a b.c=1-é")


READERS = {
    "yaml.load(": set(),
    "yaml.safe_load(": set(),
    "OmegaConf.load(": {"mmrl/config.py"},
    "metadata_load(": set(),
    "Image.open(": {"mmrl/files.py"},
    ".readline(": {"mmrl/files.py"},
}
"""Ways to read a file, and the files that use them within bounds; others call these."""


@pytest.mark.parametrize("call", list(READERS))
def test_every_room_reads_files_within_bounds(call):
    packages = [PROJECT / name for name in ("mmrl", "diffusion", "robotics")]
    paths = [path for package in packages for path in package.rglob("*.py")]
    found = {path.relative_to(PROJECT).as_posix() for path in paths if call in path.read_text(encoding="utf-8")}
    assert found == READERS[call]


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux")
@pytest.mark.parametrize("read", [read_file, read_text, lambda path: list(read_lines(path))])
def test_a_file_whose_content_cannot_be_read_is_named(read):
    """An input/output error names no file."""
    with pytest.raises(UserError, match="/proc/self/mem cannot be read: Input/output error"):
        read("/proc/self/mem")


@pytest.mark.parametrize(
    ("path", "written"),
    [
        ("runs/clone", True),
        ("/data/checkpoints/step-000010/model", True),
        ("models/runs-7b", False),
        ("a/b", False),
    ],
)
def test_a_missing_folder_of_a_run_has_advice(path, written):
    assert ("train its configuration first" in written_by_run(path)) == written
