"""Plants small faults into the library, one at a time: does the test find it that should?

run.py [--here] BUILD [FAULT ...]     all without FAULT; names are those of the patches beside this file

Each patch says what it changes, in which room, which test of the short suite finds it, and, where that has not the name of its
program, what is to be built. All this happens in a copy of the tree and a build of its own, BUILD/faults, which stays; with
--here in this tree and in BUILD, from which the faults are taken out again. Ends with 1 where a fault is not found, does not
apply or does not compile, or where a test fails without one.
"""

import argparse
import collections
import filecmp
import os
import pathlib
import re
import shutil
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
LINE = re.compile(r"^(room|test|target): (.+)$", re.MULTILINE)


class Fault:
    def __init__(self, name):
        self.patch = FOLDER / f"{name}.patch"
        text = self.patch.read_text()
        self.name, self.what = name, text.split("\n", 1)[0]
        said = dict(LINE.findall(text.split("\n---", 1)[0]))
        self.room, self.test = said["room"], said["test"]
        self.target = said.get("target", self.test)


class Tree:
    def __init__(self, source, build):
        self.source, self.build = source, build

    def run(self, *command, limit_s=None):
        done = subprocess.run(command, cwd=self.source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
                              timeout=limit_s, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(self.source.parent)})
        return done.returncode, done.stdout

    def patch(self, fault, *options):
        return self.run("git", "apply", "--recount", "-C1", *options, str(fault.patch))

    def compile(self, *targets):
        return self.run("cmake", "--build", str(self.build), "--parallel", str(os.cpu_count()), "--target", *targets)

    def test(self, name):
        """ctest succeeds where there is no such test."""
        code, said = self.run("ctest", "--test-dir", str(self.build), "-R", f"^{name}$", "--output-on-failure")
        return code == 0 and "No tests were found" not in said, said


def copy_of_the_tree(copy):
    """What git tracks and what it would, with the times of files that have not changed."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True)
    files = {pathlib.Path(os.fsdecode(name)) for name in listed.stdout.split(b"\0") if name}
    for file in files:
        if not (ROOT / file).is_file():
            continue
        if not (copy / file).exists() or not filecmp.cmp(ROOT / file, copy / file, shallow=False):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, copy / file)


def configured_copy(build):
    """With the choices of BUILD."""
    tree = Tree(build / "faults", build / "faults/build/release")
    copy_of_the_tree(tree.source)
    cache = dict(re.findall(r"^(SMP_\w+):\w+=(.*)$", (build / "CMakeCache.txt").read_text(), re.MULTILINE))
    options = [f"-D{key}={cache[key]}" for key in ("SMP_PYTHON", "SMP_WITH_MPI", "SMP_UNITY_BUILD") if key in cache]
    code, said = tree.run("cmake", "--preset", "release", *options)
    if code != 0:
        sys.exit(said)
    return tree


def outcome(tree, fault):
    """One word, and what was printed where it is not "found"."""
    code, said = tree.patch(fault)
    if code != 0:
        return "does not apply", said
    try:
        code, said = tree.compile(fault.target)
        if code != 0:
            return "does not compile", said
        passed, said = tree.test(fault.test)
        return ("NOT FOUND", "") if passed else ("found", "")
    finally:
        tree.patch(fault, "--reverse")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--here", action="store_true")
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("faults", nargs="*")
    arguments = parser.parse_args()
    names = arguments.faults or sorted(patch.stem for patch in FOLDER.glob("*.patch"))
    faults = [Fault(name) for name in names]
    build = arguments.build.resolve()
    tree = Tree(ROOT, build) if arguments.here else configured_copy(build)

    print(f"faults: {len(faults)}; first the tests without them", flush=True)
    code, said = tree.compile(*{fault.target for fault in faults})
    if code != 0:
        sys.exit(said)
    fails_anyway = {}
    for test in sorted({fault.test for fault in faults}):
        passed, said = tree.test(test)
        if not passed:
            fails_anyway[test] = said
    counts = collections.Counter()
    for fault in faults:
        word, said = ("its test fails anyway", fails_anyway[fault.test]) if fault.test in fails_anyway else outcome(tree, fault)
        counts[word] += 1
        print(f"{fault.name}: {word} by {fault.test} ({fault.room}: {fault.what})", said[-3000:], sep="\n" if said else "",
              flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    sys.exit(0 if counts.keys() == {"found"} else 1)


if __name__ == "__main__":
    main()
