import json
import math
from dataclasses import replace

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.rewards import RewardConfig
from mmrl.runs.records import read_samples
from mmrl.training.objectives import PreferenceConfig, make_preference
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step, make_reference, shared_prefix
from mmrl.training.run import evaluate, train
from mmrl.training.update import count_denominators, needs_reference, update_constants
from mmrl.vlm.data.dataset import DataConfig
from mmrl.vlm.data.prompt import token_lists
from mmrl.vlm.engine.vlm_policy import load_policy
from mmrl.vlm.methods import preference
from mmrl.vlm.methods.preference import PreferenceRecipe, mismatched
from mmrl.vlm.model.model_config import ModelConfig
from tests.contracts.options import with_changes
from tests.rounding import assert_equal_up_to_rounding, assert_same_gradient
from tests.shares import in_shares
from tests.vlm.pairs import pair_config, write_pairs

MODEL, ADAPTER_FILE = "qwen2_5_vl", "adapter_model.safetensors"


def built(config, disturbed: bool = True) -> PreferenceRecipe:
    """The recipe with its policy moved away from the reference, which is made before."""
    config.validate()
    recipe = PreferenceRecipe(config)
    recipe.reference = make_reference(config.reference, recipe.policy, needed=needs_reference(recipe))
    if disturbed:
        generator = torch.Generator().manual_seed(3)
        recipe._fill_start_scores(recipe.policy, Step())
        with torch.no_grad():
            for parameter in recipe.policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return recipe


def step_pairs(recipe: PreferenceRecipe, count: int = 6):
    """The pairs of a step with their reference log-probabilities."""
    rollouts = recipe.rollout(recipe.policy, recipe.train_tasks[:count], Streams(0), Step())
    return update_constants(recipe, recipe.policy, recipe.reference, rollouts, Step())


def loss_and_gradient(recipe: PreferenceRecipe, rollouts, rows: int = 0) -> tuple[float, torch.Tensor]:
    recipe.policy.zero_grad()
    counts = count_denominators(recipe, rollouts)
    chunks = list(rollouts.micro_batches(rows or rollouts.num_rows))
    total = 0.0
    with shared_prefix(recipe.policy, chunks) as shared:
        for chunk in chunks:
            output = recipe.loss(recipe.policy, chunk, counts, Step())
            output.loss.backward()
            total += float(output.loss.detach())
        shared.backward()
    gradients = [p.grad.flatten() for p in recipe.policy.parameters() if p.grad is not None]
    return total, torch.cat(gradients)


def weights(run_dir, step: int) -> torch.Tensor:
    policy = load_policy(ModelConfig(path=str(run_dir / f"checkpoints/step-{step:06d}/model")))
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def test_shared_prompts_change_nothing_but_the_time(tmp_path, tiny_folders, family):
    found = []
    for shared in (True, False):
        config = pair_config(tmp_path / str(shared), tiny_folders[family])
        config.model.shared_prefix = shared
        recipe = built(config)
        rollouts = step_pairs(recipe)
        assert rollouts.num_groups == 6
        assert len(rollouts.payload.prompts) == 6, "a prompt stands once for both sides"
        found.append((rollouts.logp_ref, *loss_and_gradient(recipe, rollouts)))
    (ref, loss, gradient), (flat_ref, flat_loss, flat_gradient) = found
    assert_equal_up_to_rounding(ref, flat_ref)
    assert_equal_up_to_rounding(torch.tensor(loss), torch.tensor(flat_loss))
    assert_same_gradient(gradient, flat_gradient)


@pytest.mark.parametrize("preset", ["dpo", "ipo", "rpo", "refuel"])
def test_micro_batches_change_only_rounding(tmp_path, tiny_folders, preset):
    config = pair_config(tmp_path, tiny_folders[MODEL])
    config.objective.preset = preset
    recipe = built(config)
    rollouts = step_pairs(recipe)
    loss, gradient = loss_and_gradient(recipe, rollouts)
    for rows in (2, 4):
        other, other_gradient = loss_and_gradient(recipe, rollouts, rows)
        assert_equal_up_to_rounding(torch.tensor(other), torch.tensor(loss))
        assert_same_gradient(other_gradient, gradient)


@pytest.mark.parametrize("lora", [False, True])
def test_a_reference_computed_ahead_is_that_of_each_step(tmp_path, tiny_folders, lora):
    found = []
    for ahead in (False, True):
        config = pair_config(tmp_path / str(ahead), tiny_folders[MODEL])
        config.model.lora.enabled, config.precompute_reference = lora, ahead
        recipe = built(config)
        assert needs_reference(recipe) is not ahead
        assert recipe.reference.kind == ("none" if ahead else "adapter" if lora else "frozen")
        rollouts = step_pairs(recipe, 4)
        found.append(rollouts.logp_ref)
        own = recipe.logp(recipe.policy, rollouts)
        assert float((own - rollouts.logp_ref).abs().max()) > 0.01, "the policy has moved, the reference has not"
    assert_equal_up_to_rounding(found[1], found[0])


@pytest.mark.parametrize("ahead", [False, True])
def test_margins_are_zero_at_the_start_of_a_run_from_an_adapter(tmp_path, tiny_folders, ahead):
    first = pair_config(tmp_path / "first", tiny_folders[MODEL], steps=1, learning_rate=3e-2)
    first.model.lora.enabled = True
    adapter = train(RECIPES["preference"], first) / "checkpoints/step-000001/model"
    config = pair_config(tmp_path / "second", adapter)
    config.model.lora.enabled, config.precompute_reference = True, ahead
    recipe = built(config, disturbed=False)
    rollouts = step_pairs(recipe)
    assert_equal_up_to_rounding(recipe.logp(recipe.policy, rollouts), rollouts.logp_ref)
    held_out = recipe.held_out_pairs(recipe.policy, "heldout", recipe.eval_tasks["heldout"])
    assert_equal_up_to_rounding(recipe.logp(recipe.policy, held_out), held_out.logp_ref)


@pytest.mark.slow
def test_steps_from_an_adapter_are_those_of_trl(tmp_path, tiny_folders, monkeypatch):
    """Margins of 0 at the first step, and then equal losses and weights."""
    pytest.importorskip("trl", reason="needs pip install 'mmrl-suite[bench]'")
    # TRL gives a probability to the placeholders of images, too
    monkeypatch.setattr("mmrl.vlm.engine.vlm_policy.banned_ids", lambda *_: torch.zeros(0, dtype=torch.int64))
    first = pair_config(tmp_path / "first", tiny_folders[MODEL], steps=1, learning_rate=3e-2)
    first.model.lora.enabled = True
    adapter = train(RECIPES["preference"], first) / "checkpoints/step-000001/model"
    data = write_pairs(tmp_path / "pairs")
    rows = [json.loads(line) for line in data.read_text().splitlines()][:-1]  # the last one has no image
    data.write_text("\n".join(map(json.dumps, rows)))
    # with this constant no rounding of a gradient turns the sign of a step
    options = {"steps": 3, "tasks_per_step": len(rows), "learning_rate": 1.0, "max_grad_norm": 0.0, "adam_eps": 1.0}
    config = pair_config(tmp_path / "second", adapter, data, **options)
    config.model.lora.enabled = True
    run_dir = train(RECIPES["preference"], config)
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    logged, theirs = trained_by_trl(tmp_path / "trl", tiny_folders[MODEL], adapter, PreferenceRecipe(config), options)
    assert found[0]["rewards/margins"] == logged[0]["rewards/margins"] == 0
    for own, other in zip(found, logged, strict=True):
        for name in ("rewards/margins", "rewards/chosen", "logps/chosen", "logps/rejected"):
            assert own[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name
    ours, start = (load_file(folder / ADAPTER_FILE) for folder in (run_dir / "checkpoints/step-000003/model", adapter))
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert_equal_up_to_rounding(weight, theirs[name], passes=3)
    assert max(float((ours[name] - start[name]).abs().max()) for name in ours) > 0.01


def trained_by_trl(folder, base, adapter, recipe, options):
    """What TRL's trainer logs at each step on the recipe's pairs, and its adapter afterwards."""
    from datasets import Dataset, Image, List
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from trl import DPOConfig, DPOTrainer

    policy, tasks, processor = recipe.policy, recipe.train_tasks, AutoProcessor.from_pretrained(base)
    end = processor.tokenizer.convert_ids_to_tokens(policy.eos_ids[0])
    columns = {
        "prompt": [policy.encode(task).text for task in tasks],
        "images": [task.load_images() for task in tasks],
        **{side: [task.columns[side] + end for task in tasks] for side in ("chosen", "rejected")},
    }
    model = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(base), adapter, is_trainable=True)
    arguments = DPOConfig(
        output_dir=str(folder),
        max_steps=options["steps"],
        per_device_train_batch_size=len(tasks),
        learning_rate=options["learning_rate"],
        adam_epsilon=options["adam_eps"],
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = Dataset.from_dict(columns).cast_column("images", List(Image()))
    trainer = DPOTrainer(model=model, args=arguments, train_dataset=data, processing_class=processor)
    trainer.train()
    AcceleratorState._reset_state(reset_partial_state=True)  # it was told to use the CPU
    trainer.model.save_pretrained(folder, selected_adapters=["default"])
    return trainer.state.log_history[: options["steps"]], load_file(folder / ADAPTER_FILE)


def test_pairs_that_the_run_began_without_are_refused(tmp_path, tiny_folders):
    config = pair_config(tmp_path, tiny_folders[MODEL], steps=1)
    run_dir = train(RECIPES["preference"], config)
    config.eval_data["late"] = config.eval_data["heldout"]
    with pytest.raises(UserError, match=r"eval_data\.late was not part of the run when it started"):
        evaluate(RECIPES["preference"], config, run_dir)


@pytest.mark.slow
def test_a_run_learns_the_order_and_shows_both_sides(tmp_path, tiny_folders):
    config = pair_config(tmp_path, tiny_folders[MODEL], steps=12, tasks_per_step=6, learning_rate=3e-3)
    config.evaluation.rewards = [RewardConfig(name="exact")]
    run_dir = train(RECIPES["preference"], config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert rows[0]["loss/total"] == pytest.approx(math.log(2), rel=1e-5), "policy and reference are the same at first"
    assert rows[-1]["loss/total"] < 0.5 * rows[0]["loss/total"]
    assert rows[-1]["rewards/margins"] == pytest.approx(rows[-1]["rewards/chosen"] - rows[-1]["rewards/rejected"])
    evaluations = [json.loads(line) for line in (run_dir / "evaluations.jsonl").open()]
    assert [row["accuracy/rewards"] for row in evaluations] == [0.0, 1.0]
    assert evaluations[-1]["rewards/margins"] > 0.5
    assert evaluations[-1]["pairs/skipped"] == 0
    assert {"accuracy/likelier", "accuracy/greedy", "logps/chosen"} <= set(evaluations[0])
    samples = read_samples(run_dir, 12, "train")
    assert [sample.terms["preferred"] for sample in samples] == [1.0, 0.0, 1.0, 0.0]
    assert samples[0].id == samples[1].id
    assert samples[0].response == "<answer>7</answer>"
    assert samples[0].reward > samples[1].reward
    assert evaluate(RECIPES["preference"], config, run_dir)["heldout/accuracy/rewards"] == 1.0
    page = (run_dir / "report.html").read_text()
    assert "Implicit rewards" in page


def test_held_out_pairs_alone_are_enough(tmp_path, tiny_folders):
    run_dir = train(RECIPES["preference"], pair_config(tmp_path, tiny_folders[MODEL]))
    evaluations = [json.loads(line) for line in (run_dir / "evaluations.jsonl").open()]
    assert [row["tag"] for row in evaluations] == ["before", "after"]
    shown = read_samples(run_dir, 2, "eval")[0].response
    assert shown.startswith("preferred: <answer>7</answer>\nrejected: <think>")


@pytest.mark.slow
def test_a_resumed_run_with_precomputed_references_is_one_that_was_not_interrupted(tmp_path, tiny_folders):
    final = []
    for name in ("whole", "resumed"):
        config = pair_config(tmp_path / name, tiny_folders[MODEL], steps=3)
        config.precompute_reference = True
        if name == "resumed":
            config.trainer.steps = 2
            train(RECIPES["preference"], config)
            config.trainer.steps = 3
            (tmp_path / name / "run/result.json").unlink()
        run_dir = train(RECIPES["preference"], config, resume=name == "resumed")
        last = [json.loads(line) for line in (run_dir / "evaluations.jsonl").open()][-1]
        final.append((weights(run_dir, 3), last["rewards/margins"]))
    assert torch.equal(final[0][0], final[1][0])
    assert final[0][1] == final[1][1]


def spoil(number: int, **cells):
    return lambda place, row: row.update(cells) if place == number else None


TURN = [{"role": "assistant", "content": "yes"}]
ASKED = [{"role": "user", "content": "What is 3 plus 4?"}]


@pytest.mark.parametrize(
    ("cells", "kind", "message"),
    [
        ({"rejected": "<answer>7</answer>"}, "equal_sides", "'chosen' and 'rejected' are the same text"),
        ({"rejected": None}, "missing_side", "no response in column 'rejected'"),
        ({"chosen": "  "}, "empty_side", "the response in column 'chosen' is empty"),
        ({"chosen": ["yes"]}, "bad_side", "the roles None; expected a text, or one assistant turn"),
        ({"chosen": 7}, "bad_side", "has a int"),
        ({"chosen": [*TURN, *ASKED, *TURN]}, "bad_side", "the roles assistant, user, assistant"),
        ({"chosen": [{"role": "assistant", "content": [{"type": "image"}]}]}, "bad_side", "something other than text"),
        (
            {"rejected": "look <|image_pad|>"},
            "media_in_side",
            "'rejected' contains .* which is not allowed in an answer",
        ),
    ],
)
def test_bad_pairs_stop_the_run_or_are_counted(tmp_path, tiny_folders, cells, kind, message):
    data = write_pairs(tmp_path / "data", spoil(2, **cells))
    config = pair_config(tmp_path, tiny_folders[MODEL], data)
    with pytest.raises(UserError, match=f"q2: .*{message}.*data.on_bad_row=skip"):
        PreferenceRecipe(config)
    config.data.on_bad_row = config.eval_data["heldout"].on_bad_row = "skip"
    recipe = PreferenceRecipe(config)
    assert recipe.skipped == {kind: 1}
    assert len(recipe.train_tasks) == len(recipe.eval_tasks["heldout"]) == 5


@pytest.mark.parametrize(
    ("cells", "kind"), [({"chosen": "yes " * 600}, "long_side"), ({"images": ["missing.png"]}, "missing_image")]
)
def test_pairs_that_do_not_fit_the_model_are_counted_and_never_cut(tmp_path, tiny_folders, cells, kind):
    data = write_pairs(tmp_path / "data", spoil(0, **cells))
    if kind == "missing_image":  # found when the file is read; here it vanishes later
        data = write_pairs(tmp_path / "data")
    config = pair_config(tmp_path, tiny_folders[MODEL], data)
    recipe = PreferenceRecipe(config)
    if kind == "missing_image":
        (tmp_path / "data/0.png").unlink()
    pairs = recipe.pairs_of(recipe.policy, recipe.train_tasks)
    assert [task.id for task in pairs.payload.tasks] == ["q1", "q2", "q3", "q4", "q5"]
    assert recipe.skipped == {kind: 1}


def test_a_question_longer_than_the_model_reads_is_skipped_whole(tmp_path, tiny_folders):
    config = pair_config(tmp_path, tiny_folders[MODEL])
    config.model.max_prompt_tokens = 10  # inside the span of the image
    recipe = PreferenceRecipe(config)
    pairs = recipe.pairs_of(recipe.policy, recipe.train_tasks)
    assert pairs is None or all(not task.images for task in pairs.payload.tasks)
    assert recipe.skipped["prompt_too_long"] >= 5


def test_no_usable_pair_is_an_error(tmp_path, tiny_folders):
    data = write_pairs(tmp_path / "data", lambda number, row: row.update(rejected=row["chosen"]))
    config = pair_config(tmp_path, tiny_folders[MODEL], data)
    config.data.on_bad_row = "skip"
    with pytest.raises(UserError, match=r"no usable rows .*6 equal_sides"):
        PreferenceRecipe(config)


@pytest.mark.parametrize(
    "sides",
    [
        {"chosen": TURN, "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "no"}]}]},
        {"prompt": ASKED, "images": [], "chosen": [*ASKED, *TURN], "rejected": [*ASKED, {**TURN[0], "content": "no"}]},
    ],
)
def test_sides_as_chat_turns(tmp_path, tiny_folders, sides):
    data = write_pairs(tmp_path / "data", lambda number, row: row.update(sides))
    recipe = PreferenceRecipe(pair_config(tmp_path, tiny_folders[MODEL], data))
    pairs = recipe.pairs_of(recipe.policy, recipe.train_tasks[:1])
    assert pairs.payload.texts == ["yes", "no"]
    assert pairs.mask.sum(1).tolist() == [
        len(recipe.policy.processor.tokenizer.encode(text)) + 1 for text in ("yes", "no")
    ]


def test_scores_of_the_data_are_read_where_the_loss_wants_them(tmp_path, tiny_folders):
    config = pair_config(tmp_path, tiny_folders[MODEL])
    config.objective.preset = "sppo"
    rollouts = step_pairs(built(config), 1)
    assert rollouts.extras["pair_score"].tolist() == [2.0, 0.5]
    data = write_pairs(tmp_path / "other", spoil(1, score_rejected="high"))
    config = pair_config(tmp_path, tiny_folders[MODEL], data)
    config.objective.preset = "refuel"
    with pytest.raises(UserError, match="column 'score_rejected' is 'high'; the loss needs a finite score"):
        PreferenceRecipe(config)


def test_held_out_questions_without_pairs_need_rewards(tmp_path, tiny_folders):
    config = pair_config(tmp_path, tiny_folders[MODEL])
    config.eval_data["heldout"].path = str(tmp_path / "data/questions.jsonl")
    with pytest.raises(UserError, match=r"has no columns 'chosen' and 'rejected', and evaluation\.rewards is empty"):
        PreferenceRecipe(config)
    config.evaluation.rewards = [RewardConfig(name="exact")]
    PreferenceRecipe(config).close()


def test_a_data_set_without_the_columns_names_them(tmp_path, tiny_folders):
    config = pair_config(tmp_path, tiny_folders[MODEL])
    config.chosen_key = "better"
    with pytest.raises(
        UserError, match="no response in column 'better'; the row's other columns: id, chosen, rejected"
    ):
        PreferenceRecipe(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.micro_batch": 1}, "use at least 2"),
        ({"chosen_key": "rejected"}, "both 'rejected'"),
        ({"objective.preset": "grpo"}, "unknown preference objective 'grpo'"),
        (
            {"objective.loss": {"kind": "none"}, "objective.likelihood": {"coef": 1.0, "kind": "nll"}},
            "has no reference",
        ),
        ({"reference.kind": "ema"}, "only the initial model"),
        ({"objective.likelihood": {"kind": "nll"}}, "likelihood is 'nll', whose coef is 0 by default"),
        (
            {"evaluation.rewards": [RewardConfig("exact", weight=0.5)]},
            r"evaluation\.rewards: 'exact' has weight 0\.5, but it is only reported; leave weight out",
        ),
        ({"objective.preset": "kto"}, r"precompute_reference is true.*'kto'"),
        (
            {"objective.preset": "kto", "precompute_reference": False, "trainer.tasks_per_step": 1},
            r"tasks_per_step is 1.*'kto'.*at least 2",
        ),
    ],
)
def test_contradictions_are_refused_before_a_model_is_loaded(tmp_path, changes, message):
    config = pair_config(tmp_path, tmp_path / "no-model")
    config.precompute_reference = True
    with pytest.raises(ValueError, match=message):
        with_changes(config, changes).validate()


def test_the_baseline_of_kto_is_that_of_each_answer_behind_the_next_question(tmp_path, tiny_folders):
    config = pair_config(tmp_path, tiny_folders[MODEL])
    config.objective.preset = "kto"
    recipe = built(config)
    rollouts = step_pairs(recipe)
    ratios = []
    for number, task in enumerate(recipe.train_tasks):
        other = recipe.train_tasks[number - 1]
        crossed = replace(task, columns=task.columns | {key: other.columns[key] for key in ("chosen", "rejected")})
        rows = recipe.pairs_of(recipe.policy, [crossed])
        reference = recipe.reference.score(lambda module, rows=rows: recipe.logp(module, rows))
        ratios += (recipe.logp(recipe.policy, rows) - reference).sum(1).tolist()
    assert max(map(abs, ratios)) > 1e-3
    found = rollouts.extras["kl_baseline"]
    assert found.tolist() == pytest.approx([sum(ratios) / len(ratios)] * 12, rel=1e-4)
    recipe.objective = make_preference(PreferenceConfig(preset="kto", score={"kind": "mean"}))
    others = mismatched(rollouts, recipe.policy.positions)
    reference = recipe.reference.score(lambda module: recipe.logp(module, others))
    means = ((recipe.logp(recipe.policy, others) - reference) * others.mask).sum(1) / others.mask.sum(1)
    assert step_pairs(recipe).extras["kl_baseline"].tolist() == pytest.approx([float(means.mean())] * 12, rel=1e-4)
    assert len(others.group) == 12
    shortest = min(len(prompt) for prompt in rollouts.payload.prompts)
    assert mismatched(rollouts, shortest) is None, "answers that do not fit are left out"
    assert mismatched(rollouts.select_groups(torch.tensor([0])), 1000) is None


@pytest.mark.parametrize("processes", [2, 4])
def test_the_answer_before_may_be_that_of_another_process(tmp_path, tiny_folders, monkeypatch, processes):
    """With a question for each process, none has another question's answer of its own."""
    config = pair_config(tmp_path, tiny_folders[MODEL])
    config.objective.preset = "kto"
    recipe = built(config, disturbed=False)

    def crossed(places):
        tasks = [recipe.train_tasks[place] for place in places]
        rows = recipe.rollout(recipe.policy, tasks, Streams(0, places), Step())
        found = mismatched(rows, recipe.policy.positions)
        return token_lists(found.payload.response_ids, found.mask)

    whole = crossed(range(4))
    shares = in_shares(monkeypatch, preference, lambda rank: crossed(range(rank, 4, processes)), processes)
    for rank, rows in enumerate(shares):
        assert rows == [row for place in range(rank, 4, processes) for row in whole[2 * place : 2 * place + 2]]


def write_labelled(folder, labels=(True, False, True, True, False, True)):
    """Six questions with an answer each, of which more are desirable than not."""

    def change(number, row):
        sides = {True: row.pop("chosen"), False: row.pop("rejected")}
        row |= {"completion": sides[labels[number]], "label": labels[number]}

    return write_pairs(folder, change)


def labelled(tmp_path, tiny_folders, **changes):
    config = pair_config(tmp_path, tiny_folders[MODEL], write_labelled(tmp_path / "answers"), **changes)
    config.objective.preset, config.eval_data = "kto", {"pairs": DataConfig(path=str(write_pairs(tmp_path / "pairs")))}
    return config


def test_kto_learns_from_single_answers_with_labels(tmp_path, tiny_folders):
    recipe = built(labelled(tmp_path, tiny_folders))
    rollouts = step_pairs(recipe)
    marks = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    assert rollouts.num_groups == rollouts.num_rows == 6
    assert rollouts.extras["chosen"].tolist() == marks.tolist()
    ratio = recipe.logp(recipe.policy, rollouts).sum(1) - rollouts.logp_ref.sum(1)
    zero = rollouts.extras["kl_baseline"].clamp(min=0)
    expected = torch.where(marks > 0, torch.sigmoid(0.1 * (zero - ratio)), torch.sigmoid(0.1 * (ratio - zero))).mean()
    loss, gradient = loss_and_gradient(recipe, rollouts)
    assert loss == pytest.approx(float(expected), rel=1e-4)
    other, other_gradient = loss_and_gradient(recipe, rollouts, rows=1)
    assert other == pytest.approx(loss, rel=1e-5)
    assert_same_gradient(other_gradient, gradient)
    for record in recipe.records(rollouts, 12):
        assert record.terms["preferred"] == float(record.response == "<answer>7</answer>")
    equal = recipe.objective.pairs(rollouts.logp_ref[:4], rollouts.select(torch.arange(4)))
    assert "rewards/margins" not in recipe.objective.pair_numbers(
        replace(equal, logp_w=equal.logp_l, ref_w=equal.ref_l)
    )


@pytest.mark.slow
def test_a_run_on_labelled_answers_measures_pairs(tmp_path, tiny_folders):
    run = train(RECIPES["preference"], labelled(tmp_path, tiny_folders, tasks_per_step=6))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line[name]) for line in lines for name in ("rewards/chosen", "rewards/rejected"))
    assert "accuracy/rewards" in (run / "evaluations.jsonl").read_text()


@pytest.mark.parametrize(
    ("preset", "cells", "message"),
    [
        ("dpo", {}, "no response in column 'chosen'; the row's other columns: .*completion, label"),
        ("kto", {"label": "good"}, "column 'label' is 'good'; expected true .desirable. or false"),
        ("kto", {"completion": " "}, "the response in column 'completion' is empty"),
    ],
)
def test_labelled_answers_that_cannot_be_learnt_from_are_refused(tmp_path, tiny_folders, preset, cells, message):
    config = labelled(tmp_path, tiny_folders)
    config.objective.preset = preset
    path = tmp_path / "answers/pairs.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | cells), *others]))
    with pytest.raises(UserError, match=message):
        PreferenceRecipe(config)
