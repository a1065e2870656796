"""Which checkpoints of a folder go, and what is not theirs."""

import os
import shutil
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
            on_rank_0(lambda: os.mkdir(f"{folder}/.x_partial.tmp"))  # that somebody may be writing
            for tag in "abc":
                on_rank_0(lambda: os.mkdir(f"{folder}/.a_partial.old"))
                run.save(folder, tag, user_content=tag, num_kept_partial_checkpoints=2)
                on_rank_0(lambda: shutil.rmtree(f"{folder}/.a_partial.old", ignore_errors=True))
            self.assertEqual(sorted(os.listdir(folder)), [".x_partial.tmp", "b_partial", "c_partial", "newest"])
            self.assertEqual(run.resume(folder, None), "c")

    def test_of_others_stay_and_are_not_replaced(self):
        with shared_folder() as folder:
            run = Run()
            for tag in "abc":
                run.save(folder, tag)

            def give_away():
                make_others(f"{folder}/a_partial/user_content.pt")
                os.mkdir(f"{folder}/d_partial")
                if os.geteuid() == 0:
                    os.chown(f"{folder}/d_partial", 12345, -1)
                os.mkdir(f"{folder}/b_partial/model_8_0.pt")
                os.mkdir(f"{folder}/c_partial/metrics")
                if os.geteuid() == 0:
                    os.chown(f"{folder}/c_partial/metrics", 12345, -1)

            on_rank_0(give_away)
            refused = ["of this user at .*user_content.pt", "at .*model_8_0.pt.*got another kind"]
            refused += ["got .*metrics' of another user", "at .*d_partial.*one of user 12345"] if os.geteuid() == 0 else []
            for tag, text in zip("abcd", refused):
                with self.assertRaisesRegex(OSError, text):
                    run.save(folder, tag)
            run.save(folder, "e", num_kept_partial_checkpoints=1)
            self.assertEqual(sorted(os.listdir(f"{folder}/b_partial")), ["model_8_0.pt"])
            self.assertIn("user_content.pt", os.listdir(f"{folder}/a_partial"))
            self.assertTrue(os.path.isdir(f"{folder}/d_partial"))

    def test_are_resumed_from_the_newest_of_their_kind(self):
        with shared_folder() as folder:
            run = Run()
            run.save(folder, "model", partial=False, user_content=50)
            self.assertEqual(run.resume(folder, None, partial=False), 50)
            with self.assertRaisesRegex(ValueError, "expected '.*newest' to name a partial checkpoint, got 'model'"):
                run.resume(folder, None)
            run.save(folder, "best", user_content=100)
            run.save(folder, "step_400", user_content=400)
            run.save(folder, "best", partial=False, user_content=500)
            self.assertEqual(run.resume(folder, None), 400)
            self.assertEqual(run.resume(folder, "step_400_partial"), 400)
            self.assertEqual(run.resume(folder, "best", partial=False), 500)
            with self.assertRaisesRegex(ValueError, "whole checkpoint, got 'step_400_partial'"):
                run.resume(folder, None, partial=False)

    def test_that_go_leave_no_older_one_behind(self):
        with shared_folder() as folder:
            run = Run()
            run.save(folder, "a", user_content="old")
            on_rank_0(lambda: shutil.copytree(f"{folder}/a_partial", f"{folder}/.a_partial.old"))
            run.save(folder, "b", num_kept_partial_checkpoints=1)
            self.assertEqual(sorted(os.listdir(folder)), ["b_partial", "newest"])

            smp.barrier()  # until each has looked

            def put_others():
                os.mkdir(f"{folder}/.b_partial.old")
                make_others(f"{folder}/.b_partial.old/model_0_0.pt")

            on_rank_0(put_others)
            run.save(folder, "c", num_kept_partial_checkpoints=1)
            self.assertEqual(sorted(os.listdir(folder)), [".b_partial.old", "b_partial", "c_partial", "newest"])
            self.assertEqual(run.resume(folder, "b"), None)

    def test_that_wait_for_their_name_are_newest(self):
        with shared_folder() as folder:
            run = Run()
            run.save(folder, "a", user_content=1)
            on_rank_0(lambda: os.rename(f"{folder}/a_partial", f"{folder}/.a_partial.old"))  # killed between the two
            run.save(folder, "model", partial=False)
            self.assertEqual(run.resume(folder, None), 1)

    def test_take_no_content_that_others_have_put_there(self):
        with shared_folder() as folder:
            run = Run()
            for tag in "ab":
                run.save(folder, tag, partial=False, user_content=tag)
            waiting = f"{folder}/.user_content_a.0.tmp"
            on_rank_0(lambda: os.symlink(f"{folder}/user_content_b", waiting))
            self.assertEqual(run.resume(folder, "a", partial=False), "a")
            on_rank_0(lambda: make_others(waiting))
            self.assertEqual(run.resume(folder, "a", partial=False), "a")
            run.save(folder, "a", partial=False, user_content="again")
            self.assertEqual(run.resume(folder, "a", partial=False), "again")
            on_rank_0(lambda: [os.unlink(f"{folder}/user_content_a"), os.mkfifo(f"{folder}/user_content_a")])
            with self.assertRaisesRegex(OSError, "expected a regular file at .*user_content_a'"):
                run.resume(folder, "a", partial=False)

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
