"""``selftest --ranks``: its arguments, its launches (with CPU processes and made-up outcomes), its verdict."""

from __future__ import annotations

import sys
from dataclasses import asdict

import pytest

from jax_twoshot import _launch
from jax_twoshot.cli import main, ranks, selftest
from jax_twoshot.cli.selftest import Difference, Outcome

WORKER = """
import sys, jax
jax.config.update("jax_platforms", "cpu")
from jax_twoshot.cli import main, selftest
from jax_twoshot.cli.selftest import Difference, Outcome

def run_cases(devices, todo):
    outcomes = [Outcome(case, calls=3, elements=10) for case in todo]
    if jax.process_index() == 1:
        BODY
    return outcomes

selftest.run_cases = run_cases
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def workers(monkeypatch):
    """Makes the ranks CPU processes, of which rank 1 does what the given code says."""
    launch = _launch.launch

    def set_body(body: str) -> None:
        code = WORKER.replace("BODY", body)
        monkeypatch.setattr(_launch, "gpu_count", lambda: 1)
        monkeypatch.setattr(
            _launch, "launch", lambda n, argv, **options: launch(n, [sys.executable, "-c", code, *argv[3:]], **options)
        )

    return set_body


@pytest.mark.parametrize(
    ("gpus", "arguments", "text"),
    [
        (0, "--ranks 2 --one-gpu", "there is none here; without --ranks the ranks are CPU devices of one process"),
        (1, "--ranks 2,4", "4 ranks need 4 GPUs, there is 1; with --one-gpu all ranks share GPU 0"),
        (1, "--one-gpu", "argument --one-gpu: it is about --ranks, which is missing"),
        (1, "--ranks 1", "argument --ranks: a whole number from 2 to 64 is needed, got '1'"),
        (1, "--ranks 2 --devices 2", "argument --devices: not allowed with argument --ranks"),
    ],
)
def test_arguments_that_cannot_be_obeyed(monkeypatch, capsys, gpus, arguments, text):
    monkeypatch.setattr(_launch, "gpu_count", lambda: gpus)
    with pytest.raises(SystemExit) as caught:
        main(["selftest", *arguments.split()])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_all_ranks_count(workers, capsys):
    workers("pass")
    assert main(["selftest", "--ranks", "2,3", "--one-gpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "on 2/3 processes on one cpu" in lines[0]
    assert lines[2].split() == ["shapes", "2,3", "6", "0", "18", str(3 * (2 + 3) * 10), "0"]
    assert lines[-1].startswith("every bit is the oracle's")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            'outcomes[1] = Outcome(todo[1], 3, 10, 1, Difference("it", (3,), 1, (2,), "0x1", "0x2"))',
            "first difference: it: call of shape (3,), rank 1, element (2,): bits 0x1, expected 0x2",
        ),
        ('outcomes[1:] = [Outcome(todo[1], 3, error="no room")]', "no room"),
        ("del outcomes[1:]", "special values, bfloat16, sum over tp of tp=2: only 1 of 2 ranks ran it"),
        ("sys.exit(0)", "2 ranks: rank 1: no summary"),
    ],
)
def test_what_one_rank_finds_fails_the_whole(workers, capsys, body, text):
    workers(body)
    assert main(["selftest", "--ranks", "2", "--one-gpu"]) == 1
    out, err = capsys.readouterr()
    assert text in err
    assert "every bit" not in out


def test_merge():
    first, second = selftest.cases([2])[:2]
    difference = Difference("it", (3,), 0, (2,), "0x1", "0x2")
    mine = [Outcome(first, 3, 10, 1, difference), Outcome(second, 4, 10)]
    other = [Outcome(first, 3, 20), Outcome(second, 4, 20)]
    sent = [[asdict(outcome) for outcome in outcomes] for outcomes in (mine, other)]
    assert ranks.merge([first, second], sent) == [Outcome(first, 3, 30, 1, difference), Outcome(second, 4, 30)]
