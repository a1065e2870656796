# What `cmake --install` puts under a prefix: libraries, public headers, the package files, bin/smp.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/smp")

set(targets smp)
if(NOT BUILD_SHARED_LIBS)
  list(APPEND targets smp_runtime smp_partitioner)
endif()
install(TARGETS ${targets} EXPORT smpTargets FILE_SET HEADERS)
install(EXPORT smpTargets NAMESPACE smp:: DESTINATION "${package_dir}")
if(SMP_HAVE_CUDA)
  install(TARGETS smp_cuda LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endif()
if(SMP_BUILD_TOOLS)
  install(TARGETS smp_program)
  if(NOT SKBUILD)
    install(TARGETS smp_doctor smp_selftest)
  endif()
endif()

# LibTorch's C++ ABI holds within one minor version: [2.11, 2.12).
string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" torch_minor "${TorchWheel_VERSION}")
math(EXPR next_minor "${CMAKE_MATCH_2} + 1")
set(SMP_TORCH_RANGE "${torch_minor}...<${CMAKE_MATCH_1}.${next_minor}")
if(NOT BUILD_SHARED_LIBS)
  set(BUILD_SHARED_LIBS OFF)
endif()
configure_package_config_file(cmake/smpConfig.cmake.in "${PROJECT_BINARY_DIR}/smpConfig.cmake"
  INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/smpConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/smpConfig.cmake" "${PROJECT_BINARY_DIR}/smpConfigVersion.cmake"
  cmake/FindTorchWheel.cmake DESTINATION "${package_dir}")
