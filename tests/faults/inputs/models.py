"""Damaged model folders: configurations, tokenizers and weights of other programs, loaded by a run."""

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.charts import draw_no_charts
from tests.faults.batches import Kind, Verdict, of_command
from tests.faults.damage import damage_bytes, damage_text, damage_tree
from tests.faults.inputs.tiny_runs import LARGEST, SMALL
from tests.faults.tiny import write_run

__all__ = ["KINDS", "Model", "prepare_models", "prepare_robot"]


@dataclass(frozen=True)
class Model:
    config: Path
    folder: Path


def prepare_models(folder: Path) -> list[Model]:
    from tests.contracts.domains import tiny_vlm
    from tests.diffusion.runs import tiny_model

    found = []
    for recipe, model in (("vlm", tiny_vlm()), ("awm", tiny_model()), ("robot_clone", prepare_robot(folder / "robot"))):
        (folder / recipe).mkdir()
        found.append(Model(write_run(recipe, folder / recipe), model))
    return found


def prepare_robot(folder: Path) -> Path:
    from robotics import SmallVlaConfig, SmallVlaPolicy
    from robotics.policies.base.encoder import EncoderConfig
    from tests.robotics.line_demos import BLIND

    encoder = EncoderConfig(**{"state_size": 2, **BLIND})
    policy = SmallVlaPolicy.build(SmallVlaConfig(1, 2, bins=16, encoder=encoder), ["go right", "go left"], seed=0)
    policy.save_pretrained(folder)
    return folder


def _load(models: list[Model], rng: random.Random, folder: Path) -> Verdict:
    model = rng.choice(models)
    shutil.copytree(model.folder, folder / "model")
    files = sorted(path for path in (folder / "model").rglob("*") if path.is_file())
    texts = [path for path in files if path.suffix in (".json", ".jinja", ".txt")]
    file = rng.choice(texts if rng.random() < 0.7 else files)
    if rng.random() < 0.05:
        file.unlink()
    elif file.suffix == ".json" and rng.random() < 0.8:
        file.write_text(json.dumps(damage_tree(rng, json.loads(file.read_text()), largest=LARGEST)))
    elif file in texts:
        file.write_bytes(damage_text(rng, file.read_text()).encode(errors="surrogatepass"))
    else:
        file.write_bytes(damage_bytes(rng, file.read_bytes(), head=512))
    draw_no_charts()
    own = (f"output_dir={folder / 'run'}", f"model.path={folder / 'model'}", *SMALL)
    return of_command("train", model.config, *own, may_fail=True)


KINDS = (Kind("models", prepare_models, _load, share=0.3, limit_s=60),)
