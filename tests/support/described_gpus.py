"""GPUs that are described to JAX and need not exist."""

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


def described_mesh(
    axes: dict[str, int], axis_type=AxisType.Auto, kind="NVIDIA H200", platform="cuda"
) -> AbstractMesh:
    """Return a mesh of such devices."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    types = (axis_type,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types, abstract_device=device)


@contextlib.contextmanager
def described_gpu(kind: str, platform: str = "cuda") -> Iterator[None]:
    """Trace as if for one device of this kind, such as "NVIDIA H200"."""
    mesh = described_mesh({"x": 1}, kind=kind, platform=platform)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
