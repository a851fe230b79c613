"""GPUs that are described to JAX and need not exist."""

import contextlib
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType


@contextlib.contextmanager
def described_gpu(kind: str, platform: str = "cuda") -> Iterator[None]:
    """Traces as if for one device of this kind, such as "NVIDIA H200"."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
