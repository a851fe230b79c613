"""The device that a call is compiled for."""

from typing import NamedTuple

import jax

from pallas_flash._jax import compat, hardware


class Target(NamedTuple):
    """The device that a call will be compiled for.

    Attributes:
        description: for messages.
        nvidia: whether it is an NVIDIA GPU.
        capability: its compute capability, or None if it cannot be told.
        here: whether this machine has one.
    """

    description: str
    nvidia: bool
    capability: tuple[int, int] | None
    here: bool = True

    @property
    def gpu_here(self) -> str | None:
        """The name of an NVIDIA GPU of this machine; None for another device."""
        return self.description if self.nvidia and self.here else None


def target() -> Target:
    """Return the GPU that the current abstract mesh describes, else JAX's default device."""
    described = compat.abstract_device()
    if described is None:
        # JAX defines its options at run time.
        device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        if not isinstance(device, jax.Device):
            device = jax.local_devices(backend=device)[0]
    else:
        # The mesh of a sharded program describes its devices too, and those are here.
        name = described.device_kind
        device = next((x for x in jax.local_devices() if x.device_kind == name), None)
        if device is None:
            gpu = described.platform in ("cuda", "gpu")
            capability = hardware.capability_of(name)
            return Target(f"{name} (described, not here)", gpu, capability, here=False)
    nvidia = device.platform == "gpu" and "cuda" in device.client.platform_version.lower()
    capability = None
    if nvidia:
        major, minor = str(device.compute_capability).split(".")
        capability = (int(major), int(minor))
    return Target(device.device_kind, nvidia, capability)


def tile_capability(implementation: str) -> tuple[int, int] | None:
    """Return the compute capability to choose tiles for.

    The interpreter uses the tiles of the newest GPUs.
    """
    return None if implementation == "interpret" else target().capability
