"""Runs the shell blocks of the pages, and holds their other blocks against what they show.

  pages_test.py SOURCE_DIR BIN_DIR HAVE_MPI PAGE

Every block of PAGE must be of a kind that some test covers: python blocks run in tests/python/page_test.py, that of README.md in
readme_program_test.py; cpp blocks are compiled by other tests of this folder, of the pages that extract_blocks.py takes them from,
and those of examples.md stand in a source of examples/, those of from_plain_loop.md in the tutorial, those of walk.md, py as well, in
the sources that it names (walk_test.py); all others here. make commands are checked against `make help`, all other commands run, in
one folder for the whole page. A text block right under commands is what they print: its lines, in their order, "..." for anything,
numbers with a decimal point to within 3 %. Commands that end with "# fails" must.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

from extract_blocks import BLOCK, blocks_of

SCHEDULE_ROW = re.compile(r"^(stage|rank) \d+ \|( \d*[FB]\d+)+$")
# What extract_blocks.py takes, by page: the cpp blocks that hold this text.
EXTRACTED = {"README.md": "int main", "quickstart.md": "", "capture.md": "", "backward.md": "", "refusals.md": "",
             "optimizers.md": "", "placement.md": "int main", "communication.md": "int main", "steps.md": "int main",
             "state.md": "", "reliability.md": "", "from_ddp.md": "", "data_parallel.md": "", "automatic.md": "",
             "partitioning.md": "", "schedules.md": "", "tape.md": "",
             "measured_costs.md": "", "timeline.md": "", "tutorial.md": "// tutorial",
             "delayed_initialization.md": "", "gpu.md": "", "recomputation.md": ""}
# Pages with texts that other tests compare: those of errors, and of ranks that hang (failure_test.py).
WITH_TEXTS = ("backward.md", "refusals.md", "tape.md", "measured_costs.md", "reliability.md")
NUMBER = re.compile(r"\d+\.\d+")
TOLERANCE = 0.03
PATH = re.compile(r"\b(?:[\w.]+/)+(?:[\w.*]+)?")


def check_make(source, line):
    listed = subprocess.run(["make", "-C", source, "help"], check=True, capture_output=True, text=True).stdout
    target = line.split()[1]
    assert target == "help" or f"make {target} " in listed, f"`{line}`: make help does not list {target}"


def lacks_digits(line, binaries):
    """mnist without --data needs what the build prepares where there is scikit-learn; mnist_test says so when it is missing."""
    wants_them = re.search(r"bin/mnist\b(?!.*--data)", line)
    return wants_them and not (pathlib.Path(binaries).parent / "digits/t10k-labels-idx1-ubyte").exists()


def run_line(line, binaries, have_mpi, folder):
    if (re.search(r"\bsmp run\b", line) and not have_mpi) or lacks_digits(line, binaries):
        return
    command = line.replace("build/release/bin", str(binaries))
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"`{line}` ended with {done.returncode}:\n{done.stdout}{done.stderr}"


def check_shell(code, source, binaries, have_mpi, folder):
    for line in code.splitlines():
        line = line.split(" #")[0].strip()
        if line.startswith("make "):
            check_make(source, line)
        elif line:
            run_line(line, binaries, have_mpi, folder)


def is_shown(expected, line):
    """Does `line` hold `expected`, but for "...", spaces and the last digits of numbers?"""
    pattern = re.sub(r"\d+\\\.\d+", lambda _: r"(\d+\.\d+)", re.escape(expected.strip()).replace(r"\.\.\.", ".*"))
    found = re.search(re.sub(r"(\\ )+", lambda _: r"\s+", pattern), line)
    numbers = NUMBER.findall(expected)
    return found and all(abs(float(a) - float(b)) <= TOLERANCE * abs(float(b)) for a, b in zip(found.groups(), numbers))


def check_printed(code, expected, binaries, have_mpi, folder):
    """The commands of a shell block print the lines of the text block under it."""
    if re.search(r"\bsmp run\b", code) and not have_mpi:
        return
    command = code.replace("build/release/bin", str(binaries))
    done = subprocess.run(command, shell=True, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert (done.returncode != 0) == code.rstrip().endswith("# fails"), f"`{code}` ended with {done.returncode}:\n{done.stdout}"
    lines = iter(done.stdout.splitlines())
    for line in expected.splitlines():
        assert any(is_shown(line, printed) for printed in lines), f"`{code}` lacks or misplaces:\n{line}\nIt printed:\n{done.stdout}"


def check_tree(code, source):
    for path in PATH.findall(code):
        assert (pathlib.Path(source) / path).exists(), f"the picture names {path}, which does not exist"


# Pages whose cpp blocks are excerpts, and of what.
EXCERPTS = {"examples.md": "examples/**/*.cpp", "from_plain_loop.md": "docs/tutorial.md"}


def check_excerpt(code, source, files):
    """Its lines stand in one of the files, one after the other, indented or not, with or without the comment at their end."""

    def bare(text):
        return "\n".join(line.split(" //")[0].strip() for line in text.strip().splitlines())

    found = any(bare(code) in bare(file.read_text()) for file in pathlib.Path(source).glob(files))
    assert found, f"none of {files} holds these lines:\n{code}"


def check_block(language, code, page, source, binaries, have_mpi, folder):
    if language == "sh":
        check_shell(code, source, binaries, have_mpi, folder)
    elif language == "cmake":
        consumer = pathlib.Path(source) / "tests/consumers/find_package/CMakeLists.txt"
        assert code == consumer.read_text(), f"expected the project of {consumer}"
    elif language == "text" and all(SCHEDULE_ROW.match(row) for row in code.splitlines()):
        pass  # compared with the generator by schedule_pages_test
    elif language in ("cpp", "py") and page.name == "walk.md":
        pass  # compared with the sources by walk_test.py
    elif language == "cpp" and page.name in EXCERPTS:
        check_excerpt(code, source, EXCERPTS[page.name])
    elif language == "python":
        is_run = page.parent.name == "docs" or page.name == "README.md"
        assert is_run, f"expected README.md or a page in docs/, whose python blocks tests run, got {page}"
    elif language == "text" and page.name == "architecture.md":
        check_tree(code, source)
    else:
        is_extracted = page.name in EXTRACTED and EXTRACTED[page.name] in code
        covered = (language == "cpp" and is_extracted) or (language == "text" and page.name in WITH_TEXTS)
        assert covered, f"no test covers this {language or 'plain'} block of {page.name}:\n{code}"


def shell_and_printed(text):
    """The numbers of the text blocks that stand right under shell blocks."""
    found = list(BLOCK.finditer(text))
    return {number for number, (one, other) in enumerate(zip(found, found[1:]), 1)
            if (one[1], other[1]) == ("sh", "text") and not text[one.end() : other.start()].strip()}


def main():
    source, binaries, have_mpi, page = sys.argv[1:]
    page = pathlib.Path(source) / page
    os.environ["PATH"] = f"{binaries}:{os.environ['PATH']}"
    text = page.read_text()
    blocks = blocks_of(text)
    assert blocks, f"expected code blocks in {page}"
    have_mpi = have_mpi in ("1", "ON", "TRUE")
    printed = shell_and_printed(text)
    with tempfile.TemporaryDirectory() as folder:
        for number, (language, code, _) in enumerate(blocks):
            if number in printed:
                check_printed(blocks[number - 1][1], code, binaries, have_mpi, folder)
            elif number + 1 not in printed:
                check_block(language, code, page, source, binaries, have_mpi, folder)
    links = re.findall(r"\]\((?!http)([^)#]+)", BLOCK.sub("", text))
    for link in links:
        assert (page.parent / link).exists(), f"{page.name} links to {link}, which does not exist"
    print(f"{page.name}: {len(blocks)} blocks, {len(links)} links")


if __name__ == "__main__":
    main()
