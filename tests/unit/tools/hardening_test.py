"""That programs and libraries are linked as SECURITY.md says.

Usage: hardening_test.py FILE ...
"""

import subprocess
import sys
import unittest


def readelf(option, file):
    return subprocess.run(["readelf", "-W", option, file], check=True, capture_output=True, text=True).stdout


class Hardening(unittest.TestCase):
    def test_is_on(self):
        for file in FILES:
            with self.subTest(file):
                self.assertRegex(readelf("-h", file), r"Type: +DYN")
                self.assertIn("GNU_RELRO", readelf("-l", file))
                self.assertRegex(readelf("-d", file), r"\(FLAGS\) +BIND_NOW")
                self.assertIn("__stack_chk_fail", readelf("--dyn-syms", file))


if __name__ == "__main__":
    FILES = [file for file in sys.argv[1:] if file]  # without Python there is one
    unittest.main(argv=["test"], verbosity=2)
