"""Which nodes hold parameters, and who may say so. Pure: views in, views out; no clock, no bus.

The *view* is one record that all nodes share; it changes by compare-and-set only, so there is one sequence
of epochs. A node is

    joining   it lives and fills its shards          → serving when they are whole
    serving   transfers may read from it             → gone when it is silent or leaves
    gone      its place in its group stays free      → joining when it comes back

Invariants
    - The epoch never falls, and grows with every change of groups or of the serving nodes: a transfer plan
      belongs to one epoch.
    - A node is in one group at most, and groups once formed stay: a bigger cluster adds groups, it does not
      move what others hold. Nodes beyond the first groups wait until they are enough for a group.
    - What an earlier life of a node said is ignored: every change names the life (`incarnation`) it is of.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.contracts.gps_cluster import ClusterMember, ClusterView, MemberState, NodeHeartbeat
from shared.layout.replication import form_groups


def first_view(nodes: Sequence[int], group_size: int) -> ClusterView:
    """The view before anybody joined.

    >>> first_view([0, 1, 2, 3, 4], 2).groups
    ((0, 1, 2), (3, 4))
    """
    groups = form_groups([str(node) for node in nodes], group_size)
    return ClusterView(
        epoch=0,
        group_size=group_size,
        groups=tuple(tuple(int(name) for name in group) for group in groups),
    )


def member_of(view: ClusterView, node: int) -> ClusterMember | None:
    return next((member for member in view.members if member.node == node), None)


def serving(view: ClusterView) -> tuple[int, ...]:
    """Nodes that may be read from, lowest first."""
    return tuple(sorted(member.node for member in view.members if member.state == "serving"))


def leader(view: ClusterView) -> int | None:
    """Who coordinates Writes: the lowest serving node."""
    return min(serving(view), default=None)


def group_of(view: ClusterView, node: int) -> tuple[int, ...]:
    """The group of `node`; empty while it waits for one."""
    return next((group for group in view.groups if node in group), ())


def complete_groups(view: ClusterView) -> tuple[tuple[int, ...], ...]:
    """Groups that have a whole copy: all members serve."""
    up = set(serving(view))
    return tuple(group for group in view.groups if up.issuperset(group))


def _with(view: ClusterView, node: int, state: MemberState, incarnation: str, *, moves: bool) -> ClusterView:
    others = [member for member in view.members if member.node != node]
    members = [*others, ClusterMember(node=node, state=state, incarnation=incarnation)]
    members.sort(key=lambda member: member.node)
    return view.model_copy(update={"epoch": view.epoch + moves, "members": tuple(members)})


def join(view: ClusterView, node: int, incarnation: str) -> ClusterView:
    """`node` lives, with nothing that others may read yet. Enough waiting nodes become a group."""
    known = member_of(view, node)
    if known is not None and known.incarnation == incarnation and known.state != "gone":
        return view
    view = _with(view, node, "joining", incarnation, moves=known is not None and known.state == "serving")
    seated = {member for group in view.groups for member in group}
    waiting = [m.node for m in view.members if m.node not in seated and m.state != "gone"]
    if len(waiting) < view.group_size:
        return view
    new = tuple(waiting[: view.group_size])
    return view.model_copy(update={"epoch": view.epoch + 1, "groups": (*view.groups, new)})


def serve(view: ClusterView, node: int, incarnation: str) -> ClusterView:
    """`node` has filled its shards. Nothing changes if that was said by an earlier life, or out of turn."""
    known = member_of(view, node)
    if known is None or known.incarnation != incarnation or known.state != "joining":
        return view
    return _with(view, node, "serving", incarnation, moves=True)


def lose(view: ClusterView, node: int, incarnation: str) -> ClusterView:
    """That life of `node` is over."""
    known = member_of(view, node)
    if known is None or known.incarnation != incarnation or known.state == "gone":
        return view
    return _with(view, node, "gone", incarnation, moves=known.state == "serving")


@dataclass(slots=True)
class Silence:
    """Who was not heard for `dead_after_s`. Nobody is called silent while this node does not hear itself
    either: then it is the one that is cut off, and everybody gets a full term once it hears again.

    Times are seconds of the caller's own clock.
    """

    node: int
    dead_after_s: float
    _heard: dict[int, tuple[str, float]] = field(default_factory=dict)
    _left: set[tuple[int, str]] = field(default_factory=set)
    _seen: dict[tuple[int, str], float] = field(default_factory=dict)
    _self_heard_s: float | None = None
    _since_s: float | None = None

    def hear(self, heartbeat: NodeHeartbeat, now_s: float) -> None:
        if heartbeat.node == self.node:
            if self._self_heard_s is None or now_s - self._self_heard_s > self.dead_after_s / 2:
                self._since_s = now_s
            self._self_heard_s = now_s
        if heartbeat.leaving:
            self._left.add((heartbeat.node, heartbeat.incarnation))
        self._heard[heartbeat.node] = (heartbeat.incarnation, now_s)

    def is_cut_off(self, now_s: float) -> bool:
        """Whether this node does not hear even itself."""
        return self._self_heard_s is None or now_s - self._self_heard_s > self.dead_after_s / 2

    def lost(self, view: ClusterView, now_s: float) -> list[ClusterMember]:
        """Members of `view` that left or are silent, lowest node first. A life gets a full term from when
        the view first named it."""
        found = []
        here = [m for m in view.members if m.state != "gone" and m.node != self.node]
        lives = {(member.node, member.incarnation) for member in here}
        self._seen = {life: self._seen.get(life, now_s) for life in lives}
        self._left &= lives
        for member in here:
            life = (member.node, member.incarnation)
            incarnation, heard_s = self._heard.get(member.node, ("", float("-inf")))
            is_other = incarnation != member.incarnation
            if life in self._left:
                found.append(member)
            elif self.is_cut_off(now_s) or self._since_s is None:
                continue
            elif is_other and heard_s > max(self._since_s, self._seen[life]):
                found.append(member)  # a new life speaks: the old one is over
            else:
                spoke_s = self._seen[life] if is_other else max(heard_s, self._seen[life])
                if now_s - max(spoke_s, self._since_s) > self.dead_after_s:
                    found.append(member)
        return found

    def should_tell(self, view: ClusterView, now_s: float) -> bool:
        """Whether this node is the one to change the view: the lowest serving node that is not lost. One
        speaks, so that the others' compare-and-set does not fail for nothing; if none serves, all may."""
        gone = {member.node for member in self.lost(view, now_s)}
        return next((node for node in serving(view) if node not in gone), self.node) == self.node
