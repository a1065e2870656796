"""Runs the demo for a few steps: it says where to look, and there it is.

  demo_test.py DEMO BUILD
"""

import pathlib
import re
import subprocess
import sys
import tempfile


def main():
    demo, build = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        command = [demo, build, folder, "--steps", "12", "--no-evaluation"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        said = done.stdout.split("demo: what to look at next\n")[1]
        for name, start in (("timeline.svg", "<?xml"), ("timeline.json", "{"), ("steps.jsonl", "{"), ("output.txt", "")):
            path = re.search(rf"^  (\S+/{name}) ", said, re.MULTILINE).group(1)
            text = pathlib.Path(path).read_text()
            assert text.startswith(start) and text, f"{path}: expected it to start with {start}, got {text[:80]!r}"
        table = re.search(r"^    stage \| rank \| modules", said, re.MULTILINE)
        assert table, f"expected the partition's table, got:\n{said}"


if __name__ == "__main__":
    main()
