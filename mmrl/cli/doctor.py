"""Checks of `mmrl doctor`: versions, devices, libraries, name clashes, disk, or a run; each problem with a fix.

A check returns findings instead of raising, because it must run in a broken installation.
"""

from __future__ import annotations

import ctypes.util
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import Requirement as Declared

from mmrl.config import foreign_run
from mmrl.entries import load_target
from mmrl.errors import UserError
from mmrl.files import read_json_object, read_lines, read_text
from mmrl.findings import DISTRIBUTION, PROJECT_DIR, Finding, install_command, one_line
from mmrl.hub.building import base_path
from mmrl.runs.checkpoint import Checkpoints
from mmrl.runs.folder import FINISHED, has_begun, owner_of, resume_command
from mmrl.runs.records import read_jsonl
from mmrl.runs.tracking import read_evaluations, read_metrics
from mmrl.workers.loading import GIVEN
from mmrl.workers.memory import machine_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from importlib.machinery import ModuleSpec


AREA = "run"


def check_run(run_dir: Path) -> list[Finding]:
    """Check a run folder without changing it; the last finding covers resuming."""
    if not (run_dir / "config.yaml").is_file() and not has_begun(run_dir):
        raise UserError(f"{run_dir} is not a run folder: it contains neither config.yaml nor results")
    checks: list[Callable[[Path], list[Finding]]] = [
        _lock,
        _configuration,
        _metrics,
        _evaluations,
        _checkpoints,
        _best,
        _leftovers,
        _base,
        _resume,
    ]
    found = []
    for check in checks:
        name = check.__name__.removeprefix("_")
        try:
            found += check(run_dir)
        except UserError as error:
            found.append(Finding(AREA, name, "fail", "cannot be used", " ".join(str(error).split())))
        except Exception as error:
            found.append(Finding(AREA, name, "warn", one_line(error), "the check itself failed"))
    return found


def _lock(run_dir: Path) -> list[Finding]:
    owner = owner_of(run_dir)
    if owner is None:
        return [Finding(AREA, "lock", "ok", "free")]
    return [Finding(AREA, "lock", "warn", f"in use by {owner}", "the results below change while that run continues")]


def _configuration(run_dir: Path) -> list[Finding]:
    if not (run_dir / "config.yaml").is_file():
        advice = "resume with the file that the run was started with"
        return [Finding(AREA, "config.yaml", "warn", "missing", advice)]
    with foreign_run(run_dir / "config.yaml") as (entry, config):
        return [Finding(AREA, "config.yaml", "ok", f"recipe {entry.name}, {config.trainer.steps} steps")]


def _metrics(run_dir: Path) -> list[Finding]:
    steps = [int(row["step"]) for row in read_metrics(run_dir)]
    found = _lines(run_dir / "metrics.jsonl")
    if not steps:
        return [*found, Finding(AREA, "metrics.jsonl", "note", "no steps")]
    missing = sorted(set(range(1, steps[-1] + 1)) - set(steps))
    twice = len(read_jsonl(run_dir / "metrics.jsonl")) - len(steps)
    if missing or twice:
        text = f"steps {steps[0]} to {steps[-1]}, {len(missing)} missing, {twice} written twice"
        advice = f"the first missing step is {missing[0]}" if missing else "the last line of each step is used"
        return [*found, Finding(AREA, "metrics.jsonl", "warn", text, advice)]
    return [*found, Finding(AREA, "metrics.jsonl", "ok", f"steps 1 to {steps[-1]}")]


def _evaluations(run_dir: Path) -> list[Finding]:
    rows = read_evaluations(run_dir)
    steps = sorted({row["step"] for row in rows})
    text = f"{len(rows)} rows, steps {steps[0]} to {steps[-1]}" if rows else "none"
    return [*_lines(run_dir / "evaluations.jsonl"), Finding(AREA, "evaluations.jsonl", "ok" if rows else "note", text)]


def _lines(path: Path) -> list[Finding]:
    """A finding if some lines are not records."""
    lines, last = 0, b"\n"
    for last in read_lines(path) if path.exists() else ():
        lines += bool(last.strip())
    count = lines - len(read_jsonl(path))
    if not count:
        return []
    torn = count == 1 and not last.endswith(b"\n")
    advice = "" if torn else "resuming keeps a copy of the file and drops them"
    return [Finding(AREA, path.name, "note" if torn else "warn", f"{count} lines cannot be read", advice)]


def _checkpoints(run_dir: Path) -> list[Finding]:
    checkpoints = Checkpoints(run_dir / "checkpoints")
    found = []
    for step in checkpoints.steps():
        path = checkpoints.path(step)
        damage = checkpoints.damage(path)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6
        if damage is None:
            found.append(Finding(AREA, path.name, "ok", f"intact, {size:.1f} MB"))
        else:
            found.append(Finding(AREA, path.name, "fail", damage, "see `resume` below"))
    return found or [Finding(AREA, "checkpoints", "note", "none")]


def _best(run_dir: Path) -> list[Finding]:
    file = run_dir / "checkpoints/best.json"
    if not file.is_file():
        return []
    best = Checkpoints(run_dir / "checkpoints").best()
    if best is None:
        return [
            Finding(
                AREA, "best.json", "warn", "refers to a checkpoint that does not exist", "the newest checkpoint is used"
            )
        ]
    return [Finding(AREA, "best.json", "ok", f"step {best['step']}, {best['metric']} {best['value']:.4g}")]


def _leftovers(run_dir: Path) -> list[Finding]:
    found = []
    for pattern, kind in (
        (".partial-*", "left incomplete by a kill; resuming removes them"),
        ("damaged-*", "set aside"),
    ):
        count = len(list((run_dir / "checkpoints").glob(pattern)))
        if count:
            found.append(Finding(AREA, "checkpoints", "note", f"{count} {kind}"))
    for folder in sorted((run_dir / "earlier").glob("*")):
        found.append(Finding(AREA, "earlier results", "note", str(folder)))
    return found


def _base(run_dir: Path) -> list[Finding]:
    """Whether the model that the newest checkpoint's adapter builds on is there."""
    steps = Checkpoints(run_dir / "checkpoints").steps()
    file = Checkpoints(run_dir / "checkpoints").path(steps[-1]) / "model/base.json" if steps else None
    if file is None or not file.is_file():
        return []
    entries = read_json_object(file)
    path = base_path(entries, file.parent)
    if "relative" in entries and not Path(path).is_dir():
        advice = f"move it back to {path}, or to its place relative to the run: {entries['relative']}"
        return [Finding(AREA, "base model", "fail", f"{path} is missing", advice)]
    return [Finding(AREA, "base model", "ok", path)]


def _resume(run_dir: Path) -> list[Finding]:
    checkpoints = Checkpoints(run_dir / "checkpoints")
    steps = checkpoints.steps()
    whole = [step for step in steps if checkpoints.damage(checkpoints.path(step)) is None]
    command = resume_command(run_dir)
    longer, repaired = f"{command} trainer.steps=<more>", f"{command} --from-last-good"
    config = run_dir / "config.yaml"
    if config.is_file() and re.search(rf"\b{GIVEN}:\w", read_text(config, errors="replace")):
        # objects of a program are in no file, so a command cannot continue the run
        command = "run its Python program again with resume=True"
        longer, repaired = f"{command} and more steps", f"delete the newest checkpoint, and {command}"
    result = run_dir / "result.json"
    if result.is_file() and read_json_object(result).get("status") in FINISHED:
        return [Finding(AREA, "resume", "ok", "the run is finished", f"to train longer: {longer}")]
    if not steps:
        return [Finding(AREA, "resume", "ok", "no checkpoint: the run would start from the beginning", command)]
    if not whole:
        advice = "start again in another output_dir"
        return [Finding(AREA, "resume", "fail", "no checkpoint is intact", advice)]
    if whole[-1] != steps[-1]:
        text = f"continues from step {whole[-1]}, the newest intact checkpoint"
        return [Finding(AREA, "resume", "warn", text, repaired)]
    return [Finding(AREA, "resume", "ok", f"continues from step {whole[-1]}", command)]


def release(text: str) -> tuple[int, ...]:
    """First four numbers of a version, for comparisons, without local and pre-release parts."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    return tuple([*numbers, 0, 0, 0, 0][:4])


CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LOW_DISK_GB = 2.0
GB = 1e9
RENDER_LIBRARIES = {
    "EGL": "libegl1",
    "OSMesa": "libosmesa6",
    "GL": "libgl1",
    "gomp": "libgomp1",
    "usb-1.0": "libusb-1.0-0",
}
# torchvision 0.15 came with torch 2.0, and both minors have moved together since.
TORCHVISION_MINOR_OFFSET = 15


def check_torch() -> list[Finding]:
    """The torch build and the devices that it sees."""
    try:
        import torch
    except Exception as error:  # a broken shared library raises OSError or RuntimeError, not only ImportError
        advice = f"reinstall it: pip install --force-reinstall torch (CPU build: --index-url {CPU_INDEX})"
        return [Finding("torch", "import", "fail", one_line(error), advice)]
    build = f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU build'}"
    findings = [Finding("torch", "build", "ok", build)]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        amount = f"{torch.cuda.get_device_name(index)}, {free / GB:.1f} of {total / GB:.1f} GB free"
        findings.append(Finding("torch", f"cuda:{index}", "ok", amount))
    if torch.backends.mps.is_available():
        findings.append(Finding("torch", "mps", "ok", "available"))
    if not torch.cuda.is_available() and shutil.which("nvidia-smi"):
        advice = "install a CUDA build of torch that matches the driver: https://pytorch.org/get-started/locally"
        findings.append(Finding("torch", "gpu", "warn", "NVIDIA driver found, but torch cannot use it", advice))
    return findings


def check_processor() -> list[Finding]:
    """Cores, threads and memory."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    findings = [Finding("cpu", "cores", "ok", f"{usable} usable of {os.cpu_count()}, {platform.machine()}")]
    if "torch" in sys.modules:
        findings.append(_check_threads(sys.modules["torch"].get_num_threads(), usable))
    if (total := machine_bytes()) is not None:
        findings.append(Finding("cpu", "memory", "ok", f"{total / GB:.1f} GB"))
    return findings


def _check_threads(threads: int, cores: int) -> Finding:
    found = f"{threads} (OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')})"
    if threads <= cores:
        return Finding("cpu", "threads", "ok", found)
    advice = f"more threads than cores slow each other down: set OMP_NUM_THREADS={cores}"
    return Finding("cpu", "threads", "warn", found, advice)


def check_torchvision(ensure: Callable[[], str] | None = None) -> list[Finding]:
    """Whether torchvision can be imported as it is, only with its operators declared, or not at all."""
    try:
        from mmrl.hub.compat import ensure_torchvision

        state = (ensure or ensure_torchvision)()
    except Exception as error:
        advice = f"install the release that matches the installed torch: {_torchvision_command()}"
        return [Finding("torchvision", "import", "warn", one_line(error), advice)]
    if state == "native":
        return [Finding("torchvision", "import", "ok", "native")]
    if state == "patched":
        found = "patched (its operators cannot be loaded with this torch): images work, nms and roi_align do not"
        return [
            Finding(
                "torchvision", "import", "ok", found, f"optional, to make everything work: {_torchvision_command()}"
            )
        ]
    found = "not installed: images use the slower processors, videos do not work"
    return [Finding("torchvision", "import", "note", found, _torchvision_command())]


def _torchvision_command() -> str:
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        return install_command("vlm")
    major, minor, *_ = release(torch_version)
    pin = f"==0.{minor + TORCHVISION_MINOR_OFFSET}.*" if major == 2 else ""
    index = f" --index-url {CPU_INDEX}" if torch_version.endswith("+cpu") else ""
    return f"pip install --force-reinstall --no-deps 'torchvision{pin}'{index}"


def check_video() -> list[Finding]:
    """PyAV, which reads and writes videos, and the ffmpeg program."""
    findings = []
    try:
        av = importlib.import_module("av")
        codec = "H.264 encoder" if "libx264" in av.codecs_available else "no H.264 encoder"
        findings.append(Finding("video", "PyAV", "ok", f"{av.__version__}, {codec}"))
    except Exception as error:
        advice = f"{install_command('vlm')} (only needed for videos)"
        findings.append(Finding("video", "PyAV", "note", one_line(error), advice))
    ffmpeg = shutil.which("ffmpeg")
    return [*findings, Finding("video", "ffmpeg", "ok", ffmpeg or "not found; PyAV includes its own libraries")]


def check_rendering(find: Callable[[str], str | None] = ctypes.util.find_library) -> list[Finding]:
    """System libraries that render simulator images without a screen, and the one that MuJoCo uses."""
    found = {name: find(name) for name in RENDER_LIBRARIES}
    findings = []
    for name, package in RENDER_LIBRARIES.items():
        if found[name]:
            findings.append(Finding("rendering", name, "ok", str(found[name])))
        else:
            advice = f"sudo apt-get install {package} (only needed for robotics)"
            findings.append(Finding("rendering", name, "note", "missing", advice))
    choice = os.environ.get("MUJOCO_GL", "")
    backends = [backend for backend, name in (("egl", "EGL"), ("osmesa", "OSMesa")) if found[name]]
    text = f"MUJOCO_GL={choice or '(not set)'}; without a screen: {', '.join(backends) or 'none'}"
    return [*findings, Finding("rendering", "MuJoCo", "ok" if backends else "note", text)]


def check_sandbox(require: Callable[[], None] | None = None) -> list[Finding]:
    """Whether code that a model wrote can be run, as `sandbox: strict` promises."""
    from mmrl.errors import UserError
    from mmrl.workers.sandbox import require_strict

    try:
        (require or require_strict)()
    except UserError as error:
        return [Finding("sandbox", "strict", "note", "not possible here", str(error))]
    return [Finding("sandbox", "strict", "ok", "model-written code runs in bubblewrap")]


def check_disk(runs_dir: Path) -> list[Finding]:
    """Whether runs can be written to a folder, which need not exist, and how much disk space is left."""
    target = runs_dir.resolve()
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    advice = "choose another folder: mmrl train CONFIG output_dir=/path/to/run"
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return [Finding("disk", str(target), "fail", f"not writable: {error.strerror}", advice)]
    free = shutil.disk_usage(existing).free / GB
    text = f"writable, {free:.1f} GB free"
    if free < LOW_DISK_GB:
        return [Finding("disk", str(target), "warn", text, f"little space for checkpoints; {advice}")]
    return [Finding("disk", str(target), "ok", text)]


OLDEST_PYTHON = (3, 11)
IMPORT_NAMES = ("mmrl", "diffusion", "robotics")
ROOMS = ("vlm", "diffusion", "robotics")
REQUIREMENT = re.compile(
    r"""(?P<name>[\w.-]+) (?:\[[^]]*\])? \s* (?:>=\s*(?P<floor>[\w.]+))?
        [^;]* (?:;.*extra\s*==\s*['"](?P<extra>\w+)['"])?""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Requirement:
    """One dependency from the package metadata."""

    name: str
    """Distribution name."""
    floor: str
    """Oldest supported version; empty if any version works."""
    extra: str
    """Extra that installs it; empty for the base dependencies."""


def check_python() -> list[Finding]:
    """Interpreter and the suite's own version."""
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info >= OLDEST_PYTHON:
        findings = [Finding("python", "python", "ok", found)]
    else:
        findings = [Finding("python", "python", "fail", found, "install Python 3.11 or newer")]
    try:
        return [*findings, Finding("python", DISTRIBUTION, "ok", version(DISTRIBUTION))]
    except PackageNotFoundError:
        advice = f"run `make setup`, or {install_command('dev')}"
        return [*findings, Finding("python", DISTRIBUTION, "warn", "not installed", advice)]


def check_packages(
    requirements: Sequence[Requirement] | None = None, lookup: Callable[[str], str] = version
) -> list[Finding]:
    """Compare each dependency with the minimum in the package metadata; fail if no domain has all its packages."""
    wanted = read_requirements() if requirements is None else requirements
    findings = [_check_requirement(requirement, lookup) for requirement in wanted]
    pairs = list(zip(wanted, findings, strict=True))
    absent = {requirement.extra for requirement, finding in pairs if finding.state == "note"}
    known = {requirement.extra for requirement in wanted} & set(ROOMS)
    if known and known <= absent:
        advice = install_command("vlm")
        findings.append(Finding("packages", "rooms", "fail", "none of the domains has all of its packages", advice))
    return findings


def read_requirements(lines: Iterable[str] | None = None) -> list[Requirement]:
    """Parse the suite's requirement strings that apply to this platform."""
    declared = _declared_requirements() if lines is None else lines
    matches = [match for match in map(REQUIREMENT.match, declared) if match and _applies(match)]
    parsed = [Requirement(match["name"], match["floor"] or "", match["extra"] or "") for match in matches]
    return [item for item in parsed if item.name != DISTRIBUTION and item.extra not in ("dev", "all")]


def _applies(match: re.Match[str]) -> bool:
    marker = Declared(match.string).marker
    return marker is None or marker.evaluate({"extra": match["extra"] or ""})


def _declared_requirements() -> list[str]:
    try:
        return requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        pass
    pyproject = PROJECT_DIR / "pyproject.toml"
    if not pyproject.is_file():
        return []
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {})
    return [
        *project["dependencies"],
        *(_of_extra(line, extra) for extra, lines in extras.items() for line in lines),
    ]


def _of_extra(line: str, extra: str) -> str:
    """A requirement of an extra as in the metadata of a wheel."""
    package, _, marker = line.partition(";")
    return f"{package}; {f'({marker.strip()}) and ' if marker else ''}extra == '{extra}'"


def _check_requirement(requirement: Requirement, lookup: Callable[[str], str]) -> Finding:
    extra = requirement.extra
    label = f"{requirement.name} [{extra}]" if extra else requirement.name
    try:
        found = lookup(requirement.name)
    except PackageNotFoundError:
        state = "note" if extra else "fail"
        return Finding("packages", label, state, "missing", install_command(extra))
    if release(found) < release(requirement.floor):
        advice = f"needs {requirement.floor} or newer: {install_command(extra)}"
        return Finding("packages", label, "warn" if extra else "fail", found, advice)
    return Finding("packages", label, "ok", found)


def check_names(home: Path | None = None, path: Sequence[str] | None = None) -> list[Finding]:
    """Other top-level packages called `mmrl`, `diffusion` or `robotics`."""
    home = (home or PROJECT_DIR).resolve()
    return [_check_name(name, home, path) for name in IMPORT_NAMES]


def _check_name(name: str, home: Path, path: Sequence[str] | None) -> Finding:
    own = home / name
    others = [place for place in _places(name, sys.path if path is None else path) if place != own]
    if not others:
        return Finding("names", name, "ok", str(own))
    elsewhere = ", ".join(map(str, others))
    spec = importlib.util.find_spec(name) if path is None else PathFinder.find_spec(name, path)
    if _location(spec) in (own, None):
        return Finding("names", name, "ok", f"{own}; there is another one, which is not used: {elsewhere}")
    advice = f"`import {name}` loads that package, not {own}: rename or uninstall it, or set PYTHONPATH={home}"
    return Finding("names", name, "warn", f"hidden by {elsewhere}", advice)


def _places(name: str, path: Iterable[str]) -> list[Path]:
    # A folder without __init__.py counts too: as a namespace package it hides an editable install.
    entries = dict.fromkeys(os.path.abspath(entry) for entry in path)
    locations = [_location(PathFinder.find_spec(name, [entry])) for entry in entries]
    return list(dict.fromkeys(place for place in locations if place is not None))


def _location(spec: ModuleSpec | None) -> Path | None:
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or [])
    place = folders[0] if folders else spec.origin
    return Path(place).resolve() if place else None


__all__ = ["Finding", "check_all", "is_usable", "render", "run", "run_on"]


class Words(NamedTuple):
    """Overall result, for the last line."""

    sound: str
    broken: str
    notes: str


def run(runs_dir: Path, as_json: bool = False) -> int:
    """Check the installation and print the result; returns 0 if `mmrl train` can work, else 1."""
    return _show(check_all(runs_dir), as_json, INSTALLATION)


def run_on(run_dir: Path, as_json: bool = False) -> int:
    """Check a run folder and print the result; returns 0 if nothing is damaged, else 1."""
    return _show(check_run(run_dir), as_json, RUN)


def _show(findings: Sequence[Finding], as_json: bool, words: Words) -> int:
    usable = is_usable(findings)
    if as_json:
        content = {"usable": usable, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        render(findings, words)
    return 0 if usable else 1


def check_all(runs_dir: Path) -> list[Finding]:
    """Run every check; a check that raises becomes a finding."""
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("python", check_python),
        ("packages", check_packages),
        ("torch", check_torch),
        ("cpu", check_processor),
        ("torchvision", check_torchvision),
        ("video", check_video),
        ("rendering", check_rendering),
        ("sandbox", check_sandbox),
        ("names", check_names),
        *((area, partial(_check_elsewhere, target)) for area, target in ROOM_CHECKS.items()),
        ("disk", lambda: check_disk(runs_dir)),
    ]
    findings: list[Finding] = []
    for area, check in checks:
        try:
            findings.extend(check())
        except Exception as error:
            findings.append(Finding(area, "check", "warn", one_line(error), "the check itself failed"))
    return findings


def _check_elsewhere(target: str) -> list[Finding]:
    return load_target(target)()


def is_usable(findings: Iterable[Finding]) -> bool:
    """Whether everything that `mmrl train` needs works."""
    return all(finding.state != "fail" for finding in findings)


def render(findings: Sequence[Finding], words: Words | None = None) -> None:
    """Print the table, problems first, and what to do; lines are not wrapped so that commands can be copied."""
    ordered = sorted(findings, key=lambda finding: PROBLEMS.index(finding.state) if finding.state in PROBLEMS else 9)
    sys.stdout.write(_table(ordered) + "\n")
    sys.stdout.write(_closing_lines(ordered, words or INSTALLATION) + "\n")


def _closing_lines(findings: Sequence[Finding], words: Words) -> str:
    advice = [f"  {finding.area} {finding.name}: {finding.advice}" for finding in findings if finding.advice]
    counts = {state: sum(finding.state == state for finding in findings) for state in ("fail", "warn", "note")}
    verdict = words.sound if is_usable(findings) else words.broken
    lines = ["", "what to do:", *advice] if advice else []
    noted = f"{counts['note']} {words.notes}"
    return "\n".join([*lines, "", f"{verdict}: {counts['fail']} failures, {counts['warn']} warnings, {noted}"])


def _table(findings: Sequence[Finding]) -> str:
    """Columns of state, area, name and what was found; states in colour on a terminal."""
    rows = [(finding.state, finding.area, finding.name) for finding in findings]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, finding in zip(rows, findings, strict=True):
        state, *cells = [f"{text:<{width}}" for text, width in zip(row, widths, strict=True)]
        shown = f"\033[{COLOURS[finding.state]}m{state}\033[0m" if sys.stdout.isatty() else state
        lines.append("  ".join([shown, *cells, finding.found]))
    return "\n".join(lines)


ROOM_CHECKS = {"browser": "mmrl.gui.browser.doctor:check_browser"}
"""Checks contributed by domain packages: area to `module:function`, imported when the check runs."""
INSTALLATION = Words("ready to train", "something `mmrl train` needs is broken", "optional parts absent")
RUN = Words("the run is sound", "something in the run is damaged", "notes")
COLOURS = {"fail": "1;31", "warn": "33", "note": "34", "ok": "32"}
"""Codes of the states' colours on a terminal."""
PROBLEMS = ("fail", "warn")
"""States that are shown first."""
