"""Every line of tests/promises.md and of the table in SECURITY.md names tests that exist.

  promises_test.py SOURCE_DIR

Tests are written Suite.Name, as GoogleTest prints them, script.Class.test for Python's, or as the name of a test program or
script.
"""

import pathlib
import re
import sys

TEST = re.compile(r"^(?:TYPED_)?TEST(?:_P|_F)?\(\s*(\w+),\s*(\w+)\s*\)", re.MULTILINE)
PYTHON_TEST = re.compile(r"^class (\w+)|^    def (test_\w+)", re.MULTILINE)
NAMED = re.compile(r"`([A-Z]\w+\.[A-Z]\w+|\w+_test(?:\.py|\.\w+\.test_\w+)?)`")


def tests_of(script):
    """script.Class.test of each."""
    suite = None
    for class_name, test in PYTHON_TEST.findall(script.read_text()):
        suite = class_name or suite
        if test:
            yield f"{script.stem}.{suite}.{test}"


def existing(tests):
    names = {f"{suite}.{name}" for source in tests.rglob("*.cpp") for suite, name in TEST.findall(source.read_text())}
    for script in tests.rglob("*_test.py"):
        names |= {script.name, *tests_of(script)}
    lists = "".join(file.read_text() for file in tests.rglob("CMakeLists.txt"))
    return names | set(re.findall(r"smp_add_test\((\w+)", lists))


def main():
    source = pathlib.Path(sys.argv[1])
    known = existing(source / "tests")
    for page, least in ("tests/promises.md", 20), ("SECURITY.md", 5):
        promises = [line for line in (source / page).read_text().splitlines() if line.startswith("| ")]
        promises = [line for line in promises if not re.match(r"\| (Promise|Number|-)", line)]
        assert len(promises) > least, f"{page}: expected rows of promises, got {len(promises)}"
        for line in promises:
            tests = NAMED.findall(line.rsplit("|", 2)[1])
            assert tests, f"{page}: no test in the last column of: {line}"
            for test in tests:
                assert test in known, f"{page}: no test {test}, named in: {line}"


main()
