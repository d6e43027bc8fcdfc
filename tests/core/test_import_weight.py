import subprocess
import sys

from tests.programs import ROOT, run_after_torch

HEAVY = (
    "transformers",
    "diffusers",
    "mujoco",
    "open3d",
    "peft",
    "torchvision",
    "matplotlib",
    "omegaconf",
    "accelerate",
)


def test_the_core_imports_torch_and_nothing_heavier():
    code = (
        "import sys, mmrl.core; "
        f"print([name for name in {HEAVY!r} if name in sys.modules], 'torch' in sys.modules, "
        "sorted(n for n in sys.modules if n.startswith('mmrl.') and not n.startswith('mmrl.core')))"
    )
    assert run_after_torch(code).strip() == "[] True ['mmrl.errors', 'mmrl.fields']"


def test_the_repair_of_torchvision_leaves_the_choice_of_the_checkout_to_the_program(tmp_path):
    """A .pth file that imported `mmrl` would take the installed one, also for a program in another checkout."""
    line = (ROOT / "scripts/torchvision.pth").read_text()
    (tmp_path / "mmrl").mkdir()
    (tmp_path / "mmrl" / "__init__.py").touch()
    installed = f"import sys; sys.path.insert(0, {str(ROOT)!r}); exec({line!r})"
    code = f"{installed}; sys.path.insert(0, ''); import mmrl; print(mmrl.__path__)"
    found = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.strip() == f"['{tmp_path / 'mmrl'}']", found.stderr


def test_every_public_name_exists_once():
    import mmrl.core

    assert len(set(mmrl.core.__all__)) == len(mmrl.core.__all__)
    assert all(hasattr(mmrl.core, name) for name in mmrl.core.__all__)
