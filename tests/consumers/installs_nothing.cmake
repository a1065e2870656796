# Installs BUILD under PREFIX, and fails if anything arrives there.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE "${PREFIX}")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${PREFIX}" COMMAND_ERROR_IS_FATAL ANY)
file(GLOB_RECURSE files RELATIVE "${PREFIX}" "${PREFIX}/*")
if(files)
  message(FATAL_ERROR "install: expected nothing of smp in the installation of a project that vendors it, got ${files}. "
    "Let SMP_INSTALL be off unless smp is the top-level project.")
endif()
