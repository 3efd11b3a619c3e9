"""Device leases in one key-value bucket, written with compare-and-set: no device ever has two owners."""

from collections.abc import Iterable

from shared.bus.ports import Bus
from shared.contracts.planner import DeviceLease
from shared.contracts.subjects import Subjects
from shared.errors import Conflict
from shared.ids import DeviceId

FREE = ""


class DeviceLeases:
    """Every write names the owner it expects to find; anything else is a `Conflict` and changes nothing."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus, self._bucket = bus, subjects.device_bucket

    async def owner(self, device: DeviceId) -> str:
        found = await self._bus.kv_get(self._bucket, f"{device}", DeviceLease)
        return found[0].owner if found else FREE

    async def owners(self, devices: Iterable[DeviceId]) -> dict[DeviceId, str]:
        return {device: await self.owner(device) for device in sorted(devices)}

    async def move(self, devices: Iterable[DeviceId], *, expected: str, to: str) -> None:
        """Hands `devices` from `expected` to `to`, all or none.

        Raises:
            Conflict: one of them has another owner; those already moved are given back.
        """
        moved: list[DeviceId] = []
        try:
            for device in sorted(devices):
                await self._move_one(device, expected, to)
                moved.append(device)
        except Conflict:
            for device in moved:
                await self._move_one(device, to, expected)
            raise

    async def reset(self, owners: dict[DeviceId, str]) -> None:
        """At the start of a planner, which is the only writer: records what is really so."""
        for device, owner in sorted(owners.items()):
            found = await self._bus.kv_get(self._bucket, f"{device}", DeviceLease)
            epoch, revision = (found[0].epoch, found[1]) if found else (0, 0)
            lease = DeviceLease(device=device, owner=owner, epoch=epoch + 1)
            await self._bus.kv_swap(self._bucket, f"{device}", lease, revision)

    async def _move_one(self, device: DeviceId, expected: str, to: str) -> None:
        found = await self._bus.kv_get(self._bucket, f"{device}", DeviceLease)
        owner, epoch, revision = (found[0].owner, found[0].epoch, found[1]) if found else (FREE, 0, 0)
        if owner != expected:
            raise Conflict(
                f"device {device} is leased to {owner or 'nobody'}, not to {expected or 'nobody'}",
                device=device,
            )
        lease = DeviceLease(device=device, owner=to, epoch=epoch + 1)
        await self._bus.kv_swap(self._bucket, f"{device}", lease, revision)
