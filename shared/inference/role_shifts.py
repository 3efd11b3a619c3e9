"""Which replicas of a role serve: shifts, versions, health.

    shift down ─► waits until the scheduler says the replica is empty ─► sleep request
    shift up ─► wake request (the replica Reads from GPS and proves its version) ─► scheduler
    new version ─► refresh request, the replica's sequences kept

A replica that answers no more is declared dead: its sequences go back to the queue with the tokens seen
so far. When its process is back it is woken again, if the planner still counts on it.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.bus.ports import Subscription
from shared.contracts.base import Message
from shared.contracts.planner import DeviceLease, ShiftDown, ShiftStepDone, ShiftUp
from shared.contracts.replica import (
    RefreshReplica,
    ReplicaRefreshed,
    ReplicaTelemetry,
    ReplicaWoke,
    WakeReplica,
)
from shared.errors import Conflict, InvalidRequest, PivotError, ShiftFailed
from shared.ids import ReplicaId
from shared.inference import role_times as times
from shared.inference.peers import PeerLink, ReplicaPeer, turns
from shared.scheduling.sequence import ReplicaShiftedUp, ReplicaShiftingDown, ReplicasShiftedUp

if TYPE_CHECKING:
    from shared.inference.role import RoleShell

MAX_ASTRAY = 4
"""Looks at a replica in a state it should not be in before anything is done: telemetry lags a shift."""

log = logging.getLogger("pivotrl.role")


class RoleShifts:
    """One role's part in shifts. It tells the shell's scheduler which replicas come and go."""

    def __init__(self, shell: "RoleShell", link: PeerLink) -> None:
        self._shell, self._link = shell, link
        self._min_version = 0
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        bus, subjects, role = self._link.bus, self._link.subjects, self._link.role
        self._subscriptions += [
            await bus.subscribe(subjects.telemetry(role, "*"), self._on_telemetry),
            await bus.serve(subjects.shift(role, "down"), self._on_shift_down),
            await bus.serve(subjects.shift(role, "up"), self._on_shift_up),
        ]

    async def close(self) -> None:
        """Hears and answers nothing any more."""
        for subscription in self._subscriptions:
            await subscription.close()
        self._subscriptions.clear()

    # Health

    async def adopt(self) -> None:
        """After a restart: a replica that the leases still give to this role serves again. `_watch_health`
        sees to it, whether it is awake or was restarted too."""
        for replica in self._shell.peers.values():
            found = [
                await self._link.bus.kv_get(self._link.subjects.device_bucket, f"{device}", DeviceLease)
                for device in replica.devices
            ]
            replica.is_active = all(entry is not None and entry[0].owner == replica.id for entry in found)
            if replica.is_active:
                log.warning("%s still holds its devices", replica.id)

    async def _on_telemetry(self, message: Message) -> None:
        assert isinstance(message, ReplicaTelemetry)
        replica = self._shell.peers.get(ReplicaId(message.replica_id))
        if replica is None:
            return
        before, replica.telemetry, replica.seen_s = replica.telemetry, message, self._link.clock.now_s()
        if before is not None and before.incarnation != message.incarnation:
            log.warning("%s restarted", replica.id)
            self._shell.lose(replica)

    async def watch_health(self, replica: ReplicaPeer) -> None:
        """One replica: whether it lives, and serves just while it should, with the version it should."""
        num_astray = 0
        while True:
            await asyncio.sleep(times.HEALTH_INTERVAL_S)
            if replica.turn.locked():
                continue
            num_astray = num_astray + 1 if self._is_astray(replica) else 0
            if not replica.is_active:
                if num_astray >= MAX_ASTRAY:
                    await self._put_down(replica)
                continue
            silent_s = self._link.clock.now_s() - replica.seen_s
            is_dead = silent_s > times.SILENCE_S and await replica.is_dead(silent_s)
            if is_dead or num_astray >= MAX_ASTRAY:
                self._shell.lose(replica)
            if self._shell.is_down(replica) and replica.state() in ("asleep", "awake"):
                await self._revive(replica)
            elif replica.version < self._min_version:
                await self._refresh(replica, self._min_version)

    def _is_astray(self, replica: ReplicaPeer) -> bool:
        """What it says of itself is not what it should be: awake without its devices, or not awake while
        sequences are given to it (it was restarted before its first life was heard of)."""
        state = replica.state()
        if not replica.is_active:
            return state == "awake"
        return state in ("asleep", "starting") and not self._shell.is_down(replica)

    async def _revive(self, replica: ReplicaPeer) -> None:
        """A replica the planner counts on came back from a crash, was taken for dead, or this service
        crashed: it proves its version and serves again."""
        async with turns([replica], times.WAKE_DEADLINE_S):
            if not replica.is_active or not self._shell.is_down(replica):
                return
            try:
                woke = await self._wake(replica, times.WAKE_DEADLINE_S)
            except PivotError as error:
                log.error("%s cannot be woken after its crash: %s", replica.id, error.message)
                return
            self._shell.step(ReplicaShiftedUp(replica.id, woke.kv_capacity_tokens))
            log.warning("%s is back at version %d", replica.id, woke.version)

    async def _put_down(self, replica: ReplicaPeer) -> None:
        """Its devices are not its own: a wake that was given up ended well after all."""
        async with turns([replica], times.COMMAND_DEADLINE_S):
            if replica.is_active:
                return
            try:
                await replica.stop_all()
                await replica.sleep(times.COMMAND_DEADLINE_S)
            except PivotError as error:
                log.error("%s is awake without its devices: %s", replica.id, error.message)
                return
            log.warning("%s was awake without its devices and sleeps now", replica.id)

    # Shifts

    async def _on_shift_down(self, message: Message) -> Message:
        assert isinstance(message, ShiftDown)
        replicas = self._named(message.replicas)
        started_s = self._link.clock.now_s()
        deadline_s = max(1.0, message.deadline_s - times.SHIFT_MARGIN_S)
        before = self._shell.num_migrated
        async with turns(replicas, deadline_s):
            for replica in replicas:
                replica.is_active = False
            self._shell.step(ReplicaShiftingDown(tuple(replica.id for replica in replicas)))
            left_s = max(1.0, started_s + deadline_s - self._link.clock.now_s())
            if not await self._shell.until(
                lambda: all(self._shell.scheduler.is_empty(r.id) for r in replicas), left_s
            ):
                for replica in replicas:
                    if not self._shell.scheduler.is_empty(replica.id):
                        self._shell.lose(replica)
            left_s = max(1.0, started_s + deadline_s - self._link.clock.now_s())
            answers = await asyncio.gather(
                *(replica.sleep(left_s) for replica in replicas), return_exceptions=True
            )
        slept = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            slept.append(answer)
        return ShiftStepDone(
            duration_s=self._link.clock.now_s() - started_s,
            freed_bytes=sum(answer.freed_bytes for answer in slept),
            migrated_sequences=self._shell.num_migrated - before,
        )

    async def _on_shift_up(self, message: Message) -> Message:
        assert isinstance(message, ShiftUp)
        replicas = self._named(message.replicas)
        started_s = self._link.clock.now_s()
        deadline_s = max(1.0, message.deadline_s - times.SHIFT_MARGIN_S)
        failed: dict[ReplicaId, BaseException] = {}
        up: list[tuple[ReplicaId, int]] = []
        read_bytes, version = 0, 0
        async with turns(replicas, deadline_s):
            left_s = started_s + deadline_s - self._link.clock.now_s()
            results = await asyncio.gather(
                *(self._wake(replica, left_s) for replica in replicas), return_exceptions=True
            )
            for replica, result in zip(replicas, results, strict=True):
                if isinstance(result, BaseException):
                    log.error("%s cannot wake: %s", replica.id, result)
                    replica.is_active = False
                    failed[replica.id] = result
                    continue
                replica.is_active = True
                read_bytes, version = read_bytes + result.read_bytes, result.version
                up.append((replica.id, result.kv_capacity_tokens))
            if up:  # together: one at a time, the first would be given the whole queue
                self._shell.step(ReplicasShiftedUp(tuple(up)))
            await asyncio.gather(
                *(self._shell.peers[name].sleep(10.0) for name in failed), return_exceptions=True
            )
        if len(failed) == len(replicas):
            name, error = next(iter(failed.items()))
            raise ShiftFailed(f"{', '.join(failed)} cannot wake: {name}: {error}", role=self._link.role.value)
        return ShiftStepDone(
            duration_s=self._link.clock.now_s() - started_s,
            read_bytes=read_bytes,
            policy_version=version,
            failed_replicas=tuple(failed),
        )

    def require_version(self, min_version: int) -> None:
        """No replica serves with an older one."""
        self._min_version = max(self._min_version, min_version)

    async def refresh(self, min_version: int) -> None:
        """Every active replica Reads `min_version` in place, its requests kept. Returns when none of them
        serves with an older one; later wakes ask for it too."""
        self.require_version(min_version)
        active = [r for r in self._shell.peers.values() if r.is_active and not self._shell.is_down(r)]
        await asyncio.gather(*(self._refresh(replica, min_version) for replica in active))

    async def _refresh(self, replica: ReplicaPeer, min_version: int) -> None:
        """One that cannot is taken for lost."""
        life = replica.lost
        try:
            async with turns([replica], times.WAKE_DEADLINE_S):
                if replica.is_active and not self._shell.is_down(replica):
                    await self._read(replica, min_version)
        except PivotError as error:
            log.error("%s cannot refresh to version %d: %s", replica.id, min_version, error.message)
            if replica.lost is life:
                self._shell.lose(replica)

    async def _wake(self, replica: ReplicaPeer, deadline_s: float) -> ReplicaWoke:
        """Serving with the newest version required, also if that went up meanwhile."""
        command = WakeReplica(min_version=self._min_version)
        try:
            woke = await replica.ask("wake", command, ReplicaWoke, max(1.0, deadline_s), "wake")
        except Conflict as conflict:
            if conflict.data.get("state") != "awake":
                raise
            if self._shell.is_down(replica):  # what it runs went back to the queue long ago
                await replica.stop_all()
            await self._shell.until(lambda: replica.state() == "awake", times.SILENCE_S)
            telemetry = replica.telemetry
            if telemetry is None:
                raise
            woke = ReplicaWoke(
                version=telemetry.policy_version,
                kv_capacity_tokens=telemetry.kv_capacity_tokens,
                read_bytes=0,
                read_s=0.0,
                duration_s=0.0,
            )
        replica.version = woke.version
        while replica.version < self._min_version:
            await self._read(replica, self._min_version)
        return woke.model_copy(update={"version": replica.version})

    async def _read(self, replica: ReplicaPeer, min_version: int) -> None:
        if replica.version >= min_version:
            return
        command = RefreshReplica(min_version=min_version)
        done = await replica.ask("refresh", command, ReplicaRefreshed, times.WAKE_DEADLINE_S, "refresh")
        replica.version = done.version
        if done.version < min_version:
            raise ShiftFailed(
                f"{replica.id} has version {done.version}, version {min_version} is needed",
                role=self._link.role.value,
            )

    def _named(self, names: Sequence[str]) -> list[ReplicaPeer]:
        unknown = [name for name in names if name not in self._shell.peers]
        if unknown or not names:
            known = ", ".join(self._shell.peers)
            raise InvalidRequest(
                "replicas", f"{unknown or 'none'} not among {known}", "Name replicas of this role"
            )
        return [self._shell.peers[ReplicaId(name)] for name in dict.fromkeys(names)]
