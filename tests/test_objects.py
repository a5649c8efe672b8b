# SPDX-License-Identifier: Apache-2.0
"""Python values as bytes and back."""

import collections
import math

import ml_dtypes
import numpy as np
import pytest

from keras_hpc.job.objects import decode, encode


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        2**70,
        -1.5,
        "naïve \n",
        b"\x00\xff",
        3 - 2j,
        [],
        (),
        {},
        [1, (2, [3.0, ()]), {"a": {"": 1, "b": (b"x", b"yz")}}],
        {1: "a", (2, "b"): None, None: [True], "": "empty", 2.5: 1j},
    ],
    ids=str,
)
def test_values_come_back_as_they_were(value):
    back = decode(encode(value))
    assert back == value
    assert repr(back) == repr(value)


def test_arrays_come_back_as_they_were():
    arrays = [
        np.arange(6).astype(dtype).reshape(2, 3).T
        for dtype in ("float16", "bool", "uint64", ">i4", "complex128", ml_dtypes.bfloat16)
    ]
    arrays += [np.array(["a", "bcd"]), np.array(3.0), np.empty((0, 2)), np.array("2020-01-01", "datetime64[D]")]
    for array, back in zip(arrays, decode(encode(arrays)), strict=True):
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)
        assert back.flags.writeable
    number = decode(encode(np.float32(0.1)))
    assert number == np.float32(0.1)
    assert type(number) is np.float32
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "value of type object"),
        ([1, {"a": {2}}], r"value\[1\]\['a'\] of type set"),
        ({frozenset(): 1}, "a key of value of type frozenset"),
        (np.array([None]), "value of dtype object"),
        (np.zeros(2, [("x", "f4")]), "of dtype"),
    ],
)
def test_what_is_no_data_is_refused(value, text):
    with pytest.raises(TypeError, match=f"Received: .*{text}"):
        encode(value)


def test_kinds_of_dictionaries_and_tuples_become_plain_ones():
    pair = collections.namedtuple("pair", "x y")(1, 2)
    back = decode(encode(collections.OrderedDict(a=pair)))
    assert back == {"a": (1, 2)}
    assert type(back["a"]) is tuple
