"""The core's formulas a second time, in plain Python float64 loops over lists, written from the papers.

No tensor library and nothing of the package is used, so a shared mistake is unlikely. `python -m
tests.core.reference` writes tests/core/reference.json from the inputs at the foot of this file.
"""

import json
import math
import re
from pathlib import Path

REFERENCE = Path(__file__).with_name("reference.json")


def members(group, reward, i):
    return [reward[j] for j in range(len(reward)) if group[j] == group[i] and math.isfinite(reward[j])]


def mean(xs):
    return sum(xs) / len(xs)


def std(xs, ddof):
    if len(xs) <= ddof:
        return 0.0
    m = mean(xs)
    return math.sqrt(sum((x - m) ** 2 for x in xs) / (len(xs) - ddof))


def spread(per_row, mask, reward):
    return [[per_row[i] if m and math.isfinite(reward[i]) else 0.0 for m in row] for i, row in enumerate(mask)]


def group_mean_std(group, mask, reward, ddof=1, eps=1e-6, singleton="zero"):
    rows = []
    for i, r in enumerate(reward):
        xs = members(group, reward, i)
        if len(xs) < 2:
            rows.append(r / (1 + eps) if singleton == "keep" else 0.0)
        elif max(xs) == min(xs):
            rows.append(0.0)
        else:
            rows.append((r - mean(xs)) / (std(xs, ddof) + eps))
    return spread(rows, mask, reward)


def group_mean(group, mask, reward, singleton="zero"):
    rows = []
    for i, r in enumerate(reward):
        xs = members(group, reward, i)
        rows.append((r if singleton == "keep" else 0.0) if len(xs) < 2 else r - mean(xs))
    return spread(rows, mask, reward)


def group_outcome_std(group, mask, reward, solved=1.0, ddof=1, eps=1e-6, singleton="zero"):
    rows = []
    for i, r in enumerate(reward):
        xs = members(group, reward, i)
        if len(xs) < 2:
            rows.append(r if singleton == "keep" else 0.0)
            continue
        wins = [1.0 if x >= solved else 0.0 for x in xs]
        alike = [x for x in xs if (x >= solved) == (r >= solved)]
        lone_win = [1.0] + [0.0] * (len(xs) - 1)
        scale = max(std(wins, ddof), std(lone_win, ddof))
        rows.append(((1.0 if r >= solved else 0.0) - mean(wins) + r - mean(alike)) / (scale + eps) if alike else 0.0)
    return spread(rows, mask, reward)


def leave_one_out(group, mask, reward):
    rows = []
    for i, r in enumerate(reward):
        xs = members(group, reward, i)
        rows.append(0.0 if len(xs) < 2 else r - (sum(xs) - r) / (len(xs) - 1))
    return spread(rows, mask, reward)


def loss_mask(mask, reward):
    return [[m if math.isfinite(reward[i]) else 0 for m in row] for i, row in enumerate(mask)]


def whiten(x, mask):
    kept = [v for row, ms in zip(x, mask, strict=True) for v, m in zip(row, ms, strict=True) if m]
    mu, var = mean(kept), std(kept, 1) ** 2
    return [
        [(v - mu) / math.sqrt(var + 1e-8) if m else 0.0 for v, m in zip(row, ms, strict=True)]
        for row, ms in zip(x, mask, strict=True)
    ]


def terminal_rewards(mask, reward):
    rewards = []
    for row, r in zip(loss_mask(mask, reward), reward, strict=True):
        places = [t for t, m in enumerate(row) if m]
        rewards.append([r if places and t == places[-1] else 0.0 for t in range(len(row))])
    return rewards


def to_go(rewards, mask, gamma, gaps="skip"):
    out = []
    for row, ms in zip(rewards, mask, strict=True):
        values = [0.0] * len(row)
        for t, m in enumerate(ms):
            if not m:
                continue
            step = 0
            for s in range(t, len(row)):
                if ms[s]:
                    values[t] += gamma**step * row[s]
                    step += 1
                elif gaps == "reset":
                    break
        out.append(values)
    return out


def whitened_returns(mask, reward, gamma, gaps="skip"):
    valid = loss_mask(mask, reward)
    return whiten(to_go(terminal_rewards(mask, reward), valid, gamma, gaps), valid)


def group_mean_batch_std(group, mask, reward):
    return whiten(group_mean(group, mask, reward), loss_mask(mask, reward))


def group_mean_global_std(group, mask, reward, eps=1e-6, singleton="zero", ddof=0):
    overall = std([r for r in reward if math.isfinite(r)], ddof)
    rows = []
    for i, r in enumerate(reward):
        xs = members(group, reward, i)
        if len(xs) < 2:
            rows.append(r if singleton == "keep" else 0.0)
        else:
            rows.append(0.0 if max(xs) == min(xs) else (r - mean(xs)) / (overall + eps))
    return spread(rows, mask, reward)


def gae(rewards, values, mask, gamma, lam):
    """The definition sum_k (gamma lam)^k delta_(t+k) over the trained decisions only, not the recursion."""
    out = []
    for rs, vs, ms in zip(rewards, values, mask, strict=True):
        places = [t for t, m in enumerate(ms) if m]
        deltas = []
        for k, t in enumerate(places):
            after = vs[places[k + 1]] if k + 1 < len(places) else 0.0
            deltas.append(rs[t] + gamma * after - vs[t])
        row = [0.0] * len(ms)
        for k, t in enumerate(places):
            row[t] = sum((gamma * lam) ** (j - k) * deltas[j] for j in range(k, len(places)))
        out.append(row)
    return out


def gae_turn(rewards, values, mask, turn, gamma, lam):
    out = []
    for rs, vs, ms, ks in zip(rewards, values, mask, turn, strict=True):
        order = sorted({k for k, m in zip(ks, ms, strict=True) if m})
        own = [[t for t, (k, m) in enumerate(zip(ks, ms, strict=True)) if m and k == turn_id] for turn_id in order]
        per_turn = gae(
            [[sum(rs[t] for t in ts) for ts in own]], [[vs[ts[0]] for ts in own]], [[1] * len(own)], gamma, lam
        )
        row = [0.0] * len(ms)
        for ts, a in zip(own, per_turn[0], strict=True):
            for t in ts:
                row[t] = a
        out.append(row)
    return out


def kl_value(kind, lp, ref, clamp):
    d = lp - ref
    if kind in ("k1", "k1p"):
        return d
    if kind == "k2":
        return d * d / 2
    e = max(-20.0, min(20.0, -d)) if clamp else -d
    value = math.exp(e) - e - 1
    return max(-10.0, min(10.0, value)) if clamp else value


def clip(x, low, high):
    return max(low, min(high, x))


def ppo_term(ratio, a, low, high, dual=None):
    value = max(-a * ratio, -a * clip(ratio, 1 - low, 1 + high))
    return min(value, -a * dual) if dual is not None and a < 0 else value


def rows_of(mask):
    return [[t for t, m in enumerate(row) if m] for row in mask]


def token_mean(x, mask):
    kept = [x[i][t] for i, ts in enumerate(rows_of(mask)) for t in ts]
    return sum(kept) / len(kept)


def sequence_mean(x, mask):
    return mean([mean([x[i][t] for t in ts]) for i, ts in enumerate(rows_of(mask)) if ts])


def sequence_sum(x, mask):
    return mean([sum(x[i][t] for t in ts) for i, ts in enumerate(rows_of(mask)) if ts])


def fixed_length(x, mask, length):
    rows = [sum(x[i][t] for t in ts) for i, ts in enumerate(rows_of(mask)) if ts]
    return sum(rows) / (len(rows) * length)


def turns_of(mask, turn):
    """The trained positions of each turn of each row."""
    found = {}
    for i, ts in enumerate(rows_of(mask)):
        for t in ts:
            found.setdefault((i, turn[i][t]), []).append((i, t))
    return list(found.values())


def turn_mean(x, mask, turn):
    return mean([mean([x[i][t] for i, t in places]) for places in turns_of(mask, turn)])


def table(function, mask):
    return [[function(i, t) if m else 0.0 for t, m in enumerate(row)] for i, row in enumerate(mask)]


def method_loss(name, b, lp):
    """The loss of one paper, spelled out; `lp` are the current log-probs, `b` holds everything constant."""
    group, mask, reward, ol, ref = b["group"], b["mask"], b["reward"], b["logp_old"], b["logp_ref"]
    valid = loss_mask(mask, reward)
    a = group_mean_std(group, mask, reward)  # that of most methods

    def ratio(i, t):
        return math.exp(lp[i][t] - ol[i][t])

    def row_mean_log_ratio(i):
        ts = rows_of(valid)[i]
        return mean([lp[i][t] - ol[i][t] for t in ts])

    def clipped(a, low, high, dual=None):
        return table(lambda i, t: ppo_term(ratio(i, t), a[i][t], low, high, dual), valid)

    def kl(kind, clamp=False):
        return table(lambda i, t: kl_value(kind, lp[i][t], ref[i][t], clamp), valid)

    if name == "grpo":
        return sequence_mean(clipped(a, 0.2, 0.2), valid) + 0.04 * sequence_mean(kl("k3"), valid)
    if name == "icepop":
        rho = table(lambda i, t: math.exp(ol[i][t] - b["logp_rollout"][i][t]), valid)
        weight = table(lambda i, t: rho[i][t] if 0.5 <= rho[i][t] <= 5 else 0.0, valid)
        policy = table(lambda i, t: weight[i][t] * ppo_term(ratio(i, t), a[i][t], 0.2, 0.2), valid)
        return sequence_mean(policy, valid)
    if name == "dr_grpo":
        a = group_mean(group, mask, reward)
        return fixed_length(clipped(a, 0.2, 0.2), valid, 3000)
    if name == "dapo":
        return token_mean(clipped(a, 0.2, 0.28), valid)
    if name == "papo":
        return token_mean(clipped(a, 0.2, 0.3, 3.0), valid) + 0.01 * token_mean(kl("k3", clamp=True), valid)
    if name == "apo":
        a = group_mean_std(group, mask, reward, 1, 1e-9)
        return token_mean(clipped(a, 0.2, 0.2), valid) + 1e-3 * sequence_mean(kl("k3"), valid)
    if name == "sft":
        return token_mean(table(lambda i, t: -a[i][t] * lp[i][t], valid), valid)
    if name == "srpo":
        return sequence_mean(clipped(a, 0.2, 0.28, 3.0), valid)
    if name == "arpo":
        return sequence_mean(clipped(a, 0.2, 0.3, 3.0), valid)
    if name == "tspo":
        a = group_mean_std(group, mask, reward, 1, 1e-4)
        return sequence_mean(table(lambda i, t: -a[i][t] * ratio(i, t), valid), valid)
    if name == "reg_grpo":
        a = group_mean_std(group, mask, reward, 1, 1e-4)
        rho = [sum(lp[i][t] - ol[i][t] for t in ts) for i, ts in enumerate(rows_of(valid))]
        losses = []
        for i, ts in enumerate(rows_of(valid)):
            if ts:
                own = [rho[j] for j, others in enumerate(rows_of(valid)) if others and group[j] == group[i]]
                predicted = (rho[i] - mean(own)) / (std(own, 1) + 1e-4)
                losses.append((a[i][ts[0]] - predicted) ** 2)
        return mean(losses) + 0.1 * sequence_mean(kl("k3"), valid)
    if name == "aepo":
        a = leave_one_out(group, mask, reward)
        return sequence_mean(clipped(a, 0.2, 0.4, 3.0), valid)
    if name == "rloo":
        shaped = [r - 0.05 * sum(ol[i][t] - ref[i][t] for t in rows_of(valid)[i]) for i, r in enumerate(reward)]
        a = leave_one_out(group, mask, shaped)
        losses = []
        for i, ts in enumerate(rows_of(valid)):
            if ts:
                product = math.exp(sum(lp[i][t] - ol[i][t] for t in ts))
                losses.append(ppo_term(product, a[i][ts[0]], 0.2, 0.2))
        return mean(losses)
    if name == "reinforce_pp":
        rewards = terminal_rewards(mask, reward)
        rewards = table(lambda i, t: rewards[i][t] - 0.001 * (ol[i][t] - ref[i][t]), valid)
        a = whiten(to_go(rewards, valid, 1.0), valid)
        return token_mean(clipped(a, 0.2, 0.2), valid)
    if name == "reinforce_pp_baseline":
        a = group_mean_batch_std(group, mask, reward)
        return token_mean(clipped(a, 0.2, 0.2), valid) + 0.001 * token_mean(kl("k2"), valid)
    if name == "gspo":
        policy = table(lambda i, t: ppo_term(math.exp(row_mean_log_ratio(i)), a[i][t], 3e-4, 4e-4), valid)
        return sequence_mean(policy, valid)
    if name == "cispo":
        weight = table(lambda i, t: min(math.exp(b["logp"][i][t] - ol[i][t]), 5.0), valid)
        return token_mean(table(lambda i, t: -weight[i][t] * a[i][t] * lp[i][t], valid), valid)
    if name == "ppo":
        old, v = b["values"], b["values_new"]
        rewards = terminal_rewards(mask, reward)
        rewards = table(lambda i, t: rewards[i][t] - 0.05 * (ol[i][t] - ref[i][t]), valid)
        a = gae(rewards, old, valid, 1.0, 0.95)
        target = table(lambda i, t: a[i][t] + old[i][t], valid)
        a = whiten(a, valid)

        def value_term(i, t):
            near = old[i][t] + clip(v[i][t] - old[i][t], -0.2, 0.2)
            return 0.5 * max((v[i][t] - target[i][t]) ** 2, (near - target[i][t]) ** 2)

        return token_mean(clipped(a, 0.2, 0.2, 3.0), valid) + 0.1 * token_mean(table(value_term, valid), valid)
    if name == "vl_dac":
        old, v, turns = b["values"], b["values_new"], turns_of(valid, b["turn"])
        a = gae_turn(terminal_rewards(mask, reward), old, valid, b["turn"], 0.99, 0.95)
        first = [places[0] for places in turns]
        values = []
        for i, t in first:
            target, near = a[i][t] + old[i][t], old[i][t] + clip(v[i][t] - old[i][t], -0.1, 0.1)
            values.append(max((v[i][t] - target) ** 2, (near - target) ** 2))
        samples = [a[i][t] for i, t in first]
        loss = 0.0
        for places in turns:
            far = any(ratio(i, t) > 10 for i, t in places)
            terms = []
            for i, t in places:
                advantage = (a[i][t] - mean(samples)) / (std(samples, 1) + 1e-8)
                bounded = -advantage * clip(ratio(i, t), 0.9, 1.1)
                policy = bounded if far else max(-advantage * ratio(i, t), bounded)
                terms.append(policy + 0.05 * kl_value("k3", lp[i][t], ref[i][t], False))
            loss += mean(terms)
        return loss / len(turns) + 0.15 * mean(values)
    if name in IMAGE_METHODS:
        clip_range, kl_coef, scale, per_group = IMAGE_METHODS[name]
        a = (
            group_mean_std(group, mask, reward, *per_group)
            if per_group
            else group_mean_global_std(group, mask, reward, 1e-4)
        )
        a = table(lambda i, t: scale * clip(a[i][t], -5, 5), valid)
        policy = clipped(a, clip_range, clip_range)
        # the exact divergence comes from the policy's side; this one is that of two unit Gaussians
        exact = table(lambda i, t: 0.5 * (lp[i][t] - ref[i][t]) ** 2, valid)
        return token_mean(policy, valid) + kl_coef * token_mean(exact, valid)
    if name == "flow_dppo":
        a = group_mean_global_std(group, mask, reward, 1e-8, ddof=1)
        far = table(lambda i, t: 0.5 * (lp[i][t] - ol[i][t]) ** 2 >= 1e-5, valid)
        left = table(lambda i, t: far[i][t] and (ratio(i, t) - 1) * a[i][t] > 0, valid)
        return token_mean(table(lambda i, t: 0.0 if left[i][t] else -a[i][t] * ratio(i, t), valid), valid)
    raise KeyError(name)


def method_gradient(name, b, step=1e-6):
    """Central differences of `method_loss` with respect to every log-prob, with a constant CISPO weight."""
    gradient = []
    for i, row in enumerate(b["logp"]):
        gradient.append([])
        for t in range(len(row)):
            sides = []
            for sign in (1, -1):
                moved = [list(r) for r in b["logp"]]
                moved[i][t] += sign * step
                sides.append(method_loss(name, b, moved))
            gradient[-1].append((sides[0] - sides[1]) / (2 * step))
    return gradient


NAN = float("nan")
# clip range, weight of the exact KL, factor on the advantage, and (ddof, eps) where the group's own deviation counts
IMAGE_METHODS = {
    "flow_grpo": (1e-4, 0.04, 1.0, None),
    "flow_grpo_fast": (1e-5, 0.0, 1.0, None),
    "ddpo": (1e-4, 0.0, 1.0, (0, 1e-6)),
    "dance_grpo": (1e-4, 0.0, 1.0, (1, 1e-8)),
    "awm": (1.0, 0.001, 0.2, None),
}
METHODS = ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo", "ppo")
METHODS += (*IMAGE_METHODS, "flow_dppo", "srpo", "papo", "apo", "sft", "vl_dac", "aepo", "arpo", "tspo", "reg_grpo")
METHODS += ("icepop",)
# Groups: mixed; all equal; one row lost its score; a group of one row. Rows: gaps, an empty row, padding.
BATCH = {
    "group": [0, 0, 0, 0, 1, 1, 2, 2, 2, 3],
    "reward": [1.0, 0.0, 0.1, 0.7, 0.1, 0.1, 1.0, NAN, 0.0, 0.5],
    "mask": [
        [1, 1, 1, 1, 1],
        [1, 1, 0, 1, 0],
        [1, 0, 0, 0, 0],
        [0, 1, 1, 1, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 0, 1, 1],
        [1, 1, 1, 1, 1],
        [0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0],
    ],
    "turn": [
        [0, 0, 1, 1, 2],
        [0, 0, 0, 1, -1],
        [0, -1, -1, -1, -1],
        [0, 0, 1, 1, -1],
        [0, 2, 2, -1, -1],
        [0, 1, -1, -1, -1],
        [0, 0, 1, 1, 3],
        [0, 0, 0, 1, 1],
        [-1, -1, -1, -1, -1],
        [0, 0, 0, -1, -1],
    ],
}


def numbers(seed, low, high):
    """Reproducible numbers without a random module, rounded so that the JSON stays readable."""
    state, out = seed, []
    for _ in range(10):
        row = []
        for _ in range(5):
            state = (1103515245 * state + 12345) % 2**31
            row.append(round(low + (high - low) * state / 2**31, 3))
        out.append(row)
    return out


def added(rows, others):
    return [[round(x + y, 3) for x, y in zip(r, s, strict=True)] for r, s in zip(rows, others, strict=True)]


def full_batch():
    old = numbers(1, -3.0, -0.2)
    old[1][1] = -2.5
    # Moves of up to +-0.5 put ratios on both sides of every bound; one decision moves by 1.8 to reach ratio 6.
    new = added(old, numbers(2, -0.5, 0.5))
    new[1][1] = -0.7
    return BATCH | {
        "logp_old": old,
        "logp": new,
        "logp_ref": numbers(3, -3.0, -0.2),
        "values": numbers(4, -0.5, 1.0),
        "values_new": numbers(5, -0.5, 1.0),
        # Ratios on both sides of the bounds 0.5 and 5.
        "logp_rollout": added(old, numbers(6, -2.0, 1.0)),
    }


def all_numbers():
    b = full_batch()
    group, mask, reward = b["group"], b["mask"], b["reward"]
    valid, rewards = loss_mask(mask, reward), terminal_rewards(mask, reward)
    advantages = {
        "group_mean_std": group_mean_std(group, mask, reward),
        "group_mean_std ddof=0 eps=0.0001": group_mean_std(group, mask, reward, 0, 1e-4),
        "group_mean_std singleton=keep": group_mean_std(group, mask, reward, singleton="keep"),
        "group_mean": group_mean(group, mask, reward),
        "group_mean singleton=keep": group_mean(group, mask, reward, singleton="keep"),
        "group_outcome_std": group_outcome_std(group, mask, reward),
        "group_outcome_std solved=0.7 ddof=0": group_outcome_std(group, mask, reward, 0.7, 0),
        "group_outcome_std singleton=keep": group_outcome_std(group, mask, reward, singleton="keep"),
        "leave_one_out": leave_one_out(group, mask, reward),
        "whitened_returns gamma=0.9": whitened_returns(mask, reward, 0.9),
        "whitened_returns gamma=0.9 mask_carry=reset": whitened_returns(mask, reward, 0.9, "reset"),
        "group_mean_batch_std": group_mean_batch_std(group, mask, reward),
        "group_mean_global_std eps=0.0001": group_mean_global_std(group, mask, reward, 1e-4),
        "group_mean_global_std singleton=keep": group_mean_global_std(group, mask, reward, singleton="keep"),
        "gae gamma=0.9 lam=0.8": gae(rewards, b["values"], valid, 0.9, 0.8),
        "gae_turn gamma=0.9 lam=0.8": gae_turn(rewards, b["values"], valid, b["turn"], 0.9, 0.8),
    }
    methods = {
        name: {"loss": method_loss(name, b, b["logp"]), "gradient": method_gradient(name, b)} for name in METHODS
    }
    note = (
        "Computed by tests/core/reference.py: plain Python float64 from the papers' formulas, gradients by differences."
    )
    return {"source": note, "batch": b, "advantages": advantages, "methods": methods}


def main():
    text = json.dumps(all_numbers(), indent=1).replace("NaN", "null")
    # One line a row of numbers keeps the file readable.
    REFERENCE.write_text(_compact(text) + "\n", encoding="utf-8")


def _compact(text):
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: "[" + re.sub(r"\s+", " ", m.group(1)) + "]", text)


if __name__ == "__main__":
    main()
