"""Draws a trace of JAX's profiler, one lane a CPU device, with the all-reduces marked.

    python examples/draw_trace.py TRACES decode.png

TRACES is the folder that was given to `jax.profiler.trace(TRACES, create_perfetto_trace=True)`; its newest trace is
drawn. `docs/profiling.md` shows how to take one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt

CONTAINERS = ("while", "call", "conditional")
"""HLO operations that only hold others."""


class Span(NamedTuple):
    """An operation on a device: its name, start and length in milliseconds."""

    name: str
    start: float
    length: float


def read(folder: Path) -> dict[int, list[Span]]:
    """The operations of the newest trace in `folder`, by device, in order, from time 0 on.

    Raises:
      ValueError: there is none, or it has no operation of a CPU device.
    """
    traces = sorted(folder.rglob("perfetto_trace.json.gz"))
    if not traces:
        raise ValueError(f"{folder}: no perfetto_trace.json.gz; trace with create_perfetto_trace=True")
    with gzip.open(traces[-1]) as file:
        events = json.load(file)["traceEvents"]
    found = defaultdict(list)
    for event in events:
        details = event.get("args", {})
        on_device = event.get("ph") == "X" and {"hlo_op", "device_ordinal"} <= details.keys()
        if on_device and not details["hlo_op"].startswith(CONTAINERS):
            span = Span(details["hlo_op"], event["ts"] / 1e3, event["dur"] / 1e3)
            found[int(details["device_ordinal"])].append(span)
    if not found:
        raise ValueError(f"{traces[-1]}: no operation of a CPU device in it")
    first = min(span.start for spans in found.values() for span in spans)
    # The file has them thread by thread, and a device's next operation may run on another one.
    in_order = {device: sorted(spans, key=lambda span: span.start) for device, spans in sorted(found.items())}
    return {device: [span._replace(start=span.start - first) for span in spans] for device, spans in in_order.items()}


def draw(devices: dict[int, list[Span]], marked: str, picture: Path) -> str:
    """Writes the picture; returns what it shows, in a sentence a device."""
    figure, axes = plt.subplots(figsize=(10, 0.6 + 0.45 * len(devices)), layout="constrained")
    lines = []
    for lane, (device, spans) in enumerate(devices.items()):
        ours = [span for span in spans if marked in span.name]
        for chosen, color in ((spans, "0.75"), (ours, "tab:red")):
            axes.broken_barh([(s.start, s.length) for s in chosen], (lane - 0.35, 0.7), color=color, linewidth=0)
        end = max(span.start + span.length for span in spans)
        lines.append(
            f"device {device}: {len(ours)} of {len(spans)} operations are {marked}, "
            f"{sum(s.length for s in ours):.2f} of {end:.2f} ms with the waits for peers"
        )
    axes.set_yticks(range(len(devices)), [f"device {device}" for device in devices])
    axes.invert_yaxis()
    axes.set_xlabel(f"ms; red: {marked}, waits for peers included")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=100)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("traces", type=Path, help="folder given to jax.profiler.trace")
    parser.add_argument("picture", type=Path, help="file to write: .png, .svg or .pdf")
    parser.add_argument("--mark", default="jax_twoshot", help="part of the name of what is marked")
    options = parser.parse_args(arguments)
    try:
        print(draw(read(options.traces), options.mark, options.picture))
    except ValueError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
