"""Kernels: the same functions for Hopper (Mosaic GPU), for Triton, and in plain JAX."""
