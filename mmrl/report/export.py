"""`mmrl export`: a run's model as a folder that its own library loads without this suite, with a card."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pydoc
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mmrl.config import foreign_run
from mmrl.errors import UserError
from mmrl.files import expanded, follow_umask
from mmrl.hub.cards import CARD, card_text, code, fenced, head_of, hub_id_of, plain, portable, table, without_paths
from mmrl.hub.compat import quiet_transformers
from mmrl.hub.packaged import PACKAGED, own_folder
from mmrl.recipes import shown_name
from mmrl.report.folder import RunFolder, estimate, read_run
from mmrl.report.page import GENERIC, SOURCES, facts, method, outcome, setting
from mmrl.report.report_tables import JUDGED, headline, headline_name, part_tables, score_tables
from mmrl.runs.export import ABOUT_FILE, Exported, chosen_checkpoint, is_run
from mmrl.runs.metrics import measured
from mmrl.runs.records import read_warnings
from mmrl.runs.statistics import SHARES

KINDS = {"text-generation": "language model", "image-text-to-text": "vision-language model"}
"""Kind of model by its task name on the hub."""
MOST_PARTS = 24
"""Maximum number of task groups in the table of results; the report lists all."""
LARGEST_SETTINGS = 12_000
"""Maximum number of characters of settings included in a card."""


@dataclass(frozen=True)
class Start:
    """The model that training started from, before the first run of a chain."""

    text: str
    """Its name as Markdown."""
    hub_id: str = ""
    """Its hub id, if it is on the hub."""
    licence: str = ""
    """Licence stated in its own card."""
    earlier: tuple[str, ...] = ()
    """Runs in between as Markdown, earliest first."""


def model_card(entry: Any, config: Any, run_dir: Path, step: int, exported: Exported, repository: str = "") -> str:
    """The card of a run's model at a given step; unknown parts are omitted.

    `repository` is its id on the hub, if it is to have one.
    """
    from huggingface_hub import ModelCardData

    run = at_step(read_run(run_dir), step)
    settings = run.settings
    start = start_of(settings, run_dir)
    title = repository.rpartition("/")[2] or run_dir.resolve().name
    data = hub_id_of(str(setting(settings, "data", "path") or ""))
    results = list(_eval_results(run, exported.task)) if run.evaluations else None
    head = ModelCardData(
        model_name=title if results else None,
        base_model=start.hub_id or None,
        library_name=exported.library,
        pipeline_tag=exported.task or None,
        license=start.licence or None,
        datasets=data or None,
        tags=list(dict.fromkeys(filter(None, ["mmrl", shown_name(entry.name, run.objective), run.objective]))),
        eval_results=results,
    )
    lines = [
        f"# {plain(title)}",
        "",
        plain(_summary(entry, run, exported)),
        "",
        *_use(exported, config, repository),
        *_results(run, exported),
        *_training(entry, config, run, step, start, exported),
        *_limits(run, step, settings, start, exported),
        *_citation(entry, run),
    ]
    return card_text(head, lines)


def _summary(entry: Any, run: RunFolder, exported: Exported) -> str:
    """What was trained and how, and the change that training made."""
    kind = KINDS.get(exported.task, "model").capitalize()
    name = method(run) or shown_name(entry.name, run.objective)
    measured_here = run.evaluations and outcome([run])
    unmeasured = "There is no evaluation at this step."
    return f"{kind} trained with {name}. {' '.join(measured_here) if measured_here else unmeasured}"


def at_step(run: RunFolder, step: int) -> RunFolder:
    """The run as it was at a step, with the splits evaluated at that step."""
    until = [record for record in run.evaluations if record["step"] <= step]
    there = {record.get("split", "") for record in until if record["step"] == step}
    metrics = [record for record in run.metrics if record["step"] <= step]
    return replace(run, metrics=metrics, evaluations=[record for record in until if record.get("split", "") in there])


def start_of(settings: Mapping[str, Any], run_dir: Path) -> Start:
    """Follow `model.path` through earlier runs to the initial model."""
    earlier: list[str] = []
    while True:
        path = str(setting(settings, "model", "path") or setting(settings, "policy", "path") or "")
        folder = _found(path, run_dir)
        before = next((place for place in (folder, *folder.parents[:3]) if is_run(place)), None) if folder else None
        if before is None or before.resolve() == run_dir.resolve() or len(earlier) > 20:
            break
        found = read_run(before)
        steps = re.search(r"step-0*(\d+)", str(folder))
        at = f" at step {steps[1]}" if steps else ""
        recipe = found.recipe
        earlier.insert(0, f"{code(recipe)} in {code(before.resolve().name)}{at}")
        settings, run_dir = found.settings, before
    build = setting(settings, "model", "build")
    if build:
        return Start(f"a model built by {code(portable(build))}", earlier=tuple(earlier))
    if not path:
        kind = setting(settings, "model", "kind")
        return Start(f"a new policy of kind {code(portable(kind))}" if kind else "", earlier=tuple(earlier))
    hub_id = hub_id_of(path)
    head = PACKAGED[path].head if own_folder(path) else head_of(hub_id or str(folder or path))
    base = hub_id or (head.get("base_model") if isinstance(head.get("base_model"), str) else "")
    named = plain(head["model_name"]) if isinstance(head.get("model_name"), str) else code(portable(path))
    shown = f"[{plain(hub_id)}](https://huggingface.co/{hub_id})" if hub_id else named
    licence = head.get("license")
    return Start(shown, base or "", licence if isinstance(licence, str) else "", tuple(earlier))


def _found(path: str, run_dir: Path) -> Path | None:
    """The folder of a path, found even if the runs were moved together; None if there is none."""
    places = (expanded(path), *(parent / path for parent in run_dir.resolve().parents)) if path else ()
    return next((place for place in places if place.is_dir()), None)


def _use(exported: Exported, config: Any, repository: str) -> list[str]:
    where = f'"{repository}"' if repository else '"."  # this folder'
    if repository and exported.library not in ("transformers", "diffusers"):
        where = f'snapshot_download("{repository}")'
    first = ["from huggingface_hub import snapshot_download", ""] if "snapshot" in where else []
    shown = fenced("\n".join([*first, f"folder = {where}", exported.load, *filter(None, [exported.use])]), "python")
    data = getattr(config, "data", None)
    for name, sentence in (
        ("system_prompt", "In training, this system message came before the question:"),
        ("format_prompt", "In training, the question was formatted with this Jinja template:"),
    ):
        text = getattr(data, name, None)
        if text:
            shown += [sentence, "", *fenced(portable(text))]
    return ["## Use", "", *shown]


def _results(run: RunFolder, exported: Exported) -> list[str]:
    rows = [*_headline_rows(run), *_group_rows(score_tables([run]))]
    parts = list(_group_rows(part_tables([run]), f"{headline_name(run)}: "))
    rows += parts if len(parts) <= MOST_PARTS else []
    if not rows:
        return []
    several = any(row[2] for row in rows)
    first = f"step {run.evaluations[0]['step']:,}" if run.evaluations and run.evaluations[0]["step"] else "before"
    tasks = "tasks" if run.seen else "held-out tasks"
    heading = [tasks, "measure", *([first, "after", "change"] if several else ["value"]), "n"]
    shown = [[*row[:2], *(row[2:5] if several else row[3:4]), row[5]] for row in rows]
    said = "Brackets are 95% intervals over the tasks."
    decoding = exported.facts.get("decoding", "")
    return ["## Results", "", *table(heading, shown), " ".join(filter(None, [said, decoding])), ""]


def _headline_rows(run: RunFolder) -> Iterator[list[str]]:
    """Split, measure, before, after, change and count of accuracy or success."""
    for found in headline([run]):
        for place, protocol in enumerate(found["protocols"]):
            cells = [row["cells"][place] for row in found["rows"]]
            yield [plain(found["split"]), plain(protocol), *_ends(cells), found["rows"][-1]["count"]]


def _group_rows(tables: Sequence[Mapping[str, Any]], prefix: str = "") -> Iterator[list[str]]:
    """The same of scores, or of the headline by groups of tasks."""
    for found in tables:
        for group in found["groups"]:
            if prefix and not group["heading"].startswith("by "):
                continue
            column = group["heading"].removeprefix("by ")
            for row in group["rows"]:
                name = f"{prefix}{column} = {row['label']}" if prefix else row["label"]
                count = row["count"] if prefix else found["columns"][-1]["count"]
                yield [plain(found["split"]), plain(name), *_ends(row["cells"]), str(count)]


def _ends(cells: Sequence[Mapping[str, str] | None]) -> list[str]:
    """Before, after and change as Markdown; empty if there are none."""
    first, last = (cells[0] if len(cells) > 1 else None), cells[-1]
    shown = ["" if cell is None else plain(f"{cell['value']} {cell['interval']}") for cell in (first, last)]
    change = plain(f"{last['change']} {last['change_interval']}") if last and "change" in last else ""
    return [*shown, change]


def _training(entry: Any, config: Any, run: RunFolder, step: int, start: Start, exported: Exported) -> list[str]:
    known, result = dict(facts(run)), run.result
    steps = result.get("steps")
    device = result.get("device", "")
    processes = result.get("processes", 1)
    summary = "" if entry.name in GENERIC else f": {plain(entry.summary)}"
    name = shown_name(entry.name, run.objective)
    rows = {
        "method": plain(method(run)) + (f", recipe {code(name)}{summary}" if name == entry.name else ""),
        "kind of model": KINDS.get(exported.task, ""),
        "initial model": start.text,
        "earlier runs": "; ".join(start.earlier),
        "data": _data(run.settings, result),
        "held out": plain(known.get("held out", "")),
        "rewards": "; ".join(_rewards(config)),
        "seed": str(getattr(config, "seed", "")),
        "step": f"{step:,}" + (f" of {steps:,}" if isinstance(steps, int) and steps != step else ""),
        "time": known.get("time", ""),
        "date": known.get("date", ""),
        "machine": plain(f"{device}, {processes:g} processes" if processes > 1 else device),
        "versions": plain(known.get("versions", "")),
        **{name: plain(portable(text)) for name, text in exported.facts.items() if name != "decoding"},
    }
    lines = ["## Training", "", *table(["", ""], [[name, text] for name, text in rows.items() if text])]
    if formula := result.get("objective_formula"):
        lines += ["The loss:", "", *fenced(str(formula))]
    changed = {"recipe": entry.name} | _differences(config, entry.default_config())
    changed.pop("output_dir", None)
    text = yaml.safe_dump(portable(changed), sort_keys=False, allow_unicode=True)
    if len(text) <= LARGEST_SETTINGS:
        lines += [
            "To repeat the run, save these settings as `run.yaml` and run `mmrl train run.yaml`. File names "
            "refer to the original machine.",
            "",
            *fenced(text, "yaml"),
        ]
    return lines


def _data(settings: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Source, number of tasks and digest of the training data."""
    place = next((place for place in SOURCES["data"] if setting(settings, *place)), ("data", "path"))
    path, build = setting(settings, *place), setting(settings, place[0], "build")
    found, where = result.get("data", {}), ""
    if path:
        name = str(path)
        where = f"[{plain(name)}](https://huggingface.co/datasets/{name})" if hub_id_of(name) else code(portable(name))
    made = f"built by {code(portable(build))}" if build else ""
    count = f"{found['tasks']:,} tasks" if isinstance(found.get("tasks"), int) else ""
    digest = f"digest {code(found['digest'])}" if found.get("digest") else ""
    return ", ".join(filter(None, [where, made, count, digest]))


def _rewards(config: Any) -> Iterator[str]:
    """Reward terms that were optimised, with their weights."""
    for reward in getattr(config, "rewards", None) or ():
        function = f" ({code(portable(reward.function))})" if reward.function else ""
        yield f"{code(reward.name)}{function}, weight {reward.weight:g}"


def _differences(value: Any, default: Any = None) -> Any:
    """A configuration without what is the default."""
    if isinstance(value, list):
        return [_differences(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _differences(entry) for name, entry in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    found = {}
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        usual = getattr(default, field.name, _default(field)) if type(default) is type(value) else _default(field)
        if own != usual:
            found[field.name] = _differences(own, usual)
    return found


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _limits(run: RunFolder, step: int, settings: Mapping[str, Any], start: Start, exported: Exported) -> list[str]:
    best = run.result.get("best_checkpoint") or {}
    sentences = list(exported.limits)
    if run.evaluations:
        sentences.append(
            "This is a single run with one seed: the intervals cover the choice of tasks, not the variation "
            "between training runs."
        )
    if best.get("step") == step and settings.get("checkpoint", {}).get("every"):
        sentences.append(
            f"This step was selected by its {plain(best.get('metric', 'result'))} on the evaluated tasks, so that "
            "number is somewhat optimistic."
        )
    if not run.result:
        sentences.append("The run has not finished.")
    if start.hub_id and not start.licence:
        sentences.append(f"The licence of {plain(start.hub_id)} (see its own page) also applies to this model.")
    sentences += [f"Warning from the run: {plain(without_paths(text))}." for text in read_warnings(run.folder)]
    return ["## Limits", "", *(f"- {sentence}" for sentence in sentences), ""] if sentences else []


def _citation(entry: Any, run: RunFolder) -> list[str]:
    """BibTeX of the papers of the recipe and of the objective."""
    from mmrl.core.catalogue import all_objectives, all_preferences

    row = {**all_objectives(), **all_preferences()}.get(run.objective)
    cited = getattr(row, "citation", "")
    if entry.name not in GENERIC or "arXiv" not in cited:  # a general recipe cites what its objectives may use
        cited = f"{entry.citation}; {cited}"
    papers = {paper[2]: paper[1].strip(" ,") for paper in re.finditer(r"([^;]*?)\barXiv (\d{4}\.\d{4,5})", cited)}
    entries = []
    for number, text in papers.items():
        authors, known, title = text.rpartition(" et al., ")
        fields = {
            "author": f"{authors} and others" if known else "",
            "title" if known and " " in title else "note": title,  # one word is a method's name
            "year": f"20{number[:2]}",
            "eprint": number,
            "archivePrefix": "arXiv",
        }
        body = ",\n".join(f"  {name} = {{{re.sub(r'[{}]', '', value)}}}" for name, value in fields.items() if value)
        entries.append(f"@misc{{arxiv{number.replace('.', '')},\n{body}\n}}")
    return ["## Citation", "", *fenced("\n\n".join(entries), "bibtex")] if entries else []


def _eval_results(run: RunFolder, task: str) -> Iterator[Any]:
    """The last evaluation of each split for the head of the card."""
    from huggingface_hub import EvalResult

    for split in run.splits:
        record = run.of_split(split)[-1]
        for name in measured([record], (*SHARES, *JUDGED)):
            value, low, high = estimate(record, name)
            interval = {} if low != low else {"low": low, "high": high}
            yield EvalResult(
                task_type=task or "other",
                dataset_type=split or "held-out",
                dataset_name=split or "held-out",
                metric_type=name.partition("/")[0],
                metric_name=name.replace("/", ", "),
                metric_value=round(value, 6),
                metric_args={"n": int(record["n"]), **interval} if record.get("n") == record.get("n") else None,
            )


SOURCE_KEYS = ("_name_or_path", "name_or_path")
"""Keys in transformers' and diffusers' files that record where a model was loaded from."""


def export(args: argparse.Namespace, run_dir: Path, say: Callable[[str], None]) -> int:
    """Export as requested on the command line, and print how to load or upload the folder."""
    output = args.output or run_dir / "export"
    with foreign_run(run_dir / "config.yaml", allow=args.allow) as (entry, config):
        call = export_run(entry, config, run_dir, output, args.step, args.to_hub, args.lora_format)
    say(f"exported: {output}")
    say(f"load it as shown in {output / CARD}" if args.lora_format else f"load it with: {call}")
    if args.to_hub:
        say(f"checked; upload it with: {shlex.join(['hf', 'upload', args.to_hub, str(output)])}")
    return 0


def export_run(
    entry: Any, config: Any, run_dir: Path, output: Path, step: int | None = None, repository: str = "", form: str = ""
) -> str:
    """Export the model of a run's best (else newest) checkpoint to a folder, with adapters merged and a model card.

    With `form`, the format of adapter files, it is the adapters alone. `repository` is the id on the Hugging Face hub
    of a folder that is to be uploaded, which is then also checked.
    """
    _check_id(repository)
    checkpoint = chosen_checkpoint(run_dir, step)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists; choose another --output, or delete it")
    partial = output.with_name(f".partial-{output.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        exported = _export(entry, config, checkpoint, partial, form)
        number = int(checkpoint.name.removeprefix("step-"))
        about = {"recipe": entry.name, "step": number, "load": exported.call} | _prompt_format(config)
        (partial / ABOUT_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        card = model_card(entry, config, run_dir, number, exported, repository)
        (partial / CARD).write_text(card, encoding="utf-8", errors="backslashreplace")
        for file in partial.rglob("*.json"):
            _forget_sources(file)
        if repository:
            _check_upload(partial, exported.call)
        follow_umask(partial)
        if output.exists():
            output.rmdir()
        partial.rename(output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if not exported.call.endswith(")"):
        return f"{exported.call}({str(output)!r})"
    function, _, options = exported.call.partition("(")
    return f"{function}({str(output)!r}, {options}"


def _export(entry: Any, config: Any, checkpoint: Path, folder: Path, form: str) -> Exported:
    """Have the recipe write the model, or its adapters in a format."""
    recipe = entry.load_recipe_class()
    if not form:
        return recipe.export(config, checkpoint, folder)
    if not hasattr(recipe, "export_adapter"):
        raise UserError(
            f"--lora-format is for image and video models, not for the recipe {entry.name}; adapters of language "
            f"models are already in peft format: {checkpoint}/model"
        )
    return recipe.export_adapter(config, checkpoint, folder, form)


def _check_id(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        sound = repository.count("/") == 1
    except HFValidationError:
        sound = False
    if repository and not sound:
        raise UserError(f"--to-hub is {repository!r}; expected a repository id such as your-name/your-model")


def _forget_sources(file: Path) -> None:
    """Take the folder that a model was loaded from out of a library's file; a hub id stays."""
    text = file.read_text(encoding="utf-8")
    if not any(f'"{key}"' in text for key in SOURCE_KEYS):
        return
    content = json.loads(text)
    for key in SOURCE_KEYS:
        if isinstance(content, dict) and not hub_id_of(str(content.get(key, ""))):
            content.pop(key, None)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _check_upload(folder: Path, call: str) -> None:
    """Read the card's head and load the model as others will; raises UserError where something is wrong or private."""
    from huggingface_hub import ModelCard

    try:
        ModelCard.load(folder / CARD)
        load = None if ":" in call else pydoc.locate(call.partition("(")[0])
        if load is not None:
            with quiet_transformers():
                load(str(folder), **dict.fromkeys(re.findall(r"(\w+)=None", call)))  # type: ignore[operator]
    except Exception as error:
        raise UserError(f"the exported folder cannot be loaded: {' '.join(str(error).split())}") from error
    for file in folder.rglob("*.json"):
        found = re.findall(r'"((?:/[^"/\\\s]+){2,})"', file.read_text(encoding="utf-8"))
        private = next((path for path in found if Path(path).exists()), None)
        if private is not None:
            raise UserError(f"{file.relative_to(folder)} contains the local path {private}; nothing was written")


def _prompt_format(config: Any) -> dict[str, str]:
    """Prompt format of training, which later questions have to follow."""
    data = getattr(config, "data", None)
    found = {name: getattr(data, name, None) for name in ("system_prompt", "format_prompt")}
    return {name: value for name, value in found.items() if value}
