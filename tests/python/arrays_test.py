"""numpy's arrays in files: read back as they were, and never with pointers that a file has made up."""

import argparse
import collections
import pickle
import tempfile
import unittest

import numpy
import support
import torch

import smdistributed.modelparallel.torch as smp


class Call:
    """What is in the file is a call of `function`, and a state for what it returns."""

    def __init__(self, function, *arguments, state=None):
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.reduced


def loaded(value):
    with tempfile.TemporaryDirectory() as folder:
        smp.save(value, f"{folder}/x", partial=False)
        return smp.load(f"{folder}/x", partial=False)


class Arrays(unittest.TestCase):
    def test_are_read_back(self):
        numbers = numpy.arange(24).reshape(2, 3, 4)
        kinds = ["?", "i1", "u8", ">i4", "f2", "<f4", ">f8", "c16"]
        arrays = [layout(numbers.astype(kind)) for kind in kinds for layout in (numpy.ascontiguousarray, numpy.asfortranarray)]
        arrays += [numpy.float32(0.5), numpy.bool_(True), numpy.zeros((0, 3)), numpy.array(7), numpy.random.get_state()[1]]
        for array, found in zip(arrays, loaded(arrays), strict=True):
            numpy.testing.assert_array_equal(found, array)
            self.assertEqual((type(found), found.dtype, found.shape), (type(array), array.dtype, array.shape))

    def test_are_found_in_containers(self):
        array = numpy.arange(3.0)
        content = {"t": (1, [array, (array,)]), "n": argparse.Namespace(a=array), "o": collections.OrderedDict(a=array)}
        content |= {"d": array.dtype, "itself": content}
        found = loaded(content)
        places = [found["t"][1][0], found["t"][1][1][0], found["n"].a, found["o"]["a"]]
        for place in places:
            self.assertIs(place, places[0])
            numpy.testing.assert_array_equal(place, array)
        self.assertEqual(found["d"], array.dtype)
        self.assertIs(found["itself"], found)
        places[0][0] = 5  # memory of its own

    def test_that_are_forged_are_refused(self):
        core = numpy._core.multiarray if hasattr(numpy, "_core") else numpy.core.multiarray
        address, of_objects = b"A" * 8, Call(numpy.dtype, "O")

        def number(*state):
            return Call(numpy.dtype, "f8", False, True, state=state)

        def array(of, data=address, shape=(1,)):
            return Call(core._reconstruct, numpy.ndarray, (0,), b"b", state=(1, shape, of, False, data))

        forged = [
            Call(numpy.ndarray, (1,), of_objects, address),
            Call(numpy.ndarray, (1,), Call(numpy.dtype, [("a", "O")]), address),
            Call(numpy.ndarray),
            array(of_objects),
            array(number(3, "<", (of_objects, (1,)), None, None, 8, 8, 0)),
            array(number(3, "<", None, ("a",), {"a": (of_objects, 0)}, 8, 8, 0)),
            array(number(3, "<", None, None, None, -1, -1, 1)),
            array(number(3, "<", None, None, None, -1, -1, 0), shape=(2,)),
            array(number(3, "<", None, None, None, -1, -1, 0), shape=(-1, -1)),
            array(number(3, "<", None, None, None, -1, -1, 0), [1.0]),
            Call(core.scalar, number(3, "<", None, None, None, -1, -1, 0), b"1234"),
        ]
        for each in forged:
            with self.subTest(each.reduced), self.assertRaises((pickle.UnpicklingError, ValueError, TypeError)):
                repr(loaded([each]))


def setUpModule():
    torch.manual_seed(0)
    smp.init({"log_level": "off"})


if __name__ == "__main__":
    support.main()
