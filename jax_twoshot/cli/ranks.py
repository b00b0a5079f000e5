"""``selftest --ranks``: the same cases with a process for each rank, as a job on several GPUs runs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

import jax

from jax_twoshot import _launch, protocol
from jax_twoshot.cli import UsageError, machine, selftest, terminal
from jax_twoshot.cli.selftest import Case, Difference, Outcome

LAUNCH_SECONDS = 300
"""For all cases of one number of ranks; with ``--full`` three times as long."""
WAIT_SECONDS = "60"
"""A rank's deadline for the others, where ``JAX_TWOSHOT_TIMEOUT`` does not say: all start together here."""


def run(args: argparse.Namespace) -> int:
    """Starts this command once for each rank, for one number of ranks after the other, and judges the outcomes."""
    if _launch.launched():
        return _work(args)
    require_gpus(args)
    start, planned = time.monotonic(), 0
    outcomes: list[Outcome] = []
    facts: dict[str, Any] = {}
    with terminal.Progress(len(args.ranks)) as progress:
        for tp in args.ranks:
            try:
                found = _launch_ranks(tp, args)
            except _launch.LaunchError as error:
                print(f"{tp} ranks: {error}", file=sys.stderr)
                return 1
            todo = _cases(tp, args.full)
            planned += len(todo)
            outcomes += merge(todo, [rank["outcomes"] for rank in found])
            facts = found[0]["facts"]
            progress.step(f"{tp} ranks")
    kind = facts["machine"]["devices"][0]
    described = f"{'/'.join(map(str, args.ranks))} processes on {'one' if args.one_gpu else 'as many'} {kind}"
    return selftest.judge(args, outcomes, planned, facts, described, start)


def _cases(tp: int, full: bool) -> list[Case]:
    return selftest.cases([tp], full, protocol.ALGORITHMS)


def require_gpus(args: argparse.Namespace) -> None:
    if not args.ranks:
        raise UsageError("argument --one-gpu: it is about --ranks, which is missing, such as --ranks 2,4,8")
    gpus, most = _launch.gpu_count(), max(args.ranks)
    if gpus == 0:
        raise UsageError(
            "argument --ranks: it starts a process for each rank on NVIDIA GPUs, and there is none here; without "
            "--ranks the ranks are CPU devices of one process"
        )
    if gpus < most and not args.one_gpu:
        raise UsageError(
            f"argument --ranks: {most} ranks need {most} GPUs, there {'is' if gpus == 1 else 'are'} {gpus}; with "
            "--one-gpu all ranks share GPU 0"
        )


def _launch_ranks(tp: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "jax_twoshot", "selftest", "--ranks", str(tp)]
    return _launch.launch(
        tp,
        command + ["--full"] * args.full,
        one_gpu=args.one_gpu,
        timeout=LAUNCH_SECONDS * (3 if args.full else 1),
        env={"JAX_TWOSHOT_TIMEOUT": os.environ.get("JAX_TWOSHOT_TIMEOUT", WAIT_SECONDS)},
        echo=False,
    )


def _work(args: argparse.Namespace) -> int:
    _launch.initialize()
    devices = jax.devices()
    outcomes = selftest.run_cases(devices, _cases(len(devices), args.full))
    _launch.summary(
        outcomes=[asdict(outcome) | {"case": str(outcome.case)} for outcome in outcomes], facts=machine.facts(devices)
    )
    return 0


def merge(todo: Sequence[Case], ranks: Sequence[Sequence[dict[str, Any]]]) -> list[Outcome]:
    """One outcome for each case that any rank came to, from what each rank says of its own shards."""
    merged = []
    for case, *found in zip_longest(todo, *ranks):
        parts = [part for part in found if part is not None]
        if not parts:
            break
        first = next((part["first"] for part in parts if part["first"]), None)
        error = next((part["error"] for part in parts if part["error"]), None)
        merged.append(
            Outcome(
                case,
                parts[0]["calls"],
                sum(part["elements"] for part in parts),
                sum(part["wrong"] for part in parts),
                first and _difference(first),
                error
                or (None if len(parts) == len(ranks) else f"{case}: only {len(parts)} of {len(ranks)} ranks ran it"),
            )
        )
    return merged


def _difference(fields: dict[str, Any]) -> Difference:
    return Difference(**fields | {name: tuple(fields[name]) for name in ("shape", "element")})
