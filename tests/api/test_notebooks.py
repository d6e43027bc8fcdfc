"""The notebooks of examples/ run as they stand."""

from pathlib import Path

import nbformat
import pytest

from mmrl import Run
from mmrl.errors import UserError
from mmrl.hub.packaged import resolve_packaged

nbclient = pytest.importorskip("nbclient")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def executed(name, folder):
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", 4)
    nbclient.NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def ends(run, metric):
    rows = [row["value"] for row in run.evaluation if row["metric"] == metric]
    return rows[0], rows[-1]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_outputs_are_stored_small_and_name_no_machine(path):
    assert path.stat().st_size < 100_000
    notebook = nbformat.read(path, 4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert outputs, "a notebook is stored with its outputs"
    assert not any(output.output_type == "error" for output in outputs)
    text = path.read_text(encoding="utf-8")
    assert "/tmp/" not in text
    assert "/home/" not in text
    assert f"({path.name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_images_and_questions(tmp_path):
    executed("images_and_questions", tmp_path)
    before, after = ends(Run(tmp_path / "runs/lights"), "accuracy/greedy")
    assert after > before + 0.05


@pytest.mark.slow
def test_own_arm(tmp_path):
    pytest.importorskip("mujoco")
    executed("own_arm", tmp_path)
    before, after = ends(Run(tmp_path / "runs/arm-ppo"), "success/sampled")
    assert after > before + 0.1


@pytest.mark.slow
def test_real_model(tmp_path):
    try:
        resolve_packaged("smollm2")
    except UserError as error:  # it says how to set the model up
        pytest.skip(str(error))
    executed("real_model", tmp_path)
    before, after = ends(Run(tmp_path / "runs/laptop"), "accuracy/sampled")
    assert after > before + 0.3
