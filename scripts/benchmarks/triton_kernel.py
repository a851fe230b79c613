"""A forward of attention written in Triton by hand, a yardstick for Pallas.

It follows Triton's tutorial on fused attention: the query tile is the outer one, tiles of keys and
values are loaded in a pipeline, and a causal program visits full blocks before partial blocks. It
checks no bounds: lengths are multiples of the tiles.
"""

import functools

import triton
import triton.language as tl

# (keys in a tile, warps, stages) by head dim, candidates for tuning; all fit in shared memory.
CONFIGS = {
    64: [(64, 4, 3), (64, 4, 4), (128, 4, 3), (128, 8, 3)],
    128: [(64, 4, 3), (64, 8, 3), (128, 8, 2), (128, 8, 3)],
    256: [(32, 8, 3), (32, 8, 4), (64, 8, 2)],
}


@functools.cache
def tuned(head_dim: int):
    """Return the kernel with its configurations; its first run finds the fastest one."""
    configs = [
        triton.Config({"BLOCK_Q": 128, "BLOCK_KV": block_kv}, num_warps=warps, num_stages=stages)
        for block_kv, warps, stages in CONFIGS[head_dim]
    ]
    return triton.autotune(configs, key=["q_len", "kv_len", "scale_log2"])(forward)


@triton.jit
def _online_softmax(s, v, m, l, acc, scale_log2):
    """Add a tile to the running maximum, sum and output of its rows."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    return m_new, l * alpha + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * alpha[:, None])


@triton.jit
def forward(
    q_ptr,
    k_ptr,
    v_ptr,
    q_len,
    kv_len,
    scale_log2,
    o_ptr,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Compute o from q, both [B * N, q_len, HEAD_DIM], and k, v [B * N, kv_len, HEAD_DIM]."""
    # The longest rows of a causal problem first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    q_pos = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    lanes = tl.arange(0, HEAD_DIM)
    columns = tl.arange(0, BLOCK_KV)
    rows = head * q_len * HEAD_DIM + q_pos[:, None] * HEAD_DIM + lanes[None, :]
    k_tile = k_ptr + head * kv_len * HEAD_DIM + columns[None, :] * HEAD_DIM + lanes[:, None]
    v_tile = v_ptr + head * kv_len * HEAD_DIM + columns[:, None] * HEAD_DIM + lanes[None, :]

    q = tl.load(q_ptr + rows)
    m = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, HEAD_DIM], tl.float32)

    diagonal = tile * BLOCK_Q if CAUSAL else kv_len
    for start in tl.range(0, diagonal, BLOCK_KV):
        k = tl.load(k_tile + start * HEAD_DIM)
        v = tl.load(v_tile + start * HEAD_DIM)
        s = tl.dot(q, k)
        m, l, acc = _online_softmax(s, v, m, l, acc, scale_log2)
    if CAUSAL:
        for start in tl.range(diagonal, diagonal + BLOCK_Q, BLOCK_KV):
            k = tl.load(k_tile + start * HEAD_DIM)
            v = tl.load(v_tile + start * HEAD_DIM)
            seen = q_pos[:, None] >= start + columns[None, :]
            s = tl.where(seen, tl.dot(q, k), float("-inf"))
            m, l, acc = _online_softmax(s, v, m, l, acc, scale_log2)

    tl.store(o_ptr + rows, (acc / l[:, None]).to(o_ptr.dtype.element_ty))
