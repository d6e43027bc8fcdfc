import nbformat
import pytest

nbclient = pytest.importorskip("nbclient")


def test_a_run_in_a_cell_shows_one_display_and_its_functions_reach_the_workers(tmp_path):
    cells = [
        "from mmrl import train\n"
        "from mmrl.vlm.toy.tiny_generic import build_tiny_generic\n"
        "build_tiny_generic('tiny', corpus=['say one two three four'])\n"
        "rows = [{'prompt': f'say {number}'} for number in range(4)]",
        "def many_a(prompts, completions, **columns):\n"
        "    return [text.count('a') + bonus for text in completions]\n"
        "bonus = 0.5",
        "run = train('grpo', model='tiny', data=rows, eval_data=rows, reward=many_a, steps=2, tasks_per_step=2,\n"
        "            samples_per_task=4, max_new_tokens=4, output_dir='run')",
        "run",
        "print(run.config.rewards[0].function, run.metrics[0]['reward/mean'] >= 0.5)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    trained, shown, printed = (notebook.cells[number].outputs for number in (2, 3, 4))
    displays = [output for output in trained if output.output_type == "display_data"]
    assert len(displays) == 1
    assert "step 2 of 2" in displays[0].data["text/html"]
    lines = "".join(output.get("text", "") for output in trained).splitlines()
    assert len(lines) < 6, lines
    assert "<svg" in shown[0].data["text/html"]
    assert printed[0].text == "given:many_a True\n"
