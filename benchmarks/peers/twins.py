"""Whether models.py and models.cpp hold the same models: from the same weights and random numbers, the same bits.

python twins.py BUILD/bin MODEL...
"""
import pathlib
import subprocess
import sys
import tempfile

import torch
from torch import nn

from models import make

SEED = 7  # of the dropouts, as in twin.cpp


def differences(binaries, name):
    """What differs between the two sides of a model: of its loss and its parameters' gradients, one line each."""
    layers, x, y, loss_of = make(name)
    parameters = dict(nn.Sequential(*layers).named_parameters())
    with tempfile.TemporaryDirectory() as folder:
        given, made = pathlib.Path(folder, "given"), pathlib.Path(folder, "made")
        torch.save([*(parameter.detach() for parameter in parameters.values()), x, y], given)
        subprocess.run([pathlib.Path(binaries, "smp_peer_twin"), name, given, made], check=True)
        found = torch.load(made)
    torch.manual_seed(SEED)
    loss = loss_of(nn.Sequential(*layers)(x), y)
    loss.backward()
    wanted = {"the loss": loss.detach(), **{f"the gradient of {key}": value.grad for key, value in parameters.items()}}
    return [f"{name}: {what} differs by {(a - b).abs().max():.3g}, of {a.abs().max():.3g}"
            for (what, a), b in zip(wanted.items(), found, strict=True) if not torch.equal(a, b)]


def main():
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        lines = differences(sys.argv[1], name)
        if lines:
            raise SystemExit("\n".join(["twins.py: expected models.cpp to compute what models.py does", *lines]))
        print(f"{name}: the same on both sides", flush=True)


if __name__ == "__main__":
    main()
