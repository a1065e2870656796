# Installs BUILD under one prefix and moves it to PREFIX, so that an absolute path in the package breaks
# the consumer. Fails if a header outside the public ones was installed.
cmake_minimum_required(VERSION 3.25)
file(REMOVE_RECURSE "${PREFIX}" "${PREFIX}.staged")
execute_process(COMMAND "${CMAKE_COMMAND}" --install "${BUILD}" --prefix "${PREFIX}.staged"
  COMMAND_ERROR_IS_FATAL ANY)
file(RENAME "${PREFIX}.staged" "${PREFIX}")

file(GLOB_RECURSE headers RELATIVE "${PREFIX}/include" "${PREFIX}/include/*")
foreach(header IN LISTS headers)
  if(NOT header MATCHES "^smp/" OR header MATCHES "^smp/engine/")
    message(FATAL_ERROR "install: expected public headers (smp/*.h) only, got ${header}. Take it out of "
      "the file set in smp/CMakeLists.txt.")
  endif()
endforeach()
if(NOT "smp/version.h" IN_LIST headers)
  message(FATAL_ERROR "install: expected smp/version.h under ${PREFIX}/include, got '${headers}'")
endif()
