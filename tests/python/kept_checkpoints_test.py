"""Which checkpoints of a folder go, and what is not theirs."""

import os
import unittest

import support
from checkpoint_test import Run, on_rank_0, setUpModule, shared_folder  # noqa: F401

import smdistributed.modelparallel.torch as smp


def make_others(path):
    """A file of another user, or where that takes rights of root, a FIFO."""
    if os.path.lexists(path):
        os.unlink(path)
    if os.geteuid() != 0:
        return os.mkfifo(path)
    open(path, "w").close()
    os.chown(path, 12345, -1)


class KeptCheckpoints(unittest.TestCase):
    def test_go_when_there_are_more(self):
        with shared_folder() as folder:
            run = Run()
            for tag in "abc":
                on_rank_0(lambda: [os.mkdir(f"{folder}/.{name}") for name in ("x_partial.tmp", "a_partial.old")])
                run.save(folder, tag, user_content=tag, num_kept_partial_checkpoints=2)
            self.assertEqual(sorted(os.listdir(folder)), ["b_partial", "c_partial", "newest"])
            self.assertEqual(run.resume(folder, None), "c")

    def test_that_go_leave_what_is_not_theirs(self):
        with shared_folder() as folder:
            run = Run()
            run.save(folder, "a")


            def put_others():
                os.mkdir(f"{folder}/a_partial/metrics")
                os.mkdir(f"{folder}/a_partial/model_8_0.pt")
                make_others(f"{folder}/a_partial/model_9_0.pt")

            on_rank_0(put_others)
            run.save(folder, "b", num_kept_partial_checkpoints=1)
            self.assertEqual(sorted(os.listdir(f"{folder}/a_partial")), ["metrics", "model_8_0.pt", "model_9_0.pt"])

    def test_are_regular_files_of_this_user(self):
        with shared_folder() as folder:
            run = Run()
            run.save(folder)

            def put_others():
                for part in range(smp.pp_size()):
                    os.unlink(f"{folder}/a_partial/model_{part}_0.pt")
                    os.mkfifo(f"{folder}/a_partial/model_{part}_0.pt")
                os.mkfifo(f"{folder}/whole")
                os.symlink("/dev/null", f"{folder}/other")
                make_others(f"{folder}/newest")

            on_rank_0(put_others)
            with self.assertRaisesRegex(OSError, "expected a regular file at .*model_0_0.pt"):
                run.resume(folder)
            with self.assertRaisesRegex(OSError, "of this user at .*newest'"):
                run.save(folder, "b")
            on_rank_0(lambda: os.unlink(f"{folder}/newest"))
            for tag in ("whole", "other"):
                with self.assertRaisesRegex(OSError, f"expected nothing or a regular file of this user at .*{tag}'"):
                    run.save(folder, tag, partial=False)
            self.assertEqual(sorted(os.listdir(folder)), ["a_partial", "other", "whole"])

    def test_keep_what_is_not_theirs(self):
        with shared_folder() as folder:
            run = Run()
            run.save(folder)
            on_rank_0(lambda: smp.save("mine", f"{folder}/a_partial/scheduler.pt", partial=False))
            run.save(folder, user_content="again")
            self.assertEqual(run.resume(folder), "again")
            self.assertEqual(smp.load(f"{folder}/a_partial/scheduler.pt", partial=False), "mine")


if __name__ == "__main__":
    support.main()
