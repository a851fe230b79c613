"""JAX names that move between versions, and the device."""
