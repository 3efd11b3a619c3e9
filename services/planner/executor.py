"""Carries a shift out as a transaction: lease, down, confirm, up; or back.

    lease donors' devices to the shift ─► down (all donors at once) ─► devices free ─► lease to receivers
    ─► up

    a donor that will not go down   → the donors are brought up again; nothing has changed
    a receiver that does not come up → its devices are left free, its sequences stay in the queue

Every wait has the shift's deadline; the outcome says what each half took and which allocation is real now.
Leases always end as that allocation says, and a broker that does not take an event stops no shift."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from services.planner.leases import FREE, DeviceLeases
from shared.bus.ports import Bus
from shared.contracts.base import Message
from shared.contracts.planner import ShiftDown, ShiftEvent, ShiftPhase, ShiftStepDone, ShiftUp
from shared.contracts.subjects import Subjects
from shared.errors import PivotError, ShiftFailed
from shared.ids import DeviceId, ReplicaId, Role
from shared.planning.cluster import Allocation, ClusterSpec
from shared.planning.plan import Direction, ShiftPlan
from shared.runtime.clock import Clock

log = logging.getLogger("pivotrl.executor")
SHIFT_DEADLINE_S = 120.0


@dataclass(slots=True)
class Outcome:
    """`reason` is empty when all of the plan is done; `allocation` is what is real now."""

    allocation: Allocation
    reason: str = ""
    duration_s: dict[tuple[Role, Direction], float] = field(default_factory=dict)
    freed_bytes: int = 0
    read_bytes: int = 0


class ShiftExecutor:
    def __init__(
        self, cluster: ClusterSpec, leases: DeviceLeases, bus: Bus, subjects: Subjects, clock: Clock
    ) -> None:
        self._cluster, self._leases = cluster, leases
        self._bus, self._subjects, self._clock = bus, subjects, clock
        self.on_event: Callable[[ShiftEvent], None] = lambda event: None

    async def bring_up(self, allocation: Allocation) -> Allocation:
        """The initial allocation of a run, in which nothing is awake yet; returns what came up."""
        active: set[ReplicaId] = set()
        for role in (Role.ROLLOUT, Role.REWARD):
            replicas = allocation.active_of(role, self._cluster)
            if replicas:
                plan = _up_plan(f"start-{role.value}", role, tuple(replicas), self._cluster)
                outcome = await self.execute(plan, Allocation(frozenset(active), False))
                active = set(outcome.allocation.active)
        holds = False
        if allocation.training_holds:
            plan = _up_plan("start-training", Role.TRAINING, (), self._cluster)
            outcome = await self.execute(plan, Allocation(frozenset(active), False))
            holds = outcome.allocation.training_holds
        return Allocation(frozenset(active), holds)

    async def execute(
        self, plan: ShiftPlan, allocation: Allocation, *, expected_gain: float = 0.0
    ) -> Outcome:
        """Runs `plan` from `allocation`. Never raises for a peer's failure: the outcome tells."""
        started_s = self._clock.now_s()
        await self._tell(plan, "started", started_s, expected_gain=expected_gain)
        outcome = Outcome(allocation)
        try:
            await self._down(plan, outcome)
            await self._up(plan, outcome)
        except PivotError as error:
            outcome.reason = error.message
            log.error("shift %s failed: %s", plan.id, error.message)
            await self._settle(plan, outcome.allocation)
        phase: ShiftPhase = "failed" if outcome.reason else "completed"
        await self._tell(
            plan, phase, started_s, detail=outcome.reason, outcome=outcome, expected_gain=expected_gain
        )
        return outcome

    # Down

    async def _down(self, plan: ShiftPlan, outcome: Outcome) -> None:
        donors = self._donors(plan)
        await self._lease(donors, plan.id)
        try:
            steps = [
                self._command(plan, role, "down", replicas)
                for role, replicas in self._by_role(plan.down_replicas)
            ]
            if plan.training_down:
                steps.append(self._command(plan, Role.TRAINING, "down", ()))
            results = await asyncio.gather(*steps, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
                role, done = result
                outcome.duration_s[role, Direction.DOWN] = done.duration_s
                outcome.freed_bytes += done.freed_bytes
        except PivotError:
            await self._undo_down(plan, donors, outcome)
            raise
        for _, devices in donors:
            await self._leases.move(devices, expected=plan.id, to=FREE)
        outcome.allocation = plan.apply_down(outcome.allocation)

    async def _lease(self, holders: list[tuple[str, frozenset[DeviceId]]], to: str) -> None:
        """All of it or nothing."""
        taken: list[tuple[str, frozenset[DeviceId]]] = []
        try:
            for owner, devices in holders:
                await self._leases.move(devices, expected=owner, to=to)
                taken.append((owner, devices))
        except PivotError:
            for owner, devices in taken:
                await self._leases.move(devices, expected=to, to=owner)
            raise

    async def _settle(self, plan: ShiftPlan, allocation: Allocation) -> None:
        """Leases of the plan's devices as `allocation` says, wherever the shift stopped."""
        own = {plan.id, *map(str, plan.up_replicas), *([Role.TRAINING.value] if plan.training_up else [])}
        try:
            for device, holder in (await self._leases.owners(plan.devices)).items():
                owner = str(allocation.owner_of(device, self._cluster) or FREE)
                if holder in own and holder != owner:
                    await self._leases.move([device], expected=holder, to=owner)
        except PivotError as error:
            log.error("%s: leases are not settled: %s", plan.id, error.message)

    async def _undo_down(
        self, plan: ShiftPlan, taken: list[tuple[str, frozenset[DeviceId]]], outcome: Outcome
    ) -> None:
        """Brings donors up again; those that cannot are left out of the allocation, their devices free."""
        for owner, devices in taken:
            role = (
                Role.TRAINING if owner == Role.TRAINING.value else self._cluster.slot(ReplicaId(owner)).role
            )
            replicas = () if role is Role.TRAINING else (ReplicaId(owner),)
            try:
                await self._command(plan, role, "up", replicas)
                await self._leases.move(devices, expected=plan.id, to=owner)
            except PivotError as error:
                log.error("%s: %s cannot be brought back: %s", plan.id, owner, error.message)
                await self._leases.move(devices, expected=plan.id, to=FREE)
                outcome.allocation = Allocation(
                    outcome.allocation.active - set(replicas),
                    outcome.allocation.training_holds and role is not Role.TRAINING,
                )

    # Up

    async def _up(self, plan: ShiftPlan, outcome: Outcome) -> None:
        if plan.training_up:
            devices = self._cluster.training_devices
            await self._leases.move(devices, expected=FREE, to=Role.TRAINING.value)
            _, done = await self._command(plan, Role.TRAINING, "up", ())
            outcome.duration_s[Role.TRAINING, Direction.UP] = done.duration_s
            outcome.allocation = Allocation(outcome.allocation.active, True)
            return
        failed: list[str] = []
        for role, replicas in self._by_role(plan.up_replicas):
            for replica in replicas:
                await self._leases.move(self._cluster.slot(replica).devices, expected=FREE, to=replica)
            _, done = await self._command(plan, role, "up", replicas)
            outcome.duration_s[role, Direction.UP] = done.duration_s
            outcome.read_bytes += done.read_bytes
            failed += done.failed_replicas
            up = [replica for replica in replicas if replica not in done.failed_replicas]
            outcome.allocation = Allocation(
                outcome.allocation.active | set(up), outcome.allocation.training_holds
            )
        if failed:
            raise ShiftFailed(f"{', '.join(failed)} did not come up")

    # Small things

    def _donors(self, plan: ShiftPlan) -> list[tuple[str, frozenset[DeviceId]]]:
        donors = [(str(replica), self._cluster.slot(replica).devices) for replica in plan.down_replicas]
        if plan.training_down:
            donors.append((Role.TRAINING.value, self._cluster.training_devices))
        return donors

    def _by_role(self, replicas: tuple[ReplicaId, ...]) -> list[tuple[Role, tuple[ReplicaId, ...]]]:
        by_role: dict[Role, list[ReplicaId]] = {}
        for replica in replicas:
            by_role.setdefault(self._cluster.slot(replica).role, []).append(replica)
        return [(role, tuple(names)) for role, names in by_role.items()]

    async def _command(
        self, plan: ShiftPlan, role: Role, direction: str, replicas: tuple[ReplicaId, ...]
    ) -> tuple[Role, ShiftStepDone]:
        kind = ShiftDown if direction == "down" else ShiftUp
        command: Message = kind(shift_id=plan.id, role=role, replicas=replicas, deadline_s=SHIFT_DEADLINE_S)
        done = await self._bus.request(
            self._subjects.shift(role, direction),
            command,
            ShiftStepDone,
            deadline_s=SHIFT_DEADLINE_S,
            role="planner",
            peer=role.value,
            phase=f"shift {direction}",
        )
        await self._tell(
            plan, "step_done", self._clock.now_s() - done.duration_s, detail=f"{role.value} {direction}"
        )
        return role, done

    async def _tell(
        self,
        plan: ShiftPlan,
        phase: ShiftPhase,
        started_s: float,
        *,
        detail: str = "",
        outcome: Outcome | None = None,
        expected_gain: float = 0.0,
    ) -> None:
        now_s = self._clock.now_s()
        event = ShiftEvent(
            shift_id=plan.id,
            phase=phase,
            now_s=now_s,
            up_role=plan.up_role,
            up_replicas=plan.up_replicas,
            down_replicas=plan.down_replicas,
            training_up=plan.training_up,
            training_down=plan.training_down,
            devices=plan.devices,
            detail=detail,
            duration_s=now_s - started_s,
            freed_bytes=outcome.freed_bytes if outcome else 0,
            read_bytes=outcome.read_bytes if outcome else 0,
            expected_gain_tokens_per_s=expected_gain,
            holders=self._holders(plan, outcome.allocation) if outcome else {},
        )
        self.on_event(event)
        try:
            await self._bus.append(self._subjects.shift_event(plan.id), event)
        except PivotError as error:
            log.warning("%s: event %s is not on the bus: %s", plan.id, phase, error.message)

    def _holders(self, plan: ShiftPlan, allocation: Allocation) -> dict[int, str]:
        owners = {device: allocation.owner_of(device, self._cluster) for device in plan.devices}
        return {int(device): str(owner or FREE) for device, owner in owners.items()}


def _up_plan(plan_id: str, role: Role, replicas: tuple[ReplicaId, ...], cluster: ClusterSpec) -> ShiftPlan:
    is_training = role is Role.TRAINING
    devices = (
        cluster.training_devices if is_training else {d for r in replicas for d in cluster.slot(r).devices}
    )
    return ShiftPlan(plan_id, role, replicas, (), False, is_training, tuple(sorted(devices)), 0.0)
