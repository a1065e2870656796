"""Saves that die between any two changes of their folder leave a whole checkpoint."""

import os
import tempfile

import support
from checkpoint_test import Case, Run, setUpModule  # noqa: F401


class Killed(BaseException):
    pass


class Kill:
    """From the n-th call of one that changes a folder on, none is made."""

    CALLS = ("replace", "rename", "unlink", "mkdir", "rmdir", "fsync")

    def __init__(self, after):
        self.left = after

    def __enter__(self):
        self.plain = {name: getattr(os, name) for name in self.CALLS}
        for name, call in self.plain.items():
            setattr(os, name, self.counting(call))

    def __exit__(self, *_):
        for name, call in self.plain.items():
            setattr(os, name, call)

    def counting(self, call):
        def counted(*args, **kwargs):
            if self.left == 0:
                raise Killed
            self.left -= 1
            return call(*args, **kwargs)

        return counted


class Interrupted(Case):
    def check(self, partial):
        old, new = Run(), Run()
        runs = {"old": old.model.state_dict(), "new": new.model.state_dict()}
        seen = []
        for after in range(100):
            with tempfile.TemporaryDirectory() as folder:
                old.save(folder, partial=partial, user_content="old")
                try:
                    with Kill(after):
                        new.save(folder, partial=partial, user_content="new")
                except Killed:
                    pass
                else:
                    break
                other = Run()
                seen.append(other.resume(folder, None, partial=partial))
                self.same(other.model.state_dict(), runs[seen[-1]], f"after {after} calls")
                old.save(folder, partial=partial, user_content="again")
                self.assertEqual(other.resume(folder, None, partial=partial), "again")
                self.assertFalse([name for name in os.listdir(folder) if name.startswith(".")])
        self.assertEqual(seen, sorted(seen, reverse=True))
        self.assertEqual(set(seen), {"old", "new"})

    def test_saves_leave_the_old_or_the_new(self):
        for partial in (True, False):
            with self.subTest(partial=partial):
                self.check(partial)


if __name__ == "__main__":
    support.main()
