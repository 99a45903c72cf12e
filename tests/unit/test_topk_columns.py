# SPDX-License-Identifier: Apache-2.0
"""The encoding of top-K log-probs, byte by byte, at every width of an id."""

import numpy as np
import pytest

from megatron.rl.rollout.errors import RolloutDataError
from megatron.rl.rollout.topk_columns import TopKColumns

QWEN3_VOCAB = 151_936


def test_the_bytes_of_one_token_worked_by_hand():
    # 65541 = 1 * 2**16 + 5, 131079 = 2 * 2**16 + 7, 151935 = 2 * 2**16 + 0x517f.
    ids = np.array([[65541, 3, 131079, 151935, -1]])
    # As float32: 0xbdcccccd, 0xbf800000, 0xbf800080 (half-way, even below), 0xbf800180 (half-way,
    # odd below), 0xff800000.
    bits = np.array([[0xBDCCCCCD, 0xBF800000, 0xBF800080, 0xBF800180, 0xFF800000]], dtype=np.uint32)
    columns = TopKColumns.encode(ids, bits.view(np.float32), QWEN3_VOCAB)
    np.testing.assert_array_equal(columns.ids_low, [[5, 3, 7, 0x517F, 0]])
    # Four 2-bit parts a byte, the first in the lowest bits: 1 + 0 * 4 + 2 * 16 + 2 * 64.
    np.testing.assert_array_equal(columns.ids_high, [[161, 0]])
    assert columns.log_probs.tobytes().hex(" ", 3) == "cdccbd 0080bf 0080bf 0280bf 0080ff"
    decoded_ids, decoded = columns.decode()
    np.testing.assert_array_equal(decoded_ids, ids)
    kept = np.array([[0xBDCCCD00, 0xBF800000, 0xBF800000, 0xBF800200, 0xFF800000]], dtype=np.uint32)
    np.testing.assert_array_equal(decoded.view(np.uint32), kept)
    assert (decoded_ids.dtype, decoded.dtype) == (np.int32, np.float32)


def random_entries(n: int, k: int, vocab_size: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab_size, (n, k))
    if ids.size:
        ids[0, 0], ids[-1, -1] = vocab_size - 1, 0
    log_probs = -np.exp(rng.normal(0, 4, (n, k))).astype(np.float32)
    absent = rng.random((n, k)) < 0.1
    return np.where(absent, -1, ids), np.where(absent, -np.inf, log_probs).astype(np.float32)


@pytest.mark.parametrize(
    ("vocab_size", "bytes_of_high"),
    [(2, 0), (2**16, 0), (2**16 + 1, 5), (2**18, 5), (2**18 + 1, 20), (2**24, 20)],
)
@pytest.mark.parametrize("precision", ["fp24", "float32"])
def test_ids_survive_at_every_vocabulary_size(vocab_size, bytes_of_high, precision):
    ids, log_probs = random_entries(50, 20, vocab_size)
    columns = TopKColumns.encode(ids, log_probs, vocab_size, precision)
    columns.check_shapes()
    columns.check_values(vocab_size)
    np.testing.assert_array_equal(columns.decode()[0], ids)
    assert columns.ids_high.shape == (50, bytes_of_high)
    assert columns.precision == precision
    assert columns.nbytes == 50 * (40 + bytes_of_high + (60 if precision == "fp24" else 80))


@pytest.mark.parametrize("k", [0, 1, 3, 4, 5, 20, 21])
@pytest.mark.parametrize("vocab_size", [100, QWEN3_VOCAB, 2**18 + 1])
def test_every_width_round_trips(k, vocab_size):
    ids, log_probs = random_entries(7, k, vocab_size)
    for precision in ("fp24", "float32"):
        columns = TopKColumns.encode(ids, log_probs, vocab_size, precision)
        columns.check_shapes()
        assert (len(columns), columns.k) == (7, k)
        np.testing.assert_array_equal(columns.decode()[0], ids)
        empty = TopKColumns.empty(vocab_size, k, precision)
        empty.check_shapes()
        assert (len(empty), empty.k) == (0, k)
        np.testing.assert_array_equal(TopKColumns.concatenate([empty, columns]).decode()[0], ids)


def test_float32_is_kept_bit_for_bit():
    ids, log_probs = random_entries(100, 20, QWEN3_VOCAB)
    log_probs[0, :3] = [-0.0, 0.0, -1e-40]
    ids[0, :3] = [1, 2, 3]
    columns = TopKColumns.encode(ids, log_probs, QWEN3_VOCAB, "float32")
    assert columns.decode()[1].tobytes() == log_probs.tobytes()


def test_fp24_rounds_to_sixteen_bits_to_nearest_even():
    rng = np.random.default_rng(1)
    values = -np.exp(rng.normal(0, 6, 100_000)).astype(np.float32)[:, None]
    decoded = TopKColumns.encode(np.zeros((100_000, 1), int), values, 10).decode()[1]
    mantissa, exponent = np.frexp(values.astype(np.float64))
    expected = np.ldexp(np.rint(mantissa * 2**16) / 2**16, exponent)
    np.testing.assert_array_equal(decoded, expected)
    assert (np.abs(decoded.astype(np.float64) - values) <= 2.0**-16 * np.abs(values)).all()


def test_what_was_rounded_once_stays_as_it_is():
    ids, log_probs = random_entries(1000, 20, QWEN3_VOCAB)
    once = TopKColumns.encode(ids, log_probs, QWEN3_VOCAB)
    again = TopKColumns.encode(*once.decode(), QWEN3_VOCAB)
    for name, array in once.arrays().items():
        assert array.tobytes() == again.arrays()[name].tobytes()


def test_order_and_ties_survive_rounding():
    values = -np.sort(np.exp(np.random.default_rng(2).normal(0, 3, (500, 20))), axis=1)
    ids = np.tile(np.arange(20), (500, 1))
    decoded = TopKColumns.encode(ids, values, 100).decode()[1]
    assert (np.diff(decoded, axis=1) <= 0).all()


def test_rows_are_picked_and_joined():
    ids, log_probs = random_entries(10, 5, QWEN3_VOCAB)
    columns = TopKColumns.encode(ids, log_probs, QWEN3_VOCAB, "float32")
    order = np.array([7, 0, 7])
    np.testing.assert_array_equal(columns.take(order).decode()[0], ids[order])
    np.testing.assert_array_equal(columns.decode(order)[1], log_probs[order])
    joined = TopKColumns.concatenate([columns.take(slice(0, 4)), columns.take(slice(4, 10))])
    assert joined.decode()[1].tobytes() == log_probs.tobytes()
    again = TopKColumns.from_arrays(columns.arrays("x_"), "x_")
    np.testing.assert_array_equal(again.decode()[0], ids)


@pytest.mark.parametrize(
    ("ids", "log_probs", "message"),
    [
        ([[1]], [[np.nan]], "NaN"),
        ([[10]], [[-1.0]], "outside the vocabulary"),
        ([[-2]], [[-1.0]], "outside the vocabulary"),
        ([[-1]], [[-1.0]], "only one of"),
        ([[1]], [[-np.inf]], "only one of"),
        ([[1, 2]], [[-1.0]], "expected one"),
        ([1], [-1.0], "expected one"),
    ],
)
def test_impossible_entries_are_refused(ids, log_probs, message):
    with pytest.raises(RolloutDataError, match=message):
        TopKColumns.encode(np.array(ids), np.array(log_probs), 10)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ids_low", lambda a: a.astype(np.int32)),
        ("ids_low", lambda a: a[:-1]),
        ("ids_low", lambda a: a[0]),
        ("ids_high", lambda a: a[:, :1]),
        ("ids_high", lambda a: a[:-1]),
        ("log_probs", lambda a: a[:, :-1]),
        ("log_probs", lambda a: a.astype(np.float64)),
    ],
)
def test_arrays_that_do_not_fit_each_other_are_refused(name, change):
    ids, log_probs = random_entries(5, 20, QWEN3_VOCAB)
    arrays = TopKColumns.encode(ids, log_probs, QWEN3_VOCAB).arrays("")
    with pytest.raises(RolloutDataError, match="do not fit"):
        TopKColumns.from_arrays({**arrays, name: change(arrays[name])}, "").check_shapes()
