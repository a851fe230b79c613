"""What is public, name by name, so that no name, member or argument appears by accident.

Whoever adds one writes it here, in the reference and in the changelog.
"""

import dataclasses
import inspect

from flax import nnx
from support.repository import PUBLIC, SURFACE

from pallas_flash.masks import Chunked

NAMES = {
    "pallas_flash": """
        Explanation ScoreMod attention dropout_mask explain masks merge paged paged_attention
        save_residuals tuning
    """,
    "pallas_flash.masks": """
        BlockCausal BlockMask Chunked Dilated Neighborhood Predicate PrefixLM Segments SharedPrefix
        Tree arguments_from_cu_seqlens balanced_order plot segment_ids_from_cu_seqlens
    """,
    "pallas_flash.paged": "append quantize",
    "pallas_flash.tuning": """
        BackwardTile DqTile ForwardTile Mosaic Tile TileSizes Trial Triton Tuning tune
    """,
    "pallas_flash.flax": "KVCache PagedKVCache SelfAttention apply_rope attention_fn",
}

# The members of each public class; of a Flax module those that it adds to its base class.
MEMBERS = {
    "Explanation": "context_parallelism implementation reason refused tiles",
    "ScoreMod": "fn operands",
    "masks.BlockCausal": "size",
    "masks.BlockMask": "block_kv block_q every from_mask from_topk kv_len mask q_len some",
    "masks.Chunked": "size",
    "masks.Dilated": "stride",
    "masks.Neighborhood": "grid window",
    "masks.Predicate": "fn operands",
    "masks.PrefixLM": "prefix_lengths",
    "masks.Segments": "key_value query",
    "masks.SharedPrefix": "key_value query",
    "masks.Tree": "parents",
    "tuning.BackwardTile": "block_q stages",
    "tuning.DqTile": "block_kv stages warpgroups",
    "tuning.ForwardTile": "block_kv cluster_size output_slots stages warpgroups",
    "tuning.Mosaic": "backward dkv dq forward",
    "tuning.Tile": "block_kv block_q num_stages num_warps",
    "tuning.TileSizes": "backward decode dk dkv dq dv forward",
    "tuning.Trial": "failure kernel ms tile",
    "tuning.Triton": "decode dk dkv dq dv forward",
    "tuning.Tuning": "clock config file tables trials",
    "flax.KVCache": "accept attend check positions",
    "flax.PagedKVCache": "attend positions",
    "flax.SelfAttention": "init_cache init_pages set_view",
}

# The arguments of functions, methods and Flax modules: one name for one thing. Flax's own are
# `attention_fn`'s, and `rngs`, `deterministic` and `input_shape`.
ARGUMENTS = """
    alibi_slopes args attention attn_weights_value_einsum ax b batch batch_invariant bias block_kv
    block_q broadcast_dropout config context_parallelism count cu_seqlens cu_seqlens_kv cu_seqlens_q
    decode deterministic devices dropout_key dropout_rate dropout_rng dtype einsum_dot_general
    features force_fp32_for_softmax h head_dim implementation input_positions input_shape is_causal
    k keep_rngs kernel_init key key_pages key_scales key_value_positions key_value_seq_lengths
    kv_len kwargs length linear local_window_size logits_soft_cap mask module name norm normalize_qk
    num_heads num_kv_heads num_pages options out_kernel_init page_indices page_size pages pairs
    param_dtype passes path per_head positions precision promote_dtype q_len qk_attn_weights_einsum
    query query_offset query_positions query_seq_lengths ragged reordered reproducible requests
    return_lse return_max_logits return_residual ring rngs rope rope_theta scale score_mod scores
    segment_ids seq_lengths sequence_axis shape sharding sinks sinks_init sow_max_logits start store
    tree use_bias use_out_bias use_sinks value value_dim value_pages value_scales x
"""


def members(kind):
    """The public members of a class, its fields among them."""
    base = dir(nnx.Module) if issubclass(kind, nnx.Module) else ()
    fields = [x.name for x in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    return {x for x in [*dir(kind), *fields] if not x.startswith("_")} - {*base}


def is_method(name, x):
    return (name == "__call__" or not name.startswith("_")) and callable(getattr(x, "__func__", x))


def arguments():
    """Yield the arguments of all public functions, methods and Flax modules.

    The arguments of other classes are their members.
    """
    for name, x in PUBLIC.items():
        # Flax's metaclass hides the signature.
        function = x.__init__ if inspect.isclass(x) else x
        functions = [] if dataclasses.is_dataclass(x) else [function]
        # `TileSizes` has methods for the package.
        if inspect.isclass(x) and ".tuning." not in name:
            functions += [getattr(x, y) for y, z in vars(x).items() if is_method(y, z)]
        for function in functions:
            yield from set(inspect.signature(function).parameters) - {"self"}


def test_modules_have_these_names():
    assert {x.__name__: {*x.__all__} for x in SURFACE} == {
        module: {*names.split()} for module, names in NAMES.items()
    }


def test_modules_show_nothing_else():
    for module in SURFACE:
        shown = {x for x in vars(module) if not x.startswith("_")}
        assert shown - {"flax"} == {*module.__all__}, module


def test_classes_have_these_members():
    kinds = {
        name.removeprefix("pallas_flash."): members(x)
        for name, x in PUBLIC.items()
        if inspect.isclass(x)
    }
    assert kinds == {name: {*names.split()} for name, names in MEMBERS.items()}


def test_joined_masks_have_only_their_parts():
    both, either, neither = (
        members(type(x)) for x in (Chunked(2) & Chunked(3), Chunked(2) | Chunked(3), ~Chunked(2))
    )
    assert both | either | neither <= {"parts", "part"}


def test_arguments_have_these_names():
    assert {*arguments()} == {*ARGUMENTS.split()}
