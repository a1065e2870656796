# smp_add_test: one GoogleTest program in bin/, one CTest entry per program and number of ranks.
find_package(GTest REQUIRED)

# No settings of Open MPI: the library makes its own, and a bare mpirun is what the tests have to prove.
set(SMP_MPI_TEST_FLAGS --oversubscribe --bind-to none)
set(SMP_MPI_TEST_ENVIRONMENT OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1)

# How many times slower this build is, on this machine as it now is, than a release build on the two idle cores that
# time limits are written for; at least 1. `make test` configures first, and so measures just before the tests.
set(calibration "${PROJECT_BINARY_DIR}/calibration")
string(TOUPPER "${CMAKE_BUILD_TYPE}" build_type)
separate_arguments(calibration_flags UNIX_COMMAND "${CMAKE_CXX_FLAGS} ${CMAKE_CXX_FLAGS_${build_type}}")
execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -std=c++20 -pthread ${calibration_flags}
  "${CMAKE_CURRENT_LIST_DIR}/calibration.cpp" -o "${calibration}" COMMAND_ERROR_IS_FATAL ANY)
string(TIMESTAMP begin "%s%f")
execute_process(COMMAND "${calibration}" COMMAND "${calibration}" COMMAND_ERROR_IS_FATAL ANY)  # both at once
string(TIMESTAMP end "%s%f")
math(EXPR SMP_TEST_SLOWNESS "(${end} - ${begin} + 699999) / 700000")
message(STATUS "smp: time limits of tests are multiplied by ${SMP_TEST_SLOWNESS}")

# smp_scale_time_limits(): the last line of a folder's tests. Multiplies their limits, and tells the tests, which have
# limits of their own inside, by how much.
function(smp_scale_time_limits)
  get_property(tests DIRECTORY PROPERTY TESTS)
  foreach(test IN LISTS tests)
    get_property(limit TEST ${test} PROPERTY TIMEOUT)
    if(NOT limit)
      set(limit 300)
    endif()
    math(EXPR limit "${limit} * ${SMP_TEST_SLOWNESS}")
    set_property(TEST ${test} PROPERTY TIMEOUT ${limit})
    set_property(TEST ${test} APPEND PROPERTY ENVIRONMENT "SMP_TEST_SLOWNESS=${SMP_TEST_SLOWNESS}")
  endforeach()
endfunction()

# smp_long_tests(test ...): leaves them to `make test-long`. They run in their long form, where they have two.
function(smp_long_tests)
  set_property(TEST ${ARGN} APPEND PROPERTY LABELS long)
  set_property(TEST ${ARGN} APPEND PROPERTY ENVIRONMENT SMP_TEST_LONG=1)
endfunction()

# smp_forms(forms name LONG): NAME, and NAME_long where LONG is true. smp_end_forms(form ...), once those are tests.
function(smp_forms forms name has_long)
  set(names ${name})
  if(has_long)
    list(APPEND names ${name}_long)
  endif()
  set(${forms} ${names} PARENT_SCOPE)
endfunction()
function(smp_end_forms name)
  if(ARGN)
    smp_long_tests(${ARGN})
  endif()
endfunction()

# smp_add_test(name SOURCES a_test.cpp ... [LIBS target ...] [LABELS unit|mpi|slow ...] [RANKS n ...] [TIMEOUT s] [LONG])
#   LABELS   default: unit, or mpi when RANKS is given. A test with label mpi exists only where MPI was found. Tests whose
#            ranks are threads have the label loopback as well: ThreadSanitizer runs them.
#   RANKS    runs the program once per number, as <name>_np<n>, under mpirun on n processes of this machine.
#   TIMEOUT  seconds until CTest kills the test, multiplied as above; default 300.
#   LONG     runs the program a second time, as <name>_long, in the form that tests/support/long_form.h asks for.
# GoogleTest's main is linked unless a source brings its own. What links smp_test_support or smp_test_ranks reads most of
# torch/torch.h, and takes it precompiled.
function(smp_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "LONG" "TIMEOUT" "SOURCES;LIBS;LABELS;RANKS")
  if(NOT arg_SOURCES OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "smp_add_test(${name}): expected SOURCES and known keywords, got '${ARGN}'")
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS unit)
    if(arg_RANKS)
      set(arg_LABELS mpi)
    endif()
  endif()
  if("smp_test_ranks" IN_LIST arg_LIBS OR arg_SOURCES MATCHES "support/loopback_world.cpp")
    list(APPEND arg_LABELS loopback)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 300)
  endif()
  if("mpi" IN_LIST arg_LABELS AND NOT SMP_HAVE_MPI)
    return()
  endif()

  smp_add_program(${name} SOURCES ${arg_SOURCES} LIBS ${arg_LIBS} GTest::gtest GTest::gtest_main)
  if(arg_LIBS MATCHES "smp_test_(support|ranks)")
    smp_use_torch_pch(${name})
  endif()
  if(NOT arg_RANKS)
    smp_forms(forms ${name} ${arg_LONG})
    foreach(form IN LISTS forms)
      add_test(NAME ${form} COMMAND ${name} --gtest_brief=1)
      set_tests_properties(${form} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
        ENVIRONMENT OMP_NUM_THREADS=1)
    endforeach()
    smp_end_forms(${forms})
  endif()
  foreach(ranks IN LISTS arg_RANKS)
    add_test(NAME ${name}_np${ranks}
      COMMAND "${MPIEXEC_EXECUTABLE}" -np ${ranks} ${SMP_MPI_TEST_FLAGS} $<TARGET_FILE:${name}> --gtest_brief=1)
    set_tests_properties(${name}_np${ranks} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
      PROCESSORS ${ranks} ENVIRONMENT "${SMP_MPI_TEST_ENVIRONMENT}")
  endforeach()
endfunction()
