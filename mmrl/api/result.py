"""A run of `mmrl.train`: its numbers, samples, report and model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from mmrl.api.methods import is_network, is_pipeline
from mmrl.errors import UserError, require_packages
from mmrl.workers import given

ENDS = ("/low", "/high")


class Table(list[dict[str, Any]]):
    """Rows as dictionaries, with equal columns."""

    def to_pandas(self) -> Any:
        """The rows as a pandas.DataFrame."""
        require_packages("to_pandas", ["pandas"], "vlm")
        import pandas

        return pandas.DataFrame(list(self))

    def __str__(self) -> str:
        """Columns side by side."""
        if not self:
            return "(no rows)"
        names = list(dict.fromkeys(name for row in self for name in row))
        cells = [names, *([_shown(row.get(name)) for name in names] for row in self)]
        widths = [max(len(row[place]) for row in cells) for place in range(len(names))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        )

    def _repr_html_(self) -> str:
        from html import escape

        names = list(dict.fromkeys(name for row in self for name in row))
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(_shown(row.get(name)))}</td>' for name in names)}</tr>" for row in self
        )
        return f"<table><tr>{head}</tr>{body}</table>"


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def evaluation_rows(records: Iterable[Mapping[str, Any]]) -> Table:
    """One row per accuracy, success rate, score or mean return of an evaluation, with the bounds of its 95% interval.

    A mean return has no interval.
    """
    from mmrl.runs.statistics import HEADLINES

    shown = (*HEADLINES, "episode/return/")
    rows = Table()
    for record in records:
        for name in (name for name in record if name.startswith(shown) and not name.endswith(ENDS)):
            # without the tag, a later `evaluate` of other rows would look like a part of the training
            row = {key: record[key] for key in ("step", "tag") if key in record}
            ends = {end: record.get(f"{name}/{end}") for end in ("low", "high")}
            about = {"split": record.get("split", ""), "metric": name, "value": record[name]}
            rows.append({**row, **about, **ends, "n": record.get("n")})
    return rows


class Run:
    """A run folder and the Python objects that it was started with.

    Args:
        folder: of the run.
        objects: functions and classes by the names under which the configuration has them.
        owned: the loaded model that was given; it has the weights of the last step.
    """

    def __init__(self, folder: Path | str, objects: Mapping[str, Any] | None = None, owned: Any = None) -> None:
        self.folder = Path(folder)
        if not (self.folder / "config.yaml").is_file():
            raise UserError(f"{folder} is not a run folder: it contains no config.yaml")
        self.objects = dict(objects or {})
        self._owned = owned

    @property
    def config_path(self) -> Path:
        """The configuration: `mmrl train` repeats the run with it, if it names no objects of a program."""
        return self.folder / "config.yaml"

    @contextmanager
    def opened(self) -> Iterator[tuple[Any, Any]]:
        """Row of the recipe and the configuration; rejects code referenced by someone else's run (`mmrl.trust`)."""
        from mmrl.config import as_override, escaped, foreign_run

        folder = as_override("output_dir", escaped(str(self.folder)))
        with foreign_run(self.config_path, [folder]) as found, given.having(self.objects):
            yield found

    @property
    def config(self) -> Any:
        """The configuration, a dataclass of the recipe."""
        with self.opened() as (_, config):
            return config

    @property
    def result(self) -> dict[str, Any]:
        """Content of result.json; empty while the run is not finished."""
        from mmrl.report.folder import read_run

        return read_run(self.folder).result

    @property
    def metrics(self) -> Table:
        """One row per step."""
        from mmrl.runs.tracking import read_metrics

        return Table(read_metrics(self.folder))

    @property
    def evaluation(self) -> Table:
        """One row per metric and evaluation, with the bounds of its 95% interval."""
        from mmrl.runs.tracking import read_evaluations

        return evaluation_rows(read_evaluations(self.folder))

    @property
    def warnings(self) -> Table:
        """One row per warning of the run; warnings of the same kind share a row."""
        from mmrl.runs.records import read_warnings

        return Table({"message": message} for message in read_warnings(self.folder))

    def samples(self, step: int | None = None) -> Table:
        """Responses sampled in a training step, by default the last step whose samples were kept."""
        from mmrl.runs.records import read_samples, sample_steps

        steps = sample_steps(self.folder, "train")
        if step is None and not steps:
            return Table()
        if step is not None and step not in steps:
            kept = ", ".join(map(str, steps)) or "none"
            raise UserError(f"samples of step {step} were not kept; steps with samples: {kept}")
        records = read_samples(self.folder, steps[-1] if step is None else step, "train")
        return Table(
            {item.name: getattr(record, item.name) for item in dataclasses.fields(record)} for record in records
        )

    def report(self) -> Path:
        """Write report.html; returns its path."""
        from mmrl.report.page import write_report

        return write_report(self.folder)

    def export(self, folder: Path | str, step: int | None = None) -> str:
        """Export the model of the best checkpoint (or the newest one) to a folder; returns how to load it."""
        from mmrl.report.export import export_run

        with self.opened() as (entry, config):
            return export_run(entry, config, self.folder, Path(folder), step)

    @cached_property
    def _loaded(self) -> Any:
        """Policy of the best, else newest checkpoint."""
        from mmrl.runs.export import chosen_checkpoint

        folder = chosen_checkpoint(self.folder) / "model"
        with self.opened() as (entry, config):
            if entry.target.startswith("robotics."):
                from robotics import open_policy

                return open_policy(folder), None
            model = dataclasses.replace(config.model, path=str(folder), build=None)
            if entry.target.startswith("diffusion."):
                from diffusion import load_policy as load_pipeline_policy

                return self._merged(load_pipeline_policy(model).pipeline), None
            from mmrl.vlm.engine.vlm_policy import load_policy

            policy = load_policy(model)
            return policy.model, policy.processor

    @cached_property
    def model(self) -> Any:
        """The trained model: the object that was given, or else that of the best, else newest checkpoint.

        A model of transformers, or with adapters the peft model around it; a pipeline of diffusers, or with adapters
        a copy with merged ones; or a robot policy.
        """
        if self._owned is None:
            return self._loaded[0]
        return self._merged(self._owned) if is_pipeline(self._owned) else self._owned

    def _merged(self, pipeline: Any) -> Any:
        """A pipeline that can be saved: diffusers would write adapters that it cannot read."""
        from diffusion.families.table import find_family
        from diffusion.models.saved import merged_pipeline

        family = find_family(type(pipeline).__name__, self.config.model.family)
        return merged_pipeline(pipeline, family.settings)

    @cached_property
    def processor(self) -> Any:
        """Processor or tokenizer of a transformers model, with the settings of the run; None for other models."""
        if self._owned is None:
            found = self._loaded[1]
        elif is_network(self._owned):
            from mmrl.runs.export import chosen_checkpoint
            from mmrl.vlm.model.processor import load_processor

            found = load_processor(str(chosen_checkpoint(self.folder) / "model"))
        else:
            return None
        # the suite's own wrapper of a language model's tokenizer
        return getattr(found, "tokenizer", found) if type(found).__module__.startswith("mmrl.") else found

    def __repr__(self) -> str:
        """The outcome in words."""
        return "\n".join([*self._outcome(), f"report: {self.folder / 'report.html'}"])

    def _outcome(self) -> list[str]:
        from mmrl.report.folder import read_run
        from mmrl.report.page import outcome

        return outcome([read_run(self.folder)])

    def _repr_html_(self) -> str:
        """Outcome, curve of the reward and two samples, for a notebook."""
        from html import escape

        from mmrl.runs.notebook import reward_curve

        parts = [f"<p>{escape(sentence)}</p>" for sentence in self._outcome()]
        if curve := reward_curve(self.metrics):
            parts.append(curve)
        shown = [
            f"<tr><td>{escape(str(row['prompt'])[-200:])}</td><td>{escape(str(row['response'])[:400])}</td>"
            f"<td>{escape(_shown(row['reward']))}</td></tr>"
            for row in self.samples()[:2]
        ]
        if shown:
            parts.append(f"<table><tr><th>prompt</th><th>response</th><th>reward</th></tr>{''.join(shown)}</table>")
        parts.append(f"<p>report: <code>{escape(str(self.folder / 'report.html'))}</code></p>")
        return "".join(parts)
