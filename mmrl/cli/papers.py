"""Papers by their usual names: where each one is in the suite, what it lacks there, and which are left out.

`mmrl explain` finds rows, recipes and functions by these names; docs/methods/papers.md prints the tables.
"""

from __future__ import annotations

import re

from mmrl.entries import Omitted, Paper
from mmrl.recipes import CONTRIB, package_tables


def spelled(name: str) -> str:
    """Normalise a name for comparison: Nash-MP is nash_mp, REINFORCE++ is reinforce_pp."""
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("+", "p"))


def called(paper: Paper | Omitted) -> set[str]:
    """The normalised names of a paper; "AEPO, agentic" is also AEPO."""
    return {spelled(name) for name in (paper.name, paper.name.partition(",")[0], *paper.names)}


def papers_of(name: str) -> list[Paper]:
    """The papers that a row or recipe implements."""
    return [paper for paper in PAPERS if name in paper.found]


def status_of(name: str) -> str:
    """Whether a row or recipe implements its paper only in part, and what it lacks; empty if it is complete."""
    partial = [paper for paper in PAPERS if paper.lacking and paper.found[:1] == (name,)]
    return "; ".join(f"*partial* ({paper.name}): lacks {paper.lacking}" for paper in partial)


def _sort_key(paper: Paper) -> str:
    return paper.name.lower()


OWN = (
    Paper("3DFlowAction", ("flow3d", "flow3d_awm"), ("3d_flow_action",)),
    Paper(
        "A-LoL",
        ("a_lol",),
        ("advantage leftover lunch",),
        lacking="the value head on the frozen model, and sampling in proportion to the advantage",
    ),
    Paper(
        "AC-Flow",
        ("ac_flow",),
        ("actor-critic flow",),
        lacking="certainty: it is a reconstruction from the abstract and the project page, which nothing confirms",
    ),
    Paper("AEPO, adaptive exploration", ("aepo",), ("infigui-g1",)),
    Paper("AEPO, agentic", ("agentic_entropy_balanced", "agentic_branching"), ("agentic_aepo",)),
    Paper("AEPO, arbitrary entropy", ("arbitrary_entropy",), ("arbitrary entropy policy optimization",)),
    Paper(
        "Agent-R",
        ("agent_revision",),
        lacking="the tree search that finds good episodes without an expert, the model's own judgement of its first "
        "error, and the splice of a good episode onto a bad one",
    ),
    Paper("AMPO", ("multi_teacher",), ("adaptive multi-guidance policy optimization",)),
    Paper("APO, View-R1", ("apo",), ("view_r1", "asymmetric policy optimization")),
    Paper("ArCHer", ("archer",)),
    Paper("ARPO, agentic", ("agentic_branching",), ("agentic_arpo", "agentic reinforced policy optimization")),
    Paper("ARPO, GUI agents", ("arpo",), ("gui_arpo",)),
    Paper("ASPO", ("aspo_tir",), ("understanding tool-integrated reasoning", "understanding_tir")),
    Paper("AWM", ("awm",), ("advantage-weighted matching",)),
    Paper("BAPO", ("bapo",)),
    Paper("BGPO", ("bgpo", "masked")),
    Paper("BNPO", ("bnpo",), lacking="the decomposition of the advantage for several rewards, which are added up here"),
    Paper("CANON", ("canon_entropy", "canon_length")),
    Paper("COPO", ("copo",)),
    Paper(
        "Critic-V",
        code="mmrl.vlm.critic.critiques:build_pairs",
        source="arXiv 2411.18203",
        page="objectives.md#critics-find-errors-critic-v",
    ),
    Paper("Critique-RL", ("critique_rl",)),
    Paper("D3S", ("d3s",), lacking="its form across groups, of which no public text gives the shares"),
    Paper("DAPO, decoupled clip", ("dapo",)),
    Paper(
        "DAPO, direct advantage",
        ("direct_advantage",),
        ("direct advantage policy optimization",),
        lacking="the critic of reasoning steps: the data holds the advantages, of whole answers",
    ),
    Paper("DCPO", ("dcpo",)),
    Paper("DeepVideo-R1", ("reg_grpo",)),
    Paper("Demonstration-regularised RL", ("demo_regularised",), ("demonstration-regularized rl",)),
    Paper("DigiRL", ("digirl",)),
    Paper("DisCO", ("disco",)),
    Paper("DR-PO", ("dataset_reset",), ("dataset reset policy optimization",)),
    Paper("DRPO", ("decoupled_reward", "disco"), ("decoupled reward policy optimization",)),
    Paper("DSRL", ("robot_dsrl",), ("diffusion steering via reinforcement learning",)),
    Paper(
        "EPO, entropy-regularised", ("entropy_smoothing",), ("entropy-regularized policy optimization", "entropy_epo")
    ),
    Paper(
        "EPO, explicit",
        ("explicit_strategy",),
        ("explicit policy optimization",),
        page="agent_methods.md#epo-a-strategy-in-each-turn",
        lacking="a judge of the whole dialogue (it sees one turn), and self-play against the policy of each iteration "
        "(the partner is a fixed model)",
    ),
    Paper(
        "FAPO",
        ("fapo",),
        ("flawed-aware policy optimization",),
        lacking="the training of the generative reward model: any model at an endpoint judges",
    ),
    Paper(
        "FiFA",
        ("diffusion_dpo",),
        code="diffusion.methods.fifa:select_pairs",
        source="arXiv 2410.10166",
        page="diffusion.md#pairs-of-images",
    ),
    Paper(
        "GEPO in OORL",
        ("gepo",),
        ("oorl", "gepo"),
        lacking="groups of intermediate representations and the code-translation task: preferences are among the "
        "policy's own answers, on GRPO instead of REINFORCE++",
    ),
    Paper("GiGPO", ("gigpo",), ("group-in-group policy optimization",)),
    Paper("GRACE", ("grace", "contrastive")),
    Paper("GTPO", ("gtpo",)),
    Paper(
        "GUI-R1",
        code="mmrl.gui.grounding.step_rewards:gui_step_reward",
        source="arXiv 2504.10458",
        page="gui.md#step-rewards-gui-r1-and-ui-r1",
    ),
    Paper("HAPO", ("hapo", "adaptive_temperature")),
    Paper("HBPO", ("hbpo",)),
    Paper("HG-DAgger", ("robot_hg_dagger",)),
    Paper("HNPG", ("hnpg",), ("offline data enhanced policy gradient",)),
    Paper("IGPO, information gain", ("information_gain",), ("information gain policy optimization",)),
    Paper("IGPO, inpainting", ("inpainting_guided", "masked"), ("inpainting-guided policy optimization",)),
    Paper("INPO", ("inpo", "online_preference")),
    Paper(
        "LLaVA-Critic-R1",
        (),
        ("llava_critic",),
        code="mmrl.vlm.critic.questions:build_questions",
        source="arXiv 2509.00676",
        page="objectives.md#critics-compare-responses-llava-critic-r1",
    ),
    Paper(
        "MDPO",
        ("mirror_descent",),
        ("mirror descent policy optimization",),
        lacking="the off-policy variant, and the critic of the on-policy one",
    ),
    Paper(
        "MPO",
        ("meta_reward",),
        ("meta policy optimization",),
        lacking="several rubrics: tasks are neither clustered nor prescreened, and rubrics are not merged",
    ),
    Paper(
        "Nash-MP",
        ("online_preference", "nash_md"),
        ("nash mirror prox",),
        source="arXiv 2410.16714",
        page="objectives.md#online-dpo-and-nash-methods",
        lacking="the two half steps of an iteration, which are one step, and golden numbers",
    ),
    Paper("NGRPO", ("ngrpo",)),
    Paper("P3O", ("p3o_joint", "p3o_separate"), ("pairwise proximal policy optimization",)),
    Paper("PAPO", ("papo",), ("perception-aware policy optimization",)),
    Paper(
        "Practitioner's guide to multi-turn agentic RL",
        (),
        ("practitioner guide", "practitioners_guide"),
        source="arXiv 2510.01132",
        page="agent_methods.md#recommendations-for-multi-turn-training",
        lacking="the paper's comparisons, which were not run again: its findings are a list of options",
    ),
    Paper("REFUEL", ("refuel",)),
    Paper("Residual RL", ("robot_residual",), ("residual reinforcement learning",)),
    Paper("RiskPO", ("riskpo",)),
    Paper(
        "RL for machine learning engineering agents",
        (),
        ("mle_agents", "duration"),
        code="mmrl.core.blocks.turns:Duration",
        source="arXiv 2509.01684",
        page="blocks.md",
        lacking="a row and a configuration of its own, and rewards from instrumented environments",
    ),
    Paper(
        "RLIF",
        ("robot_rlif",),
        ("reinforcement learning via intervention feedback",),
        lacking="sessions with a keyboard or gamepad: a script or the environment takes over",
    ),
    Paper("RLPD", ("robot_rlpd",), ("reinforcement learning with prior data",)),
    Paper("RPO", ("rpo",)),
    Paper("SAC", ("robot_sac",), ("soft actor-critic",)),
    Paper("Scaf-GRPO", ("scaffolded",)),
    Paper("SEC", ("sec",), ("self-evolving curriculum",)),
    Paper("SEED-GRPO", ("seed_grpo", "semantic_entropy"), lacking="its focal function of the entropy"),
    Paper("SofT-GRPO", ("soft_tokens",)),
    Paper(
        "SPO, minimaximalist",
        ("selfplay_winrate",),
        ("minimaximalist", "self-play preference optimization (minimaximalist)"),
    ),
    Paper("SPO, segments", ("segment",), ("segment policy optimization", "spo_chain", "spo_tree")),
    Paper("SPO, single stream", ("single_stream",), ("single-stream policy optimization",)),
    Paper("SPPO", ("sppo",)),
    Paper("SRPO", ("srpo",)),
    Paper("T-PPO", ("tppo", "truncated"), ("truncated ppo",)),
    Paper("TAPO", ("tapo",), page="agent_methods.md#tapo-dapo-with-tools"),
    Paper(
        "TGPO",
        ("tgpo",),
        ("temporal grounded policy optimization",),
        lacking="weights and terms of its rewards, which no public text states: those here are ours",
    ),
    Paper("TSPO", ("tspo",)),
    Paper(
        "VAS",
        ("value_guided",),
        ("value-augmented sampling",),
        lacking="several rewards composed while sampling (personalisation), and models behind an API: the critic "
        "reads the policy's states",
    ),
    Paper(
        "UI-R1",
        code="mmrl.gui.grounding.step_rewards:gui_step_reward",
        source="arXiv 2503.21620",
        page="gui.md#step-rewards-gui-r1-and-ui-r1",
        lacking="UI-R1-E, which learns when to answer without a thought",
    ),
    Paper("VL-DAC", ("vl_dac", "vl_dac_repo")),
)
OF_CONTRIB = (paper for table in package_tables("PAPERS", CONTRIB) for paper in table)
PAPERS = tuple(sorted((*OWN, *OF_CONTRIB), key=_sort_key))
"""Papers that rows, recipes or functions implement, by name."""
OMITTED = (
    Omitted(
        "ARSQ",
        "value-based control in discretised actions",
        "learns a value function for states of control benchmarks, not a policy over sequences",
    ),
    Omitted(
        "OPPO",
        "offline preferences that guide a policy, on D4RL",
        "offline control benchmarks",
        ("offline preference-guided policy optimization",),
    ),
    Omitted(
        "A2PR",
        "offline RL with an advantage-guided policy",
        "learns a value function for states of control benchmarks, not a policy over sequences",
    ),
    Omitted(
        "OTA",
        "values for offline goal-conditioned RL",
        "learns a value function for states of control benchmarks, not a policy over sequences",
    ),
    Omitted(
        "Lipschitz-regularised model-based RL",
        "robust world models for control",
        "learns a value function for states of control benchmarks, not a policy over sequences",
    ),
    Omitted(
        "SLIM",
        "skills for manipulation from several critics",
        "learns a value function for states of control benchmarks, not a policy over sequences",
    ),
    Omitted("AILBoost", "adversarial imitation by boosting", "off-policy imitation with discriminators"),
    Omitted("MAMQL", "inverse RL of several agents", "multi-agent inverse RL"),
    Omitted(
        "ReAd", "advantages as feedback to a language model that plans", "a prompted planner: no policy is trained"
    ),
    Omitted("C-MORL", "sets of Pareto-optimal policies", "multi-objective control benchmarks"),
    Omitted("HPO for MORL", "hyperparameters of multi-objective RL", "multi-objective control benchmarks"),
    Omitted("DCG-MAP-Elites", "quality diversity with policy gradients", "evolution", ("map_elites",)),
    Omitted("STAX", "novelty search in a learned space of behaviours", "evolution"),
    Omitted("DRED", "design of levels for generalisation", "environment design for procedural games"),
    Omitted("Adversarial Cheap Talk", "an adversary that writes into observations", "a study of attacks"),
    Omitted(
        "Two-stage constrained actor-critic",
        "short-video recommendation",
        "a recommender, which needs the logs of a service",
    ),
    Omitted("SL-MGAC", "allocation of live streams", "a recommender, which needs the logs of a service"),
    Omitted("ESG portfolio", "portfolios with sustainability scores by A2C and PPO", "finance"),
    Omitted(
        "Optimal sample efficiency of actor-critics",
        "regret bounds",
        "theory: no method to train",
        ("actor-critics with optimal sample efficiency",),
    ),
    Omitted(
        "Variance-reduced Halpern iteration",
        "sample complexity of average-reward MDPs",
        "theory: no method to train",
        ("halpern",),
    ),
    Omitted(
        "Preference fine-tuning with suboptimal on-policy data",
        "a comparison of existing methods",
        "guidance, without a method; its options are those of `online_preference`",
        ("suboptimal on-policy data",),
    ),
    Omitted("RL in the era of LLMs", "a perspective", "no method to train"),
    Omitted("RL foundations for deep research", "a survey", "no method to train", ("deep research survey",)),
)
"""Papers that are not implemented, planned ones first."""
