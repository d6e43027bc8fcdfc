import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.data.image_pairs import ImagePair, ImagePairConfig, load_pairs
from diffusion.methods import fifa
from diffusion.methods.fifa import PairFilterConfig, main, neighbour_distances, score_pairs, select_pairs
from diffusion.toy.shapes.building import caption_quality
from mmrl.errors import UserError
from mmrl.fields import check_config
from tests.diffusion.families.cases import CASES
from tests.diffusion.pairs import write_scenes
from tests.diffusion.runs import tiny_model

GREY = np.zeros((2, 2, 3), np.uint8)


def pair(caption: str, chosen: float = 1.0, rejected: float = 0.0, quality: float = 0.0) -> ImagePair:
    numbers = {"score_chosen": chosen, "score_rejected": rejected, "text_quality": quality}
    return ImagePair(caption, caption.split("#")[0], lambda: GREY, lambda: GREY, numbers)


def line(captions) -> torch.Tensor:
    """The number at the end of a caption is its position on a line."""
    return torch.tensor([[float(caption.split()[-1])] for caption in captions])


def chosen(pairs, **options) -> list[str]:
    config = PairFilterConfig(kind="fifa", **({"keep": 2, "alpha": 0.0, "gamma": 0.0} | options))
    check_config(config, "filter")
    return [kept.id for kept in select_pairs(pairs, config, line).pairs]


def test_large_margins_come_first_and_equal_ones_keep_their_order():
    pairs = [pair("a 0", 0.5), pair("b 1", 0.9), pair("c 2", 0.0, 0.7), pair("d 3", 0.9)]
    assert chosen(pairs, keep=3) == ["b 1", "d 3", "c 2"]
    assert chosen(pairs, keep=3, margin="signed") == ["b 1", "d 3", "a 0"], "a reward model that disagrees"
    assert chosen(pairs, keep=9) == ["b 1", "d 3", "c 2", "a 0"]


def test_importance_by_hand():
    pairs = [pair("a 0", 1.0, 0.0, 4.0), pair("b 1", 0.2, 0.1, 10.0), pair("c 3", 0.6, 0.1, 1.0)]
    config = PairFilterConfig(kind="fifa", keep=3, alpha=0.2, gamma=3.0, neighbours=1, normalise="none")
    found = select_pairs(pairs, config, line)
    distances = {"a 0": 1.0, "b 1": 1.0, "c 3": 2.0}
    margins, qualities = {"a 0": 1.0, "b 1": 0.1, "c 3": 0.5}, {"a 0": 4.0, "b 1": 10.0, "c 3": 1.0}
    expected = {name: margins[name] + 0.2 * qualities[name] + 3 * math.log(1 + distances[name]) for name in margins}
    assert [kept.id for kept in found.pairs] == sorted(expected, key=lambda name: -expected[name])
    assert found.importance.tolist() == pytest.approx(sorted(expected.values(), reverse=True))
    assert set(found.terms) == {"margin", "quality", "diversity"}


def test_each_term_is_standardised_over_the_pairs():
    pairs = [pair("a 0", 1.0, 0.0, 0.0), pair("b 1", 0.0, 0.0, 100.0), pair("c 3", 0.5, 0.0, 50.0)]
    config = PairFilterConfig(kind="fifa", keep=3, alpha=1.0, gamma=0.0)
    # margins and qualities are mirror images: standardised they cancel, as they are the quality would rule
    assert select_pairs(pairs, config, line).importance.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)
    same = [pair("a 0"), pair("b 1"), pair("c 3")]
    assert select_pairs(same, config, line).importance.tolist() == [0.0, 0.0, 0.0]


def test_diversity_spreads_the_captions_that_margins_alone_crowd():
    rng = np.random.default_rng(0)
    crowd = [pair(f"crowd#{n} {n * 1e-3:.4f}", 1.0 + 0.01 * rng.random()) for n in range(60)]
    spread = [pair(f"far#{n} {10.0 * n + 5}", 0.9) for n in range(20)]
    crowd = [ImagePair(p.id, p.id, p.chosen, p.rejected, p.numbers) for p in crowd]
    spread = [ImagePair(p.id, p.id, p.chosen, p.rejected, p.numbers) for p in spread]

    def mean_distance(gamma: float) -> float:
        kept = select_pairs([*crowd, *spread], PairFilterConfig(kind="fifa", keep=20, alpha=0.0, gamma=gamma), line)
        return float(torch.pdist(line([p.caption for p in kept.pairs])).mean())

    assert mean_distance(0.0) < 0.1
    assert mean_distance(2.0) > 10.0


@pytest.mark.parametrize("chunk", [1, 3, 1024])
def test_distances_to_neighbours_by_hand_whatever_the_chunk(monkeypatch, chunk):
    monkeypatch.setattr(fifa, "CHUNK", chunk)
    points = torch.tensor([[0.0], [1.0], [3.0], [3.0], [10.0]])
    assert neighbour_distances(points, 1).tolist() == [1.0, 1.0, 0.0, 0.0, 7.0]
    assert neighbour_distances(points, 2).tolist() == [3.0, 2.0, 2.0, 2.0, 7.0]
    assert neighbour_distances(points, 99).tolist() == [10.0, 9.0, 7.0, 7.0, 10.0], "all others"


def test_duplicate_captions_share_quality_and_diversity():
    calls = []

    def embed(captions):
        calls.append(list(captions))
        return line(captions)

    pairs = [ImagePair(str(n), "same 1", lambda: GREY, lambda: GREY, pair("x 1").numbers) for n in range(3)]
    other = pair("other 9")
    config = PairFilterConfig(
        kind="fifa", keep=4, alpha=0.5, gamma=0.5, quality="tests.diffusion.methods.test_fifa:lengths"
    )
    found = select_pairs([*pairs, other], config, embed)
    assert calls == [["same 1", "other 9"]]
    assert found.terms["quality"].sort().values.tolist() == [6.0, 6.0, 6.0, 7.0]
    alone = select_pairs(pairs, config, embed)
    assert alone.terms["diversity"].tolist() == [0.0, 0.0, 0.0], "one caption has no neighbour"


def lengths(captions) -> list[int]:
    return [len(caption) for caption in captions]


def test_a_random_subset_follows_from_its_seed():
    pairs = [pair(f"{n} {n}") for n in range(30)]

    def drawn(seed: int) -> list[str]:
        config = PairFilterConfig(kind="random", keep=10, seed=seed)
        return [kept.id for kept in select_pairs(pairs, config, line).pairs]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len(set(drawn(1))) == 10
    assert len(select_pairs(pairs, PairFilterConfig(), line).pairs) == 30


def test_what_is_missing_is_named():
    bare = ImagePair("row 3", "a red circle", lambda: GREY, lambda: GREY)
    with pytest.raises(UserError, match="row 3 has no score_chosen and score_rejected"):
        select_pairs([bare], PairFilterConfig(kind="fifa", keep=1), line)
    scored = ImagePair("row 3", "x 1", lambda: GREY, lambda: GREY, {"score_chosen": 1.0, "score_rejected": 0.0})
    with pytest.raises(UserError, match=r"no text_quality, which filter\.alpha=0\.5 needs"):
        select_pairs([scored], PairFilterConfig(kind="fifa", keep=1), line)
    with pytest.raises(UserError, match=r"filter\.quality: module 'nowhere' not found"):
        select_pairs([scored], PairFilterConfig(kind="fifa", keep=1, quality="nowhere:f"), line)
    for options in ({"kind": "fifa"}, {"keep": 3}):
        with pytest.raises(ValueError, match="set both or neither"):
            PairFilterConfig(**options).validate()


def test_an_image_reward_can_score_the_pairs(tmp_path):
    pairs = load_pairs(ImagePairConfig(path=str(write_scenes(tmp_path / "pairs.npz")))).tasks
    scored = score_pairs(pairs, "shapes_geneval")
    assert [p.numbers["score_chosen"] for p in scored] == [1.0] * len(pairs), "renders show their captions"
    assert max(p.numbers["score_rejected"] for p in scored) < 1.0, "and not another one"
    config = PairFilterConfig(kind="fifa", keep=2, alpha=0.0, gamma=0.0, reward="shapes_geneval")
    assert (
        select_pairs(pairs, config, line).terms["margin"].tolist()
        == sorted((p.numbers["score_chosen"] - p.numbers["score_rejected"] for p in scored), reverse=True)[:2]
    )
    with pytest.raises(UserError, match=r"filter\.reward shapes_geneval failed"):
        score_pairs([pair("no caption of shapes")], "shapes_geneval")


def test_an_image_reward_can_score_images_of_several_sizes(tmp_path, capsys):
    rows = []
    for number, side in enumerate((16, 16, 32, 32)):
        Image.new("RGB", (side, side), (60 * number, 0, 0)).save(tmp_path / f"{number}.png")
        other = {"chosen": f"{number}.png", "rejected": f"{number ^ 1}.png"}
        rows.append({"prompt": f"a circle {number}", **other, "text_quality": 1})
    source = tmp_path / "pairs.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    scored = score_pairs(load_pairs(ImagePairConfig(path=str(source))).tasks, "jpeg_compressibility")
    assert len({p.numbers["score_chosen"] for p in scored}) > 1
    command = [str(source), str(tmp_path / "kept.npz"), "--gamma", "0", "--reward", "jpeg_compressibility"]
    assert main([*command, "--keep", "4"]) == 2
    assert "one size" in capsys.readouterr().err


def test_a_reward_that_needs_options_says_how_to_pass_them():
    with pytest.raises(UserError, match=r"filter\.reward: .*pickscore.* needs path.*filter\.reward=file\.py:function"):
        score_pairs([pair("a red circle")], "pickscore")


def test_garbled_captions_have_no_quality():
    assert caption_quality(["a red circle", "circle red a", "two blue squares"]) == [10.0, 0.0, 10.0]


def test_the_command_embeds_captions_with_a_pipeline_without_clip(tmp_path):
    source, pipeline = write_scenes(tmp_path / "pairs.npz", text_quality=[10] * 6), CASES["ltx"].build(tmp_path / "ltx")
    assert main([str(source), str(tmp_path / "kept.npz"), "--keep", "3", "--pipeline", str(pipeline)]) == 0


def test_the_command_writes_the_pairs_that_stay(tmp_path, capsys):
    source = write_scenes(tmp_path / "pairs.npz", text_quality=[10, 10, 0, 10, 10, 10])
    kept = tmp_path / "kept.npz"
    assert main([str(source), str(kept), "--keep", "3", "--pipeline", str(tiny_model())]) == 0
    assert "3 pairs written" in capsys.readouterr().out
    before = {p.caption: p for p in load_pairs(ImagePairConfig(path=str(source))).tasks}
    after = load_pairs(ImagePairConfig(path=str(kept))).tasks
    assert len(after) == 3
    for found in after:
        assert dict(found.numbers) == dict(before[found.caption].numbers)
        assert np.array_equal(found.chosen(), before[found.caption].chosen())
        assert np.array_equal(found.rejected(), before[found.caption].rejected())
        assert found.numbers["text_quality"] == 10.0
    assert main([str(source), str(kept), "--keep", "3"]) == 2
    assert "requires --pipeline" in capsys.readouterr().err
    assert main([str(source), str(kept), "--keep", "0"]) == 2
