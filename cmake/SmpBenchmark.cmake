# smp_add_benchmark: a program of measurements, and the list by which `make bench [ONLY=name]` runs them.
set_property(GLOBAL PROPERTY SMP_BENCHMARKS "")
add_custom_target(smp_benchmarks)

# smp_add_benchmark(program SOURCES a.cpp ... MEASURES name ... [LIBS target ...] [RANKS n ...])
# `program name` prints "name value unit" for each of MEASURES. With RANKS, one number for all measures or
# one for each, it runs on so many processes, and exists only where MPI was found and the program smp, which
# starts it, is built. Built by the target smp_benchmarks, and not by all: no test runs it.
function(smp_add_benchmark program)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBS;MEASURES;RANKS")
  if(NOT arg_SOURCES OR NOT arg_MEASURES OR arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "smp_add_benchmark(${program}): expected SOURCES, MEASURES and known keywords, got '${ARGN}'")
  endif()
  if(arg_RANKS AND NOT (SMP_HAVE_MPI AND SMP_BUILD_TOOLS))
    return()
  endif()
  smp_add_program(${program} SOURCES ${arg_SOURCES} LIBS ${arg_LIBS})
  set_target_properties(${program} PROPERTIES EXCLUDE_FROM_ALL ON)
  add_dependencies(smp_benchmarks ${program})
  foreach(measure IN LISTS arg_MEASURES)
    set(command "'$<TARGET_FILE:${program}>' ${measure}")
    if(arg_RANKS)
      list(POP_FRONT arg_RANKS ranks)
      list(LENGTH arg_RANKS num_left)
      if(num_left EQUAL 0)
        set(arg_RANKS ${ranks})
      endif()
      set(command "'$<TARGET_FILE:smp_program>' run -np ${ranks} ${command}")
    endif()
    set_property(GLOBAL APPEND_STRING PROPERTY SMP_BENCHMARKS "${measure} ${command}\n")
  endforeach()
endfunction()

# Writes build/<preset>/benchmarks.txt; called once, after the last benchmark.
function(smp_write_benchmark_list)
  get_property(benchmarks GLOBAL PROPERTY SMP_BENCHMARKS)
  file(GENERATE OUTPUT "${PROJECT_BINARY_DIR}/benchmarks.txt" CONTENT "${benchmarks}")
endfunction()
