# How our own targets are compiled. Nothing here reaches a consumer.

# LibTorch's headers cost 2 to 5 s in every file, precompiled ones too: read once for a batch of files, a whole build
# takes a third of the time (docs/building.md). Whoever changes a file compiles its batch again, hence the switch.
option(SMP_UNITY_BUILD "Compile the files of a target in batches" ON)

# Warnings are errors in our code only: LibTorch, MPI and Boost come in as system headers.
function(smp_compile_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Werror ${SMP_CCACHE_FLAGS})
  # A write past the end of a buffer ends the program, and addresses of functions are no memory that can be written
  # (SECURITY.md). g++ wants optimisation for the second; sanitizers see more than it.
  target_compile_options(${target} PRIVATE -fstack-protector-strong
    "$<$<CONFIG:Release>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=3>")
  target_link_options(${target} PRIVATE -Wl,-z,relro,-z,now)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${SMP_UNITY_BUILD} UNITY_BUILD_BATCH_SIZE 16)
  if(SMP_UNITY_BUILD)
    # g++ takes a file of a batch for a header, where a class with members of an anonymous namespace is a mistake.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()

# smp_add_program(name SOURCES a.cpp ... [LIBS target ...]): one program in bin/.
function(smp_add_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;LIBS")
  add_executable(${name} ${arg_SOURCES})
  smp_compile_options(${name})
  target_link_libraries(${name} PRIVATE ${arg_LIBS})
endfunction()

# One precompiled <torch/torch.h> for all tests and examples that include it: 34 s and 720 MB once, then
# 8 s instead of 19 s for each file (g++ 12, -O2, torch 2.11). Files of a target that do without that
# header get no faster, so keep them in a target of their own.
function(smp_use_torch_pch target)
  if(NOT TARGET smp_torch_pch)
    set(unit "${PROJECT_BINARY_DIR}/smp_torch_pch.cpp")
    file(CONFIGURE OUTPUT "${unit}" CONTENT "// Carries the precompiled <torch/torch.h>.\n")
    add_library(smp_torch_pch OBJECT "${unit}")
    target_link_libraries(smp_torch_pch PRIVATE torch_wheel::cpu)
    target_precompile_headers(smp_torch_pch PRIVATE <torch/torch.h>)
    smp_compile_options(smp_torch_pch)
    smp_compile_as_program(smp_torch_pch)
  endif()
  smp_compile_as_program(${target})
  target_precompile_headers(${target} REUSE_FROM smp_torch_pch)
endfunction()

# g++ rejects a precompiled header that was made with -fPIC in a file compiled with -fPIE.
function(smp_compile_as_program target)
  get_target_property(type ${target} TYPE)
  if(NOT type STREQUAL "EXECUTABLE")
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIE)
  endif()
endfunction()
