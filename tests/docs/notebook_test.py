"""Runs the cells of a notebook in an empty folder; each must show what the stored one shows, in kind.

  notebook_test.py NOTEBOOK            the test
  notebook_test.py NOTEBOOK --store    runs it and stores what it showed
"""

import pathlib
import sys
import tempfile

import nbformat
from nbclient import NotebookClient


def kinds_of(cell):
    """What a cell shows: the types of its results and the names of its streams, without warnings."""
    return sorted(
        {each.get("name") or ",".join(sorted(each.data)) for each in cell.get("outputs", ()) if each.get("name") != "stderr"}
    )


def main():
    path = pathlib.Path(sys.argv[1])
    notebook = nbformat.read(path, as_version=4)
    stored = [(cell.source, kinds_of(cell)) for cell in notebook.cells]
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    if sys.argv[2:] == ["--store"]:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]  # paths of this machine
            cell.metadata.pop("execution", None)  # when it ran
        nbformat.write(notebook, path)
        return
    for (source, expected), cell in zip(stored, notebook.cells, strict=True):
        assert kinds_of(cell) == expected, f"{path.name}: expected {expected}, got {cell.get('outputs')} of\n{source}"


if __name__ == "__main__":
    main()
