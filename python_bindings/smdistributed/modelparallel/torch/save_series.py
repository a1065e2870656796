"""The saves of a run, one behind the other, of which a resumed run takes the newest that loads."""

import os

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch import state_files
from smdistributed.modelparallel.torch.agreement import agreed
from smdistributed.modelparallel.torch.checkpoint import of_checkpoints


class SaveSeries:
    """FOLDER/step_N holds the save behind step N, as save_state writes it; the newest num_kept stay, not counting those that
    the last resume() of this series has passed over. Make one on every rank; all its calls are collective over all ranks.

    on_each_host: not dp_rank() 0 writes, but each host what it has of each stage. In a folder of its own, as /dev/shm/run, a save
    outlives a host whose stages others have as well; resume() finds what is left where."""

    def __init__(self, folder, num_kept=2, *, on_each_host=False):
        self._folder = os.fspath(folder)
        self._series = _engine.SaveSeries(self._folder, num_kept, on_each_host)

    @of_checkpoints
    def save(self, step, model, user_content=None, *, optimizer=None, in_background=False):
        """save_state behind `step`, for which each rank needs the memory of its file a second time. In the background it returns
        when the state has been copied, and files are written while training goes on; what goes wrong comes with the next
        call."""
        models, optimizers = state_files.begin("SaveSeries.save", (self._folder, step), model, optimizer)
        states = agreed("SaveSeries.save", lambda: state_files.states_of(models, optimizers, user_content))
        self._series.save(step, *states, in_background)

    @of_checkpoints
    def finish(self):
        """Waits for files that are written in the background, and removes older saves. Belongs before the end of the script."""
        self._series.finish()

    @of_checkpoints
    def resume(self, model, *, optimizer=None):
        """load_state of the save with the highest step that loads: (step, user_content). None in a folder without finished saves.
        Others are passed over, and the log says why; ValueError where there are finished ones and none loads."""
        return SaveSeries.resume_newest([self], model, optimizer=optimizer)

    @staticmethod
    @of_checkpoints
    def resume_newest(series, model, *, optimizer=None):
        """The same over several series, of which the highest step counts: one in memory, one on the disk."""
        series = [*series]
        state_files.begin("SaveSeries.resume", [each._folder for each in series], model, optimizer)
        all_series = [each._series for each in series]
        return _engine.SaveSeries.resume(
            all_series, lambda folder: state_files.load_state(folder, model, optimizer=optimizer)
        )
