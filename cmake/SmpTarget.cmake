# How our own targets are compiled. Nothing here reaches a consumer.

# Warnings are errors in our code only: LibTorch, MPI and Boost come in as system headers.
function(smp_compile_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Werror ${SMP_CCACHE_FLAGS})
endfunction()

# smp_add_program(name SOURCES a.cpp ... [LIBS target ...]): one program in bin/.
function(smp_add_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBS")
  add_executable(${name} ${arg_SOURCES})
  smp_compile_options(${name})
  target_link_libraries(${name} PRIVATE ${arg_LIBS})
endfunction()

# Lets a library of which no source file exists yet configure and link.
function(smp_until_first_source target)
  get_target_property(sources ${target} SOURCES)
  if(NOT sources)
    set(empty "${CMAKE_CURRENT_BINARY_DIR}/${target}_empty.cpp")
    file(CONFIGURE OUTPUT "${empty}" CONTENT "namespace {}\n")
    target_sources(${target} PRIVATE "${empty}")
  endif()
endfunction()
