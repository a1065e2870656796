# Finds LibTorch inside an installed torch wheel and offers it as imported targets.
#
# The wheel's own find_package(Torch) demands nvcc even of CPU-only users and links libtorch.so, which
# loads all of CUDA (340 MB per process instead of 110). Hence our own targets: torch_wheel::cpu links
# libtorch_cpu and libc10 and nothing else.
#
# Input:  SMP_PYTHON        interpreter whose torch is used; the user's choice, kept in the cache.
#         SMP_PYTHON_HINTS  tried, if they exist, before the python3 in PATH (our .venv; in an installed
#                           smp, the interpreter that it was built with).
# Output: torch_wheel::cpu, torch_wheel::c10, TorchWheel_VERSION, TorchWheel_DIR; torch_wheel::cuda where the wheel has CUDA and
#         the headers of CUDA's runtime are there, from the wheel's own dependencies or from the toolkit; torch_wheel::nccl
#         where the NCCL of the wheel's dependencies is there, too.
if(SMP_PYTHON MATCHES "^[^/]+/")  # a relative path is one from where cmake was called
  set(SMP_PYTHON "${SMP_PYTHON}" CACHE FILEPATH "Python interpreter whose torch wheel is used")
endif()
if(NOT SMP_PYTHON)
  foreach(_smp_hint IN LISTS SMP_PYTHON_HINTS)
    if(EXISTS "${_smp_hint}" AND NOT SMP_PYTHON)
      set(SMP_PYTHON "${_smp_hint}" CACHE FILEPATH "Python interpreter whose torch wheel is used" FORCE)
    endif()
  endforeach()
  find_program(SMP_PYTHON NAMES python3 python DOC "Python interpreter whose torch wheel is used")
endif()

execute_process(
  COMMAND "${SMP_PYTHON}" -c
          "import importlib.util as u, importlib.metadata as m; s = u.find_spec('torch'); print(s.submodule_search_locations[0], m.version('torch'), sep=';')"
  WORKING_DIRECTORY "${CMAKE_CURRENT_LIST_DIR}"  # never a folder that has a torch/ in it
  OUTPUT_VARIABLE _torch_wheel
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
list(LENGTH _torch_wheel _torch_wheel_length)
set(TorchWheel_LIBRARY "TorchWheel_LIBRARY-NOTFOUND")
if(_torch_wheel_length EQUAL 2)
  list(GET _torch_wheel 0 TorchWheel_DIR)
  list(GET _torch_wheel 1 TorchWheel_VERSION)
  string(REGEX REPLACE "\\+.*" "" TorchWheel_VERSION "${TorchWheel_VERSION}")  # 2.11.0+cpu -> 2.11.0
  if(EXISTS "${TorchWheel_DIR}/lib/libtorch_cpu.so" AND EXISTS "${TorchWheel_DIR}/include/ATen/core/Tensor.h")
    set(TorchWheel_LIBRARY "${TorchWheel_DIR}/lib/libtorch_cpu.so")
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchWheel REQUIRED_VARS TorchWheel_LIBRARY VERSION_VAR TorchWheel_VERSION
  HANDLE_VERSION_RANGE
  REASON_FAILURE_MESSAGE "expected a torch with libraries and headers in '${SMP_PYTHON}': run `make build`, or pass -DSMP_PYTHON=/path/to/python of an environment that has it")

if(TorchWheel_FOUND AND NOT TARGET torch_wheel::cpu)
  add_library(torch_wheel::c10 SHARED IMPORTED)
  set_target_properties(torch_wheel::c10 PROPERTIES
    IMPORTED_LOCATION "${TorchWheel_DIR}/lib/libc10.so"
    INTERFACE_COMPILE_FEATURES cxx_std_17
    INTERFACE_INCLUDE_DIRECTORIES "${TorchWheel_DIR}/include;${TorchWheel_DIR}/include/torch/csrc/api/include")
  add_library(torch_wheel::cpu SHARED IMPORTED)
  set_target_properties(torch_wheel::cpu PROPERTIES
    IMPORTED_LOCATION "${TorchWheel_LIBRARY}"
    INTERFACE_LINK_LIBRARIES torch_wheel::c10)
endif()

if(TorchWheel_FOUND AND NOT TARGET torch_wheel::cuda AND EXISTS "${TorchWheel_DIR}/lib/libtorch_cuda.so")
  file(GLOB _cuda_of_wheel "${TorchWheel_DIR}/../nvidia/cu[0-9]*")
  find_path(TorchWheel_CUDA_INCLUDE cuda_runtime_api.h HINTS ${_cuda_of_wheel} "$ENV{CUDA_HOME}" /usr/local/cuda PATH_SUFFIXES include)
  file(GLOB _cudart ${_cuda_of_wheel}/lib/libcudart.so.* "${TorchWheel_CUDA_INCLUDE}/../lib64/libcudart.so")
  if(TorchWheel_CUDA_INCLUDE AND _cudart)
    list(GET _cudart 0 _cudart)
    add_library(torch_wheel::cuda INTERFACE IMPORTED)
    target_include_directories(torch_wheel::cuda SYSTEM INTERFACE "${TorchWheel_CUDA_INCLUDE}")
    target_link_libraries(torch_wheel::cuda INTERFACE "${TorchWheel_DIR}/lib/libtorch_cuda.so"
      "${TorchWheel_DIR}/lib/libc10_cuda.so" "${_cudart}" torch_wheel::cpu)
    # The NCCL that this torch loads.
    set(_nccl "${TorchWheel_DIR}/../nvidia/nccl")
    if(EXISTS "${_nccl}/include/nccl.h" AND EXISTS "${_nccl}/lib/libnccl.so.2")
      add_library(torch_wheel::nccl INTERFACE IMPORTED)
      target_include_directories(torch_wheel::nccl SYSTEM INTERFACE "${_nccl}/include")
      target_link_libraries(torch_wheel::nccl INTERFACE "${_nccl}/lib/libnccl.so.2")
    endif()
  endif()
endif()
