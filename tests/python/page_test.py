"""The Python blocks of each page run, one after the other as one module, on one process and on two.

They find the names below. A text block right under one is the end of the error that it raises.
"""

import os
import pathlib
import sys
import tempfile
import types
import unittest

import support
import torch
import torch._dynamo  # which the first optimizer loads, here once for all forks
import torch.nn.functional as F
from torch import nn

import smdistributed.modelparallel.torch as smp

SOURCE = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(SOURCE / "tests" / "docs"))
from extract_blocks import BLOCK  # noqa: E402


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)


def names_of(page):
    """What every page may use, in a module where pickle finds what the page defines."""
    module = types.ModuleType(f"{page.stem}_page")
    sys.modules[module.__name__] = module
    loader = [(torch.randn(8, 8), torch.randint(8, (8,))) for _ in range(3)]
    vars(module).update(torch=torch, nn=nn, F=F, smp=smp, Net=Net, loader=loader)
    return vars(module)


def run_block(block, line, page, names, expected):
    code = compile("\n" * line + block, str(page), "exec")  # so that a traceback has lines of the page
    if expected is None:
        exec(code, names)
        return
    try:
        exec(code, names)
    except Exception as error:
        text = str(error).partition("\n\nAt:\n")[0]  # other ranks are also told where it was raised
        assert text.endswith(expected), f"line {line}: expected an error that ends with\n{expected}\ngot\n{error}"
    else:
        raise AssertionError(f"line {line}: expected an error, got none: {expected}")


def run_page(page, folder):
    os.chdir(folder)
    text, names = page.read_text(), names_of(page)
    blocks = list(BLOCK.finditer(text))
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        is_refused = after and after[1] == "text" and not text[block.end() : after.start()].strip()
        if block[1] == "python":
            run_block(block[2], text[: block.start(2)].count("\n"), page, names, after[2].strip() if is_refused else None)


class Pages(unittest.TestCase):
    def test_run_on_one_and_two_processes(self):
        pages = [page for page in sorted((SOURCE / "docs").glob("*.md")) if "\n```python\n" in page.read_text()]
        self.assertIn("from_sagemaker.md", [page.name for page in pages])
        for page in pages:
            for count in (1, 2):
                with self.subTest(page=page.name, processes=count), tempfile.TemporaryDirectory() as folder:
                    errors = support.fork_ranks(count, lambda page=page, folder=folder: run_page(page, folder), {})
                    self.assertEqual(errors, "")


if __name__ == "__main__":
    unittest.main()
