from tests.programs import run_after_torch

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
        "sorted(n for n in sys.modules if n.startswith('mmrl.') and not n.startswith(('mmrl.core', 'mmrl.hub'))),"
        "'mmrl.hub.compat' in sys.modules)"  # mmrl.hub.torchvision_import is loaded by the environment itself
    )
    assert run_after_torch(code).strip() == "[] True ['mmrl.errors', 'mmrl.fields'] False"


def test_every_public_name_exists_once():
    import mmrl.core

    assert len(set(mmrl.core.__all__)) == len(mmrl.core.__all__)
    assert all(hasattr(mmrl.core, name) for name in mmrl.core.__all__)
