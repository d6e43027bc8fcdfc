"""What `mmrl doctor` checks: versions, devices, system libraries, name clashes, disk; each problem with its cure.

Every check returns findings and never raises, because a broken installation is what it is there to describe.
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
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Finding", "Requirement", "check_all", "is_usable", "render", "run"]

DISTRIBUTION = "mmrl-suite"
OLDEST_PYTHON = (3, 11)
IMPORT_NAMES = ("mmrl", "diffusion", "robotics")
ROOMS = ("vlm", "diffusion", "robotics")
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
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    area: str
    """Group of lines it belongs to."""
    name: str
    """What was looked at."""
    state: str
    """ok, note (optional part absent), warn (works with a limitation) or fail (`mmrl train` cannot work)."""
    found: str
    """Version, amount or condition."""
    advice: str = ""
    """What to do; empty when nothing needs doing."""


@dataclass(frozen=True)
class Requirement:
    """One dependency from the package metadata."""

    name: str
    """Distribution name."""
    floor: str
    """Oldest version that is supported; empty when any will do."""
    extra: str
    """Extra that installs it; empty for the base dependencies."""


def run(runs_dir: Path, as_json: bool = False) -> int:
    """Check everything and print the result.

    Args:
        runs_dir: folder where runs are going to be written; need not exist.
        as_json: print JSON instead of a table.

    Returns:
        0 when `mmrl train` can work, 1 when something that it needs is broken.
    """
    findings = check_all(runs_dir)
    usable = is_usable(findings)
    if as_json:
        content = {"usable": usable, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        render(findings)
    return 0 if usable else 1


def check_all(runs_dir: Path) -> list[Finding]:
    """Run every check; one that breaks becomes a finding itself.

    Args:
        runs_dir: folder where runs are going to be written.

    Returns:
        The findings in table order.
    """
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("python", check_python),
        ("packages", check_packages),
        ("torch", check_torch),
        ("cpu", check_processor),
        ("torchvision", check_torchvision),
        ("video", check_video),
        ("rendering", check_rendering),
        ("names", check_names),
        ("disk", lambda: check_disk(runs_dir)),
    ]
    findings: list[Finding] = []
    for area, check in checks:
        try:
            findings.extend(check())
        except Exception as error:
            findings.append(Finding(area, "check", "warn", _one_line(error), "the check itself failed"))
    return findings


def is_usable(findings: Iterable[Finding]) -> bool:
    """Whether nothing that `mmrl train` needs is broken."""
    return all(finding.state != "fail" for finding in findings)


def check_python() -> list[Finding]:
    """Interpreter and the suite's own version."""
    found = f"{platform.python_version()} ({sys.executable})"
    new_enough = sys.version_info >= OLDEST_PYTHON
    findings = [
        Finding("python", "python", "ok" if new_enough else "fail", found, "" if new_enough else "3.11 or newer")
    ]
    try:
        return [*findings, Finding("python", DISTRIBUTION, "ok", version(DISTRIBUTION))]
    except PackageNotFoundError:
        advice = "run `make setup`, or `pip install -e '.[dev]'` in the checkout"
        return [*findings, Finding("python", DISTRIBUTION, "warn", "not installed", advice)]


def check_packages(
    requirements: Sequence[Requirement] | None = None, lookup: Callable[[str], str] = version
) -> list[Finding]:
    """Compare each dependency with the floor in the package metadata.

    Args:
        requirements: what to look for; that of the installed suite when None.
        lookup: distribution name to version, raising `PackageNotFoundError`.

    Returns:
        One finding a dependency, and a failure when no room has all of its own.
    """
    wanted = read_requirements() if requirements is None else requirements
    findings = [_check_requirement(requirement, lookup) for requirement in wanted]
    absent = {requirement.extra for requirement, finding in zip(wanted, findings, strict=True) if finding.state == "note"}
    known = {requirement.extra for requirement in wanted} & set(ROOMS)
    if known and known <= absent:
        advice = f"pip install '{DISTRIBUTION}[vlm]'"
        findings.append(Finding("packages", "rooms", "fail", "no room is complete", advice))
    return findings


def read_requirements(lines: Iterable[str] | None = None) -> list[Requirement]:
    """Parse the suite's requirement strings.

    Args:
        lines: such as `transformers>=5.0; extra == "vlm"`; the installed metadata when None.

    Returns:
        Base dependencies and those of the extras that install packages for users; each package once an extra.
    """
    if lines is None:
        try:
            lines = requires(DISTRIBUTION) or []
        except PackageNotFoundError:
            lines = []
    pattern = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*(?:>=\s*([0-9][^,;\s]*))?[^;]*(?:;.*extra == ['\"](\w+)['\"])?")
    matches = [match for match in map(pattern.match, lines) if match]
    parsed = [Requirement(match[1], match[2] or "", match[3] or "") for match in matches]
    return [item for item in parsed if item.name != DISTRIBUTION and item.extra not in ("dev", "all")]


def _check_requirement(requirement: Requirement, lookup: Callable[[str], str]) -> Finding:
    extra = requirement.extra
    target = f"'{DISTRIBUTION}[{extra}]'" if extra else DISTRIBUTION
    label = f"{requirement.name} [{extra}]" if extra else requirement.name
    try:
        found = lookup(requirement.name)
    except PackageNotFoundError:
        state = "note" if extra else "fail"
        return Finding("packages", label, state, "missing", f"pip install {target}")
    if _release(found) < _release(requirement.floor):
        advice = f"needs {requirement.floor} or newer: pip install --upgrade {target}"
        return Finding("packages", label, "warn" if extra else "fail", found, advice)
    return Finding("packages", label, "ok", found)


def _release(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    return tuple([*numbers, 0, 0, 0, 0][:4])


def check_torch() -> list[Finding]:
    """The torch build and the devices that it sees."""
    try:
        import torch
    except Exception as error:  # a broken shared library raises OSError or RuntimeError, not only ImportError
        advice = f"reinstall it: pip install --force-reinstall torch (CPU build: --index-url {CPU_INDEX})"
        return [Finding("torch", "import", "fail", _one_line(error), advice)]
    build = f"{torch.__version__}, {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU build'}"
    findings = [Finding("torch", "build", "ok", build)]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        amount = f"{torch.cuda.get_device_name(index)}, {free / GB:.1f} of {total / GB:.1f} GB free"
        findings.append(Finding("torch", f"cuda:{index}", "ok", amount))
    if torch.backends.mps.is_available():
        findings.append(Finding("torch", "mps", "ok", "available"))
    if not torch.cuda.is_available() and shutil.which("nvidia-smi"):
        advice = "install a CUDA build of torch that suits the driver: https://pytorch.org/get-started/locally"
        findings.append(Finding("torch", "gpu", "warn", "NVIDIA driver found, but torch cannot use it", advice))
    return findings


def check_processor() -> list[Finding]:
    """Cores, threads and memory."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    findings = [Finding("cpu", "cores", "ok", f"{usable} usable of {os.cpu_count()}, {platform.machine()}")]
    if "torch" in sys.modules:
        threads = sys.modules["torch"].get_num_threads()
        advice = f"more threads than cores slow each other down: OMP_NUM_THREADS={usable}"
        crowded = threads > usable
        setting = os.environ.get("OMP_NUM_THREADS", "not set")
        text = f"{threads} (OMP_NUM_THREADS {setting})"
        findings.append(Finding("cpu", "threads", "warn" if crowded else "ok", text, advice if crowded else ""))
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        findings.append(Finding("cpu", "memory", "ok", f"{total / GB:.1f} GB"))
    return findings


def check_torchvision(ensure: Callable[[], str] | None = None) -> list[Finding]:
    """Whether torchvision imports by itself, only with its operators declared, or not at all.

    Args:
        ensure: returns "native", "patched" or "absent"; `mmrl.vlm.compat.ensure_torchvision` when None.

    Returns:
        One finding.
    """
    try:
        if ensure is None:
            from mmrl.vlm.compat import ensure_torchvision as ensure
        state = ensure()
    except Exception as error:
        advice = f"install the release that belongs to the installed torch: {_torchvision_command()}"
        return [Finding("torchvision", "import", "warn", _one_line(error), advice)]
    if state == "native":
        return [Finding("torchvision", "import", "ok", "native")]
    if state == "patched":
        found = "patched: a CUDA build beside CPU torch; images work, compiled operators (nms, roi_align) do not"
        return [Finding("torchvision", "import", "ok", found, f"for a native one: {_torchvision_command()}")]
    found = "absent: images only through the slow processors, no video"
    return [Finding("torchvision", "import", "note", found, _torchvision_command())]


def _torchvision_command() -> str:
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        return f"pip install '{DISTRIBUTION}[vlm]'"
    major, minor, *_ = _release(torch_version)
    pin = f"==0.{minor + TORCHVISION_MINOR_OFFSET}.*" if major == 2 else ""
    index = f" --index-url {CPU_INDEX}" if torch_version.endswith("+cpu") else ""
    return f"pip install --force-reinstall --no-deps 'torchvision{pin}'{index}"


def check_video() -> list[Finding]:
    """PyAV, which reads and writes the videos, and the ffmpeg program."""
    findings = []
    try:
        av = importlib.import_module("av")
        codec = "H.264 encoder" if "libx264" in av.codecs_available else "no H.264 encoder"
        findings.append(Finding("video", "PyAV", "ok", f"{av.__version__}, {codec}"))
    except Exception as error:
        advice = f"pip install '{DISTRIBUTION}[vlm]' (only videos need it)"
        findings.append(Finding("video", "PyAV", "note", _one_line(error), advice))
    ffmpeg = shutil.which("ffmpeg")
    return [*findings, Finding("video", "ffmpeg", "ok", ffmpeg or "not found; PyAV brings its own libraries")]


def check_rendering(find: Callable[[str], str | None] = ctypes.util.find_library) -> list[Finding]:
    """System libraries that draw simulator pictures without a screen.

    Args:
        find: library name to file name, or None when it is not there.

    Returns:
        One finding a library and one for MuJoCo's choice.
    """
    found = {name: find(name) for name in RENDER_LIBRARIES}
    findings = []
    for name, package in RENDER_LIBRARIES.items():
        state, text = ("ok", found[name] or "") if found[name] else ("note", "missing")
        advice = "" if found[name] else f"sudo apt-get install {package} (only simulator rendering needs it)"
        findings.append(Finding("rendering", name, state, text, advice))
    choice = os.environ.get("MUJOCO_GL", "")
    backends = [backend for backend, name in (("egl", "EGL"), ("osmesa", "OSMesa")) if found[name]]
    text = f"MUJOCO_GL={choice or '(not set)'}; without a screen: {', '.join(backends) or 'none'}"
    advice = "" if choice or not backends else f"without a screen set MUJOCO_GL={backends[0]}"
    return [*findings, Finding("rendering", "MuJoCo", "ok" if backends else "note", text, advice)]


def check_names(home: Path | None = None, path: Sequence[str] | None = None) -> list[Finding]:
    """Other top-level packages called `mmrl`, `diffusion` or `robotics`.

    Args:
        home: folder that holds the suite's packages; where this one was imported from when None.
        path: folders to search; `sys.path` when None.

    Returns:
        One finding an import name.
    """
    home = (home or Path(__file__).parent.parent).resolve()
    return [_check_name(name, home, path) for name in IMPORT_NAMES]


def _check_name(name: str, home: Path, path: Sequence[str] | None) -> Finding:
    own = home / name
    places = _places(name, sys.path if path is None else path)
    others = [place for place in places if place != own]
    if not others:
        return Finding("names", name, "ok", str(own))
    elsewhere = ", ".join(map(str, others))
    imported = _imported_from(name) if path is None else next(iter(places), None)
    if imported in (own, None):
        advice = f"harmless while the suite comes first on sys.path; another one lies at {elsewhere}"
        return Finding("names", name, "ok", str(own), advice)
    advice = f"`import {name}` takes that one instead of {own}: rename or uninstall it, or set PYTHONPATH={home}"
    return Finding("names", name, "warn", f"hidden by {elsewhere}", advice)


def _places(name: str, path: Iterable[str]) -> list[Path]:
    places: list[Path] = []
    for entry in dict.fromkeys(os.path.abspath(entry) for entry in path):
        spec = PathFinder.find_spec(name, [entry])
        place = _folder(spec)
        # A folder without __init__.py counts too: as a namespace package it hides an editable install.
        if place is not None and place not in places:
            places.append(place)
    return places


def _imported_from(name: str) -> Path | None:
    return _folder(importlib.util.find_spec(name))


def _folder(spec: Any) -> Path | None:
    if spec is None:
        return None
    if spec.origin and Path(spec.origin).name != "__init__.py":
        return Path(spec.origin).resolve()
    locations = [spec.origin and Path(spec.origin).parent, *(spec.submodule_search_locations or [])]
    return next((Path(place).resolve() for place in locations if place), None)


def check_disk(runs_dir: Path) -> list[Finding]:
    """Whether runs can be written and how much room is left.

    Args:
        runs_dir: folder where runs are going to be written; its nearest existing parent is tried.

    Returns:
        One finding.
    """
    target = runs_dir.resolve()
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    advice = "choose another folder: mmrl train CONFIG output_dir=/path/to/run"
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return [Finding("disk", str(target), "fail", f"not writable: {error.strerror}", advice)]
    free = shutil.disk_usage(existing).free / GB
    low = free < LOW_DISK_GB
    text = f"writable, {free:.1f} GB free"
    return [Finding("disk", str(target), "warn" if low else "ok", text, f"little room for checkpoints; {advice}" if low else "")]


def render(findings: Sequence[Finding]) -> None:
    """Print the table, through rich where it is installed and as plain columns otherwise.

    Args:
        findings: lines of the table.
    """
    counts = {state: sum(finding.state == state for finding in findings) for state in ("fail", "warn", "note")}
    verdict = "something `mmrl train` needs is broken" if counts["fail"] else "ready to train"
    summary = f"{verdict}: {counts['fail']} failures, {counts['warn']} warnings, {counts['note']} optional parts absent"
    try:
        _render_rich(findings, summary)
    except ImportError:
        sys.stdout.write(_plain_table(findings) + f"\n{summary}\n")


def _plain_table(findings: Sequence[Finding]) -> str:
    widths = [max(len(text) for text in column) for column in zip(*((f.state, f.area, f.name) for f in findings), strict=True)]
    lines = []
    for finding in findings:
        cells = zip((finding.state, finding.area, finding.name), widths, strict=True)
        lines.append("  ".join(f"{text:<{width}}" for text, width in cells) + f"  {finding.found}")
        if finding.advice:
            lines.append(" " * (widths[0] + 2) + f"-> {finding.advice}")
    return "\n".join(lines)


def _render_rich(findings: Sequence[Finding], summary: str) -> None:
    from rich.console import Console
    from rich.table import Table

    colours = {"ok": "green", "note": "blue", "warn": "yellow", "fail": "bold red"}
    table = Table("", "", "what", "found", "what to do", box=None, pad_edge=False)
    previous = ""
    for finding in findings:
        state = f"[{colours[finding.state]}]{finding.state}[/]"
        area = finding.area if finding.area != previous else ""
        table.add_row(state, area, *map(_escaped, (finding.name, finding.found, finding.advice)))
        previous = finding.area
    console = Console()
    console.print(table)
    console.print(summary, highlight=False)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
