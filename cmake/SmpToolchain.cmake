# ccache and mold when this machine has them; only for our own builds, never imposed on a parent project.
# Output: SMP_CCACHE_FLAGS for our compilations, SMP_CCACHE_ENVIRONMENT for the consumers' in the tests.
if(NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()

set(SMP_CCACHE_FLAGS "")
set(SMP_CCACHE_ENVIRONMENT "")
find_program(SMP_CCACHE ccache)
set(ccache_settings "")
if(SMP_CCACHE AND (NOT CMAKE_CXX_COMPILER_LAUNCHER OR CMAKE_CXX_COMPILER_LAUNCHER STREQUAL "ccache"))
  # Without this sloppiness ccache refuses every file that uses a precompiled header; the base
  # directory lets two build folders, and two clones, share their objects.
  set(ccache_settings "CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}"
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime)
  # One compilation tells whether ccache works here: with a folder that it cannot write, none would. It
  # is a new one each time, since what the folder holds already could be read.
  set(probe "${PROJECT_BINARY_DIR}/ccache_probe")
  string(TIMESTAMP now "%s %f")
  file(WRITE "${probe}.cpp" "extern const char configured[] = \"${now}\";\n")
  execute_process(
    COMMAND "${CMAKE_COMMAND}" -E env ${ccache_settings} "${SMP_CCACHE}"
      "${CMAKE_CXX_COMPILER}" -c "${probe}.cpp" -o "${probe}.o"
    RESULT_VARIABLE ccache_result OUTPUT_QUIET ERROR_VARIABLE ccache_error)
  if(NOT ccache_result EQUAL 0)
    string(STRIP "${ccache_error}" ccache_error)
    message(STATUS "smp: without ccache, which cannot compile here: ${ccache_error}")
    set(ccache_settings "")
    unset(CMAKE_CXX_COMPILER_LAUNCHER)
    unset(CMAKE_CXX_COMPILER_LAUNCHER CACHE)
  endif()
endif()
if(ccache_settings)
  set(SMP_CCACHE_ENVIRONMENT ${ccache_settings} "CMAKE_CXX_COMPILER_LAUNCHER=${SMP_CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env ${ccache_settings} "${SMP_CCACHE}")
  set(SMP_CCACHE_FLAGS -fpch-preprocess)
endif()

find_program(SMP_MOLD mold)
if(SMP_MOLD AND EXISTS "${SMP_MOLD}")
  add_link_options(-fuse-ld=mold)
endif()
