import gc
import weakref

import pytest
import torch
from torch import nn

from diffusion.families.table import family_of
from diffusion.models.conditioning import PromptEmbeddings, TextEncoders
from diffusion.models.pipelines import load_pipeline
from mmrl.errors import UserError
from tests.diffusion.builders import CAPTIONS, SIZES, T5_TOKENS, RowCounter, load_sd3
from tests.diffusion.families import tiny
from tests.programs import run_after_torch

ONE, TWO, THREE = "a red circle", "a blue square", "three green triangles"
LONG = " ".join([ONE] * 8)


def embeddings(pipeline, **options):
    return PromptEmbeddings(family_of(pipeline, max_sequence_length=T5_TOKENS), **options)


def fresh(pipeline, prompt, length=T5_TOKENS):
    """The pipeline's own embedding of one prompt: tokens (1, L, D), pooled (1, P)."""
    with torch.no_grad():
        if type(pipeline).__name__ == "FluxPipeline":
            tokens, pooled, _ = pipeline.encode_prompt(prompt, max_sequence_length=length)
            return tokens, pooled
        tokens, _, pooled, _ = pipeline.encode_prompt(prompt, None, None, max_sequence_length=length)
        return tokens, pooled


def encoder_modules(pipeline):
    return list(TextEncoders(family_of(pipeline)).modules().values())


def test_rows_are_those_of_the_pipeline_bit_for_bit(pipeline):
    rows = embeddings(pipeline).rows([ONE, TWO, ONE], samples=2)
    tokens, pooled = rows.expanded().values()
    assert len(rows) == 6
    for number, prompt in enumerate([ONE, ONE, TWO, TWO, ONE, ONE]):
        expected_tokens, expected_pooled = fresh(pipeline, prompt)
        assert torch.equal(tokens[number : number + 1], expected_tokens)
        assert torch.equal(pooled[number : number + 1], expected_pooled)
    assert not torch.equal(tokens[0], tokens[2])


def test_a_prompt_that_spells_a_control_token_is_read_to_its_end(pipeline):
    """CLIP pools at the first end token."""
    TextEncoders(family_of(pipeline))
    for tokenizer in (getattr(pipeline, name) for name in ("tokenizer", "tokenizer_2")):
        if tokenizer is not None and "T5" not in type(tokenizer).__name__:
            ids = tokenizer(f"{ONE} {tokenizer.eos_token}").input_ids
            assert (ids.count(tokenizer.eos_token_id), ids[-1]) == (1, tokenizer.eos_token_id)


def test_a_prompt_that_spells_control_tokens_of_t5_means_their_characters(pipeline):
    """T5's vocabulary has them as ordinary pieces."""
    encoders = TextEncoders(family_of(pipeline))
    part = next(part for part in family_of(pipeline).text_parts if not part.is_clip)
    tokenizer, given = getattr(pipeline, part.tokenizer), []
    encoder = getattr(pipeline, part.encoder)
    with encoder.register_forward_pre_hook(lambda _, args: given.append(args[0])):
        for control in tokenizer.all_special_tokens:
            encoders.encode(f"a{control} ruby {control}disc")
            (ids,) = given.pop().tolist()
            text = ids[: ids.index(tokenizer.eos_token_id)]
            assert not set(text) & {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
            spelled = "".join(tokenizer.convert_ids_to_tokens(text)).replace("▁", "")
            assert spelled == f"a{control}ruby{control}disc"


def test_an_embedding_does_not_depend_on_the_other_prompts(pipeline):
    alone = embeddings(pipeline).rows([TWO])
    together = embeddings(pipeline).rows([*CAPTIONS, TWO])
    assert torch.equal(together.tokens[together.index[-1]], alone.tokens[0])


def test_encoders_see_each_distinct_prompt_once(pipeline):
    cache = embeddings(pipeline)
    modules = encoder_modules(pipeline)
    with RowCounter(modules) as counter:
        for _ in range(3):
            cache.rows([ONE, TWO, ONE], samples=24)
            cache.negative(rows=24)
    assert counter.rows == 3 * len(modules)
    assert cache.encoded == 3


def test_negative_rows_are_the_pipelines_own(sd3):
    with torch.no_grad():
        _, negative, _, pooled = sd3.encode_prompt(
            ONE, None, None, negative_prompt="blurred", max_sequence_length=T5_TOKENS
        )
    rows = embeddings(sd3).negative("blurred", rows=3)
    assert torch.equal(rows.expanded()["tokens"], negative.expand(3, -1, -1))
    assert torch.equal(rows.expanded()["pooled"], pooled.expand(3, -1))


@pytest.mark.parametrize("build", [tiny.stable_diffusion_xl, tiny.sana])
def test_a_dropped_caption_is_the_empty_negative_prompt_of_guidance(build, tmp_path):
    cache = PromptEmbeddings(family_of(load_pipeline(build(tmp_path / "model"))))
    negative = cache.negative().expanded()
    cache.free_encoders()
    dropped = cache.rows([""], allow_empty=True).expanded()
    assert all(torch.equal(dropped[name], value) for name, value in negative.items())


def test_encoders_run_in_their_own_precision(pipeline):
    plain = embeddings(pipeline).rows([ONE])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = embeddings(pipeline).rows([ONE])
    assert all(torch.equal(low.values[name], value) for name, value in plain.values.items())


def test_an_embedding_that_overflows_is_refused(folder):
    pipeline = load_sd3(folder)
    pipeline.text_encoder_3.encoder.final_layer_norm.weight.fill_(1e38).mul_(1e3)
    with pytest.raises(UserError, match=r"'a red circle' has NaN or infinite entries \(tokens\); set model.dtype"):
        embeddings(pipeline).rows([ONE])


def test_rows_of_one_prompt_are_views(sd3):
    cache = embeddings(sd3)
    first, second = cache.rows([ONE], samples=24), cache.rows([ONE], samples=8)
    tokens, pooled = first.expanded().values()
    assert tokens.shape[0] == pooled.shape[0] == 24
    assert tokens.stride(0) == pooled.stride(0) == 0
    assert tokens.data_ptr() == second.expanded()["tokens"].data_ptr()
    several = cache.rows([ONE, TWO])
    assert several.expanded()["tokens"].data_ptr() == several.tokens.data_ptr()


def test_selected_and_joined_rows_keep_their_prompts(sd3):
    cache = embeddings(sd3)
    rows = cache.rows([ONE, TWO], samples=2)
    picked = rows.select(torch.tensor([3, 0, 3]))
    assert torch.equal(picked.expanded()["tokens"], rows.expanded()["tokens"][[3, 0, 3]])
    assert picked.tokens.data_ptr() == rows.tokens.data_ptr()
    joined = cache.negative(rows=2).followed_by(rows.select(slice(1, 3)))
    expected = torch.cat([cache.negative(rows=2).expanded()["tokens"], rows.expanded()["tokens"][1:3]])
    assert torch.equal(joined.expanded()["tokens"], expected)


def test_least_recently_used_leaves_first(sd3):
    size = embeddings(sd3).rows([ONE]).tokens.nbytes + SIZES.pooled_width * 4
    cache = embeddings(sd3, max_bytes=2 * size)
    cache.rows([ONE, TWO])
    cache.rows([ONE])
    cache.rows([THREE])
    cache.rows([ONE])
    assert cache.encoded == 3
    cache.rows([TWO])
    assert cache.encoded == 4


def test_a_budget_smaller_than_one_embedding_still_serves(sd3):
    cache = embeddings(sd3, max_bytes=1)
    rows = cache.rows([ONE, TWO])
    assert torch.equal(rows.tokens[:1], fresh(sd3, ONE)[0])
    assert torch.equal(rows.tokens[1:], fresh(sd3, TWO)[0])


def test_freed_encoders_leave_memory_and_the_pipeline_still_draws(folder):
    pipeline = load_sd3(folder)
    cache = embeddings(pipeline)
    options = {"num_inference_steps": 2, "output_type": "latent"}
    expected = pipeline(
        ONE, generator=torch.Generator().manual_seed(0), max_sequence_length=T5_TOKENS, **options
    ).images
    positive, negative = cache.rows([ONE]), cache.negative()
    watched = [weakref.ref(module) for module in encoder_modules(pipeline)]
    weights = {id(weight): weight.nbytes for encoder in encoder_modules(pipeline) for weight in encoder.parameters()}
    freed = cache.free_encoders()
    gc.collect()
    assert freed >= sum(weights.values())
    assert [reference() for reference in watched] == [None] * len(watched)
    again = cache.rows([ONE])
    assert torch.equal(again.tokens, positive.tokens)
    drawn = pipeline(
        prompt_embeds=again.tokens,
        pooled_prompt_embeds=again.values["pooled"],
        negative_prompt_embeds=negative.tokens,
        negative_pooled_prompt_embeds=negative.values["pooled"],
        generator=torch.Generator().manual_seed(0),
        **options,
    ).images
    assert torch.equal(drawn, expected)
    with pytest.raises(UserError, match="'a blue square' is not cached and the text encoders were freed"):
        cache.rows([ONE, TWO])


def test_encoders_stay_where_an_evicted_prompt_could_not_be_had_again(folder):
    pipeline = load_sd3(folder)
    cache = embeddings(pipeline, max_bytes=1)
    cache.rows([ONE, TWO])
    with pytest.raises(
        UserError, match=r"1 prompts were evicted .* 'a red circle'; pass a folder or increase max_bytes"
    ):
        cache.free_encoders()
    assert isinstance(pipeline.text_encoder, nn.Module)


def test_encoders_that_could_change_are_refused(folder):
    pipeline = load_sd3(folder)
    cache = embeddings(pipeline)
    cache.rows([ONE])
    pipeline.text_encoder_2.text_projection.requires_grad_(True)
    for action in (lambda: embeddings(pipeline), lambda: cache.rows([ONE]), cache.negative):
        with pytest.raises(UserError, match=r"text_encoder_2 is trainable \(text_projection.weight\)"):
            action()
    pipeline.text_encoder_2.requires_grad_(False)
    pipeline.text_encoder_3.train()
    with pytest.raises(UserError, match="text_encoder_3 is in training mode"):
        cache.rows([ONE])


@pytest.mark.parametrize("prompt", ["", " \n", None])
def test_empty_prompts_are_named_by_their_index(sd3, prompt):
    with pytest.raises(UserError, match="prompt 2 of 3 is empty"):
        embeddings(sd3).rows([ONE, prompt, TWO])
    with pytest.raises(UserError, match="no prompts"):
        embeddings(sd3).rows([])


def test_over_long_prompts_are_refused_with_the_excess_text(pipeline):
    with pytest.raises(UserError) as caught:
        embeddings(pipeline).rows([LONG])
    message = str(caught.value)
    assert "tokenizer reads 16 of 26 tokens and drops 'circle a red circle a red circle a red circle'" in message
    t5 = "tokenizer_3" if type(pipeline).__name__ == "StableDiffusion3Pipeline" else "tokenizer_2"
    assert f"{t5} reads 12 of 25 tokens" in message


def test_rows_carry_no_gradient(sd3):
    rows = embeddings(sd3).rows([ONE])
    assert not rows.tokens.requires_grad
    assert not rows.tokens.is_inference()


def test_importing_loads_neither_diffusers_nor_transformers():
    program = (
        "import sys, diffusion.models.conditioning, diffusion.matching.losses, diffusion.sampling.latent_sampler; "
        "import diffusion.toy.pipelines.tiny; "
        "print([name for name in ('diffusers', 'transformers', 'torchvision', 'tokenizers') if name in sys.modules])"
    )
    assert run_after_torch(program).strip() == "[]"


def test_unknown_pipelines_and_missing_encoders_are_named(folder):
    with pytest.raises(
        UserError,
        match=r"is a Identity, which is not supported; supported classes: FluxPipeline, .*StableDiffusion3Pipeline",
    ):
        family_of(nn.Identity())
    pipeline = load_sd3(folder)
    pipeline.text_encoder_2 = None
    with pytest.raises(UserError, match="has no text_encoder_2"):
        PromptEmbeddings(family_of(pipeline))


def test_a_prompt_that_t5_reads_whole_is_cut_for_clip_alone_with_one_warning(pipeline, caplog):
    cache = PromptEmbeddings(family_of(pipeline, max_sequence_length=30))
    with torch.no_grad():
        expected = fresh(pipeline, LONG, 30)
    rows = cache.rows([LONG])
    cache.rows([LONG + " circle"])
    assert torch.equal(rows.tokens, expected[0])
    assert torch.equal(rows.values["pooled"], expected[1])
    assert [record.message for record in caplog.records if record.name == "mmrl"] == [
        "prompt 'a red circle a red circle a red circle a red circle a red ci'... is too long for CLIP alone: "
        + "; ".join(
            f"{part.tokenizer} reads 16 of 26 tokens and drops 'circle a red circle a red circle a red circle'"
            for part in cache.encoders.parts
            if part.is_clip
        )
        + "; T5 reads all of it, so these prompts are used"
    ]


def test_without_t5_what_clip_drops_is_lost(folder):
    pipeline = load_sd3(folder, text_encoder_3=None, tokenizer_3=None)
    with pytest.raises(UserError, match="tokenizer reads 16 of 26 tokens"):
        PromptEmbeddings(family_of(pipeline)).rows([LONG])


def test_freed_encoders_leave_more_prompts_than_fit_into_memory(folder, tmp_path):
    pipeline = load_sd3(folder)
    expected = embeddings(pipeline).rows(CAPTIONS)
    cache = embeddings(pipeline, max_bytes=2 * expected.tokens[0].nbytes, folder=tmp_path / "new" / "folder")
    for caption in CAPTIONS:
        cache.rows([caption])
    cache.free_encoders()
    for _ in range(2):
        found = [cache.rows([caption]) for caption in CAPTIONS]
        assert torch.equal(torch.cat([rows.tokens for rows in found]), expected.tokens)
        assert torch.equal(torch.cat([rows.values["pooled"] for rows in found]), expected.values["pooled"])
    assert len([*(tmp_path / "new/folder").rglob("*.safetensors")]) == len(CAPTIONS)
    cache.close()
    assert [*(tmp_path / "new/folder").iterdir()] == []


def test_a_place_where_nothing_can_be_written_is_named(sd3, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be stored in .*file.*; set model\.embedding_cache"):
        embeddings(sd3, folder=tmp_path / "file")
