"""Kinds of damaged input; `KINDS` lists them."""

from tests.faults.batches import Kind
from tests.faults.inputs import answers, attacks, configs, datasets, models, questions, run_folders, tiny_runs

__all__ = ["KINDS"]

KINDS: tuple[Kind, ...] = (
    *configs.KINDS,
    *questions.KINDS,
    *answers.KINDS,
    *datasets.KINDS,
    *run_folders.KINDS,
    *tiny_runs.KINDS,
    *models.KINDS,
    *attacks.KINDS,
)
