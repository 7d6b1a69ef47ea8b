"""refattn as an attention implementation of Hugging Face transformers, through its two public registries.

    from refattn_backends.transformers import register
    register()
    model = AutoModel.from_pretrained(path, attn_implementation="refattn")

Two registrations belong together. `AttentionInterface` says how attention is computed. `AttentionMaskInterface`
says in which form a model hands over its mask, and a name that is missing there gets no mask at all: padding would
then be attended without a word.

Rules of this file:
- Masks arrive explicit and boolean, True = visible (M1). Causality, windows, chunks, packing and padding are all in
  them, at the positions that the model's cache knows. So a given mask is the whole truth, and `is_causal` and
  `sliding_window` are read only where a model passes no mask.
- A floating mask that the caller prepared is a bias, added as it is.
- A row without any visible key, such as the pad rows of left padding, gives 0 (P2). "eager" adds a large finite
  number instead of masking, and averages all values there.
"""

from typing import Any

import refattn
from refattn.arrays import Array

__all__ = ["attention_forward", "explicit_mask", "register"]


def register(name: str = "refattn") -> None:
    """Make `attn_implementation=name` available to the models of transformers, once and for all.

    Registering a name again replaces it. Raises ImportError where transformers (5 or later) is not installed.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "refattn_backends.transformers needs the package transformers: "
            "python -m pip install 'transformers>=5' torch"
        ) from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, explicit_mask)


def explicit_mask(*arguments: Any, **options: Any) -> Array:
    """Return the boolean mask (B, 1, Lq, Lk) that transformers builds for torch's own kernel, never left out.

    For a plain causal or an all-visible mask transformers would return None and leave the alignment to the kernel.
    Spelled out, a mask has one reading where Lq != Lk, as in decoding with a cache.
    """
    from transformers.masking_utils import sdpa_mask

    options.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(*arguments, **options)


def attention_forward(
    module: Any,
    query: Array,
    key: Array,
    value: Array,
    attention_mask: Array | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Array | None = None,
    position_bias: Array | None = None,
    cu_seq_lens_q: Array | None = None,
    output_attentions: bool = False,
    **_: Any,
) -> tuple[Array, Array | None]:
    """Compute one attention layer in the calling convention of transformers.

    Parameters
    ----------
    module
        The layer; its attribute `is_causal` counts where neither a mask nor the argument is_causal is given.
    query, key, value
        (B, H, Lq, d_k), (B, Hkv, Lk, d_k) and (B, Hkv, Lk, d_v) of one dtype, H a multiple of Hkv (G1).
    attention_mask
        Broadcasts to (B, H, Lq, Lk): boolean is visibility (M1), floating is a bias.
    scaling, softcap, s_aux, position_bias
        scale (S1, S2), soft cap (S3), sinks (H,) (P3) and a further bias (B4) of `refattn.attention`.
    dropout
        Must be 0.
    is_causal, sliding_window, cu_seq_lens_q
        Looked at only without a mask. A window of W keys is the query's own position and W - 1 before it.
    output_attentions
        Whether the weights are returned as well.

    Returns
    -------
    The output (B, Lq, H, d_v) in the dtype of query, and the weights (B, H, Lq, Lk) in the compute dtype or None.

    Raises
    ------
    ValueError
        For dropout; and without a mask for packed sequences and for a window that is not causal.
    RefattnError
        For everything that `refattn.attention` refuses.
    """
    if dropout != 0.0:
        raise ValueError(f"dropout: expected 0, got {dropout}; call model.eval() or set attention dropout to 0")
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sinks": s_aux, "bias": position_bias}
    if attention_mask is None:
        # transformers calls a layer causal unless it says otherwise.
        declared = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options |= _without_mask(bool(declared), sliding_window, query.shape[-2], key.shape[-2], cu_seq_lens_q)
    elif attention_mask.dtype.is_floating_point:
        options["bias"] = attention_mask if position_bias is None else attention_mask + position_bias
    else:  # an integer mask too, which refattn refuses (M1)
        options["mask"] = attention_mask
    if output_attentions:
        stages = refattn.attention_stages(query, key, value, **options)
        return _tokens_first(stages.output), stages.weights
    return _tokens_first(refattn.attention(query, key, value, **options)), None


def _without_mask(causal: bool, window: int | None, q_len: int, k_len: int, packed: Array | None) -> dict[str, Any]:
    """Return the options that say what is visible where the model hands over no mask."""
    if packed is not None:
        raise ValueError(
            "attention_mask: expected the explicit mask of packed sequences (cu_seq_lens_q is given), got None; "
            "pass position_ids that restart at every sequence, and transformers builds it"
        )
    # A single query is the newest token; where several meet another number of keys, refattn asks for a mask (M5).
    options: dict[str, Any] = {"causal": causal, "q_start": k_len - 1 if causal and q_len == 1 else None}
    if window is None or k_len <= window:
        return options
    if not causal:
        raise ValueError(
            f"sliding_window: expected an explicit mask or a causal layer, got a window of {window} among {k_len} "
            "keys with neither, which models read in different ways"
        )
    return options | {"mask": refattn.masks.window(window - 1, 0)}  # M6: both ends included


def _tokens_first(output: Array) -> Array:
    """(B, H, L, d) -> (B, L, H, d), contiguous, as models of transformers expect it."""
    return output.transpose(1, 2).contiguous()
