"""`protocol.py`, and its mirror `ffi/protocol.h`: layout, ownership, rounds, formats, launch plan."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (gives NumPy the name bfloat16)
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_twoshot import _ffi, protocol
from jax_twoshot.protocol import CHUNK_BYTES, FORMATS, GENERATIONS, GENERATIONS_DEFERRED, MAX_RANKS, Layout

ranks = st.integers(2, MAX_RANKS)
generations = st.sampled_from((GENERATIONS, GENERATIONS_DEFERRED))
small_layouts = st.builds(Layout, st.integers(2, 9), st.integers(1, 12), generations)
layouts = st.builds(Layout, ranks, st.integers(1, 1 << 40), generations)
chunk_counts = st.integers(1, 1 << 40)


def recv_offsets(layout: Layout) -> list[int]:
    return [
        layout.recv_offset(generation, slot, chunk)
        for generation in range(layout.generations)
        for slot in range(layout.tp)
        for chunk in range(layout.slot_chunks)
    ]


def gather_offsets(layout: Layout) -> list[int]:
    return [
        layout.gather_offset(generation, chunk)
        for generation in range(layout.generations)
        for chunk in range(layout.capacity_chunks)
    ]


class TestLayout:
    @given(small_layouts)
    def test_places_tile_the_allocation(self, layout: Layout) -> None:
        """Aligned, disjoint, inside, nothing wasted, and recv before gather: all at once."""
        places = recv_offsets(layout) + gather_offsets(layout)
        assert places == list(range(0, layout.bytes, CHUNK_BYTES))
        assert len(recv_offsets(layout)) * CHUNK_BYTES == layout.recv_bytes
        assert len(gather_offsets(layout)) * CHUNK_BYTES == layout.gather_bytes

    @given(layouts, st.data())
    def test_any_two_places_are_apart(self, layout: Layout, data: st.DataObject) -> None:
        generation = st.integers(0, layout.generations - 1)
        slot = st.integers(0, layout.tp - 1)
        recv = st.tuples(st.just("recv"), generation, slot, st.integers(0, layout.slot_chunks - 1))
        gather = st.tuples(st.just("gather"), generation, st.integers(0, layout.capacity_chunks - 1))
        a, b = data.draw(st.lists(st.one_of(recv, gather), min_size=2, max_size=2, unique=True))

        def offset(buffer: str, *place: int) -> int:
            return layout.recv_offset(*place) if buffer == "recv" else layout.gather_offset(*place)

        for place in (a, b):
            assert offset(*place) % CHUNK_BYTES == 0
            assert 0 <= offset(*place) <= layout.bytes - CHUNK_BYTES
            assert (offset(*place) < layout.recv_bytes) == (place[0] == "recv")
        assert abs(offset(*a) - offset(*b)) >= CHUNK_BYTES

    @given(ranks, st.integers(1, 1 << 45))
    def test_for_capacity_is_the_least(self, tp: int, capacity: int) -> None:
        layout = Layout.for_capacity(tp, capacity)
        assert layout.capacity_chunks * CHUNK_BYTES >= capacity
        assert layout.generations == GENERATIONS
        if layout.slot_chunks > 1:
            assert Layout(tp, layout.slot_chunks - 1).capacity_chunks * CHUNK_BYTES < capacity

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ((1, 4), r"tp: .*2 to 64.* got 1\b"),
            ((MAX_RANKS + 1, 4), r"tp: .*2 to 64.* got 65\b"),
            ((2, 0), r"slot_chunks: .* got 0\b"),
            ((2, 4, 1), r"generations: .*2 \(immediate\).*3 \(deferred\).* got 1\b"),
        ],
    )
    def test_refuses(self, arguments: tuple[int, ...], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            Layout(*arguments)


class TestOwnership:
    @given(st.integers(1, 3000), ranks)
    def test_every_chunk_has_one_owner(self, chunks: int, tp: int) -> None:
        """In the order of the message, each owner's indices from 0 up, nobody above `owned_chunks`."""
        owned = protocol.owned_chunks(chunks, tp)
        places = [protocol.owner_of(chunk, chunks, tp) for chunk in range(chunks)]
        assert places == [(o, i) for o in range(tp) for i in range(owned)][:chunks]
        assert (owned - 1) * tp < chunks <= owned * tp

    @given(layouts, st.data())
    def test_owned_chunks_fit_a_slot(self, layout: Layout, data: st.DataObject) -> None:
        chunks = data.draw(st.integers(1, layout.capacity_chunks))
        chunk = data.draw(st.integers(0, chunks - 1))
        owner, index = protocol.owner_of(chunk, chunks, layout.tp)
        assert 0 <= owner < layout.tp
        assert 0 <= index < layout.slot_chunks


class TestRounds:
    @given(st.builds(Layout, st.integers(2, 9), st.integers(1, 50)), st.integers(0, 5000))
    def test_cover_each_chunk_once(self, layout: Layout, chunks: int) -> None:
        covered = [r.start + i for r in layout.rounds(chunks) for i in range(r.chunks)]
        assert covered == list(range(chunks))
        assert all(0 < r.chunks <= layout.capacity_chunks for r in layout.rounds(chunks))

    def test_empty_message_has_none(self) -> None:
        assert list(Layout(8, 4).rounds(0)) == []

    def test_one_round_up_to_the_capacity(self) -> None:
        layout = Layout.for_capacity(8, 64 * 7168 * 2)
        assert [r.chunks for r in layout.rounds(64 * 896)] == [64 * 896]
        assert [r.chunks for r in layout.rounds(64 * 896 + 1)] == [64 * 896, 1]


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
class TestFormats:
    def test_sentinel_is_minus_zero_in_every_element(self, name: str) -> None:
        f, dtype = FORMATS[name], np.dtype(name)
        bits = np.array([-0.0], dtype).view(f"u{dtype.itemsize}")[0]
        word = np.full(protocol.WORD_BYTES // dtype.itemsize, -0.0, dtype).view("<u4")[0]
        assert (f.itemsize, f.negative_zero, f.sentinel) == (dtype.itemsize, bits, word)

    def test_nan_is_the_canonical_one(self, name: str) -> None:
        """NVIDIA's canonical NaN: positive, every exponent and mantissa bit set."""
        f = FORMATS[name]
        assert f.nan == (1 << (8 * f.itemsize - 1)) - 1
        assert np.isnan(np.array([f.nan], f"u{f.itemsize}").view(name)[0])

    @given(elements=st.integers(0, 1 << 40))
    def test_chunks_hold_the_elements(self, name: str, elements: int) -> None:
        f = FORMATS[name]
        assert f.chunk * f.itemsize == CHUNK_BYTES
        assert f.chunks(elements) * f.chunk >= elements > (f.chunks(elements) - 1) * f.chunk


def test_formats_are_these_three() -> None:
    assert set(FORMATS) == {"bfloat16", "float16", "float32"}


class TestGrid:
    @given(chunk_counts, st.integers(1, 64), st.integers(1, 200))
    def test_bounded_and_pure(self, chunks: int, sharing: int, sms: int) -> None:
        """All grids in flight of all ranks on the GPU are resident at once; same arguments, same answer."""
        ctas_resident = sms * protocol.CTAS_PER_SM
        if protocol.GRIDS_IN_FLIGHT * sharing > ctas_resident:
            with pytest.raises(ValueError, match=rf"ranks_on_device: {sharing} ranks .*{sms} SMs"):
                protocol.grid(chunks, sharing, sms)
            return
        ctas = protocol.grid(chunks, sharing, sms)
        assert ctas >= 1
        assert ctas * protocol.GRIDS_IN_FLIGHT * sharing <= ctas_resident
        assert (ctas - 1) * protocol.THREADS < chunks
        assert ctas == protocol.grid(chunks, sharing, sms)

    @given(chunk_counts, chunk_counts, st.integers(1, 16), st.integers(8, 200))
    def test_more_chunks_never_fewer_ctas(self, a: int, b: int, sharing: int, sms: int) -> None:
        small, large = sorted((a, b))
        assert protocol.grid(small, sharing, sms) <= protocol.grid(large, sharing, sms)

    def test_ignores_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Eight ranks whose machines differ in everything undeclared launch the same grid."""
        plans = set()
        for rank in range(8):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(rank))
            monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", f"0.{rank + 1}")
            monkeypatch.setenv("JAX_TWOSHOT_TIMEOUT", str(rank + 1))
            monkeypatch.setenv("JAX_TWOSHOT_MULTICAST", str(rank % 2))
            plans.add(protocol.grid(16 * 896, 1, 132))
        assert len(plans) == 1


class TestMirror:
    """`ffi/protocol.h`, through the extension."""

    def test_constants(self) -> None:
        constants = _ffi.protocol_constants()
        for name in ("CHUNK_BYTES", "WORD_BYTES", "MIN_RANKS", "MAX_RANKS", "GENERATIONS"):
            assert constants[name] == getattr(protocol, name), name

    @given(small_layouts, st.data())
    def test_offsets(self, layout: Layout, data: st.DataObject) -> None:
        self.check_offsets(layout, data)

    @given(layouts, st.data())
    def test_offsets_of_any_size(self, layout: Layout, data: st.DataObject) -> None:
        self.check_offsets(layout, data)

    def check_offsets(self, layout: Layout, data: st.DataObject) -> None:
        generation = data.draw(st.integers(0, layout.generations - 1))
        slot = data.draw(st.integers(0, layout.tp - 1))
        chunk = data.draw(st.integers(0, layout.slot_chunks - 1))
        assert _ffi.layout_offset(
            layout.tp, layout.slot_chunks, layout.generations, generation, slot, chunk
        ) == (
            layout.recv_offset(generation, slot, chunk),
            layout.gather_offset(generation, slot * layout.slot_chunks + chunk),
        )
