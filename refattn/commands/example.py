"""`refattn example`: three tokens through every stage of attention."""

import argparse
import math
from typing import Any

from refattn import three_tokens
from refattn.commands.output import print_json, print_text

DESCRIPTION = """\
Three tokens (voltage, spike, alarm), one head, d_k = 2 and d_v = 2: small enough to check by hand.
Prints every stage of softmax(q k^T / sqrt(d_k)) v with its shape and a sentence on what happens there.
"""

EPILOG = """\
Examples:
  refattn example              every token sees every token; the first row of weights is 0.401 0.198 0.401
  refattn example --causal     no token sees a later one; the second row of weights is 0.330 0.670 0
  refattn example --json       the same numbers at full precision; -inf is the string "-inf"

In Python:
  refattn.attention_stages(q, k, v, causal=True) returns these stages for arrays of any library.
"""

# Stage -> the clause that orders it, and what happens there.
STAGES = {
    "scores": ("S5", "q . k: each query (row) against each key (column); the larger, the better the match."),
    "scaled": ("S1", "times 1/sqrt(d_k) = {scale:.3f}, so that the spread of scores does not grow with d_k."),
    "capped": ("S3", "no soft cap was asked for, so nothing changes here."),
    "biased": ("B4", "no bias was given, so nothing changes here."),
    "visible": ("M4", "{visible}"),
    "logits": ("M2", "what softmax will see: the numbers of visible pairs, and -inf for invisible ones."),
    "lse": ("P4", "the logarithm of each row's sum of exponentials, the denominator of softmax."),
    "weights": ("P1", "exp(logit - lse): every row is a mixture whose weights sum to 1."),
    "output": ("S5", "weights times v: each token's row is its own mixture of the rows of v."),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `refattn example`."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--causal", action="store_true", help="hide later tokens from earlier ones")
    parser.add_argument("--json", action="store_true", help="print the stages as JSON instead")


def run(args: argparse.Namespace) -> int:
    """Prints the stages."""
    from refattn import attention_stages

    q, k, v = three_tokens.inputs()
    stages = attention_stages(q, k, v, causal=args.causal)
    words = {
        "scale": 1 / math.sqrt(q.shape[-1]),
        "visible": "a token sees itself and what came before it." if args.causal else "every token sees every token.",
    }
    described = {
        name: {
            "clause": clause,
            "meaning": meaning.format(**words),
            "shape": list(getattr(stages, name).shape),
            "values": getattr(stages, name).tolist(),
        }
        for name, (clause, meaning) in STAGES.items()
    }
    if args.json:
        inputs = {"q": q.tolist(), "k": k.tolist(), "v": v.tolist()}
        print_json({"tokens": three_tokens.TOKENS, "causal": args.causal, **inputs, "stages": described})
        return 0
    print_text("Three tokens, one head, d_k = 2, d_v = 2" + (", causal." if args.causal else "."))
    for name, array in (("q", q), ("k", k), ("v", v)):
        _print_stage(name, list(array.shape), array.tolist())
    for name, stage in described.items():
        _print_stage(name, stage["shape"], stage["values"], f"{stage['meaning']} [{stage['clause']}]")
    return 0


def _print_stage(name: str, shape: list[int], values: list[Any], meaning: str = "") -> None:
    print(f"\n{name} ({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})")
    if meaning:
        print_text(meaning, indent="  ")
    for token, row in zip(three_tokens.TOKENS, values):
        cells = row if isinstance(row, list) else [row]
        print(f"    {token:<8}" + "".join(f"{_cell(cell):>8}" for cell in cells))


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "."
    return f"{value:.3f}"
