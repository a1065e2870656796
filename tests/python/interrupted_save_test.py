"""Saves that are killed at any call that changes files, or to which the system refuses one, leave a whole checkpoint."""

import contextlib
import ctypes
import errno
import functools
import os
import platform
import signal
import tempfile
import unittest

import support
from checkpoint_test import Case, Run, setUpModule  # noqa: F401

KILLS = 0
FAULTS = ctypes.CDLL(os.environ["SYSTEM_FAULTS"])  # tests/support/system_faults.h


def run_with_fault(number, error, work):
    """work() in a child, to whose n-th call that changes files this happens: whether there was one, and whether it ended well."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # no tracebacks
            FAULTS.smp_let_parent_trace()
            os.kill(os.getpid(), signal.SIGUSR1)  # counts from here
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    ended = FAULTS.smp_trace_with_fault(child, number, error)
    if ended < 0:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise AssertionError(f"the child of call {number} and error {error} has not ended as it should")
    return bool(ended & 1), bool(ended & 2)


class Interrupted(Case):
    @staticmethod
    def kept(partial):
        return {"num_kept_partial_checkpoints": 1} if partial else {}

    def check(self, partial, errors):
        old, new = Run(), Run()
        runs = {"old": old.model.state_dict(), "new": new.model.state_dict()}
        seen = []
        has_come, number = True, 0
        while has_come:
            number += 1
            with self.subTest(call=number), tempfile.TemporaryDirectory() as folder:
                has_come = False  # unless it is said below
                old.save(folder, "z", partial=partial, user_content="older")
                old.save(folder, partial=partial, user_content="old")
                work = functools.partial(new.save, folder, partial=partial, user_content="new", **self.kept(partial))
                has_come, is_well = run_with_fault(number, errors[number % len(errors)], work)
                self.assertTrue(has_come or is_well)
                other = Run()
                seen.append(other.resume(folder, None, partial=partial))
                self.same(other.model.state_dict(), runs[seen[-1]], "what was found")
                self.assertTrue(seen[-1] == "new" or not is_well)
                old.save(folder, partial=partial, user_content="again", **self.kept(partial))
                self.assertEqual(other.resume(folder, None, partial=partial), "again")
                self.assertFalse([name for name in os.listdir(folder) if name.startswith(".")])
                self.assertFalse(partial and os.path.exists(f"{folder}/z_partial/user_content.pt"))
        self.assertGreater(number, 15)
        self.assertEqual(set(seen), {"old", "new"})
        if errors == [KILLS]:
            self.assertEqual(seen, sorted(seen, reverse=True))  # "old" until the call that decides

    def test_killed_at_any_call_they_leave_the_old_or_the_new(self):
        for partial in (True, False):
            with self.subTest(partial=partial):
                self.check(partial, [KILLS])

    @unittest.skipUnless(platform.machine() == "x86_64", "calls are refused in the registers of x86-64")
    def test_on_a_disk_that_is_full_or_fails_they_leave_the_old_or_the_new(self):
        for partial in (True, False):
            with self.subTest(partial=partial):
                self.check(partial, [errno.ENOSPC, errno.EIO, errno.EDQUOT])


if __name__ == "__main__":
    support.main()
