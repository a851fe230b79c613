"""Print the version of this program, and how many processor seconds it takes on this machine.

    python .ci/calibrate.py

Those seconds are the unit of .ci/budget.json. Machines differ threefold, and the same tests take
about the same number of units on all of them, because `work` does what tests do: Python, small
products with NumPy, and the tracing and compilation of a program with JAX. One process a processor
does it, like the workers of pytest-xdist, because processors share caches and clocks.
"""

import os
import subprocess
import sys

# A budget holds for one version: raise it with any change of `work`.
VERSION = 1

# As tests/conftest.py sets them, so that one thread computes and nothing comes from a cache.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1",
}


def work():
    """Return the processor seconds of the fixed program; imports do not count."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    start = sum(os.times()[:2])
    total, table = 0, {}
    for n in range(5_000_000):
        table[n % 1000] = n, total
        total += len(table) + n % 7

    x = np.linspace(0, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    for _ in range(15_000):
        p = np.exp(x @ x.T - 1)
        x = p / p.sum(axis=1, keepdims=True)

    def loss(x, w):
        for n in range(len(w)):
            p = jax.nn.softmax(x @ w[n] * (n + 1), axis=-1)
            x = jnp.where(x > 0, p @ x, jnp.tanh(x)) + jnp.cumsum(p, axis=0)
        return (x * x).sum()

    jax.jit(jax.grad(loss)).lower(jnp.ones((32, 32)), jnp.ones((20, 32, 32))).compile()
    return sum(os.times()[:2]) - start


def main():
    """Run `work` in a process for each processor at once; print the mean."""
    command = [sys.executable, __file__, "work"]
    environment = os.environ | SETTINGS
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    seconds = [float(process.communicate()[0]) for process in processes]
    print(VERSION, round(sum(seconds) / len(seconds), 2))


if __name__ == "__main__":
    if sys.argv[1:]:
        print(work())
    else:
        main()
