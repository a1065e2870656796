# Under pip (pyproject.toml): which torch, and how many compilations at once.
if(NOT SMP_PYTHON)
  set(SMP_PYTHON "${Python_EXECUTABLE}" CACHE FILEPATH "Python interpreter whose torch wheel is used" FORCE)
endif()

# pip builds with the interpreter that it installs for, and hides that one's packages by two variables alone.
set(ask "${SMP_PYTHON}" -c "from importlib.metadata import version\nversion('torch')")
execute_process(COMMAND ${ask} RESULT_VARIABLE has_none ERROR_QUIET)
if(has_none)
  unset(ENV{PYTHONPATH})
  unset(ENV{PYTHONNOUSERSITE})
  execute_process(COMMAND ${ask} RESULT_VARIABLE has_none ERROR_QUIET)
endif()
if(has_none)
  message(FATAL_ERROR "smp: expected torch in the environment that smp is installed into, got none in ${SMP_PYTHON}. "
    "Install it before:\n  pip install torch==2.11.0\nIf it is there, the installer hides it from the build. Then:\n"
    "  pip install scikit-build-core\n  pip install --no-build-isolation .")
endif()

# A compilation with LibTorch's headers takes 1.3 GB, and Ninja would start two more than there are cores.
cmake_host_system_information(RESULT memory_mib QUERY TOTAL_PHYSICAL_MEMORY)
cmake_host_system_information(RESULT num_jobs QUERY NUMBER_OF_LOGICAL_CORES)
math(EXPR num_fitting "${memory_mib} / 1536 + 1")
if(num_fitting LESS num_jobs)
  set(num_jobs ${num_fitting})
endif()
set_property(GLOBAL PROPERTY JOB_POOLS compilations=${num_jobs})
set(CMAKE_JOB_POOL_COMPILE compilations)
