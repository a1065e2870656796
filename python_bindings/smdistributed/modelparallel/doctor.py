"""python -m smdistributed.modelparallel.doctor: smp.doctor() of a job that does nothing else; under mpirun on all its ranks."""

import smdistributed.modelparallel.torch as smp

if __name__ == "__main__":
    smp.init({"log_level": "warning"})
    smp.doctor()
