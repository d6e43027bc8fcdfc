"""The load-balancing loss of mixtures of experts against transformers' own."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmrl.core.loss import Denominators
from mmrl.core.rollouts import Rollouts
from mmrl.errors import UserError
from mmrl.recipes import RECIPES
from mmrl.rewards import RewardConfig
from mmrl.training.recipe import Step, shared_prefix
from mmrl.training.run import train
from mmrl.vlm.data.prompt import VlmPayload
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.methods.preference import PreferenceRunConfig
from mmrl.vlm.methods.sft import SftConfig
from mmrl.vlm.router_loss import RouterLoss
from mmrl.vlm.vlm_config import VlmConfig
from tests.contracts.test_two_processes import STEPS, assert_same, train_in_two
from tests.contracts.test_two_processes import train as train_alone
from tests.vlm.families.test_generic import LENGTHS, gradient, make_prompts, make_rollouts
from tests.vlm.families.zoo import EXPERTS, make_policy, own_inputs
from tests.vlm.pairs import pair_config
from tests.vlm.runs import run_config

COEF = 0.1
MIXTURES = ["qwen3_moe", "qwen3_vl_moe"]


def recipe_of(policy: VlmPolicy, micro_batch: int) -> Any:
    """Stand-in for a recipe, with the parts that RouterLoss reads."""
    return SimpleNamespace(
        policy=policy,
        scores=lambda policy, rollouts, outputs: policy(rollouts, outputs=outputs),
        config=SimpleNamespace(trainer=SimpleNamespace(micro_batch=micro_batch)),
    )


def router_loss(policy: VlmPolicy, rollouts: Rollouts, micro_batch: int, *, differentiate: bool = True) -> float:
    """The loss of an optimiser step in micro-batches; gradients add up in the weights."""
    term = RouterLoss(recipe_of(policy, micro_batch), COEF)
    counts = Denominators(1.0, 1.0, others=term.counts(rollouts))
    chunks, total = list(rollouts.micro_batches(micro_batch or rollouts.num_rows)), 0.0
    with shared_prefix(policy, chunks) as shared:
        for chunk in chunks:
            found = term(policy, chunk, policy(chunk, outputs=term.outputs), counts, Step())
            if differentiate:
                found.terms["loss/router"].backward()
            total += float(found.terms["loss/router"].detach())
        if differentiate:
            shared.backward()
    return total


def own_loss(policy: VlmPolicy, kind: str, rollouts: Rollouts) -> torch.Tensor:
    """The same by transformers, every row through the model's own forward."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    payload, rows = VlmPayload.of(rollouts), []
    for row, length in enumerate(LENGTHS):
        inputs = own_inputs(kind, payload.prompts[int(rollouts.group[row])], payload.response_ids[row, : length - 1])
        rows.append(policy.network(**inputs, output_router_logits=True).router_logits)
    text = policy.network.config.get_text_config()
    logits = tuple(torch.cat(layer) for layer in zip(*rows, strict=True))
    return COEF * load_balancing_loss_func(logits, text.num_experts, text.num_experts_per_tok)


def unused_row(rollouts: Rollouts) -> Rollouts:
    """The rollouts with one more row, no token of which is trained."""
    payload = VlmPayload.of(rollouts)
    more = Rollouts(
        torch.cat([rollouts.group, rollouts.group[-1:]]),
        torch.cat([rollouts.mask, torch.zeros_like(rollouts.mask[:1])]),
        torch.cat([rollouts.logp_old, rollouts.logp_old[:1]]),
        torch.cat([rollouts.reward, rollouts.reward[:1]]),
        VlmPayload(
            payload.prompts,
            payload.tasks,
            torch.cat([payload.response_ids, payload.response_ids[:1]]),
            [*payload.texts, ""],
            [*payload.finish, "length"],
        ),
    )
    return more


@pytest.mark.parametrize("kind", MIXTURES)
def test_value_and_gradient_are_those_of_transformers(kind):
    policy = make_policy(kind, router_aux_loss_coef=COEF)
    rollouts = make_rollouts(make_prompts(policy, kind))
    expected = own_loss(policy, kind, rollouts)
    expected.backward()
    slope = gradient(policy)
    assert slope.norm() > 0
    for rows, micro_batch in ((rollouts, 0), (rollouts, 1), (unused_row(rollouts), 0)):
        assert router_loss(policy, rows, micro_batch) == pytest.approx(float(expected.detach()), rel=1e-6)
        assert (gradient(policy) - slope).norm() < 1e-5 * slope.norm()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3_moe", {"gradient_checkpointing": True}),
        pytest.param("qwen3_moe", {"shared_prefix": False}, marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", {"gradient_checkpointing": True}, marks=pytest.mark.slow),
        ("qwen3_vl_moe", {"shared_prefix": False}),
    ],
)
def test_checkpointing_and_flat_rows_change_nothing(kind, options):
    policy = make_policy(kind, router_aux_loss_coef=COEF, **options).train()
    rollouts = make_rollouts(make_prompts(policy, kind))
    expected = own_loss(policy.eval(), kind, rollouts)
    expected.backward()
    slope = gradient(policy)
    assert router_loss(policy.train(), unused_row(rollouts), 4) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert (gradient(policy) - slope).norm() < 1e-5 * slope.norm()


def test_a_kept_prefill_counts_too():
    policy = make_policy("qwen3_moe", router_aux_loss_coef=COEF)
    prompts = make_prompts(policy, "qwen3_moe")
    rollouts = make_rollouts(prompts)
    expected = router_loss(policy, rollouts, 0)
    slope = gradient(policy)
    policy.prefixes.keep(prompts, policy.encode_prefix(prompts))
    encode, read = policy.encode_prefix, []
    policy.encode_prefix = lambda some: read.append(len(some)) or encode(some)
    assert router_loss(policy, rollouts, 0) == pytest.approx(expected, rel=1e-12)
    assert not read
    assert torch.allclose(gradient(policy), slope, rtol=1e-9)


def test_the_gradient_is_that_of_finite_differences():
    policy = make_policy("qwen3_moe", router_aux_loss_coef=COEF)
    rollouts = make_rollouts(make_prompts(policy, "qwen3_moe"))
    router_loss(policy, rollouts, 2)
    weight = policy.network.model.layers[-1].mlp.gate.weight  # no float32 norm behind it
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=weight.dtype)
    slope, values = float((weight.grad * direction).sum()), []
    for side in (1e-6, -1e-6):
        with torch.no_grad():
            weight.add_(side * direction)
            values.append(router_loss(policy, rollouts, 2, differentiate=False))
            weight.sub_(side * direction)
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-4)


def test_models_without_experts_are_refused():
    with pytest.raises(
        UserError, match=r"model\.router_aux_loss_coef is above 0, .* of type qwen3; it only exists for mixtures"
    ):
        make_policy("qwen3", router_aux_loss_coef=COEF)


def mixture_of(dense: Any, folder: Any) -> Any:
    """A Qwen3 mixture of experts with the tokenizer and the sizes of a dense model."""
    import transformers

    shutil.copytree(dense, folder)
    sizes = transformers.AutoConfig.from_pretrained(dense).to_dict()
    config = transformers.AutoConfig.for_model(**sizes | EXPERTS | {"model_type": "qwen3_moe", "architectures": None})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config = transformers.GenerationConfig.from_pretrained(dense)
    model.save_pretrained(folder)
    return folder


def without_images(config: Any) -> Any:
    """The run on its questions as text alone."""
    path = Path(config.data.path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [
        row
        | {name: row[name].removeprefix("<image>") for name in ("problem", "prompt") if name in row}
        | {"images": []}
        for row in rows
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[] if name == "vlm" else pytest.mark.slow) for name in ("vlm", "sft", "preference")],
)
def test_runs_log_it_and_micro_batches_do_not_change_it(recipe, tiny_generic, tmp_path):
    model, logged = mixture_of(tiny_generic["qwen3"], tmp_path / "model"), []
    for micro_batch in (0, 2):
        folder = tmp_path / str(micro_batch)
        if recipe == "preference":
            config: PreferenceRunConfig | SftConfig | VlmConfig = pair_config(folder, model)
        else:
            config = run_config(SftConfig if recipe == "sft" else VlmConfig, folder, model)
        config = without_images(config)
        config.eval_data, config.model.router_aux_loss_coef = {}, COEF
        config.trainer.steps, config.trainer.micro_batch = 1, micro_batch
        if isinstance(config, VlmConfig):
            config.rewards = [RewardConfig(name="tests.vlm.user_reward:code_points", isolate=False)]
        (row,) = map(json.loads, (train(RECIPES[recipe], config) / "metrics.jsonl").open())
        logged.append(row)
    first, second = logged
    assert first["loss/router"] > 2 * COEF  # what two experts a token would give if they were used evenly
    assert first["router/busiest_max"] > 1
    for name in ("loss/router", "loss/total", "optim/grad_norm"):
        assert second[name] == pytest.approx(first[name], rel=1e-4, abs=1e-7)


@pytest.mark.slow
def test_two_processes_balance_the_tokens_of_both(tiny_generic, tmp_path):
    config = without_images(run_config(VlmConfig, tmp_path, mixture_of(tiny_generic["qwen3"], tmp_path / "model")))
    config.recipe, config.eval_data = "vlm", {}
    config.rewards = [RewardConfig(name="tests.vlm.user_reward:code_points", isolate=False)]
    config.trainer.steps, config.trainer.tasks_per_step = STEPS, 4
    config.trainer.adam_eps, config.trainer.learning_rate = 1.0, 0.1
    plain = train_alone(config, tmp_path / "plain")
    config.model.router_aux_loss_coef = 10.0  # so that a share of its own in each process would be seen
    whole = train_alone(config, tmp_path / "one")
    assert float((whole["weights"] - plain["weights"]).abs().max()) > 0.1 * float(
        (whole["weights"] - whole["begin"]).abs().max()
    )
    assert_same(train_in_two(config, tmp_path / "two"), whole)
