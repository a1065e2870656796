// In the place of NVIDIA's driver, libcuda.so.1: it shows one GPU, and can do nothing else.
extern "C" int cuInit(unsigned /*flags*/) { return 0; }
extern "C" int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
