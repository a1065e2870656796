"""Runs the Python blocks of a page, one after the other in one process, in the current folder; on all ranks of a world.

  python_page.py PAGE

They find the names below. A text block right under one is the end of the error that it raises. CMake's list of these pages is
in tests/python.
"""

import pathlib
import sys

import torch
import torch.nn.functional as F
from extract_blocks import BLOCK
from torch import nn

import smdistributed.modelparallel.torch as smp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)


def names_of(page):
    """What every page may use."""
    loader = [(torch.randn(8, 8), torch.randint(8, (8,))) for _ in range(3)]
    return {"__name__": page.stem, "torch": torch, "nn": nn, "F": F, "smp": smp, "Net": Net, "loader": loader}


def run(block, line, page, names, expected):
    code = compile("\n" * line + block, str(page), "exec")  # so that a traceback has lines of the page
    if expected is None:
        exec(code, names)
        return
    try:
        exec(code, names)
    except Exception as error:
        assert str(error).endswith(expected), f"line {line}: expected an error that ends with\n{expected}\ngot\n{error}"
    else:
        raise AssertionError(f"line {line}: expected an error, got none: {expected}")


def main():
    page = pathlib.Path(sys.argv[1])
    text = page.read_text()
    names = names_of(page)
    blocks = list(BLOCK.finditer(text))
    assert any(block[1] == "python" for block in blocks), f"expected python blocks in {page}"
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        is_refused = after and after[1] == "text" and not text[block.end() : after.start()].strip()
        if block[1] == "python":
            run(block[2], text[: block.start(2)].count("\n"), page, names, after[2].strip() if is_refused else None)


if __name__ == "__main__":
    main()
