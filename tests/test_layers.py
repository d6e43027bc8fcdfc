"""Imports run one way, and importing a package loads nothing heavier than it needs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import run_after_torch

PROJECT = Path(__file__).resolve().parent.parent
# From the lowest package up; a package may import itself and all before it. `recipes` and `config` know packages by
# name only, so they lie low; each package brings its own recipes.
ROOMS = (
    "mmrl.errors",
    "mmrl.files",
    "mmrl.fields",
    "mmrl.fixed",
    "mmrl.entries",
    "mmrl.findings",
    "mmrl.core",
    "mmrl.workers",
    "mmrl.rewards",
    "mmrl.trust",
    "mmrl.recipes",
    "mmrl.config",
    "mmrl.runs",
    "mmrl.training",
    "mmrl.hub",
    "mmrl.report",
    "mmrl.comparison",
    "mmrl.vlm",
    "mmrl.masked",
    "mmrl.agents",
    "mmrl.gui",
    "diffusion",
    "robotics",
)
MAY_IMPORT = {room: ROOMS[:place] for place, room in enumerate(ROOMS)}
# Contrib lies on top of its own package and of those below it, and nothing imports it.
MAY_IMPORT |= {
    "mmrl.contrib": ROOMS[: ROOMS.index("diffusion")],
    "diffusion.contrib": ROOMS[: ROOMS.index("robotics")],
    "robotics.contrib": ROOMS,
}
# The command line and `mmrl.train` import everything; no room may import them. `import mmrl` gives out the latter.
MAY_IMPORT["mmrl"] = ("mmrl.api",)
TOP = ("mmrl.cli", "mmrl.api")
SUITE = ("mmrl", "diffusion", "robotics")


def room_of(module):
    """The package or top module that a dotted name belongs to; the name's package when it is in neither."""
    rooms = [room for room in (*MAY_IMPORT, *TOP) if module == room or module.startswith(room + ".")]
    return max(rooms, key=len, default=module.split(".")[0])


def module_name(path, root):
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree, module, is_package):
    """(line, dotted name) of every import, also of those inside functions and TYPE_CHECKING blocks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".") if is_package else module.split(".")[:-1]
                package = ".".join(parts[: len(parts) - node.level + 1])
                base = f"{package}.{base}" if base else package
            # `from mmrl import cli` names the module in the alias, `from mmrl.cli import main` in the base.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def reversed_arrows(root):
    """One line for each import that runs against the arrows: file, line, and the allowed imports."""
    problems = []
    files = [path for name in SUITE for path in sorted((root / name).rglob("*.py"))]
    for path in files:
        module = module_name(path, root)
        room = room_of(module)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, name in imported_modules(tree, module, path.name == "__init__.py"):
            target = room_of(name)
            if room in TOP or target == room or target == "mmrl.errors" or name.split(".")[0] not in SUITE:
                continue
            if target not in MAY_IMPORT.get(room, ()):
                allowed = ", ".join(MAY_IMPORT.get(room, ())) or "nothing of the suite"
                problems.append(f"{path.relative_to(root)}:{line}: {room} imports {name}; it may import {allowed}")
    return problems


def test_no_import_runs_against_the_arrows():
    assert reversed_arrows(PROJECT) == []


def test_every_part_of_the_suite_is_known_to_the_checker():
    files = [path for path in (PROJECT / "mmrl").iterdir() if path.suffix != ".typed" and path.stem[:2] != "__"]
    parts = [f"mmrl.{path.stem}" for path in files]
    assert sorted(set(parts) - set(MAY_IMPORT) - set(TOP)) == []


@pytest.mark.parametrize(
    ("file", "line", "rooms"),
    [
        (
            "mmrl/core/objectives/objective.py",
            "from mmrl.training import trainer",
            "mmrl.core imports mmrl.training.trainer",
        ),
        (
            "mmrl/core/objectives/objective.py",
            "from ...vlm.engine.vlm_policy import VlmPolicy",
            "mmrl.core imports mmrl.vlm.engine.vlm_policy",
        ),
        ("mmrl/core/__init__.py", "from .. import rewards", "mmrl.core imports mmrl.rewards"),
        ("mmrl/training/run.py", "import mmrl.vlm.methods.papo as papo", "mmrl.training imports mmrl.vlm.methods.papo"),
        ("mmrl/training/run.py", "def f():\n    from mmrl import cli", "mmrl.training imports mmrl.cli"),
        ("mmrl/rewards/maths.py", "import diffusion", "mmrl.rewards imports diffusion"),
        ("diffusion/sampling/latent_sampler.py", "from robotics.sim import scene", "diffusion imports robotics.sim"),
        ("mmrl/core/objectives/objective.py", "from mmrl.config import load", "mmrl.core imports mmrl.config"),
        ("mmrl/config.py", "def f():\n    import mmrl.vlm.methods.papo", "mmrl.config imports mmrl.vlm.methods.papo"),
        ("robotics/methods/srpo.py", "from mmrl.cli import main", "robotics imports mmrl.cli"),
        ("mmrl/errors.py", "import mmrl.core", "mmrl.errors imports mmrl.core"),
        ("mmrl/__init__.py", "from mmrl.core import Rollouts", "mmrl imports mmrl.core"),
        (
            "mmrl/core/catalogue/group.py",
            "from mmrl.contrib.rows import tracked",
            "mmrl.core imports mmrl.contrib.rows",
        ),
        ("mmrl/vlm/vlm_recipe.py", "def f():\n    import mmrl.contrib.rows", "mmrl.vlm imports mmrl.contrib.rows"),
        (
            "robotics/methods/ppo.py",
            "from diffusion.contrib import entries",
            "robotics imports diffusion.contrib.entries",
        ),
    ],
)
def test_checker_catches_a_planted_arrow(tmp_path, file, line, rooms):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(f"import math\n{line}\n")
    (problem,) = reversed_arrows(tmp_path)
    assert problem.startswith(f"{file}:{2 + line.count(chr(10))}: ")
    assert rooms in problem


def test_checker_accepts_allowed_arrows(tmp_path):
    allowed = {
        "mmrl/training/trainer.py": "from mmrl.core import rollouts\nfrom mmrl.errors import RunError\n",
        "mmrl/vlm/engine/vlm_policy.py": "import torch\nfrom .payload import Prompt\nfrom ..rewards import RewardSum\n",
        "mmrl/cli/commands.py": "def run():\n    from mmrl.vlm import demo\n",
        "robotics/policies/base/action_policy.py": "from diffusion import sampler\nfrom mmrl.core import Objective\n",
    }
    for file, text in allowed.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert reversed_arrows(tmp_path) == []


HEAVY = (
    "transformers",
    "diffusers",
    "mujoco",
    "open3d",
    "peft",
    "datasets",
    "torchvision",
    "matplotlib",
    "rich",
)


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import mmrl", ("torch", "omegaconf", *HEAVY)),
        ("import mmrl.rewards", ("torch", *HEAVY)),
        ("import mmrl.core", ("accelerate", "omegaconf", "mmrl.contrib", *HEAVY)),
        ("from mmrl.core import get; get('grpo').override({'clip': {'kind': 'gspo'}})", ("mmrl.contrib",)),
        ("from mmrl.config import load_run; load_run('configs/vlm/digits_papo.yaml')", ("mmrl.contrib",)),
        ("import mmrl.config, mmrl.recipes", ("torch", *HEAVY)),
        ("import diffusion", ("torch", *HEAVY)),
        ("import robotics", ("torch", *HEAVY)),
        ("import mmrl.vlm", HEAVY),
        ("import mmrl.gui, mmrl.gui.gui_commands", ("torch", "numpy", "gymnasium", "playwright", *HEAVY)),
        ("from mmrl.cli import main; main(['--help'])", ("torch", "numpy", "omegaconf", *HEAVY)),
        ("from mmrl.cli import main; main(['train', '--help'])", ("torch", "numpy", "omegaconf", *HEAVY)),
        ("from mmrl.cli import main; main(['list', 'recipes'])", ("torch", "numpy", *HEAVY)),
    ],
)
def test_import_loads_nothing_heavy(statement, unwanted):
    program = f"import sys\n{statement}\nprint('loaded:', *[name for name in {unwanted!r} if name in sys.modules])"
    if "torch" in unwanted:
        done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        output = done.stdout
    else:
        output = run_after_torch(program)
    assert output.splitlines()[-1] == "loaded:"


def test_core_needs_torch_alone():
    allowed = {"torch", "mmrl", *sys.stdlib_module_names}
    for path in (PROJECT / "mmrl" / "core").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = module_name(path, PROJECT)
        names = {name.split(".")[0] for _, name in imported_modules(tree, module, path.name == "__init__.py")}
        assert names <= allowed, f"{path.name} imports {sorted(names - allowed)}"
