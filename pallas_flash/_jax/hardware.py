"""Facts about NVIDIA GPUs by compute capability, from NVIDIA's documents."""

# Compute capability by a part of the device's name, for GPUs that are described but not here. The
# first name that fits decides, so that "L40" comes before "L4" and "A100" before "A10".
_CAPABILITIES = {
    "GB300": (10, 3),
    "B300": (10, 3),
    "GB200": (10, 0),
    "B200": (10, 0),
    "B100": (10, 0),
    "GH200": (9, 0),
    "H200": (9, 0),
    "H100": (9, 0),
    "H800": (9, 0),
    "H20": (9, 0),
    "A100": (8, 0),
    "A800": (8, 0),
    "A30": (8, 0),
    "GeForce RTX 50": (12, 0),
    "GeForce RTX 40": (8, 9),
    "GeForce RTX 30": (8, 6),
    "L40": (8, 9),
    "L4": (8, 9),
    "A40": (8, 6),
    "A10": (8, 6),
    "A16": (8, 6),
    "A2": (8, 6),
    "GeForce RTX 20": (7, 5),
    "T4": (7, 5),
    "V100": (7, 0),
    "P100": (6, 0),
}

# Bytes of shared memory that one program may have, by compute capability (CUDA C++ Programming
# Guide, table "Technical Specifications per Compute Capability").
_SHARED_MEMORY = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 7): 163 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (10, 3): 227 * 1024,
    (11, 0): 227 * 1024,
    (12, 0): 99 * 1024,
    (12, 1): 99 * 1024,
}


def capability_of(name: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU by its name; None if the name is not listed."""
    return next((value for part, value in _CAPABILITIES.items() if part in name), None)


def matrix_units(capability: tuple[int, int] | None) -> str:
    """Return the kind of a GPU's matrix units: "hopper", "blackwell" or "synchronous".

    Hopper's units read tiles from shared memory while the warps go on. Blackwell's put the sums
    into tensor memory. On all other GPUs, such as GeForce RTX 50, warps wait for their products.
    A capability of None (unknown, or the interpreter) counts as an H100 or H200.
    """
    if capability in (None, (9, 0)):
        return "hopper"
    return "blackwell" if (10, 0) <= capability < (12, 0) else "synchronous"


def shared_memory_limit(capability: tuple[int, int] | None) -> int:
    """Return the bytes of shared memory of a program; the smallest limit for an unlisted GPU."""
    if capability is None:
        return _SHARED_MEMORY[9, 0]
    return _SHARED_MEMORY.get(capability, min(_SHARED_MEMORY.values()))
