# Finds LibTorch inside an installed torch wheel and offers it as imported targets.
#
# The wheel's own find_package(Torch) demands nvcc even of CPU-only users and links libtorch.so, which
# loads all of CUDA (340 MB per process instead of 110). Hence our own targets: torch_wheel::cpu links
# libtorch_cpu and libc10 and nothing else.
#
# Input:  SMP_PYTHON, the interpreter whose torch is used (default: .venv in the source tree, then python3).
# Output: torch_wheel::cpu, TorchWheel_VERSION, TorchWheel_DIR.
if(NOT SMP_PYTHON)
  if(EXISTS "${CMAKE_CURRENT_LIST_DIR}/../.venv/bin/python")
    get_filename_component(_smp_python "${CMAKE_CURRENT_LIST_DIR}/../.venv/bin/python" ABSOLUTE)
  else()
    find_program(_smp_python NAMES python3 python)
  endif()
  set(SMP_PYTHON "${_smp_python}" CACHE FILEPATH "Python interpreter whose torch wheel is used" FORCE)
endif()

execute_process(
  COMMAND "${SMP_PYTHON}" -c
          "import importlib.util as u, importlib.metadata as m; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '', m.version('torch') if s else '', sep=';')"
  OUTPUT_VARIABLE _torch_wheel
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
list(LENGTH _torch_wheel _torch_wheel_length)
if(_torch_wheel_length EQUAL 2)
  list(GET _torch_wheel 0 TorchWheel_DIR)
  list(GET _torch_wheel 1 TorchWheel_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TorchWheel REQUIRED_VARS TorchWheel_DIR VERSION_VAR TorchWheel_VERSION
  REASON_FAILURE_MESSAGE "no torch in ${SMP_PYTHON}: pass -DSMP_PYTHON=/path/to/python with torch installed, or run 'make build'")

if(TorchWheel_FOUND AND NOT TARGET torch_wheel::cpu)
  add_library(torch_wheel::c10 SHARED IMPORTED)
  set_target_properties(torch_wheel::c10 PROPERTIES
    IMPORTED_LOCATION "${TorchWheel_DIR}/lib/libc10.so"
    INTERFACE_INCLUDE_DIRECTORIES "${TorchWheel_DIR}/include;${TorchWheel_DIR}/include/torch/csrc/api/include")
  add_library(torch_wheel::cpu SHARED IMPORTED)
  set_target_properties(torch_wheel::cpu PROPERTIES
    IMPORTED_LOCATION "${TorchWheel_DIR}/lib/libtorch_cpu.so"
    INTERFACE_LINK_LIBRARIES torch_wheel::c10)
endif()
