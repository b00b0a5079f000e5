"""The command line: ``doctor``, ``selftest``, ``bench``, ``compile``.

Here are the arguments only. Each command is a module of this package (with ``--ranks`` another), imported
when it is called for, with a ``run(args)`` that returns the exit code: 0 all is well, 1 something is wrong with the
library or the machine. 2 is for wrong arguments.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

from jax_twoshot.protocol import FORMATS, MAX_RANKS, MIN_RANKS

PROG = "python -m jax_twoshot"
IN_PROCESSES = {"selftest": "ranks", "bench": "bench_ranks"}
"""The modules that run a command with ``--ranks``, or ``bench --fused``."""


class UsageError(Exception):
    """The arguments ask for what is not to be had here; the text says what would work."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
      argv: the arguments; by default those of this process.

    Raises:
      SystemExit: after ``--help``, or with 2 for arguments that cannot be obeyed.
    """
    parser, commands = _parser()
    args = parser.parse_args(argv)
    in_processes = any(getattr(args, name, None) for name in ("ranks", "one_gpu", "fused"))
    module = IN_PROCESSES[args.command] if in_processes else args.command
    try:
        return importlib.import_module(f"jax_twoshot.cli.{module}").run(args)
    except UsageError as error:
        commands[args.command].error(str(error))
    except BrokenPipeError:  # `... | head` has seen enough
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Two-shot all-reduce for JAX: what works here, are its bits right, how fast is it.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {}
    for name, add_arguments, text in (
        ("doctor", _doctor_arguments, "say what is installed, what works here and what does not, and why"),
        (
            "selftest",
            _selftest_arguments,
            "compare all_reduce with the oracle, bit for bit, on the devices present",
        ),
        ("bench", _bench_arguments, "time all_reduce and its peers in one run, after checking their sums"),
        ("compile", _compile_arguments, "compile the CUDA kernels into a folder; needs no GPU"),
    ):
        commands[name] = subparsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        add_arguments(commands[name])
    return parser, commands


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _selftest_arguments(parser: argparse.ArgumentParser) -> None:
    _add_devices_or_ranks(parser)
    parser.add_argument("--full", action="store_true", help="every shape of the test-suite's grid (minutes)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    _add_devices_or_ranks(parser)
    parser.add_argument(
        "--rows", type=_whole_numbers(1), default=[1, 4, 16, 64], metavar="N,N,...", help="default 1,4,16,64"
    )
    parser.add_argument(
        "--width",
        type=_whole_numbers(1),
        default=[7168],
        metavar="N,N,...",
        help="columns; default 7168; several with --ranks or --fused only",
    )
    parser.add_argument("--dtype", choices=list(FORMATS), default="bfloat16", help="default bfloat16")
    parser.add_argument(
        "--repeats",
        type=_whole_number(2),
        default=20,
        metavar="N",
        help="timed runs of each peer; default 20",
    )
    parser.add_argument(
        "--calls", type=_whole_number(1), default=100, metavar="N", help="calls a run; default 100"
    )
    parser.add_argument(
        "--timeout",
        type=_whole_number(1),
        default=300,
        metavar="N",
        help="seconds for each number of --ranks; default 300",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--decode",
        action="store_true",
        help="with --ranks: time a decode step with the sums and without them, not the sums alone",
    )
    what.add_argument(
        "--fused",
        action="store_true",
        help="time all_reduce_rms_norm, matmul_all_reduce and moe_tail, and what does the same in several kernels",
    )
    what.add_argument(
        "--tune",
        action="store_true",
        help="with --ranks: time one shot against two, and print the table for JAX_TWOSHOT_TUNING",
    )
    parser.add_argument(
        "--json", metavar="PATH", type=_output_file, help="write all samples; - is standard output"
    )
    parser.add_argument(
        "--plot", metavar="PATH", type=_plot_file, help="draw time against bytes: .png, .svg or .pdf"
    )


def _compile_arguments(parser: argparse.ArgumentParser) -> None:
    targets = parser.add_mutually_exclusive_group(required=True)
    targets.add_argument(
        "--arch", action="extend", nargs="+", metavar="ARCH", help="targets, such as sm_90a sm_100a"
    )
    targets.add_argument("--all", action="store_true", help="every target")
    parser.add_argument(
        "--tp", type=_whole_numbers(MIN_RANKS), metavar="N,N,...", help="for groups of so many ranks; default: all"
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="made if need be")


def _add_devices_or_ranks(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    _add_devices(where)
    where.add_argument(
        "--ranks",
        type=_whole_numbers(MIN_RANKS, MAX_RANKS),
        metavar="N,N,...",
        help="start so many processes, one a GPU, instead of using the devices of this one",
    )
    parser.add_argument("--one-gpu", action="store_true", help="with --ranks: all of them share GPU 0")


def _add_devices(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--devices",
        type=_whole_number(MIN_RANKS, MAX_RANKS),
        metavar="N",
        help="how many devices; default: all GPUs, or 8 CPU devices (JAX_PLATFORMS=cpu chooses those)",
    )


def _whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    rule = f"a whole number from {least} {'up' if most is None else f'to {most}'}"

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"{rule} is needed, got {text!r}")
        return int(text)

    return parse


def _whole_numbers(least: int, most: int | None = None) -> Callable[[str], list[int]]:
    parse = _whole_number(least, most)
    return lambda text: sorted({parse(part.strip()) for part in text.split(",")})


def _output_file(text: str) -> Path:
    path = Path(text)
    if text != "-" and (path.is_dir() or not path.parent.is_dir()):
        raise argparse.ArgumentTypeError(f"a file in an existing folder is needed, got {text!r}")
    return path


def _plot_file(text: str) -> Path:
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(
            f"a file name that ends in .png, .svg or .pdf is needed, got {text!r}"
        )
    return _output_file(text)
