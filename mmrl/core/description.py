"""The formula of an objective as text, with its constants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmrl.core.advantages import GROUP_ESTIMATORS

if TYPE_CHECKING:
    from mmrl.core.objective import Objective

__all__ = ["describe"]


def describe(objective: Objective) -> str:
    """Return the formula an objective computes; see `Objective.describe`."""
    o = objective
    lines = [f"{o.name}: {o.citation}" if o.citation else o.name]
    lines += ["  " + line for line in (_filter(o), _reward(o), _advantage(o), _ratio(o)) if line]
    lines += ["  minimise  " + "\n          + ".join([_policy(o), *_terms(o)])]
    lines += ["  averages: " + _AVERAGES[o.aggregation].format(L=o.fixed_length)]
    if o.kl_aggregation and not o.kl_in_reward and o.needs_reference:
        lines += ["  KL averages: " + _AVERAGES[o.kl_aggregation].format(L=o.fixed_length)]
    return "\n".join(lines)


def _filter(o: Objective) -> str:
    if o.filter == "none":
        return ""
    rule = f"groups whose {o.filter_key} is the same in all rows"
    if o.filter_low is not None or o.filter_high is not None:
        low = "-inf" if o.filter_low is None else f"{o.filter_low:g}"
        high = "inf" if o.filter_high is None else f"{o.filter_high:g}"
        rule = f"groups whose mean {o.filter_key} is not strictly between {low} and {high}"
    action = "are dropped" if o.filter == "drop" else "are replaced by sampling further tasks"
    return f"{rule} {action}"


def _reward(o: Objective) -> str:
    if not (o.kl_in_reward and o.needs_reference):
        return ""
    divergence = _KLS[o.kl or "k1"].replace("logp_it", "logp_old_it")
    if o.advantage in GROUP_ESTIMATORS:
        return f"R_i <- R_i - {o.kl_coef:g} * sum_t {divergence}"
    return f"R_it <- R_it - {o.kl_coef:g} * {divergence}"


def _advantage(o: Objective) -> str:
    options = o.advantage_options
    text = _ADVANTAGES[o.advantage].format(**vars(options))
    if o.advantage in GROUP_ESTIMATORS:
        alone = "0" if options.singleton == "zero" else "its raw reward"
        text += f"; a group with one scored row gets {alone}"
    if options.whiten:
        text += "; then whitened over all trained decisions"
    if options.clip is not None:
        text += f"; then limited to +-{options.clip:g}"
    if options.scale != 1:
        text += f"; then times {options.scale:g}"
    return text


def _ratio(o: Objective) -> str:
    if o.surrogate == "policy_gradient":
        return ""
    return "r_it = exp(" + _RATIOS[o.ratio] + ")"


def _policy(o: Objective) -> str:
    bounds = f"{1 - o.clip_low:g}, {1 + o.clip_high:g}"
    clipped = f"max(-A_it r_it, -A_it clip(r_it, {bounds}))"
    if o.dual_clip is not None:
        clipped = f"[{clipped}, where A_it < 0 at most -{o.dual_clip:g} A_it]"
    formulas = {
        "ppo_clip": clipped,
        "gspo": clipped,
        "cispo": f"-stopgrad(clip(r_it, {bounds})) A_it logp_it",
        "policy_gradient": "-A_it logp_it",
        "unclipped": "-A_it r_it",
        "bgpo": "[-A_it (1 + log r_it) where A_it >= 0, -A_it r_it elsewhere]",
    }
    return f"mean {formulas[o.surrogate]}"


def _terms(o: Objective) -> list[str]:
    terms = []
    if o.needs_reference and not o.kl_in_reward and o.kl:
        limits = " (exponent within +-20, value within +-10)" if o.kl in ("k3", "k3p") and o.kl_clamp else ""
        terms.append(f"{o.kl_coef:g} * mean {_KLS[o.kl]}{limits}")
    if o.entropy and o.entropy_coef:
        entropy = "(-logp_it)" if o.entropy == "sampled" else "H_it"
        terms.append(f"({-o.entropy_coef:g}) * mean {entropy}")
    if o.needs_values and o.value_coef:
        where = " at the first decision of each turn" if o.advantage == "gae_turn" else ""
        clip = f", V within V_old +-{o.value_clip:g} if that is worse" if o.value_clip else ""
        terms.append(f"{o.value_coef:g} * mean 0.5 (V_it - (A + V_old)_it)^2{where}{clip}")
    return terms


_ADVANTAGES = {
    "group_mean_std": "A_it = (R_i - mean_g R) / (std_g R + {eps:g}), std with ddof {ddof}",
    "group_mean": "A_it = R_i - mean_g R",
    "leave_one_out": "A_it = R_i - mean of the other rows of the group",
    "whitened_returns": "A_it = whiten_batch(sum_(s>=t) {gamma:g}^(s-t) R_is)",
    "group_mean_batch_std": "A_it = whiten_batch(R_i - mean_g R)",
    "group_mean_global_std": "A_it = (R_i - mean_g R) / (std of all R + {eps:g}), std with ddof 0",
    "gae": "A_it = GAE over decisions with gamma {gamma:g}, lambda {lam:g}",
    "gae_turn": "A_it = GAE over turns with gamma {gamma:g}, lambda {lam:g}, the same for all decisions of a turn",
}
_RATIOS = {
    "token": "logp_it - logp_old_it",
    "sequence": "logp_it - stopgrad(logp_it) + stopgrad(mean_t (logp_it - logp_old_it))",
    "sequence_full": "mean_t (logp_it - logp_old_it)",
    "sequence_product": "sum_t (logp_it - logp_old_it)",
}
_KLS = {
    "k1": "(logp_it - logp_ref_it)",
    "k2": "0.5 (logp_it - logp_ref_it)^2",
    "k3": "(exp(logp_ref_it - logp_it) - (logp_ref_it - logp_it) - 1)",
    "k1p": "(logp_it - logp_ref_it; gradient of k2)",
    "k3p": "(exp(logp_ref_it - logp_it) - (logp_ref_it - logp_it) - 1; gradient of k2)",
    "full": "KL(policy || reference) over the whole distribution",
}
_AVERAGES = {
    "token_mean": "sum over all trained decisions of the step / their number",
    "sequence_mean": "mean over the rows of the step of each row's mean over its decisions",
    "sequence_sum": "mean over the rows of the step of each row's sum over its decisions",
    "fixed_length": "sum over all trained decisions of the step / (rows * {L})",
}
