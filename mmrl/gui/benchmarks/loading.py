"""A benchmark as grounding samples: every published row, none dropped and none altered."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from mmrl.errors import UserError
from mmrl.fields import bounded, choice
from mmrl.gui.benchmarks.annotations import Annotation, RowError, make_target
from mmrl.gui.benchmarks.box_checks import box_problem, fit_convention
from mmrl.gui.benchmarks.files import LANGUAGES, BenchmarkFiles, ImageFolder, locate, read_annotations
from mmrl.gui.benchmarks.table import find_benchmark
from mmrl.gui.coords import Size
from mmrl.gui.samples import GroundingSample

LOGGER = logging.getLogger("mmrl")


@dataclass
class BenchmarkConfig:
    """A user's copy of a published benchmark."""

    benchmark: str = MISSING
    """Which one: screenspot, screenspot_v2, screenspot_pro, mmbench_gui_l2, ui_vision, osworld_g, osworld_g_refined or
    ui_i2e."""
    path: str = MISSING
    """Folder of the copy, or one of its annotation files."""
    images: str | None = None
    """Folder of the images; empty: the published place in the copy."""
    language: str = choice("en", LANGUAGES)
    """Language of the instructions, en or cn; only ScreenSpot-Pro has both."""
    max_samples: int = bounded(0, at_least=0)
    """Only the first so many samples, for a trial; 0 = all."""


@dataclass
class _Loading:
    images: ImageFolder
    samples: list[GroundingSample] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    boxes: list[tuple[Annotation, Size]] = field(default_factory=list)


def load_benchmark(config: BenchmarkConfig) -> list[GroundingSample]:
    """Read a benchmark."""
    benchmark = find_benchmark(config.benchmark)
    found = locate(benchmark, config.path, config.images)
    loading = _Loading(ImageFolder(found.image_roots))
    for annotation in read_annotations(found, config.language):
        if config.max_samples and len(loading.samples) >= config.max_samples:
            break
        _add(loading, annotation)
    if loading.problems:
        raise UserError(_describe(found, loading, config))
    if not loading.samples:
        raise UserError(f"{benchmark.title}: {', '.join(map(str, found.files))} has no rows")
    convention = fit_convention(found.layout.form, loading.boxes)
    if convention is not None and convention.verdict == "wrong":
        LOGGER.warning("%s: %s", benchmark.title, convention.sentence)
    return _with_unique_ids(loading.samples)


def _add(loading: _Loading, annotation: Annotation | tuple[str, str]) -> None:
    if not isinstance(annotation, Annotation):
        loading.problems.append(annotation)
        return
    try:
        image: Any = loading.images.resolve(annotation.image)
        original_wh = loading.images.size(image)
    except RowError as error:
        loading.problems.append((annotation.place, str(error)))
        return
    size = annotation.size or original_wh
    if annotation.is_box:
        loading.boxes.append((annotation, size))
    meta = {
        "id": annotation.id,
        "place": annotation.place,
        "groups": annotation.groups,
        "suspicious": box_problem(annotation, size) or "",
    }
    target = make_target(annotation, original_wh)
    loading.samples.append(GroundingSample(image, original_wh, annotation.instruction, target, meta=meta))


def _describe(found: BenchmarkFiles, loading: _Loading, config: BenchmarkConfig) -> str:
    place, reason = loading.problems[0]
    count = len(loading.problems)
    rows = "1 row is" if count == 1 else f"{count} rows are"
    return (
        f"{found.benchmark.title}: {rows} not in its format; the first: {place}: {reason}; "
        f"`mmrl gui validate {config.path} --benchmark {found.benchmark.name}` lists them"
    )


def _with_unique_ids(samples: list[GroundingSample]) -> list[GroundingSample]:
    """Make ids unique: some copies give several rows the same one."""
    seen: set[str] = set()
    for sample in samples:
        name = str(sample.meta["id"])
        if name in seen:
            name = f"{name} ({sample.meta['place']})"
            sample.meta["id"] = name  # type: ignore[index]  # made here, a dict
        seen.add(name)
    return samples
