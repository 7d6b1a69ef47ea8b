"""`refattn check`: judge an implementation with the conformance suite, `refattn.conformance`."""

import argparse
import contextlib
import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from refattn.clauses import CHAPTERS, CLAUSES
from refattn.commands import process
from refattn.commands.clauses import labels_in
from refattn.commands.output import UsageError, refused
from refattn.conformance.records import DEFAULT_SEED
from refattn.dtypes import COMPUTED, dtype_in, dtypes_in

# As shells have it after an interrupt.
INTERRUPTED = 130
TARGET = (
    "a public implementation such as torch or onnxruntime (--list shows all), numpy or refattn-LIBRARY (refattn "
    "itself), or your own function as module:function or path.py:function, called as f(q, k, v, **options)"
)

DESCRIPTION = """\
Runs the conformance suite on an implementation of attention and says whether it conforms, and if not, what is
wrong. Results are compared with float64 values, under an error bound that is derived element by element.
"""

EPILOG = """\
Your own function, in a file my_kernel.py:

  def attention(q, k, v, *, causal=False, mask=None, scale=None):
      ...                                  # NumPy arrays (..., heads, tokens, width) in, the output out

  refattn check my_kernel.py:attention

Each case passes only the options that it uses, and one that needs a parameter the signature lacks is listed as
unsupported. mask is boolean, True = visible, and broadcasts to (..., heads, queries, keys). The others are bias,
softcap, sinks, q_start and k_start; a second result is read as the log-sum-exp. Of modules, forward is read.

  refattn check my_kernel.py:forward --convention flash-attn   (batch, tokens, heads, width), its names, its windows
  refattn check torch --clauses M,P1       the chapter of masks, and clause P1
  refattn check torch --case masks.causal  one case, in full: the call, the error's place, the traceback
  refattn check torch --case 'masks.window*' --dtype bf16    refattn cases list shows all names
  refattn check torch --case masks.causal --save-inputs case.npz
  refattn check torch --profile torch      what torch is known to do otherwise is declared, and no fault
  refattn check torch --inputs dump.npz    tensors captured from a model: q, k, v, or layer0.q, layer0.k, layer0.v, ...

Exit codes: 0 it conforms, 1 it does not (or nothing could be judged), 2 the command line cannot be carried out,
130 it was interrupted, 143 asked to end; the report then holds what had been judged.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `refattn check`, its description and its examples."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("target", metavar="TARGET", nargs="?", help=TARGET)
    parser.add_argument("--list", action="store_true", help="show the public implementations and what is installed")
    add_reports(parser)
    parser.add_argument("--fail-fast", action="store_true", help="stop at the first failure")
    parser.add_argument(
        "--clauses", metavar="LABEL", nargs="+", action=_Clauses, help="only cases of these clauses or chapters: S1,M"
    )
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--quick", action="store_true", help="float32 alone")
    some.add_argument("--dtype", metavar="float32,...", type=in_dtypes, help="only these dtypes; bf16 will do")
    parser.add_argument(
        "--case", metavar="NAME,...", help="only these cases, each shown in full: masks.causal, or masks.window*"
    )
    parser.add_argument(
        "--save-inputs",
        metavar="FILE.npz",
        type=in_path,
        help="write inputs and visible pairs of --case to FILE.npz",
    )
    parser.add_argument(
        "--save-failures",
        metavar="DIR",
        type=in_path,
        help="write each failing case, and a script that repeats it, to DIR",
    )
    parser.add_argument(
        "--seed", metavar="N", type=at_least(0), default=DEFAULT_SEED, help="data of the cases (%(default)s)"
    )
    parser.add_argument(
        "--library",
        metavar="NAME",
        help="arrays that your own function is called with: numpy, or what the convention says",
    )
    parser.add_argument(
        "--convention",
        metavar="NAME",
        help="the calling convention that your own function speaks, if not refattn's: cudnn, flash-attn, "
        "flash-attn-varlen, flashinfer, jax, torch, triton, xformers, or a file of yours, FILE.toml",
    )
    parser.add_argument(
        "--gradients",
        metavar="BACKWARD",
        nargs="?",
        const="",
        help="judge gradients too: those that torch or jax take of the target, or of your function's own "
        "backward(q, k, v, grad_output, **options), as module:function",
    )
    parser.add_argument(
        "--inputs",
        metavar="FILE",
        type=in_path,
        help="captured tensors (.npz or .safetensors) q, k, v [mask, bias, scale, softcap, sinks, causal, q_start, "
        "k_start; grad_output with --gradients] as extra cases, in the dtype in which they were stored (--dtype adds "
        "others)",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help="accept what this profile declares, shipped or a FILE.json of refattn probe --save-profile: results that "
        "its departures explain are listed as declared, all others are faults",
    )
    parser.add_argument("--only-inputs", action="store_true", help="run the cases of --inputs and no others")
    process.configure(parser, "case")
    parser.set_defaults(stray=None)


def add_reports(parser: argparse.ArgumentParser) -> None:
    """Adds the options that write a report."""
    parser.add_argument("--html", metavar="FILE", help="write one page that explains and draws each failure")
    parser.add_argument("--json", metavar="FILE", help="write every verdict to FILE as JSON, - for standard output")
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML, for continuous integration")


def places_of(args: argparse.Namespace) -> dict[str, str]:
    """Where reports go, by option."""
    return {f"--{form}": where for form in ("json", "junit", "html") if (where := getattr(args, form)) is not None}


def run(args: argparse.Namespace) -> int:
    """Runs the suite: 0 the target conforms, 1 it does not, 2 it could not be asked, 130 interrupted."""
    from refattn.conformance.capture import captured, let_through
    from refattn.conformance.reports.files import STANDARD_OUTPUT, ReportError, check_places
    from refattn.conformance.targets import TargetError

    if args.list:
        _print_names()
        return 0
    name = args.target or args.stray
    places = places_of(args)
    reserved = STANDARD_OUTPUT in places.values()
    capture: Any = (lambda _: let_through(reserved)) if args.case else captured
    notes: list[str] = []
    try:
        _check_usage(args, name)
        check_places(places)
        with capture(notes):
            target = process.open_target(args, name, args.library, args.convention, args.gradients)
    except (TargetError, ReportError, UsageError) as fault:
        return refused("check", str(fault))
    try:
        return _judged(args, name, target, places, capture, notes)
    finally:
        target.close()


def _judged(
    args: argparse.Namespace, name: str, target: Any, places: dict[str, str], capture: Any, notes: list[str]
) -> int:
    """The suite's exit code on a target; places of reports by option, and what it printed while it was imported."""
    from refattn.conformance.alignment import reading_of
    from refattn.conformance.exchange.files import TensorFileError
    from refattn.conformance.exchange.replay import Remembering
    from refattn.conformance.profiles import Declared, ProfileError, load
    from refattn.conformance.reports.files import STANDARD_OUTPUT, ReportError, write_all
    from refattn.conformance.reports.terminal import print_cases, print_report, progress
    from refattn.conformance.runner import run_suite

    try:
        pairs = _pairs(args)
        declared = Declared(load(args.profile)) if args.profile else None
        if args.save_inputs:
            _save_inputs(args, pairs)
    except (TensorFileError, ProfileError, ReportError, UsageError) as fault:
        return refused("check", str(fault))
    reserved = STANDARD_OUTPUT in places.values()
    imported = tuple(f"while it was imported it {note}" for note in notes)
    # What the target prints with --case would run into a progress bar.
    bar: Any = contextlib.nullcontext(lambda record: None) if args.case else progress(len(pairs))
    remembering = Remembering(target)
    unwritten: list[str] = []
    with bar as advance:

        def judged(record: Any) -> None:
            if args.save_failures and not unwritten:
                unwritten.extend(_save_failure(args, name, remembering, record))
            advance(record)

        report = run_suite(
            remembering,
            pairs,
            args.seed,
            fail_fast=args.fail_fast,
            advance=judged,
            capture=capture,
            notes=imported,
            declared=declared,
        )
    causal = any(record.verdict == "pass" and "causal" in record.needs for record in report.records)
    if causal and report.complete and report.lacking["q_start"] and not args.case:
        report = dataclasses.replace(report, alignment=reading_of(target, args.seed))
    try:
        write_all(report, places, _command(args, name))
    except ReportError as fault:
        unwritten.append(str(fault))
    if not reserved and args.case:
        print_cases(report)
    elif not reserved:
        print_report(report, args.clauses, _command(args, name))
    if unwritten:
        return refused("check", "; ".join(unwritten))
    if not report.complete:
        return INTERRUPTED
    return 0 if report.conforms else 1


def _save_inputs(args: argparse.Namespace, pairs: list[tuple[Any, str]]) -> None:
    """Writes the tensors of the cases that have some, for --save-inputs."""
    from refattn.conformance.captured import save_inputs
    from refattn.conformance.reports.files import faults_of

    found = [(case, dtype) for case, dtype in pairs if case.build is not None]
    problems = [(f"{case.name}.{dtype}", case.problem(dtype, args.seed)) for case, dtype in found]
    with faults_of("--save-inputs", str(args.save_inputs)):
        save_inputs(args.save_inputs, problems)


def _save_failure(args: argparse.Namespace, name: str, remembering: Any, record: Any) -> Iterator[str]:
    """Keeps a failing case for --save-failures: why it could not, since that is no reason to lose the verdicts."""
    try:
        remembering.save(args.save_failures, record, name, args.library, args.convention, args.gradients)
    except OSError as fault:
        yield f"--save-failures: {fault.filename} cannot be written: {fault.strerror or fault}"


def _print_names() -> None:
    """The public implementations: each name, the version here or what to install, and what it is."""
    from refattn.conformance.targets.names import NAMES

    for name, known in NAMES.items():
        here = f"{known.imports[0]} {known.version}" if known.installed else f"pip install {known.quoted}"
        print(f"{name:<20}  {here}\n    {known.says}")


def _check_usage(args: argparse.Namespace, name: str | None) -> None:
    if not name:
        raise UsageError("name a TARGET: torch, numpy, or module:function; refattn check --help says more")
    if args.library and ":" not in name:
        raise UsageError(f"--library {args.library} is for a function of your own; {name!r} has its own library")
    if args.only_inputs and not args.inputs:
        raise UsageError("--only-inputs needs --inputs FILE.npz")
    if args.save_inputs and not args.case:
        raise UsageError("--save-inputs needs --case NAME")
    if args.save_inputs and args.save_inputs.suffix != ".npz":
        raise UsageError(f"--save-inputs: expected the name of a file .npz; got {args.save_inputs}")


def _pairs(args: argparse.Namespace) -> list[tuple[Any, str]]:
    """The cases to run, each with a dtype; captured tensors last, whatever --clauses says."""
    from refattn.conformance.captured import captured_cases
    from refattn.conformance.cases import all_cases
    from refattn.conformance.picked import NoSuchCase, picked
    from refattn.conformance.runner import chosen_pairs
    from refattn.conformance.targets.find import is_own

    gradients = args.gradients is not None or is_own(args.target or args.stray)
    dumps = captured_cases(args.inputs, gradients) if args.inputs else []
    dtypes = args.dtype or (("float32",) if args.quick else COMPUTED)
    pairs = [] if args.only_inputs else chosen_pairs(all_cases(), args.clauses, dtypes)
    pairs += [pair for dump in dumps for pair in chosen_pairs([dump], None, (dump.own_dtype, *(args.dtype or ())))]
    if not args.case:
        return pairs
    try:
        names = picked(args.case, (case.name for case, _ in pairs))
    except NoSuchCase as fault:
        raise UsageError(f"--case: {fault}") from fault
    return [(case, dtype) for case, dtype in pairs if case.name in names]


class _Clauses(argparse.Action):
    """Labels in any case, with commas or spaces; a last word that is none is the target, if there is no other."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        words: Sequence[str] = list(values)
        if len(words) > 1 and namespace.target is None and not _is_label(words[-1]):
            *words, namespace.stray = words
        try:
            found = labels_in(" ".join(words))
        except argparse.ArgumentTypeError as fault:
            raise argparse.ArgumentError(self, str(fault)) from fault
        namespace.clauses = found | (namespace.clauses or frozenset())


def _is_label(text: str) -> bool:
    known = {*CHAPTERS, *(clause.label for clause in CLAUSES)}
    return all(word.upper() in known for word in text.replace(",", " ").split())


def at_least(least: int) -> Any:
    """What reads a whole number that is no smaller, for argparse."""

    def number(text: str) -> int:
        if (found := int(text)) < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, it is {found}")
        return found

    return number


def in_path(text: str) -> Path:
    """The path of a file or folder, for argparse; an empty word, as of a variable that is not set, is none."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path; got nothing")
    return Path(text)


def in_dtypes(text: str) -> tuple[str, ...]:
    """Names of dtypes, with commas or spaces, for argparse."""
    try:
        return dtypes_in(text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from fault


def in_dtype(text: str) -> str:
    """The name of one dtype, for argparse."""
    try:
        return dtype_in(text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from fault


def _command(args: argparse.Namespace, name: str) -> str:
    """How the same target is called again."""
    words = ["refattn", "check", name]
    options = (("library", None), ("convention", None), ("inputs", None), ("profile", None), ("seed", DEFAULT_SEED))
    for option, default in options:
        if (value := getattr(args, option)) != default:
            words += [f"--{option}", str(value)]
    words += [] if args.gradients is None else ["--gradients", *filter(None, [args.gradients])]
    words += ["--in-process"] if args.in_process else []
    return shlex.join(words)
