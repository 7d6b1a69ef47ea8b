"""`refattn cost`: work, memory and cache size, and what the alternatives cost."""

import argparse
from typing import Any

from refattn import cost
from refattn.commands.output import count, print_json, print_table, print_text, size
from refattn.dtypes import ALIASES

DESCRIPTION = """\
Counts what attention costs, from the sizes alone: weights, floating-point operations, bytes moved, the
key/value cache, prefill against decode, and full attention beside its alternatives.
"""

EPILOG = """\
Formulas, for q (B, H, Lq, d_k), k (B, Hkv, Lk, d_k) and v (B, Hkv, Lk, d_v):
  weights     B H Lq Lk
  FLOPs       2 B H Lq Lk d_k for the scores, 5 B H Lq Lk for softmax, 2 B H Lq Lk d_v for the output
  bytes moved q, k, v and the output once: B (H Lq + Hkv Lk) (d_k + d_v) elements
  cache       B Lk Hkv (d_k + d_v) elements a layer, which is 2 B S Hkv d_h

Examples:
  refattn cost                           4096 x 4096, 32 heads: 32 MiB of weights a head, 1 GiB in all
  refattn cost --q-len 1 --k-len 8192    one token decoded against 8192 cached ones
  refattn cost --heads 32 --kv-heads 8   grouped-query attention
  refattn cost --json                    the same for programs

In Python: refattn.cost.attention_cost(4096, 4096, heads=32, d_k=128)
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `refattn cost`."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    for option, default, meaning in (
        ("--q-len", 4096, "queries"),
        ("--k-len", None, "keys (default: as many as queries)"),
        ("--heads", 32, "query heads"),
        ("--kv-heads", None, "key/value heads (default: as many as query heads)"),
        ("--d-k", 128, "width of a head's queries and keys"),
        ("--d-v", None, "width of a head's values (default: d_k)"),
        ("--batch", 1, "batch entries"),
        ("--kernel", 16, "inputs that the convolution sees"),
        ("--window", 256, "keys that local attention sees"),
    ):
        text = meaning if default is None else f"{meaning} (default: {default})"
        parser.add_argument(option, type=int, default=default, metavar="N", help=text)
    names = ", ".join(cost.ITEM_BYTES)
    parser.add_argument("--dtype", default="float16", help=f"one of {names} (default: float16)")
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def run(args: argparse.Namespace) -> int:
    """Prints the figures."""
    k_len = args.q_len if args.k_len is None else args.k_len
    sizes = {"d_k": args.d_k, "d_v": args.d_v, "batch": args.batch, "dtype": ALIASES.get(args.dtype, args.dtype)}
    whole = cost.attention_cost(args.q_len, k_len, heads=args.heads, kv_heads=args.kv_heads, **sizes)
    heads = {"heads": whole.heads, "kv_heads": whole.kv_heads}
    prefill = cost.prefill_cost(k_len, **heads, **sizes)
    decode = cost.decode_cost(k_len, **heads, **sizes)
    caches = _caches(k_len, whole, sizes)
    others = cost.alternatives(k_len, whole.heads * whole.d_k, kernel=args.kernel, window=args.window)
    if args.json:
        print_json(
            {
                "attention": whole.as_dict(),
                "prefill": prefill.as_dict(),
                "decode": decode.as_dict(),
                "kv_cache": caches,
                "alternatives": [other.as_dict() for other in others],
            }
        )
        return 0
    _print_attention(whole)
    _print_phases(prefill, decode)
    _print_caches(caches, k_len)
    _print_alternatives(others, k_len, whole.heads * whole.d_k)
    return 0


def _caches(k_len: int, whole: cost.AttentionCost, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """Every head sharing of the given heads, then those of eight heads, which compare as 8:2:1."""
    wanted = [whole.kv_heads] if whole.kv_heads not in (1, whole.heads) else [whole.heads // 4]
    groups = [(whole.heads, kv_heads) for kv_heads in (whole.heads, *wanted, 1)]
    groups += [(8, kv_heads) for kv_heads in (8, 2, 1)]
    rows = []
    for heads, kv_heads in dict.fromkeys(groups):
        if not kv_heads or heads % kv_heads:
            continue
        figures = cost.decode_cost(k_len, heads=heads, kv_heads=kv_heads, **sizes)
        rows.append(
            {
                "kind": "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA",
                "heads": heads,
                "kv_heads": kv_heads,
                "elements": figures.kv_cache_elements,
                "bytes": figures.kv_cache_bytes,
                "times_mqa": kv_heads,
                "decode_intensity": figures.intensity,
            }
        )
    return rows


def _print_attention(whole: cost.AttentionCost) -> None:
    print_text(
        f"{whole.dtype} attention of {count(whole.q_len)} queries over {count(whole.k_len)} keys: batch "
        f"{whole.batch}, {whole.heads} heads, {whole.kv_heads} key/value heads, d_k = {whole.d_k}, "
        f"d_v = {whole.d_v}"
    )
    print()
    print_table(
        ("C1, C2", "count", "bytes"),
        [
            ("weights of one head", count(whole.weights_per_head), size(whole.weights_per_head_bytes)),
            ("weights of all heads", count(whole.weights), size(whole.weights_bytes)),
            ("FLOPs, scores", count(whole.score_flops), ""),
            ("FLOPs, softmax", count(whole.softmax_flops), ""),
            ("FLOPs, weighted sum", count(whole.value_flops), ""),
            ("FLOPs, together", count(whole.flops), ""),
            ("q, k, v and output, once", "", size(whole.bytes_moved)),
            ("with scores and weights, written and read", "", size(whole.bytes_materialised)),
            ("FLOPs per byte, fused at best", f"{whole.intensity:,.1f}", ""),
            ("FLOPs per byte, materialised", f"{whole.intensity_materialised:,.1f}", ""),
        ],
        right=("count", "bytes"),
    )


def _print_phases(prefill: cost.AttentionCost, decode: cost.AttentionCost) -> None:
    print()
    print_text(
        f"Prefill reads all {count(prefill.k_len)} tokens at once: its work is quadratic. Decode adds one "
        "token to them: its work is linear, and it reads the whole cache for it."
    )
    print()
    print_table(
        ("C2", "queries", "keys", "weights", "FLOPs", "bytes moved", "FLOPs/byte"),
        [
            (
                name,
                count(phase.q_len),
                count(phase.k_len),
                count(phase.weights),
                count(phase.flops),
                size(phase.bytes_moved),
                f"{phase.intensity:,.1f}",
            )
            for name, phase in (("prefill", prefill), ("decode", decode))
        ],
        right=("queries", "keys", "weights", "FLOPs", "bytes moved", "FLOPs/byte"),
    )


def _print_caches(rows: list[dict[str, Any]], k_len: int) -> None:
    print()
    print_text(
        f"The key/value cache of one layer at {count(k_len)} tokens: B S Hkv (d_k + d_v) elements. Sharing "
        "heads makes it smaller and decoding less bound by memory, and leaves the number of pairs as it is."
    )
    print()
    columns = ("C3", "heads", "kv heads", "elements", "bytes", "times MQA", "decode FLOPs/byte")
    print_table(
        columns,
        [
            (
                row["kind"],
                count(row["heads"]),
                count(row["kv_heads"]),
                count(row["elements"]),
                size(row["bytes"]),
                count(row["times_mqa"]),
                f"{row['decode_intensity']:,.2f}",
            )
            for row in rows
        ],
        right=columns[1:],
    )


def _print_alternatives(others: tuple[cost.Alternative, ...], length: int, width: int) -> None:
    print()
    print_text(
        f"What can stand in its place, for n = {count(length)} tokens of d = {count(width)}: multiply-adds "
        "that mix tokens in one layer, layers or updates between the first and the last token, operations "
        "that must wait for each other, numbers kept for the next token."
    )
    print()
    columns = ("C4", "work", "path", "steps", "state")
    rows: list[tuple[str, ...]] = []
    for other in others:
        numbers = (count(other.work), count(other.path), count(other.steps), count(other.state))
        rows += [
            (other.method, other.work_formula, other.path_formula, other.steps_formula, other.state_formula),
            (other.parameter, *numbers),
        ]
    print_table(columns, rows, right=columns[1:])
