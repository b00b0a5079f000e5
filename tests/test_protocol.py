"""`protocol.py`, and its mirror `ffi/protocol.h`: layout, ownership, rounds, formats, launch plan."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (gives NumPy the name bfloat16)
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_twoshot import _ffi, protocol
from jax_twoshot.protocol import (
    ALGORITHMS,
    CHUNK_BYTES,
    FORMATS,
    GENERATIONS,
    GENERATIONS_DEFERRED,
    MAX_RANKS,
    Layout,
    Round,
)

ranks = st.integers(2, MAX_RANKS)
generations = st.sampled_from((GENERATIONS, GENERATIONS_DEFERRED))
small_layouts = st.builds(Layout, st.integers(2, 9), st.integers(1, 12), generations)
layouts = st.builds(Layout, ranks, st.integers(1, 1 << 40), generations)
chunk_counts = st.integers(1, 1 << 40)
choices = st.sampled_from(("auto", *ALGORITHMS))


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

    @given(ranks, st.integers(1, 1 << 24), st.integers(0, 1 << 24))
    def test_for_capacity_makes_slots_for_one_shot(self, tp: int, capacity: int, one_shot: int) -> None:
        """The least slots that hold both a share of the capacity and a one-shot message within it."""
        layout = Layout.for_capacity(tp, capacity, one_shot_bytes=one_shot)
        two_shot, needed = Layout.for_capacity(tp, capacity), min(one_shot, capacity)
        assert layout.slot_chunks == max(two_shot.slot_chunks, protocol.ceil_div(needed, CHUNK_BYTES))

    @pytest.mark.parametrize(
        ("tp", "megabytes"), [(2, 7.3), (3, 5.5), (4, 7.3), (5, 3.7), (6, 3.7), (8, 3.7), (16, 3.7)]
    )
    def test_memory_that_the_docstring_states(self, tp: int, megabytes: float) -> None:
        most = protocol.most_one_shot_bytes(tp)
        assert round(Layout.for_capacity(tp, 64 * 14336, one_shot_bytes=most).bytes / 1e6, 1) == megabytes

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
    @given(st.builds(Layout, st.integers(2, 9), st.integers(1, 50)), st.integers(0, 5000), choices)
    def test_cover_each_chunk_once_and_fit(self, layout: Layout, chunks: int, asked: str) -> None:
        done = list(protocol.rounds(layout, chunks, asked))
        assert [r.start + i for r in done for i in range(r.chunks)] == list(range(chunks))
        most = {"two_shot": layout.capacity_chunks, "one_shot": layout.slot_chunks}
        assert all(0 < r.chunks <= most[r.algorithm] for r in done)
        assert asked == "auto" or {r.algorithm for r in done} <= {asked}

    @pytest.mark.parametrize("asked", ["auto", *ALGORITHMS])
    def test_empty_message_has_none(self, asked: str) -> None:
        assert list(protocol.rounds(Layout(8, 4), 0, asked)) == []

    def test_one_round_up_to_the_capacity(self) -> None:
        layout = Layout.for_capacity(8, 64 * 14336)
        whole = Round(0, 64 * 896, "two_shot")
        assert list(protocol.rounds(layout, 64 * 896, "two_shot")) == [whole]
        assert list(protocol.rounds(layout, 64 * 896 + 1, "two_shot")) == [whole, Round(64 * 896, 1, "two_shot")]

    def test_one_shot_takes_rounds_of_a_slot(self) -> None:
        assert list(protocol.rounds(Layout(4, 10), 25, "one_shot")) == [
            Round(0, 10, "one_shot"),
            Round(10, 10, "one_shot"),
            Round(20, 5, "one_shot"),
        ]

    def test_auto_is_two_shot_where_a_round_does_not_fit_a_slot(self) -> None:
        most = 11 * CHUNK_BYTES
        assert protocol.algorithm(11, most) == "one_shot"
        assert list(protocol.rounds(Layout(4, 10), 10, one_shot_bytes=most)) == [Round(0, 10, "one_shot")]
        assert list(protocol.rounds(Layout(4, 10), 11, one_shot_bytes=most)) == [Round(0, 11, "two_shot")]
        two, one = Round(0, 40, "two_shot"), Round(40, 1, "one_shot")
        assert list(protocol.rounds(Layout(4, 10), 41, one_shot_bytes=most)) == [two, one]


class TestAlgorithm:
    @pytest.mark.parametrize(
        ("tp", "sharing", "rows"),
        [
            *((2, 2, 64), (3, 3, 32), (4, 4, 32), (5, 5, 2), (8, 8, 2), (8, 2, 2), (16, 16, 0)),
            *((2, 1, 73), (4, 1, 9), (8, 1, 2), (9, 1, 0)),
        ],
    )
    def test_rows_of_7168_that_one_shot_sums(self, tp: int, sharing: int, rows: int) -> None:
        most = protocol.one_shot_bytes(tp, sharing, False)
        chosen = [protocol.algorithm(rows * 896, most) for rows in range(1, 129)]
        assert chosen == ["one_shot"] * rows + ["two_shot"] * (128 - rows)

    @given(st.integers(2, MAX_RANKS), st.integers(1, 8), st.booleans(), chunk_counts, chunk_counts)
    def test_smaller_messages_and_groups_are_no_less_one_shot(
        self, tp: int, sharing: int, multicast: bool, a: int, b: int
    ) -> None:
        small, large = sorted((a % 100000 + 1, b % 100000 + 1))
        most = protocol.one_shot_bytes(tp, sharing, multicast)
        if protocol.algorithm(large, most) == "one_shot":
            assert protocol.algorithm(small, most) == "one_shot"
            assert most <= protocol.one_shot_bytes(max(tp - 1, 2), sharing, multicast)

    @given(st.integers(2, MAX_RANKS), st.integers(1, 8), st.booleans())
    def test_a_workspace_has_slots_for_it(self, tp: int, sharing: int, multicast: bool) -> None:
        most = protocol.one_shot_bytes(tp, sharing, multicast)
        assert most <= protocol.most_one_shot_bytes(tp)
        layout = Layout.for_capacity(tp, 1 << 22, one_shot_bytes=protocol.most_one_shot_bytes(tp))
        chunks = most // CHUNK_BYTES
        expected = [Round(0, chunks, "one_shot")] if chunks else []
        assert list(protocol.rounds(layout, chunks, one_shot_bytes=most)) == expected


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
    @given(chunk_counts, st.integers(1, 64), st.integers(1, 200), st.booleans())
    def test_bounded_and_pure(self, chunks: int, sharing: int, sms: int, alone: bool) -> None:
        """All grids in flight of all ranks on the GPU are resident at once; same arguments, same answer."""
        # Ranks that share a GPU leave an SM free, unless they are alone there: CTAs go to the emptiest SM.
        waiting = sms * protocol.CTAS_PER_SM
        room = sms - 1 if sharing > 1 and not alone else waiting
        in_flight = sharing * (protocol.GRIDS_IN_FLIGHT if sharing > 1 and alone else 1)
        if in_flight > room:
            with pytest.raises(ValueError, match=rf"ranks_on_device: {sharing} ranks .*{sms} SMs"):
                protocol.grid(chunks, sharing, sms, alone)
            return
        ctas = protocol.grid(chunks, sharing, sms, alone)
        assert ctas >= 1
        assert ctas * in_flight <= room
        assert (ctas - 1) * protocol.THREADS < chunks
        assert ctas == protocol.grid(chunks, sharing, sms, alone) == _ffi.launch_grid(chunks, sharing, sms, alone)

    def test_a_peer_finds_an_sm_to_run_on(self) -> None:
        """The hangs that were seen: with 99 CTAs of 4 ranks, or 45 of 8, no SM had room for a peer's kernel."""
        assert protocol.grid(16 * 896, 4, 132) == 28
        assert protocol.grid(16 * 360, 8, 132) == 12
        assert protocol.grid(16 * 896, 1, 132) == 112
        assert protocol.grid(64 * 896, 1, 132) == 448
        assert protocol.most_ctas(1, 132, protocol.CTAS_PER_SM) == 528, "a third of the GPU stays free"
        assert protocol.grid(64 * 896, 8, 132, alone=True) == 45

    @given(chunk_counts, st.integers(1, 16), st.integers(40, 200))
    def test_as_many_batches_for_every_thread(self, chunks: int, sharing: int, sms: int) -> None:
        """No thread has more batches than it must have, and no CTA could be left out."""

        def batches(threads: int) -> int:
            each = protocol.ceil_div(chunks, threads)
            return each if each < 2 else protocol.ceil_div(each, protocol.CHUNKS_AT_ONCE) * protocol.CHUNKS_AT_ONCE

        fewest = batches(protocol.most_ctas(sharing, sms, protocol.CTAS_PER_SM) * protocol.THREADS)
        threads = protocol.grid(chunks, sharing, sms) * protocol.THREADS
        assert batches(threads) == fewest
        if threads > protocol.THREADS:
            assert batches(threads - protocol.THREADS) > fewest

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
        for name in ("CHUNK_BYTES", "WORD_BYTES", "MIN_RANKS", "MAX_RANKS", "GENERATIONS", "ALGORITHMS"):
            assert constants[name] == getattr(protocol, name), name

    @given(
        st.builds(Layout, ranks, st.integers(1, 1 << 17)),
        st.integers(1, 1 << 22),
        choices,
        st.integers(0, 1 << 26),
    )
    def test_next_round(self, layout: Layout, left: int, asked: str, most: int) -> None:
        first = next(protocol.rounds(layout, left, asked, most))
        assert _ffi.next_round(layout, left, asked, most) == (first.chunks, first.algorithm)

    @pytest.mark.parametrize("limit", [1, 2, 1000])
    def test_next_round_at_the_limit(self, limit: int) -> None:
        layout, most = Layout(4, 1 << 17), limit * CHUNK_BYTES
        assert _ffi.next_round(layout, limit + 1, "auto", most) == (limit + 1, "two_shot")
        assert _ffi.next_round(layout, limit, "auto", most) == (limit, "one_shot")
        assert _ffi.next_round(layout, 1, "auto", 0) == (1, "two_shot")

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
