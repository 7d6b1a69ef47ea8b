"""The command `refattn`: one module per subcommand in `refattn.commands`, loaded only when it is called.

Exit codes: 0 all is well, 1 a check found something, 2 the command line cannot be carried out. An interrupt
gives 130, a request to end 143 and a reader that went away 141, as shells have it.
"""

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from refattn.errors import RefattnError

# Name -> help line; `refattn.commands.NAME` has configure(parser) and run(args) -> exit code.
COMMANDS = {
    "example": "follow three tokens through attention, every stage printed",
    "clauses": "read the specification, clause by clause",
    "backends": "list the array libraries that can run it here",
    "cost": "work, memory and cache size, and what the alternatives cost",
    "check": "judge an implementation, your own included",
    "probe": "find out what an implementation does, no convention presumed",
    "cases": "list the cases, or write their inputs as files, for a program in any language",
    "compare": "judge what it wrote, or tensors dumped from anywhere",
    "plot": "draw the weights of your own q, k and v, or a mask, as SVG",
    "vectors": "list or export calls with proven results, for any language",
    "reports": "public reports of wrong attention, and the cases that catch them",
}

# Requests to end that leave time to end in order, as an interrupt does.
ENDINGS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
INTERRUPTED = 130
# Errors of a file that no name comes with: that of standard output.
WHILE_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

DESCRIPTION = """\
An executable specification of scaled dot-product attention, and a judge for other implementations of it.
"""

EPILOG = """\
Start here:
  refattn example            see softmax(q k^T / sqrt(d_k)) v happen, on numbers small enough to follow
  refattn clauses M          what the specification says about masks
  refattn check numpy        run the conformance suite on the specification itself
  refattn check mine:attend  run it on the function attend of your module mine

Every subcommand explains itself and shows examples: refattn check --help

Exit codes: 0 all is well, 1 a check found something, 2 the command line cannot be carried out.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; None takes the process's own arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _prepare_streams()
    with _ended_in_order() as ended:
        try:
            code = _run(arguments)
            sys.stdout.flush()
        except RefattnError as fault:
            code = _refused(str(fault), 2)
        except MemoryError as fault:
            code = _refused(f"not enough memory: {str(fault) or 'none is left'}", 2)
        except KeyboardInterrupt:
            code = _refused("interrupted", INTERRUPTED)
        except BrokenPipeError:
            _silence(sys.stdout)
            code = 141
        except OSError as fault:
            nameless = "standard output cannot be written: " if fault.errno in WHILE_WRITING else ""
            where = nameless if fault.filename is None else f"{fault.filename}: "
            code = _refused(f"{where}{fault.strerror or fault}", 2)
            _silence(sys.stdout)
    return 128 + ended[0] if ended and code == INTERRUPTED else code


def _refused(message: str, code: int) -> int:
    """The exit code, after a sentence on standard error, if that can be written."""
    try:
        print(f"refattn: {message}", file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)
    return code


def _run(arguments: list[str]) -> int:
    parser = _parser(arguments)
    try:
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            args.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as request:  # argparse has printed the help, the version or a usage error
        return int(request.code or 0)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    return int(args.run(args))


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="refattn",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    parser.set_defaults(refuse=parser.error)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    called = next((word for word in arguments if not word.startswith("-")), None)
    for name, line in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=line, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == called:
            module = importlib.import_module(f"refattn.commands.{name}")
            module.configure(subparser)
            subparser.set_defaults(run=module.run, refuse=subparser.error)
    return parser


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __init__(self, option_strings: list[str], dest: str, help: str) -> None:  # noqa: A002  # argparse's name
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import refattn

        print(f"refattn {refattn.__version__}")
        parser.exit()


def _prepare_streams() -> None:
    """Closed streams lead nowhere; one that cannot show a character gets a question mark in its place, no traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # and its descriptor, too, is no longer free for the next file that is opened
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115  # a device, and open for good
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def _ended_in_order() -> Iterator[list[int]]:
    """Requests to end interrupt what runs inside, and are listed; whoever ignores or handles them himself may."""
    ended: list[int] = []

    def end(number: int, _: object) -> None:
        ended.append(number)
        raise KeyboardInterrupt

    here = threading.current_thread() is threading.main_thread()
    taken = [number for number in ENDINGS if here and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield ended
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _silence(stream: Any) -> None:
    """Drops what is still to be printed: nobody can read it, and the interpreter would complain at exit."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:  # noqa: PTH123  # a device
        os.dup2(nowhere.fileno(), stream.fileno())
