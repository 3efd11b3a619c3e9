"""The planner's pseudocode written out (paper §7, Algorithm 1): plain, slow, to compare with.

Nothing is shared with the real planner but the throughput model and the words of its input. A decision judges
every candidate. What the project adds to the paper and is on by default is here too: a role whose sequences
all wait counts as stalled, minimum and maximum replicas, free devices and idle training as donors.
"""

from math import inf
from typing import Any, NamedTuple

from shared.ids import Role
from shared.scheduling.migration import tie_order
from shared.scheduling.throughput import UNIT
from tests.support.migration_reference import RoleState, Seq, shift_down, shift_up


class Pair(NamedTuple):
    """Slots that can start, by device; who leaves; φ."""

    up: tuple[Any, ...]
    down: tuple[Any, ...]
    training: bool
    penalty: float
    device: int


def candidates(pairs: list[Pair], most: int) -> dict[int, tuple[float, list[tuple[Pair, int]]]]:
    """Algorithm 1: for each reachable k, the least penalty and how many of which pairs."""
    d = [0.0] + [inf] * most
    c: list[list[tuple[Pair, int]]] = [[] for _ in range(most + 1)]
    for pair in pairs:
        d_hat, c_hat = list(d), list(c)
        for j in range(most + 1):
            if d[j] == inf:
                continue
            for e in range(1, min(len(pair.up), most - j) + 1):
                reached = d[j] + pair.penalty
                d_hat[j + e] = min(d_hat[j + e], reached)
                if reached == d_hat[j + e]:
                    c_hat[j + e] = [*c[j], (pair, e)]
        d, c = d_hat, c_hat
    return {k: (d[k], c[k]) for k in range(1, most + 1) if d[k] < inf}


def harmonic(n_rollout: float, t_rollout: float, n_reward: float, t_reward: float) -> float:
    """The weighted harmonic mean of §7.3; a role without sequences drops out."""
    latency = 0.0
    for n, t in ((n_rollout, t_rollout), (n_reward, t_reward)):
        if n and not t:
            return 0.0
        latency += n / t if n else 0.0
    return (n_rollout + n_reward) / latency if latency else 0.0


class Judged(NamedTuple):
    """A candidate with its benefit, tokens."""

    k: int
    up: tuple[Any, ...]
    down: tuple[Any, ...]
    penalty: float
    up_tokens_per_s: float
    down_tokens_per_s: float
    tokens_per_s: float
    benefit: float


class Decision(NamedTuple):
    """`chosen` is None where nothing pays."""

    up_role: Role | None
    chosen: Judged | None
    judged: tuple[Judged, ...] = ()


def role_state(config: Any, cluster: Any, allocation: Any, load: Any, role: Role) -> tuple[RoleState, Any]:
    """The role as a decision starts from, and its replicas by index."""
    settings = config.of(role)
    ids = sorted((slot.id for slot in cluster.slots if slot.role is role), key=tie_order)
    known = {r.replica: r for r in load.replicas}
    capacities = [known[r].kv_capacity_tokens if r in known else settings.kv_capacity_tokens for r in ids]
    model = settings.throughput_model if config.use_throughput_model else None
    state = RoleState(model or UNIT, capacities, [[] for _ in ids])
    state.active = {i for i, r in enumerate(ids) if r in allocation.active}
    number = 0
    for replica in load.replicas:
        for length in replica.all_lengths():
            s = Seq(length, number, length + settings.growth_tokens)
            at = ids.index(replica.replica) if replica.replica in ids else None
            (state.on[at] if at in state.active else state.queue).append(s)
            number += 1
    for length in load.queue:
        state.queue.append(Seq(length, number, length + settings.growth_tokens))
        number += 1
    return state, ids


def shift_pairs(cluster: Any, allocation: Any, up_role: Role, penalty_of: Any, protected: bool) -> list[Pair]:
    """Step 2: slots that share a donor are one pair; so are all on free devices."""
    groups: list[tuple[set[Any], list[Any]]] = []
    for slot in cluster.slots:
        if slot.role is not up_role or slot.id in allocation.active:
            continue
        owners = {allocation.owner_of(d, cluster) for d in slot.devices} - {None}
        if protected and Role.TRAINING in owners:
            continue
        groups.append((owners or {"free"}, [slot]))
    merged = True
    while merged:
        merged = False
        for a in range(len(groups)):
            for b in range(a + 1, len(groups)):
                if groups[a][0] & groups[b][0]:
                    groups[a] = (groups[a][0] | groups[b][0], groups[a][1] + groups[b][1])
                    del groups[b]
                    merged = True
                    break
            if merged:
                break
    pairs = []
    for owners, slots in groups:
        slots.sort(key=lambda slot: min(slot.devices))
        down = sorted(owners - {Role.TRAINING, "free"}, key=tie_order)
        pairs.append(
            Pair(
                tuple(slot.id for slot in slots),
                tuple(down),
                Role.TRAINING in owners,
                sum(penalty_of(replica) for replica in down),
                min(slots[0].devices),
            )
        )
    return sorted(pairs, key=lambda pair: (pair.penalty, pair.device))


class Prepared(NamedTuple):
    """Steps 1 and 2 done."""

    up_role: Role
    states: dict[Role, RoleState]
    ids: dict[Role, Any]
    pairs: list[Pair]


def prepare(config: Any, cluster: Any, allocation: Any, state: Any, shift_s: Any) -> Prepared | None:
    """Steps 1 and 2; None where training is next or nobody has work. `shift_s(up, down)` is τ_shift."""
    if state.training.batch_ready and not state.training.is_active and not allocation.training_holds:
        return None
    states, ids = {}, {}
    for role in (Role.ROLLOUT, Role.REWARD):
        states[role], ids[role] = role_state(config, cluster, allocation, state.of(role), role)
    pressure = {}
    for role, each in states.items():
        n, t = each.num_sequences(), each.total()
        pressure[role] = ((n / t if t else inf) if n else 0.0, n)
    if not any(n for _, n in pressure.values()):
        return None
    up_role = Role.REWARD if pressure[Role.REWARD] > pressure[Role.ROLLOUT] else Role.ROLLOUT
    donors = states[up_role.opposite]

    def penalty_of(replica: Any) -> float:
        at = ids[up_role.opposite].index(replica)
        return shift_s(up_role, up_role.opposite) * donors.throughput(at)

    protected = state.training.is_active or state.training.batch_ready
    return Prepared(up_role, states, ids, shift_pairs(cluster, allocation, up_role, penalty_of, protected))


def construct(config: Any, prepared: Prepared) -> dict[int, tuple[float, list[tuple[Pair, int]]]]:
    """Step 3."""
    most = sum(len(pair.up) for pair in prepared.pairs)
    limit = config.of(prepared.up_role).max_replicas
    if limit is not None:
        most = min(most, limit - len(prepared.states[prepared.up_role].active))
    return candidates(prepared.pairs, max(0, most))


def simulate(config: Any, prepared: Prepared, found: Any) -> Decision:
    """Steps 4 and 5, every candidate judged."""
    up_role, states, ids, _ = prepared
    donor_role = up_role.opposite
    n_up, n_down = states[up_role].num_sequences(), states[donor_role].num_sequences()
    t_up, t_down = states[up_role].total(), states[donor_role].total()
    if t_up == 0 and t_down == 0:
        n_down = 0

    def overall(up: float, down: float) -> float:
        if up_role is Role.ROLLOUT:
            return harmonic(n_up, up, n_down, down)
        return harmonic(n_down, down, n_up, up)

    current = overall(t_up, t_down)
    migrate = config.migration and config.use_throughput_model
    judged, best = [], None
    for k, (penalty, parts) in found.items():
        up = tuple(replica for pair, e in parts for replica in pair.up[:e])
        down = tuple(replica for pair, _ in parts for replica in pair.down)
        after_up, after_down = states[up_role].copy(), states[donor_role].copy()
        shift_up(after_up, [ids[up_role].index(replica) for replica in up], migrate)
        if down:
            shift_down(after_down, [ids[donor_role].index(replica) for replica in down])
        t_after = after_up.total(), after_down.total()
        after = overall(*t_after)
        benefit = config.window_s * (after - current) - penalty
        each = Judged(k, up, down, penalty, *t_after, after, benefit)
        judged.append(each)
        keeps = len(states[donor_role].active) - len(down) >= config.of(donor_role).min_replicas
        if (keeps or not down) and each.benefit > 0 and (best is None or each.benefit > best.benefit):
            best = each
    return Decision(up_role, best, tuple(judged))


def decide(config: Any, cluster: Any, allocation: Any, state: Any, shift_s: Any) -> Decision:
    """All five steps, for rollout and reward."""
    prepared = prepare(config, cluster, allocation, state, shift_s)
    if prepared is None:
        return Decision(None, None)
    return simulate(config, prepared, construct(config, prepared))
