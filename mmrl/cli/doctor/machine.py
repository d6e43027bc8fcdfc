"""Checks of `mmrl doctor`: devices, libraries, sandbox and disk."""

from __future__ import annotations

import ctypes.util
import importlib
import os
import platform
import re
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.findings import Finding, install_command, one_line

if TYPE_CHECKING:
    from collections.abc import Callable


def release(text: str) -> tuple[int, ...]:
    """First four numbers of a version, for comparison, without local and pre-release parts."""
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
        advice = "install a CUDA build of torch that suits the driver: https://pytorch.org/get-started/locally"
        findings.append(Finding("torch", "gpu", "warn", "NVIDIA driver found, but torch cannot use it", advice))
    return findings


def check_processor() -> list[Finding]:
    """Cores, threads and memory."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    findings = [Finding("cpu", "cores", "ok", f"{usable} usable of {os.cpu_count()}, {platform.machine()}")]
    if "torch" in sys.modules:
        findings.append(_check_threads(sys.modules["torch"].get_num_threads(), usable))
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        findings.append(Finding("cpu", "memory", "ok", f"{total / GB:.1f} GB"))
    return findings


def _check_threads(threads: int, cores: int) -> Finding:
    found = f"{threads} (OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')})"
    if threads <= cores:
        return Finding("cpu", "threads", "ok", found)
    advice = f"more threads than cores slow each other down: set OMP_NUM_THREADS={cores}"
    return Finding("cpu", "threads", "warn", found, advice)


def check_torchvision(ensure: Callable[[], str] | None = None) -> list[Finding]:
    """Whether torchvision imports by itself, only with its operators declared, or not at all."""
    try:
        from mmrl.hub.compat import ensure_torchvision

        state = (ensure or ensure_torchvision)()
    except Exception as error:
        advice = f"install the release that belongs to the installed torch: {_torchvision_command()}"
        return [Finding("torchvision", "import", "warn", one_line(error), advice)]
    if state == "native":
        return [Finding("torchvision", "import", "ok", "native")]
    if state == "patched":
        found = "patched (its operators do not load with this torch): images work, nms and roi_align do not"
        return [Finding("torchvision", "import", "ok", found, f"optional, for all of it: {_torchvision_command()}")]
    found = "absent: images work through the slower processors, videos do not"
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
    """PyAV, which reads and writes the videos, and the ffmpeg program."""
    findings = []
    try:
        av = importlib.import_module("av")
        codec = "H.264 encoder" if "libx264" in av.codecs_available else "no H.264 encoder"
        findings.append(Finding("video", "PyAV", "ok", f"{av.__version__}, {codec}"))
    except Exception as error:
        advice = f"{install_command('vlm')} (only videos need it)"
        findings.append(Finding("video", "PyAV", "note", one_line(error), advice))
    ffmpeg = shutil.which("ffmpeg")
    return [*findings, Finding("video", "ffmpeg", "ok", ffmpeg or "not found; PyAV brings its own libraries")]


def check_rendering(find: Callable[[str], str | None] = ctypes.util.find_library) -> list[Finding]:
    """System libraries that render simulator images without a screen, and MuJoCo's choice."""
    found = {name: find(name) for name in RENDER_LIBRARIES}
    findings = []
    for name, package in RENDER_LIBRARIES.items():
        if found[name]:
            findings.append(Finding("rendering", name, "ok", str(found[name])))
        else:
            advice = f"sudo apt-get install {package} (only robotics needs it)"
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
    return [Finding("sandbox", "strict", "ok", "code that a model wrote runs in bubblewrap")]


def check_disk(runs_dir: Path) -> list[Finding]:
    """Whether runs can be written to a folder, which need not exist, and how much room is left."""
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
        return [Finding("disk", str(target), "warn", text, f"little room for checkpoints; {advice}")]
    return [Finding("disk", str(target), "ok", text)]
