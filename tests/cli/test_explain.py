"""Explanations that `mmrl explain` gives of objectives and recipes."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mmrl.cli import main
from mmrl.cli.explain import DOMAINS as GROUPS
from mmrl.cli.explain import GOLDEN, GOLDEN_OF, ROWS, explained, find_name, golden_sources, places, usage
from mmrl.cli.papers import OMITTED, PAPERS, called, spelled, status_of
from mmrl.comparison.evidence import findings_about
from mmrl.comparison.reproduce import evidence_of, findings_by_subject, measured
from mmrl.core import CATALOGUE, PREFERENCES, all_objectives, get
from mmrl.entries import load_target
from mmrl.errors import UserError
from mmrl.files import CONFIGS
from mmrl.recipes import RECIPES, all_recipes
from tests.contracts.domains import DOMAINS
from tests.contracts.test_objectives import missing
from tests.golden.numbers import load

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ROWS)
def test_every_objective_is_explained(name):
    text, row = explained(name), ROWS[name]
    assert row.citation in text
    proof = golden_sources(name)
    assert f"verified      {proof[0] if proof else row.verified}" in text
    assert row.differs in text
    assert all(f" {block.kind} " in text for block in row.blocks.values() if block.formula())
    config = yaml.safe_load("\n".join(usage(row)))
    assert config["recipe"] in all_recipes()
    assert config["objective"]["preset"] == name


@pytest.mark.parametrize("name", all_objectives())
def test_domains_are_those_in_which_a_row_trains(name):
    domains = dict(zip((domain.name for domain in GROUPS), ("vlm", "agents", "diffusion", "robotics"), strict=True))
    for place in places(get(name)):
        lacking = missing(DOMAINS[domains[place.domain]], name)
        assert not place.lacks or lacking
        assert place.recipe in ("robot_ppo", "masked") or bool(place.recipe) == (not lacking)


@pytest.mark.parametrize("name", [name for name in all_recipes() if name not in ROWS])
def test_every_recipe_without_a_row_is_explained(name):
    text, entry = explained(name), all_recipes()[name]
    own = text if name in RECIPES else text.partition("\n")[2]
    assert own.startswith(f"recipe {name}: {entry.citation}\n  {entry.summary}\n")
    assert entry.load_config_class().__name__ in text
    files = re.findall(r"mmrl train (configs/\S+)", text)
    assert files
    assert all((ROOT / file).is_file() for file in files)


def test_what_is_in_contrib_says_so_first_with_its_verdict():
    assert explained("bapo").startswith("contrib: no effect within the margin\nbapo: BAPO, arXiv 2510.18927")
    assert explained("hapo").startswith("contrib: not measured\nhapo: ")
    library = {*CATALOGUE, *PREFERENCES, *RECIPES}
    for name in {**ROWS, **all_recipes()}:
        assert explained(name).startswith("contrib: ") or name in library


def test_a_name_of_a_row_and_a_recipe_explains_both():
    text = explained("papo")
    assert text.index("papo: base objective") < text.index("recipe papo: Wang et al.")
    assert text.count("docs/results/papo_vs_grpo.md") == 2  # two findings, each once


def test_the_beginning_of_a_name_is_enough(capsys):
    assert main(["explain", "vesp"]) == 0
    out = capsys.readouterr().out
    for part in ("arXiv 2602.10693", "huggingface/trl GRPOTrainer.get_gamma_weights", "trl 1.16.0", "recipe: agent"):
        assert part in out
    assert find_name("dpo") == "dpo"  # a whole name is never ambiguous
    with pytest.raises(UserError, match="'dppo' is ambiguous: dppo_tv, dppo_kl"):
        find_name("dppo")
    with pytest.raises(UserError, match="unknown objective, recipe or paper 'grop'; did you mean 'grpo'"):
        find_name("grop")


def test_a_domain_that_cannot_use_an_objective_says_what_it_lacks():
    text = explained("dppo_tv")
    assert "images      no: it needs decisions with probabilities (tokens, picks)" in text
    assert "robots      recipe: robot_ppo" in explained("ppo")
    assert "docs/results/papo_vs_grpo.md" in explained("papo")


HEAVY = ("torch.nn", "transformers", "diffusers", "accelerate", "mujoco")
ROOMS = ("mmrl.vlm", "mmrl.masked", "mmrl.agents", "mmrl.gui", "mmrl.training.run", "mmrl.comparison.experiment")
ROOMS += ("diffusion.methods", "diffusion.diffusion_config", "robotics")
MODULES = {"mmrl.training.run", "mmrl.comparison.experiment", "diffusion.diffusion_config"}
TABLES = {"entries", "toy", "scenes", "benchmarks", "gui_commands", "separate_python"}
"""What a room has for lists and the command line."""


def run_alone(code):
    """What a fresh interpreter prints."""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize(
    "commands",
    [[["list"], ["list", "--json"], ["list", "--markdown"]], [["explain", name] for name in (*ROWS, "lspo", "pmoe")]],
    ids=["list", "explain"],
)
def test_printing_a_row_loads_neither_torch_nor_a_room(commands):
    codes, _, modules = run_alone(
        "import contextlib, io, sys; from mmrl.cli import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()): codes = {{main(words) for words in {commands!r}}}\n"
        "print(codes, '|', *sys.modules)"
    ).partition("|")
    assert codes.strip() == "{0}"
    loaded = modules.split()
    assert [name for name in HEAVY if name in loaded] == []
    inside = [name for name in loaded if name.startswith(tuple(f"{room}." for room in ROOMS)) or name in MODULES]
    # robotics.methods is a table: the circle of the room's folders leaves it no other place; the others are empty
    tables = {"robotics.methods", "robotics.contrib", "mmrl.agents.environments"}
    assert [name for name in inside if name not in tables and not TABLES & set(name.split("."))] == []


def test_a_module_that_is_imported_later_is_itself_once_it_is_asked_for_something():
    run_alone("""
import sys
from mmrl.entries import import_later
import_later("decimal")
import decimal
later = sys.modules["decimal"]
assert "Decimal" not in vars(decimal)
assert decimal.Decimal(1) + 1 == 2
from decimal import Decimal
assert Decimal is decimal.Decimal and sys.modules["decimal"] is not later
import_later("decimal")
assert "Context" in vars(sys.modules["decimal"])
import_later("xml")
from xml.dom import minidom
assert minidom.parseString("<a/>")
""")


LISTED = re.findall(
    r"\S+",
    """
    3DFlowAction BAPO GRACE SPO EPO Scaf-GRPO APO View-R1 OORL GEPO ARPO PAPO Single-stream-PO InfiGUI-G1 AEPO SRPO
    HBPO SofT-GRPO IGPO BGPO T-PPO FAPO DR-PO INPO RiskPO HAPO LSPO Werewolf P3O TAPO DRPO TSPO GTPO BNPO MDPO
    Agentic-AEPO MPO DCPO GiGPO TGPO OPPO AMPO COPO SEED-GRPO REFUEL DAPO direct-advantage AC-Flow ReAd A2PR
    Critique-RL CANON ESG-portfolio SAC Minimaximalist AILBoost DCG-MAP-Elites DigiRL SL-MGAC AWM
    Adversarial-Cheap-Talk HNPG AutoMathCritique VL-DAC PMOE RLIF Nash-MP ArCHer MAMQL SLIM SPPO DRED ASPO
    Understanding-TIR SEC BESO Practitioner-guide LLaVA-Critic-R1 LLaVA-Critic D3S PROPS Agent-R
    Demonstration-regularised Accelerated-PO ARSQ DPA A-LoL Suboptimal-on-policy-data OTA VAS Critic-V NGRPO
    DeepVideo-R1 MLE-agents Lipschitz Halpern SPC FiFA C-MORL RPO STAX RL-in-the-era-of-LLMs HPO-for-MORL
    Deep-research-survey Two-stage-constrained Optimal-sample-efficiency Agentic-ARPO Segment-PO
    """,
)
"""Usual names of the papers that the suite began with."""


@pytest.mark.parametrize("name", LISTED)
def test_a_paper_is_found_by_its_usual_name(name):
    shared = [paper for paper in (*PAPERS, *OMITTED) if spelled(name) in called(paper)]
    whole = {paper.name.lower() for paper in shared} | {*ROWS, *all_recipes()}
    if len(shared) > 1 and name.lower() not in whole:
        with pytest.raises(UserError, match=rf"'{name}' is ambiguous: .+ \(.+\), .+ \(.+\)"):
            find_name(name)
    else:
        assert find_name(name)


@pytest.mark.parametrize("paper", PAPERS, ids=[paper.name for paper in PAPERS])
def test_what_is_said_of_a_paper_exists(paper):
    assert set(paper.found) <= {*ROWS, *all_recipes()}
    assert paper.found or paper.page
    assert not paper.code or load_target(paper.code)
    page, _, place = paper.page.partition("#")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8") if page else ""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    assert not place or place in [re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings]
    shown = explained(paper.name.partition(",")[0] if len(same_name(paper)) == 1 else paper.name)
    for name in (name for name in paper.found[:1] if paper.lacking):
        assert f"partial ({paper.name}): lacks {paper.lacking}" in shown
        assert paper.lacking in status_of(name)
    assert paper.lacking in shown
    assert not paper.lacking.endswith(".")


def same_name(paper):
    first = spelled(paper.name.partition(",")[0])
    return [other for other in (*PAPERS, *OMITTED) if first in called(other)] + [row for row in ROWS if row == first]


def test_names_that_several_papers_share_say_so():
    with pytest.raises(
        UserError, match=r"'epo' is ambiguous: entropy_smoothing \(EPO, entropy-reg.*, explicit_strategy"
    ):
        find_name("epo")
    assert "same name     direct_advantage (DAPO, direct advantage)" in explained("dapo")
    assert "left out: offline control benchmarks" in explained("Offline preference-guided policy optimization")
    assert find_name("REINFORCE++") == "reinforce_pp"


@pytest.mark.parametrize(
    ("paper", "name"),
    [
        ("2402.03300", "grpo"),
        ("arXiv:2305.18290v3", "dpo"),
        ("https://arxiv.org/abs/1707.06347", "ppo"),
        ("2505.05470", "flow_grpo"),  # not its fast variant
        ("2501.03262", "reinforce_pp"),
        ("2509.16117", "diffusion_nft"),  # a recipe
    ],
)
def test_arxiv_ids_are_names(paper, name):
    assert find_name(paper) == name


def test_arxiv_ids_of_papers_and_of_several_objectives():
    assert "paper Critic-V" in explained("2411.18203")
    with pytest.raises(UserError, match=r"'2505[.]22617' is ambiguous: clip_cov, kl_cov"):
        find_name("2505.22617")


@pytest.mark.parametrize("paper", ["SAC", "RLPD", "DSRL", "RLIF", "HG-DAgger"])
def test_methods_of_robots_are_found_by_their_papers(paper):
    name = f"robot_{paper.lower().replace('-', '_')}"
    assert f"recipe {name}: " in explained(paper)
    assert golden_sources(name)


def test_suggestions_are_close_or_cite_the_word():
    with pytest.raises(UserError, match=r"'critc_v'; did you mean 'Critic-V'\?"):
        find_name("critc_v")
    with pytest.raises(UserError, match="cited by grpo"):
        find_name("DeepSeekMath")
    with pytest.raises(UserError, match="'xqzw'; `mmrl list` shows all"):
        find_name("xqzw")


@pytest.mark.parametrize("name", ROWS)
def test_proof_says_which_numbers_are_covered(name):
    text = "\n".join(golden_sources(name))
    for stem in GOLDEN_OF.get(name, (name,)):
        for peer in load(stem).peers if (GOLDEN / f"{stem}.json").is_file() else ():
            line = next(line for line in text.split("\n") if peer["program"].removeprefix("github.com/") in line)
            assert all(part in line for part in ("advantage", "loss", "gradient") if part in peer)
            assert re.search(r"\((its own|other) constants\)$", line)
    if "hand computation" in text:
        script = re.search(r"tests/golden/make/\w+\.py", text)
        assert script, "the script of the computation"
        assert (ROOT / script[0]).is_file()


def test_constants_of_a_row_are_its_own():
    assert golden_sources("flow_grpo_fast")[0].endswith("(its own constants)")
    assert golden_sources("information_gain")[1].endswith(": advantage, loss, gradient (its own constants)")
    assert all("advantage" not in line for line in golden_sources("gpg"))


def test_findings_are_read_as_the_experiments_hold_them():
    for name, by_experiment in findings_by_subject(known := measured()).items():
        whole = [
            (
                replace(
                    found, against=found.against or known[stem].baseline, metric=found.metric or known[stem].metric
                ),
                evidence_of(known[stem]).page,
            )
            for stem, items in by_experiment.items()
            for found in items
        ]
        assert list(findings_about(name, CONFIGS / "experiments")) == whole
