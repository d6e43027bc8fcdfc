"""A language model learns to see: from its folder to a table of what it can read, and of how its English changes."""

from __future__ import annotations

from pathlib import Path

from mmrl.files import read_yaml
from mmrl.report.page import write_report
from mmrl.report.report_tables import part_lines
from mmrl.runs.records import read_jsonl
from mmrl.runs.tracking import read_evaluations
from mmrl.training.run import finish_run, last_model
from mmrl.vlm.toy.demo import fit_blind
from mmrl.vlm.toy.from_language import perplexity

CONFIG = Path("configs/vlm/pictures_sft.yaml")
SPLITS = ("fresh", "heldout", "blank", "swapped", "general", "text")
"""New pictures, held-out combinations, black pictures, pictures from other questions, and unrelated questions with and
without a picture."""


def run(output_dir: Path, seed: int = 0) -> list[str]:
    """Build a model around a language model, teach it to see, and report; stages that are already finished are kept.

    Args:
        output_dir: folder for data, model and the run.
        seed: of the supervised stage; model and data are the same.

    Returns:
        Lines to print: accuracy by kind of question before and after the supervised stage, on new pictures, held-out
        combinations, black and swapped pictures, and on questions about something else; what a strategy reaches that
        never looks; perplexity of the language model and of the trained model; the path of the report.

    Raises:
        UserError: a configuration or the language model is missing.
        RunError: a stage failed.
    """
    data = output_dir / "data"
    paths = [f"eval_data.{split}.path={data}/{split}.jsonl" for split in SPLITS]
    paths += [f"data.path={data}/sft.jsonl", f"model.path={output_dir}/start"]
    sft = finish_run(CONFIG, output_dir / "sft", [*paths, f"seed={seed}"])
    blind = fit_blind(read_jsonl(data / "sft.jsonl")).share(read_jsonl(data / "fresh.jsonl"))
    before, after = (
        perplexity(read_yaml(CONFIG)["model"]["build_options"]["language"]),
        perplexity(str(last_model(sft))),
    )
    last = {found["split"]: found["accuracy/greedy"] for found in read_evaluations(sft)}
    report = write_report(sft)
    return [
        *part_lines([sft]),
        f"strategy that ignores the image: {100 * blind:.1f}% on fresh",
        f"unrelated questions: {100 * last['general']:.1f}%, without a picture {100 * last['text']:.1f}%",
        f"perplexity on a page of English: {before:.2f} for the language model, {after:.2f} for the trained model",
        f"report: {report}",
    ]
