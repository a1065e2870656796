// What tests ask of CUDA and NCCL where they are none.
#pragma once

#include <string>
#include <vector>

namespace smp::fake_cuda {

/// What streams were given and have not done, of all streams.
size_t num_undone();
/// The link of the transfer that comes behind so many breaks; -1: none.
void fail_after(int num_transfers);
/// That have not ended.
int num_communicators();
/// Uses against the rules of either interface since the last call.
std::vector<std::string> take_problems();

}  // namespace smp::fake_cuda
