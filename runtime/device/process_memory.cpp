// glibc's settings; other C libraries keep theirs.
#include "runtime/device/process_memory.h"

#include <cstdlib>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace smp::runtime {

void keep_freed_memory() {
#ifdef __GLIBC__
  constexpr int kLargestOnTheHeap = 1 << 30;
  mallopt(M_MMAP_THRESHOLD, kLargestOnTheHeap);
  mallopt(M_TRIM_THRESHOLD, -1);  // never
#endif
}

}  // namespace smp::runtime
