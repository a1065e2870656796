// In the place of NVIDIA's driver, libcuda.so.1: it shows one GPU, or none, and can do nothing else.
extern "C" {
int smp_gpus_of_tests = 1;
int cuInit(unsigned /*flags*/) { return 0; }
int cuDeviceGetCount(int* count) {
  *count = smp_gpus_of_tests;
  return 0;
}
int cuDevicePrimaryCtxGetState(int /*device*/, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return 0;
}
}
