"""Writes the handwritten digits that scikit-learn carries as the four IDX files of MNIST: 8 x 8 pixels,
1,437 images to learn from and 360 to test with.

  prepare_digits.py FOLDER [--if-possible]

--if-possible: without scikit-learn this says so and ends without an error, for builds that can do without.
"""

import argparse
import pathlib
import random
import struct
import sys

NUM_TRAIN = 1437
INK = 16  # the darkest value of the set


def write_idx(path, sizes, data):
    """Unsigned bytes; a reader never sees half a file."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(struct.pack(f">HBB{len(sizes)}I", 0, 8, len(sizes), *sizes) + data)
    part.replace(path)


def prepare(folder, images, labels):
    """Neighbours in the set come from one hand, so it is shuffled before it is cut; the same way every time."""
    order = list(range(len(images)))
    random.Random(0).shuffle(order)
    for split, chosen in (("train", order[:NUM_TRAIN]), ("t10k", order[NUM_TRAIN:])):
        pixels = bytes(round(value * 255 / INK) for i in chosen for row in images[i] for value in row)
        sizes = (len(chosen), len(images[0]), len(images[0][0]))
        write_idx(folder / f"{split}-images-idx3-ubyte", sizes, pixels)
        write_idx(folder / f"{split}-labels-idx1-ubyte", sizes[:1], bytes(int(labels[i]) for i in chosen))


def main():
    parser = argparse.ArgumentParser(description="Writes scikit-learn's digits as IDX files.")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--if-possible", action="store_true", help="no scikit-learn is no error")
    arguments = parser.parse_args()
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        print(f"digits: expected scikit-learn in {sys.executable}, got: {error}. Without it the mnist example has no data\n"
              f"digits: of its own: {sys.executable} -m pip install scikit-learn, or give mnist --data FOLDER",
              file=sys.stderr)
        sys.exit(0 if arguments.if_possible else 1)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    prepare(arguments.folder, digits.images.tolist(), digits.target.tolist())


if __name__ == "__main__":
    main()
